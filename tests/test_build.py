"""What a person meets who cannot build, has not built, or names the wrong Python: one sentence, and nothing half-made."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 60

# setup.py has to end before it uses anything of setuptools, which need not be installed where the tests run.
ELSEWHERE = """
import runpy, sys, types
sys.modules["setuptools"] = types.SimpleNamespace(Extension=None, setup=None)
sys.platform = sys.argv[1]
runpy.run_path("setup.py", run_name="__main__")
"""


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A program to its end, started in `folder`, with no variable that makes it find another shmkv or another make."""
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("PYTHON", "PYTHONPATH") and not name.startswith("MAKE")}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_setup_on_another_system_ends_with_one_sentence(platform: str) -> None:
    done = run([sys.executable, "-c", ELSEWHERE, platform], ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "shmkv needs Linux: it is built on POSIX shared memory, futexes and /proc.\n"


def test_import_of_an_unbuilt_source_tree_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "shmkv").mkdir()
    for source in (ROOT / "shmkv").glob("*.py"):
        shutil.copy(source, tmp_path / "shmkv")
    # Without site-packages: an editable install of the same name would lend its extensions to this tree.
    done = run([sys.executable, "-S", "-c", "import shmkv"], tmp_path)
    last = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stdout) == (1, "")
    assert last.startswith("ImportError: this is the source tree of shmkv, not built for this Python")


# -- the Makefile ------------------------------------------------------------------------------------------------------

@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the Makefile and nothing else."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    return tmp_path


def python_that(folder: Path, *, answers: str, makes: str) -> Path:
    """A program that stands for a Python: what it does for `-c`, and for anything else."""
    program = folder / "some-python"
    program.write_text(f'#!/bin/sh\nif [ "$1" = -c ]; then {answers}; else {makes}; fi\n')
    program.chmod(0o755)
    return program


def make_demo(clone: Path, *variables: str) -> subprocess.CompletedProcess[str]:
    return run(["make", "--no-print-directory", "demo", *variables], clone)


def test_python_that_is_too_old_leaves_no_environment(clone: Path) -> None:
    old = python_that(clone, answers="exit 1", makes="exit 1")
    done = make_demo(clone, f"PYTHON={old}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{old} is not Python 3.10 or newer")
    assert not (clone / ".venv").exists()


def test_environment_that_could_not_be_made_is_removed(clone: Path) -> None:
    broken = python_that(clone, answers=f'exec {sys.executable} "$@"', makes="mkdir -p .venv/bin; exit 3")
    done = make_demo(clone, f"PYTHON={broken}")
    assert done.returncode == 2
    assert "making .venv with" in done.stdout
    assert not (clone / ".venv").exists()


def test_somebodys_own_environment_is_left_when_nothing_could_be_made(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / "own").write_text("mine")
    broken = python_that(clone, answers=f'exec {sys.executable} "$@"', makes="exit 3")
    assert make_demo(clone, f"PYTHON={broken}").returncode == 2
    assert (clone / ".venv" / "own").read_text() == "mine"


def test_environment_of_another_python_than_the_named_one_is_told(clone: Path) -> None:
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".made").write_text("/elsewhere/python3.10\n")
    done = make_demo(clone, f"PYTHON={sys.executable}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f".venv was made with /elsewhere/python3.10, not with {sys.executable}: make clean first")
    assert (clone / ".venv" / ".made").exists()
