"""Field case FR-080: headers and records full of numbers that no cluster writes, under the right owner and mode."""
from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from peer import Answer, Namespace, Peer, StartPeer, by_id, req
from reference import SUCCESS, canary, geometry, pattern
from shared_bytes import FIELDS, TABLES, SharedFile, directory_of, segments_of

pytestmark = pytest.mark.timeout(240)
ROWS = geometry(4, [2, 8], 2)
T_MS = 20000
EDGES = [0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, 4096, 64, 2**40]
# The lock word and the state of a link are not hostile data but a broken link, which is another case.
RECORDS = ["CacheRecord", "TensorRecord", "RowRecord", "DirectoryHeader", "EndedKey"]
BATCH = [("pull", {"key": key, "name": "kv", "src_cache_offset": 0})
         for key in (req(1, 7), by_id(1, 1), by_id(1, 1, 1), req(1, 8))]


class Victim:
    """P with two keyed rows, D with a link and a destination; D has to survive everything in one process."""

    def __init__(self, namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> None:
        self.p, self.d = prompt(1), decoder(2)
        self.p.call("allocate", name="kv", keys=[req(1, 7), req(1, 9)])
        self.p.call("fill", name="kv", generation=1)
        self.d.call("allocate", name="kv")
        self.d.call("canary", name="kv")
        self.right = [pattern(ROWS, 1)[:, :, row] for row in range(2)]

    def pull_all(self) -> list[Answer]:
        return self.d.batch(BATCH)

    def assert_answered(self, answers: list[Answer]) -> None:
        """Each answer is an LLMException in time, or success."""
        assert answers
        for answer in answers:
            assert answer.outcome == SUCCESS or "LLMException" in answer.kinds, answer.trace
            assert answer.ms < T_MS / 2, "no hang"

    def mend(self, answers: list[Answer]) -> None:
        """A link that took the damage for its peer's death stays broken: make it anew."""
        if any(answer.outcome in ("LLM_WAIT_PROCESS_TIMEOUT", "LLM_NOT_YET_LINK") for answer in answers):
            self.d.call("unlink", ids=[1], force=True)
            assert self.d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]

    def assert_works(self) -> None:
        self.mend(self.pull_all())
        self.d.call("canary", name="kv")
        answers = self.pull_all()
        assert [answer.outcome for answer in answers[:3]] == [SUCCESS] * 3, answers[0].text
        np.testing.assert_array_equal(self.d.read("kv")[:, :, 0], self.right[1], err_msg="right bytes afterwards")
        np.testing.assert_array_equal(self.d.read("kv")[:, :, 1], canary(ROWS)[:, :, 1], err_msg="canary row")


@pytest.fixture
def victim(namespace: Namespace, prompt: StartPeer, decoder: StartPeer) -> Victim:
    return Victim(namespace, prompt, decoder)


def _number(rng: np.random.Generator) -> int:
    """An edge, something near one, or anything at all."""
    kind = int(rng.integers(3))
    if kind == 2:
        return int(rng.integers(0, 2**64, dtype=np.uint64))
    return (EDGES[int(rng.integers(len(EDGES)))] + kind * int(rng.integers(-9, 10))) % 2**64


