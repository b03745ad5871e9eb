"""The rows of the matrix in docs/reliability.md: the page is what is tested."""
from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
ROW = re.compile(
    r"^\| `(?P<point>[a-z-]+(?::\d+)?)` \| (?P<call>[a-z ]+) \| (?P<done>[^|]+) \|(?P<afterwards>[^|]*)\|$", re.MULTILINE)
STAYS, GONE, GONE_LATER = "the key stays", "the key is gone", "the key is gone when its owner has looked"


@dataclass(frozen=True)
class Row:
    """A point of a call; `afterwards` says what becomes of the key if the actor dies there ("" if no key is concerned)."""

    point: str
    call: str
    afterwards: str

    def __str__(self) -> str:
        return f"{self.call}-{self.point}".replace(" ", "_")


def rows() -> list[Row]:
    """All rows, in the order of the page."""
    table = PAGE.read_text().split("### The matrix\n")[1].split("\n## ")[0]
    return [Row(found["point"], found["call"], found["afterwards"].strip()) for found in ROW.finditer(table)]
