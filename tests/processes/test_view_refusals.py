"""What is refused of a view: writing, sharing what cannot be shared, misfits, too many of them."""
from __future__ import annotations

import signal
from typing import Any

import pytest
from lent import ask, offer_rows, within
from peer import Peer, StartPeer, blocks, by_id, prefix, req
from reference import NOT_EXIST, PARAM_INVALID

pytestmark = pytest.mark.timeout(180)


_WRITE = """
import ctypes
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(1, 1, 0))
tensor = view.tensors[0]
def refused(call, *arguments, **more):
    try:
        call(*arguments, **more)
    except Exception as error:
        return type(error).__name__
    return "done"
array = tensor.numpy()
result = [array.flags.writeable, memoryview(tensor).readonly, tensor.raw.readonly,
          refused(array.__setitem__, 0, 1), refused(array.setflags, write=True), refused(array.view(np.uint8).setflags, write=True),
          refused(array.reshape(12, 8).setflags, write=True), refused(ctypes.c_char.from_buffer, tensor),
          refused(np.asarray(tensor).setflags, write=True), refused(memoryview(tensor).cast("B").__setitem__, 0, 1)]
"""


def test_nothing_can_be_written_through_a_view(offered: tuple[Peer, Peer]) -> None:
    _, d = offered
    assert d.call("execute", code=_WRITE) == [
        False, True, True, "ValueError", "ValueError", "ValueError", "ValueError", "TypeError", "ValueError", "TypeError"]
    with_gaps = """
agent.allocate("gaps", 2, (2, 3, 8), "DT_INT8", 1)
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(2, 1, 1))
array = view.tensors[0].numpy()
result = [array.strides, array.flags.writeable]
try:
    array.setflags(write=True)
except ValueError:
    result.append("refused")
try:
    array.base.setflags(write=True)
except (ValueError, AttributeError):
    result.append("refused")
"""
    assert d.call("execute", code=with_gaps) == [[24, 1], False, "refused", "refused"]


def test_a_write_past_python_is_stopped_by_the_kernel(offered: tuple[Peer, Peer]) -> None:
    """The memory of a peer is mapped to be read. Tried by a child, which it ends."""
    _, d = offered
    signal_number, before, after = d.call("execute", code="""
import ctypes, faulthandler, os
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(1, 1, 0))
array = view.tensors[0].numpy()
before = array.tobytes().hex()
child = os.fork()
if child == 0:
    faulthandler.disable()
    ctypes.memset(view.tensors[0].data_ptr, array[0] ^ 1, 1)
    os._exit(0)
result = [os.WTERMSIG(os.waitpid(child, 0)[1]), before, array.tobytes().hex()]
""")
    assert signal_number == signal.SIGSEGV
    assert after == before


def test_dlpack_takes_a_copy_only(offered: tuple[Peer, Peer]) -> None:
    _, d = offered
    text, same, apart, flag = d.call("execute", code="""
view = agent.dist.kv_cache_manager.view_cache(shmkv.CacheKeyByIdAndIndex(1, 1, 0))
tensor = view.tensors[0]
try:
    np.from_dlpack(tensor)
    text = ""
except BufferError as error:
    text = str(error)
copied = np.from_dlpack(tensor, copy=True)
result = [text, bool((copied == tensor.numpy()).all()), copied.ctypes.data != tensor.data_ptr, copied.flags.writeable]
copied = copied.copy()
copied[...] = 7
""")
    assert "copy=True" in text
    assert (same, apart) == (True, True)
    assert flag in (True, False), "numpy's own choice"


@pytest.mark.parametrize("how", [
    {"layers": [1, 3]}, {"layers": [2, 3]}, {"layers": [0, 0]}, {"size": 97}, {"size": 0}, {"size": -2}, {"src_cache_offset": 96},
    {"src_cache_offset": 90, "size": 7}, {"src_cache_offset": -1}, {"tensor_num_per_layer": 3, "layers": [0, 1]},
    {"tensor_num_per_layer": 0},
    {"shapes": [[1, 96]] * 3}, {"shapes": [[1, 95]] * 4}, {"shapes": [[1, 96]] * 4, "size": 95},
    {"shapes": [[1, 96]] * 4, "dtypes": "DT_FLOAT16"}, {"shapes": [[1, 96], [1, 96], [1, 96], [1, 48]]},
    {"layers": [1, 2], "shapes": [[1, 96]] * 2},
])
def test_misfits_are_said_at_once(offered: tuple[Peer, Peer], how: dict[str, Any]) -> None:
    _, d = offered
    assert ask(d, "view", name="v", key=by_id(1, 1), **how).outcome == PARAM_INVALID
    assert within(d, "leases") == 0


