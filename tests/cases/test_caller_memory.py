"""Field cases FR-042, 048, 073: destinations in the user's own memory that are padded, shared or not contiguous."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from caller_memory import CANARY, EDGE, FILL
from peer import Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern

from shmkv import CacheDesc, CacheKeyByIdAndIndex, DataType

pytestmark = pytest.mark.timeout(120)
INVALID = "LLM_PARAM_INVALID"
ROWS, WIDTH = 4, 40
SOURCE = pattern(geometry(1, [ROWS, WIDTH], 1), 1)[0, 0]

# `whole` is memory between canaries; register(view) makes it the cache "kv".
_MEMORY = f"""
whole = np.full({EDGE} + 4096 + {EDGE}, {CANARY}, np.uint8)
inside = whole[{EDGE}:-{EDGE}]
inside[:] = {FILL}
agent.whole = whole
def register(*views):
    desc = shmkv.CacheDesc(len(views), list(views[0].shape), shmkv.DataType.DT_INT8)
    agent.caches["kv"] = agent.dist.kv_cache_manager.register_cache(desc, list(views))
"""
_WHOLE = "result = agent.whole.tolist()"


def _p_and_d(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P's cache 1 has a tensor [4, 40] of generation 1, which request 7 names row 3 of."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", num_tensors=1, shape=[ROWS, WIDTH], dtype="DT_INT8")
    p.call("fill", name="kv", generation=1)
    p.call("bind", name="kv", keys=[(3, req(1, 7))])
    return p, d


def _wanted(change: Callable[[Any], None]) -> list[int]:
    """The memory of D after `change` to what is between the canaries."""
    whole = np.full(EDGE + 4096 + EDGE, CANARY, np.uint8)
    inside = whole[EDGE:-EDGE]
    inside[:] = FILL
    change(inside)
    return list(whole.tolist())


def _nothing(_: Any) -> None:
    """No byte changes."""


def test_fr_042_only_the_bytes_of_a_padded_row_change(prompt: StartPeer, decoder: StartPeer) -> None:
    _, d = _p_and_d(prompt, decoder)
    d.call("execute", code=_MEMORY + "register(inside[:256].reshape(4, 64)[:, :40])")

    def row_3(inside: Any) -> None:
        inside[:256].reshape(4, 64)[3, :40] = SOURCE[3]

    assert d.outcome("pull", key=req(1, 7), name="kv", batch_index=3, size=-1) == SUCCESS
    assert d.call("execute", code=_WHOLE) == _wanted(row_3), "only the 40 bytes of row 3 change"
    for how in ({"size": 41}, {"size": 40, "dst_cache_offset": 1}, {"dst_cache_offset": 40}, {"batch_index": 4}):
        answer = d.attempt("pull", key=by_id(1, 1), name="kv", **how)
        assert (answer.outcome, "ValueError" in answer.kinds) == (INVALID, True), f"padding is no part of a row: {how}"
    assert d.call("execute", code=_WHOLE) == _wanted(row_3), "nothing written by what was refused"


_LAST_PAGE = """
import ctypes, mmap
pages = mmap.mmap(-1, 2 * mmap.PAGESIZE)
address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
libc = ctypes.CDLL(None, use_errno=True)
PROT_NONE, PROT_BOTH = 0, 3
assert libc.mprotect(ctypes.c_void_p(address + mmap.PAGESIZE), mmap.PAGESIZE, PROT_NONE) == 0
begin = mmap.PAGESIZE - (3 * 64 + 40)
agent.view = np.ndarray((4, 40), np.int8, pages, begin, (64, 1))
desc = shmkv.CacheDesc(1, [4, 40], shmkv.DataType.DT_INT8)
agent.caches["kv"] = agent.dist.kv_cache_manager.register_cache(desc, agent.view)
"""


def test_fr_042_the_last_row_ends_where_the_mapping_does(prompt: StartPeer, decoder: StartPeer) -> None:
    _, d = _p_and_d(prompt, decoder)
    d.call("execute", code=_LAST_PAGE)
    for row in range(ROWS):
        assert d.outcome("pull", key=by_id(1, 1, row), name="kv", batch_index=row) == SUCCESS
        assert d.outcome("pull", key=by_id(1, 1, row), name="kv", batch_index=row, size=41) == INVALID
    found = d.call("execute", code="result = agent.view.view(np.uint8).tolist()")
    assert found == SOURCE.tolist(), "each address range ends before the mapping, nothing faulted"


def test_fr_048_the_same_array_twice_and_views_that_share(prompt: StartPeer, decoder: StartPeer) -> None:
    _, d = _p_and_d(prompt, decoder)
    pair = "one, two = inside[:160].reshape(4, 40), inside[{begin}:{end}].reshape(4, 40)\nregister(one, two)"
    twice = d.attempt("execute", code=_MEMORY + pair.format(begin=0, end=160))
    assert (twice.outcome, "is the same memory as" in twice.text) == (INVALID, True), "identical twice: refused as documented"
    shared = d.attempt("execute", code=_MEMORY + pair.format(begin=152, end=312))
    assert (shared.outcome, "shares bytes with" in shared.text) == (INVALID, True), "partly shared: argument error"
    assert d.call("execute", code=_WHOLE) == _wanted(_nothing), "nothing written"
    d.call("execute", code=_MEMORY + pair.format(begin=160, end=320))
    d.call("execute", code="agent.dist.kv_cache_manager.unregister_cache(agent.caches['kv'])")


# Two caches over the same rows, pulled into by two threads at once; each byte of row r of the source is r.
_TWO_THREADS = """
import threading
manager, mixed = agent.dist.kv_cache_manager, []
key = [shmkv.CacheKeyByIdAndIndex(1, 1, row) for row in range(2)]
memory = np.full((2, 1 << 20), 9, np.int8)
desc = shmkv.CacheDesc(1, [2, 1 << 20], shmkv.DataType.DT_INT8)
caches = [manager.register_cache(desc, memory) for _ in range(2)]
def pull(number):
    for _ in range(100):
        manager.pull_cache(key[number], caches[number])
        together.wait()
        if number == 0:
            mixed.append([int(memory[0].min()), int(memory[0].max())])
        together.wait()
