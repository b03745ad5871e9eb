"""All that docs/reliability.md tells of, at length, and what it came to: make soak.

Two lines of parts run at the same time, one for each of two processors: the first has the tests that take longest. Each part is
a program of its own with a watchdog. Its output goes into the log as it is, one part behind the other, and at the end a table
with a row for each. Exit 1 if a part failed, did not end, or did less than it was asked for.

`make soak SOAK='--minutes 300'` does five times as much, `--minutes 6` a tenth (of the tests, which have their length, only what is
repeated); `--only storm fuzz` runs these parts alone, `--log FILE` says where to write.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rounds import CASES

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LOG = ROOT / "build" / "soak.log"
SHM = Path("/dev/shm")
USUAL_MINUTES = 60.0
ROUNDS = 2.0                        # SHMKV_ROUNDS of a usual run
KILLS, HOLDING, PULLS, STORM_MINUTES = 10_000, 500, 1_000_000, 15.0
INPUTS, FLIPPED, LIVE_S = 1_000_000, 100_000, 60.0
LEAST_PART = {"good_headers": 0.3, "copies": 0.05}       # of the fuzzer's inputs
STORM_SAYS = ("{kills:,} kills ({kills_a_s:.1f}/s), of these {holding:,} while holding a lock ({pushing:,} of them to push); "
              "{pulls:,} checked pulls ({pulls_a_s:,.0f}/s), {waited:,} of them could wait; {pushes:,} checked pushes "
              "({pushes_a_s:,.0f}/s); {pushed_by_key:,} pushes done by key; {looks:,} looks at views and forks; wrong or stale "
              "bytes {wrong_or_stale}, hangs {hangs}; seed {seed}")
SEED = 1
ORDER_S = 60.0                      # for a part that is told to end
LOOK_S = 0.2


@dataclass(frozen=True)
class Part:
    """A program, and the file in which it says what it has done."""

    name: str
    command: list[str]
    report: Path
    read: Callable[[Path], tuple[str, list[str]]]       # the counts as a person reads them, and what is wrong with them
    watchdog_s: float
    rounds: str = "1"                                   # SHMKV_ROUNDS


@dataclass(frozen=True)
class Ended:
    """What a part came to."""

    part: Part
    seconds: float
    counts: str
    faults: list[str]
    output: bytes

    @property
    def row(self) -> str:
        result = "; ".join(self.faults).replace("|", "/") or "no fault"
        return f"| {self.part.name} | {self.seconds / 60:.1f} | {self.counts} | {result} |"


# -- the parts ----------------------------------------------------------------------------------------------------------

def rounds_of(scale: float) -> float:
    return max(0.1, ROUNDS * scale)


def lines_of_parts(scale: float, folder: Path) -> tuple[list[Part], list[Part]]:
    """What runs one behind the other, in two lines: of `scale` times the usual length, with reports in a folder."""
    longer = 60 * max(1.0, scale)

    def suite(name: str, minutes: float, *files: str, rounds: str = f"{rounds_of(scale):g}") -> Part:
        report = folder / name
        command = ["-m", "pytest", "-q", "-m", "not llm and not engines", f"--junitxml={report}", *files]
        return Part(name, command, report, read_tests, minutes * longer, rounds)

    def fuzz(name: str, inputs: int, minutes: float, *options: str) -> Part:
        report, wanted = folder / name, max(1, round(inputs * scale))
        command = ["-m", "fuzz", "--jobs", "1", "--seed", str(SEED), "--json", str(report), "--inputs", str(wanted), *options]
        return Part(name, command, report, lambda path: read_fuzz(path, wanted, "--live" in options), minutes * longer)

    def storm(name: str, minutes: float) -> Part:
        report = folder / name
        command = ["-m", "torture", "--minutes", str(STORM_MINUTES * scale), "--kills", str(round(KILLS * scale)),
                   "--pulls", str(round(PULLS * scale)), "--json", str(report)]
        return Part(name, command, report, lambda path: read_storm(path, scale), minutes * longer)

    return ([suite("crash", 60, "tests/crash"), suite("processes", 60, "tests/processes"), suite("cases", 60, "tests/cases")],
            [fuzz("fuzz", INPUTS, 45), fuzz("flips", FLIPPED, 45, "--flips"), fuzz("live", 0, 15, "--live", str(LIVE_S * scale)),
             storm("storm", 60), suite("nth_call", 45, "tests/nth_call"),
             suite("threads", 30, "tests/test_thread_sanitizer.py", "tests/test_kernels.py"),
             suite("full", 120, "tests/cases", "-k", " or ".join(f"fr_{case:03}" for case in CASES), rounds="full")])


# -- their reports ------------------------------------------------------------------------------------------------------

def read_tests(path: Path) -> tuple[str, list[str]]:
    suite = ElementTree.parse(path).getroot()[0]
    total, failures, errors, skipped = (int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped"))
    bad = failures + errors
    return (f"{total - bad - skipped:,} tests passed, {skipped} skipped",
            [f"{bad} tests failed"] * bool(bad) + ["no test passed"] * (total == bad + skipped))


def read_fuzz(path: Path, wanted: int, is_live: bool) -> tuple[str, list[str]]:
    """Of a live run the headers are good and bad in turn while they are counted, so that their share says nothing."""
    found = json.loads(path.read_text())
    parts = {name: found[name] / found["inputs"] for name in LEAST_PART}
    counts = (f"{found['inputs']:,} inputs ({found['inputs'] / found['seconds']:,.0f}/s); {100 * parts['good_headers']:.1f} % pass "
              f"magic, version, fingerprint and lengths, {100 * parts['copies']:.1f} % reach a copy; {found['pulls']:,} answers; "
              f"{found['flips']:,} words changed under them")
    faults = [f"{found['inputs']:,} of {wanted:,} inputs"] if found["inputs"] < wanted else []
    low = [name for name, part in parts.items() if part < LEAST_PART[name] and not (is_live and name == "good_headers")]
    return counts, faults + [f"{name} {100 * parts[name]:.1f} % of inputs" for name in low]


def read_storm(path: Path, scale: float) -> tuple[str, list[str]]:
    found = json.loads(path.read_text())
    rates: dict[str, Any] = {f"{name}_a_s": found[name] / found["seconds"] for name in ("kills", "pulls", "pushes")}
    counts = STORM_SAYS.format(**found, **rates, seed=found["plan"]["seed"])
    least = {name: round(number * scale) for name, number in (("kills", KILLS), ("holding", HOLDING), ("pulls", PULLS))}
    faults = [f"{found[name]:,} of {number:,} {name}" for name, number in least.items() if found[name] < number]
    return counts, faults + [f"{len(found['faults'])} faults"] * bool(found["faults"])


# -- running ------------------------------------------------------------------------------------------------------------

class Soak:
    """One run."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._mutex = threading.Lock()
        self._is_over = threading.Event()
        self.ended: list[Ended] = []

    def say(self, text: str) -> None:
        """On the screen and in the log."""
        with self._mutex, self._log.open("a") as file:
            print(text, flush=True)
            file.write(f"{text}\n")

    def run(self, lines: Sequence[Sequence[Part]]) -> None:
        """All lines at the same time, each from its first part to its last."""
        ends = [threading.Event() for _ in lines]           # a join that a signal handler interrupts takes its thread for ended
        for line, ended in zip(lines, ends, strict=True):
            threading.Thread(target=self._go_along, args=(line, ended)).start()
        try:
            for each in ends:
                each.wait()
        finally:
            self._is_over.set()             # of an exception of a signal handler: the parts that run are told to end
            for each in ends:
                each.wait()

    def _go_along(self, line: Sequence[Part], ended: threading.Event) -> None:
        try:
            self._run_all(line)
        finally:
            ended.set()

    def _run_all(self, line: Sequence[Part]) -> None:
        for part in line:
            if not self._is_over.is_set():
                self.say(f"{time.strftime('%H:%M:%S')} {part.name} begins")
                ended = self._run(part)
                with self._mutex, self._log.open("ab") as file:
                    file.write(f"\n=== {part.name}: {' '.join(part.command)}\n".encode() + ended.output + b"=== end\n\n")
                    self.ended.append(ended)
                self.say(f"{time.strftime('%H:%M:%S')} {ended.row}")

    def _run(self, part: Part) -> Ended:
        env = {**os.environ, "PYTHONPATH": str(TESTS), "SHMKV_ROUNDS": part.rounds}
        began = time.monotonic()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen([sys.executable, *part.command], cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=output,
                                       stderr=subprocess.STDOUT, start_new_session=True)
            faults = self._watch(process, began + part.watchdog_s)
            output.seek(0)
            said = output.read()
        counts, wrong = read_report(part)
        status = [f"exit {process.returncode}"] * (process.returncode != 0)
        return Ended(part, time.monotonic() - began, counts, faults + status + wrong, said)

    def _watch(self, process: subprocess.Popen[bytes], deadline: float) -> list[str]:
        """Until it has ended; what was wrong with its end."""
        while process.poll() is None:
            late = time.monotonic() > deadline
            if late or self._is_over.is_set():
                end(process)
                return ["did not end in time" if late else "interrupted"]
            time.sleep(LOOK_S)
        return []


