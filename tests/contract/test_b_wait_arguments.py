"""Times that no call takes which waits: the class that each raises, at once and before anything is waited for."""
from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from shmkv import CacheDesc, CacheKey, DataType, LLMException, LLMParamError, LLMStatusCode, PullRequest

pytestmark = pytest.mark.timeout(60)
Here = Callable[..., Any]
DESC = CacheDesc(4, [2, 8], DataType.DT_FLOAT16)
KEY = CacheKey(1, 5, 0)         # of the own cluster, never bound
BAD = [(-1, LLMParamError), (2**32, LLMParamError), ("1", TypeError), (1.0, TypeError)]


async def _all_of(layers: Any) -> list[int]:
    return [layer async for layer in layers]


# Call (manager, cache, time) -> nothing, each with a wait that would be in vain.
CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "wait_for_key": lambda manager, cache, ms: manager.wait_for_key(KEY, ms),
    "pull_layers": lambda manager, cache, ms: list(manager.pull_layers(KEY, cache, timeout_ms=ms)),
    "pull_cache": lambda manager, cache, ms: manager.pull_cache(KEY, cache, wait=True, timeout_ms=ms),
    "prepare_pull": lambda manager, cache, ms: manager.prepare_pull(cache, wait=True, timeout_ms=ms)(KEY),
    "pull_many": lambda manager, cache, ms: manager.pull_many([PullRequest(KEY, cache)], wait=True, timeout_ms=ms),
    "wait_for_key_async": lambda manager, cache, ms: asyncio.run(manager.wait_for_key_async(KEY, ms)),
    "pull_cache_async": lambda manager, cache, ms: asyncio.run(manager.pull_cache_async(KEY, cache, timeout_ms=ms)),
    "pull_cache_async that waits": lambda manager, cache, ms: asyncio.run(
        manager.pull_cache_async(KEY, cache, wait=True, timeout_ms=ms)),
    "pull_layers_async": lambda manager, cache, ms: asyncio.run(_all_of(manager.pull_layers_async(KEY, cache, timeout_ms=ms))),
}


@pytest.fixture
def manager(here: Here) -> Any:
    return here("DECODER").kv_cache_manager


@pytest.mark.parametrize(("ms", "error"), [*BAD, (0, LLMParamError)])
@pytest.mark.parametrize("call", CALLS)
def test_timeout_ms(manager: Any, call: str, ms: Any, error: type[Exception]) -> None:
    cache = manager.allocate_cache(DESC)
    with pytest.raises(error, match="timeout_ms"):
        CALLS[call](manager, cache, ms)


@pytest.mark.parametrize("ms", [1, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_least_timeout_ms(manager: Any, call: str, ms: int) -> None:
    """The calls of the table would wait: this one is refused by none of them. True is 1, as for all integers of the contract."""
    with pytest.raises(LLMException) as failure:
        CALLS[call](manager, manager.allocate_cache(DESC), ms)
    expected = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST if call == "pull_cache_async" else LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
    assert failure.value.status_code == expected


@pytest.mark.parametrize(("ms", "error"), BAD)
def test_wait_ms(manager: Any, ms: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="wait_ms"):
        manager.allocate_cache(DESC, wait_ms=ms)
    assert manager.stats()["caches"] == 0


@pytest.mark.parametrize("ms", [0, True, 2**32 - 1])
def test_wait_ms_at_its_ends(manager: Any, ms: int) -> None:
    cache = manager.allocate_cache(DESC, wait_ms=ms)
    assert manager.stats()["caches"] == 1
    manager.deallocate_cache(cache)
