"""Contract, appendix B18 and section 7.6: the arguments of pull_blocks. What is refused moves nothing and ends no key."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from own_blocks import BLOCKS, KEY, OWN, ROW_KEY, OwnBlocks

from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMException,
    LLMParamError,
    LLMRole,
    LLMStatusCode,
    Placement,
)

pytestmark = pytest.mark.timeout(60)
U64MAX = 2**64 - 1
REQUIRED = ["prompt_cache_key", "decoder_kv_cache", "prompt_blocks", "decoder_blocks", "tensor_num_per_layer", "batch_index"]
LISTS = ["prompt_blocks", "decoder_blocks"]
RANGES = ["src_layer_range", "dst_layer_range"]


def block(cache: KvCache, number: int) -> Any:
    return cache_bytes.read(cache)[:, :, number]


# -- what works ---------------------------------------------------------------------------------------------------------

def test_b18_last_of_equal_destinations_stays(own: OwnBlocks) -> None:
    own.pull(prompt_blocks=[0, 1, 2, 3], decoder_blocks=[5, 6, 5, 6])
    wanted = own.before[0]
    np.testing.assert_array_equal(block(own.dst, 5), wanted[:, :, 2])
    np.testing.assert_array_equal(block(own.dst, 6), wanted[:, :, 3])
    assert (np.delete(cache_bytes.read(own.dst), [5, 6], axis=2) == 0x5A).all()


def test_b18_one_source_for_many_destinations(own: OwnBlocks) -> None:
    own.pull(prompt_blocks=[3, 3, 3], decoder_blocks=[0, 7, 4])
    for number in (0, 7, 4):
        np.testing.assert_array_equal(block(own.dst, number), own.before[0][:, :, 3])
    assert (np.delete(cache_bytes.read(own.dst), [0, 4, 7], axis=2) == 0x5A).all()


def test_b18_blocks_key_is_never_consumed(own: OwnBlocks) -> None:
    for _ in range(3):
        own.pull(prompt_blocks=list(range(8)), decoder_blocks=list(range(8)))
    np.testing.assert_array_equal(cache_bytes.read(own.dst), own.before[0])


def test_b18_layer_ranges_select_tensors_on_either_side(own: OwnBlocks) -> None:
    own.pull(src_layer_range=range(1), dst_layer_range=range(1, 2))
    after = cache_bytes.read(own.dst)
    np.testing.assert_array_equal(after[2:, :, 2], own.before[0][:2, :, 1])
    after[2:, :, 2] = 0x5A
    assert (after == 0x5A).all()
    own.clear()
    own.pull(src_layer_range=range(3, 4), dst_layer_range=range(1), tensor_num_per_layer=1)
    np.testing.assert_array_equal(cache_bytes.read(own.dst)[0, :, 2], own.before[0][3, :, 1])


def test_b18_bool_is_an_integer(own: OwnBlocks) -> None:
    own.pull(prompt_blocks=[True, False], decoder_blocks=[False, True], batch_index=False)
    np.testing.assert_array_equal(cache_bytes.read(own.dst)[:, :, :2], own.before[0][:, :, [1, 0]])


def test_b18_other_element_types_of_the_same_bytes(own: OwnBlocks) -> None:
    dst = own.manager.allocate_blocks_cache(CacheDesc(4, [3, 2, 4], DataType.DT_FLOAT16))
    own.pull(decoder_kv_cache=dst)
    np.testing.assert_array_equal(block(dst, 2), own.before[0][:, :, 1])


def test_b18_rows_of_an_ordinary_cache_are_blocks_too(own: OwnBlocks) -> None:
    dst = own.manager.allocate_cache(CacheDesc(4, [4, 3, 4], DataType.DT_INT8, batch_dim_index=1))
    own.pull(decoder_kv_cache=dst, prompt_blocks=[5, 6], decoder_blocks=[2, 0])
    after = cache_bytes.read(dst)
    for number, wanted in ((2, 5), (0, 6)):
        np.testing.assert_array_equal(after[:, :, number].reshape(4, 16), own.before[0][:, 0, wanted])


def test_b18_pull_cache_takes_a_block_for_a_row(own: OwnBlocks) -> None:
    """The mixes of v1: a block by cache id, and one block as destination."""
    own.manager.pull_cache(CacheKeyByIdAndIndex(OWN, own.src.cache_id, 5), own.dst, 3)
    np.testing.assert_array_equal(block(own.dst, 3), own.before[0][:, :, 5])
    own.manager.pull_cache(CacheKeyByIdAndIndex(OWN, own.src.cache_id, 6), own.into, 1, size=16, dst_cache_offset=8)
    np.testing.assert_array_equal(cache_bytes.read(own.into)[:, 0, 1, 8:24], own.before[0][:, 0, 6])


def test_b18_pull_cache_refuses_a_blocks_key(own: OwnBlocks) -> None:
    for call in (own.manager.pull_cache, lambda key, cache: own.manager.prepare_pull(cache)(key)):
        with pytest.raises(TypeError, match="only support"):
            call(KEY, own.into)
    own.assert_untouched()


def test_b18_request_key_is_consumed_by_a_row_into_blocks(own: OwnBlocks) -> None:
    own.pull_row()
    assert _status(own.pull_row) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    np.testing.assert_array_equal(cache_bytes.read(own.dst)[:, 0, 3:5].reshape(4, 32), own.before[1][:, 0, 0, :32])


def test_b18_request_key_is_consumed_by_the_last_layer_into_blocks(own: OwnBlocks) -> None:
    for layer in (range(1), range(1), range(1, 2)):
        own.pull_row(src_layer_range=layer, dst_layer_range=layer)
    assert _status(own.pull_row) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_b18_prefix_key_and_cache_id_stay(own: OwnBlocks) -> None:
    own.dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:1111"})
    own.manager.bind(own.row, {1: CacheKey(OWN, U64MAX, 0, 5)})
    own.dist.switch_role(LLMRole.DECODER)
    for key in (CacheKey(OWN, U64MAX, 0, 5), CacheKeyByIdAndIndex(OWN, own.row.cache_id, 1)) * 2:
        own.clear()
        own.pull_row(prompt_cache_key=key, decoder_blocks=[7, 0, 5])
        np.testing.assert_array_equal(cache_bytes.read(own.dst)[:, 0, [7, 0, 5]].reshape(4, 48), own.before[1][:, 0, 1, :48])


def _status(call: Callable[..., None], **arguments: Any) -> LLMStatusCode:
    with pytest.raises(LLMException) as refusal:
        call(**arguments)
    return refusal.value.status_code


# -- types --------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("argument", REQUIRED)
def test_b18_none_for_a_required_argument(own: OwnBlocks, argument: str) -> None:
    error = own.refuses(TypeError, **{argument: None})
    assert isinstance(error, AttributeError)
    assert argument in str(error)


@pytest.mark.parametrize("argument", LISTS)
@pytest.mark.parametrize("value", [(1,), {1}, "1", 1, np.array([1]), range(1, 2), {1: 1}], ids=repr)
def test_b18_block_lists_are_lists(own: OwnBlocks, argument: str, value: Any) -> None:
    text = str(own.refuses(TypeError, **{argument: value}))
    assert "only support" in text
    assert argument in text


@pytest.mark.parametrize("argument", LISTS)
@pytest.mark.parametrize("value", ["1", 1.0, None, [1], np.int64(1), np.uint32(1)], ids=repr)
def test_b18_block_numbers_are_int(own: OwnBlocks, argument: str, value: Any) -> None:
    other = LISTS[argument == LISTS[0]]
    text = str(own.refuses(TypeError, **{argument: [1, value], other: [0, 1]}))
    assert "inner type only support" in text
    assert argument in text


def test_b18_numpy_number_is_told_to_use_int(own: OwnBlocks) -> None:
    assert "int(" in str(own.refuses(TypeError, prompt_blocks=[np.int64(1)]))


@pytest.mark.parametrize("key", ["key", 1, (OWN, 0)], ids=repr)
def test_b18_wrong_type_of_key(own: OwnBlocks, key: Any) -> None:
    assert "only support" in str(own.refuses(TypeError, prompt_cache_key=key))


@pytest.mark.parametrize("cache", ["cache", 1, BLOCKS], ids=lambda cache: type(cache).__name__)
def test_b18_wrong_type_of_destination(own: OwnBlocks, cache: Any) -> None:
    assert "only support" in str(own.refuses(TypeError, decoder_kv_cache=cache))


@pytest.mark.parametrize(("argument", "value"), [
    *[(name, value) for name in RANGES for value in ([0, 1], (0, 1), 1, "0:1")],
    *[("tensor_num_per_layer", value) for value in (1.0, "x", np.int32(2))], ("batch_index", "0"),
], ids=str)
def test_b18_wrong_types_of_options(own: OwnBlocks, argument: str, value: Any) -> None:
    assert argument in str(own.refuses(TypeError, **{argument: value}))


@pytest.mark.parametrize("keyword", ["size", "src_cache_offset", "dst_cache_offset", "heads", "layer_range"])
def test_b18_unknown_keyword_is_named(own: OwnBlocks, keyword: str) -> None:
    assert keyword in str(own.refuses(TypeError, **{keyword: 1}))


# -- values -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("src", "dst"), [
    ([], []), ([], [0]), ([0], []), ([0, 1], [0]), ([0], [0, 1]), (list(range(8)), list(range(7))),
], ids=str)
def test_b18_lists_are_equally_long_and_not_empty(own: OwnBlocks, src: list[int], dst: list[int]) -> None:
    text = str(own.refuses(LLMParamError, prompt_blocks=src, decoder_blocks=dst))
    assert all(name in text for name in LISTS)


@pytest.mark.parametrize("argument", LISTS)
@pytest.mark.parametrize("value", [-1, -2**63, -2**64, 8, 2**31, 2**32 - 1, 2**32, 2**32 + 1, 2**63, U64MAX, 2**64, 2**64 + 1])
def test_b18_block_numbers_out_of_range(own: OwnBlocks, argument: str, value: int) -> None:
    other = LISTS[argument == LISTS[0]]
    for values in ([value, 1], [1, value]):
        assert argument in str(own.refuses(LLMParamError, **{argument: values, other: [0, 1]}))


@pytest.mark.parametrize("value", [8, 2**32, U64MAX, 2**64, -1])
def test_b18_every_block_number_counts_also_one_whose_destination_comes_again(own: OwnBlocks, value: int) -> None:
    assert "prompt_blocks" in str(own.refuses(LLMParamError, prompt_blocks=[value, 1], decoder_blocks=[2, 2]))


@pytest.mark.parametrize("shape", [[8, 15], [8, 17], [8, 8], [8, 32], [4, 64], [16]], ids=str)
def test_b18_blocks_have_the_same_bytes(own: OwnBlocks, shape: list[int]) -> None:
    dst = own.manager.allocate_blocks_cache(CacheDesc(4, shape, DataType.DT_INT8))
    own.refuses(LLMParamError, decoder_kv_cache=dst)
    assert not cache_bytes.read(dst).any()


@pytest.mark.parametrize("num_tensors", [1, 2, 3, 5, 8])
def test_b18_numbers_of_tensors_are_equal(own: OwnBlocks, num_tensors: int) -> None:
    dst = own.manager.allocate_blocks_cache(CacheDesc(num_tensors, [8, 16], DataType.DT_INT8))
    own.refuses(LLMParamError, decoder_kv_cache=dst)
    assert not cache_bytes.read(dst).any()


@pytest.mark.parametrize("options", [
    *[{name: layers} for name in RANGES for layers in (
        range(0), range(2, 2), range(2, 1), range(0, 2, 2), range(-1, 1), range(1, -1, -1), range(2**32, 2**32 + 2), range(1),
        range(3), range(2, 4))],
    {"src_layer_range": range(1), "dst_layer_range": range(2)}, {"src_layer_range": range(2), "dst_layer_range": range(1, 2)},
    *[{"tensor_num_per_layer": number} for number in (-1, 0, 5, 2**32 - 1, 2**32, 2**64)],
    {"src_layer_range": range(1), "dst_layer_range": range(1), "tensor_num_per_layer": 3},
    {"batch_index": 1}, {"batch_index": -1}, {"batch_index": 2**32},
], ids=str)
def test_b18_options_out_of_range(own: OwnBlocks, options: dict[str, Any]) -> None:
    said = str(own.refuses(LLMParamError, **options))
    assert "tensors" in said or any(name in said for name in options), said


@pytest.mark.parametrize("value", [CacheKey(OWN, U64MAX), CacheKey(OWN, 7, 0, 1)], ids=["padding", "ambiguous"])
def test_b18_key_of_a_row_has_to_be_usable(own: OwnBlocks, value: CacheKey) -> None:
    assert "exactly one of req_id and prefix_id" in str(own.refuses(LLMParamError, prompt_cache_key=value, prompt_blocks=[]))


@pytest.mark.parametrize("lists", [
    {"prompt_blocks": [0], "decoder_blocks": [0]}, {"prompt_blocks": [], "decoder_blocks": []},
    {"prompt_blocks": [0], "decoder_blocks": []}, {"prompt_blocks": [], "decoder_blocks": [0, 1, 2, 3, 4]},
    {"prompt_blocks": [], "decoder_blocks": [0, 1, 0, 1, 0]}, {"prompt_blocks": [], "decoder_blocks": [8]},
    {"prompt_blocks": [], "decoder_blocks": [-1]},
], ids=str)
def test_b18_a_row_into_blocks_that_do_not_take_it(own: OwnBlocks, lists: dict[str, list[int]]) -> None:
    for key in (ROW_KEY, CacheKeyByIdAndIndex(OWN, own.row.cache_id)):
        assert "blocks" in str(own.refuses(LLMParamError, prompt_cache_key=key, **lists))


@pytest.mark.parametrize(("blocks", "row"), [([0, 1, 2, 3, 4], 0), ([0], 2), ([8], 0), ([0], 2**32), ([], 0)], ids=str)
def test_b18_blocks_into_a_row_that_does_not_take_them(own: OwnBlocks, blocks: list[int], row: int) -> None:
    error = own.refuses(LLMParamError, decoder_kv_cache=own.into, prompt_blocks=blocks, decoder_blocks=[], batch_index=row)
    assert ("batch_index" if row else "blocks") in str(error)


def test_b18_refused_row_covers_nothing(own: OwnBlocks) -> None:
    """Half of the row was pulled; calls for the other half that are refused do not complete it."""
    first, second = ({"src_layer_range": layer, "dst_layer_range": layer} for layer in (range(1), range(1, 2)))
    own.pull_row(**first)
    for wrong in ({"decoder_blocks": [8]}, {"decoder_blocks": [0] * 5}, {"prompt_blocks": [0]}, {"dst_layer_range": range(2, 3)}):
        with pytest.raises(LLMParamError):
            own.pull_row(**{**second, **wrong})
    own.pull_row(**first)
    own.pull_row(**second)
    assert _status(own.pull_row, **first) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_b18_host_destination(own: OwnBlocks) -> None:
    host = KvCache.create_cpu_cache(CacheDesc(4, [8, 16], DataType.DT_INT8, Placement.HOST), [64] * 4)
    assert "decoder_kv_cache" in str(own.refuses(LLMParamError, decoder_kv_cache=host))


# -- keys and state -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("key", [BlocksCacheKey(OWN, 1), BlocksCacheKey(OWN, U64MAX), CacheKeyByIdAndIndex(OWN, 99),
                                 CacheKeyByIdAndIndex(OWN, 2, 2), CacheKeyByIdAndIndex(OWN, -1), CacheKey(OWN, 8)], ids=repr)
def test_b18_key_that_names_nothing(own: OwnBlocks, key: Any) -> None:
    lists = {} if isinstance(key, BlocksCacheKey) else {"prompt_blocks": []}
    error = own.refuses(LLMException, prompt_cache_key=key, **lists)
    assert isinstance(error, LLMException)
    assert error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_b18_blocks_key_goes_with_its_cache(own: OwnBlocks) -> None:
    own.manager.deallocate_cache(own.src)
    for key in (KEY, CacheKeyByIdAndIndex(OWN, own.src.cache_id)):
        lists = {} if key is KEY else {"prompt_blocks": []}
        assert _status(own.pull, prompt_cache_key=key, **lists) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert (cache_bytes.read(own.dst) == 0x5A).all()


def test_b18_destination_that_was_deallocated(own: OwnBlocks) -> None:
    own.manager.deallocate_cache(own.dst)
    assert _status(own.pull) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert _status(own.pull_row) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    own.pull_row(decoder_kv_cache=own.manager.allocate_blocks_cache(BLOCKS))


def test_b18_only_a_decoder_pulls_blocks(own: OwnBlocks) -> None:
    own.dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:1111"})
    for arguments in ({}, {"prompt_cache_key": "the role is looked at before the type"}):
        assert _status(own.pull, **arguments) is LLMStatusCode.LLM_PARAM_INVALID
    own.assert_untouched()


def test_b18_cluster_without_a_link(own: OwnBlocks) -> None:
    assert _status(own.pull, prompt_cache_key=BlocksCacheKey(99)) is LLMStatusCode.LLM_NOT_YET_LINK
    own.assert_untouched()


WRONG: list[tuple[str, dict[str, Any], Any]] = [
    ("type of the key", {"prompt_cache_key": None}, TypeError), ("type of the destination", {"decoder_kv_cache": None}, TypeError),
    ("type of a list", {"prompt_blocks": (1,)}, TypeError), ("type of an element", {"decoder_blocks": [2, "x"]}, TypeError),
    ("lengths", {"decoder_blocks": [1, 2]}, LLMStatusCode.LLM_PARAM_INVALID),
    ("destination", {"decoder_kv_cache": "gone"}, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
    ("destination block", {"decoder_blocks": [8]}, LLMStatusCode.LLM_PARAM_INVALID),
    ("link", {"prompt_cache_key": BlocksCacheKey(99)}, LLMStatusCode.LLM_NOT_YET_LINK),
    ("key", {"prompt_cache_key": BlocksCacheKey(OWN, 99)}, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST),
    ("source block", {"prompt_blocks": [8]}, LLMStatusCode.LLM_PARAM_INVALID),
]


@pytest.mark.parametrize("first", range(len(WRONG) - 1), ids=lambda place: WRONG[place][0])
def test_b18_checks_come_in_the_order_of_the_contract(own: OwnBlocks, first: int) -> None:
    """Each fault together with all later ones that do not take its place."""
    gone = own.manager.allocate_blocks_cache(BLOCKS)
    own.manager.deallocate_cache(gone)
    arguments: dict[str, Any] = {}
    for _, more, _ in WRONG[first:]:
        arguments = {**more, **arguments}
    if arguments.get("decoder_kv_cache") == "gone":
        arguments["decoder_kv_cache"] = gone
    wanted = WRONG[first][2]
    with pytest.raises(wanted if isinstance(wanted, type) else LLMException) as refusal:
        own.pull(**arguments)
    if isinstance(refusal.value, LLMException):
        assert refusal.value.status_code is wanted
    own.assert_untouched()


def test_b18_after_finalize(own: OwnBlocks) -> None:
    own.dist.finalize()
    for call in (own.pull, lambda: own.manager.copy_blocks(own.dst, {0: [1]}),
                 lambda: own.manager.swap_blocks(own.dst, own.dst, {0: 1})):
        assert _status(call) is LLMStatusCode.LLM_ENGINE_FINALIZED


def test_b18_handles_of_an_earlier_init(here: Callable[..., Any]) -> None:
    """Cache ids begin anew, and a handle of before names none of the new caches."""
    first = here("DECODER", OWN)
    old = first.kv_cache_manager.allocate_blocks_cache(BLOCKS)
    first.finalize()
    manager = here("DECODER", OWN).kv_cache_manager
    new = manager.allocate_blocks_cache(BLOCKS)
    assert old.cache_id == new.cache_id == 1
    row = CacheKeyByIdAndIndex(OWN, new.cache_id)
    for call in (lambda: manager.pull_blocks(row, old, [], [0]), lambda: manager.copy_blocks(old, {0: [1]}),
                 lambda: manager.swap_blocks(old, _host(), {0: 1}), lambda: manager.swap_blocks(_host(), old, {0: 1})):
        assert _status(call) is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert not cache_bytes.read(new).any()


def _host() -> KvCache:
    """Addresses that nobody may get to."""
    return KvCache.create_cpu_cache(CacheDesc(4, [8, 16], DataType.DT_INT8, Placement.HOST), [64] * 4)
