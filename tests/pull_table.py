"""The table of numbers of the contract for pull_cache: 4 tensors of shape [2, 8] float16 as destination."""
from __future__ import annotations

from dataclasses import dataclass, field

from reference import PARAM_INVALID, SUCCESS, Geometry, Pull, geometry

DESTINATION_SHAPE = [2, 8]
DESTINATION_TENSORS = 4


@dataclass(frozen=True)
class Move:
    """Per selected tensor: dst[dst_from:dst_to] of the row = src[src_from:...] of the row."""

    dst_from: int
    dst_to: int
    src_from: int
    tensors: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 1, 2: 2, 3: 3})


@dataclass(frozen=True)
class TableRow:
    """One line of the table; ``move`` is None where the answer is PARAM_INVALID. Row 0 is pulled from."""

    name: str
    src_shape: list[int]
    pull: Pull
    move: Move | None
    src_tensors: int = 4
    src_dtype: str = "DT_FLOAT16"

    @property
    def answer(self) -> str:
        return PARAM_INVALID if self.move is None else SUCCESS

    @property
    def src_geometry(self) -> Geometry:
        return geometry(self.src_tensors, self.src_shape, 1 if self.src_dtype == "DT_INT8" else 2)


def _layers(src: range | None, dst: range | None, per_layer: int = 2) -> Pull:
    return Pull(src_layer_range=src, dst_layer_range=dst, tensor_num_per_layer=per_layer)


TABLE = [
    TableRow("defaults into row 1", [2, 8], Pull(batch_index=1), Move(0, 16, 0)),
    TableRow("longer source row", [1, 16], Pull(), Move(0, 16, 0)),
    TableRow("shorter source row", [2, 4], Pull(), None),
    TableRow("size of the shorter source row", [2, 4], Pull(size=8), Move(0, 8, 0)),
    TableRow("destination offset", [2, 8], Pull(dst_cache_offset=4), Move(4, 16, 0)),
    TableRow("source offset alone", [2, 8], Pull(src_cache_offset=4), None),
    TableRow("both offsets", [2, 8], Pull(src_cache_offset=4, dst_cache_offset=4), Move(4, 16, 4)),
    TableRow("size and both offsets", [2, 8], Pull(size=6, src_cache_offset=2, dst_cache_offset=10),
             Move(10, 16, 2)),
    TableRow("destination offset at the row's end", [2, 8], Pull(dst_cache_offset=16), None),
    TableRow("eight tensors into four", [2, 8], Pull(), None, 8),
    TableRow("middle layers of eight tensors", [2, 8], _layers(range(1, 3), None),
             Move(0, 16, 0, {2: 0, 3: 1, 4: 2, 5: 3}), 8),
    TableRow("first layer into second", [2, 8], _layers(range(1), range(1, 2)), Move(0, 16, 0, {0: 2, 1: 3})),
    TableRow("first layer into all", [2, 8], _layers(range(1), None), None),
    TableRow("one tensor a layer", [2, 8], _layers(range(1, 4), range(1, 4), 1),
             Move(0, 16, 0, {1: 1, 2: 2, 3: 3})),
    TableRow("another dtype", [2, 16], Pull(), Move(0, 16, 0), src_dtype="DT_INT8"),
]
