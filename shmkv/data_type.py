"""Element types: their numbers, sizes, numpy types and names."""
from __future__ import annotations

from enum import Enum
from typing import Any

import ml_dtypes
import numpy as np

from shmkv.checks import check_str, shown
from shmkv.errors import LLMParamError


class DataType(Enum):
    """Element type of a tensor; the numbers are those of llm_datadist, and of CANN for the two of 8-bit floats.

    There is none of 4 bits: packed int4 rows, two elements a byte, are DT_UINT8 with half as many elements in the last dim.
    """

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_INT8 = 2
    DT_INT32 = 3
    DT_UINT8 = 4
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT32 = 8
    DT_INT64 = 9
    DT_UINT64 = 10
    DT_DOUBLE = 11
    DT_BOOL = 12
    DT_STRING = 13
    DT_BF16 = 27
    DT_FLOAT8_E5M2 = 35
    DT_FLOAT8_E4M3FN = 36

    nbytes: int
    """Bytes of one element."""

    @classmethod
    def numbered(cls, number: int) -> DataType | None:
        """The element type with this number, if there is one: a peer's record may hold any."""
        return _NUMBERED.get(number)

    @classmethod
    def named(cls, name: str) -> DataType:
        """The element type that torch or vLLM calls `name`.

        torch's names with or without "torch.", so also ``str(tensor.dtype)``: "float16", "half", "bfloat16", "float8_e4m3fn",
        "float8_e5m2", "int8", "uint8", ...; of vLLM's names for the dtype of a cache "fp8" and "fp8_e4m3" (float8_e4m3fn),
        "fp8_e5m2", "fp8_inc" (float8_e4m3fn) and "fp8_ds_mla" (bytes).

        Raises:
            TypeError: not a str.
            LLMParamError: no such name, or "auto", which is for the engine to resolve; the text has all that are known.
        """
        found = _NAMES.get(check_str("name", name).removeprefix("torch."))
        if found is not None:
            return found
        if name == "auto":
            raise LLMParamError("argument 'name' must be an element type, got 'auto': that stands for the dtype of the model, name "
                                f"it; known are {', '.join(_NAMES)}")
        raise LLMParamError(f"argument 'name' must be one of {', '.join(_NAMES)}, got {shown(name)}")


_NAMES: dict[str, DataType] = {
    "float32": DataType.DT_FLOAT, "float": DataType.DT_FLOAT, "float64": DataType.DT_DOUBLE, "double": DataType.DT_DOUBLE,
    "float16": DataType.DT_FLOAT16, "half": DataType.DT_FLOAT16, "bfloat16": DataType.DT_BF16,
    "float8_e4m3fn": DataType.DT_FLOAT8_E4M3FN, "float8_e5m2": DataType.DT_FLOAT8_E5M2,
    "int8": DataType.DT_INT8, "int16": DataType.DT_INT16, "short": DataType.DT_INT16, "int32": DataType.DT_INT32,
    "int": DataType.DT_INT32, "int64": DataType.DT_INT64, "long": DataType.DT_INT64, "uint8": DataType.DT_UINT8,
    "uint16": DataType.DT_UINT16, "uint32": DataType.DT_UINT32, "uint64": DataType.DT_UINT64, "bool": DataType.DT_BOOL,
    "fp8": DataType.DT_FLOAT8_E4M3FN, "fp8_e4m3": DataType.DT_FLOAT8_E4M3FN, "fp8_e5m2": DataType.DT_FLOAT8_E5M2,
    "fp8_inc": DataType.DT_FLOAT8_E4M3FN, "fp8_ds_mla": DataType.DT_UINT8,
}

# In these tables float16 carries the bits of a bfloat16, and no numpy type leads back to BF16.
data_type_to_np: dict[DataType, type[np.generic]] = {
    DataType.DT_FLOAT: np.float32,
    DataType.DT_FLOAT16: np.float16,
    DataType.DT_BF16: np.float16,
    DataType.DT_INT8: np.int8,
    DataType.DT_INT16: np.int16,
    DataType.DT_UINT16: np.uint16,
    DataType.DT_UINT8: np.uint8,
    DataType.DT_INT32: np.int32,
    DataType.DT_INT64: np.int64,
    DataType.DT_UINT32: np.uint32,
    DataType.DT_UINT64: np.uint64,
    DataType.DT_BOOL: np.bool_,
    DataType.DT_DOUBLE: np.float64,
    DataType.DT_STRING: np.bytes_,
    DataType.DT_FLOAT8_E5M2: ml_dtypes.float8_e5m2,
    DataType.DT_FLOAT8_E4M3FN: ml_dtypes.float8_e4m3fn,
}
valid_np_dtypes: list[type[np.generic]] = list(data_type_to_np.values())
np_to_data_type: dict[np.dtype[Any], DataType] = {
    np.dtype(np_type): data_type
    for data_type, np_type in data_type_to_np.items()
    if data_type is not DataType.DT_BF16
}

_STORAGE: dict[DataType, np.dtype[Any]] = {
    **{data_type: np.dtype(np_type) for data_type, np_type in data_type_to_np.items()},
    DataType.DT_BF16: np.dtype(ml_dtypes.bfloat16),
    DataType.DT_STRING: np.dtype("V16"),
}
for _data_type, _dtype in _STORAGE.items():
    _data_type.nbytes = _dtype.itemsize     # kept there, since looking it up by the member costs more than most uses of it
_NUMBERED = {data_type.value: data_type for data_type in DataType}


def storage_dtype(data_type: DataType) -> np.dtype[Any]:
    """Return the numpy dtype of a zero-copy view: ml_dtypes' own for BF16 and 8-bit floats, 16 opaque bytes for STRING."""
    return _STORAGE[data_type]
