"""The programs of examples/llm_datadist, each as two processes by `shmkv run`: they compare every byte, and would notice."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peer import Namespace

pytestmark = pytest.mark.timeout(180)
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "llm_datadist"
WATCHDOG_S = 60
RIGHT = re.compile(r"^ok: .*: (\d+) bytes are right$", re.MULTILINE)

# How many bytes the two processes of each compare, and how many lines they say, told here once more.
CACHES = {"pull_cache": 8 * 4 * 32 * 64 * 2, "pull_blocks": 6 * 12 * 16 * 2 * 32 * 4, "switch_role": 6 * 2 * 128 * 16 * 2,
          "transfer_layers": 10 * 3 * 64 * 32 * 2, "push_cache": 8 * 3 * 48 * 32 * 2, "push_blocks": 6 * 9 * 16 * 40 * 4,
          "cache_to_blocks": 6 * 10 * 16 * 40 * 2}
SAID = {
    "pull_cache": (4, 3 * CACHES["pull_cache"]),
    "pull_blocks": (5, 4 * CACHES["pull_blocks"] + CACHES["pull_blocks"] // 3),
    "switch_role": (3, CACHES["switch_role"] * 3 // 2),
    "transfer_layers": (3, CACHES["transfer_layers"]),
    "push_cache": (2, CACHES["push_cache"]),
    "push_blocks": (1, CACHES["push_blocks"]),
    "cache_to_blocks": (6, 3 * CACHES["cache_to_blocks"]),
}


def both(name: str, namespace: Namespace, *, decoder_seed: int = 5) -> dict[str, subprocess.CompletedProcess[str]]:
    """Both processes to their ends."""
    started = {}
    for role, seed in (("prompt", 5), ("decoder", decoder_seed)):
        arguments = [role, "--meet", namespace.name, "--seed", str(seed)]
        command = [sys.executable, "-m", "shmkv", "run", str(FOLDER / f"{name}.py"), *arguments]
        started[role] = subprocess.Popen(command, env=namespace.environment({}), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                         text=True)
    ended = {}
    try:
        for role, process in started.items():
            out, err = process.communicate(timeout=WATCHDOG_S)
            ended[role] = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    finally:
        for process in started.values():
            process.kill()
    return ended


def test_each_program_is_tested_and_names_llm_datadist_alone() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*SAID, "common"}
    for path in FOLDER.glob("*.py"):
        tree = ast.parse(path.read_text())
        froms = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names = {alias.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert "llm_datadist" in froms
        names |= {module.partition(".")[0] for module in froms if module}
        assert not names - {*sys.stdlib_module_names, "numpy", "llm_datadist", "common"}


@pytest.mark.parametrize("name", SAID)
def test_every_byte_is_right(namespace: Namespace, name: str) -> None:
    ended = both(name, namespace)
    said = "".join(done.stdout for done in ended.values())
    assert [(done.returncode, done.stderr) for done in ended.values()] == [(0, "")] * 2, said
    lines = said.splitlines()
    assert all(line.startswith("ok: ") for line in lines)
    assert (len(lines), sum(map(int, RIGHT.findall(said)))) == SAID[name]
    assert namespace.names() == set(), "nothing is left in /dev/shm"


@pytest.mark.parametrize(("role", "other"), [("prompt", "decoder"), ("decoder", "prompt")])
def test_who_waits_in_vain_says_a_sentence(namespace: Namespace, role: str, other: str) -> None:
    code = ("import shmkv; shmkv.install_as_llm_datadist(); import common; common.DEADLINE_S = 0.05; "
            f"common.Meeting(common.Arguments({role!r}, {namespace.name!r}, 1))")
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, env=namespace.environment({}), capture_output=True, text=True,
                          timeout=WATCHDOG_S, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert f"no {other} process came" in done.stderr


@pytest.mark.parametrize("name", SAID)
def test_wrong_bytes_are_noticed(namespace: Namespace, name: str) -> None:
    ended = both(name, namespace, decoder_seed=6)
    assert [done.returncode for done in ended.values()] == [1, 1]
    assert re.search(r"^WRONG: .*tensor 0 differs from byte \d+ on$", ended["decoder"].stderr, re.MULTILINE)
    assert ended["prompt"].stderr == "the other process has ended\n"
