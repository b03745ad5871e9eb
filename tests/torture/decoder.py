"""A decoder: links, pulls in all ways, judges every answer and every byte, unlinks, restarts."""
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shmkv import CacheKey, CacheKeyByIdAndIndex, LLMException, LLMRole, LLMStatusCode, PullRequest
from torture import pattern, shelves
from torture.arguments import Plan
from torture.board import Board, Field, Sample
from torture.clock import Moment, lasted
from torture.destination import Destination
from torture.halves import Halves
from torture.landings import Landings
from torture.loans import Loans
from torture.prompt import key_of_lane, key_of_slot
from torture.pulls import Judge, Wish
from torture.shelves import Shape
from torture.streams import Streams
from torture.worker import Call, Fault, Worker, cluster_info, cluster_of, only

LINK_TIMEOUT_MS = 5000
MANY = 16
REPEATS = 16                            # of a tiny pull: a reader should be in the library most of the time, not in Python
TINY = Shape(shelves.TINY.tensors, MANY, shelves.TINY.words)
MIDDLE = Shape(shelves.MIDDLE.tensors, 1, shelves.MIDDLE.words)
OK = LLMStatusCode.LLM_SUCCESS


@dataclass
class Peer:
    """A prompt as this decoder knows it. `life` is 0 while there is no link."""

    number: int
    life: int = 0
    unlinks: int = 0                    # the board's counts when the link was made
    forced: int = 0
    lost_ns: int = 0                    # when it was killed, until the first right pull from its next life
    consumed: dict[int, int] = field(default_factory=dict)      # slot -> generation whose key our pull consumed


