"""Field case FR-060: the wheel as installed heals what a killed holder left, and nothing of that is compiled out in silence."""
from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import builds
import pytest
from peer import Namespace, Peer, by_id
from reference import SUCCESS, geometry, pattern

pytestmark = pytest.mark.timeout(builds.BUILD_DEADLINE_S + 300)
RUNNING = f"{sys.version_info.major}.{sys.version_info.minor}"
OTHERS = [f"3.{minor}" for minor in range(10, 15) if f"3.{minor}" != RUNNING]
RIGHT = pattern(geometry(4, [2, 8], 2), 1)[:, :, 0].tolist()
_HOLD = """
import ctypes, memory
from shmkv import _link_record
from shmkv._futex import LockWord
region, side = {region}, memory.{side}
word = memory.word(region, "LinkRecord", _link_record.find(region, 2)[0][0], "LinkRecord", "word")
agent.word = LockWord(region, ctypes.addressof(word), side)
result = agent.word.acquire(10000)
"""
HELD_BY_PROMPT = _HOLD.format(region="agent.dist._cluster.directory.region", side="ACCEPTOR")
HELD_BY_DECODER = _HOLD.format(region="agent.dist._links.handle(1).directory", side="INITIATOR")


def _run(arguments: Sequence[str | Path], folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("SHMKV_")}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=builds.BUILD_DEADLINE_S)
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"


def _wheel(python: str, folder: Path, *options: str) -> Path:
    """A wheel of the sources as they are, with what the ordinary build has compiled already."""
    _run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", *options, "--wheel-dir", folder, builds.build("plain")], folder)
    return next(folder.glob("shmkv-*.whl"))


