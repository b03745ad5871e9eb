"""Caches of one cluster: what keeps one alive, when its memory is used again, and what a failed call leaves."""
from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory
import pytest
from memory import INITIATOR, prefix, request
from peer import Namespace

from shmkv import CacheDesc, DataType, LLMException, LLMParamError, LLMRole, LLMStatusCode, segment
from shmkv._lookup import CONSUMED, NEVER, REMOVED
from shmkv.cache_layout import layout
from shmkv.caches import OwnCaches
from shmkv.cluster import Cluster
from shmkv.config import Settings
from shmkv.kv_cache import make_view
from shmkv.own_cache import OwnCache

SHM = Path(segment.SHM_DIR)
DESC = CacheDesc(2, [3, 16], DataType.DT_FLOAT16)


@pytest.fixture
def cluster(namespace: Namespace) -> Iterator[Cluster]:
    made = Cluster(Settings.from_options({}), LLMRole.PROMPT, 1)
    made.join()
    yield made
    made.close()


@pytest.fixture
def caches(cluster: Cluster) -> OwnCaches:
    return cluster.caches


def allocate(caches: OwnCaches, *words: tuple[int, int, int, int], desc: CacheDesc = DESC) -> OwnCache:
    return caches.allocate(layout(desc), dict(enumerate(words)), publish=True, zero=False)


def word_of(caches: Any, cache: Any, row: int) -> int:
    """What stands in the row's record now."""
    return int(caches._directory.row_words(cache.slot, [row])[0])


def pull(caches: OwnCaches, cache: OwnCache, row: int, first: int = 0, count: int = -1) -> None:
    """What a pull out of our own cache does after its copy."""
    assert caches.sources.finish(cache, row, word_of(caches, cache, row), by_key=True, consumes=True, first=first, count=count) == 0
    caches.collect()


def exists(cache: OwnCache) -> bool:
    return (SHM / cache.segment.name).exists()


def test_layout_puts_each_tensor_on_a_line() -> None:
    found = layout(CacheDesc(3, [2, 5, 7], DataType.DT_INT8, batch_dim_index=1))
    assert found.offsets == (4096, 4096 + 128, 4096 + 2 * 128)
    assert (found.nbytes, found.rows, found.row_nbytes, found.tensors.count) == (3 * 128, 5, (14,) * 3, 3)


def test_layout_follows_a_description_that_changes() -> None:
    desc = CacheDesc(3, [2, 5, 7], DataType.DT_INT8)
    assert (layout(desc).rows, layout(desc)) == (2, layout(CacheDesc(3, (2, 5, 7), DataType.DT_INT8)))
    desc.update_dim(0, 4)
    assert layout(desc).rows == 4
    desc.shape[0] = 2.0         # the caller's own list
    with pytest.raises(TypeError):
        layout(desc)


def test_fresh_cache_is_zero_and_reserved(caches: OwnCaches) -> None:
    cache = allocate(caches)
    assert not memory.content(cache.segment.region, 4096).any()
    assert os.stat(SHM / cache.segment.name).st_blocks * 512 >= cache.segment.nbytes
    assert [each.cache_id for each in caches] == [cache.cache_id]
    assert caches.get(cache) is cache


def test_ids_are_not_used_twice(caches: OwnCaches) -> None:
    seen = []
    for _ in range(4):
        cache = allocate(caches)
        seen.append(cache.cache_id)
        caches.deallocate(cache)
    assert seen == sorted(set(seen))
    assert seen[0] > 0


def test_deallocated_cache_is_gone_at_once_and_its_memory_is_used_again(caches: OwnCaches) -> None:
    first = allocate(caches)
    memory.content(first.segment.region)[4096:] = 7
    caches.deallocate(first)
    caches.deallocate(first)
    with pytest.raises(LLMException, match="does not exist or was deallocated") as caught:
        caches.get(first)
    assert caught.value.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    second = allocate(caches)
    assert second.segment is first.segment
    assert second.generation > first.generation
    assert (memory.content(second.segment.region)[4096:] == 7).all()


def test_zero_clears_what_is_used_again(caches: OwnCaches) -> None:
    first = allocate(caches)
    memory.content(first.segment.region)[4096:] = 7
    caches.deallocate(first)
    second = caches.allocate(layout(DESC), {}, publish=True, zero=True)
    assert second.segment is first.segment
    assert not memory.content(second.segment.region)[4096:4096 + 2 * 128].any()


