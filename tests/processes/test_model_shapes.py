"""Caches as models have them, between two processes: latent tensors, K and V of unequal size, sliding windows, states of linear
attention, 8-bit floats, quantised rows. What arrives is what the numpy twin says, tensor by tensor."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peer import Peer, StartPeer, by_id, req
from reference import (
    PARAM_INVALID,
    SUCCESS,
    Bytes,
    Geometry,
    Pull,
    Refused,
    canary,
    copy_tensors,
    geometry,
    noise,
    pull_tensors,
)

pytestmark = pytest.mark.timeout(300)
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
every_model = pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)


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


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> Sides:
    return Sides(prompt(1), decoder(2))


def expected(src: list[Bytes], dst: list[Bytes], pull: Pull) -> tuple[str, list[Bytes]]:
    try:
        return SUCCESS, pull_tensors(src, dst, pull)
    except Refused as refusal:
        return str(refusal), dst


def same(found: list[Bytes], wanted: list[Bytes], why: object = "") -> None:
    for place, (left, right) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_array_equal(left, right, err_msg=f"tensor {place}, {why}")


def some_pulls(kind: Model) -> list[Pull]:
    """Whole rows, layers in the middle, and windows that every tensor has."""
    middle, last = range(1, kind.layers), range(kind.layers - 1, kind.layers)
    small = min(shape.stride for shape in kind.geometries)
    return [Pull(), Pull(src_row=3, batch_index=1), Pull(src_row=1, batch_index=2, src_layer_range=middle, dst_layer_range=middle),
            Pull(src_row=2, batch_index=0, src_layer_range=last, dst_layer_range=last),
            Pull(src_row=1, batch_index=3, size=small // 2, src_cache_offset=small // 2, dst_cache_offset=small // 4),
            Pull(src_row=1, batch_index=3, size=small), Pull(src_cache_offset=8, dst_cache_offset=8),
            Pull(size=small + 1, src_layer_range=last, dst_layer_range=last), Pull(size=small + 1), Pull(src_cache_offset=1),
            Pull(dst_cache_offset=small), Pull(dst_cache_offset=4)]


@every_model
@pytest.mark.parametrize("copy", ["memory", "pread"])
def test_each_tensor_of_a_model_arrives(prompt: StartPeer, decoder: StartPeer, kind: Model, copy: str) -> None:
    sides = Sides(prompt(1), decoder(2, env={"SHMKV_COPY": copy}))
    cache_id = sides.allocate(kind, kind, 3)
    src, dst = kind.noise(3), kind.canary()
    outcomes = set()
    for pull in some_pulls(kind):
        pull = replace(pull, tensor_num_per_layer=kind.per_layer)
        outcome, dst = expected(src, dst, pull)
        answer = sides.d.attempt("pull", key=by_id(1, cache_id, pull.src_row), name="kv", **pull.options())
        assert answer.outcome == outcome, f"{pull}: {answer.text}"
        same(sides.d.read_tensors("kv"), dst, pull)
        outcomes.add(outcome)
    assert outcomes == {SUCCESS, PARAM_INVALID}


@every_model
def test_layer_by_layer_a_request_is_consumed_by_its_last_tensor(sides: Sides, kind: Model) -> None:
    sides.allocate(kind, kind, 5)
    for layer in reversed(range(kind.layers)):
        one = range(layer, layer + 1)
        assert sides.d.outcome("pull", key=req(1, 71), name="kv", batch_index=2, src_layer_range=one, dst_layer_range=one,
                               tensor_num_per_layer=kind.per_layer) == SUCCESS
    same(sides.d.read_tensors("kv"), pull_tensors(kind.noise(5), kind.canary(), Pull(src_row=1, batch_index=2)))
    assert sides.d.outcome("pull", key=req(1, 71), name="kv") == "LLM_KV_CACHE_NOT_EXIST"


# -- what cannot be -----------------------------------------------------------------------------------------------------

def test_messages_name_the_tensor_whose_row_does_not_fit(sides: Sides) -> None:
    wide, narrow = MODELS["sliding and full"], Model((SLIDING,) * 12)
    full, window = 2 * TOKENS * 8 * 2, 2 * WINDOW * 8 * 2
    cache_id = sides.allocate(narrow, wide, 1)
    answer = sides.d.attempt("pull", key=by_id(1, cache_id), name="kv")
    assert answer.outcome == PARAM_INVALID
    assert f"{full} bytes (tensor 4, shape [4, 2, 48, 8], source tensor 4 has rows of {window} bytes)" in answer.text
    assert "12 tensors of 4 rows" in answer.text
    answer = sides.d.attempt("pull", key=by_id(1, cache_id), name="kv", size=full)
    assert f"does not fit destination rows of {window} bytes (tensor 0, shape [4, 2, 16, 8])" in answer.text
    answer = sides.d.attempt("pull", key=by_id(1, cache_id), name="kv", dst_layer_range=range(1, 3), src_layer_range=range(2, 4),
                             src_cache_offset=8)
    assert f"(tensor 2, shape [4, 2, 16, 8], source tensor 4 has rows of {window} bytes)" in answer.text
    answer = sides.d.attempt("pull", key=by_id(1, cache_id), name="kv", batch_index=4)
    assert "'batch_index' must be below the batch size 4, got 4" in answer.text
    same(sides.d.read_tensors("kv"), wide.canary())


def test_messages_about_a_source_whose_tensors_differ(sides: Sides) -> None:
    wide, narrow = MODELS["sliding and full"], Model((FULL,) * 12)
    cache_id = sides.allocate(wide, narrow, 1)
    answer = sides.d.attempt("pull", key=by_id(1, cache_id), name="kv")
    assert answer.outcome == PARAM_INVALID
    assert "the source has 12 tensors of 4 rows, of [512, 512, 512, 512, 1536, 1536, 512, 512, ...] bytes" in answer.text
    assert sides.d.outcome("pull", key=by_id(1, cache_id), name="kv", size=512) == SUCCESS


def test_batch_sizes_that_differ_are_refused_before_anything_is_made(prompt: StartPeer) -> None:
    answer = prompt(1).attempt("allocate_tensors", name="kv", shapes=[[4, 8], [3, 8]], dtypes=["DT_INT8"] * 2)
    assert answer.outcome == PARAM_INVALID
    assert "'shapes' must have one batch size, got shapes[1] = [3, 8]" in answer.text


# -- several caches of one request ----------------------------------------------------------------------------------------

PULL_GROUPS = """
manager = agent.dist.kv_cache_manager
requests = [shmkv.PullRequest(shmkv.CacheKey(1, REQ, group), agent.caches[f"group{group}"], batch_index=1)
            for group in range(GROUPS)]
