"""The arguments of a pull: their values, and the checks in the order of the contract. Nothing is touched here."""
from __future__ import annotations

from typing import ClassVar, NamedTuple

from shmkv.cache_handle import CacheHandle, PullOptions
from shmkv.checks import (
    UINT32_MAX,
    check_bool,
    check_copy_size,
    check_optional_layer_range,
    check_optional_offset,
    check_positive,
    check_type,
    check_uint32,
    wrong_type,
)
from shmkv.errors import LLMParamError
from shmkv.heads import HeadSlice
from shmkv.keys import CacheKey, CacheKeyByIdAndIndex
from shmkv.kv_cache import KvCache
from shmkv.pull_failure import PullKey, Select
from shmkv.types import CacheDesc

RANGE_LIMIT = UINT32_MAX + 1
PULL_KEYS = (CacheKey, CacheKeyByIdAndIndex)

Tensors = tuple[int, int, int, int, int]
ALL_TENSORS: Tensors = (0, -1, 0, -1, 0)


class LastPull(NamedTuple):
    """What a pull did: bytes copied, ns until the link's lock was had, ns under it.

    `kernel` is the copy loop that it used ("avx2", "avx512", "c", "memcpy"); or the system call that copied, where memory was not
    mapped: "pread", as `SHMKV_COPY=pread` wants, or "process_vm_readv", for private memory of a peer. "" before the first pull.
    `streamed`: were these the loop's stores past the processor's cache? False for a system call.
    """

    nbytes: int
    wait_ns: int
    copy_ns: int
    kernel: str
    streamed: bool


class PullRequest:
    """The arguments of one `pull_cache`, for `pull_many`: checked here, once, in the same order and with the same errors."""

    __slots__ = ("cache_key", "consumes", "kv_cache", "options", "select")
    KEYS: ClassVar[tuple[type, ...]] = PULL_KEYS        # that may name the source
    MAY_CONSUME: ClassVar[bool] = True

    def __init__(self, cache_key: PullKey, kv_cache: CacheHandle, batch_index: int = 0, size: int = -1, *,
                 src_layer_range: range | None = None, dst_layer_range: range | None = None,
                 src_cache_offset: int | None = None, dst_cache_offset: int | None = None,
                 tensor_num_per_layer: int = 2, heads: HeadSlice | None = None, strict_format: bool = False) -> None:
        check_type("cache_key", cache_key, *self.KEYS)
        self.cache_key = cache_key
        self._check_destination(kv_cache)
        self.kv_cache = kv_cache
        check_copy_size("size", size)
        check_uint32("batch_index", batch_index)
        src_offset = check_optional_offset("src_cache_offset", src_cache_offset) or 0
        dst_offset = check_optional_offset("dst_cache_offset", dst_cache_offset) or 0
        if isinstance(cache_key, CacheKey):
            check_usable_key(cache_key)
        tensors = check_ranges(kv_cache, src_layer_range, dst_layer_range, tensor_num_per_layer)
        self.select: Select = (size, src_offset, dst_offset, 0, batch_index, *tensors)
        self.consumes = self.MAY_CONSUME and src_cache_offset is None and dst_cache_offset is None and heads is None
        if heads is not None:
            self.select = select_heads(kv_cache.cache_desc, check_type("heads", heads, HeadSlice), self.select,
                                       (src_cache_offset, dst_cache_offset))
        if check_bool("strict_format", strict_format):
            self.select = with_strict_format(self.select)
        self.options: PullOptions = (size, src_layer_range, dst_layer_range, src_cache_offset, dst_cache_offset,
                                     tensor_num_per_layer, heads, strict_format)

    def _check_destination(self, cache: object) -> None:
        """TypeError or LLMParamError unless it is a cache that can be pulled into."""
        if not isinstance(cache, KvCache):
            raise wrong_type("kv_cache", cache, KvCache)
        check_device("kv_cache", cache)

    @classmethod
    def with_options(cls, cache_key: PullKey, kv_cache: CacheHandle, batch_index: int, options: PullOptions) -> PullRequest:
        """The request that has these `options`."""
        size, src_layers, dst_layers, src_offset, dst_offset, per_layer, heads, strict = options
        return cls(cache_key, kv_cache, batch_index, size, src_layer_range=src_layers, dst_layer_range=dst_layers,
                   src_cache_offset=src_offset, dst_cache_offset=dst_offset, tensor_num_per_layer=per_layer, heads=heads,
                   strict_format=strict)