def test_keys_keep_a_deallocated_cache(caches: OwnCaches) -> None:
    cache = allocate(caches, request(1), request(2))
    caches.deallocate(cache)
    for row, number in enumerate((1, 2)):
        found = caches.sources.by_key(request(number))
        assert isinstance(found, tuple)
        assert found[:2] == (cache, row)
    pull(caches, cache, 0)
    assert caches.sources.by_key(request(1)) == CONSUMED
    assert allocate(caches).segment is not cache.segment
    pull(caches, cache, 1)
    assert allocate(caches).segment is cache.segment


def test_id_keeps_a_cache_without_keys(caches: OwnCaches) -> None:
    cache = allocate(caches, request(1))
    caches.remove_key(request(1))
    caches.remove_key(request(1))
    assert caches.sources.by_key(request(1)) == REMOVED
    assert caches.get(cache) is cache
    assert caches.sources.by_id(cache.cache_id, 2) == (cache, 2, word_of(caches, cache, 2))
    assert caches.sources.by_id(cache.cache_id, 3) == caches.sources.by_id(99, 0) == NEVER


def test_removing_the_last_key_frees_a_deallocated_cache(caches: OwnCaches) -> None:
    cache = allocate(caches, request(1))
    caches.deallocate(cache)
    assert cache in list(caches)
    caches.remove_key(request(1))
    assert list(caches) == []
    assert allocate(caches).segment is cache.segment


def test_cache_in_use_is_not_freed(caches: OwnCaches) -> None:
    cache = allocate(caches)
    cache.local.count_in()
    caches.deallocate(cache)
    assert allocate(caches).segment is not cache.segment
    cache.local.leave()
    assert allocate(caches).segment is cache.segment