def read_report(part: Part) -> tuple[str, list[str]]:
    """The counts of a part that has ended, and what is wrong with them; a report that cannot be read is a fault of its part."""
    if not part.report.exists():
        return "", ["no report"]
    try:
        return part.read(part.report)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        return "", [f"no report that can be read: {error!r}"]


def end(process: subprocess.Popen[bytes]) -> None:
    """As by ctrl-C, so that it leaves nothing behind; whoever does not listen is killed with all that it started."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(ORDER_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def end_in_order(number: int, _: object) -> None:
    sys.exit(128 + number)


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("soak", description="What docs/reliability.md tells of, at length; exit 1 on a fault.")
    parser.add_argument("--minutes", type=float, default=USUAL_MINUTES, help="about how long on two processors (default 60)")
    parser.add_argument("--only", nargs="+", metavar="PART",
                        help="of crash nth_call processes cases full threads fuzz flips live storm")
    parser.add_argument("--log", type=Path, default=LOG)
    wanted = parser.parse_args(words)
    for number in (signal.SIGINT, signal.SIGTERM):      # a handler of ours also keeps "ignored" from being inherited by the parts
        signal.signal(number, end_in_order)
    wanted.log.parent.mkdir(parents=True, exist_ok=True)
    wanted.log.write_text("")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak, scale = Soak(wanted.log), wanted.minutes / USUAL_MINUTES
        lines = lines_of_parts(scale, Path(folder))
        if wanted.only:
            unknown = set(wanted.only) - {part.name for line in lines for part in line}
            if unknown:
                parser.error(f"no such part: {', '.join(sorted(unknown))}")
            lines = tuple([part for part in line if part.name in wanted.only] for line in lines)
        began, before = time.monotonic(), set(os.listdir(SHM))
        soak.run(lines)
    parts = sum(map(len, lines))
    faults = sum(bool(each.faults) for each in soak.ended) + parts - len(soak.ended)
    left = {name.partition(".")[0] for name in set(os.listdir(SHM)) - before}
    soak.say("\n".join(["", "| part | minutes | what it did | faults |", "| --- | ---: | --- | --- |",
                        *(each.row for each in soak.ended), "",
                        f"{(time.monotonic() - began) / 60:.0f} minutes, {len(soak.ended)} of {parts} parts, {faults} with faults; "
                        f"{os.cpu_count()} processors; seed {SEED} of the fuzzer; tests with SHMKV_ROUNDS={rounds_of(scale):g}",
                        f"new in {SHM}, of whoever: {', '.join(sorted(left)) or 'nothing'}"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
