"""Limits of a process and of /dev/shm: too few bytes, descriptors or mappings are answers, and nothing is lost by them."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from agent_code import HEARD, LISTEN
from peer import Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(120)
MIB = 1 << 20
ROWS = geometry(4, [2, 8], 2)
NO_MEMORY, FAILED, NOT_EXIST = "LLM_DEVICE_OUT_OF_MEMORY", "LLM_FAILED", "LLM_KV_CACHE_NOT_EXIST"
PrivateShm = Callable[[str], Any]


def _big(nbytes: int) -> dict[str, Any]:
    return {"num_tensors": 1, "shape": [1, nbytes], "dtype": "DT_INT8"}


def _limit(peer: Peer, name: str, value: str) -> None:
    """A soft limit, so that it can be taken away again; `value` may use `now`, what the process has of it."""
    peer.call("execute", code=f"""
import os, resource
name = resource.{name}
_, hard = resource.getrlimit(name)
if name == resource.RLIMIT_AS:
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * 4096
else:
    now = os.dup(0)             # the lowest that is free
    os.close(now)
resource.setrlimit(name, ({value}, hard))
""")


def _unlimit(peer: Peer, name: str) -> None:
    peer.call("execute", code=f"import resource\n_, hard = resource.getrlimit(resource.{name})\n"
                              f"resource.setrlimit(resource.{name}, (hard, hard))")


def _right(d: Peer, row: int = 0, generation: int = 1) -> None:
    np.testing.assert_array_equal(d.read("kv")[:, :, row], pattern(ROWS, generation)[:, :, 0])


def _usable(p: Peer, d: Peer, number: int) -> None:
    """After the limit is gone everything works, and nothing is left of what failed."""
    p.call("allocate", name="after", keys=[req(1, number)])
    p.call("fill", name="after", generation=1)
    if d.outcome("check_link", cluster_id=1) != SUCCESS:
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, number), name="kv") == SUCCESS
    _right(d)
    for peer in (p, d):
        assert peer.call("execute", code=HEARD)[1] == [], "nothing unraisable"


@pytest.mark.parametrize("limit", [("RLIMIT_AS", "now + (8 << 20)"), ("RLIMIT_FSIZE", "1 << 20"), ("RLIMIT_NOFILE", "now")])
def test_a_limit_met_by_allocate_is_an_answer(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                              limit: tuple[str, str]) -> None:
    p, d = prompt(1), decoder(2)
    for peer in (p, d):
        peer.call("execute", code=LISTEN)
    p.call("allocate", name="kv")
    p.call("fill", name="kv", generation=2)
    before = namespace.names()
    _limit(p, *limit)
    answer = p.attempt("allocate", name="big", keys=[req(1, 1)], **_big(64 * MIB))
    wanted = FAILED if limit[0] == "RLIMIT_NOFILE" else NO_MEMORY
    assert answer.outcome == wanted, answer.trace
    assert namespace.names() == before, "no file is left of it"
    p.call("fill", name="kv", generation=1)                 # what was there works
    assert p.outcome("remove_key", key=req(1, 1)) == SUCCESS
    _unlimit(p, limit[0])
    d.call("allocate", name="kv")
    assert d.outcome("pull", key=req(1, 1), name="kv") == NOT_EXIST, "the key of the failed one was not bound"
    _usable(p, d, 1)


@pytest.mark.parametrize("limit", [("RLIMIT_AS", "now + (1 << 20)"), ("RLIMIT_FSIZE", "4096"), *(
    ("RLIMIT_NOFILE", f"now + {free}") for free in range(2))])
def test_a_limit_met_by_init_is_an_answer(namespace: Namespace, limit: tuple[str, str]) -> None:
    p, d = namespace.start(), namespace.start()
    for peer in (p, d):
        peer.call("execute", code=LISTEN)
    options = {"options": {"sync_kv_timeout": 20000}, "raw": {}}
    _limit(p, *limit)
    answer = p.attempt("init", role="PROMPT", cluster_id=1, **options)
    assert "LLMException" in answer.kinds, answer.trace
    assert namespace.names() == set(), "no file is left of it"
    _unlimit(p, limit[0])
    assert p.outcome("init", role="PROMPT", cluster_id=1, **options) == SUCCESS, "it works when the limit is gone"
    d.call("init", role="DECODER", cluster_id=2, **options)
    _usable(p, d, 1)


@pytest.mark.parametrize("limit", [("RLIMIT_AS", "now + (1 << 20)"), ("RLIMIT_NOFILE", "now")])
def test_a_limit_met_by_link_and_pull_is_an_answer(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                   limit: tuple[str, str]) -> None:
    p, d = prompt(1), decoder(2, link=())
    for peer in (p, d):
        peer.call("execute", code=LISTEN)
    p.call("allocate", name="big", keys=[req(1, 1)], **_big(32 * MIB))
    d.call("allocate", name="big", **_big(32 * MIB))
    _limit(d, *limit)
    linked = d.attempt("link", ids=[1], timeout=2000)
    assert linked.value == ["LLM_LINK_FAILED", ["LLM_LINK_FAILED"]], "a status: the directory cannot be opened or mapped"
    _unlimit(d, limit[0])
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "it works when the limit is gone"
    _limit(d, *limit)
    answer = d.attempt("pull", key=req(1, 1), name="big")
    assert "LLMException" in answer.kinds, answer.trace
    _unlimit(d, limit[0])
    assert d.outcome("pull", key=req(1, 1), name="big") == SUCCESS, "the key was kept"
    _usable(p, d, 2)


def test_tables_that_cannot_grow_are_an_answer(private_shm: PrivateShm) -> None:
    """1 MiB of /dev/shm: caches, rows and keys until it is full; then everything still answers, and works again with room."""
    shm = private_shm("size=1m")
    p, d = shm.cluster("PROMPT", 1, {"SHMKV_RECYCLE_BYTES": "0"}), shm.cluster("DECODER", 2)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("allocate", name="kv")
    made, said = 0, SUCCESS
    while said == SUCCESS and made < 1000:
        said = p.outcome("allocate", name=f"kv{made}", keys=[req(1, 2 * made), req(1, 2 * made + 1)])
        made += said == SUCCESS
    assert said == NO_MEMORY, "a status when it is full"
    assert made > 10
    for number in (0, made - 1):
        p.call("fill", name=f"kv{number}", generation=1)
        assert d.outcome("pull", key=req(1, 2 * number), name="kv") == SUCCESS, "what was there can be pulled"
        _right(d)
    assert d.outcome("pull", key=req(1, 2 * made), name="kv") == NOT_EXIST, "what failed is not there"
    assert p.outcome("bind", name="kv0", keys=[(row, req(1, 5000 + row)) for row in range(2)]) == SUCCESS, "keys need no new page"
    late = shm.start()
    options = {"options": {"sync_kv_timeout": 20000}, "raw": {}}
    answer = late.attempt("init", role="DECODER", cluster_id=3, **options)
    assert answer.outcome == NO_MEMORY, f"so does an init: {answer.text}"
    for number in range(made):
        for key in (2 * number, 2 * number + 1, 5000, 5001):
            p.call("remove_key", key=req(1, key))
        p.call("deallocate", name=f"kv{number}")
    p.call("collect")
    assert late.outcome("init", role="DECODER", cluster_id=3, **options) == SUCCESS, "with room everything works again"
    assert late.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    p.call("allocate", name="after", keys=[req(1, 1)])
    assert d.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
    for peer in (late, d, p):
        peer.call("finalize")
    assert shm.names() == [], "nothing is left"


def test_an_index_that_cannot_grow_is_an_answer(private_shm: PrivateShm) -> None:
    """One cache of many rows: naming them needs a bigger index; the keys bound before stay."""
    shm = private_shm("size=1m")
    p, d = shm.cluster("PROMPT", 1), shm.cluster("DECODER", 2)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    assert p.outcome("allocate", name="kv", num_tensors=1, shape=[1000, 64], dtype="DT_INT8") == SUCCESS
    d.call("allocate", name="kv", num_tensors=1, shape=[1, 64], dtype="DT_INT8")
    free = "import os\nfound = os.statvfs('/dev/shm')\nresult = found.f_bavail * found.f_frsize"
    filled = p.call("execute", code=free + "\nwith open('/dev/shm/filler', 'wb') as f:\n    f.write(bytes(result - 4096))")
    bound, said = 0, SUCCESS
    while said == SUCCESS and bound < 1000:
        said = p.outcome("bind", name="kv", keys=[(row, req(1, row)) for row in range(bound, bound + 50)])
        bound += 50 * (said == SUCCESS)
    assert (said, filled > 0) == ((NO_MEMORY, True) if bound < 1000 else (SUCCESS, True)), "a status, if it had to grow"
    for row in (0, bound - 1):
        assert d.outcome("pull", key=req(1, row), name="kv", src_cache_offset=0, size=64) == SUCCESS, "bound keys stay"
    p.call("execute", code="import os\nos.unlink('/dev/shm/filler')")
    left = [(row, req(1, row)) for row in range(bound, 1000)]
    assert not left or p.outcome("bind", name="kv", keys=left) == SUCCESS, "with room it grows"
    assert d.outcome("pull", key=req(1, 999), name="kv") == SUCCESS


_FILL_UP = """
try:
    with open("/dev/shm/filler", "wb", buffering=0) as filler:
        while filler.write(bytes(4096)) == 4096:
            pass
except OSError:
    pass
"""


def test_a_link_record_that_has_no_room_is_an_answer(private_shm: PrivateShm) -> None:
    """The fifth link to a cluster needs another page of its directory."""
    shm = private_shm("size=1m")
    p = shm.cluster("PROMPT", 1)
    readers = [shm.cluster("DECODER", 2 + number) for number in range(5)]
    for d in readers[:4]:
        assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    p.call("execute", code=_FILL_UP)
    answer = readers[4].attempt("link", ids=[1], timeout=1000)
    assert answer.value == ["LLM_LINK_FAILED", ["LLM_LINK_FAILED"]], "a status"
    readers[4].call("execute", code="import os\nos.unlink('/dev/shm/filler')")
    readers[4].call("allocate", name="kv")
    assert "space" in readers[4].attempt("pull", key=by_id(1, 1), name="kv").text, "the next message says why"
    assert readers[0].outcome("check_link", cluster_id=1) == SUCCESS, "the others go on"
    assert readers[4].call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "with room it works"
