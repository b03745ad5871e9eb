"""Contract, appendix B14 and B15: deadlines of a copy, threads that pull, an owner that frees meanwhile."""
from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from peer import Answer, Namespace, Peer, StartPeer, by_id, req
from reference import NOT_EXIST, SUCCESS, Bytes, canary, geometry, pattern

pytestmark = pytest.mark.timeout(300)
TIMED_OUT = "LLM_WAIT_PROCESS_TIMEOUT"
# What a pull may say while its link is being removed.
ENDS_OF_A_LINK = {SUCCESS, "LLM_LINK_BUSY", "LLM_NOT_YET_LINK"}
# 256 MiB in one row: no machine copies that within a millisecond.
HUGE: dict[str, Any] = {"num_tensors": 4, "shape": [1, 64 << 20], "dtype": "DT_INT8"}
FILL_HUGE = "for number, tensor in enumerate(agent.caches['kv'].tensors): tensor.numpy()[...] = number + 1"
LOOK_AT_HUGE = """
result = [[int(tensor.numpy().min()), int(tensor.numpy().max())] for tensor in agent.caches["kv"].tensors]
"""
THREADS = 6
# A row of 4 tensors that is long enough for the threads to meet.
SHAPE = [THREADS, 64 << 10]
GEOMETRY = geometry(4, SHAPE, 2)


def test_b14_copy_that_takes_longer_than_the_timeout(prompt: StartPeer, decoder: StartPeer) -> None:
    p, hasty = prompt(1), decoder(2, sync_kv_timeout=1)
    p.call("allocate", name="kv", keys=[req(1, 1)], **HUGE)
    p.call("execute", code=FILL_HUGE)
    hasty.call("allocate", name="kv", **HUGE)
    assert [hasty.outcome("pull", key=req(1, 1), name="kv") for _ in range(3)] == [TIMED_OUT] * 3
    hasty.call("deallocate", name="kv")
    patient = decoder(3)
    patient.call("allocate", name="kv", **HUGE)
    assert patient.outcome("pull", key=req(1, 1), name="kv") == SUCCESS
    assert patient.call("execute", code=LOOK_AT_HUGE) == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert patient.outcome("pull", key=req(1, 1), name="kv") == NOT_EXIST


def test_b14_link_stays_usable_after_a_timeout(prompt: StartPeer, decoder: StartPeer) -> None:
    p, d = prompt(1), decoder(2, sync_kv_timeout=1)
    p.call("allocate", name="kv", **HUGE)
    p.call("allocate", name="small", keys=[req(1, 2)])
    p.call("fill", name="small", generation=1)
    d.call("allocate", name="kv", **HUGE)
    d.call("allocate", name="small")
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == TIMED_OUT
    # A busy host may take the processor away for the whole millisecond, so the small pull may be repeated.
    tries = (d.outcome("pull", key=req(1, 2), name="small") for _ in range(200))
    assert next(outcome for outcome in tries if outcome != TIMED_OUT) == SUCCESS
    np.testing.assert_array_equal(d.read("small")[:, :, 0], pattern(geometry(4, [2, 8], 2), 1)[:, :, 0])


def _digest(rows: Bytes, row: int) -> str:
    """What "digest" says of a one-row destination that holds this row."""
    return hashlib.sha256(rows[:, :, row:row + 1].tobytes()).hexdigest()


class Stage:
    """A prompt with THREADS keyed rows, a decoder with one destination of one row for each of its threads."""

    def __init__(self, p: Peer, d: Peer) -> None:
        self.p, self.d = p, d
        for thread in range(THREADS):
            d.call("allocate", name=f"dst{thread}", shape=[1, *SHAPE[1:]])

    def allocate(self, generation: int, name: str = "kv") -> list[str]:
        """A cache whose row r is named by req(1, r); the digests of its rows."""
        self.p.call("allocate", name=name, shape=SHAPE, keys=[req(1, row) for row in range(THREADS)])
        self.p.call("fill", name=name, generation=generation)
        rows = pattern(GEOMETRY, generation)
        return [_digest(rows, row) for row in range(THREADS)]

    def pulls(self, keys: list[list[list[object]]]) -> list[list[tuple[str, str]]]:
        """Each thread pulls its list of keys into its own destination: (outcome, digest) of each pull."""
        self.send(keys)
        return self.answers()

    def send(self, keys: list[list[list[object]]]) -> None:
        self.d.send("parallel", batches=[
            [step for key in mine for step in _pull_and_look(f"dst{thread}", key)]
            for thread, mine in enumerate(keys)])

    def answers(self) -> list[list[tuple[str, str]]]:
        said = self.d.receive()
        assert said.outcome == SUCCESS, said.trace
        return [[_outcome_and_digest(batch[at + 1:at + 3]) for at in range(0, len(batch), 3)]
                for batch in said.value]


