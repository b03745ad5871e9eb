"""Imports the library's modules in many orders, each in a forked child that then allocates and pulls once. Prints what failed."""
from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import random
import signal
import sys
import threading
import traceback
from pathlib import Path


def names() -> list[str]:
    """All modules, found without importing any."""
    spec = importlib.util.find_spec("shmkv")
    assert spec is not None
    assert spec.submodule_search_locations
    package = Path(spec.submodule_search_locations[0])
    found = [f"shmkv.{name}" for folder, prefix in ((package, ""), (package / "cli", "cli."))
             for name in (f"{prefix}{module.name}" for module in pkgutil.iter_modules([str(folder)]))]
    return sorted(name for name in found if not name.endswith("__main__"))


def use(cluster_id: int) -> None:
    """Allocate and pull once."""
    from agent import Agent

    import shmkv

    own = Agent()
    own.init("DECODER", cluster_id, {"sync_kv_timeout": 20000}, {})
    assert own.link([1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
    own.allocate("kv")
    own.pull(["id", 1, 1, 0], "kv")
    own.finalize()
    assert shmkv.__version__


def turned(order: list[str], number: int) -> list[str]:
    """Another order for each thread; the package itself stays first."""
    head = order[:1] if order[0] == "shmkv" else []
    rest = order[len(head):]
    return head + rest[number:] + rest[:number]


def one_after_the_other(order: list[str]) -> None:
    for name in order:
        importlib.import_module(name)


def all_at_once(order: list[str], refusals: tuple[type[Exception], ...]) -> None:
    together, failed = threading.Barrier(8), []

    def run(own: list[str]) -> None:
        together.wait()
        try:
            one_after_the_other(own)
        except refusals:
            pass
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=(turned(order, number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def in_a_child(how: str, order: list[str], cluster_id: int) -> int:
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    signal.alarm(60)
    code = 1
    try:
        if how == "threads":
            all_at_once(["shmkv", *order], ())
        elif how == "modules in threads":
            # Python itself gives up, with these, where two threads import a package and a part of it: each has one lock and wants
            # the other's. Modules are left half-made then, so all that is asked for is that nothing crashes.
            all_at_once(order, (ImportError, KeyError, AttributeError, RuntimeError))
            os._exit(0)
        one_after_the_other(order)
        one_after_the_other(order)
        use(cluster_id)
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


how, before, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if before == "numpy":
    import numpy as np  # noqa: F401
chance, ended = random.Random(f"{how} {before}"), {}
every = names()
firsts = chance.sample(every, min(count, len(every)))
for number, first in enumerate(firsts):
    rest = [name for name in every if name != first]
    chance.shuffle(rest)
    code = in_a_child(how, [first, *rest], 100 + number)
    if code:
        ended[first] = code
print(json.dumps([len(firsts), ended]))
