"""Values that callers hold: enumerations, a memory range and, from files of their own, element types and descriptions of caches."""
from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from shmkv.cache_desc import MAX_DIMS, TENSOR_ALIGNMENT, CacheDesc, Placement, RowGeometry
from shmkv.checks import check_int, check_type
from shmkv.data_type import DataType, data_type_to_np, np_to_data_type, storage_dtype, valid_np_dtypes
from shmkv.errors import NamedIntEnum

__all__ = ["MAX_DIMS", "TENSOR_ALIGNMENT", "CacheDesc", "DataType", "LLMRole", "MemInfo", "Memtype", "Placement",
           "RegisterMemStatus", "RowGeometry", "data_type_to_np", "np_to_data_type", "storage_dtype", "valid_np_dtypes"]


class LLMRole(NamedIntEnum):
    """What a cluster does: prefill prompts, decode, or neither as yet."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


class Memtype(Enum):
    """Kind of memory that a MemInfo describes."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class RegisterMemStatus(Enum):
    """How far the members of a communication have come."""

    OK = 0
    PREPARING = 1
    FAILED = 2


@dataclass(frozen=True, repr=False)
class MemInfo:
    """A memory range. Only the types are checked here; whether it makes sense is for its user to say."""

    mem_type: Memtype
    addr: int
    size: int

    def __post_init__(self) -> None:
        check_type("mem_type", self.mem_type, Memtype)
        check_int("addr", self.addr)
        check_int("size", self.size)

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self.mem_type}, addr={self.addr}, size={self.size})"
