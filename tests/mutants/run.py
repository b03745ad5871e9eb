"""Seeded code mutants: each is built alone and run against the tests; one that no test notices is a hole in them.

    make mutants            all of `seeded.py`: a table on the screen, build/mutants.json with every verdict
    python tests/mutants/run.py _plan.pyx _futex.pyx    those of some files
    python tests/mutants/run.py --go-on                 what an earlier run, that was ended, has not judged yet
    python tests/mutants/run.py --own                   only the modules' own tests, which are quick; judges only what they kill

A mutant is killed when a test fails, crashes or does not end in time. Its module's own tests come first, then the processes of
the contract, then the cases of the field; a failure there counts when the same test fails once more, and passes without the
mutant. A mutant that does not compile is a fault of `seeded.py`.
"""
from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))
import builds  # noqa: E402
from peer import SHM  # noqa: E402
from seeded import MUTANTS  # noqa: E402

RESULTS = builds.ROOT / "build" / "mutants.json"
STAGE_DEADLINE_S = 600
REQUIRED = 0.9

# What is run first: the tests of the module itself.
OWN: dict[str, list[str]] = {
    "_kernels.h": ["test_kernels.py", "test_copy.py"],
    "_copy.pyx": ["test_copy.py", "test_crew.py"],
    "_plan.pyx": ["test_plan.py", "test_core.py"],
    "_futex.pyx": ["test_futex.py", "test_thread_queue.py"],
    "_link.pyx": ["test_core.py", "test_link_handle.py", "contract/test_b_links.py", "cases/test_links.py"],
    "_link_handle.pyx": ["test_link_handle.py", "processes/test_link_end.py", "contract/test_b_links.py"],
    "_link_record.pyx": ["test_link_record.py", "contract/test_b_links.py"],
    "_lookup.pyx": ["test_lookup.py", "test_directory.py", "test_core.py", "test_changes_during_pull.py"],
    "_kept_plans.pyx": ["test_plan.py", "test_core.py", "test_pull_calls.py"],
    "_coverage.pyx": ["test_lookup.py", "test_directory.py", "test_core.py", "test_changes_during_pull.py"],
    "_local.pyx": ["test_core.py", "test_caches.py", "test_pull_calls.py"],
    "_within.pyx": ["test_core.py", "test_copy.py", "contract/test_a5_pull_and_copy.py"],
    "_cache_records.pyx": ["test_directory.py", "test_lookup.py", "test_core.py", "test_index.py", "test_caches.py"],
    "_directory.pyx": ["test_directory.py", "test_lookup.py", "test_core.py", "test_index.py", "test_caches.py"],
    "_index.pyx": ["test_index.py", "test_directory.py", "test_caches.py"],
    "_carry.pyx": ["test_core.py", "test_pull_calls.py", "test_mapping.py", "test_scribbled.py"],
    "_core.pyx": ["test_core.py", "test_pull_calls.py", "test_mapping.py", "test_changes_during_pull.py"],
}
LATER = (["contract", "processes"], ["cases"])
# Fails without any mutant when the processors are busy: it must not make a mutant look killed.
UNSTEADY = ["contract/test_b_concurrency.py::test_b15_puller_finalizes_while_its_threads_pull"]


@dataclass(frozen=True)
class Verdict:
    file: str
    old: str
    new: str
    killed_by: str                      # "" = it survived
    seconds: float


def judge(edit: builds.Edit, *, own_only: bool) -> Verdict:
    begin = time.monotonic()
    folder = builds.build_edited("plain", "mutant", [edit])
    killed_by = _first_failure(folder, OWN[edit.file])
    for tests in () if own_only else LATER:
        killed_by = killed_by or _certain_failure(folder, tests)
    return Verdict(edit.file, edit.old.strip(), edit.new.strip(), killed_by.replace("../", ""), round(time.monotonic() - begin, 1))


def _certain_failure(folder: Path, tests: list[str]) -> str:
    """A failure among tests with many processes, unless it comes and goes with how busy the processors are."""
    passed_over: list[str] = []
    while failed := _first_failure(folder, tests, passed_over):
        name = failed.replace("../", "").removeprefix("tests/")
        if "::" not in name or (_first_failure(folder, [name]) and not _first_failure(builds.build("plain"), [name])):
            return failed
        passed_over.append(name)
    return ""


def _first_failure(folder: Path, tests: list[str], passed_over: Sequence[str] = ()) -> str:
    """Which test fails first with the package in `folder`, or how the run ended; "" if all pass.

    The current folder is the build's, so that `python -m` and `python -c` find it, too."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "--timeout=60",
               "-c", str(builds.ROOT / "pyproject.toml"), f"--rootdir={builds.ROOT}", "-m", "not llm and not engines and not soak",
               *(f"--deselect=tests/{name}" for name in (*UNSTEADY, *passed_over)), *(str(TESTS / name) for name in tests)]
    with subprocess.Popen(command, cwd=folder, env={**os.environ, **builds.environment("plain", folder)}, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as run:
        try:
            said, _ = run.communicate(timeout=STAGE_DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(run.pid, signal.SIGKILL)
            return "ran into its deadline"
        finally:
            _sweep_after(run.pid)
    if run.returncode == 0:
        return ""
    named = [line.split(" - ")[0].split(" ", 1)[1] for line in said.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return named[0] if named else f"the run ended with {run.returncode}"


def _sweep_after(pid: int) -> None:
    """A run that crashed or was killed left its namespaces (`peer.Namespace`) behind."""
    for left in SHM.glob(f"t{pid:x}-*"):
        left.unlink(missing_ok=True)


def _judged() -> list[Verdict]:
    return [Verdict(**verdict) for verdict in json.loads(RESULTS.read_text())] if RESULTS.exists() else []


def main(arguments: list[str]) -> int:
    files = [argument for argument in arguments if not argument.startswith("--")]
    verdicts = _judged() if "--go-on" in arguments else []
    done = {(verdict.file, verdict.old, verdict.new) for verdict in verdicts}
    chosen = [edit for edit in MUTANTS if (not files or edit.file in files)
              and (edit.file, edit.old.strip(), edit.new.strip()) not in done]
    builds.build = functools.cache(builds.build)            # it does not change during a run
    if not verdicts:
        failed = _first_failure(builds.build("plain"), sorted({name for edit in chosen for name in OWN[edit.file]}))
        assert not failed, f"fails without a mutant: {failed}"
    for number, edit in enumerate(chosen, 1):
        verdict = judge(edit, own_only="--own" in arguments)
        verdicts += [verdict] if verdict.killed_by or "--own" not in arguments else []
        becomes = verdict.new.partition("\n")[0] or "(gone)"
        print(f"{number:3}/{len(chosen)} {verdict.seconds:6.1f} s  {edit.file:17} {becomes}\n"
              f"                  {verdict.killed_by or 'SURVIVED'}", flush=True)
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    killed = sum(bool(verdict.killed_by) for verdict in verdicts)
    print(f"{killed} of {len(verdicts)} killed: {killed / len(verdicts):.1%}, required {REQUIRED:.0%}; {RESULTS}")
    return killed < REQUIRED * len(verdicts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
