"""From register_cache to the moment when the caller's memory is let go of: who can reach it, who keeps it, what is left."""
from __future__ import annotations

import pytest
from caller_memory import KINDS, Memory, Spec, ask, assert_same, within
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import NOT_EXIST, PARAM_INVALID, SUCCESS, geometry, noise, pattern

pytestmark = pytest.mark.timeout(180)
MIB = 1 << 20
ROWS = Spec("one", 4, [2, 64])
SENT = noise(geometry(4, [2, 64], 1), 5)
FINALIZED = "LLM_ENGINE_FINALIZED"


@pytest.fixture
def sides(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """P's cache 1 has two rows of noise."""
    p, d = prompt(1), decoder(2)
    p.call("allocate", name="kv", shape=[2, 64], dtype="DT_INT8")
    p.call("noise", name="kv", seed=5)
    return p, d


# -- who can reach it -----------------------------------------------------------------------------------------------------

def test_no_other_process_reaches_registered_memory(sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    cache_id = within(p, "register", name="own", spec=ROWS)
    d.call("allocate", name="into", shape=[2, 64], dtype="DT_INT8")
    d.call("canary", name="into")
    assert d.outcome("pull", key=by_id(1, cache_id), name="into") == NOT_EXIST
    assert d.outcome("pull", key=by_id(1, cache_id), name="into", src_cache_offset=0) == NOT_EXIST
    assert (d.read("into") == 0x5A).all()
    refused = [p.attempt("publish", name="own"), p.attempt("bind", name="own", keys=[(0, req(1, 7))]),
               p.attempt("unbind", name="own", rows=[0]),
               p.attempt("execute", code="agent.dist.kv_cache_manager.get_cache_tensors(agent.caches['own'])")]
    assert [answer.outcome for answer in refused] == [PARAM_INVALID] * 4
    assert all("registered" in answer.text for answer in refused)
    assert p.call("execute", code="result = agent.caches['own'].tensors") == []
    assert d.outcome("pull", key=req(1, 7), name="into") == NOT_EXIST, "the key that was refused is bound to nothing"
    assert_same(p, "own", Memory(ROWS))


def test_a_registered_cache_of_the_puller_itself_is_not_a_source(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    one, two = (within(d, "register", name=name, spec=ROWS) for name in ("one", "two"))
    assert [d.outcome("pull", key=by_id(2, each), name="two") for each in (one, two)] == [NOT_EXIST] * 2
    assert ask(d, "pull_blocks", key=by_id(2, one), name="two", prompt_blocks=[], decoder_blocks=[0]).outcome == NOT_EXIST


def test_ids_are_shared_with_allocated_caches_and_never_used_again(prompt: StartPeer) -> None:
    p = prompt(1)
    ids = []
    for number in range(3):
        ids.append(p.call("allocate", name=f"a{number}"))
        ids.append(within(p, "register", name=f"r{number}", spec=ROWS))
        ids.append(within(p, "register", name=f"b{number}", spec=ROWS, blocks=True))
        p.call("deallocate", name=f"a{number}")
        within(p, "unregister", name=f"r{number}")
    assert ids == list(range(1, 10))


def test_roles_and_placements(prompt: StartPeer, sides: tuple[Peer, Peer]) -> None:
    p, d = sides
    for peer in sides:
        within(peer, "register", name="kv2", spec=ROWS, blocks=True)
        within(peer, "register", name="host", spec=ROWS, placement="HOST")
        within(peer, "swap_blocks", src="host", dst="kv2", src_to_dst={0: 1})
        within(peer, "copy_blocks", name="kv2", info={1: [0]})
        within(peer, "copy_cache", dst="kv2", src="kv2", dst_batch_index=1)
    for how in ("pull_cache", "prepare_pull", "pull_many"):
        assert ask(p, "pull", key=by_id(1, 1), name="kv2", how=how).outcome == PARAM_INVALID, "pulls need role DECODER"
        assert ask(d, "pull", key=by_id(1, 1), name="host", how=how).outcome == PARAM_INVALID, "and placement DEVICE"
    for peer, name in ((p, "kv2"), (d, "host")):
        answer = ask(peer, "pull_blocks", key=by_id(1, 1), name=name, prompt_blocks=[], decoder_blocks=[0])
        assert answer.outcome == PARAM_INVALID
    assert ask(d, "register", name="x", spec=Spec("one", 4, [2, 64], batch_dim=1), blocks=True).outcome == PARAM_INVALID
    within(d, "unregister", name="host")


# -- who keeps it ---------------------------------------------------------------------------------------------------------

# `Held` tells when it goes: bytes that a cache of four tensors [2, 8] is registered over.
_HELD = """
import gc, weakref
class Held(bytearray):
    pass
manager = agent.dist.kv_cache_manager
desc = shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_INT8)
memory = Held(64)
alive = weakref.ref(memory)
cache = manager.register_cache(desc, memory)
key = shmkv.CacheKeyByIdAndIndex(1, 1)
def is_held():
    try:
        memory.append(0)
    except BufferError:
        return True
    del memory[64:]
    return False
def status(call, *arguments):
    try:
        call(*arguments)
    except shmkv.LLMException as error:
        return error.status_code.name
    return "LLM_SUCCESS"
def pull():
    manager.pull_cache(key, cache, size=8)
"""


def test_memory_is_held_until_it_is_unregistered(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    assert d.call("execute", code=_HELD + """
result = [is_held()]
pull()
manager.unregister_cache(cache)
result += [is_held(), status(pull), cache.per_device_tensor_addrs, cache.is_blocks_cache]
manager.unregister_cache(cache)
manager.deallocate_cache(cache)
memory[:] = b"7" * 64
result += [status(manager.copy_cache, cache, cache), status(manager.copy_blocks, cache, {0: [1]}), bytes(memory) == b"7" * 64]
""") == [True, False, NOT_EXIST, [], False, NOT_EXIST, NOT_EXIST, True]


def test_deallocate_lets_go_as_unregister_does(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    assert d.call("execute", code=_HELD + """
manager.deallocate_cache(cache)
result = [is_held(), status(pull), status(manager.unregister_cache, cache)]
allocated = manager.allocate_cache(desc)
result += [status(manager.unregister_cache, allocated), status(manager.pull_cache, key, allocated, 0, 8)]
host = manager.register_cache(shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_INT8, shmkv.Placement.HOST), memory)
result += [status(manager.deallocate_cache, host), is_held(), status(manager.unregister_cache, host), is_held()]
""") == [False, NOT_EXIST, SUCCESS, PARAM_INVALID, SUCCESS, PARAM_INVALID, True, SUCCESS, False]


def test_what_is_kept_of_a_pull_does_not_keep_memory(sides: tuple[Peer, Peer]) -> None:
    """Prepared pulls and requests that outlive the registration."""
    _, d = sides
    assert d.call("execute", code=_HELD + """
prepared, request = manager.prepare_pull(cache, size=8), shmkv.PullRequest(key, cache, 0, 8)
prepared(key)
manager.pull_many([request])
manager.unregister_cache(cache)
result = [is_held(), status(prepared, key), status(manager.pull_many, [request])]
""") == [False, NOT_EXIST, NOT_EXIST]


def test_the_last_handle_goes(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    assert d.call("execute", code=_HELD + """
pull()
del cache
gc.collect()
manager.collect()
result = [is_held()]
cache = manager.register_cache(desc, memory)
prepared = manager.prepare_pull(cache, size=8)
prepared(key)
del memory, cache
gc.collect()
manager.collect()
result += [status(prepared, key), alive() is None]
""") == [False, NOT_EXIST, True]


def test_finalize_lets_go_and_nothing_works_afterwards(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    code = _HELD + """
host = manager.register_cache(shmkv.CacheDesc(4, [2, 8], shmkv.DataType.DT_INT8, shmkv.Placement.HOST), bytearray(64))
prepared = manager.prepare_pull(cache, size=8)
prepared(key)
agent.finalize()
calls = [(pull,), (prepared, key), (manager.register_cache, desc, bytearray(64)),
         (manager.register_blocks_cache, desc, bytearray(64)), (manager.unregister_cache, cache),
         (manager.copy_blocks, cache, {0: [1]}), (manager.swap_blocks, host, cache, {0: 1}),
         (manager.pull_blocks, shmkv.BlocksCacheKey(1), cache, [0], [0]), (manager.copy_cache, cache, cache)]
result = [is_held(), sorted({status(*call) for call in calls})]
agent.init("DECODER", 2, {}, {})
agent.link([1])
manager = agent.dist.kv_cache_manager
result += [status(pull), status(manager.unregister_cache, cache), is_held()]
again = manager.register_cache(desc, memory)
result += [again.cache_id, status(manager.pull_cache, key, again, 0, 8), status(prepared, key)]
"""
    found = d.call("execute", code=code)
    assert found == [False, [FINALIZED], NOT_EXIST, SUCCESS, False, 1, SUCCESS, FINALIZED]


@pytest.mark.parametrize("views", ["list(shared.tensors)", "[view.numpy() for view in shared.tensors]"])
def test_memory_of_an_allocated_cache_is_not_used_again_while_it_is_registered(sides: tuple[Peer, Peer], views: str) -> None:
    _, d = sides
    assert d.call("execute", code=_HELD + f"""
shared = manager.allocate_cache(shmkv.CacheDesc(4, [2, 64], shmkv.DataType.DT_INT8))
over = manager.register_cache(shared.cache_desc, {views})
result = [over.per_device_tensor_addrs == shared.per_device_tensor_addrs]
manager.deallocate_cache(shared)
manager.collect()
following = manager.allocate_cache(shmkv.CacheDesc(4, [2, 64], shmkv.DataType.DT_INT8), zero=True)
manager.pull_cache(key, over)
result += [any(view.numpy().any() for view in following.tensors), following.per_device_tensor_addrs == over.per_device_tensor_addrs]
manager.unregister_cache(over)
""") == [True, False, False]


# A pull of 128 MiB by the main thread; another one runs code between its first and its last byte.
_MEANWHILE = """
import ctypes, gc, threading, weakref
N = 128 << 20
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1)
def meanwhile(call):
    memory = np.zeros(N, np.uint8)
    cache = manager.register_cache(shmkv.CacheDesc(1, [1, N], shmkv.DataType.DT_INT8), memory)
    prepared, alive = manager.prepare_pull(cache), weakref.ref(memory)
    ((address,),) = cache.per_device_tensor_addrs
    first, last = (ctypes.c_ubyte.from_address(address + place) for place in (0, N - 1))
    found = []
    def other():
        while first.value == 0:
            pass
        call(cache)
        found[:] = [last.value == 0, alive() is not None]
    thread = threading.Thread(target=other)
    thread.start()
    del memory
    try:
        prepared(key)
        status = "LLM_SUCCESS"
    except shmkv.LLMException as error:
        status = error.status_code.name
    thread.join()
    del prepared
    gc.collect()
    return [*found, status, alive() is None]
for _ in range(40):
    result = meanwhile(lambda cache: {call})
    if result[0]:
        break
"""


@pytest.mark.parametrize("call", ["manager.unregister_cache(cache)", "manager.deallocate_cache(cache)"])
def test_unregistered_in_the_middle_of_a_pull(prompt: StartPeer, decoder: StartPeer, call: str) -> None:
    p = prompt(1)
    p.call("allocate", name="kv", num_tensors=1, shape=[1, 128 * MIB], dtype="DT_INT8")
    p.call("execute", code="agent.caches['kv'].tensors[0].numpy()[:] = 7")
    d = decoder(2, env={"SHMKV_COPY_THREADS": "1"})
    is_early, is_held, status, is_gone = d.call("execute", code=_MEANWHILE.replace("{call}", call))
    assert is_early, "no pull was slow enough"
    assert is_held, "the memory stays for as long as the pull writes into it"
    assert status == SUCCESS, "which goes on"
    assert is_gone, "and no longer"


# -- what is left ---------------------------------------------------------------------------------------------------------

_FORK = """
import os, signal
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    code = 1
    try:
        calls = [(pull,), (manager.register_cache, desc, bytearray(64)), (manager.unregister_cache, cache),
                 (manager.copy_blocks, cache, {0: [1]}), (manager.copy_cache, cache, cache)]
        said = {status(*call) for call in calls}
        cache = None
        gc.collect()
        code = 0 if said <= {"LLM_FAILED", "LLM_ENGINE_FINALIZED"} else 2
    finally:
        os._exit(code)
result = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), is_held()]
pull()
manager.unregister_cache(cache)
result.append(is_held())
"""


def test_a_forked_child_can_do_nothing_with_it(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    assert d.call("execute", code=_HELD + _FORK) == [0, True, False]


_ROUNDS = """
import gc, tracemalloc
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1)
desc = shmkv.CacheDesc(4, [2, 64], shmkv.DataType.DT_INT8)
memory = [np.zeros((2, 64), np.int8) for _ in range(4)]
def rounds(count):
    for _ in range(count):
        cache = manager.register_cache(desc, memory)
        manager.pull_cache(key, cache)
        manager.copy_blocks(cache, {0: [1]})
        manager.unregister_cache(cache)
def state():
    gc.collect()
    with open("/proc/self/maps") as maps:
        return [sum(1 for _ in maps), tracemalloc.get_traced_memory()[0]]
rounds(50)
tracemalloc.start()
rounds(50)
before = state()
rounds(1000)
after = state()
tracemalloc.stop()
import weakref
result = [after[0] - before[0], after[1] - before[1], [len(weakref.getweakrefs(array)) for array in memory]]
memory[0].resize(1, refcheck=False)
"""


def test_a_thousand_rounds_leave_nothing(sides: tuple[Peer, Peer]) -> None:
    _, d = sides
    mappings, nbytes, references = d.call("execute", code=_ROUNDS)
    assert mappings <= 2, "an arena of the interpreter may come or go"
    assert nbytes < 1000 * 8, "not even a word a round"
    assert references == [0] * 4


_FAULTS = """
import resource
result = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
"""


def test_warm_pulls_into_registered_memory_fault_on_nothing(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2)
    shape = {"num_tensors": 16, "shape": [1, MIB], "dtype": "DT_INT8"}
    p.call("allocate", name="kv", **shape)
    p.call("fill", name="kv", generation=1)
    within(d, "register", name="kv", spec=Spec("pitch", 16, [1, MIB]))
    for _ in range(3):
        d.call("pull", key=by_id(1, 1), name="kv")
    before = d.call("execute", code=_FAULTS)
    for _ in range(50):
        d.call("pull", key=by_id(1, 1), name="kv")
    # A page a time would be 4096 a pull.
    assert d.call("execute", code=_FAULTS) - before < 50 * 10


@pytest.mark.parametrize("kind", KINDS)
def test_big_pulls_are_shared_by_threads(namespace: Namespace, prompt: StartPeer, decoder: StartPeer, kind: str) -> None:
    """24 MiB, streamed and in shares, in many runs where the layout has gaps."""
    p, d = prompt(1), decoder(2, env={"SHMKV_COPY_THREADS": "3"})
    shape = [2, 64, 3 * 4096]
    p.call("allocate", name="kv", num_tensors=16, shape=shape, dtype="DT_INT8", batch_dim=1)
    p.call("fill", name="kv", generation=3)
    sent = pattern(geometry(16, shape, 1, 1), 3)
    spec = Spec(kind, 16, shape, "DT_INT8", batch_dim=1)
    within(d, "register", name="kv", spec=spec)
    twin = Memory(spec)
    for row in (0, 63):
        assert d.outcome("pull", key=by_id(1, 1, row), name="kv", batch_index=63 - row) == SUCCESS
        for place, tensor in enumerate(twin.tensors):
            tensor[:, 63 - row] = sent[place][:, row]
    assert_same(d, "kv", twin, kind)


