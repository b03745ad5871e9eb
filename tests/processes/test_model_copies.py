"""copy_cache and pulls out of the own cluster where tensors differ: every tensor by its own row."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import cache_bytes
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_shapes import MODELS, Model, assert_same_tensors, drawn_model, drawn_pull, expected, like
from peer import Peer, StartPeer
from reference import PARAM_INVALID, SUCCESS, Pull, Refused, copy_tensors

from shmkv import CacheDesc, CacheKeyByIdAndIndex, DataType, KvCache, LLMException

pytestmark = pytest.mark.timeout(300)
every_model = pytest.mark.parametrize("kind", MODELS.values(), ids=MODELS)

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
            assert_same_tensors(p.read_tensors(name), dst, f"{name}, rows {rows}, {size} at {offset}")
            outcomes.add((name, wanted))
    assert {("same", SUCCESS), ("longer", SUCCESS), ("shorter", PARAM_INVALID)} <= outcomes


def test_copy_within_a_cache_and_what_it_says_of_a_tensor(prompt: StartPeer) -> None:
    p, kind = prompt(1), MODELS["sliding and full"]
    kind.allocate(p, "kv")
    p.call("noise_tensors", name="kv", seed=7)
    assert copied(p, "kv", (1, 2), 0, -1) == copied(p, "kv", (0, 0), 0, -1) == SUCCESS
    assert_same_tensors(p.read_tensors("kv"), copy_tensors(kind.noise(7), kind.noise(7), (1, 2), 0, -1))
    _, text = copied(p, "kv", (1, 2), 0, 600)
    assert "size 600 do not fit rows of tensor 0 of 512 (src) and 512 (dst) bytes" in text


# -- pulls out of the own cluster ----------------------------------------------------------------------------------------

def allocated(manager: Any, kind: Model) -> KvCache:
    shapes, dtypes = [list(shape) for shape, _ in kind.tensors], [DataType[dtype] for _, dtype in kind.tensors]
    made: KvCache = manager.allocate_cache(CacheDesc.of_tensors(shapes, dtypes, batch_dim_index=kind.batch_dim))
    return made


def pulled(manager: Any, src: KvCache, dst: KvCache, pull: Pull) -> str:
    try:
        manager.pull_cache(CacheKeyByIdAndIndex(1, src.cache_id, pull.src_row), dst, **pull.options())
    except LLMException as error:
        return error.status_code.name
    return SUCCESS


def test_random_models_pulled_by_their_own_process(here: Callable[..., Any], rounds: Callable[[int], int]) -> None:
    manager = here("DECODER", 1).kv_cache_manager

    @settings(max_examples=rounds(300), deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        def draw(low: int, high: int) -> int:
            return data.draw(st.integers(low, high))

        kind = drawn_model(draw, draw(1, 3), draw(1, 3))
        to = like(draw, kind)
        pull = drawn_pull(draw, kind, to)
        src, dst = allocated(manager, kind), allocated(manager, to)
        cache_bytes.write(src, kind.noise(3))
        cache_bytes.write(dst, to.canary())
        outcome, after = expected(kind.noise(3), to.canary(), pull)
        said, found = pulled(manager, src, dst, pull), cache_bytes.read_tensors(dst)
        for cache in (src, dst):
            manager.deallocate_cache(cache)
        assert said == outcome, (kind, to, pull)
        assert_same_tensors(found, after, (kind, to, pull))

    check()