@pytest.fixture
def installed(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The wheel of this Python in a folder of its own, and every process of the namespace uses it."""
    target = tmp_path / "installed"
    wheel = _wheel(sys.executable, tmp_path, "--no-build-isolation")
    _run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", target, wheel], tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(target))
    return target


def _interpreter(version: str) -> str | None:
    """A Python that can make virtual environments: on PATH, or one of pyenv's, whose commands on PATH run a chosen one alone."""
    home = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    found = [f"python{version}", *sorted(glob.glob(f"{home}/versions/{version}.*/bin/python{version}"))]
    return next((python for python in found if shutil.which(python) and _makes_environments(python)), None)


def _makes_environments(python: str) -> bool:
    return subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.fixture(params=OTHERS)
def environment(request: pytest.FixtureRequest, namespace: Namespace, tmp_path: Path) -> Path:
    """A virtual environment of another supported Python with the wheel, and every process of the namespace runs there."""
    python = _interpreter(request.param)
    if python is None:
        pytest.skip(f"needs Python {request.param}")
    wheel = _wheel(python, tmp_path)
    folder = tmp_path / "environment"
    _run([python, "-m", "venv", folder], tmp_path)
    _run([folder / "bin/python", "-m", "pip", "install", "--quiet", wheel], tmp_path)
    namespace.python = str(folder / "bin/python")
    return folder


def _cluster(namespace: Namespace, role: str, cluster_id: int, where: Path) -> Peer:
    peer = namespace.start_cluster(role, cluster_id)
    assert str(peer.call("execute", code="result = shmkv.__file__")).startswith(str(where)), "the wheel, not the sources"
    return peer


def _decoder(namespace: Namespace, where: Path) -> Peer:
    d = _cluster(namespace, "DECODER", 2, where)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    d.call("allocate", name="kv")
    return d


def _after_killed_holders(namespace: Namespace, where: Path) -> list[Any]:
    """First the owner of the lock's record, then the other side; the bytes that who is left pulls with a new one of the same id."""
    p, d = _cluster(namespace, "PROMPT", 1, where), _decoder(namespace, where)
    p.call("allocate", name="kv")
    assert p.call("execute", code=HELD_BY_PROMPT) is True
    d.send("pull", key=by_id(1, 1), name="kv")
    p.kill()
    answer = d.receive()
    assert (answer.outcome, answer.ms < 10000) == ("LLM_WAIT_PROCESS_TIMEOUT", True), "well before the deadline of 20 s"
    d.call("unlink", ids=[1])
    p = _cluster(namespace, "PROMPT", 1, where)
    p.call("allocate", name="kv")
    p.call("fill", name="kv", generation=1)
    assert d.call("link", ids=[1]) == [SUCCESS, [SUCCESS]]
    found = [_pulled(d)]
    assert d.call("execute", code=HELD_BY_DECODER) is True
    d.kill()
    return [*found, _pulled(_decoder(namespace, where))]


def _pulled(d: Peer) -> Any:
    assert d.outcome("pull", key=by_id(1, 1), name="kv") == SUCCESS
    return d.read("kv")[:, :, 0].tolist()


def test_fr_060_a_killed_holder_in_the_wheel_as_installed(namespace: Namespace, installed: Path) -> None:
    assert _after_killed_holders(namespace, installed) == [RIGHT, RIGHT]


@pytest.mark.soak           # the package is compiled once more for each; `make test` has the running Python alone
def test_fr_060_a_killed_holder_with_each_supported_python(namespace: Namespace, environment: Path) -> None:
    assert _after_killed_holders(namespace, environment) == [RIGHT, RIGHT]


# -- what the build needs --------------------------------------------------------------------------------------------------

# The only conditions on what a compiler or a C library has; each is about a number that Linux has fixed, or about the processor.
CONDITIONS = {
    "_attached.pyx": ["ifndef MADV_POPULATE_READ"], "_life.pyx": ["ifndef F_OFD_GETLK"], "_dlpack.pxd": ["ifndef SHMKV_DLPACK"],
    "_futex.pxd": ["ifndef SYS_futex_waitv"], "_peer_memory.pyx": ["ifndef PR_SET_PTRACER"],
    "_crash.pxd": ["ifdef SHMKV_CRASH_POINTS"],
    "_kernels.h": ["ifndef SHMKV_KERNELS_H", "if defined(__x86_64__) && !defined(SHMKV_PORTABLE_ONLY)", *["if SHMKV_X86"] * 3],
}
NEEDED = [("_futex", "sys/syscall.h", "SYS_futex"), ("_futex", "linux/futex.h", "FUTEX_WAIT_BITSET"),
          ("_futex", "linux/futex.h", "FUTEX_WAKE"), ("_life", "fcntl.h", "F_WRLCK"), ("_mapping", "sys/mman.h", "MAP_POPULATE")]


def test_fr_060_nothing_is_left_out_by_a_condition() -> None:
    package = builds.ROOT / "shmkv"
    found = {path.name: re.findall(r"^ *# *((?:el)?if.*)$", path.read_text(), re.MULTILINE)
             for path in sorted(package.iterdir()) if path.suffix in (".pyx", ".pxd", ".h")}
    assert {name: lines for name, lines in found.items() if lines} == CONDITIONS


def _compile(module: str, shadow: Path) -> subprocess.CompletedProcess[str]:
    """Check the C of a module, with the folder `shadow` before the folders of system headers."""
    source = builds.build("plain") / "shmkv" / f"{module}.c"
    return subprocess.run(["cc", "-std=c11", "-fsyntax-only", f"-I{shadow}", f"-I{sysconfig.get_path('include')}", str(source)],
                          capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("module", "header", "name"), NEEDED, ids=[name for _, _, name in NEEDED])
def test_fr_060_the_build_fails_where_a_call_is_missing(tmp_path: Path, module: str, header: str, name: str) -> None:
    shadow = tmp_path / header
    shadow.parent.mkdir(exist_ok=True)
    shadow.write_text(f"#include_next <{header}>\n")
    assert _compile(module, tmp_path).returncode == 0
    shadow.write_text(f"#include_next <{header}>\n#undef {name}\n")
    done = _compile(module, tmp_path)
    assert done.returncode != 0
    assert name in done.stderr
