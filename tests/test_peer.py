"""The harness itself: a peer that crashes, hangs or complains must fail its test and say why."""
from __future__ import annotations

from typing import Any

import peer as harness
import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(60)


def test_values_and_ranges_cross_the_pipe(namespace: Namespace) -> None:
    agent = namespace.start()
    said = agent.call("batch", commands=[("execute", {"code": "result = [1, 2**64 - 1, None, 'é']"})])
    assert said[0]["value"] == [1, 2**64 - 1, None, "é"]
    assert agent.call("execute", code="result = str(agent)") != ""


def test_error_of_the_other_process_is_an_answer(namespace: Namespace) -> None:
    answer = namespace.start().attempt("execute", code="raise UnicodeError('on purpose')")
    assert answer.outcome == "UnicodeError"
    assert "ValueError" in answer.kinds
    assert answer.text == "on purpose"
    assert answer.ms >= 0


def test_call_fails_with_the_trace_of_the_other_process(namespace: Namespace) -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        namespace.start().call("execute", code="1 / 0")


def test_peer_that_ends_fails_the_test(namespace: Namespace) -> None:
    agent = namespace.start()
    with pytest.raises(pytest.fail.Exception, match="exit code 5"):
        agent.call("execute", code="import os; os._exit(5)")
    assert namespace.somebody_died


def test_peer_that_hangs_is_killed_and_shows_its_stack(namespace: Namespace,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    agent = namespace.start()
    agent.call("execute", code="result = 1")
    with monkeypatch.context() as hasty:
        hasty.setattr(harness, "WATCHDOG_S", 0.1)
        with pytest.raises(pytest.fail.Exception, match=r"no answer[\s\S]*in execute"):
            agent.call("execute", code="import threading; threading.Event().wait()")


def test_stopped_peer_goes_on(namespace: Namespace) -> None:
    agent = namespace.start()
    agent.stop()
    agent.send("execute", code="result = 7")
    agent.cont()
    assert agent.receive().value == 7


def test_complaint_on_stderr_fails_the_test(namespace: Namespace) -> None:
    agent = namespace.start()
    agent.call("execute", code="import sys; sys.stderr.write('a destructor complains')")
    with pytest.raises(pytest.fail.Exception, match="a destructor complains"):
        agent.close()


@pytest.mark.parametrize("left", [".life", ".c.1.2"])
def test_name_left_in_shared_memory_is_found(tmp_path: Any, left: str) -> None:
    own = Namespace(tmp_path)
    (harness.SHM / f"{own.name}{left}").write_bytes(b"")
    assert own.close() == [f"left behind in {harness.SHM}: {own.name}{left}"]
    assert own.names() == set()