def _scribble(file: SharedFile, rng: np.random.Generator, start: int, nbytes: int) -> tuple[int, bytes]:
    """Overwrite up to 8 aligned bytes of a range, or a stretch of it: (offset, what was there)."""
    if rng.integers(4):
        offset, length = start + 8 * int(rng.integers(nbytes // 8)), 8
        new = _number(rng).to_bytes(8, "little")
        if rng.integers(2):
            offset, length, new = offset + 4 * int(rng.integers(2)), 4, new[:4]
    else:
        length = int(rng.integers(8, min(nbytes, 256) + 1))
        offset = start + int(rng.integers(nbytes - length + 1))
        new = rng.bytes(length)
    kept = file.bytes[offset:offset + length]
    file.bytes[offset:offset + length] = new
    return offset, kept


def test_fr_080_every_field_with_every_edge(namespace: Namespace, victim: Victim) -> None:
    with SharedFile(directory_of(namespace, 1)) as found:
        for struct, field in FIELDS:
            if struct not in RECORDS or field in ("key_waiters", "progress_waiters", "memory_waiters"):
                continue
            kept = found.get(struct, field)
            for value in EDGES:
                found.put(struct, field, value)
                victim.assert_answered(victim.pull_all())
            found.put(struct, field, kept)
            victim.assert_works()


def test_fr_080_random_records(namespace: Namespace, victim: Victim, rng: np.random.Generator,
                               rounds: Callable[[int], int]) -> None:
    with SharedFile(directory_of(namespace, 1)) as found:
        places = [(TABLES[record][1], TABLES[record][0] * (1 if record == "DirectoryHeader" else 8))
                  for record in RECORDS]
        places.append((TABLES["index entry"][1], 256 * 8))
        for number in range(rounds(4000)):
            undo = [_scribble(found, rng, *places[int(rng.integers(len(places)))])
                    for _ in range(int(rng.integers(1, 4)))]
            answers = victim.pull_all()
            victim.assert_answered(answers)
            for offset, kept in reversed(undo):
                found.bytes[offset:offset + len(kept)] = kept
            victim.mend(answers)
            if number % 200 == 0:
                victim.assert_works()
    victim.assert_works()


def test_fr_080_random_segment_headers(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                       rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    """Each cache is new to D, so that its header is looked at."""
    p, d = prompt(1, env={"SHMKV_RECYCLE_BYTES": "0"}), decoder(2)
    d.call("allocate", name="kv")
    for number in range(rounds(60)):
        cache_id = p.call("allocate", name="kv")
        (name,) = segments_of(namespace, 1)
        with SharedFile(name) as segment:
            _scribble(segment, rng, 0, 64 if number % 2 else 72)
            answer = d.attempt("pull", key=by_id(1, cache_id), name="kv")
        assert answer.outcome == SUCCESS or "LLMException" in answer.kinds, answer.trace
        p.call("deallocate", name="kv")
    cache_id = p.call("allocate", name="kv")
    assert d.outcome("pull", key=by_id(1, cache_id), name="kv") == SUCCESS


class Bomb:
    """What a pickle of this would do when it is loaded."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit(99)",))


def _init_answers(namespace: Namespace, peer: Peer, cluster_id: int) -> Answer:
    answer = peer.attempt("init", role="DECODER", cluster_id=cluster_id, options={"sync_kv_timeout": T_MS}, raw={})
    assert answer.outcome == SUCCESS or "LLMException" in answer.kinds, answer.trace
    return answer


def test_fr_080_hostile_members_and_headers_when_joining(namespace: Namespace, victim: Victim,
                                                         rng: np.random.Generator, rounds: Callable[[int], int]) -> None:
    joiner = namespace.start()
    slot_of_p = 0
    bomb = pickle.dumps(Bomb())
    directory = directory_of(namespace, 1)
    with SharedFile(f"{namespace.name}.members.v2") as table, SharedFile(directory) as found:
        record = table.place("MemberRecord", "incarnation", slot_of_p)[0]
        for number in range(rounds(150)):
            target, start, nbytes = [(table, record, 128), (table, 0, 128), (found, 0, 4096)][number % 3]
            undo = [_scribble(target, rng, start, nbytes)]
            if number % 10 == 0:
                undo.append((start, target.bytes[start:start + len(bomb)]))
                target.bytes[start:start + len(bomb)] = bomb
            if _init_answers(namespace, joiner, 5).outcome == SUCCESS:
                linked = joiner.attempt("link", ids=[1], timeout=5)
                assert linked.outcome == SUCCESS or "LLMException" in linked.kinds, linked.trace
            for offset, kept in reversed(undo):
                target.bytes[offset:offset + len(kept)] = kept
            joiner.call("finalize")
    assert directory in namespace.names(), "no living cluster's file was removed"
    joined = _init_answers(namespace, joiner, 5)
    assert joined.outcome == SUCCESS, joined.text
    assert joiner.call("link", ids=[1]) == [SUCCESS, [SUCCESS]], "and all is well when the damage is mended"
    victim.assert_works()
