"""The result of a run: rows, one table, JSON, a chart, and the table's place in docs/performance.md and, short, in README.md.

As a program it works from the JSON of a run, so that no figure of the document is ever typed:

    python bench/report.py [--json docs/bench.json] [--chart docs/bench.png] [--document docs/performance.md] [--readme README.md]
"""
from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
SHORT_BEGIN, SHORT_END = "<!-- comparison -->", "<!-- /comparison -->"
L2_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index2/size")
SHORT_AT = 0                        # the destination of the short table: where the rows of a cache of ours begin
BLANK = "-"
CHARTED = ("ours", "ours, 2 threads", "bare C", "bare C, 2 threads", "numpy", "torch", "torch, 2 threads", "process_vm_readv",
           "unix socket")


@dataclass
class Row:
    """One line of the table. Times are medians in nanoseconds for one go; `at` is the byte of its page where each destination
    row begins. `times` are the contenders'; `quartiles` those of everybody; `values` what is no time of anybody."""

    group: str
    name: str
    at: int | None = None
    nbytes: int = 0
    ours: float | None = None
    times: dict[str, float] = field(default_factory=dict)
    quartiles: dict[str, list[float]] = field(default_factory=dict)
    rounds: int = 0
    values: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def ratio(self, name: str, ours: str = "") -> float | None:
        """Our time divided by the contender's; `ours` names another of our times."""
        mine = self.times.get(ours) if ours else self.ours
        other = self.times.get(name)
        return mine / other if mine is not None and other else None


def time_text(ns: float | None) -> str:
    """Three digits and a unit."""
    if ns is None:
        return BLANK
    for unit, factor in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= factor:
            return f"{ns / factor:.3g} {unit}" if ns / factor < 999.5 else f"{ns / factor:.0f} {unit}"
    return f"{ns:.3g} ns"


def signed_text(ns: float) -> str:
    return f"-{time_text(-ns)}" if ns < 0 else time_text(ns)


def ratio_text(ratio: float | None) -> str:
    if ratio is None:
        return BLANK
    return f"{ratio:.2f}" if ratio >= 0.095 else f"{ratio:.3f}"


def speed_text(row: Row) -> str:
    return f"{row.nbytes / row.ours:.1f}" if row.nbytes and row.ours else BLANK


GROUPS = ("workloads", "small pulls", "decoders", "views", "streaming", "index", "look-ups", "cycles", "lock", "loops",
          "thresholds")


def sort(rows: list[Row]) -> list[Row]:
    """In the order of GROUPS, and in the order of measurement within one; unknown groups come last."""
    return sorted(rows, key=lambda row: GROUPS.index(row.group) if row.group in GROUPS else len(GROUPS))


def _versus(name: str, ours: str = "") -> Callable[[Row], str]:
    return lambda row: ratio_text(row.ratio(name, ours))


TWO = "ours, 2 threads"
COLUMNS: dict[str, Callable[[Row], str]] = {
    "measured": lambda row: row.name,
    "at": lambda row: BLANK if row.at is None else str(row.at),
    "ours": lambda row: time_text(row.ours),
    "GB/s": speed_text,
    "2 threads": lambda row: time_text(row.times.get(TWO)),
    "prepared": lambda row: time_text(row.times.get("ours, prepared")),
    "/C": _versus("bare C"),
    "/C 2": _versus("bare C, 2 threads", TWO),
    "/numpy": _versus("numpy"),
    "/torch": _versus("torch"),
    "/torch 2": _versus("torch, 2 threads", TWO),
    "/readv": _versus("process_vm_readv"),
    "/socket": _versus("unix socket"),
    "notes": lambda row: "; ".join(row.notes),
}


def table(rows: Iterable[Row]) -> str:
    """All rows in one table, readable as text and as Markdown."""
    lines = [list(COLUMNS), *[[cell(row) for cell in COLUMNS.values()] for row in rows]]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS) - 1)]
    texts = ["| " + " | ".join([*(f"{cell:{width}}" for cell, width in zip(line, widths, strict=False)), line[-1]]) + " |"
             for line in lines]
    return "\n".join([texts[0], "|" + "|".join(["-" * (width + 2) for width in widths] + ["---"]) + "|", *texts[1:]])


# The short table: our ways, then what one would write by hand, then the floor.
SHORT = {"shmkv, 1 thread": "", "shmkv, 2 threads": TWO, "numpy slices": "numpy", "torch `copy_`, 1 thread": "torch",
         "torch `copy_`, 2 threads": "torch, 2 threads", "bare C loop": "bare C"}


