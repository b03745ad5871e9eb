"""fork_cache: a writable cache over a row of another process, whose pages are the row's until they are written."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from lent import ask, assert_row, let_go, row_of, within
from peer import Namespace, Peer, StartPeer, by_id, prefix, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, geometry, noise

pytestmark = pytest.mark.timeout(180)
SHAPE = [2, 96]
SENT = noise(geometry(4, SHAPE, 1), 5)
KIB = 1024


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P's cache 1 has two rows of noise, prefixes 1 and 2."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[prefix(1, 1), prefix(1, 2)])
    p.call("noise", name="kv", seed=5)
    return p, d


def assert_prompt_unchanged(p: Peer) -> None:
    np.testing.assert_array_equal(p.read("kv"), SENT)


# -- bytes --------------------------------------------------------------------------------------------------------------

def test_forks_are_independent_of_each_other_and_of_the_prompt(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    names = [f"f{number}" for number in range(5)]
    for name in names:
        assert within(d, "fork", name=name, key=prefix(1, 2)) == [[[1, 96], "int8", 96]] * 4
        assert_row(d, name, SENT[:, :, 1])
    written = {}
    for place, name in enumerate(names[1:]):
        within(d, "write", name=name, seed=place)
        written[name] = row_of(d, name)
    assert_row(d, "f0", SENT[:, :, 1])
    for name, wanted in written.items():
        assert_row(d, name, wanted)
    assert len({wanted[0].tobytes() for wanted in written.values()}) == 4
    assert_prompt_unchanged(p)
    within(d, "view", name="v", key=prefix(1, 2))
    assert_row(d, "v", SENT[:, :, 1])
    within(d, "fork", name="late", key=prefix(1, 2))
    assert_row(d, "late", SENT[:, :, 1])


@pytest.mark.parametrize("dtype", ["DT_BF16", "DT_FLOAT8_E4M3FN", "DT_FLOAT"])
@pytest.mark.parametrize("batch_dim", [0, 1, 2])
@pytest.mark.parametrize("described", [False, True])
def test_rows_in_pieces(prompt: StartPeer, decoder: StartPeer, dtype: str, batch_dim: int, described: bool) -> None:
    """Neighbouring rows lie between the pieces: nothing of them is touched by what is written into a fork."""
    p, d = prompt(1), decoder(2)
    shape, itemsize = [3, 2, 4, 8], {"DT_BF16": 2, "DT_FLOAT8_E4M3FN": 1, "DT_FLOAT": 4}[dtype]
    p.call("allocate", name="kv", shape=shape, dtype=dtype, batch_dim=batch_dim)
    p.call("noise", name="kv", seed=3)
    sent = noise(geometry(4, shape, itemsize, batch_dim), 3)
    one = [*shape[:batch_dim], 1, *shape[batch_dim + 1:]]
    how: dict[str, Any] = {"shapes": [one] * 4, "dtypes": dtype, "batch_dim": batch_dim} if described else {}
    within(d, "fork", name="f", key=by_id(1, 1, 1), **how)
    assert_row(d, "f", sent[:, :, 1])
    d.call("allocate", name="into", shape=one, dtype=dtype, batch_dim=batch_dim)
    d.call("execute", code="agent.dist.kv_cache_manager.copy_cache(agent.caches['into'], agent.caches['f'])")
    np.testing.assert_array_equal(d.read("into")[:, :, 0], sent[:, :, 1])
    d.call("pull", key=by_id(1, 1, 0), name="f")
    assert_row(d, "f", sent[:, :, 0])
    within(d, "fork", name="g", key=by_id(1, 1, 1), **how)
    d.call("noise", name="into", seed=8)
    d.call("execute", code="agent.dist.kv_cache_manager.copy_cache(agent.caches['g'], agent.caches['into'])")
    assert_row(d, "g", d.read("into")[:, :, 0])
    assert_row(d, "f", sent[:, :, 0])
    np.testing.assert_array_equal(p.read("kv"), sent)


def test_tensors_that_differ(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    shapes, kinds = [[2, 8], [2, 3, 4], [2, 40]], ["DT_FLOAT", "DT_BF16", "DT_INT8"]
    p.call("allocate_tensors", name="kv", shapes=shapes, dtypes=kinds)
    p.call("noise_tensors", name="kv", seed=9)
    sent = [tensor[:, 1] for tensor in p.read_tensors("kv")]
    plain = [[[1, 8], "float32", 32], [[1, 12], "bfloat16", 24], [[1, 40], "int8", 40]]
    assert within(d, "fork", name="f", key=by_id(1, 1, 1)) == plain
    assert_row(d, "f", sent)
    ones = [[1, *shape[1:]] for shape in shapes]
    assert within(d, "fork", name="g", key=by_id(1, 1, 1), shapes=ones, dtypes=kinds)[1] == [[1, 3, 4], "bfloat16", 24]
    assert_row(d, "g", sent)
    d.call("pull", key=by_id(1, 1, 0), name="g", tensor_num_per_layer=1)
    assert_row(d, "g", [tensor[:, 0] for tensor in p.read_tensors("kv")])


def test_destinations_and_sources(sides: tuple[Peer, Peer]) -> None:
    """All that can be done with a cache of one's own: pulls in each way, of parts, local copies both ways, fork to fork."""
    p, d = sides
    other = noise(geometry(4, SHAPE, 1), 6)
    p.call("allocate", name="other", shape=SHAPE, dtype="DT_INT8")
    p.call("noise", name="other", seed=6)
    within(d, "fork", name="f", key=prefix(1, 2))
    d.call("pull", key=by_id(1, 2, 0), name="f", src_layer_range=range(1, 2), dst_layer_range=range(1))
    wanted = np.concatenate([other[2:, :, 0], SENT[2:, :, 1]])
    assert_row(d, "f", wanted)
    d.call("pull", key=by_id(1, 2, 1), name="f", size=10, src_cache_offset=3, dst_cache_offset=50)
    wanted[:, :, 50:60] = other[:, :, 1, 3:13]
    assert_row(d, "f", wanted)
    within(d, "fork", name="g", key=prefix(1, 1))
    d.call("execute", code="""
manager = agent.dist.kv_cache_manager
f, g = agent.caches["f"], agent.caches["g"]
manager.copy_cache(g, f, size=20)
prepared = manager.prepare_pull(f)
for _ in range(3):
    prepared(shmkv.CacheKeyByIdAndIndex(1, 2, 1))
manager.pull_many([shmkv.PullRequest(shmkv.CacheKeyByIdAndIndex(1, 2, 1), f)] * 2)
""")
    assert_row(d, "f", other[:, :, 1])
    mixed = SENT[:, :, 0].copy()
    mixed[:, :, :20] = wanted[:, :, :20]
    assert_row(d, "g", mixed)
    np.testing.assert_array_equal(d.read("g")[:, :, 0], mixed)      # by its addresses
    assert_prompt_unchanged(p)


