"""From one process to another: a row of a ShmCache is handed over under a key, and received behind it.

The receiving side reads the row's header first and compares it with its own model. What does not fit is refused before a byte of
keys and values was moved, and the key stays.
"""
from __future__ import annotations

from typing import Any

import numpy as np

from shmkv.checks import check_type, check_uint32
from shmkv.data_type import DataType
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode
from shmkv.integrations.transformers.header import Header
from shmkv.integrations.transformers.layouts import HEADER_NBYTES, ModelLayout
from shmkv.integrations.transformers.probe import layout_of
from shmkv.integrations.transformers.shm_cache import ShmCache
from shmkv.keys import CacheKey
from shmkv.kv_cache import KvCache
from shmkv.kv_cache_manager import KvCacheManager
from shmkv.pull_arguments import PullRequest
from shmkv.types import CacheDesc

HEADER_ONLY = range(1)


def handoff(cache: ShmCache, key: CacheKey, row: int = 0, *, keep: bool = False, key_ttl_ms: int | None = None) -> int:
    """Let others have a row of `cache` under `key` (role PROMPT): nothing is copied. Returns how many tokens it holds.

    From then on nothing can be written into the cache. When all of its rows were handed over it is closed, and the keys alone keep
    its memory, until a request key was received; with ``keep=True`` it stays, and `resume` takes the rows back, to go on behind
    their tokens. `key_ttl_ms`: see `KvCacheManager.bind`.

    Raises:
        LLMParamError: no such row, a row without a token, layers of unequal lengths after a forward that failed, the role, a key
            that is bound already. Nothing has changed then.
    """
    length = check_type("cache", cache, ShmCache).publish_row(row, check_type("key", key, CacheKey), key_ttl_ms).length
    if not keep and len(cache.handed_over) == cache.rows:
        cache.close()
    return length


def receive(key: CacheKey, model: Any, manager: KvCacheManager, *, room: int = 0, timeout_ms: int | None = None,
            model_id: str | None = None) -> ShmCache:
    """A cache of this process with the tokens that were handed over under `key`, and `room` free tokens behind them (role DECODER).

    Only filled tokens move. With `timeout_ms` the key is waited for so long at most, otherwise it has to be there. A request key is
    used up. `model_id`: see `layout_of`.

    Raises:
        LLMParamError: the two sides do not fit each other, with what each has; the row was not made by `handoff`; the argument
            `room`. The key stays.
        LLMException: as `KvCacheManager.wait_for_key` and `pull_cache`.
    """
    check_uint32("room", room)
    layout = layout_of(model, model_id)
    header = read_header(key, manager, layout, timeout_ms)
    cache = ShmCache(model, manager, header.length + room, model_id=model_id)
    try:
        _bring(key, cache, 0, 0, header)
    except BaseException:
        cache.close()
        raise
    return cache


def receive_into(key: CacheKey, cache: ShmCache, row: int = 0, *, start: int = 0, timeout_ms: int | None = None) -> int:
    """The same into a row of a cache that is there. Returns how many tokens the row holds then.

    With a `start` above 0 the row has the first tokens of the sequence already, and only those from `start` on move; a request key
    is not used up by that. That both sides mean the same tokens is the caller's to know.

    Raises: as `receive`; LLMParamError for a row that is no row, for `start` beyond what either side holds, and for more tokens
        than the cache has room for: the row is as it was before. After a pull that failed it holds its first `start` tokens.
    """
    check_type("cache", cache, ShmCache).check_writable()
    if check_uint32("row", row) >= cache.rows:
        raise LLMParamError(f"argument 'row' must be below {cache.rows}, got {row}")
    if check_uint32("start", start) > cache.lengths[row]:
        raise LLMParamError(f"argument 'start' must not be above the {cache.lengths[row]} tokens of row {row}, got {start}")
    header = read_header(key, cache.manager, cache.layout, timeout_ms)
    if start > header.length:
        raise LLMParamError(f"argument 'start' must not be above the {header.length} tokens behind {key!r}, got {start}")
    _bring(key, cache, row, start, header)
    return header.length


