"""What a reader does with tables that it cannot trust: every path of it, over one input."""
from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import memory
from memory import NO_LIFE_FILE, blocks_key, by_id

from shmkv import CacheDesc, CacheKey, DataType, LLMException, _inspect, _link_record, _lookup, _members, _pull, _push
from shmkv._acceptor import AcceptedLink
from shmkv._blocks import FROM_ROW, TO_BLOCKS, TO_ROW, BlockLists
from shmkv._link_handle import LinkHandle
from shmkv._push import Addresses
from shmkv._view import TensorView
from shmkv.cache_view import CacheView
from shmkv.forked import fork_layout
from shmkv.keys import CacheKeyByIdAndIndex
from shmkv.manager_base import views_of_mapping
from shmkv.registered import RegisteredCache

from .world import BLOCKS_SHAPE, ENDED, KEYS, MODEL_ID, SHAPES, UNKNOWN, Target, World

CACHE_IDS = [1, 2, 3, 4, 0, -1]
SIDES = [(0, 0xA1, 1), (5, 0xE5, 6)]
# Blocks that are there, and, now and then, such as are not.
BLOCKS = [*range(BLOCKS_SHAPE.rows)] * 4 + [BLOCKS_SHAPE.rows, 1000, 2**20, 2**31, 2**32 - 1]
OFFSETS_ = (0, 0, 0, 1, 63, 64, 511, 512, 513, 1023)
PATIENT_MS, HASTY_MS = 1000, 1
MANY_ROWS = 1 << 16
ASKED_AGAIN = 1                     # a prepared pull went the way of a plain one

DESCS = {shape: CacheDesc(shape.num_tensors, [shape.outer, shape.rows, shape.inner], DataType.DT_UINT8, batch_dim_index=1)
         for shape in SHAPES}


def _read(tensors: Sequence[TensorView]) -> None:
    """Every byte that there is."""
    for tensor in tensors:
        assert len(tensor.numpy().tobytes()) == tensor.nbytes


