"""Where the commands print to, and how sizes look."""
from __future__ import annotations

import json
import sys
from typing import Any

from rich.console import Console

PIPE_WIDTH = 160


def out() -> Console:
    """The console of stdout; in a pipe, which has no width, tables get room."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False, markup=False)


def error_line(text: str) -> None:
    """One red line on stderr, whatever the text holds."""
    console = Console(stderr=True, highlight=False)
    console.print(" ".join(text.split()), style="red", markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """The value as JSON, to be read by a program or a person."""
    print(json.dumps(value, indent=2))


def size(nbytes: int | None) -> str:
    """Bytes for people: 64.0 MiB."""
    if nbytes is None:
        return "-"
    number, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024:
            break
        number, unit = number / 1024, larger
    return f"{nbytes} B" if unit == "B" else f"{number:.1f} {unit}"
