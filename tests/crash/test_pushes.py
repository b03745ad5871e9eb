"""Pushes that stand still, or end, in the middle of a copy: whoever is at the other end goes on, and no memory is given on."""
from __future__ import annotations

from typing import Any

import builds
import numpy as np
import pytest
from peer import Namespace, Peer, StartPeer, by_id

pytestmark = pytest.mark.timeout(600)       # the first one waits for a build
OK, TIMEOUT, NOT_LINKED = "LLM_SUCCESS", "LLM_WAIT_PROCESS_TIMEOUT", "LLM_NOT_YET_LINK"


@pytest.fixture
def env() -> dict[str, str]:
    return {**builds.environment("crash", builds.build("crash")), "SHMKV_RECYCLE_BYTES": "0"}


class Pair:
    """A prompt that stands in the middle of a push to a decoder, the link's lock and the hazard in its hands."""

    def __init__(self, source: Peer, target: Peer) -> None:
        self.source, self.target = source, target
        source.call("listen")
        source.call("allocate", name="src")
        source.call("noise", name="src", seed=5)
        target.call("allocate", name="dst")
        target.call("canary", name="dst")
        self.base = target.call("addresses", name="dst")

    def stop(self, point: str = "copying:2") -> None:
        self.source.call("execute", code=f"from shmkv import _crash\n_crash.arm({point!r}, True)")
        self.source.send("push", name="src", configs=[[2, self.base]])
        assert self.source.wait_stopped_or_dead()

    def go_on(self) -> list[Any]:
        self.source.cont()
        assert self.source.receive().outcome == OK          # of the call, which may have been stopped as well
        return list(self.source.call("results"))


@pytest.fixture
def pair(prompt: StartPeer, decoder: StartPeer, env: dict[str, str]) -> Pair:
    return Pair(prompt(env=env), decoder(env=env, sync_kv_timeout=200))


def test_a_destination_stays_until_the_push_is_done(namespace: Namespace, pair: Pair) -> None:
    before = namespace.segments()
    pair.stop()
    pair.target.call("deallocate", name="dst")
    pair.target.call("collect")
    assert namespace.segments() == before
    assert pair.go_on() == ["LLM_PARAM_INVALID"]        # the first layer was done, the second has no destination any more
    pair.target.call("collect")
    assert len(namespace.segments()) == len(before) - 1


def test_a_pull_waits_for_a_push_and_the_link_stays(pair: Pair) -> None:
    cache_id = pair.source.call("allocate", name="pulled")
    pair.target.call("allocate", name="buffer")
    pair.stop()
    assert pair.target.outcome("pull", key=by_id(1, cache_id), name="buffer") == TIMEOUT
    assert pair.target.outcome("check_link", cluster_id=1) == OK
    assert pair.target.call("unlink", ids=[1], timeout=50) == ["LLM_UNLINK_FAILED", ["LLM_LINK_BUSY"]]
    assert pair.go_on() == [OK]
    assert pair.target.outcome("pull", key=by_id(1, cache_id), name="buffer") == OK


def test_a_push_waits_for_a_pull_and_the_link_stays(prompt: StartPeer, decoder: StartPeer, env: dict[str, str]) -> None:
    pair = Pair(prompt(env=env, sync_kv_timeout=200), decoder(env=env))
    cache_id = pair.source.call("allocate", name="pulled")
    pair.target.call("allocate", name="buffer")
    pair.target.call("execute", code="from shmkv import _crash\n_crash.arm('copying', True)")
    pair.target.send("pull", key=by_id(1, cache_id), name="buffer")
    assert pair.target.wait_stopped_or_dead()
    pair.source.call("push", name="src", configs=[[2, pair.base]])
    answer = pair.source.attempt("results")
    assert answer.value == [TIMEOUT]
    pair.target.cont()
    assert pair.target.receive().outcome == OK
    pair.source.call("push", name="src", configs=[[2, pair.base]])
    assert pair.source.call("results") == [OK]
    np.testing.assert_array_equal(pair.target.read("dst")[:, :, 0], pair.source.read("src")[:, :, 0])


