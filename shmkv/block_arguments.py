"""The arguments of the calls that move blocks, checked in the order of the contract; nothing is touched here."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

from shmkv._blocks import FROM_ROW, TO_BLOCKS, TO_ROW, BlockLists
from shmkv.cache_handle import CacheHandle
from shmkv.checks import (
    UINT32_MAX,
    UINT64_MAX,
    check_bool,
    check_int_between,
    check_sequence,
    check_type,
    check_uint32,
    shown,
    wrong_element,
)
from shmkv.errors import LLMParamError
from shmkv.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from shmkv.kv_cache import check_kv_cache
from shmkv.pull_arguments import check_device, check_ranges, check_usable_key, with_strict_format
from shmkv.pull_failure import Select, SourceKey

Pair = tuple[int, int]


class BlockNames(NamedTuple):
    """What a generation of the API calls the arguments of a pull of blocks."""

    key: str
    dst: str
    src_blocks: str
    dst_blocks: str


PROMPT_AND_DECODER = BlockNames("prompt_cache_key", "decoder_kv_cache", "prompt_blocks", "decoder_blocks")


class BlocksRequest:
    """The arguments of one `pull_blocks`, and the lists as the core takes them."""

    __slots__ = ("cache_key", "kv_cache", "lists", "select")
    NAMES: ClassVar[BlockNames] = PROMPT_AND_DECODER
    LISTS: ClassVar[tuple[type, ...]] = (list,)
    MAY_CONSUME: ClassVar[bool] = True

    def __init__(self, cache_key: SourceKey, kv_cache: CacheHandle, src_blocks: Sequence[int], dst_blocks: Sequence[int], *,
                 batch_index: int,
                 src_layer_range: range | None, dst_layer_range: range | None, tensor_num_per_layer: int,
                 strict_format: bool) -> None:
        names = self.NAMES
        check_type(names.key, cache_key, BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex)
        self.cache_key = cache_key
        self._check_type(kv_cache)
        self.kv_cache = kv_cache
        check_sequence(names.src_blocks, src_blocks, int, containers=self.LISTS)
        check_sequence(names.dst_blocks, dst_blocks, int, containers=self.LISTS)
        self._check_destination(kv_cache)
        mode = self._mode(src_blocks, dst_blocks)
        check_uint32("batch_index", batch_index)
        if batch_index and mode != TO_ROW:
            raise LLMParamError(f"argument 'batch_index' names a row of a contiguous destination, got {batch_index} with blocks")
        src, dst = check_numbers(names.src_blocks, src_blocks), check_numbers(names.dst_blocks, dst_blocks)
        if isinstance(cache_key, CacheKey):
            check_usable_key(cache_key, names.key)
        tensors = check_ranges(kv_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        self.select: Select = (-1, 0, 0, 0, batch_index, *tensors)
        if check_bool("strict_format", strict_format):
            self.select = with_strict_format(self.select)
        sources, targets, others = last_of_each(src or list(range(len(dst))), dst or list(range(len(src))))
        self.lists = BlockLists(sources, targets, mode, others)

    def _check_type(self, cache: object) -> None:
        check_kv_cache(self.NAMES.dst, cache)

    def _check_destination(self, cache: CacheHandle) -> None:
        check_device(self.NAMES.dst, cache)

    def _mode(self, src: Sequence[int], dst: Sequence[int]) -> int:
        """What goes where: blocks to blocks one by one; a row to blocks, and blocks to a row of a contiguous cache, in order."""
        names = self.NAMES
        if not isinstance(self.cache_key, BlocksCacheKey):
            if src or not dst:
                raise LLMParamError(f"with {type(self.cache_key).__name__} argument '{names.src_blocks}' must be empty and "
                                    f"argument '{names.dst_blocks}' must not be, got {len(src)} and {len(dst)} blocks")
            return FROM_ROW
        if src and not dst and not self.kv_cache.is_blocks_cache:
            return TO_ROW
        if not src or len(src) != len(dst):
            raise LLMParamError(f"arguments '{names.src_blocks}' and '{names.dst_blocks}' must have the same number of blocks, at "
                                f"least one, got {len(src)} and {len(dst)}")
        return TO_BLOCKS


def check_numbers(name: str, blocks: Sequence[int]) -> list[int]:
    """Block numbers as 32-bit ones: greater ones are as good as any that no cache has. LLMParamError outside uint64."""
    for place, block in enumerate(blocks):
        if not 0 <= block <= UINT64_MAX:
            check_int_between(f"{name}[{place}]", block, 0, UINT64_MAX, "uint64")
    return [min(block, UINT32_MAX) for block in blocks]


def last_of_each(src: list[int], dst: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The pairs of two lists without those whose destination comes again later, and the sources that are in no pair then."""
    if len(set(dst)) == len(dst):
        return src, dst, []
    last = dict(zip(dst, src, strict=True))
    return list(last.values()), list(last), list(set(src).difference(last.values()))


def check_copy_block_info(info: object) -> dict[int, list[int]]:
    """Return `info` if it is a dict of int to lists of int, all of them uint64."""
    mapping: dict[int, list[int]] = check_type("copy_block_info", info, dict)
    for src, targets in mapping.items():
        if not isinstance(src, int):
            raise wrong_element("copy_block_info", src, src, int)
        if not isinstance(targets, list):
            raise wrong_element("copy_block_info", src, targets, list)
        check_sequence("copy_block_info", targets, int)
    for src, targets in mapping.items():
        check_numbers("copy_block_info", [src, *targets])
    return mapping


def copy_pairs(info: dict[int, list[int]], count: int) -> list[Pair]:
    """The (source, destination) pairs of `copy_blocks`, in order. LLMParamError for one beyond the `count` blocks of the cache."""
    for src, targets in info.items():
        if max(src, *targets, 0) >= count:
            raise LLMParamError(f"argument 'copy_block_info' must have blocks below {count}, got {shown({src: targets})}")
    return [(src, dst) for src, targets in info.items() for dst in targets]


def batches(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Cut a sequence of copies within one cache where one depends on an earlier one: what is in a batch can be done in any order,
    the batches one after the other."""
    batch: list[Pair] = []
    read: set[int] = set()
    written: set[int] = set()
    for src, dst in pairs:
        if src == dst:
            continue
        if src in written or dst in written or dst in read:
            yield batch
            batch, read, written = [], set(), set()
        batch.append((src, dst))
        read.add(src)
        written.add(dst)
    if batch:
        yield batch


def check_swap_indices(src_to_dst: dict[int, int], src_count: int, dst_count: int) -> list[Pair]:
    """The (source, destination) pairs of `swap_blocks`; of equal destinations the last one counts."""
    for name, blocks, count in (("source", list(src_to_dst), src_count), ("destination", list(src_to_dst.values()), dst_count)):
        for block in check_numbers("src_to_dst", blocks):
            if block >= count:
                raise LLMParamError(f"argument 'src_to_dst' must have {name} blocks below {count}, got {block}")
    sources, targets, _ = last_of_each(list(src_to_dst), list(src_to_dst.values()))
    return list(zip(sources, targets, strict=True))
