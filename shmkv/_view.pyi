"""Types of a tensor's view on shared memory."""
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import CapsuleType

from shmkv._mapping import Region
from shmkv.types import DataType

class TensorView:
    def __init__(
        self,
        region: Region,
        offset: int,
        shape: tuple[int, ...],
        dtype: DataType,
        storage: np.dtype[Any],
        format: bytes,
        dlpack: tuple[int, int],
        readonly: bool = False,
    ) -> None: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> DataType: ...
    @property
    def readonly(self) -> bool: ...
    @property
    def data_ptr(self) -> int: ...
    @property
    def raw(self) -> memoryview: ...
    def numpy(self) -> npt.NDArray[Any]: ...
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]: ...
    def __len__(self) -> int: ...
    def __repr__(self) -> str: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> CapsuleType: ...
