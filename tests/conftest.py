"""Fixtures of all tests: a namespace of their own, other processes in it, a cluster in this process, seeded numbers."""
from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skips
from peer import Namespace, Peer, StartPeer
from rounds import LONGER, rounds_of

from shmkv import life_file


def _interrupt(number: int, _: object) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def pytest_configure(config: pytest.Config) -> None:
    """Whoever ends a run by SIGTERM, too, leaves no process and no name behind."""
    signal.signal(signal.SIGTERM, _interrupt)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """More rounds have more time: a mark of a test counts for more than --timeout does."""
    for item in items if LONGER > 1 else ():
        mark = item.get_closest_marker("timeout")
        seconds = mark.args[0] if mark and mark.args else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(seconds * LONGER), append=False)


def _hold_to_list(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skip that skips.txt does not account for is a failure."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        wrong = skips.complaint(report.nodeid, str(reason))
        if wrong:
            report.outcome, report.longrepr = "failed", wrong


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _hold_to_list(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """A module that skips itself."""
    report = yield
    _hold_to_list(report)
    return report


@pytest.fixture
def namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Namespace]:
    """A namespace that no other test shares; the test fails if one of its names is left in /dev/shm."""
    own = Namespace(tmp_path)
    monkeypatch.setenv("SHMKV_NAMESPACE", own.name)
    yield own
    complaints = own.close()
    assert not complaints, "\n".join(complaints)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that are the same in each run of a test, and others in another test."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def rounds(request: pytest.FixtureRequest) -> Callable[[int], int]:
    """rounds(n): n times the factor SHMKV_ROUNDS, at least 1; with "full" as often as the test's field case says."""
    return lambda few: rounds_of(request.node.name, few)


@pytest.fixture
def name(namespace: Namespace) -> Iterator[str]:
    """A name prefix; a member that a test left behind is made to leave."""
    yield namespace.name
    life = life_file._life_files.pop(namespace.name, None)
    if life is not None:
        os.close(life.fd)


@pytest.fixture
def prompt(namespace: Namespace) -> StartPeer:
    """prompt(cluster_id=1, env=None, raw=None, **options): a process with role PROMPT."""

    def start(cluster_id: int = 1, **more: Any) -> Peer:
        return namespace.start_cluster("PROMPT", cluster_id, **more)

    return start


@pytest.fixture
def decoder(namespace: Namespace) -> StartPeer:
    """decoder(cluster_id=2, link=(1,), env=None, raw=None, **options): a linked process with role DECODER."""

    def start(cluster_id: int = 2, link: tuple[int, ...] = (1,), **more: Any) -> Peer:
        peer = namespace.start_cluster("DECODER", cluster_id, **more)
        if link:
            assert peer.call("link", ids=link) == ["LLM_SUCCESS", ["LLM_SUCCESS"] * len(link)]
        return peer

    return start


@pytest.fixture
def here(namespace: Namespace) -> Iterator[Callable[..., Any]]:
    """here(role, cluster_id=1, raw=None, **options): an LLMDataDist initialised here, finalized afterwards."""
    from shmkv import LLMConfig, LLMDataDist, LLMRole

    made: list[Any] = []

    def make(role: str, cluster_id: int = 1, raw: dict[str, str] | None = None, **options: Any) -> Any:
        config = LLMConfig()
        for name, value in {"sync_kv_timeout": 20000, **options}.items():
            setattr(config, name, value)
        dist = LLMDataDist(LLMRole[role], cluster_id)
        made.append(dist)
        dist.init({**config.generate_options(), **(raw or {})})
        return dist

    yield make
    for dist in reversed(made):
        dist.finalize()
