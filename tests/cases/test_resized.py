"""Field case FR-083: a destination whose storage another thread shrinks, moves or gives up in the middle of a pull."""
from __future__ import annotations

import shutil
from typing import Any

import builds
import pytest
from mid_copy import NBYTES, OLD, ONE, fill
from peer import StartPeer

pytestmark = pytest.mark.timeout(900)           # the first one may wait for a build
TRIES = 50              # the copy may be over before the attempts were made
PLAIN_AND_SANITIZED = pytest.mark.parametrize("build", [
    "plain", pytest.param("address", marks=pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler"))])
STORES = {
    "bytearray": ("Store(N)", ["store.clear()", "store.extend(bytes(100))", "del store[N // 2:]"]),
    "array": ("array.array('B', bytes(N))", ["del store[:]", "store.extend(store[:100])", "store.pop()"]),
    "numpy": ("np.zeros(N, np.uint8)", ["store.resize(1, refcheck=False)", "store.resize(4 * N, refcheck=False)",
                                        "store.resize(1)"]),
}
# The first and the last byte are looked at by address, because another view of the storage would itself keep it from being resized.
_PULLS = """
import array, ctypes, gc, threading, weakref
N, OLD, TRIES, CODES = {nbytes}, {old}, {tries}, {codes}
manager, key = agent.dist.kv_cache_manager, shmkv.CacheKeyByIdAndIndex(1, 1)
class Store(bytearray):
    pass
def attempt(code, names):
    try:
        exec(code, names)
    except (BufferError, ValueError) as error:
        return type(error).__name__
    return "done"
def pull_and_attempt(names):
    # What the attempts came to, whether all were made before the last byte came, whether the pull is right, and the cache.
    cache = manager.register_cache(shmkv.CacheDesc(1, [1, N], shmkv.DataType.DT_INT8), names["store"])
    ((address,),) = cache.per_device_tensor_addrs
    first, last = (ctypes.c_ubyte.from_address(address + place) for place in (0, N - 1))
    first.value = last.value = 0
    found = []
    def other():
        while first.value == 0:
            pass
        found[:] = [[attempt(code, names) for code in CODES], last.value == 0]
    thread = threading.Thread(target=other)
    thread.start()
    manager.pull_cache(key, cache)
    thread.join()
    return (*found, ctypes.string_at(address, N).count(OLD) == N, cache)
for _ in range(TRIES):
    names = dict(store={store}, N=N, np=np)
    alive = weakref.ref(names["store"])
    outcomes, is_early, is_right, cache = pull_and_attempt(names)
    if is_early:
        break
    manager.unregister_cache(cache)
gc.collect()
result = [is_early, outcomes, is_right, alive() is not None]
manager.unregister_cache(cache)
gc.collect()
result.append(alive() is not None)
alive = None                        # a weak reference keeps numpy from resizing as well
if "store" in names:
    result.append(attempt(CODES[0], names))
"""


def _pull_and_attempt(prompt: StartPeer, decoder: StartPeer, build: str, store: str, codes: list[str]) -> list[Any]:
    """P's cache 1 is a row of 128 MiB; D copies with one thread, so slowly, and runs `codes` in another one meanwhile."""
    p = prompt(1)
    p.call("allocate", name="kv", **ONE)
    fill(p, "kv", OLD)
    env = {"SHMKV_COPY_THREADS": "1", **(builds.environment(build, builds.build(build)) if build == "address" else {})}
    code = _PULLS.format(nbytes=NBYTES, old=OLD, tries=TRIES, store=store, codes=codes)
    found: list[Any] = decoder(2, env=env).call("execute", code=code)
    return found


@PLAIN_AND_SANITIZED
@pytest.mark.parametrize("kind", list(STORES))
def test_fr_083_a_destination_is_not_resized_in_the_middle(prompt: StartPeer, decoder: StartPeer, kind: str, build: str) -> None:
    store, codes = STORES[kind]
    is_early, outcomes, is_right, is_held, is_kept, later = _pull_and_attempt(prompt, decoder, build, store, codes)
    assert is_early, f"no pull of {NBYTES} bytes was slow enough in {TRIES} tries"
    # numpy says it by a ValueError.
    assert outcomes == ["ValueError" if kind == "numpy" else "BufferError"] * 3, "the buffer stays exported for the whole copy"
    assert is_right, "the pull is right, and the sanitizer is silent"
    assert is_held, "the cache keeps it"
    assert is_kept, "its name does afterwards"
    assert later == "done", "which can be resized as soon as it is unregistered"


@PLAIN_AND_SANITIZED
@pytest.mark.parametrize("kind", list(STORES))
def test_fr_083_the_last_name_of_a_destination_goes_in_the_middle(prompt: StartPeer, decoder: StartPeer, kind: str,
                                                                  build: str) -> None:
    found = _pull_and_attempt(prompt, decoder, build, STORES[kind][0], ["del store"])
    is_early, outcomes, is_right, is_held, is_kept = found
    assert is_early, f"no pull of {NBYTES} bytes was slow enough in {TRIES} tries"
    assert outcomes == ["done"], "del on the name"
    assert is_right, "the pull is right, and the sanitizer is silent"
    assert is_held, "the cache keeps the memory for as long as it is registered"
    assert not is_kept, "and no longer"