def test_a_fork_is_nobody_elses_source(sides: tuple[Peer, Peer], decoder: StartPeer) -> None:
    _, d = sides
    within(d, "fork", name="f", key=prefix(1, 2))
    cache_id = d.call("execute", code="result = agent.caches['f'].cache_id")
    assert ask(d, "view", name="v", key=by_id(2, cache_id)).outcome == NOT_EXIST
    assert d.outcome("pull", key=by_id(2, cache_id), name="f") == NOT_EXIST
    assert [d.outcome("bind", name="f", keys=[(0, req(2, 7))]), d.outcome("publish", name="f")] == [PARAM_INVALID] * 2


@pytest.mark.parametrize("how", [
    {"shapes": [[1, 96]] * 3}, {"shapes": [[2, 96]] * 4}, {"shapes": [[1, 95]] * 4}, {"shapes": [[1, 96]] * 4, "dtypes": "DT_BF16"},
    {"shapes": [[1, 96], [1, 96], [1, 96], [1, 48]]}, {"shapes": [[1, 96]] * 5}])
def test_misfits(sides: tuple[Peer, Peer], how: dict[str, Any]) -> None:
    _, d = sides
    assert ask(d, "fork", name="f", key=prefix(1, 2), **how).outcome == PARAM_INVALID
    assert within(d, "leases") == 0
    assert ask(d, "fork", name="f", key=req(1, 99)).outcome == NOT_EXIST
    assert ask(d, "fork", name="f", key=req(3, 9)).outcome == "LLM_NOT_YET_LINK"
    assert d.outcome("execute", code="agent.dist.kv_cache_manager.fork_cache(shmkv.CacheKey(1, 1), 3)") == "TypeError"


def test_a_request_key_is_used_up_by_a_fork(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=[req(1, 1), req(1, 2)])
    within(d, "fork", name="f", key=req(1, 1))
    assert ask(d, "fork", name="g", key=req(1, 1)).outcome == NOT_EXIST
    within(d, "fork", name="g", key=req(1, 2), consume=False)
    within(d, "fork", name="h", key=req(1, 2))


