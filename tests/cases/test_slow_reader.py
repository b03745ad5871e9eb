"""Field cases FR-050 and FR-004: what happens to the source while a reader is stopped in the middle of its copy."""
from __future__ import annotations

import pytest
from agent_code import HEARD, LISTEN
from mid_copy import CONTENT, NEW, OLD, ONE, caught_in_the_middle, fill, stoppable
from peer import SHM, Namespace, StartPeer, by_id, req
from reference import SUCCESS
from shared_bytes import SharedFile, directory_of, segments_of

from shmkv import _layout

pytestmark = pytest.mark.timeout(600)     # the first one waits for a build
T_MS = 20000


@pytest.mark.parametrize("by_key", [True, False])
def test_fr_050_a_reader_that_stops_in_its_copy(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                by_key: bool) -> None:
    p, d = prompt(1), decoder(2, env=stoppable())
    caught_in_the_middle(p, d, req(1, 7) if by_key else by_id(1, 1))
    p.call("remove_key", key=req(1, 7))
    p.call("deallocate", name="old")
    p.call("collect")
    p.call("allocate", name="new", keys=[req(1, 7)], **ONE)
    fill(p, "new", NEW)
    d.cont()
    answer = d.receive()
    assert answer.outcome in (SUCCESS, "LLM_KV_CACHE_NOT_EXIST"), "the old bytes, or LLMException"
    content = d.call("execute", code=CONTENT)
    assert NEW not in content, "never a mix"
    if answer.outcome == SUCCESS:
        assert content == [OLD], "the old bytes in full"
    if by_key:
        assert answer.outcome == "LLM_KV_CACHE_NOT_EXIST", "the check is made after the last byte was copied"
    assert d.outcome("pull", key=req(1, 7), name="kv") == SUCCESS
    assert d.call("execute", code=CONTENT) == [NEW], "the next pull has the new bytes"


@pytest.mark.parametrize("what", ["header and record", "the owner dies", "the file is removed"])
def test_fr_004_a_pull_that_fails_in_the_middle(namespace: Namespace, prompt: StartPeer, decoder: StartPeer,
                                                what: str) -> None:
    p, d = prompt(1), decoder(2, env=stoppable())
    d.call("execute", code=LISTEN)
    caught_in_the_middle(p, d, req(1, 7))
    (name,) = segments_of(namespace, 1)
    if what == "the owner dies":
        p.kill()
    elif what == "the file is removed":
        (SHM / name).unlink()
    else:
        with SharedFile(name) as segment, SharedFile(directory_of(namespace, 1)) as directory:
            segment.bytes[:4096] = b"\xff" * 4096
            directory.put("CacheRecord", "word", directory.get("CacheRecord", "word") + (5 << 8))
    d.cont()
    answer = d.receive()
    if what == "the file is removed":
        assert (answer.outcome, d.call("execute", code=CONTENT)) == (SUCCESS, [OLD]), "what is mapped stays"
    else:
        assert "LLMException" in answer.kinds, "it is the LLMException of the real cause"
        assert "During handling" not in answer.trace, "nothing raised in cleanup took its place"
    assert answer.ms < T_MS / 2, "soon"
    assert d.call("execute", code=HEARD)[1] == [], "sys.unraisablehook was never called"
    with SharedFile(segments_of(namespace, 2)[0]) as destination:
        assert destination.bytes[_layout.SEGMENT_DATA] == OLD, "the destination is still there"
