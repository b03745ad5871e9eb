"""Which loop the bare C copy uses: the fastest that this processor has, found in the same run, for each size and destination."""
from __future__ import annotations

from dataclasses import dataclass

from contenders import BareCopy
from measure import Medians, compare

from shmkv import _copy

ROUNDS = 15


@dataclass(frozen=True)
class Loop:
    """An entry of the kernel table and one of its two ways to store."""

    kernel: str
    streaming: bool

    def __str__(self) -> str:
        return f"{self.kernel}, {'streaming' if self.streaming else 'ordinary'}"


def loops() -> list[Loop]:
    """All that run here. "memcpy" is libc's and "c" is portable: those two store in one way only."""
    return [Loop(kernel, streaming) for kernel in _copy.supported_kernels() for streaming in (False, True)
            if not (streaming and kernel in ("c", "memcpy"))]


def library_choice(nbytes: int) -> Loop:
    """What a pull of so many bytes uses."""
    chosen = _copy.current()
    streaming = nbytes >= chosen["nt_threshold"] and chosen["kernel"] not in ("c", "memcpy")
    return Loop(chosen["kernel"], streaming)


def fastest(medians: Medians) -> str:
    return min(medians.samples, key=medians.__getitem__)


def choose(target: BareCopy, rounds: int, number: int = 1) -> Loop:
    """Let all loops copy the target's runs in turns; the fastest is the yardstick."""
    candidates = {str(loop): loop for loop in loops()}
    contenders = [target.bare(loop.kernel, loop.streaming, name) for name, loop in candidates.items()]
    return candidates[fastest(compare(contenders, rounds=rounds, number=number))]