def _pull_and_look(name: str, key: list[object]) -> list[tuple[str, dict[str, object]]]:
    return [("canary", {"name": name}), ("pull", {"key": key, "name": name}), ("digest", {"name": name})]


def _outcome_and_digest(steps: list[dict[str, object]]) -> tuple[str, str]:
    pulled, looked = steps
    error = pulled.get("error")
    assert isinstance(looked["value"], str)
    if error is None:
        return SUCCESS, looked["value"]
    assert isinstance(error, dict)
    return str(error["status"] or error["kinds"]), looked["value"]


@pytest.fixture
def stage(prompt: StartPeer, decoder: StartPeer) -> Stage:
    return Stage(prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2))


UNTOUCHED = hashlib.sha256(canary(geometry(4, [1, *SHAPE[1:]], 2)).tobytes()).hexdigest()


def test_b15_threads_pull_different_keys(stage: Stage) -> None:
    for generation in range(5):
        digests = stage.allocate(generation)
        said = stage.pulls([[req(1, row)] for row in range(THREADS)])
        assert said == [[(SUCCESS, digest)] for digest in digests]


def test_b15_threads_pull_rows_by_id_again_and_again(stage: Stage) -> None:
    digests = stage.allocate(1)
    for row in range(THREADS):
        stage.p.call("remove_key", key=req(1, row))
    orders = [[(thread + step) % THREADS for step in range(3 * THREADS)] for thread in range(THREADS)]
    said = stage.pulls([[by_id(1, 1, row) for row in order] for order in orders])
    assert said == [[(SUCCESS, digests[row]) for row in order] for order in orders]


def test_b15_threads_pull_the_same_key(stage: Stage) -> None:
    for generation in range(5):
        digests = stage.allocate(generation)
        said = [pull for batch in stage.pulls([[req(1, 3)]] * THREADS) for pull in batch]
        assert (SUCCESS, digests[3]) in said
        assert {outcome for outcome, _ in said} <= {SUCCESS, NOT_EXIST}
        assert {digest for outcome, digest in said if outcome == SUCCESS} == {digests[3]}
        assert stage.d.outcome("pull", key=req(1, 3), name="dst0") == NOT_EXIST
        for row in range(THREADS):
            stage.p.call("remove_key", key=req(1, row))


def test_b15_two_decoders_pull_the_same_keys(stage: Stage, decoder: StartPeer, namespace: Namespace) -> None:
    other = Stage(stage.p, decoder(3))
    before = namespace.segments()
    digests = stage.allocate(1)
    stage.p.call("deallocate", name="kv")
    keys = [[req(1, (row + thread) % THREADS) for row in range(THREADS)] for thread in range(THREADS)]
    stage.send(keys)
    other.send(keys)
    said = [*stage.answers(), *other.answers()]
    good = {(key[2], digest) for mine, batch in zip(keys * 2, said, strict=True)
            for key, (outcome, digest) in zip(mine, batch, strict=True) if outcome == SUCCESS}
    assert good == set(enumerate(digests))
    assert {outcome for batch in said for outcome, _ in batch} == {SUCCESS, NOT_EXIST}
    stage.p.call("collect")
    assert namespace.segments() == before


def test_b15_owner_deallocates_while_threads_pull(stage: Stage, namespace: Namespace) -> None:
    before = namespace.segments()
    for generation in range(5):
        digests = stage.allocate(generation)
        stage.send([[req(1, row)] for row in range(THREADS)])
        stage.p.call("deallocate", name="kv")
        assert stage.answers() == [[(SUCCESS, digest)] for digest in digests]
        stage.p.call("collect")
        assert namespace.segments() == before


def test_b15_owner_removes_keys_while_threads_pull(stage: Stage, namespace: Namespace) -> None:
    before = namespace.segments()
    for generation in range(10):
        digests = stage.allocate(generation)
        stage.p.call("deallocate", name="kv")
        stage.send([[req(1, row)] for row in range(THREADS)])
        stage.p.batch([("remove_key", {"key": req(1, row)}) for row in reversed(range(THREADS))])
        for row, ((outcome, digest),) in enumerate(stage.answers()):
            assert outcome in (SUCCESS, NOT_EXIST)
            assert outcome == NOT_EXIST or digest == digests[row]
        stage.p.call("collect")
        assert namespace.segments() == before


