"""Paths over tables that cannot be trusted that wait, that read by system calls, or that push to what a key names.

They have random numbers of their own: for all other paths an input of a seed is what it was before these were there.
"""
from __future__ import annotations

import random
import struct
import time
from collections.abc import Callable

import memory
from memory import blocks_key, by_id

from shmkv import _pull, _push_key
from shmkv._await import KeyWait
from shmkv._blocks import FROM_ROW, TO_BLOCKS, BlockLists
from shmkv._flow import MORE, RowFlow
from shmkv._link_handle import LinkHandle
from shmkv._wait import ARM_NS, LOOK_NS, NOT_YET
from shmkv._wait_any import sleep_any

from .readers import CACHE_IDS, PATIENT_MS, Reader
from .world import BLOCKS_SHAPE, IN_USE, MODEL_ID, UNKNOWN, Target, World

TURNS = 4                           # of a wait, at most
TURN_NS = 200_000
LEASES = 192
MODES = (None, None, TO_BLOCKS, FROM_ROW)


class LaterReader(Reader):
    """Of one episode. `changes`: it may take back a part of what rows say is published, so that there is something to wait for."""

    def __init__(self, world: World, rng: random.Random, changes: bool = True) -> None:
        super().__init__(world, rng)
        self.changes = changes
        self.by_pread = world.new_handle(by_pread=True)

    def run(self) -> None:
        """Two of the paths."""
        for path in self.rng.sample(self.others(), 2):
            path()

    def others(self) -> list[Callable[[], None]]:
        return [self.push_by_key, self.push_by_key, self.pread, self.pread, self.flow, self.flow, self.key_wait, self.sleep]

    def count(self, status: int) -> int:
        """An answer of a turn of a wait."""
        self.answers[status] = self.answers.get(status, 0) + 1
        self.waits += status == NOT_YET
        return status

    # -- pushes and system calls ------------------------------------------------------------------------------------

    def push_by_key(self) -> None:
        """A row, blocks, or a row that is cut into blocks, to a cache that its id or its blocks key names."""
        rng, pusher = self.rng, self.world.pusher
        words = by_id(rng.choice(CACHE_IDS) % 2**64) if rng.randrange(2) else blocks_key(rng.choice((MODEL_ID,) * 7 + (0,)))
        mode, count = rng.choice(MODES), rng.choice((-1, -1, 1, 2, 4))
        lists = None if mode is None else BlockLists([0, 1], [rng.randrange(BLOCKS_SHAPE.rows), rng.choice((0, 3, 4, 2**32 - 1))],
                                                     mode)
        select = memory.select(size=rng.choice((-1, -1, 256, 512)), src_row=rng.randrange(3), src_first=rng.choice((0, 0, 1)),
                               dst_first=rng.choice((0, 0, 1, 3)), src_count=count, dst_count=count)
        packed = struct.pack("=6Q", 1, *words, rng.choice((0, 1, 2, 2**32 - 1)))
        status = _push_key.push(pusher.link, rng.choice((pusher.source, pusher.block_source)), packed, select, lists, PATIENT_MS)
        self.note_push(status)

    def pread(self) -> None:
        """A pull that reads the file of a segment and maps none of it; now and then one that has opened none yet."""
        if not self.rng.randrange(3):
            try:
                self.by_pread = self.world.new_handle(by_pread=True)
            except ValueError:
                self.refused += 1           # the record names no member
        target, packed, select = self.ask()
        status = _pull.pull(self.by_pread, target.cache, packed, select, bool(self.rng.randrange(2)), self.timeout())
        self.note(status, target, select)

    # -- waits --------------------------------------------------------------------------------------------------------

    def handle(self) -> LinkHandle:
        return self.world.handle if self.rng.randrange(3) else self.by_pread

    def unpublish(self) -> None:
        """Rows that say less than all is published."""
        for row in range(IN_USE["RowRecord"] if self.changes else 0):
            if self.rng.randrange(2):
                memory.word(self.world.owner.region, "RowRecord", row, "RowRecord", "progress").value = self.rng.randrange(4)

    def turn(self) -> int:
        """A look, or a sleep that is soon over."""
        return time.monotonic_ns() + TURN_NS if self.rng.randrange(2) else LOOK_NS

    def new_flow(self) -> tuple[RowFlow, Target, tuple[int, ...]]:
        rng = self.rng
        target, packed, select = self.ask()
        made = RowFlow(self.handle(), target.cache, packed, select, bool(rng.randrange(2)), self.timeout(),
                       rng.choice((1, LEASES)), rng.choice((0, 0, 1, 2)), bool(rng.randrange(4)))
        return made, target, select

    def new_key_wait(self) -> KeyWait:
        words = self.rng.choice((self.words(), self.rng.choice(UNKNOWN), blocks_key(MODEL_ID)))
        return KeyWait(self.handle(), struct.pack("=6Q", 1, *words, self.rng.randrange(2)), self.timeout())

    def flow(self) -> None:
        """A row, piece by piece, in a few turns."""
        self.unpublish()
        flow, target, select = self.new_flow()
        status = NOT_YET
        for _ in range(TURNS):
            status = self.count(flow.run(self.turn(), bool(self.rng.randrange(2))))
            if status not in (MORE, NOT_YET):
                break
        flow.close()
        self.copies += target.was_written(select) or status == 0

    def key_wait(self) -> None:
        self.unpublish()
        wait = self.new_key_wait()
        for _ in range(TURNS):
            status = self.count(wait.run(self.turn(), bool(self.rng.randrange(2))))
            if status != NOT_YET:
                break

    def sleep(self) -> None:
        """One sleep for two waits that have looked in vain."""
        self.unpublish()
        flow, target, select = self.new_flow()
        key_wait = self.new_key_wait()
        status = self.count(flow.run(ARM_NS, True))
        self.count(key_wait.run(ARM_NS, True))
        self.count(sleep_any([flow, key_wait], time.monotonic_ns() + TURN_NS, True))
        for each in (flow, key_wait):
            each.count_out()
        flow.close()
        self.copies += target.was_written(select) or status == 0
