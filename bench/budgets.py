"""What each figure should stay below. Ratios of one run, and times beyond a copy; they are printed, and nothing fails by them."""
from __future__ import annotations

from dataclasses import dataclass

from report import TWO, Row

PREPARED = "ours, prepared"


@dataclass(frozen=True)
class Budget:
    """Rows whose name begins with `row` (and whose destination is `at`, if that is given) keep `figure` at or below `limit`."""

    row: str
    figure: str
    limit: float
    at: int | None = None

    def applies(self, row: Row) -> bool:
        return row.group != "peers" and row.name.startswith(self.row) and self.at in (None, row.at)


BUDGETS = [
    Budget("small 256", "ours/C", 1.20),
    Budget("small 256", "ns beyond C, plain", 2500),
    Budget("small 256", "ns beyond C, prepared", 1000),
    Budget("small 256", "ours/torch", 0.60),
    Budget("small 256", "ours/numpy", 0.15, at=16),
    Budget("small 256", "ours/numpy", 1.00, at=0),
    *[Budget(row, figure, limit) for row in ("medium", "large") for figure, limit in (
        ("ours/C", 1.03), ("2 threads: ours/C", 1.08), ("ours/torch", 0.70), ("2 threads: ours/torch", 0.80),
        ("ours/numpy", 0.70))],
    Budget("paged", "ours/C", 1.05),
    Budget("paged", "ours/torch", 0.80),
    Budget("paged", "ours/numpy", 0.30),
    Budget("one run of 4 KiB", "ns prepared", 1500),
    Budget("cycle", "ns beyond C, plain", 30_000),
    Budget("cycle", "major faults", 0),
    Budget("cycle", "minor faults of a side", 10),
    Budget("small, ", "growth", 1.10),
    Budget("loop", "ours/best", 1 / 0.9),
    Budget("view", "ns of a view", 5000),
    Budget("view", "growth", 1.25),
    Budget("fork", "ns of a fork", 100_000),
    Budget("last layer", "ns beyond C", 80_000),
    Budget("prefill", "ns after the last layer", 2_000_000),
    Budget("prefill", "streamed/whole", 0.50),
    Budget("8 waits", "wake-ups a second", 0),
    Budget("push", "ours/C", 1.25),
    Budget("push", "push/pull", 1.25),
]


def figures(row: Row) -> dict[str, float]:
    """Everything about a row that can have a budget."""
    bare, prepared = row.times.get("bare C"), row.times.get(PREPARED)
    found = {
        "ours/C": row.ratio("bare C"), "2 threads: ours/C": row.ratio("bare C, 2 threads", TWO),
        "ours/torch": row.ratio("torch"), "2 threads: ours/torch": row.ratio("torch, 2 threads", TWO),
        "ours/numpy": row.ratio("numpy"), "ns prepared": prepared,
        "ns beyond C, plain": row.ours - bare if row.ours is not None and bare is not None else None,
        "ns beyond C, prepared": prepared - bare if prepared is not None and bare is not None else None,
        **row.values,
    }
    return {name: value for name, value in found.items() if value is not None}


def verdicts(rows: list[Row]) -> tuple[list[str], list[str]]:
    """(kept, missed): a line for each budget of each row that was measured."""
    kept: list[str] = []
    missed: list[str] = []
    for row in rows:
        known = figures(row)
        for budget in BUDGETS:
            if budget.applies(row) and budget.figure in known:
                value = known[budget.figure]
                place = "" if row.at is None else f" at {row.at}"
                line = f"{row.name}{place}: {budget.figure} {value:.3g}, budget {budget.limit:.3g}"
                (kept if value <= budget.limit else missed).append(line)
    return kept, missed
