"""What a model keeps for each token, as a value: layers, their shapes and element type, and which model it is.

Nothing here knows torch or transformers. A layout says how the tensors of a cache are ordered, and why two layouts are not one.
"""
from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

from shmkv.data_type import DataType
from shmkv.types import CacheDesc

FULL, SLIDING = "full attention", "sliding attention"
HEADER_NBYTES = 8192        # of a row's header, which is tensor 0


class LayerLayout(NamedTuple):
    """What one layer keeps for a token: keys and values, each [heads, dim], which need not be alike.

    `kind` is FULL or SLIDING; `window`: how many tokens a query of a sliding layer sees, itself among them, 0 for the others.
    `dtype` is torch's name without "torch.".
    """

    kind: str
    window: int
    keys: tuple[int, int]
    values: tuple[int, int]
    dtype: str

    def __str__(self) -> str:
        window = f" over {self.window} tokens" if self.window else ""
        return f"{self.kind}{window}, keys {list(self.keys)} and values {list(self.values)} of {self.dtype}"


class Group(NamedTuple):
    """Neighbouring tensors with as many bytes a token: one pull brings the same range of tokens of all of them."""

    first: int
    stop: int
    token_nbytes: int


class ModelLayout(NamedTuple):
    """All layers of a model, in order, and what tells it from others."""

    model: str
    layers: tuple[LayerLayout, ...]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers."""
        return sum(group.token_nbytes * (group.stop - group.first) for group in self.groups())

    def places(self) -> list[tuple[int, int]]:
        """For each layer, which tensors of the cache are its keys and its values.

        Tensors with as many bytes a token stand together; where all are alike they come as keys and values of layer 0, of layer 1
        and so on.
        """
        order = self._order()
        place = {which: number for number, which in enumerate(order, 1)}
        return [(place[layer, 0], place[layer, 1]) for layer in range(len(self.layers))]

    def groups(self) -> list[Group]:
        """The tensors of all layers, from 1 on: 0 is the header."""
        groups: list[Group] = []
        for number, which in enumerate(self._order(), 1):
            nbytes = self._token_nbytes(which)
            first = groups.pop().first if groups and groups[-1].token_nbytes == nbytes else number
            groups.append(Group(first, number + 1, nbytes))
        return groups

    def describe(self, rows: int, tokens: int) -> CacheDesc:
        """The header, [rows, bytes], and keys and values, each [rows, tokens, heads, dim]: the filled tokens of a row are its first
        bytes."""
        shapes, kinds = [[rows, HEADER_NBYTES]], [DataType.DT_UINT8]
        for which in self._order():
            shapes.append([rows, tokens, *self._shape(which)])
            kinds.append(DataType.named(self.layers[which[0]].dtype))
        return CacheDesc.of_tensors(shapes, kinds)

    def _order(self) -> list[tuple[int, int]]:
        """(layer, 0 for keys or 1 for values) of each tensor behind the header."""
        every = [(layer, which) for layer in range(len(self.layers)) for which in (0, 1)]
        sizes = list(dict.fromkeys(map(self._token_nbytes, every)))
        return sorted(every, key=lambda which: sizes.index(self._token_nbytes(which)))

    def _shape(self, which: tuple[int, int]) -> tuple[int, int]:
        layer = self.layers[which[0]]
        return layer.values if which[1] else layer.keys

    def _token_nbytes(self, which: tuple[int, int]) -> int:
        return prod(self._shape(which)) * DataType.named(self.layers[which[0]].dtype).nbytes

    def to_json(self) -> dict[str, Any]:
        """Layers that are alike are written once."""
        kinds = list(dict.fromkeys(self.layers))
        return {"model": self.model, "kinds": kinds, "layers": [kinds.index(layer) for layer in self.layers]}

    @staticmethod
    def from_json(values: dict[str, Any]) -> ModelLayout:
        """Raises KeyError, IndexError, TypeError or ValueError for what `to_json` did not make."""
        kinds = [LayerLayout(str(kind), int(window), _pair(keys), _pair(sizes), str(dtype))
                 for kind, window, keys, sizes, dtype in values["kinds"]]
        return ModelLayout(str(values["model"]), tuple(kinds[number] for number in values["layers"]))

    def difference(self, other: ModelLayout) -> tuple[str, str] | None:
        """The first thing in which the two differ, as each has it; None if they are one."""
        if len(self.layers) != len(other.layers):
            return f"{len(self.layers)} layers", f"{len(other.layers)} layers"
        for number, (mine, theirs) in enumerate(zip(self.layers, other.layers, strict=True)):
            if mine != theirs:
                return f"layer {number}: {mine}", f"layer {number}: {theirs}"
        return None if self.model == other.model else (f"model {self.model}", f"model {other.model}")


def _pair(values: Any) -> tuple[int, int]:
    heads, dim = values
    return int(heads), int(dim)
