"""Where the tensors of a cache lie in its segment, worked out once a description."""
from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from shmkv._layout import ALIGNMENT, SEGMENT_DATA
from shmkv._plan import ShapeList
from shmkv.types import CacheDesc, DataType, RowGeometry


@dataclass(frozen=True)
class CacheLayout:
    """Tensors one after the other, each on a 64-byte boundary.

    `desc` is a copy that its caller's changes do not reach, `offsets` are bytes from the segment's start, `nbytes` what all tensors
    take, `rows` the batch size, `row_nbytes` the bytes of one row of each tensor.
    """

    desc: CacheDesc
    tensors: ShapeList
    offsets: tuple[int, ...]
    nbytes: int
    rows: int
    row_nbytes: tuple[int, ...]
    format: int                     # a hash of kv_tensor_format, 0 = none was given


def layout(desc: CacheDesc) -> CacheLayout:
    """The layout of a description. LLMParamError, naming the argument, if no memory can be asked for it."""
    return _layout_of(*desc.values())


@lru_cache(maxsize=256)
def _layout_of(*values: object) -> CacheLayout:
    desc = CacheDesc.from_values(values)
    desc.validate_for_allocation()
    shapes: list[tuple[int, ...]] = []
    row_nbytes: list[int] = []
    offset = SEGMENT_DATA
    for size, geometry, kind in _tensors(desc):
        shapes.append((offset, size, geometry.outer, geometry.rows, geometry.inner_nbytes, kind.value))
        row_nbytes.append(geometry.row_nbytes)
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    offsets = tuple(shape[0] for shape in shapes)
    return CacheLayout(desc, ShapeList(shapes), offsets, offset - SEGMENT_DATA, desc.batch_size, tuple(row_nbytes),
                       _format_hash(desc.kv_tensor_format))


def _tensors(desc: CacheDesc) -> Iterable[tuple[int, RowGeometry, DataType]]:
    """Size, rows and element type of each tensor."""
    if desc.is_uniform:
        return itertools.repeat((desc.size, desc.row_geometry, desc.data_type), desc.num_tensors)
    return ((desc.tensor_size(i), desc.tensor_row_geometry(i), desc.tensor_data_type(i)) for i in range(desc.num_tensors))


def _format_hash(name: str | None) -> int:
    """64 bits that stand for a kv_tensor_format; never 0 for a name."""
    if name is None:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little") | 1
