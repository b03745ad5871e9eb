"""Pulls of some of the heads: bytes against numpy slicing, keys that stay, arguments that are refused with nothing moved."""
from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from head_cases import HeadCase, Sided, head_case, head_cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import Peer, StartPeer, array, by_id, heads, req
from reference import SUCCESS, Bytes, canary, noise

from shmkv import (
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    HeadSlice,
    KvCache,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    PullRequest,
)

pytestmark = pytest.mark.timeout(600)
Here = Callable[..., Any]
MANY = settings(max_examples=1500, deadline=None, database=None, suppress_health_check=list(HealthCheck))
OWN = 1
DTYPES = {1: "DT_INT8", 2: "DT_FLOAT16", 4: "DT_FLOAT"}
KINDS = ["pull_cache", "prepare_pull", "pull_many"]


def _allocate(manager: Any, case: HeadCase, side: Sided, content: Bytes) -> KvCache:
    desc = CacheDesc(case.num_tensors, case.shape(side), DataType[DTYPES[case.itemsize]], batch_dim_index=side[1])
    made: KvCache = manager.allocate_cache(desc)
    cache_bytes.write(made, content)
    return made


def _slice(case: HeadCase) -> HeadSlice:
    return HeadSlice(case.heads_dim(case.dst), case.src[2], case.src_heads, case.dst_heads)


def _pull(manager: Any, kind: str, key: Any, dst: KvCache, row: int, wanted: HeadSlice) -> None:
    if kind == "pull_cache":
        manager.pull_cache(key, dst, row, heads=wanted)
    elif kind == "prepare_pull":
        manager.prepare_pull(dst, batch_index=row, heads=wanted)(key)
    else:
        manager.pull_many([PullRequest(key, dst, row, heads=wanted)])


@pytest.mark.parametrize("kind", KINDS)
def test_heads_go_where_numpy_puts_them(here: Here, kind: str) -> None:
    manager = here("DECODER", OWN).kv_cache_manager

    @settings(MANY, max_examples=1500 if kind == "pull_cache" else 200)
    @given(case=head_cases(), src_row=st.integers(0, 2), dst_row=st.integers(0, 2))
    def check(case: HeadCase, src_row: int, dst_row: int) -> None:
        src_row, dst_row = src_row % case.src[0], dst_row % case.dst[0]
        before, empty = noise(case.geometry(case.src), src_row), canary(case.geometry(case.dst))
        src, dst = _allocate(manager, case, case.src, before), _allocate(manager, case, case.dst, empty)
        _pull(manager, kind, CacheKeyByIdAndIndex(OWN, src.cache_id, src_row), dst, dst_row, _slice(case))
        after = cache_bytes.read(dst)
        manager.deallocate_cache(src)
        manager.deallocate_cache(dst)
        np.testing.assert_array_equal(after, case.pulled(before, empty, src_row, dst_row))

    check()


def test_heads_within_one_cache_are_as_if_through_a_temporary(here: Here) -> None:
    manager = here("DECODER", OWN).kv_cache_manager

    @settings(MANY, max_examples=500)
    @given(case=head_cases(), row=st.integers(0, 2))
    def check(case: HeadCase, row: int) -> None:
        row = row % case.src[0]
        start = max(0, min(case.dst_heads.start, case.src[2] - len(case.src_heads)))
        same = HeadCase(case.dims, case.place, case.src, case.src, case.src_heads, range(start, start + len(case.src_heads)),
                        case.itemsize, case.num_tensors)
        before = noise(same.geometry(same.src), row)
        cache = _allocate(manager, same, same.src, before)
        manager.pull_cache(CacheKeyByIdAndIndex(OWN, cache.cache_id, row), cache, 0, heads=_slice(same))
        after = cache_bytes.read(cache)
        manager.deallocate_cache(cache)
        np.testing.assert_array_equal(after, same.pulled(before, before, row, 0))

    check()