try:
    manager.pull_many(requests)
    result = ["LLM_SUCCESS", None, manager.last_pull().nbytes]
except shmkv.LLMException as error:
    result = [error.status_code.name, error.failed_request, 0]
"""


def test_groups_of_layers_are_caches_of_one_request(sides: Sides) -> None:
    groups = [Model((FULL,) * 4), Model((SLIDING,) * 8), Model(STATES * 2)]
    for number, group in enumerate(groups):
        group.allocate(sides.p, f"group{number}", keys=[req(1, 8, number), req(1, 9, number)])
        sides.p.call("noise_tensors", name=f"group{number}", seed=100 * number)
        group.allocate(sides.d, f"group{number}")
        sides.d.call("canary", name=f"group{number}")
    pulled = [[SUCCESS, None, sum(shape.stride for shape in groups[-1].geometries)], ["LLM_KV_CACHE_NOT_EXIST", 0, 0]]
    for wanted in pulled:
        assert sides.d.call("execute", code=f"REQ, GROUPS = 9, {len(groups)}\n" + PULL_GROUPS) == wanted
        for number, group in enumerate(groups):
            same(sides.d.read_tensors(f"group{number}"),
                 pull_tensors(group.noise(100 * number), group.canary(), Pull(src_row=1, batch_index=1)), f"group {number}")
    assert sides.d.call("execute", code=f"REQ, GROUPS = 8, {len(groups)}\n" + PULL_GROUPS) == pulled[0], "the other request"


# -- 8-bit floats and packed rows -------------------------------------------------------------------------------------------

FILL_PATTERNS = """
import ml_dtypes
kind = getattr(ml_dtypes, DTYPE, None)
for number, view in enumerate(agent.caches["kv"].tensors):
    array = view.numpy()
    assert array.dtype == (kind or array.dtype)
    patterns = np.arange(256, dtype=np.uint8) + np.uint8(number)
    array[...] = patterns.view(array.dtype)
"""
READ_PATTERNS = """
cache = agent.caches["kv"]
tensor = agent.dist.kv_cache_manager.get_cache_tensors(cache, 1)[0]
array = tensor.numpy()
result = [str(tensor.tensor_desc.dtype), str(array.dtype), array[1].view(np.uint8).tolist(),
          cache.tensors[0].numpy()[1].view(np.uint8).tolist(), array[1].astype(np.float32)[:4].tolist()]
