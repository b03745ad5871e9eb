"""Enumerations, element types, CacheDesc, MemInfo, LLMClusterInfo and the text form of addresses."""
from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmkv import types
from shmkv.cluster_info import LLMClusterInfo, ip_to_int, parse_ip_port, parse_listen_ip_info
from shmkv.errors import LLMException, LLMNoneError, LLMParamError, LLMStatusCode
from shmkv.types import CacheDesc, DataType, LLMRole, MemInfo, Memtype, Placement, RegisterMemStatus

DTYPES = {
    "DT_FLOAT": (0, 4, np.float32), "DT_FLOAT16": (1, 2, np.float16), "DT_INT8": (2, 1, np.int8),
    "DT_INT32": (3, 4, np.int32), "DT_UINT8": (4, 1, np.uint8), "DT_INT16": (6, 2, np.int16),
    "DT_UINT16": (7, 2, np.uint16), "DT_UINT32": (8, 4, np.uint32), "DT_INT64": (9, 8, np.int64),
    "DT_UINT64": (10, 8, np.uint64), "DT_DOUBLE": (11, 8, np.float64), "DT_BOOL": (12, 1, np.bool_),
    "DT_STRING": (13, 16, np.bytes_), "DT_BF16": (27, 2, np.float16),
    "DT_FLOAT8_E5M2": (35, 1, ml_dtypes.float8_e5m2), "DT_FLOAT8_E4M3FN": (36, 1, ml_dtypes.float8_e4m3fn),
}


def test_members_of_the_enumerations() -> None:
    assert [(role.name, int(role)) for role in LLMRole] == [("PROMPT", 1), ("DECODER", 2), ("MIX", 3)]
    assert [(place.name, int(place)) for place in Placement] == [("HOST", 0), ("DEVICE", 1)]
    assert [(kind.name, kind.value) for kind in Memtype] == [("MEM_TYPE_DEVICE", 0), ("MEM_TYPE_HOST", 1)]
    assert [(s.name, s.value) for s in RegisterMemStatus] == [("OK", 0), ("PREPARING", 1), ("FAILED", 2)]
    assert str(LLMRole.PROMPT) == f"{LLMRole.PROMPT}" == "LLMRole.PROMPT"


def test_numbers_sizes_and_numpy_types_of_the_element_types() -> None:
    table = {d.name: (d.value, d.nbytes, types.data_type_to_np[d]) for d in DataType}
    assert table == DTYPES


def test_numpy_leads_back_to_every_type_but_bf16() -> None:
    for data_type in set(DataType) - {DataType.DT_BF16}:
        assert types.np_to_data_type[np.dtype(types.data_type_to_np[data_type])] is data_type
    assert DataType.DT_BF16 not in types.np_to_data_type.values()
    assert set(types.valid_np_dtypes) == set(types.data_type_to_np.values())


def test_views_have_the_size_of_the_element() -> None:
    assert types.storage_dtype(DataType.DT_BF16) == ml_dtypes.bfloat16
    assert types.storage_dtype(DataType.DT_STRING) == np.dtype("V16")
    assert types.storage_dtype(DataType.DT_BOOL) == np.bool_
    assert all(types.storage_dtype(d).itemsize == d.nbytes for d in DataType)


def desc(**changes: Any) -> CacheDesc:
    given: dict[str, Any] = {"num_tensors": 4, "shape": [2, 8], "data_type": DataType.DT_FLOAT16}
    return CacheDesc(**{**given, **changes})


def test_cache_desc_reads_back() -> None:
    made = CacheDesc(4, (2, 8, 3), DataType.DT_INT8, Placement.HOST, 1, 2, "ND")
    assert (made.num_tensors, made.shape, made.data_type) == (4, [2, 8, 3], DataType.DT_INT8)
    assert (made.placement, made.batch_dim, made.batch_size) == (Placement.HOST, 1, 8)
    assert (made.seq_len_dim_index, made.kv_tensor_format, made.size) == (2, "ND", 48)