@pytest.mark.parametrize("point", ["acceptor-opened", "hazard-set", "copying:2", "pushed", "unpinning", "word-releasing"])
def test_a_link_that_is_removed_by_force_keeps_the_memory_and_the_record(namespace: Namespace, pair: Pair, point: str) -> None:
    """The decoder links anew, into another record, frees the destination and uses the next memory; then the prompt goes on."""
    before = namespace.segments()
    pair.stop(point)
    assert pair.target.call("unlink", ids=[1], force=True) == [OK, [OK]]
    assert pair.target.call("link", ids=[1]) == [OK, [OK]]
    pair.target.call("deallocate", name="dst")
    pair.target.call("collect")
    kept = namespace.segments() == before
    assert kept == (point not in ("acceptor-opened", "word-releasing"))     # where no hazard stands, nothing is waited for
    assert pair.go_on() in ([NOT_LINKED], ["LLM_PARAM_INVALID"])      # cut off, or the next layer has no destination
    pair.target.call("collect")
    assert len(namespace.segments()) == len(before) - 1
    pair.target.call("allocate", name="dst")
    pair.source.call("push", name="src", configs=[[2, pair.target.call("addresses", name="dst")]])
    assert pair.source.call("results") == [OK]
    for _ in range(2):          # the records of all that are over are used again
        assert pair.target.call("unlink", ids=[1]) == [OK, [OK]]
        assert pair.target.call("link", ids=[1]) == [OK, [OK]]
    records = "from shmkv import _link_record\n" \
              "result = [_link_record.read(agent.dist._cluster.directory.region, slot)['serial'] for slot in range(4)]"
    assert pair.source.call("execute", code=records)[2:] == [0, 0]


def test_a_prompt_killed_in_the_middle_after_its_link_was_removed(namespace: Namespace, pair: Pair) -> None:
    before = namespace.segments()
    owner = pair.source.call("execute", code="result = agent.dist._cluster.member.incarnation")
    pair.stop()
    pair.target.call("unlink", ids=[1], force=True)
    pair.target.call("deallocate", name="dst")
    assert namespace.segments() == before
    pair.source.kill()
    pair.target.call("collect")
    assert len(namespace.segments()) == len(before) - 1
    mapped = f"result = [line for line in open('/proc/self/maps') if '.d.{owner:016x}' in line]"
    assert pair.target.call("execute", code=mapped) == []      # nothing of the dead is kept
    assert pair.target.call("unlink", ids=[1]) == [OK, [NOT_LINKED]]


def test_a_decoder_that_finalizes_under_a_push(pair: Pair) -> None:
    pair.stop()
    pair.target.call("finalize")
    assert pair.go_on() == [NOT_LINKED]
    pair.target.call("init", role="DECODER", cluster_id=2, options={"sync_kv_timeout": 20000}, raw={})
    pair.target.call("link", ids=[1])
    pair.target.call("allocate", name="again")
    pair.source.call("push", name="src", configs=[[2, pair.target.call("addresses", name="again")]])
    assert pair.source.call("results") == [OK]


def test_pushes_by_system_calls(prompt: StartPeer, decoder: StartPeer, env: dict[str, str]) -> None:
    """No segment of the decoder is mapped, and one that is cut off in the middle ends nobody."""
    pair = Pair(prompt(env={**env, "SHMKV_COPY": "pread"}), decoder(env=env))
    pair.source.call("push", name="src", configs=[[2, pair.base, None, 1]])
    assert pair.source.call("results") == [OK]
    np.testing.assert_array_equal(pair.target.read("dst")[:, :, 0], pair.source.read("src")[:, :, 1])
    owner = pair.target.call("execute", code="result = agent.dist._cluster.member.incarnation")
    maps = f"result = [line for line in open('/proc/self/maps') if '.c.{owner:016x}.' in line]"
    assert pair.source.call("execute", code=maps) == []
    pair.stop("copying:3")
    name = "import os, pathlib\n[path] = [path for path in pathlib.Path('/dev/shm').iterdir() if " \
           f"path.name.startswith(os.environ['SHMKV_NAMESPACE']) and '.c.{owner:016x}.' in path.name]\n"
    size = pair.target.call("execute", code=name + "result = path.stat().st_size\nos.truncate(path, 4096)")
    assert pair.go_on() in ([OK], ["LLM_FAILED"])
    pair.target.call("execute", code=name + f"os.truncate(path, {size})")
