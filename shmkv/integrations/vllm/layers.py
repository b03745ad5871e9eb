"""The memory in which an engine keeps its blocks, one tensor a layer, as rows of bytes."""
from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from shmkv.errors import LLMParamError
from shmkv.types import CacheDesc, DataType

Bytes = npt.NDArray[np.uint8]


class Layers:
    """`tensors`: layer name -> [blocks, bytes of a block] uint8, in the order of the model. K and V of a layer are in one block,
    and what is in it is the engine's affair: blocks are moved whole."""

    def __init__(self, tensors: Mapping[str, Bytes]) -> None:
        if not tensors:
            raise LLMParamError("the engine has registered no layers")
        self.names = list(tensors)
        self.arrays = list(tensors.values())
        self.index = {name: place for place, name in enumerate(self.names)}
        first = self.arrays[0].shape
        for name, array in tensors.items():
            if array.ndim != 2 or array.dtype != np.uint8 or array.shape != first:
                raise LLMParamError(f"the tensor of layer {name!r} has {array.dtype} {array.shape}, that of {self.names[0]!r} has "
                                    f"uint8 {first}: layers of one kind and size are moved, and no others")
            if array.strides[1] != 1:
                raise LLMParamError(f"a block of layer {name!r} does not lie in one piece: strides {array.strides}")

    @property
    def num_blocks(self) -> int:
        """Blocks of each layer."""
        return int(self.arrays[0].shape[0])

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block in one layer."""
        return int(self.arrays[0].shape[1])

    @property
    def row_nbytes(self) -> int:
        """Bytes of a block in all layers."""
        return self.block_nbytes * len(self.arrays)

    def desc(self, rows: int) -> CacheDesc:
        """A cache of so many blocks, one tensor a layer."""
        return CacheDesc(len(self.arrays), [rows, self.block_nbytes], DataType.DT_UINT8)