def receive_fork(key: CacheKey, model: Any, manager: KvCacheManager, *, timeout_ms: int | None = None,
                 model_id: str | None = None) -> ShmCache:
    """As `receive`, without copying: a fork of the row, whose pages are the prompt's until they are written (role DECODER).

    The room behind its tokens is what the prompt's cache had. The prompt's memory is kept until the fork is closed.
    (`KvCacheManager.view_cache` has no such form: a model writes the next token behind the others, and torch would write into
    read-only memory without asking.)
    """
    layout = layout_of(model, model_id)
    header = read_header(key, manager, layout, timeout_ms)
    cache = ShmCache.over(layout, manager, manager.fork_cache(key, layout.describe(1, header.room)), header.room)
    try:
        _settle(key, cache, 0, header)
    except BaseException:
        cache.close()
        raise
    return cache


def read_header(key: CacheKey, manager: KvCacheManager, layout: ModelLayout, timeout_ms: int | None = None) -> Header:
    """The header behind `key`; the key is not used up. LLMParamError if it is not of a model like `layout`, with both named."""
    check_type("manager", manager, KvCacheManager)
    if timeout_ms is not None:
        manager.wait_for_key(key, timeout_ms)
    raw = np.zeros((1, HEADER_NBYTES), np.uint8)
    target = manager.register_cache(CacheDesc(1, [1, HEADER_NBYTES], DataType.DT_UINT8), [raw])
    try:
        # An offset keeps the key; tensor 0 of something else is as good as any other bytes that are no header.
        manager.pull_cache(key, target, size=HEADER_NBYTES, src_layer_range=HEADER_ONLY, dst_layer_range=HEADER_ONLY,
                           src_cache_offset=0, tensor_num_per_layer=1)
        header = Header.unpack(raw.tobytes())
    except LLMParamError as error:
        raise LLMParamError(f"receive of {key!r}: {error}") from error
    finally:
        manager.unregister_cache(target)
    difference = header.layout.difference(layout)
    if difference is not None:
        theirs, ours = difference
        raise LLMParamError(f"receive of {key!r}: the two sides do not fit: the prompt has {theirs}; this process has {ours}")
    return header


def _bring(key: CacheKey, cache: ShmCache, row: int, start: int, header: Header) -> None:
    """Pull the header and the tokens from `start` on, all groups under one lock."""
    if header.length > cache.room:
        raise LLMParamError(f"receive of {key!r}: {header.length} tokens do not fit into a cache of {cache.room}")
    pulls = [_request(key, cache.memory, row, range(1), 0 if start else None, HEADER_NBYTES)]
    for group in cache.layout.groups() if start < header.length else ():
        offset, size = start * group.token_nbytes, (header.length - start) * group.token_nbytes
        pulls.append(_request(key, cache.memory, row, range(group.first, group.stop), offset or None, size))
    before = cache.lengths
    try:
        cache.manager.pull_many(pulls)
        _settle(key, cache, row, header)
    except BaseException:       # bytes behind `start` may have changed
        cache.set_lengths([*before[:row], start, *before[row + 1:]])
        raise


def _request(key: CacheKey, memory: KvCache, row: int, tensors: range, offset: int | None, size: int) -> PullRequest:
    return PullRequest(key, memory, row, size, src_layer_range=tensors, dst_layer_range=tensors, src_cache_offset=offset,
                       dst_cache_offset=offset, tensor_num_per_layer=1)


def _settle(key: CacheKey, cache: ShmCache, row: int, header: Header) -> None:
    """What has come is what was looked at before; then it counts."""
    if cache.header(row) != header.pack():
        raise LLMException(f"receive of {key!r}: the row was filled anew meanwhile",
                           status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
    cache.set_lengths([*cache.lengths[:row], header.length, *cache.lengths[row + 1:]])
