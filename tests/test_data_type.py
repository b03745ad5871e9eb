"""Element types by the names that torch and vLLM have for them. Numbers, sizes and tables: test_types.py."""
from __future__ import annotations

from typing import Any

import pytest

from shmkv.data_type import DataType
from shmkv.errors import LLMNoneError, LLMParamError

NAMES = {
    "float32": "FLOAT", "float": "FLOAT", "float64": "DOUBLE", "double": "DOUBLE", "float16": "FLOAT16", "half": "FLOAT16",
    "bfloat16": "BF16", "float8_e4m3fn": "FLOAT8_E4M3FN", "float8_e5m2": "FLOAT8_E5M2", "int8": "INT8", "int16": "INT16",
    "short": "INT16", "int32": "INT32", "int": "INT32", "int64": "INT64", "long": "INT64", "uint8": "UINT8", "uint16": "UINT16",
    "uint32": "UINT32", "uint64": "UINT64", "bool": "BOOL",
}
OF_CACHES = {"fp8": "FLOAT8_E4M3FN", "fp8_e4m3": "FLOAT8_E4M3FN", "fp8_e5m2": "FLOAT8_E5M2", "fp8_inc": "FLOAT8_E4M3FN",
             "fp8_ds_mla": "UINT8"}


@pytest.mark.parametrize(("name", "wanted"), [*NAMES.items(), *OF_CACHES.items()])
def test_named(name: str, wanted: str) -> None:
    assert DataType.named(name) is DataType[f"DT_{wanted}"]


@pytest.mark.parametrize("name", NAMES)
def test_named_takes_the_text_of_a_torch_dtype(name: str) -> None:
    assert DataType.named(f"torch.{name}") is DataType.named(name)


@pytest.mark.parametrize("name", ["", "torch.", "fp16", "FLOAT16", "torch.torch.half", "float8_e4m3fnuz", "int4", "a" * 10_000])
def test_named_tells_the_names_that_there_are(name: str) -> None:
    with pytest.raises(LLMParamError, match=r"'name' must be one of float32, .*float8_e4m3fn, .*fp8_e5m2, .*got '") as caught:
        DataType.named(name)
    assert len(str(caught.value)) < 1000


def test_auto_is_for_the_engine_to_resolve() -> None:
    with pytest.raises(LLMParamError, match=r"'auto': that stands for the dtype of the model.*bfloat16"):
        DataType.named("auto")


@pytest.mark.parametrize(("name", "error"), [(None, LLMNoneError), (1, TypeError), (b"half", TypeError),
                                             (DataType.DT_BF16, TypeError)])
def test_named_wants_a_text(name: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="'name' only support str"):
        DataType.named(name)