def select_heads(desc: CacheDesc, heads: HeadSlice, select: Select, offsets: tuple[int | None, int | None]) -> Select:
    """The selection with some of the heads instead of whole rows. LLMParamError with a size or an offset, and where the selected
    tensors do not all have their heads at the same bytes."""
    if select[0] != -1 or offsets != (None, None):
        raise LLMParamError("argument 'heads' goes with neither size nor src_cache_offset nor dst_cache_offset")
    first, count = select[7:9]
    tensors = range(desc.num_tensors)[first:first + count if count >= 0 else None] if not desc.is_uniform else range(1)
    windows = {heads.window(desc.tensor_shape(i), desc.batch_dim, desc.tensor_data_type(i).nbytes) for i in tensors}
    if len(windows) > 1:
        raise LLMParamError("argument 'heads' needs tensors of one shape: select them by dst_layer_range")
    if not windows:
        return select               # no such tensors, which is said by whoever looks at the ranges
    (window,) = windows
    return (window.groups * window.nbytes, window.src_offset, window.dst_offset, *select[3:], window.nbytes, window.src_period,
            window.dst_period, 0)


def with_strict_format(select: Select) -> Select:
    """The selection, of sources of the destination's kv_tensor_format only."""
    return (*select, 0, 0, 0, 1) if len(select) == 10 else (*select[:-1], 1)


def check_usable_key(cache_key: object, name: str = "cache_key") -> None:
    """LLMParamError unless exactly one of req_id and prefix_id of a CacheKey is given. `name`: the argument that it came by."""
    key = check_type(name, cache_key, CacheKey)
    if not key.is_usable:
        raise LLMParamError(f"argument '{name}' must have exactly one of req_id and prefix_id, got {key!r}")


def check_device(name: str, cache: CacheHandle) -> None:
    """LLMParamError for own memory of the caller."""
    if cache.is_host:
        raise LLMParamError(f"argument '{name}' must have placement DEVICE, got {cache.cache_desc.placement!s}")


def check_ranges(kv_cache: CacheHandle, src: range | None, dst: range | None, per_layer: int) -> Tensors:
    """Layer ranges as tensors: (first, how many) of the source and of the destination, and what must divide the source's number."""
    check_layers(src, dst, per_layer)
    tensors = kv_cache.cache_desc.num_tensors
    if per_layer != 2 and (per_layer > tensors or ((src or dst) and tensors % per_layer)):
        raise LLMParamError(f"argument 'tensor_num_per_layer' must divide the {tensors} tensors of the cache, got {per_layer}")
    divisor = per_layer if per_layer != 2 and (src or dst) else 0
    return (*layers_as_tensors(src, per_layer), *layers_as_tensors(dst, per_layer), divisor)


def check_layers(src: range | None, dst: range | None, per_layer: int) -> None:
    """What pulls and pushes ask of two layer ranges and of `tensor_num_per_layer`, whatever the caches."""
    check_positive("tensor_num_per_layer", check_uint32("tensor_num_per_layer", per_layer))
    check_optional_layer_range("src_layer_range", src, below=RANGE_LIMIT)
    check_optional_layer_range("dst_layer_range", dst, below=RANGE_LIMIT)
    if src is not None and dst is not None and len(src) != len(dst):
        raise LLMParamError(f"src_layer_range {src} and dst_layer_range {dst} must have the same length")


def check_source_range(layers: range | None, per_layer: int) -> tuple[int, int, int]:
    """A layer range of a source alone: (first tensor, how many or -1, what must divide the source's number of tensors or 0)."""
    check_positive("tensor_num_per_layer", check_uint32("tensor_num_per_layer", per_layer))
    check_optional_layer_range("src_layer_range", layers, below=RANGE_LIMIT)
    return (*layers_as_tensors(layers, per_layer), per_layer if per_layer != 2 and layers is not None else 0)


def layers_as_tensors(layers: range | None, per_layer: int) -> tuple[int, int]:
    """(first tensor, how many) of a layer range; numbers beyond 32 bits are as good as any that no cache has."""
    if layers is None:
        return 0, -1
    return min(layers.start * per_layer, UINT32_MAX), min(len(layers) * per_layer, UINT32_MAX)
