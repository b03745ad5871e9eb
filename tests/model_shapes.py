"""Caches as models have them, in plain values and as the numpy twin sees them: for tests between processes and inside one."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from peer import Peer, req
from reference import SUCCESS, Bytes, Geometry, Pull, Refused, canary, geometry, noise, pull_tensors

Draw = Callable[[int, int], int]
ITEM_BYTES = {"DT_BF16": 2, "DT_FLOAT16": 2, "DT_FLOAT": 4, "DT_INT8": 1, "DT_UINT8": 1, "DT_FLOAT8_E4M3FN": 1, "DT_FLOAT8_E5M2": 1}
ROWS, TOKENS, WINDOW = 4, 48, 16


@dataclass(frozen=True)
class Model:
    """The tensors of a cache in plain values, and how many a layer has."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]
    per_layer: int = 2
    batch_dim: int = 0

    @property
    def geometries(self) -> list[Geometry]:
        return [geometry(1, list(shape), ITEM_BYTES[dtype], self.batch_dim) for shape, dtype in self.tensors]

    @property
    def layers(self) -> int:
        return len(self.tensors) // self.per_layer

    def noise(self, seed: int) -> list[Bytes]:
        return [noise(shape, seed + place)[0] for place, shape in enumerate(self.geometries)]

    def canary(self) -> list[Bytes]:
        return [canary(shape)[0] for shape in self.geometries]

    def allocate(self, peer: Peer, name: str, **more: Any) -> Any:
        return peer.call("allocate_tensors", name=name, shapes=[list(shape) for shape, _ in self.tensors],
                         dtypes=[dtype for _, dtype in self.tensors], batch_dim=self.batch_dim, **more)


def model(layers: int, *layer: tuple[tuple[int, ...], str], batch_dim: int = 0) -> Model:
    return Model(layer * layers, len(layer), batch_dim)


FULL, SLIDING = ((ROWS, 2, TOKENS, 8), "DT_BF16"), ((ROWS, 2, WINDOW, 8), "DT_BF16")
# The states of a linear-attention layer: the last inputs of its convolution, and the recurrent state.
STATES = (((ROWS, 3, 40), "DT_BF16"), ((ROWS, 4, 8, 16), "DT_FLOAT"))
MODELS = {
    "latent": model(5, ((ROWS, TOKENS, 36), "DT_BF16")),
    "latent and index": model(5, ((ROWS, TOKENS, 36), "DT_BF16"), ((ROWS, TOKENS, 8), "DT_FLOAT8_E4M3FN")),
    "unequal K and V": model(4, ((ROWS, 1, TOKENS, 16), "DT_BF16"), ((ROWS, 1, TOKENS, 8), "DT_BF16")),
    "unequal, batch dim 1": model(3, ((2, ROWS, TOKENS, 16), "DT_BF16"), ((2, ROWS, TOKENS, 8), "DT_BF16"), batch_dim=1),
    "grouped query": model(4, ((ROWS, TOKENS, 2, 16), "DT_FLOAT16"), ((ROWS, TOKENS, 2, 16), "DT_FLOAT16")),
    "sliding and full": Model((SLIDING, SLIDING, SLIDING, SLIDING, FULL, FULL) * 2),
    "linear and full": Model((*STATES, *STATES, *STATES, FULL, FULL) * 2),
    "linear alone": model(4, *STATES),
    "fp8 e4m3": model(3, ((ROWS, TOKENS, 2, 16), "DT_FLOAT8_E4M3FN"), ((ROWS, TOKENS, 2, 16), "DT_FLOAT8_E4M3FN")),
    "fp8 K, bf16 V": model(3, ((ROWS, TOKENS, 2, 16), "DT_FLOAT8_E5M2"), ((ROWS, TOKENS, 2, 16), "DT_BF16")),
    "int8 and scales": model(3, *[((ROWS, TOKENS, 2, 16), "DT_INT8"), ((ROWS, TOKENS, 2), "DT_FLOAT")] * 2),
    "packed int4": model(3, ((ROWS, TOKENS, 2, 8), "DT_UINT8"), ((ROWS, TOKENS, 2, 8), "DT_UINT8")),
}


class Sides:
    """A prompt and a decoder process; caches called "kv" are made anew for each pair of models."""

    def __init__(self, p: Peer, d: Peer) -> None:
        self.p, self.d = p, d

    def allocate(self, src: Model, dst: Model, seed: int) -> int:
        cache_id: int = src.allocate(self.p, "kv", keys=[req(1, 70 + row) for row in range(src.geometries[0].rows)])
        self.p.call("noise_tensors", name="kv", seed=seed)
        dst.allocate(self.d, "kv")
        self.d.call("canary", name="kv")
        return cache_id

    def free(self, rows: int) -> None:
        for row in range(rows):
            self.p.call("remove_key", key=req(1, 70 + row))
        for peer in (self.p, self.d):
            peer.call("deallocate", name="kv")


def expected(src: list[Bytes], dst: list[Bytes], pull: Pull) -> tuple[str, list[Bytes]]:
    try:
        return SUCCESS, pull_tensors(src, dst, pull)
    except Refused as refusal:
        return str(refusal), dst


def assert_same_tensors(found: list[Bytes], wanted: list[Bytes], why: object = "") -> None:
    for place, (left, right) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_array_equal(left, right, err_msg=f"tensor {place}, {why}")


# -- random ones ----------------------------------------------------------------------------------------------------

def drawn_model(draw: Draw, layers: int, per_layer: int) -> Model:
    batch_dim, rows = draw(0, 2), draw(1, 4)
    tensors = []
    for _ in range(layers * per_layer):
        shape = [draw(1, 5) for _ in range(batch_dim + draw(1, 3))]
        shape[batch_dim] = rows
        tensors.append((tuple(shape), list(ITEM_BYTES)[draw(0, len(ITEM_BYTES) - 1)]))
    return Model(tuple(tensors), per_layer, batch_dim)


def like(draw: Draw, kind: Model) -> Model:
    """A model with rows as long, laid out in another way, mostly."""
    if not draw(0, 4):
        return drawn_model(draw, kind.layers, kind.per_layer)
    rows = draw(1, 4)
    return Model(tuple(((rows, shape.stride // 2, 2) if shape.stride % 2 == 0 else (rows, shape.stride), "DT_INT8")
                       for shape in kind.geometries), kind.per_layer)


def drawn_pull(draw: Draw, src: Model, dst: Model) -> Pull:
    first = draw(0, src.layers - 1)
    layers = range(first, first + 1 + draw(0, src.layers - 1 - first)) if draw(0, 1) else None
    windowed = draw(0, 2) == 0
    return Pull(src_row=draw(0, src.geometries[0].rows - (draw(0, 9) > 0)), batch_index=draw(0, dst.geometries[0].rows - 1),
                size=draw(1, 12) if windowed else -1, src_layer_range=layers, dst_layer_range=layers,
                src_cache_offset=draw(0, 4) if windowed else None, dst_cache_offset=draw(0, 4) if windowed else None,
                tensor_num_per_layer=src.per_layer)
