"""What the chat shows: the answer as it comes, a line of figures a turn, and a table of all turns."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

WIDTH_OF_A_PIPE = 132


@dataclass(frozen=True)
class Turn:
    """The figures of one turn. `same`: did one process that computes everything say the same tokens? None if it was not asked."""

    tokens: int
    reused: int
    pulled: int
    nbytes: int
    pull_ms: float
    first_ms: float
    recompute_ms: float
    same: bool | None

    @property
    def gain(self) -> float:
        """How many times sooner the first token is there."""
        return self.recompute_ms / self.first_ms


class Screen:
    """The terminal, or a pipe."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        if not self._console.is_terminal:
            self._console = Console(highlight=False, width=WIDTH_OF_A_PIPE)
        self._shown = ""

    def ask(self) -> str | None:
        """The next line of the person at the keyboard; None at the end."""
        try:
            said = self._console.input("[bold green]you>[/] ").strip()
        except (EOFError, KeyboardInterrupt):
            return None
        return None if said in ("/quit", "/exit") else said

    def begin(self, said: str | None) -> None:
        """An answer is about to come; `said` is shown where nobody typed it."""
        if said is not None:
            self._console.print(Text.assemble(("you> ", "bold green"), said))
        self._console.print("[bold cyan]it>[/] ", end="")
        self._shown = ""

    def answer(self, text: str) -> None:
        """The answer so far."""
        # The last character may be half of one that takes several tokens.
        whole = text.rstrip("\ufffd")
        self._console.print(Text(whole[len(self._shown):]), end="", soft_wrap=True)
        self._shown = whole

    def end(self, turn: Turn) -> None:
        """The line of a turn."""
        self._console.print()
        self._console.print(
            f"[dim]reused {turn.reused} of {turn.tokens} tokens; pulled {turn.pulled} ({turn.nbytes:,} bytes) in "
            f"{turn.pull_ms:.2f} ms; first token after {turn.first_ms:.0f} ms, recomputed {turn.recompute_ms:.0f} ms "
            f"({turn.gain:.1f} x)[/]")

    def say(self, text: str) -> None:
        """A line about the program itself."""
        self._console.print(f"[dim]{text}[/]")

    def table(self, turns: Sequence[Turn]) -> None:
        """All turns."""
        table = Table(title="prefill and decode in two processes")
        for name in ("turn", "tokens", "reused", "pulled", "bytes pulled", "pull ms", "first token ms", "recomputed ms", "gain",
                     "same as one process"):
            table.add_column(name, justify="right")
        for number, turn in enumerate(turns, 1):
            same = {None: "-", True: "yes", False: "NO"}[turn.same]
            table.add_row(str(number), str(turn.tokens), str(turn.reused), str(turn.pulled), f"{turn.nbytes:,}",
                          f"{turn.pull_ms:.2f}", f"{turn.first_ms:.1f}", f"{turn.recompute_ms:.1f}", f"{turn.gain:.1f} x", same)
        self._console.print(table)