def test_cache_desc_defaults() -> None:
    made = desc()
    assert (made.placement, made.batch_dim, made.seq_len_dim_index) == (Placement.DEVICE, 0, -1)
    assert (made.kv_tensor_format, made.batch_size, made.size) == (None, 2, 32)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tensors": 0}, {"num_tensors": 2**32 - 1}, {"shape": [2**63 - 1]}, {"shape": [-(2**63)]},
        {"shape": [0]}, {"batch_dim_index": 1}, {"seq_len_dim_index": -1}, {"seq_len_dim_index": 1},
        {"kv_tensor_format": ""}, {"num_tensors": True},
    ],
    ids=str,
)
def test_cache_desc_accepts(changes: dict[str, Any]) -> None:
    made = desc(**changes)
    assert [getattr(made, name.replace("batch_dim_index", "batch_dim")) for name in changes] == [
        *changes.values()
    ]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tensors", -1), ("num_tensors", 2**32), ("shape", []), ("shape", ()), ("shape", [2**63]),
        ("shape", [2, -(2**63) - 1]), ("batch_dim_index", -1), ("batch_dim_index", 2),
        ("batch_dim_index", 2**70),
        ("seq_len_dim_index", -2), ("seq_len_dim_index", 2), ("seq_len_dim_index", 2**31),
    ],
)
def test_cache_desc_refuses_values(name: str, value: object) -> None:
    with pytest.raises(LLMParamError, match=name):
        desc(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_tensors", "4"), ("num_tensors", 4.0), ("num_tensors", np.uint32(4)), ("shape", 8),
        ("shape", "28"),
        ("shape", [2, "8"]), ("shape", [2.0]), ("shape", [np.int64(2)]), ("data_type", 1),
        ("data_type", "DT_FLOAT"), ("placement", 1), ("batch_dim_index", "0"), ("seq_len_dim_index", 0.0),
        ("kv_tensor_format", 1),
    ],
)
def test_cache_desc_refuses_types(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"'{name}'.*only support"):
        desc(**{name: value})


@pytest.mark.parametrize(
    "name", ["num_tensors", "shape", "data_type", "placement", "batch_dim_index", "seq_len_dim_index"]
)
def test_cache_desc_none(name: str) -> None:
    with pytest.raises(LLMNoneError, match=name):
        desc(**{name: None})


@pytest.mark.parametrize("shape", [[0], [2, -1], [2**62, 2], [2**31, 2**31, 2]], ids=str)
def test_size_that_cannot_be(shape: list[int]) -> None:
    made = desc(shape=shape)
    for ask in ("size", "row_geometry"):
        with pytest.raises(LLMException, match="'shape'") as caught:
            getattr(made, ask)
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


def test_size_up_to_the_last_int64() -> None:
    assert desc(shape=[2**63 - 1], data_type=DataType.DT_INT8).size == 2**63 - 1
    assert desc(shape=[1, 1], data_type=DataType.DT_STRING).size == 16


def test_update_dim_reaches_size_and_batch_size() -> None:
    made = desc(shape=(2, 8))
    assert made.size == 32
    made.update_dim(0, 5)
    assert (made.shape, made.batch_size, made.size) == ([5, 8], 5, 80)
    made.update_dim(1, 0)
    with pytest.raises(LLMParamError):
        made.size  # noqa: B018


@pytest.mark.parametrize(
    ("index", "value", "error"),
    [
        (2, 1, LLMParamError), (-1, 1, LLMParamError), (0, 2**63, LLMParamError), ("0", 1, TypeError),
        (0, "1", TypeError), (None, 1, LLMNoneError), (0, None, LLMNoneError),
    ],
)
def test_update_dim_refuses_and_changes_nothing(index: Any, value: Any, error: type[Exception]) -> None:
    made = desc()
    with pytest.raises(error):
        made.update_dim(index, value)
    assert made.shape == [2, 8]


def test_shape_is_the_callers_list_and_a_snapshot_is_not() -> None:
    shape = [2, 8]
    made = desc(shape=shape)
    before = made.snapshot()
    shape[0] = 3
    assert made.shape is shape
    assert (made.batch_size, made.size) == (3, 48)
    assert (before.shape, before.batch_size, before.size) == ([2, 8], 2, 32)
    assert repr(before) == repr(desc())


