"""Forks in every state of a cluster, and every way in which such a child can end: the parent does not notice."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agent_code import HEARD, LISTEN
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(120)
ROWS = geometry(4, [2, 8], 2)

# forked(at_the_end) runs a child; its exit code. What the child prints to stderr shows in the agent's.
_FORK = """
import gc, os, signal, sys
def forked(in_child, *, end):
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        sys.stdin = sys.stdout = open(os.devnull, "r+")
        code = 99
        try:
            in_child()
            code = 0
        finally:
            end(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
def nothing():
    pass
def everything_is_refused():
    calls = [lambda: agent.dist.kv_cache_manager, lambda: agent.dist.link_clusters([], 100),
             lambda: manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 1), cache), lambda: manager.deallocate_cache(cache),
             lambda: manager.pull_blocks(shmkv.BlocksCacheKey(1), cache, [0], [1]),
             lambda: manager.copy_blocks(cache, {0: [1]}), lambda: manager.swap_blocks(cache, cache, {0: 1}),
             lambda: manager.collect(), lambda: manager.allocate_cache(shmkv.CacheDesc(1, [1, 8], shmkv.DataType.DT_INT8))]
    for number, call in enumerate(calls):
        try:
            call()
        except shmkv.LLMException as error:
            assert error.status_code.name in ("LLM_FAILED", "LLM_ENGINE_FINALIZED"), (number, error)
        else:
            raise AssertionError(number)
    assert not manager.is_initialized()
def drops_everything():
    global cache, manager
    cache = manager = None
    agent.caches.clear()
    agent.dist = None
    gc.collect()
def finalizes():
    agent.dist.finalize()
