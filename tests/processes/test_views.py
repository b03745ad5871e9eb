"""What is seen through a view: bytes, shapes, windows, keys. What is refused is in test_view_refusals.py."""
from __future__ import annotations

from typing import Any

import pytest
from lent import KEYS, SENT, SHAPE, ask, assert_row, within
from peer import Peer, StartPeer, blocks, by_id, prefix, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, geometry, noise

pytestmark = pytest.mark.timeout(180)


# -- bytes ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("row", "key"), [*enumerate(KEYS), *((row, by_id(1, 1, row)) for row in range(3))])
def test_a_view_has_the_bytes_of_its_row(offered: tuple[Peer, Peer], row: int, key: list[Any]) -> None:
    _, d = offered
    assert within(d, "view", name="v", key=key) == [[[96], "int8", 96]] * 4
    assert_row(d, "v", SENT[:, :, row])


@pytest.mark.parametrize(("dtype", "numpy_name", "itemsize"), [
    ("DT_BF16", "bfloat16", 2), ("DT_FLOAT8_E4M3FN", "float8_e4m3fn", 1), ("DT_FLOAT8_E5M2", "float8_e5m2", 1),
    ("DT_FLOAT", "float32", 4), ("DT_BOOL", "bool", 1)])
@pytest.mark.parametrize("batch_dim", [0, 1, 2])
def test_element_types_and_places_of_the_batch(prompt: StartPeer, decoder: StartPeer, dtype: str, numpy_name: str, itemsize: int,
                                               batch_dim: int) -> None:
    p, d = prompt(1), decoder(2)
    shape = [3, 2, 4, 8]
    p.call("allocate", name="kv", shape=shape, dtype=dtype, batch_dim=batch_dim)
    p.call("noise", name="kv", seed=3)
    sent = noise(geometry(4, shape, itemsize, batch_dim), 3)
    rows = shape[batch_dim]
    described = [*shape[:batch_dim], 1, *shape[batch_dim + 1:]]
    for row in range(rows):
        found = within(d, "view", name="v", key=by_id(1, 1, row))
        outer, inner = sent.shape[1], sent.shape[3]
        assert found == [[[inner // itemsize] if outer == 1 else [outer, inner // itemsize], numpy_name, outer * inner]] * 4
        assert_row(d, "v", sent[:, :, row])
        ((seen, *_),) = {tuple(map(str, each)) for each in within(d, "view", name="w", key=by_id(1, 1, row), shapes=[described] * 4,
                                                                  dtypes=dtype, batch_dim=batch_dim)}
        wanted = [outer, *shape[batch_dim + 1:]] if outer > 1 else shape[:batch_dim] + shape[batch_dim + 1:]
        assert seen == str(wanted)
        assert_row(d, "w", sent[:, :, row])


def test_tensors_that_differ(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    shapes, kinds = [[2, 8], [2, 3, 4], [2, 40]], ["DT_FLOAT", "DT_BF16", "DT_INT8"]
    p.call("allocate_tensors", name="kv", shapes=shapes, dtypes=kinds, keys=[req(1, 7)])
    p.call("noise_tensors", name="kv", seed=9)
    sent = p.read_tensors("kv")
    found = within(d, "view", name="v", key=by_id(1, 1, 1), tensor_num_per_layer=1)
    assert found == [[[8], "float32", 32], [[12], "bfloat16", 24], [[40], "int8", 40]]
    assert_row(d, "v", [tensor[:, 1] for tensor in sent])
    found = within(d, "view", name="v", key=by_id(1, 1, 1), tensor_num_per_layer=1, layers=[1, 3], shapes=shapes, dtypes=kinds)
    assert found == [[[3, 4], "bfloat16", 24], [[40], "int8", 40]]
    assert_row(d, "v", [tensor[:, 1] for tensor in sent[1:]])
    wrong = [[2, 8], [2, 3, 4], [2, 20]]
    assert ask(d, "view", name="v", key=by_id(1, 1), tensor_num_per_layer=1, shapes=wrong, dtypes=kinds).outcome == PARAM_INVALID
    assert ask(d, "view", name="v", key=by_id(1, 1), tensor_num_per_layer=1, size=30).outcome == PARAM_INVALID, "of 24 bytes"
    within(d, "drop", names=["v"])
    assert within(d, "leases") == 0


@pytest.mark.parametrize(("how", "tensors", "window"), [
    ({"layers": [1, 2]}, slice(2, 4), slice(None)),
    ({"layers": [1, 2], "tensor_num_per_layer": 1}, slice(1, 2), slice(None)),
    ({"layers": [0, 2]}, slice(0, 4), slice(None)),
    ({"size": 10}, slice(None), slice(0, 10)),
    ({"src_cache_offset": 90}, slice(None), slice(90, 96)),
    ({"src_cache_offset": 5, "size": 7, "layers": [1, 2]}, slice(2, 4), slice(5, 12)),
    ({"src_cache_offset": 0, "size": 96}, slice(None), slice(None)),
    ({"size": 8, "src_cache_offset": 3, "shapes": [[1, 4]] * 4, "dtypes": "DT_FLOAT16"}, slice(None), slice(3, 11)),
])
def test_a_part_of_a_row(offered: tuple[Peer, Peer], how: dict[str, Any], tensors: slice, window: slice) -> None:
    _, d = offered
    within(d, "view", name="v", key=by_id(1, 1, 2), **how)
    assert_row(d, "v", SENT[tensors, :, 2], window)


def test_the_memory_is_the_owners_own(offered: tuple[Peer, Peer]) -> None:
    """No copy: what the owner writes meanwhile is seen, and the segment is mapped once, to be read."""
    p, d = offered
    for name in "abc":
        within(d, "view", name=name, key=by_id(1, 1, 0))
    p.call("noise", name="kv", seed=6)
    for name in "abc":
        assert_row(d, name, noise(geometry(4, SHAPE, 1), 6)[:, :, 0])
    assert [permissions for permissions, _ in within(d, "mapped")] == ["r--s"]


def test_arrays_are_made_when_they_are_asked_for(offered: tuple[Peer, Peer]) -> None:
    _, d = offered
    assert d.call("execute", code="""
import gc
from shmkv._view import TensorView
def alive():
    gc.collect()
    return sum(isinstance(each, TensorView) for each in gc.get_objects())
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKey(1, 7))
tensors = view.tensors
result = [view.num_tensors, len(view), len(tensors), view.nbytes, view.is_open, alive()]
second = tensors[-3]
result += [alive(), second is tensors[1] is view.tensors[1], alive()]
result += [[each is tensors[place] for place, each in enumerate(tensors[2:], 2)], alive()]
result += [len(list(tensors)), [each.data_ptr - tensors[0].data_ptr for each in tensors] == sorted(
    each.data_ptr - tensors[0].data_ptr for each in tensors), alive()]
""") == [4, 4, 4, 384, True, 0, 1, True, 1, [True, True], 3, 4, True, 4]


def test_places_of_arrays_are_those_of_a_tuple(offered: tuple[Peer, Peer]) -> None:
    _, d = offered
    assert d.call("execute", code="""
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKey(1, 7))
tensors = view.tensors
def outcome(place):
    try:
        return type(tensors[place]).__name__
    except Exception as error:
        return type(error).__name__
result = [[outcome(place) for place in (0, 3, -4, 4, -5, "1", None)],
          [[list(tensors).index(each) for each in tensors[place]] for place in (slice(1, 3), slice(None, None, -2), slice(9, 12))],
          [each is tensors[place] for place, each in zip((3, 2, 1, 0), reversed(tensors))]]
""") == [["TensorView", "TensorView", "TensorView", "IndexError", "IndexError", "TypeError", "TypeError"],
         [[1, 2], [3, 1], []], [True] * 4]


def test_arrays_that_are_asked_for_too_late_are_refused(offered: tuple[Peer, Peer]) -> None:
    """Those that were made, too: the bytes may be another cache's by now. What was taken out before stays."""
    _, d = offered
    assert d.call("execute", code="""
import gc
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(1, 1, 0))
tensors = view.tensors
first, seen = tensors[0], []
def outcome(call):
    try:
        return type(call()).__name__
    except shmkv.LLMException as error:
        return error.status_code.name
def go_through():
    for each in tensors:
        seen.append(each)
        view.close()
result = [outcome(go_through), len(seen), outcome(lambda: tensors[0]), outcome(lambda: tensors[1]), outcome(lambda: tensors[:1]),
          outcome(lambda: view.tensors), len(tensors), first.numpy().shape == (96,)]
""") == [NOT_EXIST, 1, NOT_EXIST, NOT_EXIST, NOT_EXIST, NOT_EXIST, 4, True]


def test_a_view_goes_with_its_last_name(offered: tuple[Peer, Peer]) -> None:
    """Its arrays keep the mapping, their sequence the view."""
    _, d = offered
    assert d.call("execute", code="""
import gc
gc.disable()
handle = agent.dist._links.handle(1)
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(1, 1, 0))
tensors = view.tensors
kept = [tensors[0], tensors[1].numpy()]
result = [handle.leases]
del view
result.append(handle.leases)
tensors[2]
del tensors
result.append(handle.leases)
gc.enable()
""") == [1, 1, 0]


# -- keys -------------------------------------------------------------------------------------------------------------

def test_a_request_key_is_used_up_by_a_view(offered: tuple[Peer, Peer]) -> None:
    _, d = offered
    within(d, "view", name="kept", key=req(1, 7), consume=False)
    within(d, "view", name="window", key=req(1, 7), src_cache_offset=0)
    within(d, "view", name="used", key=req(1, 7))
    again = ask(d, "view", name="again", key=req(1, 7))
    assert (again.outcome, "consumed" in again.text) == (NOT_EXIST, True)
    for name in ("kept", "window", "used"):
        assert_row(d, name, SENT[:, :, 0])
    for _ in range(2):
        within(d, "view", name="prefix", key=prefix(1, 9))
    assert_row(d, "prefix", SENT[:, :, 1])


def test_parts_use_a_key_up_together(offered: tuple[Peer, Peer]) -> None:
    _, d = offered
    d.call("allocate", name="into", shape=[1, 96], dtype="DT_INT8")
    within(d, "view", name="one", key=req(1, 7), layers=[0, 1])
    within(d, "view", name="same", key=req(1, 7), layers=[0, 1])
    within(d, "view", name="kept", key=req(1, 7), layers=[1, 2], consume=False)
    d.call("pull", key=req(1, 7), name="into", src_layer_range=range(1, 2), dst_layer_range=range(1, 2))
    assert ask(d, "view", name="again", key=req(1, 7)).outcome == NOT_EXIST, "one half viewed, the other pulled"
    d.call("pull", key=req(1, 8), name="into", src_layer_range=range(1), dst_layer_range=range(1))
    within(d, "view", name="rest", key=req(1, 8), layers=[1, 2])
    assert_row(d, "rest", SENT[2:, :, 2])
    assert d.outcome("pull", key=req(1, 8), name="into") == NOT_EXIST


def test_what_is_not_published_is_not_seen(offered: tuple[Peer, Peer]) -> None:
    p, d = offered
    p.call("allocate", name="new", shape=[2, 96], dtype="DT_INT8", keys=[req(1, 20)], publish=False)
    assert ask(d, "view", name="v", key=req(1, 20)).outcome == NOT_EXIST
    assert ask(d, "view", name="v", key=by_id(1, 2, 1)).outcome == NOT_EXIST
    p.call("publish", name="new", rows=[0], layers=1)
    answer = ask(d, "view", name="v", key=req(1, 20))
    assert (answer.outcome, "not published" in answer.text) == (NOT_EXIST, True)
    within(d, "view", name="v", key=req(1, 20), layers=[0, 1])
    p.call("publish", name="new")
    within(d, "view", name="v", key=req(1, 20), layers=[1, 2])
    assert ask(d, "view", name="v", key=req(1, 20)).outcome == NOT_EXIST, "both layers were seen"


def test_a_row_of_a_blocks_cache(offered: tuple[Peer, Peer]) -> None:
    p, d = offered
    cache_id = p.call("allocate_blocks", name="blocks", shape=[8, 16], key=blocks(1, 3))
    p.call("noise", name="blocks", seed=8)
    within(d, "view", name="v", key=by_id(1, cache_id, 5))
    assert_row(d, "v", noise(geometry(4, [8, 16], 1), 8)[:, :, 5])


# -- one's own ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("is_linked", [False, True])
def test_a_row_of_the_own_cluster(prompt: StartPeer, is_linked: bool) -> None:
    d = prompt(2, enable_switch_role=True)
    d.call("allocate", name="own", shape=[2, 4, 8], dtype="DT_INT8", batch_dim=1, keys=[req(2, 5)])
    d.call("switch_role", role="DECODER")
    if is_linked:
        assert d.call("link", ids=[2]) == [SUCCESS, [SUCCESS]]
    d.call("noise", name="own", seed=4)
    sent = noise(geometry(4, [2, 4, 8], 1, 1), 4)
    within(d, "view", name="v", key=by_id(2, 1, 3))
    assert_row(d, "v", sent[:, :, 3])
    within(d, "view", name="v", key=req(2, 5), layers=[1, 2])
    assert_row(d, "v", sent[2:, :, 0])
    within(d, "view", name="v", key=req(2, 5))
    assert ask(d, "view", name="w", key=req(2, 5)).outcome == NOT_EXIST
    assert d.call("execute", code="""
tensor, own = agent.lent["v"].tensors[0], agent.caches["own"]
array = tensor.numpy()
result = [tensor.data_ptr - own.tensors[0].data_ptr, array.flags.writeable]     # the owner's own mapping: see docs/usage.md
try:
    array.flags.writeable = True
except ValueError:
    result.append("refused")
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(2, 1, 0))
tensors = view.tensors
first = tensors[0]
view.close()
for place in (0, 1):
    try:
        tensors[place]
    except shmkv.LLMException as error:
        result.append(error.status_code.name)
""") == [0, False, "refused", NOT_EXIST, NOT_EXIST]
    for wrong in ({"layers": [1, 3]}, {"size": 17}, {"src_cache_offset": 16}, {"tensor_num_per_layer": 3, "layers": [0, 1]}):
        assert ask(d, "view", name="w", key=by_id(2, 1), **wrong).outcome == PARAM_INVALID, wrong
    assert ask(d, "view", name="w", key=by_id(2, 1, 4)).outcome == NOT_EXIST