"""


@pytest.mark.parametrize(("dtype", "numpy", "first"), [
    ("DT_FLOAT8_E4M3FN", "float8_e4m3fn", [2.0**-9, 2.0**-8, 3 * 2.0**-9, 2.0**-7]),
    ("DT_FLOAT8_E5M2", "float8_e5m2", [2.0**-16, 2.0**-15, 3 * 2.0**-16, 2.0**-14]),
    ("DT_INT8", "", [1, 2, 3, 4]), ("DT_UINT8", "", [1, 2, 3, 4]),
])
def test_all_256_patterns_of_a_byte_arrive(sides: Sides, dtype: str, numpy: str, first: list[float]) -> None:
    kind = Model((((2, 256), dtype),) * 2)
    cache_id = kind.allocate(sides.p, "kv")
    sides.p.call("execute", code=f"DTYPE = {numpy!r}\n" + FILL_PATTERNS)
    kind.allocate(sides.d, "kv")
    sides.d.call("pull", key=by_id(1, cache_id), name="kv", batch_index=1)
    patterns = list(range(256))
    wanted = [f"DataType.{dtype}", numpy or dtype[3:].lower(), [*patterns[1:], 0], patterns, first]
    assert sides.d.call("execute", code=READ_PATTERNS) == wanted


PACK = """
values = np.random.default_rng(4).integers(-8, 8, size=(2, 6, 32))
low, high = (values[..., half::2].astype(np.uint8) & 15 for half in (0, 1))
agent.caches["kv"].tensors[0].numpy()[...] = low | high << 4
"""
UNPACK = """
packed = agent.caches["kv"].tensors[0].numpy()[0]
halves = [(half.astype(np.int8) ^ 8) - 8 for half in (packed & 15, packed >> 4)]
result = np.stack(halves, axis=-1).reshape(6, 32).tolist()
"""


def test_packed_int4_rows_are_bytes(sides: Sides) -> None:
    kind = Model((((2, 6, 16), "DT_UINT8"),), per_layer=1)
    cache_id = kind.allocate(sides.p, "kv")
    sides.p.call("execute", code=PACK)
    kind.allocate(sides.d, "kv")
    sides.d.call("pull", key=by_id(1, cache_id, 1), name="kv")
    assert sides.d.call("execute", code=UNPACK) == np.random.default_rng(4).integers(-8, 8, size=(2, 6, 32))[1].tolist()


VIEWS = """
import ctypes
cache, manager = agent.caches["kv"], agent.dist.kv_cache_manager
result = [[list(view.shape), str(view.dtype), view.nbytes, view.data_ptr == address, view.data_ptr % 64,
           manager.get_cache_tensors(cache, place)[0].tensor_desc.shape == list(view.shape)]
          for place, (view, address) in enumerate(zip(cache.tensors, cache.per_device_tensor_addrs[0], strict=True))]
"""


def test_views_have_the_shape_and_type_of_their_tensor(prompt: StartPeer) -> None:
    p, kind = prompt(1), MODELS["linear and full"]
    kind.allocate(p, "kv")
    seen = p.call("execute", code=VIEWS)
    assert seen == [[list(shape), f"DataType.{dtype}", where.stride * where.rows, True, 0, True]
                    for (shape, dtype), where in zip(kind.tensors, kind.geometries, strict=True)]


# -- copies inside a process -------------------------------------------------------------------------------------------------

COPY = """
try:
    agent.dist.kv_cache_manager.copy_cache(agent.caches[DST], agent.caches["kv"], DST_ROW, SRC_ROW, OFFSET, SIZE)
    result = "LLM_SUCCESS"
except shmkv.LLMException as error:
    result = error.status_code.name, str(error)