def test_a_list_spoilt_after_the_check_is_found() -> None:
    shape: list[Any] = [2, 8]
    made = desc(shape=shape, batch_dim_index=1)
    shape.pop()
    for ask in (made.snapshot, made.validate_for_allocation):
        with pytest.raises(LLMParamError, match="batch_dim_index"):
            ask()
    shape[:] = ["2", 8]
    with pytest.raises(TypeError, match="'shape'"):
        made.validate_for_allocation()


@pytest.mark.parametrize(
    ("shape", "batch_dim", "geometry"),
    [
        ([2, 8], 0, (1, 2, 16)), ([2, 8], 1, (2, 8, 2)), ([2, 3, 4], 1, (2, 3, 8)), ([5], 0, (1, 5, 2)),
        ([2, 3, 4], 2, (6, 4, 2)),
    ],
)
def test_row_geometry(shape: list[int], batch_dim: int, geometry: tuple[int, int, int]) -> None:
    assert desc(shape=shape, batch_dim_index=batch_dim).row_geometry == geometry


def test_row_geometry_agrees_with_numpy_slicing() -> None:
    chance = random.Random(7)
    for _ in range(50):
        shape = [chance.randint(1, 5) for _ in range(chance.randint(1, 4))]
        batch_dim = chance.randrange(len(shape))
        made = desc(shape=shape, data_type=DataType.DT_INT16, batch_dim_index=batch_dim)
        outer, rows, inner = made.row_geometry
        assert (rows, outer * rows * inner) == (made.batch_size, made.size)
        array = np.arange(made.size // 2, dtype=np.int16).reshape(shape)
        row = chance.randrange(rows)
        raw = array.tobytes()
        pieces = [raw[(p * rows + row) * inner :][:inner] for p in range(outer)]
        assert b"".join(pieces) == array.take(row, axis=batch_dim).tobytes()
        assert made.row_geometry.row_nbytes == made.size // rows


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"shape": [1] * 31}, {"num_tensors": 2**32 - 1, "shape": [1]},
        {"shape": [2**60 - 1, 2], "num_tensors": 1},
    ],
    ids=str,
)
def test_allocation_accepts(changes: dict[str, Any]) -> None:
    made = desc(**changes)
    made.validate_for_allocation()
    assert made.size > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_tensors": 0}, "num_tensors"), ({"shape": [1] * 32}, "shape"), ({"shape": [0]}, "shape"),
        ({"shape": [2, -1]}, "shape"), ({"shape": [2**62, 2]}, "shape"),
        ({"shape": [2**60], "num_tensors": 4}, "num_tensors"),
        ({"shape": [2**63 - 1], "data_type": DataType.DT_INT8, "num_tensors": 1}, "num_tensors"),
    ],
)
def test_allocation_refuses(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(LLMParamError, match=f"'{named}'"):
        desc(**changes).validate_for_allocation()


def test_repr_of_a_cache_desc_shows_all_fields() -> None:
    for part in (
        "num_tensors=4", "shape=[2, 8]", "data_type=DataType.DT_FLOAT16", "placement=Placement.DEVICE",
        "batch_dim_index=0", "seq_len_dim_index=-1", "kv_tensor_format=None",
    ):
        assert part in repr(desc())


def test_descriptions_can_be_copied_and_sent() -> None:
    for twin in (copy.deepcopy(desc()), pickle.loads(pickle.dumps(desc()))):
        assert repr(twin) == repr(desc())


@pytest.mark.parametrize(("addr", "size"), [(0, 1), (1, -1), (2**70, -(2**70))])
def test_mem_info_takes_any_int(addr: int, size: int) -> None:
    info = MemInfo(Memtype.MEM_TYPE_HOST, addr, size)
    assert (info.mem_type, info.addr, info.size) == (Memtype.MEM_TYPE_HOST, addr, size)
    assert str(info) == f"MemInfo(mem_type=Memtype.MEM_TYPE_HOST, addr={addr}, size={size})"
    assert info == MemInfo(Memtype.MEM_TYPE_HOST, addr, size)


@pytest.mark.parametrize("wrong", ["x", None])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_mem_info_types(place: int, wrong: Any) -> None:
    given: list[Any] = [Memtype.MEM_TYPE_DEVICE, 1, 2]
    given[place] = wrong
    with pytest.raises(LLMNoneError if wrong is None else TypeError):
        MemInfo(*given)


def test_cluster_info_starts_empty_and_keeps_what_is_set() -> None:
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.remote_role_type) == (None, None)
    assert (info.local_ip_info_list, info.remote_ip_info_list) == ([], [])
    info.remote_cluster_id = 2**64 - 1
    info.remote_role_type = LLMRole.PROMPT
    info.append_local_ip_info("1.2.3.4", 65535)
    info.append_remote_ip_info(2**32 - 1, 0)
    assert (info.remote_cluster_id, info.remote_role_type) == (2**64 - 1, 1)
    assert info.local_ip_info_list == [(67305985, 65535)]
    assert info.remote_ip_info_list == [(2**32 - 1, 0)]
    assert "remote_cluster_id=18446744073709551615" in repr(info)