# -- pages --------------------------------------------------------------------------------------------------------------------

def test_pages_are_shared_until_they_are_written(prompt: StartPeer, decoder: StartPeer) -> None:
    """A fork brings no page of its own, nor does reading it; a write brings those that are written, and a pull no others."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", num_tensors=2, shape=[4, 256 * KIB], dtype="DT_INT8")
    p.call("noise", name="kv", seed=5)
    within(d, "fork", name="f", key=by_id(1, 1, 1))
    within(d, "fork", name="g", key=by_id(1, 1, 1))
    assert within(d, "private_dirty") == 0
    row_of(d, "f")
    assert within(d, "private_dirty") == 0, "reading makes no page private"
    assert sorted(permissions for permissions, _ in within(d, "mapped")) == ["r--s", "rw-p", "rw-p"]
    d.call("execute", code="agent.caches['f'].tensors[1].numpy()[0, 100] = 1")
    one = within(d, "private_dirty")
    assert 0 < one <= 64, "one page, of whatever size"
    d.call("pull", key=by_id(1, 1, 2), name="f", size=64 * KIB)
    assert 2 * 64 <= within(d, "private_dirty") <= 2 * 64 + 4 * one, "what was pulled"
    within(d, "drop", names=["f"])
    d.call("collect")
    assert within(d, "private_dirty") == 0
    assert sorted(permissions for permissions, _ in within(d, "mapped")) == ["r--s", "rw-p"]


# -- the lease ------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("end", ["deallocate", "unregister", "del"])
@pytest.mark.parametrize("has_array", [False, True])
def test_the_end_of_a_fork_gives_lease_and_mapping_back(sides: tuple[Peer, Peer], end: str, has_array: bool) -> None:
    """With an array still there, when that goes."""
    p, d = sides
    within(d, "fork", name="f", key=prefix(1, 2))
    if has_array:
        within(d, "arrays", name="arrays", of="f")
    let_go(p)
    assert p.call("stats")["caches"] == 1
    if end == "deallocate":
        d.call("deallocate", name="f")
        assert d.call("execute", code="f = agent.caches['f']\nresult = [len(f.tensors), f.per_device_tensor_addrs]") == [0, []]
        assert d.outcome("pull", key=prefix(1, 1), name="f") == NOT_EXIST
    elif end == "unregister":
        d.call("execute", code="agent.dist.kv_cache_manager.unregister_cache(agent.caches['f'])")
    within(d, "drop", names=["f"])
    d.call("collect")
    assert within(d, "leases") == int(has_array)
    if has_array:
        assert_row(d, "arrays", SENT[:, :, 1])
        within(d, "drop", names=["arrays"])
    assert within(d, "leases") == 0
    assert [permissions for permissions, _ in within(d, "mapped")] == ["r--s"]
    p.call("collect")
    assert p.call("stats")["caches"] == 0


def test_what_is_kept_of_a_pull_keeps_no_lease(sides: tuple[Peer, Peer]) -> None:
    """Prepared pulls and requests that outlive the fork."""
    _, d = sides
    assert d.call("execute", code="""
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1)
fork = manager.fork_cache(key)
prepared, request = manager.prepare_pull(fork), shmkv.PullRequest(key, fork)
prepared(key)
manager.pull_many([request])
manager.deallocate_cache(fork)
result = [agent.dist._links.handle(1).leases]
for call in (lambda: prepared(key), lambda: manager.pull_many([request])):
    try:
        call()
    except shmkv.LLMException as error:
        result.append(error.status_code.name)
""") == [0, NOT_EXIST, NOT_EXIST]


ENDINGS = {
    "unlinked": lambda p, d: d.call("unlink", ids=[1]),
    "unlinked by force": lambda p, d: d.call("unlink", ids=[1], force=True),
    "unlinked by the prompt": lambda p, d: p.call("unlink", ids=[2]),
    "linked again": lambda p, d: (d.call("unlink", ids=[1]), d.call("link", ids=[1])),
    "prompt finalized": lambda p, d: p.call("finalize"),
    "prompt killed": lambda p, d: p.kill(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_fork_outlives_its_link_and_its_peer(sides: tuple[Peer, Peer], ending: str) -> None:
    """Pages that were not written are the row's still; it is a cache like any other meanwhile."""
    p, d = sides
    within(d, "fork", name="f", key=prefix(1, 2))
    d.call("execute", code="agent.caches['f'].tensors[0].numpy()[0, 3] = 99")
    ENDINGS[ending](p, d)
    is_there = not ending.startswith("prompt ")
    if is_there:
        let_go(p)
        assert p.call("stats")["caches"] == 1
    wanted = SENT[:, :, 1].copy()
    wanted[0, 0, 3] = 99
    assert_row(d, "f", wanted)
    d.call("allocate", name="into", shape=[1, 96], dtype="DT_INT8")
    d.call("execute", code="agent.dist.kv_cache_manager.copy_cache(agent.caches['into'], agent.caches['f'])")
    np.testing.assert_array_equal(d.read("into")[:, :, 0], wanted)
    d.call("deallocate", name="f")
    within(d, "drop", names=["f"])
    if is_there:
        p.call("collect")
        assert p.call("stats")["caches"] == 0