def test_cache_that_a_reader_names_is_not_freed(cluster: Cluster, caches: OwnCaches) -> None:
    cache = allocate(caches)
    hazard = memory.word(cluster.directory.region, "LinkRecord", 0, "LinkRecord", "sides",
                         memory.WIDTHS["LinkRecord", "sides"] // 2 + memory.OFFSETS["LinkSide", "hazard"])
    slot, incarnation = memory.OFFSETS["LinkSide", "slot"], memory.OFFSETS["LinkSide", "incarnation"]
    side = hazard_side(cluster)
    side(slot).value, side(incarnation).value = cluster.member.slot, cluster.member.incarnation
    hazard.value = cache.generation
    caches.deallocate(cache)
    assert exists(cache)
    assert allocate(caches).segment is not cache.segment
    hazard.value = 0
    assert allocate(caches).segment is cache.segment


def hazard_side(cluster: Cluster) -> object:
    """The initiator's side of the first link record, as if this cluster had linked to itself."""
    half = memory.WIDTHS["LinkRecord", "sides"] // 2

    def field(offset: int) -> object:
        return memory.word(cluster.directory.region, "LinkRecord", 0, "LinkRecord", "sides", INITIATOR * half + offset)

    return field


def test_viewed_memory_is_never_given_to_another_cache(caches: OwnCaches) -> None:
    cache = allocate(caches)
    array = make_view(cache.segment.region, cache.offsets[0], DESC, 0).numpy()
    array[...] = 3
    caches.deallocate(cache)
    assert not exists(cache)
    other = allocate(caches)
    memory.content(other.segment.region)[4096:] = 9
    assert (array == 3).all()


def test_failed_binding_leaves_nothing(caches: OwnCaches) -> None:
    first = allocate(caches, request(1))
    with pytest.raises(LLMParamError, match=r"key \(req_id 1, model_id 0\) is bound to row 0 of cache 1 already"):
        allocate(caches, request(2), request(1))
    assert caches.sources.by_key(request(2)) == NEVER
    assert [each.cache_id for each in caches] == [first.cache_id]


def test_key_may_be_bound_again_when_it_has_ended(caches: OwnCaches) -> None:
    for _ in range(3):
        cache = allocate(caches, request(1))
        pull(caches, cache, 0)
        assert caches.sources.by_key(request(1)) == CONSUMED
        caches.deallocate(cache)
    assert list(caches) == []


def test_keys_at_run_time(caches: OwnCaches) -> None:
    cache = allocate(caches)
    caches.bind(cache, {0: request(1), 2: prefix(4)}, publish=True)
    caches.bind(cache, {0: request(1)}, publish=True)
    with pytest.raises(LLMParamError, match="prefix_id 4"):
        caches.bind(cache, {1: prefix(4)}, publish=True)
    caches.unbind(cache, [0, 1])
    assert caches.sources.by_key(request(1)) == REMOVED
    caches.deallocate(cache)
    assert isinstance(caches.sources.by_key(prefix(4)), tuple)


def test_binding_unpublished_takes_the_bytes_back(caches: OwnCaches) -> None:
    cache = allocate(caches)
    assert caches.sources.is_published(cache, 1, 0, -1)
    caches.bind(cache, {1: request(1)}, publish=False)
    assert not caches.sources.is_published(cache, 1, 0, 1)
    assert caches.sources.is_published(cache, 0, 0, -1)
    caches.publish(cache, [1], 1)
    assert caches.sources.is_published(cache, 1, 0, 1)
    assert not caches.sources.is_published(cache, 1, 0, -1)
    assert not caches.sources.is_published(cache, 1, 1, 1)
    caches.publish(cache, [1], 2)
    assert caches.sources.is_published(cache, 1, 0, -1)


def test_parts_of_a_key_are_counted(caches: OwnCaches) -> None:
    cache = allocate(caches, request(1))
    pull(caches, cache, 0, 1, 1)
    assert isinstance(caches.sources.by_key(request(1)), tuple)
    pull(caches, cache, 0, 0, 1)
    assert caches.sources.by_key(request(1)) == CONSUMED


def test_dropped_ids_are_freed_by_the_next_call(caches: OwnCaches) -> None:
    cache = allocate(caches)
    caches.freeing.dropped.append(cache)
    assert caches.get(cache) is cache
    caches.collect()
    assert list(caches) == []


def test_collect_says_what_the_system_has_back(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMKV_RECYCLE_BYTES", "0")
    cluster = Cluster(Settings.from_options({}), LLMRole.PROMPT, 1)
    cluster.join()
    try:
        cache = allocate(cluster.caches)
        cluster.caches.freeing.dropped.append(cache)
        assert cluster.caches.collect() == cache.segment.nbytes
        assert cluster.caches.collect() == 0
        assert namespace.segments() == set()
    finally:
        cluster.close()


@pytest.mark.parametrize(("number", "hint"), [
    (errno.ENOSPC, "--shm-size"), (errno.ENOMEM, "vm.max_map_count"), (errno.EFBIG, "bytes free in")])
def test_memory_that_is_short_is_a_status_and_leaves_nothing(caches: OwnCaches, namespace: Namespace, number: int, hint: str,
                                                             monkeypatch: pytest.MonkeyPatch) -> None:
    kept = allocate(caches, request(1))

    def short(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(segment, "create", short)
        with pytest.raises(LLMException, match=hint) as caught:
            allocate(caches, request(2))
    assert caught.value.status_code == LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    assert "no memory for CacheDesc(num_tensors=2" in str(caught.value)
    assert [each.cache_id for each in caches] == [kept.cache_id]
    assert namespace.segments() == {kept.segment.name}
    assert isinstance(allocate(caches, request(2)), OwnCache)


def test_other_failures_of_the_system_are_no_lack_of_memory(caches: OwnCaches, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "not yours")

    with monkeypatch.context() as patch:
        patch.setattr(segment, "create", refuse)
        with pytest.raises(LLMException, match=r"cannot allocate .* not yours") as caught:
            allocate(caches)
    assert caught.value.status_code == LLMStatusCode.LLM_FAILED


def test_directory_that_cannot_grow_gives_the_segment_back(cluster: Cluster, caches: OwnCaches, namespace: Namespace,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    many = CacheDesc(1000, [4], DataType.DT_INT8)

    def full(fd: int, offset: int, nbytes: int) -> None:
        if fd in cluster._opened:
            raise OSError(errno.ENOSPC, "full")
        os.posix_fallocate(fd, offset, nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(segment, "reserve", full)
        with pytest.raises(LLMException) as caught:
            allocate(caches, desc=many)
    assert caught.value.status_code == LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY
    assert list(caches) == []
    assert len(namespace.segments()) <= 1
    made = allocate(caches, request(1), desc=many)
    assert caches.sources.by_key(request(1)) == (made, 0, word_of(caches, made, 0))


def test_close_unlinks_everything(namespace: Namespace) -> None:
    cluster = Cluster(Settings.from_options({}), LLMRole.PROMPT, 1)
    cluster.join()
    kept = [allocate(cluster.caches, request(number)) for number in range(3)]
    array = make_view(kept[0].segment.region, kept[0].offsets[1], DESC, 1).numpy()
    cluster.caches.deallocate(kept[1])
    cluster.close()
    assert namespace.names() == set()
    array[...] = 1
    gc.collect()
    assert (array == 1).all()
