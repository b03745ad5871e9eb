"""Keys that nobody fetches: which go, when, what is counted, and what it costs to remember them."""
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from peer import Namespace

from shmkv import CacheDesc, CacheKey, DataType, LLMException, LLMParamError, LLMStatusCode
from shmkv.expiry import FEWEST_DEADLINES

DESC = CacheDesc(2, [4, 16], DataType.DT_INT8)
DEADLINE_S = 20.0
LONG_MS = 3_600_000
U64MAX = 2**64 - 1


@pytest.fixture
def manager(here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("SHMKV_RECYCLE_BYTES", "0")
    return here("PROMPT").kv_cache_manager


def keys(*req_ids: int) -> list[CacheKey]:
    return [CacheKey(1, req_id) for req_id in req_ids]


def prefix(prefix_id: int) -> CacheKey:
    return CacheKey(1, U64MAX, 0, prefix_id)


def stats_when(manager: Any, condition: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """The stats as soon as they are as wanted: time has to pass, and no call but this one is made."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        found: dict[str, int] = manager.stats()
        if condition(found):
            assert time.monotonic() < deadline - DEADLINE_S / 2
            return found
        assert time.monotonic() < deadline, found
        time.sleep(0.002)


def lives(manager: Any, key: CacheKey) -> bool:
    return manager._cluster.caches._directory.find(key.words) is not None


# -- time to live ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("how", ["allocate", "bind", "publish"])
def test_key_that_nobody_fetched_goes_with_its_memory(manager: Any, namespace: Namespace, how: str) -> None:
    cache = manager.allocate_cache(DESC, keys(1, 2) if how != "bind" else (), publish=how == "allocate",
                                   key_ttl_ms=1 if how == "allocate" else None)
    if how == "bind":
        manager.bind(cache, dict(enumerate(keys(1, 2))), key_ttl_ms=1)
    elif how == "publish":
        manager.publish(cache, key_ttl_ms=1)
    manager.deallocate_cache(cache)
    found = stats_when(manager, lambda stats: stats["keys"] == 0)
    assert found.pop("control_bytes") > 0
    assert found == {"caches": 0, "cache_bytes": 0, "recycle_bytes": 0, "keys": 0, "keys_expired_by_ttl": 2,
                     "keys_expired_by_call": 0, "prefix_hits": 0, "prefix_evictions": 0}
    assert namespace.segments() == set()


@pytest.mark.parametrize("call", ["allocate", "deallocate", "remove", "publish", "bind", "unbind", "collect", "expire"])
def test_every_call_of_the_owner_notices(manager: Any, call: str) -> None:
    other = manager.allocate_cache(DESC)
    cache = manager.allocate_cache(DESC, keys(1), key_ttl_ms=1)
    deadline = time.monotonic_ns() + 2_000_000
    while time.monotonic_ns() < deadline:
        pass
    {
        "allocate": lambda: manager.allocate_cache(DESC, keys(1)), "deallocate": lambda: manager.deallocate_cache(other),
        "remove": lambda: manager.remove_cache_key(CacheKey(1, 99)), "publish": lambda: manager.publish(other),
        "bind": lambda: manager.bind(other, {0: CacheKey(1, 1)}), "unbind": lambda: manager.unbind(other, [0]),
        "collect": manager.collect, "expire": lambda: manager.expire(LONG_MS),
    }[call]()
    assert manager._cluster.caches.expiry.by_ttl == 1
    assert lives(manager, CacheKey(1, 1)) is (call in ("allocate", "bind")), "the same key is free for another row"
    manager.deallocate_cache(cache)


def test_prefix_keys_go_as_well(manager: Any) -> None:
    manager.allocate_cache(DESC, [prefix(5), CacheKey(1, 1)], key_ttl_ms=1)
    assert stats_when(manager, lambda stats: stats["keys"] == 0)["keys_expired_by_ttl"] == 2


def test_without_a_time_to_live_keys_stay(manager: Any) -> None:
    cache = manager.allocate_cache(DESC, keys(1, 2))
    manager.bind(cache, {0: CacheKey(1, 3)}, key_ttl_ms=1)
    stats_when(manager, lambda stats: stats["keys_expired_by_ttl"] == 1)
    assert manager.stats()["keys"] == 1
    assert lives(manager, CacheKey(1, 2))


def test_publish_counts_anew_only_with_a_time_of_its_own(manager: Any) -> None:
    cache = manager.allocate_cache(DESC, keys(1, 2), publish=False, key_ttl_ms=200)
    manager.publish(cache, rows=[0], key_ttl_ms=LONG_MS)
    manager.publish(cache, rows=[1])
    found = stats_when(manager, lambda stats: stats["keys_expired_by_ttl"] > 0)
    assert (found["keys"], lives(manager, CacheKey(1, 1)), lives(manager, CacheKey(1, 2))) == (1, True, False)


def test_time_to_live_of_a_key_is_not_that_of_the_next_one_in_its_row(manager: Any) -> None:
    cache = manager.allocate_cache(DESC, keys(1), key_ttl_ms=50)
    manager.bind(cache, {0: CacheKey(1, 2)})
    other = manager.allocate_cache(DESC, keys(3), key_ttl_ms=60)
    stats_when(manager, lambda _: not lives(manager, CacheKey(1, 3)))
    assert lives(manager, CacheKey(1, 2)), "the row was bound again, without"
    manager.deallocate_cache(other)


def test_key_that_was_fetched_in_time_is_not_counted(here: Callable[..., Any]) -> None:
    """A pull out of an own cache consumes as any other."""
    dist = here("PROMPT")
    manager = dist.kv_cache_manager
    cache = manager.allocate_cache(DESC, keys(1, 2), key_ttl_ms=30)
    caches, own = manager._cluster.caches, cache._own
    assert caches.sources.finish(own, 0, caches._directory.row_words(own.slot, [0])[0], by_key=True, consumes=True, first=0,
                                 count=-1) == 0
    assert stats_when(manager, lambda stats: stats["keys_expired_by_ttl"] > 0)["keys_expired_by_ttl"] == 1
    assert not lives(manager, CacheKey(1, 1))


@pytest.mark.parametrize(("ttl", "error"), [(0, LLMParamError), (-1, LLMParamError), (2**32, LLMParamError), (1.5, TypeError),
                                            ("1", TypeError)])
def test_time_to_live_is_checked_before_anything_happens(manager: Any, ttl: Any, error: type[Exception]) -> None:
    cache = manager.allocate_cache(DESC, publish=False)
    for call in (lambda: manager.allocate_cache(DESC, keys(1), key_ttl_ms=ttl),
                 lambda: manager.bind(cache, {0: CacheKey(1, 1)}, key_ttl_ms=ttl),
                 lambda: manager.publish(cache, key_ttl_ms=ttl)):
        with pytest.raises(error):
            call()
    assert (manager.stats()["keys"], manager.stats()["caches"]) == (0, 1)
    assert manager._cluster.caches._directory.progress(cache._own.slot, 0) == 0


# -- expire ------------------------------------------------------------------------------------------------------------

def test_expire_takes_all_that_are_older_and_no_other(manager: Any, namespace: Namespace) -> None:
    old = manager.allocate_cache(DESC, [CacheKey(1, 1), prefix(7)])
    manager.deallocate_cache(old)
    bound_ns = time.monotonic_ns()
    assert manager.expire(LONG_MS) == 0
    while time.monotonic_ns() - bound_ns < 1_000_000_000:
        assert lives(manager, prefix(7))
    new = manager.allocate_cache(DESC, keys(2))
    assert manager.expire((time.monotonic_ns() - bound_ns) // 1_000_000) == 2
    assert manager.stats()["keys_expired_by_call"] == 2
    assert lives(manager, CacheKey(1, 2))
    assert len(namespace.segments()) == 1
    manager.deallocate_cache(new)


def test_expire_of_all_and_of_nothing(manager: Any) -> None:
    manager.allocate_cache(DESC, [*keys(1, 2), prefix(3)], key_ttl_ms=LONG_MS)
    assert [manager.expire(0), manager.expire(0)] == [3, 0]
    found = manager.stats()
    assert found.pop("control_bytes") > 0
    assert found == {"caches": 0, "cache_bytes": 0, "recycle_bytes": 0, "keys": 0, "keys_expired_by_ttl": 0,
                     "keys_expired_by_call": 3, "prefix_hits": 0, "prefix_evictions": 0}
    with pytest.raises(LLMParamError):
        manager.expire(-1)
    with pytest.raises(TypeError):
        manager.expire(None)


def test_publishing_makes_a_key_young_again(manager: Any) -> None:
    cache = manager.allocate_cache(DESC, keys(1, 2), publish=False)
    ages = manager._cluster.caches.expiry._slots[cache._own.slot]
    bound = ages[0].since_ns
    manager.publish(cache, rows=[0], layers=1, tensor_num_per_layer=1)
    assert ages[0].since_ns > bound
    assert ages[1].since_ns <= ages[0].since_ns


def test_clock_that_jumps_makes_no_key_older(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    manager.allocate_cache(DESC, keys(1), key_ttl_ms=LONG_MS)
    for jump_s in (10 * 365 * 86400, -10 * 365 * 86400):
        now, now_ns = time.time() + jump_s, time.time_ns() + jump_s * 10**9
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=now: now)
            patch.setattr(time, "time_ns", lambda now_ns=now_ns: now_ns)
            assert (manager.expire(LONG_MS), manager.stats()["keys"]) == (0, 1)


# -- what is remembered ------------------------------------------------------------------------------------------------

def test_deadlines_of_keys_that_went_in_time_do_not_pile_up(manager: Any) -> None:
    cache = manager.allocate_cache(DESC)
    expiry = manager._cluster.caches.expiry
    for number in range(20 * FEWEST_DEADLINES):
        manager.bind(cache, {number % 4: CacheKey(1, number)}, key_ttl_ms=LONG_MS)
    assert len(expiry._deadlines) <= 2 * 4 + FEWEST_DEADLINES
    assert manager.stats()["keys"] == 4
    manager.deallocate_cache(cache)
    assert manager.expire(0) == 4
    assert expiry._slots == {}


def test_keys_without_an_age_left_go_with_their_cache(manager: Any) -> None:
    for number in range(10):
        cache = manager.allocate_cache(DESC, keys(number), key_ttl_ms=LONG_MS)
        manager.remove_cache_key(CacheKey(1, number))
        manager.deallocate_cache(cache)
    assert manager._cluster.caches.expiry._slots == {}
    assert manager.stats()["caches"] == 0


def test_calls_after_finalize_and_of_a_role_without_keys(here: Callable[..., Any]) -> None:
    dist = here("DECODER", 2)
    manager = dist.kv_cache_manager
    manager.allocate_cache(DESC)
    assert (manager.expire(0), manager.stats()["keys"]) == (0, 0)
    dist.finalize()
    for call in (lambda: manager.expire(0), manager.stats):
        with pytest.raises(LLMException) as caught:
            call()
        assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