def test_unwritten_pages_show_what_the_owner_writes(sides: tuple[Peer, Peer]) -> None:
    """As the documentation says; a page that was written here is the fork's."""
    p, d = sides
    within(d, "fork", name="f", key=prefix(1, 2))
    within(d, "fork", name="g", key=prefix(1, 2))
    d.call("execute", code="for tensor in agent.caches['g'].tensors:\n    tensor.numpy()[0, 0] += 0")
    p.call("noise", name="kv", seed=6)
    assert_row(d, "f", noise(geometry(4, SHAPE, 1), 6)[:, :, 1])
    assert_row(d, "g", SENT[:, :, 1])


def test_a_fork_of_the_own_cluster(prompt: StartPeer, namespace: Namespace) -> None:
    d = prompt(2, enable_switch_role=True, env={"SHMKV_RECYCLE_BYTES": "0"})
    d.call("switch_role", role="DECODER")
    d.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8")
    d.call("noise", name="kv", seed=5)
    for name in "fg":
        within(d, "fork", name=name, key=by_id(2, 1, 1))
    within(d, "write", name="g", seed=1)
    np.testing.assert_array_equal(d.read("kv"), SENT)
    assert_row(d, "f", SENT[:, :, 1])
    d.call("deallocate", name="kv")
    assert (d.call("stats")["caches"], len(namespace.segments())) == (1, 1)
    assert_row(d, "f", SENT[:, :, 1])
    within(d, "drop", names=["f"])
    d.call("collect")
    assert d.call("stats")["caches"] == 1
    within(d, "drop", names=["g"])
    d.call("collect")
    d.call("collect")
    assert (d.call("stats")["caches"], namespace.segments()) == (0, set())
    d.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8")
    within(d, "fork", name="last", key=by_id(2, int(d.call("execute", code="result = agent.caches['kv'].cache_id"))))
    d.call("finalize")


def test_a_thousand_rounds_leave_nothing(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    mappings, nbytes, descriptors, left = d.call("execute", code="""
import gc, os, tracemalloc
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKey(1, 2**64 - 1, 0, 2)
def rounds(count):
    for _ in range(count):
        with manager.view_cache(key) as view:
            view.tensors[0].numpy()
        fork = manager.fork_cache(key)
        fork.tensors[0].numpy()[0, 0] = 1
        manager.deallocate_cache(fork)
def state():
    gc.collect()
    with open("/proc/self/maps") as maps:
        return [sum(1 for _ in maps), tracemalloc.get_traced_memory()[0], len(os.listdir("/proc/self/fd"))]
rounds(50)
tracemalloc.start()
rounds(50)
before = state()
rounds(1000)
result = [after - was for after, was in zip(state(), before)] + [agent.dist._links.handle(1).leases]
tracemalloc.stop()
""")
    assert mappings <= 2, "an arena of the interpreter may come or go"
    assert nbytes < 1000 * 8, "not even a word a round"
    assert (descriptors, left) == (0, 0)


def test_the_owners_segment_is_gone_before_it_is_forked(sides: tuple[Peer, Peer], namespace: Namespace) -> None:
    """Its name, that is: said, and nothing is kept."""
    _, d = sides
    (name,) = namespace.segments()
    code = f"import os\nos.rename('/dev/shm/{name}', '/dev/shm/{{}}')"
    d.call("execute", code=code.format(f"{name}x"))
    answer = ask(d, "fork", name="f", key=prefix(1, 2))
    assert answer.outcome == NOT_EXIST, answer.trace
    assert within(d, "leases") == 0
    d.call("execute", code=f"import os\nos.rename('/dev/shm/{name}x', '/dev/shm/{name}')")
    within(d, "fork", name="f", key=prefix(1, 2))
    assert d.outcome("collect") == SUCCESS
