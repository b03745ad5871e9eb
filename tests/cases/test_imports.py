"""Field case FR-052: no order in which the library's modules are imported decides about a crash."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from peer import Namespace, StartPeer
from reference import SUCCESS
from started_apart import Program

pytestmark = pytest.mark.timeout(240)
USE = """
import shmkv
own = shmkv.LLMDataDist(shmkv.LLMRole.PROMPT, 7)
own.init(shmkv.LLMConfig().generate_options())
cache = own.kv_cache_manager.allocate_cache(shmkv.CacheDesc(2, [2, 8], shmkv.DataType.DT_INT8))
cache.tensors[0].numpy()[...] = 3
assert int(cache.tensors[0].numpy().sum()) == 48
del cache
own.finalize()
print("worked", flush=True)
"""
IN_ANOTHER_INTERPRETER = """
import sys, warnings
warnings.simplefilter("ignore")
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
first, second = sys.argv[1:]
if first == "main":
    exec(second)
other = interpreters.create()
said = interpreters.run_string(other, '''
import warnings
warnings.simplefilter("ignore")
try:
    exec(%r)
except ImportError as error:
    print(error, flush=True)
''' % (second,))
assert said is None, said
interpreters.destroy(other)
if first == "other":
    try:
        exec(second)
    except ImportError as error:
        print(error, flush=True)
"""


@pytest.mark.parametrize(("how", "before", "count"), [
    ("one by one", "numpy", 8), ("one by one", "nothing", 2), ("threads", "nothing", 2), ("threads", "numpy", 2),
    ("modules in threads", "nothing", 4)])
def test_fr_052_modules_in_any_order(namespace: Namespace, prompt: StartPeer, rounds: Callable[[int], int], how: str, before: str,
                                     count: int) -> None:
    p = prompt(1)
    p.call("allocate", name="kv")
    program = Program(namespace, "import_in_order.py", how, before, str(rounds(count)))
    ended = program.end(200)
    assert (ended.code, ended.complained) == (0, ""), "never a signal, nothing on stderr"
    tried, failed = json.loads(ended.said)
    assert failed == {}, "each child imported everything twice, allocated and pulled"
    assert tried >= min(rounds(count), 40), "in as many orders"


@pytest.mark.parametrize("first", ["main", "other"])
def test_fr_052_a_second_interpreter_says_what_is_not_supported(namespace: Namespace, first: str) -> None:
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_INTERPRETER, first, USE], env=namespace.environment({}),
                          capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, ""), "never a signal"
    worked, refused = done.stdout.splitlines()
    assert worked == "worked", "the first interpreter that imports it has it"
    assert "interpreter" in refused.lower(), f"the other one is told what is not supported: {refused}"


def test_fr_052_import_times_change_nothing(namespace: Namespace, prompt: StartPeer) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", USE], env=namespace.environment({}), capture_output=True,
                          text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "worked\n")
    assert "shmkv._pull" in done.stderr, "the times were taken"
    assert prompt(1).outcome("allocate", name="kv") == SUCCESS


def test_import_without_memory_for_a_fork_handler_is_an_import_error(preload: Callable[[str], Path]) -> None:
    """Without the handler a forked child would wait for threads of its parent."""
    done = subprocess.run([sys.executable, "-c", "import shmkv"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "LD_PRELOAD": str(preload("no_atfork"))})
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ImportError: pthread_atfork failed: no memory for a fork handler"
