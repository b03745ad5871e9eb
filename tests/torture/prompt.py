"""A prompt: fills rows and caches, publishes, takes back, frees, removes links, restarts."""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from shmkv import CacheDesc, CacheKey, DataType, KvCache, LLMException, LLMRole, LLMStatusCode, _link_record
from torture import pattern, shelves
from torture.board import Field
from torture.parcels import Parcels
from torture.pattern import Stamp, Words
from torture.shelves import Shape
from torture.worker import Call, Fault, Worker, cluster_info, cluster_of, only

UNLINK_TIMEOUT_MS = 2000
SETTLE_S = 10.0
COMPUTED_S = 0.001                      # a layer of a prefill, at most
NO_ID = 2**64 - 1


def key_of_slot(prompt: int, slot: int) -> CacheKey:
    """The key under which a slot's row is published again and again."""
    if slot < shelves.ROWS.rows and slot % shelves.PREFIX_ROWS:
        return CacheKey(cluster_of(prompt), NO_ID, prefix_id=slot)
    return CacheKey(cluster_of(prompt), req_id=slot)


def key_of_lane(prompt: int, cache_id: int, row: int) -> CacheKey:
    """The key of a row of a keyed lane's cache: never used twice in a life."""
    return CacheKey(cluster_of(prompt), req_id=1 << 32 | cache_id << 8 | row, model_id=1)


class Shelf:
    """A cache whose rows are filled again and again, and the slot of its first row."""

    def __init__(self, cache: KvCache, shape: Shape, first_slot: int) -> None:
        self.cache = cache
        self.words: Words = pattern.array_of(cache, shape)
        self.first_slot = first_slot
        self.rows = range(shape.rows)


