"""KeyboardInterrupt at any moment of a call: afterwards the same calls work and nothing is left."""
from __future__ import annotations

import subprocess
import sys

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(120)
# What is interrupted, over and over for some seconds, and what has to work afterwards.
HEAD = """
import gc, os, signal, sys, time
import shmkv
from shmkv import *
DESC = CacheDesc(2, [2, 64], DataType.DT_INT8)
OPTIONS = LLMConfig().generate_options()
def interrupted(call, seconds=2.5, wanted=50, deadline_s=60):
    began, count, delay = time.monotonic(), 0, 0
    while time.monotonic() < began + (seconds if count > wanted else deadline_s):     # a busy machine takes longer
        delay = (delay * 7 + 13) % 997
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + delay * 1e-6)
            until = time.monotonic() + 0.02
            while time.monotonic() < until:         # an interrupt in somebody's destructor is lost
                call()
        except KeyboardInterrupt:
            count += 1
    assert count > wanted, count
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
def names():
    return [name for name in os.listdir("/dev/shm") if name.startswith(os.environ["SHMKV_NAMESPACE"])]
"""
INIT = HEAD + """
def cycle():
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    try:
        dist.init(dict(OPTIONS))
    finally:
        while LLMDataDist.llm_engine_instance is not None:
            try:
                LLMDataDist.llm_engine_instance.finalize()
            except KeyboardInterrupt:
                pass
def descriptors():
    return [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]
before = descriptors()
interrupted(cycle)
dist = LLMDataDist(LLMRole.PROMPT, 1)
dist.init(dict(OPTIONS))
dist.finalize()
after = descriptors()
assert len(after) <= len(before) + 1, (before, after)       # the life file stays open
print(names())
"""
ALLOCATE = HEAD + """
dist = LLMDataDist(LLMRole.PROMPT, 1)
dist.init(dict(OPTIONS))
manager = dist.kv_cache_manager
number = 0
def cycle():
    global number
    number += 1
    key = CacheKey(1, number)
    cache = manager.allocate_cache(DESC, [key], publish=False)
    try:
        manager.publish(cache)
    finally:
        manager.remove_cache_key(key)
        manager.deallocate_cache(cache)
interrupted(cycle)
# Whatever a half-done cycle left: its key keeps it, and its number is known.
for each in range(number + 1):
    manager.remove_cache_key(CacheKey(1, each))
gc.collect()
manager.collect()
cache = manager.allocate_cache(DESC, [CacheKey(1, 1)])
manager.deallocate_cache(cache)
manager.remove_cache_key(CacheKey(1, 1))
dist.finalize()
print(names())
"""


@pytest.mark.parametrize("program", [INIT, ALLOCATE], ids=["init and finalize", "allocate and free"])
def test_interrupts_leave_a_cluster_that_works(namespace: Namespace, program: str) -> None:
    ended = subprocess.run([sys.executable, "-c", program], env=namespace.environment({}), capture_output=True, text=True,
                           timeout=100, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("[]\n", "", 0), ended.stderr
