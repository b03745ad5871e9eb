"""Arguments of the calls that make caches and name rows, checked; nothing is touched here."""
from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from shmkv.cache_layout import CacheLayout, layout
from shmkv.checks import check_bool, check_positive, check_uint32
from shmkv.errors import LLMException, LLMParamError
from shmkv.keys import CacheKey, KeyWords
from shmkv.pull_arguments import check_usable_key
from shmkv.types import CacheDesc, Placement


def check_allocation(cache_desc: CacheDesc, publish: bool, zero: bool,
                     no_memory: Callable[[str, MemoryError], LLMException],
                     placements: Collection[Placement] = (Placement.DEVICE,)) -> CacheLayout:
    """What every allocation asks for; `no_memory` makes the exception when this process has no memory left."""
    check_bool("publish", publish)
    check_bool("zero", zero)
    try:
        wanted = layout(cache_desc)
    except MemoryError as error:
        raise no_memory("the layout of a cache", error) from error
    if wanted.desc.placement not in placements:
        names = " or ".join(placement.name for placement in placements)
        raise LLMParamError(f"argument 'cache_desc' must have placement {names}, got {wanted.desc.placement!s}: private "
                            "memory is the caller's own, for register_cache, register_blocks_cache or create_cpu_cache")
    return wanted


def check_batch_dim_of_blocks(desc: CacheDesc) -> None:
    """LLMParamError unless the rows of a blocks cache are its first dimension."""
    if desc.batch_dim != 0:
        raise LLMParamError(f"argument 'cache_desc' must have batch_dim_index 0 for blocks, got {desc.batch_dim}")


def check_ttl(key_ttl_ms: int | None) -> int | None:
    """A time to live: milliseconds, or None for keys that stay until they are fetched or removed."""
    return None if key_ttl_ms is None else check_positive("key_ttl_ms", check_uint32("key_ttl_ms", key_ttl_ms))


def rows_of_keys(keys: Sequence[CacheKey], batch_size: int, *, unique: bool = False) -> dict[int, KeyWords]:
    """Row -> key; padding keys name nothing, of equal keys the last one counts, or there must be none (`unique`)."""
    if len(keys) > batch_size:
        raise LLMParamError(f"argument 'cache_keys' has {len(keys)} keys for a batch size of {batch_size}")
    rows: dict[KeyWords, int] = {}
    for row, key in enumerate(keys):
        if not key.is_padding:
            check_usable_key(key, f"cache_keys[{row}]")
            if unique and key.words in rows:
                raise LLMParamError(f"argument 'cache_keys' names rows {rows[key.words]} and {row} by one key, {key!r}")
            rows[key.words] = row
    return {row: words for words, row in rows.items()}


def words_of_rows(keys: dict[int, CacheKey]) -> dict[int, KeyWords]:
    """Row -> key, from keys that all name something, each one row."""
    for row, key in keys.items():
        check_usable_key(key, f"keys[{row}]")
    words = {row: key.words for row, key in keys.items()}
    if len(set(words.values())) != len(words):
        raise LLMParamError("argument 'keys' names two rows by one key")
    return words


def check_rows(rows: Iterable[int], batch_size: int, name: str = "rows") -> list[int]:
    """Row numbers below the batch size; `name`: the argument that they came by."""
    checked = [check_uint32(name, row) for row in rows]
    for row in checked:
        if row >= batch_size:
            raise LLMParamError(f"argument '{name}' must have rows below the batch size {batch_size}, got {row}")
    return checked


def published_tensors(num_tensors: int, layers: int | None, tensor_num_per_layer: int) -> int:
    """How many tensors of a row the first `layers` layers are; all of them without `layers`."""
    tensors = num_tensors if layers is None else layers * tensor_num_per_layer
    if tensors > num_tensors:
        raise LLMParamError(f"argument 'layers' {layers} of {tensor_num_per_layer} tensors each is more than the "
                            f"{num_tensors} tensors of the cache")
    return tensors