def test_b15_owner_uses_memory_again_while_threads_pull(prompt: StartPeer, decoder: StartPeer) -> None:
    """Freed memory that is used again must not show up in a pull of the cache that it belonged to."""
    stage = Stage(prompt(1, env={"SHMKV_RECYCLE_BYTES": str(1 << 30)}), decoder(2))
    recycling = stage.p.call("allocate", name="first", shape=SHAPE)
    stage.p.call("fill", name="first", generation=1)
    digests = [_digest(pattern(GEOMETRY, 1), row) for row in range(THREADS)]
    stage.send([[by_id(1, recycling, row)] * 20 for row in range(THREADS)])
    stage.p.call("deallocate", name="first")
    for generation in range(2, 12):
        stage.p.call("allocate", name="next", shape=SHAPE)
        stage.p.call("fill", name="next", generation=generation)
        stage.p.call("deallocate", name="next")
    for row, batch in enumerate(stage.answers()):
        assert all(digest == digests[row] for outcome, digest in batch if outcome == SUCCESS)
        assert {outcome for outcome, _ in batch} <= {SUCCESS, NOT_EXIST}


def test_b15_finalize_while_threads_pull(stage: Stage) -> None:
    digests = stage.allocate(1)
    for row in range(THREADS):
        stage.p.call("remove_key", key=req(1, row))
    stage.send([[by_id(1, 1, row)] * 10 for row in range(THREADS)])
    stage.p.call("finalize")
    for row, batch in enumerate(stage.answers()):
        outcomes = [outcome for outcome, _ in batch]
        assert set(outcomes) <= {SUCCESS, TIMED_OUT, NOT_EXIST}
        assert all(digest == digests[row] for outcome, digest in batch if outcome == SUCCESS)
    assert stage.d.outcome("pull", key=by_id(1, 1), name="dst0") == TIMED_OUT


def test_b15_puller_finalizes_while_its_threads_pull(stage: Stage) -> None:
    stage.allocate(1)
    batches = [[("pull", {"key": by_id(1, 1, row), "name": f"dst{row}"})] * 20 for row in range(THREADS)]
    said: list[list[Answer]] = stage.d.parallel([*batches, [("finalize", {})]])
    assert said[-1][0].outcome == SUCCESS
    outcomes = {answer.outcome for batch in said[:-1] for answer in batch}
    assert outcomes <= {SUCCESS, NOT_EXIST, "LLM_ENGINE_FINALIZED", "LLM_FAILED"}
    assert stage.d.outcome("pull", key=by_id(1, 1), name="dst0") in ("LLM_ENGINE_FINALIZED", "LLM_FAILED")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("who", ["decoder", "prompt"])
def test_b15_unlink_while_threads_pull(stage: Stage, force: bool, who: str) -> None:
    """Either the link is gone and says so, or the unlink gave up and the link works: nothing in between."""
    digests = stage.allocate(1)
    for row in range(THREADS):
        stage.p.call("remove_key", key=req(1, row))
    stage.send([[by_id(1, 1, row)] * 20 for row in range(THREADS)])
    if who == "prompt":
        unlinked = stage.p.call("unlink", ids=[2], timeout=5000, force=force)
        batches = stage.answers()
    else:
        batches = stage.answers()
        pulls = [[("pull", {"key": by_id(1, 1, row), "name": f"dst{row}"})] * 50 for row in range(THREADS)]
        said = stage.d.parallel([*pulls, [("unlink", {"ids": [1], "timeout": 5000, "force": force})]])
        unlinked = said[-1][0].value
        assert {answer.outcome for batch in said[:-1] for answer in batch} <= ENDS_OF_A_LINK
    for row, batch in enumerate(batches):
        assert {outcome for outcome, _ in batch} <= ENDS_OF_A_LINK
        assert all(digest == digests[row] for outcome, digest in batch if outcome == SUCCESS)
    assert unlinked in ([SUCCESS, [SUCCESS]], ["LLM_UNLINK_FAILED", ["LLM_LINK_BUSY"]])
    works = unlinked[0] != SUCCESS
    pulled = stage.d.outcome("pull", key=by_id(1, 1), name="dst0")
    assert pulled == (SUCCESS if works else "LLM_NOT_YET_LINK")


def test_b15_links_come_and_go_while_threads_pull(stage: Stage) -> None:
    digests = stage.allocate(1)
    for row in range(THREADS):
        stage.p.call("remove_key", key=req(1, row))
    pulls = [_pull_and_look(f"dst{row}", by_id(1, 1, row)) * 50 for row in range(THREADS)]
    turns = [("unlink", {"ids": [1]}), ("link", {"ids": [1]})] * 25
    said = stage.d.parallel([*pulls, turns])
    assert [answer.value for answer in said[-1]] == [[SUCCESS, [SUCCESS]]] * 50
    for row, batch in enumerate(said[:-1]):
        pairs = [(pulled.outcome, looked.value) for _, pulled, looked in zip(*[iter(batch)] * 3, strict=True)]
        assert {outcome for outcome, _ in pairs} <= ENDS_OF_A_LINK
        assert {digest for outcome, digest in pairs if outcome == SUCCESS} <= {digests[row]}
        assert {digest for outcome, digest in pairs if outcome != SUCCESS} <= {UNTOUCHED}
    assert stage.d.outcome("pull", key=by_id(1, 1), name="dst0") == SUCCESS