def test_pieces_and_elements_stay_whole(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="pieces", shape=[2, 3, 8], dtype="DT_FLOAT16", batch_dim=1)
    for how in ({"size": 8}, {"src_cache_offset": 2}, {"shapes": [[4, 1, 4]] * 4, "batch_dim": 1, "dtypes": "DT_FLOAT16"}):
        assert ask(d, "view", name="v", key=by_id(1, 1), **how).outcome == PARAM_INVALID, how
    within(d, "view", name="v", key=by_id(1, 1), src_cache_offset=0, size=32)
    p.call("allocate", name="plain", shape=[2, 8], dtype="DT_FLOAT16")
    for how in ({"size": 5}, {"src_cache_offset": 3}):
        assert ask(d, "view", name="v", key=by_id(1, 2), **how).outcome == PARAM_INVALID, "half an element"
    assert within(d, "view", name="v", key=by_id(1, 2), size=5, shapes=[[1, 5]] * 4) == [[[5], "int8", 5]] * 4


def test_statuses_and_types(offered: tuple[Peer, Peer]) -> None:
    p, d = offered
    outcomes = {
        "never": ask(d, "view", name="v", key=req(1, 99)).outcome, "row": ask(d, "view", name="v", key=by_id(1, 1, 3)).outcome,
        "id": ask(d, "view", name="v", key=by_id(1, 44)).outcome, "link": ask(d, "view", name="v", key=req(3, 1)).outcome,
        "role": ask(p, "view", name="v", key=req(1, 7)).outcome, "fork": ask(p, "fork", name="v", key=req(1, 7)).outcome,
        "blocks": ask(d, "view", name="v", key=blocks(1)).outcome,
        "bool": ask(d, "view", name="v", key=req(1, 7), consume=1).outcome,
        "float": ask(d, "view", name="v", key=req(1, 7), size=1.0).outcome}
    assert outcomes == {"never": NOT_EXIST, "row": NOT_EXIST, "id": NOT_EXIST, "link": "LLM_NOT_YET_LINK", "role": PARAM_INVALID,
                        "fork": PARAM_INVALID, "blocks": "TypeError", "bool": "TypeError", "float": "TypeError"}
    p.call("unlink", ids=[2])
    assert ask(d, "view", name="v", key=req(1, 7)).outcome == "LLM_NOT_YET_LINK"


def test_a_dead_peer_has_nothing_to_view(offered: tuple[Peer, Peer]) -> None:
    p, d = offered
    p.kill()
    for function in ("view", "fork"):
        assert ask(d, function, name="v", key=req(1, 7)).outcome == "LLM_WAIT_PROCESS_TIMEOUT"


def test_the_limit_of_leases_has_a_name(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2, env={"SHMKV_MAX_LEASES": "3"})
    offer_rows(p)
    for name in "ab":
        within(d, "view", name=name, key=prefix(1, 9))
    within(d, "fork", name="c", key=prefix(1, 9))
    for function in ("view", "fork"):
        answer = ask(d, function, name="d", key=req(1, 7))      # a key that is refused is not used up
        assert answer.outcome == "LLM_LINK_BUSY"
        assert "SHMKV_MAX_LEASES" in answer.text
        assert "3" in answer.text
    within(d, "close", name="b")
    within(d, "view", name="d", key=req(1, 7))
    assert ask(d, "view", name="e", key=req(1, 8)).outcome == "LLM_LINK_BUSY"
    within(d, "drop", names=["c"])
    d.call("collect")
    within(d, "view", name="e", key=req(1, 8))
    assert within(d, "leases") == 3


def test_a_link_has_192_leases(offered: tuple[Peer, Peer]) -> None:
    _, d = offered
    assert d.call("execute", code="""
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1)
views = []
try:
    while True:
        views.append(manager.view_cache(key))
except shmkv.LLMException as error:
    result = [len(views), error.status_code.name]
views[17].close()
views.append(manager.view_cache(key))
del views
result.append(agent.dist._links.handle(1).leases)
""") == [192, "LLM_LINK_BUSY", 0]


def test_pread_has_no_memory_to_look_at(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2, env={"SHMKV_COPY": "pread"})
    offer_rows(p)
    for function in ("view", "fork"):
        answer = ask(d, function, name="v", key=req(1, 7))
        assert answer.outcome == "LLM_FEATURE_NOT_ENABLED", answer.text
        assert "SHMKV_COPY=pread" in answer.text
    assert within(d, "leases") == 0
    d.call("allocate", name="into", shape=[1, 96], dtype="DT_INT8")
    d.call("pull", key=req(1, 7), name="into")