@pytest.mark.parametrize(
    ("ip", "port", "error"),
    [
        (None, 1, LLMNoneError), ("1.2.3.4", None, LLMNoneError), (1.5, 1, TypeError),
        (b"1.2.3.4", 1, TypeError),
        ("1.2.3.4", "1", TypeError), ("1.2.3.256", 1, LLMParamError), ("host", 1, LLMParamError),
        ("", 1, LLMParamError), ("1.2.3.4 x", 1, LLMParamError), ("1.2.3.4\n", 1, LLMParamError),
        ("1.2\0.3", 1, LLMParamError), ("\ud800", 1, LLMParamError), ("::1", 1, LLMParamError),
        (-1, 1, LLMParamError), (2**32, 1, LLMParamError), ("1.2.3.4", -1, LLMParamError),
        ("1.2.3.4", 65536, LLMParamError),
    ],
    ids=repr,
)
def test_addresses_refused(ip: Any, port: Any, error: type[Exception]) -> None:
    info = LLMClusterInfo()
    for append in (info.append_local_ip_info, info.append_remote_ip_info):
        with pytest.raises(error, match=r"ip|port"):
            append(ip, port)
    assert (info.local_ip_info_list, info.remote_ip_info_list) == ([], [])


@pytest.mark.parametrize(
    ("value", "error"), [(-1, LLMParamError), (2**64, LLMParamError), ("1", TypeError), (None, LLMNoneError)]
)
def test_remote_cluster_id_is_uint64(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="remote_cluster_id"):
        LLMClusterInfo().remote_cluster_id = value


@pytest.mark.parametrize(("value", "error"), [("PROMPT", TypeError), (None, LLMNoneError)])
def test_remote_role_type(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="remote_role_type"):
        LLMClusterInfo().remote_role_type = value


def test_ip_texts_are_read_little_endian() -> None:
    assert ip_to_int("ip", "1.2.3.4") == 0x04030201
    assert ip_to_int("ip", "22") == 22 << 24


def test_listen_ip_info_splits() -> None:
    assert parse_ip_port("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_listen_ip_info("127.0.0.1:65535") == [("127.0.0.1", 65535)]
    assert parse_listen_ip_info("1.2.3.4:5;22:33") == [("1.2.3.4", 5), ("22", 33)]


@pytest.mark.parametrize(
    "text",
    [
        "", "1.2.3.4", "1.2.3.4:", ":5", "1.2.3.4:65536", "1.2.3.4:-1", "1.2.3.4:5x", "1.2.3.4: 5",
        "1.2.3.4:5;",
        "1.2.3:4:5", "host:5", "1.2.3.4:5\n", "1.2.3.4:\u0665", "1.2.3.4:5,1.2.3.4:6",
        "1.2.3.4:" + "0" * 5000,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_listen_ip_info_that_is_none(text: str) -> None:
    with pytest.raises(LLMParamError, match=r"llm\.listenIpInfo"):
        parse_listen_ip_info(text, "llm.listenIpInfo")
