"""Layout of a fork: one row of a lent cache, seen as a cache of its own."""
from __future__ import annotations

from functools import lru_cache

from shmkv._plan import ShapeList
from shmkv.cache_layout import CacheLayout
from shmkv.errors import LLMParamError
from shmkv.lending import Lender, LentTensor, region_of
from shmkv.types import CacheDesc


def fork_layout(loan: Lender, desc: CacheDesc | None) -> CacheLayout:
    """The lent row as the only row of a cache that `desc` describes. LLMParamError for a description of something else."""
    return _layout_of(tuple(loan.tensors), loan.row, region_of(loan).nbytes, None if desc is None else desc.values())


@lru_cache(maxsize=64)
def _layout_of(numbers: tuple[tuple[int, int, int, int, int, int], ...], row: int, nbytes: int,
               described: tuple[object, ...] | None) -> CacheLayout:
    """Kept, since one prefix is forked many times."""
    tensors = [LentTensor(*each) for each in numbers]
    desc = _described(tensors) if described is None else CacheDesc.from_values(described)
    _check(tensors, desc)
    shapes = [_only_row(tensor, row) for tensor in tensors]
    offsets = tuple(shape[0] for shape in shapes)
    return CacheLayout(desc, ShapeList(list(shapes)), offsets, nbytes, 1, tuple(t.row_nbytes for t in tensors), 0)


def _described(tensors: list[LentTensor]) -> CacheDesc:
    """[1, elements] each; [pieces, 1, elements] where a row is in pieces."""
    kinds = [tensor.kind for tensor in tensors]
    pieces = any(tensor.outer > 1 for tensor in tensors)
    shapes = [[tensor.outer, 1, tensor.inner // kind.nbytes][not pieces:] for tensor, kind in zip(tensors, kinds, strict=True)]
    return CacheDesc.of_tensors(shapes, kinds, batch_dim_index=int(pieces))


def _check(tensors: list[LentTensor], desc: CacheDesc) -> None:
    if desc.num_tensors != len(tensors) or desc.batch_size != 1:
        raise LLMParamError(f"argument 'cache_desc' must have {len(tensors)} tensors and a batch size of 1, got {desc!r}")
    for number, tensor in enumerate(tensors):
        geometry = desc.tensor_row_geometry(number)
        if geometry.row_nbytes != tensor.row_nbytes or (tensor.outer > 1 and geometry.outer != tensor.outer):
            raise LLMParamError(f"argument 'cache_desc' has rows of {geometry.row_nbytes} bytes for tensor {number}, the row has "
                                f"{tensor.row_nbytes} bytes in {tensor.outer} pieces")


def _only_row(tensor: LentTensor, row: int) -> tuple[int, ...]:
    """As for ShapeList: the row's pieces lie where they lay among the other rows'."""
    pitch = tensor.rows * tensor.inner
    extent = (tensor.outer - 1) * pitch + tensor.inner
    return tensor.offset + row * tensor.inner, extent, tensor.outer, 1, tensor.inner, tensor.dtype, tensor.inner, pitch
