"""What one run of the bench has measured, and what its files ask their fixtures for."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from measure import Medians
from report import Row

PROMPT_ID, DECODER_ID = 1, 2
# record(row, medians, name of ours): fills the row in and keeps it.
Record = Callable[[Row, Medians, str], Row]


@dataclass
class Run:
    """What this run has measured so far."""

    scale: float
    rows: list[Row] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    is_whole: bool = False

    def command(self, root: Path) -> str:
        """How to get this run's figures again, without the names of the files they were written to."""
        if self.is_whole and self.scale == 1:
            return "make bench"
        what = ["bench"] if self.is_whole else [str(path.relative_to(root)) for path in self.files]
        return " ".join(["pytest", *what, *([] if self.scale == 1 else [f"--bench-rounds {self.scale:g}"])])

    def rounds(self, wanted: int) -> int:
        """`wanted`, cut as the user asked."""
        return max(3, round(wanted * self.scale))
