"""The arguments of pushes to caches that a key names, checked in the order of the contract; nothing is touched here."""
from __future__ import annotations

from collections.abc import Sequence

from shmkv._blocks import TO_BLOCKS, BlockLists
from shmkv.block_arguments import check_numbers, last_of_each
from shmkv.cache import Cache, check_cache, check_kind
from shmkv.checks import check_int64, check_sequence, check_type, check_uint32
from shmkv.errors import LLMParamError
from shmkv.keys import BlocksCacheKey, CacheKeyByIdAndIndex
from shmkv.pull_arguments import check_layers, layers_as_tensors
from shmkv.pull_failure import Select


class RowPush:
    """The arguments of one `push_cache`."""

    __slots__ = ("select",)

    def __init__(self, key: CacheKeyByIdAndIndex, src_cache: Cache, src_batch_index: int, src_layer_range: range | None,
                 dst_layer_range: range | None, size: int, tensor_num_per_layer: int) -> None:
        check_type("dst_cache_key", key, CacheKeyByIdAndIndex)
        check_cache("src_cache", src_cache)
        check_kind("src_cache", src_cache, is_blocks=False)
        check_uint32("src_batch_index", src_batch_index)
        if check_int64("size", size) != -1:
            raise LLMParamError(f"argument 'size' must be -1, whole rows, got {size}")
        tensors = push_ranges(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        self.select: Select = (-1, 0, 0, src_batch_index, 0, *tensors, 0)


class BlocksPush:
    """The arguments of one `push_blocks`."""

    __slots__ = ("lists", "select")

    def __init__(self, key: BlocksCacheKey, src_cache: Cache, src_blocks: Sequence[int], dst_blocks: Sequence[int],
                 src_layer_range: range | None, dst_layer_range: range | None, tensor_num_per_layer: int) -> None:
        check_type("dst_cache_key", key, BlocksCacheKey)
        check_cache("src_cache", src_cache)
        check_sequence("src_blocks", src_blocks, int)
        check_sequence("dst_blocks", dst_blocks, int)
        check_kind("src_cache", src_cache, is_blocks=True)
        if not dst_blocks or len(src_blocks) != len(dst_blocks):
            raise LLMParamError(f"arguments 'src_blocks' and 'dst_blocks' must have the same number of blocks, at least one, got "
                                f"{len(src_blocks)} and {len(dst_blocks)}")
        src, dst = check_numbers("src_blocks", src_blocks), check_numbers("dst_blocks", dst_blocks)
        tensors = push_ranges(src_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        self.select: Select = (-1, 0, 0, 0, 0, *tensors, 0)
        sources, targets, others = last_of_each(src, dst)
        self.lists = BlockLists(sources, targets, TO_BLOCKS, others)


def push_ranges(src_cache: Cache, src: range | None, dst: range | None, per_layer: int) -> tuple[int, int, int, int]:
    """Layer ranges as tensors: (first, how many or -1) of the source and of the destination.

    A range that is not given stands for all tensors of its side, which have to be whole layers; fewer than one layer of them are a
    layer of their own.
    """
    check_layers(src, dst, per_layer)
    tensors = src_cache.cache_desc.num_tensors
    if tensors % per_layer and not (src is None and tensors < per_layer) and (src is None or per_layer != 2):
        raise LLMParamError(f"argument 'tensor_num_per_layer' must divide the {tensors} tensors of the cache, got {per_layer}")
    return (*layers_as_tensors(src, per_layer), *layers_as_tensors(dst, per_layer))
