"""Plans byte by byte: where each byte of a cache stands, and where runs take it."""
from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from reference import Geometry

Shapes = list[tuple[int, ...]]
Runs = list[tuple[int, int, int]]


def shapes_of(cache: Geometry, gap: int = 0) -> Shapes:
    """The tensors of a cache as a plan takes them, `gap` bytes apart."""
    each = cache.outer * cache.rows * cache.inner
    return [(i * (each + gap), each, cache.outer, cache.rows, cache.inner) for i in range(cache.num_tensors)]


def places(cache: Geometry, gap: int = 0) -> Any:
    """Where each byte stands, in the shape in which the twin has caches."""
    each = cache.outer * cache.rows * cache.inner
    return np.stack([np.arange(start, start + each).reshape(cache[1:]) for start, *_ in shapes_of(cache, gap)])


def spread(runs: Runs) -> list[tuple[int, int]]:
    """(source place, destination place) of every byte, in the order in which they are copied."""
    return [(src + i, dst + i) for src, dst, nbytes in runs for i in range(nbytes)]


def stretches(pairs: list[tuple[int, int]]) -> int:
    """Into how many stretches that touch on both sides bytes fall, in their order."""
    return 1 + sum((src, dst) != (before[0] + 1, before[1] + 1) for before, (src, dst) in pairwise(pairs))
