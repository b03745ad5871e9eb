"""The four workloads, and where their bytes land.

All are fp16 with 8 heads of 128: a token of one tensor has 2 KiB. Keys and values are tensors of their own, so a layer has two.
"""
from __future__ import annotations

import random
from dataclasses import dataclass

PAGE = 4096
HEADS, HEAD_SIZE, ELEMENT_NBYTES = 8, 128, 2
TOKEN_NBYTES = HEADS * HEAD_SIZE * ELEMENT_NBYTES

# Byte in its page at which each destination row begins: numpy's own, a segment's, torch's own.
DESTINATIONS = (16, 0, 64)

Runs = list[tuple[int, int, int]]


@dataclass(frozen=True)
class Workload:
    """`rounds` and `number`: how often all contenders take turns, and how often each pulls in its turn."""

    name: str
    layers: int
    tokens: int
    rounds: int
    number: int
    blocks: int = 1         # rows pulled of each tensor
    pool: int = 1           # rows that each tensor has

    @property
    def num_tensors(self) -> int:
        return 2 * self.layers

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of one tensor: one run."""
        return self.tokens * TOKEN_NBYTES

    @property
    def nbytes(self) -> int:
        """Bytes of one pull."""
        return self.num_tensors * self.row_nbytes * self.blocks

    @property
    def cache_nbytes(self) -> int:
        """Bytes of the cache that it is pulled from."""
        return self.num_tensors * self.row_nbytes * self.pool

    def scattered(self, side: str) -> list[int]:
        """`blocks` different rows of the pool in an order of chance, the same in every run; another one for each side."""
        return random.Random(f"{self.name} {side}").sample(range(self.pool), self.blocks)


SMALL = Workload("small 256 KiB", layers=4, tokens=16, rounds=300, number=30)
MEDIUM = Workload("medium 64 MiB", layers=32, tokens=512, rounds=60, number=1)
LARGE = Workload("large 512 MiB", layers=32, tokens=4096, rounds=12, number=1)
PAGED = Workload("paged 128 MiB", layers=32, tokens=16, rounds=20, number=1, blocks=64, pool=128)


def equal_parts(runs: Runs) -> tuple[Runs, Runs]:
    """Two lists with half of the bytes each; one run may be cut, at a whole 64-byte line."""
    half = sum(run[2] for run in runs) // 2
    first: Runs = []
    second: Runs = []
    for src, dst, nbytes in runs:
        here = min(nbytes, half) // 64 * 64
        half -= here
        if here:
            first.append((src, dst, here))
        if here < nbytes:
            half = 0
            second.append((src + here, dst + here, nbytes - here))
    return first, second
