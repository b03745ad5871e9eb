"""Builds of the package beside the ordinary one: with crash points, with sanitizers, with counts of lines, or with an edit.

Each stands in a folder of its own under `build/` (or `SHMKV_BUILDS`), is made when it is first asked for and brought up to date
when a source has changed since. A process uses one by having its folder first on PYTHONPATH (`environment`).

`SHMKV_BUILD_INSTEAD=<kind>` (of reached.py) puts one kind, which is up to date, in the place of all; `FIRST` is looked into before
it.
"""
from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILDS = Path(os.environ.get("SHMKV_BUILDS", ROOT / "build" / "instrumented"))
BUILD_DEADLINE_S = 900
INSTEAD = os.environ.get("SHMKV_BUILD_INSTEAD", "")
FIRST = BUILDS / "reached"
COUNTS = Path(__file__).resolve().parent / "c" / "dump_counts.h"
SUFFIXES = {".py", ".pyi", ".pyx", ".pxd", ".h", ".typed"}

# The switches of setup.py that make each kind.
SWITCHES: dict[str, dict[str, str]] = {
    "plain": {},
    "crash": {"SHMKV_CRASH_POINTS": "1"},
    "address": {"SHMKV_SANITIZE": "address,undefined"},
    "thread": {"SHMKV_SANITIZE": "thread"},
    "coverage": {"SHMKV_COVERAGE": "1", "SHMKV_CRASH_POINTS": "1", "CFLAGS": f"-include {COUNTS}"},
}
# The runtime library that has to be loaded before Python.
RUNTIME = {"address": "libasan.so", "thread": "libtsan.so"}
SANITIZER_OPTIONS = {
    # Python keeps what it allocated at exit; the suite looks for leaks of its own.
    "address": {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1",
                "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1"},
}


@dataclass(frozen=True)
class Edit:
    """One place of a source, named by a text that stands there exactly once, and what it becomes."""

    file: str
    old: str
    new: str

    def apply(self, package: Path) -> None:
        path = package / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.file} has {text.count(self.old)} places that read {self.old!r}"
        path.write_text(text.replace(self.old, self.new))


def build(kind: str) -> Path:
    """The folder of a build of this kind, up to date."""
    if INSTEAD:
        return BUILDS / INSTEAD
    return _make(kind, kind, ())


def build_edited(kind: str, name: str, edits: Sequence[Edit], start: Path | None = None) -> Path:
    """The same with edits to its sources, under a name of its own; starts from what `build(kind)`, or another one, has compiled."""
    kind = INSTEAD or kind
    return _make(f"{kind}-{name}", kind, edits, start=start or build(kind))


def _make(folder: str, kind: str, edits: Sequence[Edit], start: Path | None = None) -> Path:
    target = BUILDS / folder
    BUILDS.mkdir(parents=True, exist_ok=True)
    with _locked(BUILDS / f"{folder}.lock"):
        if start is not None and not target.exists():
            shutil.copytree(start, target)          # with times, so that only what is edited is compiled again
        _copy_sources(target, edits)
        subprocess.run([sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"], cwd=target, check=True,
                       env={**_without_switches(), **SWITCHES[kind]}, timeout=BUILD_DEADLINE_S, stdout=sys.stderr)
    return target


def _without_switches() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("SHMKV_") and name != "PYTHONPATH"}


def _copy_sources(target: Path, edits: Sequence[Edit]) -> None:
    """Bring what differs from here, so that nothing else is compiled again; files that are gone here go there."""
    package = ROOT / "shmkv"
    fresh = target.with_name(target.name + ".fresh")
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(package, fresh / "shmkv", ignore=lambda folder, names: [
        name for name in names if name == "__pycache__" or ((Path(folder) / name).is_file() and Path(name).suffix not in SUFFIXES)])
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, fresh)
    for edit in edits:
        edit.apply(fresh / "shmkv")
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    for path in wanted:
        _update(fresh / path, target / path)
    for path in list((target / "shmkv").rglob("*")):
        if path.suffix in SUFFIXES and path.relative_to(target) not in wanted:
            path.unlink()
    shutil.rmtree(fresh)


def _update(source: Path, target: Path) -> None:
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)                 # with the time of now: newer than whatever was compiled


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def environment(kind: str, folder: Path) -> dict[str, str]:
    """Variables with which a Python process uses the build in `folder`. (`python -c` looks into the current folder first.)"""
    if INSTEAD:
        return {"PYTHONPATH": os.pathsep.join([str(FIRST), str(folder), str(ROOT / "tests")])}
    env = {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests")]), **SANITIZER_OPTIONS.get(kind, {})}
    if kind in RUNTIME:
        env["LD_PRELOAD"] = _runtime_library(RUNTIME[kind])
    return env


def _runtime_library(name: str) -> str:
    """Where the compiler has a sanitizer's library; its plain name comes back when it has none."""
    asked = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True, check=True, timeout=60)
    return asked.stdout.strip()