class Decoder(Worker):
    role = LLMRole.DECODER

    def __init__(self, plan: Plan, board: Board, number: int, faults: Path) -> None:
        super().__init__(plan, board, number, faults)
        self.decoder = number - plan.prompts
        self.judge = Judge(board, self.decoder)
        self.last_error: LLMException | None = None        # of the last pull

    def prepare(self) -> None:
        self.peers = [Peer(number) for number in range(self.plan.prompts)]
        self.destinations: dict[tuple[Shape, int], Destination] = {}
        self.halves = Halves(self)
        self.loans = Loans(self)
        self.landings = Landings(self)
        streams = Streams(self)
        self.actions: list[tuple[float, Callable[[Peer], None]]] = [
            (150, self.pull_tiny), (20, self.pull_row), (60, self.halves.pull), (20, self.pull_keyed), (15, streams.pull_lane),
            (10, streams.pull_rows), (3, self.pull_middle), (4, self.pull_big), (0.5, self.unlink), (0.5, self.unlink_by_force)]
        self.rare = [(1.0, self.drop_destination), (0.05, self.restart)]

    def step(self) -> None:
        peer = self.random.choice(self.peers)
        if not peer.life:
            self.link(peer)
            if not peer.life:
                time.sleep(0.0002)
            return
        if self.random.random() < 0.01:
            self.choose(self.rare)
            return
        if self.random.random() < self.plan.push:
            self.landings.step(peer)
            return
        if self.random.random() < self.plan.lend:
            self.loans.step(peer)
            return
        (action,) = self.random.choices([action for _, action in self.actions], [weight for weight, _ in self.actions])
        action(peer)

    # -- links --------------------------------------------------------------------------------------------------------

    def living(self, number: int) -> int:
        """The life of a prompt that is ready, or 0."""
        row = self.board.fields[number]
        life = int(row[Field.READY])
        return life if life == row[Field.LIFE] and not self.board.is_over(number, life) else 0

    def link(self, peer: Peer) -> None:
        life = self.living(peer.number)
        if not life:
            return
        peer.unlinks = int(self.board.unlinks[peer.number, self.decoder])
        peer.forced = int(self.board.forced[peer.number, self.decoder])
        with self.calls(Call.LINK):
            status = only(self.dist.link_clusters([cluster_info(cluster_of(peer.number))], LINK_TIMEOUT_MS))
        if self.living(peer.number) == life:
            if status != OK:
                assert self.dist._links is not None
                raise Fault(f"linking to the living prompt {peer.number} answered {status!r}: {self.dist._links.last_failure}")
            self.count(Field.LINKS)
            peer.life = life
            peer.consumed.clear()
        elif status == OK:
            self.remove_link(peer, force=False)         # to which life is not known

    def remove_link(self, peer: Peer, *, force: bool) -> None:
        self.landings.uninvite(peer.number)
        with self.calls(Call.UNLINK):
            status = only(self.dist.unlink_clusters([cluster_info(cluster_of(peer.number))], LINK_TIMEOUT_MS, force))
        cut = status == LLMStatusCode.LLM_NOT_YET_LINK and (
            peer.unlinks % 2 or self.board.unlinks[peer.number, self.decoder] != peer.unlinks)
        if status != OK and not cut:
            raise Fault(f"unlinking from prompt {peer.number} answered {status!r}")
        peer.life = 0

    def unlink(self, peer: Peer) -> None:
        self.remove_link(peer, force=False)

    def unlink_by_force(self, peer: Peer) -> None:
        """And link again at once: the record is used again."""
        self.remove_link(peer, force=True)
        self.link(peer)

    # -- destinations -------------------------------------------------------------------------------------------------

    def destination(self, shape: Shape, parts: int = 1) -> Destination:
        found = self.destinations.get((shape, parts))
        if found is None:
            with self.calls(Call.ALLOCATE):
                found = self.destinations[shape, parts] = Destination(self.manager, shape, parts)
        return found

    def drop_destination(self) -> None:
        """Its memory is used again by the next one."""
        if self.destinations:
            gone = self.destinations.pop(self.random.choice(list(self.destinations)))
            with self.calls(Call.FREE):
                self.manager.deallocate_cache(gone.cache)

    def forget(self) -> None:
        self.destinations.clear()
        self.loans.forget()
        self.landings.forget()
        self.last_error = None

    # -- pulls --------------------------------------------------------------------------------------------------------

    def pull_tiny(self, peer: Peer) -> None:
        """Many small rows in one call."""
        to = self.destination(TINY)
        offered = self.board.lanes[peer.number]
        wishes = []
        for to_row in range(MANY):
            lane = self.random.choice(shelves.TINY_LANES)
            if cache_id := int(offered[lane]):
                wishes.append(self.wish_by_id(peer, lane, cache_id, self.random.randrange(shelves.TINY.rows), to, to_row))
        self.pull(wishes, repeats=REPEATS)

    def wish_by_id(self, peer: Peer, lane: int, cache_id: int, row: int, to: Destination, to_row: int = 0) -> Wish:
        key = CacheKeyByIdAndIndex(cluster_of(peer.number), cache_id, row)
        return Wish(peer, key, shelves.SLOT_OF_LANE + lane, row, to, to_row, pattern.generation(peer.life, cache_id))

    def pull_row(self, peer: Peer) -> None:
        """A row that is filled again and again: by its key or by the cache's id, whole or one half, of which another decoder may
        pull the other."""
        slot = self.random.randrange(shelves.ROWS.rows)
        parts = 2 if self.random.random() < 0.3 else 1
        key: CacheKey | CacheKeyByIdAndIndex = key_of_slot(peer.number, slot)
        if self.random.random() < 0.2:
            key = CacheKeyByIdAndIndex(cluster_of(peer.number), shelves.ROWS_CACHE_ID, slot)
        to = self.destination(shelves.ROWS, parts)
        self.pull([Wish(peer, key, slot, slot, to, self.random.randrange(shelves.ROWS.rows),
                        int(self.board.published[peer.number, slot]), self.random.randrange(parts))])

    def pull_keyed(self, peer: Peer) -> None:
        """All rows of a cache that lives by its keys."""
        lane = self.random.choice(shelves.KEYED_LANES)
        if cache_id := int(self.board.lanes[peer.number, lane]):
            to = self.destination(shelves.KEYED)
            self.pull([Wish(peer, key_of_lane(peer.number, cache_id, row), shelves.SLOT_OF_LANE + lane, row, to, row,
                            pattern.generation(peer.life, cache_id)) for row in range(shelves.KEYED.rows)])

    def pull_middle(self, peer: Peer) -> None:
        self.pull_lane(peer, self.random.choice(shelves.MIDDLE_LANES), MIDDLE)

    def pull_big(self, peer: Peer) -> None:
        self.pull_lane(peer, self.random.choice(shelves.BIG_LANES), shelves.BIG)

    def pull_lane(self, peer: Peer, lane: int, shape: Shape) -> None:
        if cache_id := int(self.board.lanes[peer.number, lane]):
            row = self.random.randrange(shelves.LANE_SHAPES[lane].rows)
            self.pull([self.wish_by_id(peer, lane, cache_id, row, self.destination(shape))])

    def pull(self, wishes: Sequence[Wish], repeats: int = 1) -> list[int]:
        """Carry wishes out, all from one peer and into different rows: the generations that came, up to the first failure. With
        `repeats`, for lanes, each is pulled so often before the next, and looked at once."""
        if not wishes:
            return []
        for wish in wishes:
            wish.to.make_known(wish.to_row, wish.part)
        began = self.clock.now()
        calls, error = self.call([wish for wish in wishes for _ in range(repeats)])
        ended = self.clock.now()
        done, again = divmod(calls, repeats)
        self.last_error = error
        came = self.check(wishes[:done])
        if error is not None:
            wish = wishes[done]
            if again:
                wish.to.known[wish.to_row][wish.part] = wish.only_word
            self.judge.failure(wish, error)
            self.failed(wish.peer, error, began, ended)
        elif wishes[0].peer.lost_ns:
            self.board.sample(self.number, Sample.AGAIN, time.monotonic_ns() - wishes[0].peer.lost_ns)
            wishes[0].peer.lost_ns = 0
        return came

    def call(self, wishes: Sequence[Wish]) -> tuple[int, LLMException | None]:
        """How many were done, and what the next one answered."""
        with self.calls(Call.PULL):
            try:
                if len(wishes) > 1 or self.random.random() < 0.2:
                    self.manager.pull_many(self.requests(wishes))
                elif wishes[0].to_row == 0 and wishes[0].to.parts == 1 and self.random.random() < 0.5:
                    wishes[0].to.prepared(wishes[0].key)
                else:
                    wish, layers = wishes[0], self.layers(wishes[0])
                    self.manager.pull_cache(wish.key, wish.to.cache, wish.to_row, src_layer_range=layers, dst_layer_range=layers)
            except LLMException as error:
                return error.failed_request or 0, error
        return len(wishes), None

    @staticmethod
    def layers(wish: Wish) -> range | None:
        """A part is a layer of two tensors."""
        return range(wish.part, wish.part + 1) if wish.to.parts > 1 else None

    def requests(self, wishes: Sequence[Wish]) -> list[PullRequest]:
        """One for each; the same for one that is repeated."""
        found: list[PullRequest] = []
        for before, wish in zip([None, *wishes], wishes, strict=False):
            layers = self.layers(wish)
            found.append(found[-1] if wish is before else PullRequest(
                wish.key, wish.to.cache, wish.to_row, src_layer_range=layers, dst_layer_range=layers))
        return found

    def check(self, wishes: Sequence[Wish]) -> list[int]:
        """The bytes of pulls that succeeded: their generations."""
        if not wishes:
            return []
        to = wishes[0].to
        if len(wishes) > 1 or to.parts > 1:
            words = [each[wish.part] for each, wish in zip(to.read_rows([wish.to_row for wish in wishes]), wishes, strict=True)]
        else:
            words = [to.read(wishes[0].to_row, 0)]
        came = [self.judge.generation(wish, word) for wish, word in zip(wishes, words, strict=True)]
        for wish, word, generation in zip(wishes, words, came, strict=True):
            to.known[wish.to_row][wish.part] = word
            self.check_once(wish, generation)
        self.count(Field.PULLS, len(wishes))
        self.count(Field.NBYTES, len(wishes) * to.shape.row_nbytes // to.parts)
        return came

    @staticmethod
    def check_once(wish: Wish, generation: int) -> None:
        """A whole pull by a request key has consumed it: the same generation does not come again."""
        if wish.lane >= 0 or wish.to.parts > 1 or not isinstance(wish.key, CacheKey):
            return
        if wish.key.req_id < 2**63 and wish.peer.consumed.get(wish.slot) == generation:
            raise Fault(f"not consumed: generation {generation:#x} came twice of {wish}")
        wish.peer.consumed[wish.slot] = generation

    def failed(self, peer: Peer, error: LLMException, began: Moment, ended: Moment) -> None:
        """What the failure of a call means for the link."""
        if error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            self.count(Field.MISSES)
            return
        if error.status_code == LLMStatusCode.LLM_NOT_YET_LINK:
            self.count(Field.CUT)
            peer.life = 0
            return
        self.count(Field.LOST)
        row = self.board.fields[peer.number]
        if row[Field.KILLED] == peer.life + 1 and row[Field.LEAVING] < peer.life:
            peer.lost_ns = int(row[Field.KILLED_NS])
            killed = Moment(peer.lost_ns, int(self.board.stalled[peer.number, self.decoder]))
            status_ns, running_ns = lasted(killed, began, ended)
            self.board.sample(self.number, Sample.STATUS, status_ns)
            self.board.sample(self.number, Sample.STATUS_RUNNING, running_ns)
        self.remove_link(peer, force=False)
