"""Caches as models have them, between two processes: latent tensors, K and V of unequal size, sliding windows, states of linear
attention, 8-bit floats, quantised rows. What arrives is what the numpy twin says, tensor by tensor."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_shapes import (
    FULL,
    MODELS,
    SLIDING,
    STATES,
    TOKENS,
    WINDOW,
    Model,
    Sides,
    assert_same_tensors,
    drawn_model,
    drawn_pull,
    expected,
    like,
)
from peer import StartPeer, by_id, req
from reference import PARAM_INVALID, SUCCESS, Pull, pull_tensors

pytestmark = pytest.mark.timeout(300)
every_model = pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> Sides:
    return Sides(prompt(1), decoder(2))


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
        assert_same_tensors(sides.d.read_tensors("kv"), dst, pull)
        outcomes.add(outcome)
    assert outcomes == {SUCCESS, PARAM_INVALID}


@every_model
def test_layer_by_layer_a_request_is_consumed_by_its_last_tensor(sides: Sides, kind: Model) -> None:
    sides.allocate(kind, kind, 5)
    for layer in reversed(range(kind.layers)):
        one = range(layer, layer + 1)
        assert sides.d.outcome("pull", key=req(1, 71), name="kv", batch_index=2, src_layer_range=one, dst_layer_range=one,
                               tensor_num_per_layer=kind.per_layer) == SUCCESS
    assert_same_tensors(sides.d.read_tensors("kv"), pull_tensors(kind.noise(5), kind.canary(), Pull(src_row=1, batch_index=2)))
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
    assert_same_tensors(sides.d.read_tensors("kv"), wide.canary())


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
            assert_same_tensors(sides.d.read_tensors(f"group{number}"),
                 pull_tensors(group.noise(100 * number), group.canary(), Pull(src_row=1, batch_index=1)), f"group {number}")
    assert sides.d.call("execute", code=f"REQ, GROUPS = 8, {len(groups)}\n" + PULL_GROUPS) == pulled[0], "the other request"


# -- random shapes -----------------------------------------------------------------------------------------------------------

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
            after = dst.canary()
            for pull in pulls:
                outcome, after = expected(src.noise(11), after, pull)
                answer = sides.d.attempt("pull", key=by_id(1, cache_id, pull.src_row), name="kv", **pull.options())
                assert answer.outcome == outcome, f"{src}, {dst}, {pull}: {answer.text}"
                assert_same_tensors(sides.d.read_tensors("kv"), after, (src, dst, pull))
        finally:
            sides.free(src.geometries[0].rows)

    check()
