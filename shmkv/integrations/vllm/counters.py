"""What a connector counts. The scheduler's and the worker's side count apart and are added up by vLLM."""
from __future__ import annotations

import threading

# name: what it is, for the help text of a metric
COUNTED = {
    "hit_tokens": "Prompt tokens that were found in shared memory and are not computed, unless their load fails",
    "loaded_blocks": "Blocks that were pulled into the engine's cache",
    "loaded_bytes": "Bytes that were pulled into the engine's cache",
    "load_ns": "Nanoseconds from the first to the last layer of each load, added up",
    "failed_blocks": "Blocks that were to be pulled and were not, so that they are computed again",
    "published_blocks": "Blocks that were published for other engines",
    "published_bytes": "Bytes that were published for other engines",
    "publish_ns": "Nanoseconds of copying blocks into shared memory",
    "dropped_blocks": "Blocks that were not published, for want of memory or because a load before them failed",
    "refused_peers": "Producers whose cache is of another kind",
}


class Counters:
    """Counts since the last `take`, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}

    def add(self, **counts: int) -> None:
        """Raise some of the counts of COUNTED."""
        with self._lock:
            for name, count in counts.items():
                if name not in COUNTED:
                    raise KeyError(name)
                self._counts[name] = self._counts.get(name, 0) + count

    def take(self) -> dict[str, int]:
        """The counts that are not 0, which are 0 from then on."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return {name: count for name, count in counts.items() if count}


def added(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Both counts together."""
    return {name: one.get(name, 0) + other.get(name, 0) for name in COUNTED if name in one or name in other}


def readable(counts: dict[str, int]) -> dict[str, int | float]:
    """For a line of a log: bytes and times in MB and ms."""
    plain = [name for name in COUNTED if name in counts and not name.endswith(("_ns", "_bytes"))]
    shown: dict[str, int | float] = {name: counts[name] for name in plain}
    for name in ("loaded_bytes", "published_bytes"):
        if name in counts:
            shown[name.replace("bytes", "MB")] = round(counts[name] / 1e6, 3)
    for name in ("load_ns", "publish_ns"):
        if name in counts:
            shown[name.replace("ns", "ms")] = round(counts[name] / 1e6, 3)
    return shown
