"""The interpreter ends in every order: with caches alive, threads that pull, handlers before and after the library's own."""
from __future__ import annotations

import pytest
from peer import Namespace, StartPeer, by_id
from reference import SUCCESS
from shared_bytes import directory_of
from started_apart import Program

pytestmark = pytest.mark.timeout(120)
FINALIZED = "LLM_ENGINE_FINALIZED"

# How it ends, the exit code, what it prints, whether the library had the occasion to leave by itself.
WAYS: list[tuple[str, int, list[str], bool]] = [
    ("daemons", 0, [], True),
    ("daemons, exit", 3, [], True),
    ("daemons, os._exit", 4, [], False),
    ("daemons, uncaught", 1, [], True),
    ("finalize, then threads end", 0, [], True),
    ("exit in a thread", 0, [], True),
    ("finalize in a destructor", 0, [f"afterwards: {FINALIZED}"], True),
    ("finalize when modules go", 0, [], True),
    ("pull when modules go", 0, [f"at the end: {FINALIZED}"], True),
    ("modules go first", 0, [], True),
    ("views only", 0, [], True),
    ("handlers", 0, ["after the import: done", f"before the import: {FINALIZED}"], True),
    ("handlers, os._exit", 6, [], False),
]


@pytest.mark.parametrize(("how", "code", "said", "leaves"), WAYS)
def test_the_interpreter_ends_in_any_order(namespace: Namespace, prompt: StartPeer, how: str, code: int, said: list[str],
                                           leaves: bool) -> None:
    p = prompt(1)
    p.call("allocate", name="kv", num_tensors=1, shape=[1, 4 << 20], dtype="DT_INT8")
    own = {name for name in namespace.names() if directory_of(namespace, 1).rpartition(".")[2] in name}
    program = Program(namespace, "end_in_some_order.py", how)
    ended = program.end()
    assert (ended.code, ended.complained) == (code, ""), "never a signal, stderr is silent"
    assert ended.said.splitlines() == said, "each call had its answer"
    of_the_program = {name for name in namespace.names() - own if ".c." in name or ".d." in name}
    namespace.somebody_died = not leaves
    assert bool(of_the_program) != leaves, "its segments are gone, unless it left by os._exit"
    d = namespace.start_cluster("DECODER", 3)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("allocate", name="kv", num_tensors=1, shape=[1, 4 << 20], dtype="DT_INT8")
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS, "no lock is left held, the peer goes on"
    assert not of_the_program & namespace.names(), "and what was left is swept by the next init"
