"""What the processes of a demo agree on: the shape of a request, and the bytes that it must have."""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from shmkv._layout import SEGMENT_DATA
from shmkv.types import TENSOR_ALIGNMENT, CacheDesc, DataType

Bytes = NDArray[np.uint8]

DTYPES = {"float16": DataType.DT_FLOAT16, "bfloat16": DataType.DT_BF16, "float32": DataType.DT_FLOAT,
          "int8": DataType.DT_INT8}
PROMPT_ID = 1
FIRST_DECODER_ID = 2
PATTERN_SEED = 20240229
U64 = (1 << 64) - 1


@dataclass(frozen=True)
class Plan:
    """A demo: the model's shape, how many requests and decoders, and which request gets a wrong byte (-1: none)."""

    layers: int
    heads: int
    head_dim: int
    tokens: int
    dtype: str
    requests: int
    decoders: int
    corrupt: int = -1

    @property
    def num_tensors(self) -> int:
        """K and V of each layer."""
        return 2 * self.layers

    @property
    def tensor_nbytes(self) -> int:
        return self.tokens * self.heads * self.head_dim * DTYPES[self.dtype].nbytes

    @property
    def request_nbytes(self) -> int:
        return self.num_tensors * self.tensor_nbytes

    @property
    def slots(self) -> int:
        """Requests that are filled and not yet pulled: what a decoder pulls, and one ahead."""
        return min(self.decoders + 1, self.requests)

    @property
    def shared_nbytes(self) -> int:
        """Bytes of /dev/shm that the demo takes: each slot twice (ours, the standard library's), a cache a decoder."""
        segment = SEGMENT_DATA + self.num_tensors * (self.tensor_nbytes + TENSOR_ALIGNMENT)
        return (2 * self.slots + self.decoders) * segment + (self.decoders + 2) * (1 << 20)

    @property
    def private_nbytes(self) -> int:
        """Bytes of private arrays: where each decoder copies to by numpy."""
        return self.decoders * self.request_nbytes

    def desc(self) -> CacheDesc:
        """A cache for one request: one row, [1, heads, tokens, head_dim] a tensor."""
        return CacheDesc(self.num_tensors, [1, self.heads, self.tokens, self.head_dim], DTYPES[self.dtype])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(**json.loads(text))


def block_name(namespace: str, slot: int) -> str:
    """Name of the standard library's block of a slot. Not a name of the namespace, which removes all of its own."""
    return f"{namespace}-numpy-{slot}"


class Pattern:
    """The bytes of any tensor of any request, cheap to make again: one random block, combined with a word that depends on request
    and tensor. No byte equals the one in the same place of the three requests before, so bytes left over from those show."""

    def __init__(self, plan: Plan) -> None:
        words = -(-plan.tensor_nbytes // 8)
        self._nbytes = plan.tensor_nbytes
        self._base = np.random.default_rng(PATTERN_SEED).integers(0, U64, words, np.uint64, endpoint=True)
        self._made = np.empty_like(self._base)

    def tensor(self, request: int, tensor: int) -> Bytes:
        """The `tensor_nbytes` bytes of one tensor, overwritten by the next call."""
        word = _scramble(request << 32 | tensor) & 0xFCFCFCFCFCFCFCFC | (request & 3) * 0x0101010101010101
        np.bitwise_xor(self._base, np.uint64(word), out=self._made)
        return self._made.view(np.uint8)[:self._nbytes]


def _scramble(number: int) -> int:
    """64 bits that all depend on all bits of the number."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ number >> shift) * factor & U64
    return number ^ number >> 31