def comparison(rows: Iterable[Row]) -> str:
    """The pulls of the three workloads in a small Markdown table; ways that nobody measured are left out."""
    chosen = [row for row in rows if row.group == "workloads" and row.at == SHORT_AT and row.ours]
    times = [[row.times.get(name) if name else row.ours for name in SHORT.values()] for row in chosen]
    columns = [place for place in range(len(SHORT)) if any(line[place] for line in times)]
    head = ["one pull of", *(list(SHORT)[place] for place in columns)]
    lines = [head, ["---", *("---:" for _ in columns)]]
    lines += [[row.name, *(time_text(line[place]) for place in columns)] for row, line in zip(chosen, times, strict=True)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


LEGEND = ("ours: median time of one go; 2 threads, prepared: our other ways; /X: our time divided by that of X in the same rounds, "
          "below 1 is faster than X;\n/C 2, /torch 2: ours with 2 threads against theirs; "
          "at: the byte of its page where each destination row begins.\n"
          "No 2 threads for less than 8 MiB: a pull lets the second one sleep there.")


# -- the machine -------------------------------------------------------------------------------------------------------

def _cpu() -> str:
    """Its name, which on a virtual machine says little, and what of it decides how a copy runs."""
    from shmkv import _copy
    loops = [name for name in _copy.supported_kernels() if name != "memcpy"]
    l2 = f"{L2_CACHE.read_text().strip().removesuffix('K')} KiB of L2" if L2_CACHE.exists() else "L2 unknown"
    return f"{_cpu_name()} ({', '.join(loops)}; {l2})"


def _cpu_name() -> str:
    """With family and model where there are any: virtual machines give processors of several generations one name."""
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    said = {name.strip(): value.strip() for name, _, value in pairs}
    name = said.get("model name") or said.get("Model") or platform.machine()
    return f"{name}, family {said['cpu family']} model {said['model']}" if "cpu family" in said else name


def _memory_gib() -> int:
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def _linux() -> str:
    """Major and minor version: what follows names a machine's build and says nothing about speed."""
    return ".".join(platform.release().split("-")[0].split(".")[:2])


def machine(rows: Iterable[Row] = ()) -> dict[str, Any]:
    """Where and when a run took place, and with what; torch where it took part in one of the rows."""
    import numpy

    import shmkv
    from shmkv import _copy
    chosen = _copy.current()
    libc = " ".join(platform.libc_ver())
    torch = {"torch": importlib.metadata.version("torch")} if any("torch" in row.times for row in rows) else {}
    return {
        "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)), "memory_gib": _memory_gib(), "linux": _linux(),
        "libc": libc, "python": platform.python_version(), "numpy": numpy.__version__, **torch, "shmkv": shmkv.__version__,
        "kernel": chosen["kernel"], "nt_threshold": chosen["nt_threshold"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def machine_line(about: dict[str, Any]) -> str:
    torch = f", torch {about['torch']}" if "torch" in about else ""
    return (f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB; Linux {about['linux']}, {about['libc']}, "
            f"Python {about['python']}, numpy {about['numpy']}{torch}; shmkv {about['shmkv']} with loop {about['kernel']}, "
            f"streaming from {about['nt_threshold'] >> 20} MiB; {about['date']}")


# -- files -------------------------------------------------------------------------------------------------------------

def save(path: Path, about: dict[str, Any], rows: list[Row], command: str, scale: float) -> None:
    """JSON of a whole run. `scale` is by how much the rounds were cut."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"command": command, "rounds_scale": scale, "machine": about, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(data, indent=1) + "\n")


def load(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """What `save` wrote, and its rows."""
    data = json.loads(path.read_text())
    return data, [Row(**row) for row in data["rows"]]


def put(path: Path, begin: str, end: str, block: str) -> None:
    """Put a block between two marks of a Markdown file. ValueError if it has no marks."""
    head, found, rest = path.read_text().partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{path} has no lines {begin} and {end}")
    path.write_text(f"{head}{begin}\n{block}\n{end}{tail}")


def _cut(data: dict[str, Any]) -> str:
    return "" if data["rounds_scale"] == 1 else f" A trial with {data['rounds_scale']:g} of the rounds: expect scatter."


def document(path: Path, data: dict[str, Any], rows: list[Row]) -> None:
    """Put the whole table between the marks of a Markdown file. ValueError if it has no marks."""
    put(path, BEGIN, END, f"Written by `{data['command']}`.{_cut(data)}\n\n{machine_line(data['machine'])}\n\n{table(rows)}")


def readme(path: Path, data: dict[str, Any], rows: list[Row]) -> None:
    """Put the short table between the marks of a Markdown file. ValueError if it has no marks."""
    put(path, SHORT_BEGIN, SHORT_END, f"{comparison(rows)}\n\nMedians of one run: {machine_line(data['machine'])}.{_cut(data)}")


def has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def picture(path: Path, title: str, panels: int = 1) -> Iterator[list[Any]]:
    """Axes side by side, to draw on; at the end they are written to the file. Needs matplotlib."""
    importlib.import_module("matplotlib").use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, panels, figsize=(10, 5), squeeze=False)
    yield list(axes[0])
    figure.suptitle(title, fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def chart(path: Path, rows: list[Row], title: str) -> None:
    """GB/s of every contender for each workload, destination 16, as a picture. Needs matplotlib."""
    chosen = [row for row in rows if row.group == "workloads" and row.at in (16, None) and row.ours]
    with picture(path, title) as (axes,):
        for place, name in enumerate(CHARTED):
            times = [row.ours if name == "ours" else row.times.get(name) for row in chosen]
            speeds = [row.nbytes / time if time else 0.0 for row, time in zip(chosen, times, strict=True)]
            axes.bar([i + (place - len(CHARTED) / 2) * 0.09 for i in range(len(chosen))], speeds, 0.085, label=name, align="edge")
        axes.set_xticks(range(len(chosen)), [row.name for row in chosen])
        axes.set_ylabel("GB/s")
        axes.legend(fontsize=8)


def main() -> None:
    options = argparse.ArgumentParser(description="Table, chart and document from the JSON of a run.")
    options.add_argument("--json", type=Path, default=Path("docs/bench.json"))
    options.add_argument("--chart", type=Path)
    options.add_argument("--document", type=Path)
    options.add_argument("--readme", type=Path)
    given = options.parse_args()
    data, rows = load(given.json)
    print(table(rows), machine_line(data["machine"]), sep="\n\n")
    if given.document:
        document(given.document, data, rows)
    if given.readme:
        readme(given.readme, data, rows)
    if given.chart:
        chart(given.chart, rows, machine_line(data["machine"]))


if __name__ == "__main__":
    main()