"""


def copied(p: Peer, dst: str, rows: tuple[int, int], offset: int, size: int) -> Any:
    return p.call("execute", code=f"DST, SRC_ROW, DST_ROW, OFFSET, SIZE = {dst!r}, {rows[0]}, {rows[1]}, {offset}, {size}\n" + COPY)


@every_model
def test_copy_cache_copies_the_rest_of_each_tensors_row(prompt: StartPeer, kind: Model) -> None:
    p = prompt(1)
    # The same rows, rows that are all longer, and rows of which the last is shorter.
    longer = replace(kind, tensors=tuple(((*shape[:-1], shape[-1] * 2), dtype) for shape, dtype in kind.tensors))
    shape, dtype = kind.tensors[-1]
    shorter = replace(longer, tensors=(*longer.tensors[:-1], ((*shape[:-1], shape[-1] // 2 or 1), dtype)))
    small = min(each.stride for each in kind.geometries)
    kind.allocate(p, "kv")
    p.call("noise_tensors", name="kv", seed=7)
    src, outcomes = kind.noise(7), set()
    for name, to in (("same", kind), ("longer", longer), ("shorter", shorter)):
        to.allocate(p, name)
        p.call("canary", name=name)
        dst = to.canary()
        for rows, offset, size in (((1, 2), 0, -1), ((3, 0), small // 2, -1), ((0, 1), 4, small - 4), ((0, 3), 0, small),
                                   ((0, 3), small, -1), ((0, 3), 1, small), ((0, 3), 0, 10**6)):
            try:
                wanted, dst = SUCCESS, copy_tensors(src, dst, rows, offset, size)
            except Refused as refusal:
                wanted = str(refusal)
            said = copied(p, name, rows, offset, size)
            assert (said if wanted == SUCCESS else said[0]) == wanted, f"{name}, rows {rows}, {size} at {offset}: {said}"
            same(p.read_tensors(name), dst, f"{name}, rows {rows}, {size} at {offset}")
            outcomes.add((name, wanted))
    assert {("same", SUCCESS), ("longer", SUCCESS), ("shorter", PARAM_INVALID)} <= outcomes


def test_copy_within_a_cache_and_what_it_says_of_a_tensor(prompt: StartPeer) -> None:
    p, kind = prompt(1), MODELS["sliding and full"]
    kind.allocate(p, "kv")
    p.call("noise_tensors", name="kv", seed=7)
    assert copied(p, "kv", (1, 2), 0, -1) == copied(p, "kv", (0, 0), 0, -1) == SUCCESS
    same(p.read_tensors("kv"), copy_tensors(kind.noise(7), kind.noise(7), (1, 2), 0, -1))
    _, text = copied(p, "kv", (1, 2), 0, 600)
    assert "size 600 do not fit rows of tensor 0 of 512 (src) and 512 (dst) bytes" in text


# -- random shapes -------------------------------------------------------------------------------------------------------------

def drawn_model(draw: Callable[[int, int], int], layers: int, per_layer: int) -> Model:
    batch_dim, rows = draw(0, 2), draw(1, 4)
    tensors = []
    for _ in range(layers * per_layer):
        shape = [draw(1, 5) for _ in range(batch_dim + draw(1, 3))]
        shape[batch_dim] = rows
        tensors.append((tuple(shape), list(ITEM_BYTES)[draw(0, len(ITEM_BYTES) - 1)]))
    return Model(tuple(tensors), per_layer, batch_dim)


def like(draw: Callable[[int, int], int], kind: Model) -> Model:
    """A model with rows as long, laid out in another way, mostly."""
    if not draw(0, 4):
        return drawn_model(draw, kind.layers, kind.per_layer)
    rows = draw(1, 4)
    return Model(tuple(((rows, shape.stride // 2, 2) if shape.stride % 2 == 0 else (rows, shape.stride), "DT_INT8")
                       for shape in kind.geometries), kind.per_layer)


def drawn_pull(draw: Callable[[int, int], int], src: Model, dst: Model) -> Pull:
    first = draw(0, src.layers - 1)
    layers = range(first, first + 1 + draw(0, src.layers - 1 - first)) if draw(0, 1) else None
    windowed = draw(0, 2) == 0
    return Pull(src_row=draw(0, src.geometries[0].rows - (draw(0, 9) > 0)), batch_index=draw(0, dst.geometries[0].rows - 1),
                size=draw(1, 12) if windowed else -1, src_layer_range=layers, dst_layer_range=layers,
                src_cache_offset=draw(0, 4) if windowed else None, dst_cache_offset=draw(0, 4) if windowed else None,
                tensor_num_per_layer=src.per_layer)


def pull_and_compare(sides: Sides, cache_id: int, src: Model, dst: Model, pulls: list[Pull]) -> None:
    after = dst.canary()
    for pull in pulls:
        outcome, after = expected(src.noise(11), after, pull)
        answer = sides.d.attempt("pull", key=by_id(1, cache_id, pull.src_row), name="kv", **pull.options())
        assert answer.outcome == outcome, f"{src}, {dst}, {pull}: {answer.text}"
        same(sides.d.read_tensors("kv"), after, (src, dst, pull))


def test_random_models_and_pulls(sides: Sides, rounds: Callable[[int], int]) -> None:
    @settings(max_examples=rounds(60), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        def draw(low: int, high: int) -> int:
            return data.draw(st.integers(low, high))

        src = drawn_model(draw, draw(1, 3), draw(1, 3))
        dst = like(draw, src)
        pulls = [drawn_pull(draw, src, dst) for _ in range(3)]
        cache_id = sides.allocate(src, dst, 11)
        try:
            pull_and_compare(sides, cache_id, src, dst, pulls)
        finally:
            sides.free(src.geometries[0].rows)

    check()