@pytest.mark.parametrize(("seed", "copy"), [(0, "memory"), (1, "memory"), (0, "pread")])
def test_random_heads_between_two_processes(prompt: StartPeer, decoder: StartPeer, seed: int, copy: str) -> None:
    p, d = prompt(1), decoder(2, env={"SHMKV_COPY": copy})
    cases = [head_case(random.Random(1000 * seed + number).randint) for number in range(120)]
    check_between(p, d, cases)


@pytest.mark.parametrize("place", [0, 1], ids=["heads, tokens", "tokens, heads"])
@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (2, 3), (3, 2)], ids=str)
def test_heads_beside_tokens(prompt: StartPeer, decoder: StartPeer, place: int, dims: tuple[int, int]) -> None:
    """Source sliced, destination sliced, both, none; the batch anywhere on either side."""
    p, d = prompt(1), decoder(2)
    check_between(p, d, [HeadCase([6, 8], place, (3, dims[0], src), (2, dims[1], dst), src_heads, dst_heads, 2, 4)
                         for src, dst, src_heads, dst_heads in (
                             (8, 4, range(4, 8), range(4)), (4, 8, range(4), range(4, 8)), (8, 8, range(2, 4), range(5, 7)),
                             (4, 4, range(4), range(4)), (8, 1, range(7, 8), range(1)))])


def check_between(p: Peer, d: Peer, cases: list[HeadCase]) -> None:
    """Sources in p, destinations in d, and every byte of d as numpy says."""
    def allocation(name: str, case: HeadCase, side: Sided) -> tuple[str, dict[str, Any]]:
        return "allocate", {"name": name, "num_tensors": case.num_tensors, "shape": case.shape(side), "batch_dim": side[1],
                            "dtype": DTYPES[case.itemsize]}

    made = p.batch([allocation(f"src{number}", case, case.src) for number, case in enumerate(cases)])
    p.batch([("noise", {"name": f"src{number}", "seed": number}) for number in range(len(cases))])
    d.batch([allocation(f"dst{number}", case, case.dst) for number, case in enumerate(cases)])
    d.batch([("canary", {"name": f"dst{number}"}) for number in range(len(cases))])
    pulls = d.batch([("pull", {
        "key": by_id(1, made[number].value, number % case.src[0]), "name": f"dst{number}", "batch_index": number % case.dst[0],
        "heads": heads(case.heads_dim(case.dst), case.src[2], case.src_heads, case.dst_heads)})
        for number, case in enumerate(cases)])
    read = d.batch([("read", {"name": f"dst{number}"}) for number in range(len(cases))])
    for number, case in enumerate(cases):
        assert pulls[number].outcome == SUCCESS, (case, pulls[number].trace)
        wanted = case.pulled(noise(case.geometry(case.src), number), canary(case.geometry(case.dst)), number % case.src[0],
                             number % case.dst[0])
        np.testing.assert_array_equal(array(read[number].value), wanted, err_msg=str(case))


# -- keys -----------------------------------------------------------------------------------------------------------------

SRC, DST = CacheDesc(4, [2, 6, 8, 4], DataType.DT_FLOAT16), CacheDesc(4, [2, 6, 4, 4], DataType.DT_FLOAT16)
KEY = CacheKey(OWN, 7)
HALF = HeadSlice(2, 8, range(4, 8))


@pytest.fixture
def pulling(here: Here) -> tuple[Any, KvCache, KvCache]:
    """A manager that became a decoder after binding KEY to row 0; that cache; a destination with half of the heads."""
    dist = here("PROMPT", OWN, enable_switch_role=True)
    manager = dist.kv_cache_manager
    src, dst = manager.allocate_cache(SRC, [KEY]), manager.allocate_cache(DST)
    cache_bytes.write(src, noise(cache_bytes.geometry_of(src), seed=3))
    cache_bytes.write(dst, canary(cache_bytes.geometry_of(dst)))
    dist.switch_role(LLMRole.DECODER)
    return manager, src, dst


