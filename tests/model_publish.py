"""Publishing as a model: the progress word of a row, and a reader that waits for it without holding anything.

The reader counts itself in, looks, and sleeps on exactly the value that it judged; the owner stores the bytes, then the word,
then looks for waiters. A reader that dies leaves the count up, which costs a wake that nobody needs. An owner that dies is found
out after a slice.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from model import FAULT, Promise

TENSORS = 2


class Row(NamedTuple):
    progress: int = 0
    bytes: int = 0                      # tensors that are written
    waiters: int = 0
    owner: str = "write"
    owner_saw: int = 0                  # waiters, as the owner read them
    owner_alive: bool = True
    reader: str = "look_first"
    seen: int = 0                       # the progress that was judged
    woken: bool = False                 # a wake came since it fell asleep
    copied: int = 0                     # tensors that a pull called good, beyond those that were written: never
    reader_alive: bool = True


Moves = Iterator[tuple[str, Row]]


@dataclass(frozen=True)
class PublishModel:
    """The switches are mistakes to be caught; `prompt`: a slice passes only when nobody has anything else to do."""

    prompt: bool = True
    publishes_before_writing: bool = False
    looks_at_waiters_first: bool = False
    sleeps_uncounted: bool = False
    wakes_nobody: bool = False

    def initial(self) -> Row:
        return Row()

    @property
    def promises(self) -> tuple[Promise, ...]:
        return _published_is_written, _nobody_sleeps_through, _count_covers_sleepers

    def steps(self, row: Row) -> Moves:
        if row.owner_alive and row.owner != "done":
            for what, after in getattr(self, "_owner_" + row.owner)(row):
                yield f"owner: {what}", after
            yield f"{FAULT}owner crashes", row._replace(owner_alive=False)
        if row.reader_alive and row.reader not in ("done", "gone"):
            for what, after in getattr(self, "_" + row.reader)(row):
                yield f"reader: {what}", after
            yield f"{FAULT}reader crashes", row._replace(reader_alive=False)

    # the owner: tensor by tensor

    def _owner_write(self, row: Row) -> Moves:
        if self.publishes_before_writing:
            yield "publishes", row._replace(progress=row.progress + 1, owner="write_late")
        else:
            yield "writes a tensor", row._replace(bytes=row.bytes + 1, owner="look" if self.looks_at_waiters_first else "publish")

    def _owner_write_late(self, row: Row) -> Moves:
        yield "writes a tensor", row._replace(bytes=row.bytes + 1, owner="look")

    def _owner_publish(self, row: Row) -> Moves:
        after = "wake" if self.looks_at_waiters_first else "look"
        yield "publishes: progress", row._replace(progress=row.progress + 1, owner=after)

    def _owner_look(self, row: Row) -> Moves:
        after = "publish" if self.looks_at_waiters_first else "wake"
        yield "looks for waiters", row._replace(owner_saw=row.waiters, owner=after)

    def _owner_wake(self, row: Row) -> Moves:
        wakes = row.owner_saw and not self.wakes_nobody and row.reader == "asleep"
        row = row._replace(reader="look", woken=True) if wakes else row
        yield "wakes", row._replace(owner="done" if row.progress == TENSORS else "write", owner_saw=0)

    # the reader: waits for all tensors

    def _look_first(self, row: Row) -> Moves:
        yield "is not ready", row._replace(reader="look" if self.sleeps_uncounted else "count_in")

    def _count_in(self, row: Row) -> Moves:
        yield "counts itself in", row._replace(waiters=row.waiters + 1, reader="look")

    def _look(self, row: Row) -> Moves:
        after = "count_out" if row.progress == TENSORS else "wait"
        yield "looks at progress", row._replace(seen=row.progress, reader=after, woken=False)

    def _wait(self, row: Row) -> Moves:
        yield "waits", row._replace(reader="asleep" if row.progress == row.seen else "look")

    def _asleep(self, row: Row) -> Moves:
        """A slice passes; in a prompt world only when the owner has nothing to do."""
        if not (self.prompt and row.owner_alive and row.owner != "done"):
            yield "slice passes", row._replace(reader="look_at_life")

    def _look_at_life(self, row: Row) -> Moves:
        yield "looks at the owner's life", row._replace(reader="look" if row.owner_alive else "give_up")

    def _give_up(self, row: Row) -> Moves:
        yield "counts itself out, the peer is gone", row._replace(waiters=row.waiters - (not self.sleeps_uncounted), reader="gone")

    def _count_out(self, row: Row) -> Moves:
        yield "counts itself out", row._replace(waiters=row.waiters - (not self.sleeps_uncounted), reader="copy")

    def _copy(self, row: Row) -> Moves:
        yield "copies", row._replace(reader="done", copied=max(0, row.seen - row.bytes))


def _published_is_written(row: Row) -> bool:
    """What is published is written, and a pull that waited for it got it."""
    return row.progress <= row.bytes and not row.copied


def _nobody_sleeps_through(row: Row) -> bool:
    """Nobody sleeps on a progress that has moved on, once the owner has gone on to something else."""
    overslept = row.reader == "asleep" and row.reader_alive and row.seen < row.progress
    return not overslept or not row.owner_alive or row.owner in ("look", "wake")


def _count_covers_sleepers(row: Row) -> bool:
    """Who sleeps is counted."""
    return row.reader != "asleep" or row.waiters > 0


def reader_has_ended(row: Row) -> bool:
    """The reader has its bytes, knows that its peer is gone, or is dead itself."""
    return row.reader in ("done", "gone") or not row.reader_alive