together = threading.Barrier(2)
threads = [threading.Thread(target=pull, args=(number,)) for number in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
result = [found for found in mixed if found not in ([0, 0], [1, 1])]
"""


def test_fr_048_a_pull_never_leaves_half_a_row(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", num_tensors=1, shape=[2, 1 << 20], dtype="DT_INT8")
    p.call("execute", code="agent.caches['kv'].tensors[0].numpy()[:] = np.arange(2, dtype=np.int8)[:, None]")
    assert d.call("execute", code=_TWO_THREADS) == [], "never a half-and-half row"


@pytest.mark.parametrize("distance", [0, 8, 40, 152])
def test_fr_048_source_and_destination_in_one_process(here: Callable[..., Any], distance: int) -> None:
    """Caches over memory that another cache of this process has already, which is allowed: pulls and copies between them."""
    dist = here("DECODER", 2)
    manager, desc = dist.kv_cache_manager, CacheDesc(1, [ROWS, WIDTH], DataType.DT_INT8)
    source = manager.allocate_cache(CacheDesc(1, [8, WIDTH], DataType.DT_INT8))
    memory = source.tensors[0].numpy().reshape(-1)
    memory[:] = np.arange(8 * WIDTH) % 127
    twin = memory.copy()
    shared = [each[begin:begin + ROWS * WIDTH].reshape(ROWS, WIDTH) for each in (memory, twin) for begin in (0, distance)]
    one, two = (manager.register_cache(desc, view) for view in shared[:2])
    for row in range(8):
        manager.pull_cache(CacheKeyByIdAndIndex(2, source.cache_id, row), two, row % ROWS)
        shared[3][row % ROWS] = twin.reshape(8, WIDTH)[row].copy()
        np.testing.assert_array_equal(memory, twin, err_msg="a pull never leaves a half-and-half row")
    for src, dst, rows in ((one, two, (2, 1)), (two, one, (3, 3)), (one, two, (0, 0)), (two, one, (1, 2))):
        manager.copy_cache(dst, src, rows[1], rows[0])
        shared[2 if dst is one else 3][rows[1]] = shared[2 if src is one else 3][rows[0]].copy()
        np.testing.assert_array_equal(memory, twin, err_msg="a copy between them is as if through a temporary")


VIEWS: dict[str, tuple[str, str]] = {
    "every other row": ("arr = inside[:2048].reshape(8, 256)[:, :40]\nview = arr[::2]", ""),
    "backwards": ("view = inside[:160].reshape(4, 40)[:, ::-1]", "the axis runs backwards"),
    "transposed": ("view = inside[:160].reshape(40, 4).T", "have to lie together in C order"),
    "broadcast": ("view = np.lib.stride_tricks.as_strided(inside, (4, 40), (0, 1))", "it is a broadcast"),
    "broadcast inside": ("view = np.lib.stride_tricks.as_strided(inside, (4, 40), (1, 0))", "expected"),
    "Fortran": ("view = np.ndarray((4, 40), np.uint8, inside, 0, order='F')", "have to lie together in C order"),
    "odd stride of size 1": ("view = np.lib.stride_tricks.as_strided(inside, (4, 1, 40), (40, 7, 1))", ""),
}


def _written(name: str) -> Callable[[Any], None]:
    """What a pull of rows 0 to 3 into a view that is accepted writes."""
    def change(inside: Any) -> None:
        if name == "every other row":
            inside[:2048].reshape(8, 256)[::2, :40] = SOURCE
        else:
            inside[:160].reshape(4, 40)[:] = SOURCE

    return change


@pytest.mark.parametrize("name", list(VIEWS))
def test_fr_073_copies_go_only_into_the_elements_of_a_view(prompt: StartPeer, decoder: StartPeer, name: str) -> None:
    _, d = _p_and_d(prompt, decoder)
    made, refusal = VIEWS[name]
    answer = d.attempt("execute", code=_MEMORY + made + "\nregister(view)")
    if refusal:
        assert (answer.outcome, "ValueError" in answer.kinds) == (INVALID, True), "argument error"
        assert refusal in answer.text, "which names the reason"
        assert d.call("execute", code=_WHOLE) == _wanted(_nothing), "nothing written"
        return
    assert answer.outcome == SUCCESS, answer.text
    for row in range(ROWS):
        assert d.outcome("pull", key=by_id(1, 1, row), name="kv", batch_index=row) == SUCCESS
    assert d.call("execute", code=_WHOLE) == _wanted(_written(name)), "only the elements of the view, gaps keep 0x5A"
