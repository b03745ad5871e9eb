"""One allocated cache of this cluster as its owner knows it."""
from __future__ import annotations

from dataclasses import dataclass, field

from shmkv._layout import KIND_BLOCKS, KIND_CONTIGUOUS, KIND_HOST
from shmkv._local import LocalCache
from shmkv._mapping import Region
from shmkv.cache_layout import CacheLayout
from shmkv.segment import Segment
from shmkv.types import CacheDesc, Placement


@dataclass
class OwnCache:
    """One allocated cache of this cluster."""

    cache_id: int
    layout: CacheLayout
    segment: Segment
    local: LocalCache
    is_blocks: bool                         # a blocks cache
    blocks_model_id: int | None             # and its key
    remote_accessible: bool = True          # may other clusters write into it?
    pool_nbytes: int = 0                    # what it takes of the pool of its placement, if that has a limit
    slot: int = field(default=-1, init=False)
    generation: int = field(default=0, init=False)
    id_alive: bool = field(default=True, init=False)
    retired: bool = field(default=False, init=False)
    living: int | None = field(default=None, init=False)    # keys that lived at the last look; None: something changed since

    @property
    def kind(self) -> int:
        """As the directory records it."""
        if self.desc.placement == Placement.HOST:
            return KIND_HOST
        return KIND_BLOCKS if self.is_blocks else KIND_CONTIGUOUS

    @property
    def own_region(self) -> Region | None:
        """The mapping of a segment that is this cache's alone."""
        return self.segment.region

    @property
    def own_nbytes(self) -> int:
        """Bytes of that segment."""
        return self.segment.nbytes

    @property
    def desc(self) -> CacheDesc:
        """What was asked for at allocation."""
        return self.layout.desc

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of the tensors, in bytes from the segment's start."""
        return self.layout.offsets
