"""What an owner does in its own directory after a peer wrote over it."""
from __future__ import annotations

import random
from collections.abc import Callable

from memory import NO_LIFE_FILE, anonymous, request

from shmkv import _layout

from .mutate import Mutator
from .world import GuardedOwner, raw

ALLOWED = (ValueError, MemoryError, OSError, RuntimeError, IndexError)

MOST = 12                           # caches at a time


class OwnerRun:
    """One owner, scribbled over again and again, and never repaired."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.mutator = rng, Mutator(rng)
        self.owner = GuardedOwner()
        self.memory = anonymous(_layout.SEGMENT_DATA + (1 << 16))
        self.slots: list[tuple[int, int, int]] = []             # slot, generation, rows
        self.view = raw(self.owner.region)
        self.refusals = 0
        for _ in range(2):
            self.insert()
        for slot, _, _ in self.slots:
            self.owner.directory.bind(slot, 0, request(slot))
        self.record = self.owner.claim()

    def close(self) -> None:
        self.owner.close()

    def run(self) -> None:
        """One input: a few changes, then calls."""
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            self.rng.choices([self.mutator.directory, self.mutator.index, self.mutator.lock], [8, 2, 1])[0](self.view)
        self.call_some()

    def call_some(self) -> None:
        """Six calls. Each answers, or raises what its callers expect."""
        for call in self.rng.sample(self.calls(), 6):
            try:
                call()
            except ALLOWED:
                self.refusals += 1

    def calls(self) -> list[Callable[[], object]]:
        return [self.insert, self.bind, self.bind, self.unbind, self.publish, self.look, self.settle, self.mark, self.free,
                self.grow, self.give_back, self.names]

    def some(self) -> tuple[int, int]:
        """(slot, row) of a cache that the owner knows, sometimes of none."""
        if not self.slots or not self.rng.randrange(20):
            return self.rng.choice((0, 5, 65535, 65536)), self.rng.choice((0, 2**32 - 1))
        slot, _, rows = self.rng.choice(self.slots)
        return slot, self.rng.randrange(rows)

    def insert(self) -> None:
        if len(self.slots) == MOST:
            return
        rows = self.rng.choice((1, 2, 3, 40))
        slot, generation, _ = self.owner.insert(self.rng.choice((1, 2, 40)), rows, inner=16, memory=self.memory)
        self.slots.append((slot, generation, rows))

    def grow(self) -> None:
        """As much as makes tables and index larger."""
        if len(self.slots) < MOST:
            slot, generation, _ = self.owner.insert(1, 200, inner=16, memory=self.memory)
            self.slots.append((slot, generation, 200))

    def bind(self) -> None:
        self.owner.directory.bind(*self.some(), request(self.rng.randrange(300)), self.rng.choice((None, 0, 1)))

    def unbind(self) -> None:
        if self.rng.randrange(2):
            self.owner.directory.unbind(*self.some())
        else:
            self.owner.directory.remove(*self.some())

    def publish(self) -> None:
        self.owner.directory.publish(*self.some(), self.rng.choice((0, 1, 40)))

    def look(self) -> None:
        directory, words = self.owner.directory, request(self.rng.randrange(300))
        found = directory.find(words)
        if found is not None:
            assert found[0] in [slot for slot, _, _ in self.slots], "only what the owner knows"
            directory.remove(*found)
        else:
            assert directory.why_ended(words) < 0
        slot, row = self.some()
        directory.row_key(slot, row)
        directory.progress(slot, row)
        assert directory.reaped_count >= 0

    def settle(self) -> None:
        assert all(slot < 65536 for slot in self.owner.directory.noticed_slots())
        self.owner.directory.settle(self.some()[0])

    def mark(self) -> None:
        slot, row = self.some()
        generation = self.owner.directory.row_generation(slot, row)
        self.owner.directory.mark_pulled(slot, row, generation, 0, 1)

    def free(self) -> None:
        if len(self.slots) > 1:
            slot, generation, _ = self.slots.pop(self.rng.randrange(len(self.slots)))
            self.owner.directory.retire(slot)
            self.owner.pinned(generation)
            self.owner.directory.release(slot)

    def give_back(self) -> None:
        self.owner.directory.index.give_back_old_parts(NO_LIFE_FILE, self.owner.members)

    def names(self) -> None:
        self.owner.directory.note_unlinked(self.rng.getrandbits(64))
        self.owner.directory.set_role(self.rng.randrange(4))
