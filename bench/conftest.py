"""Options, the prompt process and this process's decoder, and the one table at the end."""
from __future__ import annotations

import os
import secrets
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import budgets
import cluster
import pytest
import report
from measure import Medians
from on_two import HELPER_ID, Helper
from programs import Process
from session import DECODER_ID, PROMPT_ID, Record, Run

import shmkv

FOLDER = Path(__file__).parent
DEFAULT_JSON = FOLDER.parent / "docs" / "bench.json"


RUN = pytest.StashKey[Run]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shmkv bench")
    group.addoption("--bench-json", type=Path, help=f"write the figures here (a whole run, uncut: {DEFAULT_JSON})")
    group.addoption("--bench-chart", type=Path, help="write a chart here (a whole run, uncut: beside the JSON)")
    group.addoption("--bench-document", type=Path, help="put the table between the marks of this Markdown file")
    group.addoption("--bench-rounds", type=float, default=1.0, help="cut the number of rounds, for trials: 0.1 is a tenth")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RUN] = Run(config.getoption("--bench-rounds"))
    config.option.benchmark_quiet = True        # one table is enough


def pytest_collection_finish(session: pytest.Session) -> None:
    there = {path.name for path in FOLDER.glob("bench_*.py")}
    chosen = session.config.getoption("keyword") or session.config.getoption("markexpr")
    run = session.config.stash[RUN]
    run.files = list(dict.fromkeys(item.path for item in session.items))
    run.is_whole = not chosen and there <= {path.name for path in run.files}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    outcome = yield
    if outcome.skipped and isinstance(outcome.longrepr, tuple):
        item.config.stash[RUN].skipped.append((item.name, outcome.longrepr[2].removeprefix("Skipped: ")))
    return outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    run = config.stash[RUN]
    if not (run.rows or run.skipped):
        return
    terminalreporter.section("shmkv bench")
    for name, reason in run.skipped:
        terminalreporter.write_line(f"left out: {name}: {reason}")
    if run.rows:
        _show(terminalreporter, config, run)


def _show(terminalreporter: pytest.TerminalReporter, config: pytest.Config, run: Run) -> None:
    about = report.machine(run.rows)
    run.rows = report.sort(run.rows)
    terminalreporter.write_line(report.table(run.rows))
    terminalreporter.write_line("\n" + report.LEGEND)
    kept, missed = budgets.verdicts(run.rows)
    for line in missed:
        terminalreporter.write_line(f"over budget: {line}")
    terminalreporter.write_line(f"{len(kept)} of {len(kept) + len(missed)} budgets kept")
    terminalreporter.write_line(report.machine_line(about))
    for path in _write(config, run, about):
        terminalreporter.write_line(f"written: {path}")


def _write(config: pytest.Config, run: Run, about: dict[str, Any]) -> list[Path]:
    """The files that were asked for; those of a whole run without being asked."""
    whole = run.is_whole and run.scale == 1     # what a trial measures is written only where the user says
    json_path = config.getoption("--bench-json") or (DEFAULT_JSON if whole else None)
    chart_path = config.getoption("--bench-chart") or (json_path.with_suffix(".png") if whole and json_path else None)
    document_path = config.getoption("--bench-document")
    command = run.command(FOLDER.parent)
    written = []
    if json_path:
        report.save(json_path, about, run.rows, command, run.scale)
        written.append(json_path)
    if document_path:
        report.document(document_path, {"command": command, "rounds_scale": run.scale, "machine": about}, run.rows)
        written.append(document_path)
    if chart_path and report.has_matplotlib():
        report.chart(chart_path, run.rows, report.machine_line(about))
        written.append(chart_path)
    return written


# -- fixtures ----------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="session")
def run(request: pytest.FixtureRequest) -> Run:
    return request.config.stash[RUN]


@pytest.fixture(scope="session")
def namespace() -> Iterator[str]:
    """Names of this run alone. This process copies on one thread; other processes are told otherwise where it matters."""
    name = f"bench-{secrets.token_hex(4)}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMKV_NAMESPACE", name)
        patch.setenv("SHMKV_COPY_THREADS", "1")
        patch.setenv("OPENBLAS_NUM_THREADS", "1")
        yield name
    left = [entry for entry in os.listdir("/dev/shm") if entry.startswith(name)]
    assert not left, f"left in /dev/shm: {left}"


@pytest.fixture(scope="session")
def prompt(namespace: str) -> Iterator[Process]:
    """The process whose caches are pulled."""
    with Process("prompt.py", str(PROMPT_ID)) as process:
        process.call("faults")
        yield process


@pytest.fixture(scope="session")
def decoder(prompt: Process) -> Iterator[shmkv.LLMDataDist]:
    """This process's cluster, linked to the prompt process."""
    dist = cluster.join(shmkv.LLMRole.DECODER, DECODER_ID)
    cluster.link(dist, PROMPT_ID)
    yield dist
    dist.finalize()


@pytest.fixture(scope="session")
def manager(decoder: shmkv.LLMDataDist) -> shmkv.KvCacheManager:
    return decoder.kv_cache_manager


@pytest.fixture(scope="module")
def two_threads(prompt: Process) -> Iterator[Helper]:
    """A second decoder process: it copies on two threads, where this one has a single one."""
    with Process("decoder.py", str(HELPER_ID), str(PROMPT_ID), env={"SHMKV_COPY_THREADS": "2"}) as process:
        yield Helper(process, process.call("threads"))


@pytest.fixture
def record(run: Run, benchmark: Any) -> Record:
    """record(row, medians, ours): fill a row from medians, keep it, and hand its figures to pytest-benchmark as well."""

    def keep(row: report.Row, medians: Medians, ours: str) -> report.Row:
        row.ours = medians[ours]
        row.times = {name: medians[name] for name in medians.samples if name != ours}
        row.quartiles = {name: medians.quartiles(name) for name in medians.samples}
        row.rounds = len(medians.samples[ours])
        run.rows.append(row)
        benchmark.extra_info[f"{row.group}: {row.name}"] = {
            "ours_ns": row.ours, "medians_ns": row.times, "ratios": {name: row.ratio(name) for name in row.times}}
        return row

    return keep


@pytest.fixture
def race(manager: shmkv.KvCacheManager, prompt: Process, run: Run, record: Record, benchmark: Any) -> Any:
    """For the files of peers/."""
    from beside import Race

    return Race(manager, prompt, run, record, benchmark)