@pytest.mark.parametrize("kind", KINDS)
def test_a_pull_of_heads_keeps_the_key(pulling: tuple[Any, KvCache, KvCache], kind: str) -> None:
    manager, _, dst = pulling
    for wanted in (HALF, HeadSlice(2, 8, range(4)), HALF, HeadSlice(2, 8, range(1), range(3, 4))):
        _pull(manager, kind, KEY, dst, 0, wanted)
    manager.pull_cache(KEY, dst, size=8)
    with pytest.raises(LLMException) as refusal:
        manager.pull_cache(KEY, dst, heads=HALF)
    assert refusal.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_all_heads_keep_the_key_as_well(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, src, _ = pulling
    whole = manager.allocate_cache(SRC)
    for wanted in (HeadSlice(2), HeadSlice(2, 8), HeadSlice(2, None, range(8), range(8))):
        manager.pull_cache(KEY, whole, heads=wanted)
        np.testing.assert_array_equal(cache_bytes.read(whole)[:, :, 0], cache_bytes.read(src)[:, :, 0])
    manager.pull_cache(KEY, whole)


def test_heads_of_some_layers_cover_nothing(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, src, dst = pulling
    for layer in (range(1), range(1, 2)):
        manager.pull_cache(KEY, dst, heads=HALF, src_layer_range=layer, dst_layer_range=layer)
    np.testing.assert_array_equal(cache_bytes.read(dst)[:, 0, 0].reshape(4, 6, 4, 8),
                                  cache_bytes.read(src)[:, 0, 0].reshape(4, 6, 8, 8)[:, :, 4:])
    manager.pull_cache(KEY, dst, heads=HALF)


def test_plans_of_slices_that_differ_little_are_told_apart(pulling: tuple[Any, KvCache, KvCache]) -> None:
    """Equal sizes and offsets, other windows and periods, over and over: the same calls find their own plans again."""
    manager, src, _ = pulling
    dst = manager.allocate_cache(DST)
    # (heads dim, heads of the source, its range, that of the destination), and how numpy reads both rows.
    slices = [((2, 8, range(4), range(4)), (6, 8, 8), (6, 4, 8)), ((2, 8, range(2, 6), range(4)), (6, 8, 8), (6, 4, 8))]
    row = cache_bytes.read(src)[:, 0, 0]
    for _ in range(3):
        for arguments, read_src, read_dst in slices:
            manager.pull_cache(KEY, dst, heads=HeadSlice(*arguments))
            found = cache_bytes.read(dst)[:, 0, 0].reshape(4, *read_dst)
            np.testing.assert_array_equal(found, row.reshape(4, *read_src)[:, :, arguments[2].start:arguments[2].stop])
        manager.pull_cache(KEY, dst, size=192, src_cache_offset=0)
        np.testing.assert_array_equal(cache_bytes.read(dst)[:, 0, 0], row[:, :192])


# -- what is refused --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wanted", [
    HeadSlice(2), HeadSlice(2, 7, range(4)), HeadSlice(2, 16, range(4)), HeadSlice(2, 4, range(4)), HeadSlice(2, 9, range(4, 8)),
    HeadSlice(2, 2**32 - 1, range(4)),
    HeadSlice(0), HeadSlice(4), HeadSlice(-1), HeadSlice(2, 8), HeadSlice(2, 8, range(4, 9)), HeadSlice(2, 8, range(5, 8)),
    HeadSlice(2, 8, range(8)), HeadSlice(2, 8, range(4), range(1, 5)), HeadSlice(2, 8, range(2), range(4)),
    HeadSlice(1, 8, range(6)), HeadSlice(3, 8, range(4)),
], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_the_caches_do_not_have(pulling: tuple[Any, KvCache, KvCache], wanted: HeadSlice, kind: str) -> None:
    manager, _, dst = pulling
    if wanted == HeadSlice(3, 8, range(4)):
        # Dims are only counted: 6 x 4 groups of 8 of something are in the source's rows just so.
        _pull(manager, kind, KEY, dst, 0, wanted)
        return
    with pytest.raises(LLMParamError):
        _pull(manager, kind, KEY, dst, 0, wanted)
    assert (cache_bytes.read(dst) == 0x5A).all()
    manager.pull_cache(KEY, dst, size=8)


@pytest.mark.parametrize("options", [
    {"size": 8}, {"src_cache_offset": 0}, {"dst_cache_offset": 0}, {"src_cache_offset": 8, "size": 8},
], ids=str)
def test_heads_go_with_neither_size_nor_offsets(pulling: tuple[Any, KvCache, KvCache], options: dict[str, int]) -> None:
    manager, _, dst = pulling
    with pytest.raises(LLMParamError, match="heads"):
        manager.pull_cache(KEY, dst, heads=HALF, **options)
    assert (cache_bytes.read(dst) == 0x5A).all()
    manager.pull_cache(KEY, dst, size=8)


@pytest.mark.parametrize("wanted", [2, "2", (2, 8), range(4), [HALF]], ids=repr)
def test_heads_are_a_head_slice(pulling: tuple[Any, KvCache, KvCache], wanted: Any) -> None:
    manager, _, dst = pulling
    for kind in KINDS:
        with pytest.raises(TypeError, match="heads"):
            _pull(manager, kind, KEY, dst, 0, wanted)
    assert (cache_bytes.read(dst) == 0x5A).all()


def test_heads_of_rows_and_keys_that_are_not_there(pulling: tuple[Any, KvCache, KvCache]) -> None:
    manager, _, dst = pulling
    for key, row, status in ((KEY, 2, LLMStatusCode.LLM_PARAM_INVALID), (CacheKey(OWN, 8), 0, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
                             (CacheKey(99, 7), 0, LLMStatusCode.LLM_NOT_YET_LINK)):
        with pytest.raises(LLMException) as refusal:
            manager.pull_cache(key, dst, row, heads=HALF)
        assert refusal.value.status_code is status
    assert (cache_bytes.read(dst) == 0x5A).all()


def test_tensors_that_differ_are_selected_by_their_layer(here: Here) -> None:
    """Keys with 8 heads and values with 2, say: one call a kind of tensor."""
    manager = here("DECODER", OWN).kv_cache_manager
    src = manager.allocate_cache(CacheDesc.of_tensors([[1, 6, 8, 4], [1, 6, 2, 4]], DataType.DT_INT8))
    dst = manager.allocate_cache(CacheDesc.of_tensors([[1, 6, 4, 4], [1, 6, 1, 4]], DataType.DT_INT8))
    for number, tensor in enumerate(src.tensors):
        tensor.numpy()[...] = np.random.default_rng(number).integers(0, 99, tensor.shape)
    key = CacheKeyByIdAndIndex(OWN, src.cache_id)
    with pytest.raises(LLMParamError, match="dst_layer_range"):
        manager.pull_cache(key, dst, heads=HeadSlice(2, 8, range(1), range(1)))
    assert not any(tensor.numpy().any() for tensor in dst.tensors)
    for layer, wanted in ((range(1), HeadSlice(2, 8, range(4, 8))), (range(1, 2), HeadSlice(2, 2, range(1, 2)))):
        manager.pull_cache(key, dst, src_layer_range=layer, dst_layer_range=layer, tensor_num_per_layer=1, heads=wanted)
    np.testing.assert_array_equal(dst.tensors[0].numpy(), src.tensors[0].numpy()[:, :, 4:])
    np.testing.assert_array_equal(dst.tensors[1].numpy(), src.tensors[1].numpy()[:, :, 1:])


def test_request_key_stays_over_a_link(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=(2, 6, 8, 4), keys=[req(1, 7)])
    d.call("allocate", name="kv", shape=(2, 6, 4, 4))
    said = [d.outcome("pull", key=req(1, 7), name="kv", heads=heads(2, count, range(4, 8))) for count in (8, 7, 8)]
    assert said == [SUCCESS, "LLM_PARAM_INVALID", SUCCESS]
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS
    assert d.outcome("pull", key=req(1, 7), name="kv", heads=heads(2, 8, range(4))) == "LLM_KV_CACHE_NOT_EXIST"
