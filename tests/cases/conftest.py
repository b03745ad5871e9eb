"""Fixtures of the field cases: a /dev/shm of its own, an interposer, calls looked at."""
from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import pytest
from agent_code import enter_private_shm, join_private_shm
from interposed import Interposer
from peer import Namespace, Peer

SOURCES = Path(__file__).with_name("scripts")


@pytest.fixture(scope="session")
def preload(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """preload("interpose"): scripts/interpose.c as a library that is loaded before libc, compiled once."""
    folder = tmp_path_factory.mktemp("preload")

    @lru_cache
    def made(name: str) -> Path:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        library = folder / f"{name}.so"
        source = SOURCES / f"{name}.c"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True, timeout=60)
        return library

    return made


@pytest.fixture(scope="session")
def interposer_library(preload: Callable[[str], Path]) -> Path:
    """The library that writes down calls and makes some of them fail."""
    return preload("interpose")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, which tmp_path is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def interposer(interposer_library: Path, open_folder: Path) -> Interposer:
    """The interposer with a log of this test that any user can write."""
    return Interposer(interposer_library, open_folder / "calls")


class PrivateShm:
    """Processes that see a tmpfs of their own at /dev/shm: start() makes another one in it."""

    def __init__(self, namespace: Namespace, options: str) -> None:
        self._namespace = namespace
        self.first = namespace.start()
        self.first.call("execute", code=enter_private_shm(options))

    def start(self, env: dict[str, str] | None = None) -> Peer:
        """A process that has imported the library, inside."""
        peer = self._namespace.start(env)
        peer.call("execute", code=join_private_shm(self.first.pid))
        return peer

    def cluster(self, role: str, cluster_id: int, env: dict[str, str] | None = None) -> Peer:
        """An initialised process, inside."""
        peer = self.start(env)
        peer.call("init", role=role, cluster_id=cluster_id, options={"sync_kv_timeout": 20000}, raw={})
        return peer

    @property
    def path(self) -> Path:
        """Where this test, outside, sees that directory."""
        return Path(f"/proc/{self.first.pid}/root/dev/shm")

    def names(self) -> list[str]:
        return sorted(os.listdir(self.path))


@pytest.fixture
def private_shm(namespace: Namespace) -> Callable[[str], PrivateShm]:
    """private_shm("size=1m"): a mount namespace with its own /dev/shm."""
    if os.geteuid() != 0:
        pytest.skip("needs root for a mount namespace")
    return lambda options: PrivateShm(namespace, f"mode=1777,{options}")


@pytest.fixture
def memory_cgroup(namespace: Namespace) -> Iterator[Callable[[Peer, int], None]]:
    """memory_cgroup(peer, limit): the peer goes on in a new memory cgroup, limited to that many bytes."""
    parent, limit_file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
    if not parent.is_dir():
        parent, limit_file = Path("/sys/fs/cgroup"), "memory.max"
    group = parent / namespace.name
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs a memory cgroup of its own: {error}")

    def enter(peer: Peer, limit: int) -> None:
        (group / limit_file).write_text(str(limit))
        (group / "cgroup.procs").write_text(str(peer.pid))

    try:
        yield enter
    finally:
        for pid in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(pid)
        group.rmdir()