class Prompt(Worker):
    role = LLMRole.PROMPT

    def prepare(self) -> None:
        halves = shelves.halves_shape(self.plan.decoders)
        for hints in (self.board.published, self.board.filling, self.board.lanes, self.board.torn):
            hints[self.number] = 0
        self.board.unlinks[self.number] += self.board.unlinks[self.number] % 2
        self.counted = 0
        self.parcels = Parcels(self)
        self.in_lanes: dict[int, KvCache] = {}
        self.held: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = None      # a view, and what it showed at first
        self.shelves = [Shelf(self.allocate(shelves.ROWS), shelves.ROWS, 0),
                        Shelf(self.allocate(halves), halves, shelves.ROWS.rows)]
        assert self.shelves[0].cache.cache_id == shelves.ROWS_CACHE_ID
        self.actions = [(20, self.fill_rows), (60, self.fill_halves), (30, self.tiny_lanes), (1, self.middle_lane),
                        (5, self.keyed_lane), (5, self.streamed_lane), (1.5, self.big_lane), (2, self.remove_key),
                        (0.2, self.unlink), (3, self.unlink_reader), (0.3, self.collect), (0.01, self.restart)]
        if self.plan.push:
            self.actions.append((60, self.parcels.step))

    def step(self) -> None:
        self.choose(self.actions)

    # -- caches -----------------------------------------------------------------------------------------------------

    def allocate(self, shape: Shape, keys: Sequence[CacheKey] = ()) -> KvCache:
        desc = CacheDesc(shape.tensors, [shape.rows, shape.words], DataType.DT_UINT64)
        with self.calls(Call.ALLOCATE):
            return self.manager.allocate_cache(desc, keys, publish=False)

    def free(self, cache: KvCache) -> None:
        with self.calls(Call.FREE):
            self.manager.deallocate_cache(cache)

    # -- rows that are filled again ----------------------------------------------------------------------------------

    def fill_rows(self) -> None:
        self.refill(self.shelves[0], self.random.sample(self.shelves[0].rows, self.random.randint(1, 4)))

    def fill_halves(self) -> None:
        self.refill(self.shelves[1], self.random.sample(self.shelves[1].rows, self.random.randint(1, 4)))

    def refill(self, shelf: Shelf, rows: list[int]) -> None:
        """The order of the documentation: unbind, fill, bind without publishing, publish."""
        self.counted += 1
        now = pattern.generation(self.life, self.counted)
        slots = [shelf.first_slot + row for row in rows]
        self.board.filling[self.number, slots] = now
        with self.calls(Call.PUBLISH):
            self.manager.unbind(shelf.cache, rows)
            for row, slot in zip(rows, slots, strict=True):
                pattern.fill(shelf.words[:, row], pattern.pack(Stamp(cluster_of(self.number), slot, row, now)))
            self.manager.bind(shelf.cache, {row: key_of_slot(self.number, slot) for row, slot in zip(rows, slots, strict=True)},
                              publish=False)
            self.manager.publish(shelf.cache, rows=rows)
        self.board.published[self.number, slots] = now
        self.count(Field.PUBLISHED, len(rows))

    def remove_key(self) -> None:
        """The row stays unbound until it is filled again, so a hint at its generation is no promise any more."""
        slot = self.random.randrange(shelves.slots(self.plan.decoders))
        with self.calls(Call.PUBLISH):
            self.manager.remove_cache_key(key_of_slot(self.number, slot))

    # -- caches that are offered by their id ---------------------------------------------------------------------------

    def tiny_lanes(self) -> None:
        for _ in range(2):
            for lane in shelves.TINY_LANES:
                self.renew(lane)
        if self.random.random() < 0.05:
            self.hold_view()

    def hold_view(self) -> None:
        """A view of a cache that will be freed: as long as it is held, nobody writes other bytes there."""
        if self.held is not None and not (self.held[0] == self.held[1]).all():
            raise Fault(f"memory was used again while a view of it was held: {self.held}")
        cache = self.in_lanes.get(self.random.choice(shelves.TINY_LANES))
        view = None if cache is None else cache.tensors[0].numpy()
        self.held = None if view is None else (view, view.copy())

    def middle_lane(self) -> None:
        self.renew(self.random.choice(shelves.MIDDLE_LANES))

    def big_lane(self) -> None:
        self.renew(self.random.choice(shelves.BIG_LANES))

    def renew(self, lane: int) -> None:
        """A new cache in a lane; the one before is freed, before or after: whoever is in it may finish. Half of the time its memory
        is used again at once."""
        before = self.in_lanes.pop(lane, None)
        if before is not None and self.random.random() < 0.5:
            self.withdraw(lane, before)
            before = None
        try:
            cache = self.allocate(shelves.LANE_SHAPES[lane])
        except LLMException as error:
            self.refused(error)
        else:
            self.publish_lane(lane, cache)
            self.in_lanes[lane] = cache
            self.board.lanes[self.number, lane] = cache.cache_id
        if before is not None:
            self.withdraw(lane, before)

    def withdraw(self, lane: int, cache: KvCache) -> None:
        """The hint goes first: whoever still finds it after a failed pull knows that it should have succeeded."""
        if self.board.lanes[self.number, lane] == cache.cache_id:
            self.board.lanes[self.number, lane] = 0
        self.free(cache)

    def publish_lane(self, lane: int, cache: KvCache) -> None:
        shape = shelves.LANE_SHAPES[lane]
        words = pattern.array_of(cache, shape)
        now = pattern.generation(self.life, cache.cache_id)
        for row in range(shape.rows):
            stamp = Stamp(cluster_of(self.number), shelves.SLOT_OF_LANE + lane, row, now)
            pattern.fill(words[:, row], pattern.pack(stamp))
        with self.calls(Call.PUBLISH):
            self.manager.publish(cache)
        self.count(Field.PUBLISHED, shape.rows)

    def keyed_lane(self) -> None:
        """A cache that lives by its keys from the moment of its publication. The one before may still have keys that nobody
        fetched: they go, and the hint says so before."""
        lane = self.random.choice(shelves.KEYED_LANES)
        shape = shelves.LANE_SHAPES[lane]
        before = int(self.board.lanes[self.number, lane])
        if before:
            self.board.torn[self.number, lane] = before
            with self.calls(Call.PUBLISH):
                for row in range(shape.rows):
                    self.manager.remove_cache_key(key_of_lane(self.number, before, row))
        try:
            cache = self.allocate(shape)
        except LLMException as error:
            self.refused(error)
            return
        with self.calls(Call.PUBLISH):
            self.manager.bind(cache, {row: key_of_lane(self.number, cache.cache_id, row) for row in range(shape.rows)},
                              publish=False)
        self.publish_lane(lane, cache)
        self.free(cache)
        self.board.lanes[self.number, lane] = cache.cache_id

    def streamed_lane(self) -> None:
        """A cache that is offered first and published then, layer by layer, as an engine does it: who pulls from it waits."""
        lane = self.random.choice(shelves.STREAMED_LANES)
        shape = shelves.LANE_SHAPES[lane]
        if lane in self.in_lanes:
            self.withdraw(lane, self.in_lanes.pop(lane))
        try:
            cache = self.in_lanes[lane] = self.allocate(shape)
        except LLMException as error:
            self.refused(error)
            return
        self.board.lanes[self.number, lane] = cache.cache_id
        words, now = pattern.array_of(cache, shape), pattern.generation(self.life, cache.cache_id)
        for first in range(0, shape.tensors, shelves.LAYER):
            if self.random.random() < 0.3:
                time.sleep(self.random.uniform(0, COMPUTED_S))
            for row in range(shape.rows):
                stamp = Stamp(cluster_of(self.number), shelves.SLOT_OF_LANE + lane, row, now)
                pattern.fill(words[first:first + shelves.LAYER, row], pattern.pack(stamp), first)
            with self.calls(Call.PUBLISH):
                self.manager.publish(cache, layers=first // shelves.LAYER + 1)
        self.count(Field.PUBLISHED, shape.rows)

    def refused(self, error: LLMException) -> None:
        """No memory is an answer; the run counts it."""
        if error.status_code != LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY:
            raise error
        self.count(Field.REFUSED)

    # -- links and the end ---------------------------------------------------------------------------------------------

    def unlink(self) -> None:
        self.unlink_from(self.random.randrange(self.plan.decoders))

    def unlink_reader(self) -> None:
        """A link whose other side is in the middle of a big cache, if there is one now."""
        big = {own.generation for lane in shelves.BIG_LANES if lane in self.in_lanes and (own := self.in_lanes[lane]._own)}
        if not big:
            return
        assert self.dist._cluster is not None
        region, namespace = self.dist._cluster.directory.region, self.dist._cluster.namespace
        for slot in range(_link_record.links_reserved(region)):
            initiator = _link_record.read(region, slot)["sides"][1]
            if initiator["hazard"] in big and _link_record.initiator_lives(region, slot, namespace.life_fd, namespace.table):
                self.unlink_from(initiator["cluster_id"] - cluster_of(self.plan.prompts))
                return

    def unlink_from(self, decoder: int) -> None:
        """From the side that was linked to. Only prompts with an odd number use force."""
        force = self.number % 2 == 1 and self.random.random() < 0.5
        self.board.unlinks[self.number, decoder] += 1       # odd: under way
        self.board.forced[self.number, decoder] += force
        with self.calls(Call.UNLINK):
            status = only(self.dist.unlink_clusters([cluster_info(cluster_of(self.plan.prompts + decoder))], UNLINK_TIMEOUT_MS,
                                                    force))
        self.board.unlinks[self.number, decoder] += 1
        if status not in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_BUSY):
            raise Fault(f"unlinking decoder {decoder} answered {status!r}")

    def collect(self) -> None:
        with self.calls(Call.FREE):
            self.manager.collect()

    def settle(self) -> None:
        """Free everything. No decoder lives any more, so nothing may be kept by one."""
        for shelf in self.shelves:
            with self.calls(Call.PUBLISH):
                self.manager.unbind(shelf.cache, shelf.rows)
            self.free(shelf.cache)
        for lane, cache in self.in_lanes.items():
            self.withdraw(lane, cache)
        self.in_lanes.clear()
        for lane in shelves.KEYED_LANES:
            for row in range(shelves.LANE_SHAPES[lane].rows):
                self.manager.remove_cache_key(key_of_lane(self.number, int(self.board.lanes[self.number, lane]), row))
        deadline = time.monotonic() + SETTLE_S
        while self.left() and time.monotonic() < deadline:
            self.manager.collect()
            time.sleep(0.005)
        self.mine[Field.CACHES] = self.left()

    def forget(self) -> None:
        self.shelves.clear()
        self.held = None

    def left(self) -> int:
        """Caches that the directory still records."""
        assert self.dist._cluster is not None
        return len(list(self.dist._cluster.caches))