class Reader:
    """Runs the paths over a world; counts the pulls that moved bytes and their answers."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.copies = self.refused = self.pushes = self.waits = 0
        self.answers: dict[int, int] = {}

    def run(self) -> None:
        """The pulls and lookups, and a few of the others."""
        self.pulls()
        self.describe()
        for path in self.rng.sample(self.others(), 3):
            path()

    def others(self) -> list[Callable[[], None]]:
        return [self.pull_many, self.prepared, self.prepared, self.pull_blocks, self.pull_blocks, self.push, self.push, self.views,
                self.views, self.links, self.claim, self.acceptor, self.inspect, self.members, self.handle_calls]

    # -- pulls ------------------------------------------------------------------------------------------------------

    def timeout(self) -> int:
        """Long enough, unless the word says that somebody else has the lock."""
        record = self.world.owner
        word = memory.word(record.region, "LinkRecord", self.world.record, "LinkRecord", "word").value & 0x7FFFFFFF
        return HASTY_MS if word in (1, 3) else PATIENT_MS

    def words(self) -> tuple[int, int, int, int]:
        """What to ask for; mostly something that is there."""
        kind = self.rng.randrange(8)
        if kind < 4:
            return self.rng.choice(KEYS)
        if kind < 7:
            return by_id(self.rng.choice(CACHE_IDS) % 2**64)
        return self.rng.choice(ENDED + UNKNOWN)

    def select(self, target: Target) -> tuple[int, ...]:
        """Mostly the whole row, else any selection that a caller may make."""
        rng, shape = self.rng, target.shape
        row = rng.randrange(shape.rows)
        if rng.randrange(3):
            return memory.select(dst_row=row, src_row=rng.randrange(2))
        first, count = rng.randrange(shape.num_tensors), rng.choice((-1, 1, 1, 2, shape.num_tensors))
        return memory.select(size=rng.choice((-1, -1, 1, 16, 64, 300, 512)), src_offset=rng.choice(OFFSETS_),
                             dst_offset=rng.choice(OFFSETS_), dst_row=row, src_row=rng.choice((0, 1, 2, 2**32 - 1)),
                             src_first=first if rng.randrange(2) else 0, src_count=count, dst_first=first, dst_count=count,
                             divisor=rng.choice((0, 0, 1, 2, 3)))

    def ask(self) -> tuple[Target, bytes, tuple[int, ...]]:
        words = self.words()
        number = KEYS.index(words) // 2 if words in KEYS else words[1] - 1 if 0 < words[1] < 4 else 0
        target = self.world.targets[number if self.rng.randrange(8) else self.rng.randrange(len(SHAPES))]
        select = self.select(target)
        return target, struct.pack("=6Q", 1, *words, select[3]), select

    def note(self, status: int, target: Target, select: tuple[int, ...], rows: list[int] | None = None) -> None:
        self.answers[status] = self.answers.get(status, 0) + 1
        self.copies += target.was_written(select, rows) or status == 0

    def pulls(self) -> None:
        """Three pulls: by key, prefix or cache id."""
        for _ in range(3):
            target, packed, select = self.ask()
            status = _pull.pull(self.world.handle, target.cache, packed, select, bool(self.rng.randrange(2)), self.timeout())
            self.note(status, target, select)

    def pull_many(self) -> None:
        asked = [self.ask() for _ in range(3)]
        asked = [asked[0], *(one for one in asked[1:] if one[0] is not asked[0][0])]       # a window for each destination
        if len({id(target) for target, _, _ in asked}) != len(asked):
            asked = asked[:2]
        requests = [(target.cache, packed, select, True) for target, packed, select in asked]
        done, status = _pull.pull_many(self.world.handle, requests, self.timeout())
        for number, (target, _, select) in enumerate(asked):
            self.note(0 if number < done else status, target, select)

    def prepared(self) -> None:
        target = self.world.targets[0]
        select = memory.select()
        handle, asked = self.world.handle, []

        def again(key: Any, row: int) -> LinkHandle:
            asked.append(key)
            return handle

        call = _pull.PreparedPull(target.cache, select, True, self.timeout(), (CacheKey, CacheKeyByIdAndIndex), again,
                                  lambda key, row, status: LLMException(str(status)), lambda handle, key: None)
        call(CacheKey(handle.cluster_id, 1, 0))             # the first call only learns the handle
        key = self.rng.choice((CacheKey(handle.cluster_id, 1, 0), CacheKeyByIdAndIndex(handle.cluster_id, 1, 0)))
        status = ASKED_AGAIN
        try:
            call(key)
            status = ASKED_AGAIN if len(asked) > 1 else 0
        except LLMException as error:
            status = int(str(error))
        self.note(status, target, select)

    def pull_blocks(self) -> None:
        """Blocks to blocks, a row to blocks, or blocks to a row; a row that a pull is not for has no blocks either."""
        rng, mode = self.rng, self.rng.choice((TO_BLOCKS, TO_BLOCKS, FROM_ROW, TO_ROW))
        words = self.words() if mode == FROM_ROW else blocks_key(rng.choice((MODEL_ID,) * 7 + (0,)))
        target = rng.choice(self.world.targets) if mode == TO_ROW else self.world.block_target
        count = rng.randrange(1, BLOCKS_SHAPE.rows + 1)
        numbers, chunks = [rng.choice(BLOCKS) for _ in range(count)], rng.sample(range(BLOCKS_SHAPE.rows), count)
        row = rng.randrange(target.shape.rows)
        first = rng.choice((0, 0, 0, 1, 3))
        select = memory.select(dst_row=row, src_row=rng.randrange(2), src_first=first, dst_first=first,
                               src_count=-1 if first == 0 else 1, dst_count=-1 if first == 0 else 1)
        lists = BlockLists(chunks if mode == FROM_ROW else numbers, chunks, mode)
        status = _pull.pull(self.world.handle, target.cache, struct.pack("=6Q", 1, *words, select[3]), select,
                            bool(rng.randrange(2)), self.timeout(), lists=lists)
        self.note(status, target, select, [row] if mode == TO_ROW else chunks)

    def views(self) -> None:
        """A row where it is: each byte of each array is read, of a view and of what a fork would show."""
        rng = self.rng
        target, packed, select = self.ask()
        status, loan = _pull.lend(self.world.handle, packed, select, bool(rng.randrange(2)), self.timeout(), rng.choice((1, 192)))
        self.answers[status] = self.answers.get(status, 0) + 1
        if loan is None:
            return
        self.copies += 1
        try:
            window = (select[1], select[0])
            with CacheView(loan, window, rng.choice((None, DESCS[target.shape])), select[5]) as view:
                _read(view.tensors)
                if window == (0, -1):
                    _read(views_of_mapping(RegisteredCache.over(loan.region, 1, fork_layout(loan, None), False)))
        except LLMException:
            self.refused += 1           # bytes that are no elements, or not those of the description
        finally:
            loan.close()

    def describe(self) -> None:
        words = self.rng.choice((self.words(), blocks_key(MODEL_ID)))
        found = _lookup.describe(self.world.owner.region, words, self.rng.choice((0, 1, 2**32 - 1)))
        assert found is None or len(found) == 5

    def push(self) -> None:
        """From guarded memory to two addresses: of the owner, a little beside, or anywhere. Beyond a segment lie guards."""
        pusher, rng = self.world.pusher, self.rng
        addresses = [rng.choice(pusher.addresses) + rng.choice((0, 0, 0, 1, 511, 512, 513, -1, 64)) for _ in range(2)]
        if not rng.randrange(8):
            addresses[rng.randrange(2)] = rng.randrange(2**64)
        places = [rng.choice((0, 1)), rng.choice((2, 7, 2**32 - 1))]
        blocks = None if rng.randrange(4) else BlockLists([0, 1], places, TO_BLOCKS)
        first = rng.randrange(3)
        status = _push.push(pusher.link, pusher.source, Addresses(addresses), 0, 2, first, rng.randrange(2), blocks, PATIENT_MS)
        self.note_push(status)

    def note_push(self, status: int) -> None:
        self.answers[status] = self.answers.get(status, 0) + 1
        self.copies += status == 0
        self.pushes += status == 0
        self.world.put_contents_back()

    # -- the rest ---------------------------------------------------------------------------------------------------

    def links(self) -> None:
        region, members = self.world.owner.region, self.world.owner.members
        for slot in range(min(_link_record.links_reserved(region), 6)):
            assert _link_record.read(region, slot)["sides"]
            assert _link_record.initiator_lives(region, slot, NO_LIFE_FILE, members) in (True, False)
        assert len(_link_record.find(region, 2)) <= 512
        assert len(_link_record.dead_initiators(region, NO_LIFE_FILE, members)) <= 512

    def claim(self) -> None:
        region = self.world.owner.region
        slot = _link_record.claim(region, NO_LIFE_FILE, self.world.owner.members, SIDES)
        if slot is not None:
            try:
                assert LinkHandle(region, self.world.owner.members, NO_LIFE_FILE, slot, b"/dev/shm/none.").look() <= 0
            except ValueError:
                self.refused += 1           # the record names no member
            _link_record.abandon(region, slot)

    def acceptor(self) -> None:
        region, members = self.world.owner.region, self.world.owner.members
        link = AcceptedLink(region, members, NO_LIFE_FILE, self.rng.randrange(4), self.rng.randrange(3))
        assert link.end(HASTY_MS, bool(self.rng.randrange(4))) in (True, False)

    def inspect(self) -> None:
        region = self.world.owner.region
        assert _inspect.state(region)
        assert len(_inspect.links(region)) <= 512
        rows = memory.word(region, "", 0, "DirectoryHeader", "rows_reserved").value
        if rows < MANY_ROWS or not self.rng.randrange(64):              # looking at all of them takes a while
            assert len(_inspect.caches(region)) <= MANY_ROWS

    def members(self) -> None:
        owner = self.world.owner
        for slot in range(1024 if not self.rng.randrange(32) else 6):
            record = _members.read(owner.members, slot)
            assert record is None or len(record) == 6
        assert len(_members.foreign_clusters(owner.members)) <= 65536
        assert _members.joins(owner.members) >= 0
        assert _members.directory_role(owner.region) >= 0
        assert _members.directory_is_open(owner.region) in (True, False)

    def handle_calls(self) -> None:
        handle = self.world.handle
        assert handle.look() <= 0
        assert len(handle.counters) == 6
        assert (handle.users, handle.word >= 0, handle.peer_is_idle in (True, False)) == (0, True, True)