def its_own():
    from agent import Agent
    own = Agent()
    own.init("DECODER", 9, {"sync_kv_timeout": 20000}, {})
    assert own.link([1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
    own.allocate("kv")
    own.pull(["id", 1, 1, 0], "kv")
    own.finalize()
def by_exit(code):
    sys.exit(code)
def by_os_exit(code):
    os._exit(code)
def by_kill(code):
    os.kill(os.getpid(), signal.SIGKILL)
def by_exec(code):
    os.execv(sys.executable, [sys.executable, "-c", f"raise SystemExit({code})"])
class Uncaught(BaseException):
    pass
def by_exception(code):
    sys.stderr = open(os.devnull, "w")
    raise Uncaught
"""
_STATES = {
    "before init": "",
    "after init": "agent.init('DECODER', 2, {'sync_kv_timeout': 20000}, {})\n",
    "linked": "agent.init('DECODER', 2, {'sync_kv_timeout': 20000}, {})\nagent.link([1])\nagent.allocate('kv')\n"
              "agent.pull(['id', 1, 1, 0], 'kv')\n",
    "after finalize": "agent.init('DECODER', 2, {'sync_kv_timeout': 20000}, {})\nagent.finalize()\n",
}


def _ready(namespace: Namespace, state: str) -> Peer:
    d = namespace.start()
    d.call("execute", code=LISTEN + _STATES[state])
    return d


def _goes_on(d: Peer, state: str) -> None:
    """The parent, after its children: what it had works, what it had not can still be made."""
    assert d.call("execute", code=HEARD)[1] == [], "nothing unraisable"
    if state in ("before init", "after finalize"):
        d.call("init", role="DECODER", cluster_id=2, options={"sync_kv_timeout": 20000}, raw={})
    if state != "linked":
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
        d.call("allocate", name="kv")
    d.call("canary", name="kv")
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS
    np.testing.assert_array_equal(d.read("kv")[:, :, 0], pattern(ROWS, 1)[:, :, 0])


def _prompt(prompt: StartPeer) -> Peer:
    p = prompt(1)
    p.call("allocate", name="kv")
    p.call("fill", name="kv", generation=1)
    return p


@pytest.mark.parametrize("state", list(_STATES))
def test_a_child_ends_in_any_way_and_the_parent_goes_on(namespace: Namespace, prompt: StartPeer, state: str) -> None:
    _prompt(prompt)
    d = _ready(namespace, state)
    before = namespace.names()
    for end, code in (("by_exit", 0), ("by_os_exit", 0), ("by_exec", 0), ("by_exception", 1), ("by_kill", -9)):
        said = d.call("execute", code=_FORK + f"result = forked(nothing, end={end})")
        assert said == code, f"a child that ends {end}"
        assert namespace.names() == before, "takes no name with it"
    _goes_on(d, state)


@pytest.mark.parametrize("what", ["everything_is_refused", "drops_everything", "finalizes", "its_own"])
@pytest.mark.parametrize("end", ["by_exit", "by_os_exit", "by_kill"])
def test_whatever_a_child_of_a_linked_process_does(namespace: Namespace, prompt: StartPeer, what: str, end: str) -> None:
    _prompt(prompt)
    d = _ready(namespace, "linked")
    before = namespace.names()
    refer = "manager, cache = agent.dist.kv_cache_manager, agent.caches['kv']\n"
    said = d.call("execute", code=f"{_FORK}{refer}result = forked({what}, end={end})")
    assert said == (-9 if end == "by_kill" else 0), "the child does what it may, and is refused the rest"
    assert namespace.names() == before, "nothing of the parent is gone"
    _goes_on(d, "linked")


@pytest.mark.parametrize("state", ["before init", "after finalize"])
def test_a_child_inits_before_its_parent_does(namespace: Namespace, prompt: StartPeer, state: str) -> None:
    _prompt(prompt)
    d = _ready(namespace, state)
    for end in ("by_exit", "by_os_exit"):
        assert d.call("execute", code=f"{_FORK}result = forked(its_own, end={end})") == 0, "a cluster of its own"
    _goes_on(d, state)


_IN_A_HANDLER = """
import threading
manager, cache, codes = agent.dist.kv_cache_manager, agent.caches["kv"], []
def handler(number, frame):
    codes.append(forked({what}, end={end}))
signal.signal(signal.SIGALRM, handler)
said = []
for delay in (0.0002, 0.001, 0.004, 0.02):
    signal.setitimer(signal.ITIMER_REAL, delay)
    while len(codes) <= len(said):
        manager.pull_cache(shmkv.CacheKeyByIdAndIndex(1, 2), cache)
    said.append(int(cache.tensors[0].numpy()[0].min()))
signal.signal(signal.SIGALRM, signal.SIG_DFL)
result = [codes, said]
"""


@pytest.mark.parametrize(("what", "end"), [("nothing", "by_exit"), ("everything_is_refused", "by_os_exit"), ("its_own", "by_exit"),
                                           ("nothing", "by_kill")])
def test_a_signal_handler_forks_in_the_middle_of_a_pull(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, what: str,
                                                        end: str) -> None:
    p, d = _prompt(prompt), decoder(2)
    shape: dict[str, Any] = {"num_tensors": 1, "shape": [1, 32 << 20], "dtype": "DT_INT8"}
    p.call("allocate", name="big", **shape)
    p.call("execute", code="agent.caches['big'].tensors[0].numpy()[...] = 5")
    d.call("allocate", name="kv", **shape)
    codes, said = d.call("execute", code=_FORK + _IN_A_HANDLER.replace("{what}", what).replace("{end}", end))
    assert codes == [-9 if end == "by_kill" else 0] * 4, "each child"
    assert said == [5] * 4, "the pull that was interrupted is right"
    assert p.outcome("unlink", ids=[2]) == SUCCESS, "no lock was kept by a child"


_OWNER_FORKS = """
manager = agent.dist.kv_cache_manager
def handler(number, frame):
    # Not by sys.exit: in a destructor, where a handler may run too, an exception is lost.
    codes.append(forked(nothing, end=by_os_exit))
codes = []
signal.signal(signal.SIGALRM, handler)
for number in range({count}):
    signal.setitimer(signal.ITIMER_REAL, 1e-5 + number * 37 % 997 * 1e-6)
    while len(codes) <= number:
        cache = manager.allocate_cache(shmkv.CacheDesc(2, [2, 64], shmkv.DataType.DT_INT8), [shmkv.CacheKey(1, 100 + number)])
        manager.remove_cache_key(shmkv.CacheKey(1, 100 + number))
        manager.deallocate_cache(cache)
signal.signal(signal.SIGALRM, signal.SIG_DFL)
result = sorted(set(codes))
"""


def test_a_signal_handler_forks_while_the_owner_allocates(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                          rounds: Callable[[int], int]) -> None:
    p, d = _prompt(prompt), decoder(2)
    p.call("execute", code=LISTEN)
    assert p.call("execute", code=_FORK + _OWNER_FORKS.replace("{count}", str(rounds(30)))) == [0], "each child ends in order"
    p.call("collect")
    p.call("allocate", name="next", keys=[req(1, 7)])
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS, "the owner goes on"
    assert p.call("execute", code=HEARD)[1] == [], "nothing unraisable"
