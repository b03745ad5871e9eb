"""Contract, appendix A3: value types (and B12, B22). Item numbers are in the names."""
from __future__ import annotations

import pickle
from typing import Any

import pytest

import shmkv
from shmkv import checks, types
from shmkv.cluster_info import parse_ip_port
from shmkv.errors import LLMException, LLMStatusCode
from shmkv.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from shmkv.kv_cache import KvCache
from shmkv.transfer_config import TransferConfig, TransferWithCacheKeyConfig
from shmkv.types import CacheDesc, DataType, MemInfo, Memtype, Placement

U64MAX = 2**64 - 1


def test_a3_1_cache_desc_out_of_range() -> None:
    with pytest.raises(ValueError, match="num_tensors"):
        CacheDesc(-1, [2, 8], DataType.DT_FLOAT16)
    with pytest.raises(ValueError, match="seq_len_dim_index"):
        CacheDesc(80, [2, 8], DataType.DT_FLOAT16, seq_len_dim_index=2**31)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"req_id": 1}, "cluster_id is required"),
        ({"cluster_id": 1}, "req_id is required"),
        ({"cluster_id": 1, "req_id": 1, "other": 1}, "Unsupported"),
    ],
)
def test_a3_2_cache_key_arguments(given: dict[str, int], text: str) -> None:
    with pytest.raises(LLMException, match=text):
        CacheKey(**given)


def test_a3_2_cache_key_forms_are_equivalent() -> None:
    rest = {"req_id": 2, "model_id": 3, "prefix_id": 4}
    for key in (CacheKey(1, 2, 3, 4), CacheKey(cluster_id=1, **rest), CacheKey(prompt_cluster_id=1, **rest)):
        assert (key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 2, 3, 4)
    with pytest.raises(ValueError, match="cluster_id"):
        CacheKey(-1, 1)


def test_a3_3_blocks_cache_key() -> None:
    with pytest.raises(TypeError, match="only support"):
        BlocksCacheKey("aa")  # type: ignore[arg-type]
    with pytest.raises(LLMException, match="cluster_id is required"):
        BlocksCacheKey(model_id=1)
    for key in (BlocksCacheKey(1, 2), BlocksCacheKey(prompt_cluster_id=1, model_id=2)):
        assert (key.cluster_id, key.prompt_cluster_id, key.model_id) == (1, 1, 2)


@pytest.mark.parametrize(("addr", "size"), [(0, 1), (1, -1)])
def test_a3_4_mem_info(addr: int, size: int) -> None:
    info = MemInfo(Memtype.MEM_TYPE_DEVICE, addr, size)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_DEVICE, addr, size)


def test_a3_5_transfer_config_reads_back() -> None:
    config = TransferConfig(2, [1000, 2000])
    assert (config.dst_cluster_id, config.dst_addrs) == (2, [1000, 2000])
    assert (config.src_layer_range, config.src_batch_index) == (None, 0)
    config.dst_cluster_id, config.dst_addrs = 3, [1, 2]
    config.src_layer_range, config.src_batch_index = range(1), 1
    assert (config.dst_cluster_id, config.dst_addrs) == (3, [1, 2])
    assert (config.src_layer_range, config.src_batch_index) == (range(1), 1)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("dst_cluster_id", None, TypeError), ("dst_cluster_id", "123", TypeError),
        ("dst_addrs", None, TypeError),
        ("dst_addrs", "123", TypeError), ("dst_addrs", ["123"], TypeError), ("dst_addrs", [-1], ValueError),
        ("src_layer_range", [0, 1], TypeError), ("src_layer_range", range(0, 4, 2), LLMException),
        ("src_layer_range", range(4, 0, -1), LLMException), ("src_layer_range", range(4, 1), LLMException),
        ("src_layer_range", range(0), LLMException), ("src_batch_index", None, TypeError),
        ("src_batch_index", "1", TypeError), ("src_batch_index", -1, ValueError),
        ("src_batch_index", 2**32, ValueError),
    ],
)
def test_a3_5_transfer_config_setters(name: str, value: Any, error: type[Exception]) -> None:
    config = TransferConfig(2, [1000, 2000])
    with pytest.raises(error, match=name):
        setattr(config, name, value)


@pytest.mark.parametrize(
    "given",
    [
        (2, [1000], None, "1"), (2, [1000], [0, 1]), (2, [1000, "2000"]), (2, None), ("1", [1000]),
    ],
)
def test_a3_5_transfer_config_constructor(given: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match="only support"):
        TransferConfig(*given)


def test_a3_6_transfer_with_cache_key_config_setters() -> None:
    config = TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1))
    key = CacheKeyByIdAndIndex(2, 7)
    config.cache_key = key
    config.src_layer_range = range(1, 3)
    config.dst_layer_range = range(2)
    config.src_batch_index = 1
    assert (config.cache_key, config.src_batch_index) == (key, 1)
    assert (config.src_layer_range, config.dst_layer_range) == (range(1, 3), range(2))


def test_a3_7_addresses_of_a_cpu_cache_are_of_one_form() -> None:
    desc = CacheDesc(2, [1, 8], DataType.DT_INT8, Placement.HOST)
    with pytest.raises(LLMException, match="should be consistent"):
        KvCache.create_cpu_cache(desc, [[1], 1])        # type: ignore[list-item]


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (checks.check_uint8, -1), (checks.check_uint16, -1), (checks.check_uint32, -1),
        (checks.check_uint64, -1),
        (checks.check_int32, U64MAX), (checks.check_int64, U64MAX), (checks.check_list_int32, [0, 1, U64MAX]),
    ],
)
def test_a3_8_checks(check: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="cluster"):
        check("cluster", value)


def test_a3_9_layers_and_listen_address() -> None:
    assert checks.layer_range_to_tensor_indices(range(1, 2), 2) == [2, 3]
    assert checks.layer_range_to_tensor_indices(range(1, 2)) == [2, 3]
    assert parse_ip_port("22:33") == ("22", 33)


def test_a3_10_an_unknown_name_of_the_package() -> None:
    with pytest.raises(AttributeError, match="has no attribute"):
        shmkv.nothing_of_that_name      # noqa: B018


def test_a3_11_dtype_tables() -> None:
    assert len(types.data_type_to_np) == len(types.valid_np_dtypes) == len(DataType)
    assert len(types.np_to_data_type) == len(DataType) - 1


@pytest.mark.parametrize(
    "value",
    [
        CacheDesc(4, [2, 8], DataType.DT_FLOAT16), MemInfo(Memtype.MEM_TYPE_HOST, 1, 2),
        TransferConfig(2, [1]),
        TransferWithCacheKeyConfig(BlocksCacheKey(2), range(1), range(1)), BlocksCacheKey(1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a3_12_printing(value: Any) -> None:
    assert str(value).startswith(type(value).__name__ + "(")


def test_b12_a_value_error_is_caught_both_ways_and_survives_pickling() -> None:
    with pytest.raises(LLMException) as caught:
        CacheKey(-1, 1)
    assert isinstance(caught.value, ValueError)
    twin = pickle.loads(pickle.dumps(caught.value))
    assert (twin.status_code, str(twin)) == (LLMStatusCode.LLM_PARAM_INVALID, str(caught.value))
