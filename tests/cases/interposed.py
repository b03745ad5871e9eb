"""What an interposed process did: the log of scripts/interpose.c, line by line."""
from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Call:
    """One call: path as given or as the descriptor shows it; flags and mode of an open; length of a sizing."""

    pid: int
    name: str
    path: str
    flags: int
    mode: int
    result: int
    status_flags: int
    descriptor_flags: int

    @property
    def creates(self) -> bool:
        """An open that may make a file."""
        return self.name in ("shm_open", "open") and bool(self.flags & os.O_CREAT)

    @property
    def sizes(self) -> bool:
        """A call that gives a file its length."""
        return self.name == "ftruncate"


class Interposer:
    """Start a process with `environment()`, then look at `calls()`."""

    def __init__(self, library: Path, log: Path) -> None:
        self._library = library
        self._log = log

    def environment(self, fault: str = "", kill_at: int = 0) -> dict[str, str]:
        """`fault`: "unsupported" or "interrupted" for posix_fallocate; `kill_at`: SIGKILL before that call in /dev/shm."""
        self._log.touch()
        self._log.chmod(0o666)
        return {"LD_PRELOAD": str(self._library), "INTERPOSE_LOG": str(self._log), "INTERPOSE_FAULT": fault,
                "INTERPOSE_KILL_AT": str(kill_at)}

    def calls(self, pid: int | None = None) -> list[Call]:
        """All calls so far, of one process or of all."""
        rows = (line.split("\t") for line in self._log.read_text().splitlines())
        made = [Call(int(row[0]), row[1], row[2], *(int(number) for number in row[3:])) for row in rows]
        return [call for call in made if pid in (None, call.pid)]
