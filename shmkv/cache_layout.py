"""Where the tensors of a cache lie in its segment, worked out once a description."""
from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shmkv._layout import ALIGNMENT, SEGMENT_DATA
from shmkv._plan import ShapeList
from shmkv.types import CacheDesc


@dataclass(frozen=True)
class CacheLayout:
    """Tensors one after the other, each on a 64-byte boundary.

    `desc` is a copy that its caller's changes do not reach, `offsets` are bytes from the segment's start, `nbytes` what all tensors
    take, `rows` the batch size, `row_nbytes` the bytes of one row of one tensor.
    """

    desc: CacheDesc
    tensors: ShapeList
    offsets: tuple[int, ...]
    nbytes: int
    rows: int
    row_nbytes: int


def layout(desc: CacheDesc) -> CacheLayout:
    """The layout of a description. LLMParamError, naming the argument, if no memory can be asked for it."""
    return _layout_of(*desc.values())


@lru_cache(maxsize=256)
def _layout_of(*values: object) -> CacheLayout:
    desc = CacheDesc.from_values(values)
    desc.validate_for_allocation()
    geometry = desc.row_geometry
    pitch = -(-desc.size // ALIGNMENT) * ALIGNMENT
    offsets = tuple(SEGMENT_DATA + number * pitch for number in range(desc.num_tensors))
    shape = (desc.size, geometry.outer, geometry.rows, geometry.inner_nbytes, desc.data_type.value)
    tensors = ShapeList([(offset, *shape) for offset in offsets])
    return CacheLayout(desc, tensors, offsets, pitch * desc.num_tensors, geometry.rows, geometry.row_nbytes)
