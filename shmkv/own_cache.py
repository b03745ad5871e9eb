"""One allocated cache of this cluster as its owner knows it."""
from __future__ import annotations

from dataclasses import dataclass, field

from shmkv._local import LocalCache
from shmkv.cache_layout import CacheLayout
from shmkv.segment import Segment
from shmkv.types import CacheDesc


@dataclass
class OwnCache:
    """One allocated cache of this cluster."""

    cache_id: int
    layout: CacheLayout
    segment: Segment
    local: LocalCache
    is_blocks: bool                         # a blocks cache
    blocks_model_id: int | None             # and its key
    slot: int = field(default=-1, init=False)
    generation: int = field(default=0, init=False)
    id_alive: bool = field(default=True, init=False)
    retired: bool = field(default=False, init=False)
    living: int | None = field(default=None, init=False)    # keys that lived at the last look; None: something changed since

    @property
    def desc(self) -> CacheDesc:
        """What was asked for at allocation."""
        return self.layout.desc

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of the tensors, in bytes from the segment's start."""
        return self.layout.offsets
