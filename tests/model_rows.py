"""Coverage and consume as a model: one row of a cache with two tensors, which its owner binds to another key.

Pullers mark what they covered in words of (generation, bits); whoever reads all of them full after its own
mark does the one CAS LIVE -> CONSUMED. Removing and unbinding are CAS from LIVE too, so a key ends exactly
once. The argument that of two pullers with one word each at least one reads both full needs one order of all
marks and loads: mark and read coverage words with sequential consistency, not with acquire and release.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from model import FAULT, Promise, put

TENSORS = 2


class Puller(NamedTuple):
    """A decoder that pulls its share of the tensors, by one link, up to `pulls` times."""

    pc: str = "find"
    pulls: int = 2
    generation: int = 0
    step: int = 0  # which tensor to mark, then which word to read
    bits: int = 0  # the bits of the word just read
    alive: bool = True
    reaped: bool = False


class Row(NamedTuple):
    state: tuple[int, str] = (1, "LIVE")
    coverage: tuple[tuple[int, int], ...] = ()  # words of (generation, bits)
    owner: str = "call"
    owner_lives: bool = True
    step: int = 0
    found: int = 0  # generation of the row that is being reaped
    pullers: tuple[Puller, ...] = ()
    # for the promises: tensors copied whole, tensors of pulls that ended well, how each generation ended
    copied: tuple[int, ...] = (0, 0, 0)
    ended_well: tuple[int, ...] = (0, 0, 0)
    ends: tuple[tuple[str, ...], ...] = ((), (), ())


Moves = Iterator[tuple[str, Row]]


@dataclass(frozen=True)
class CoverageModel:
    """Pullers with `shares` of the tensors mark them; the owner removes, rebinds and reaps at any moment.

    `tensors_per_word` 2 puts both bits in one word, 1 gives each its own. The switches are mistakes to be
    caught.
    """

    shares: tuple[tuple[int, ...], ...] = ((0,), (1,))
    tensors_per_word: int = 2
    pulls: int = 2
    words_without_generation: bool = False
    reads_words_before_marking: bool = False
    live_before_reset: bool = False
    reaper_forgets_full_rows: bool = False
    remove_is_a_store: bool = False

    def initial(self) -> Row:
        words = TENSORS // self.tensors_per_word
        return Row(coverage=((1, 0),) * words, pullers=tuple(Puller(pulls=self.pulls) for _ in self.shares))

    @property
    def promises(self) -> tuple[Promise, ...]:
        return (_ends_once, _consumed_means_copied, self.covered_is_consumed)

    def steps(self, row: Row) -> Moves:
        if row.owner_lives:
            for what, after in getattr(self, "_owner_" + row.owner)(row):
                yield f"owner: {what}", after
            yield f"{FAULT}owner crashes", row._replace(owner_lives=False)
        for index, puller in enumerate(row.pullers):
            if puller.alive and puller.pc != "done":
                for what, after in getattr(self, "_" + puller.pc)(row, index):
                    yield f"puller {index}: {what}", after
                dead = Puller("dead", pulls=0, alive=False)
                yield f"{FAULT}puller {index} crashes", row._replace(pullers=put(row.pullers, index, dead))

    # a puller

    def _find(self, row: Row, index: int) -> Moves:
        generation, state = row.state
        if state == "LIVE":
            yield "finds", _puller(row, index, pc="copy", generation=generation)
        else:
            yield "not_exist", _puller(row, index, pc="done")

    def _copy(self, row: Row, index: int) -> Moves:
        yield "copies", _puller(row, index, pc="row_again")

    def _row_again(self, row: Row, index: int) -> Moves:
        generation = row.pullers[index].generation
        if row.state not in ((generation, "LIVE"), (generation, "CONSUMED")):
            yield "not_exist", _next_pull(row, index)
            return
        row = row._replace(copied=_add(row.copied, generation, self._bits(index)))
        pc = "read_words" if self.reads_words_before_marking else "load"
        yield "row is the same", _puller(row, index, pc=pc)

    def _load(self, row: Row, index: int) -> Moves:
        puller = row.pullers[index]
        generation, bits = row.coverage[self._word(index, puller.step)]
        if generation == puller.generation or self.words_without_generation:
            yield "loads word", _puller(row, index, pc="mark", bits=bits)
        else:
            yield "word is of another key", _end_well(row, index, self._bits(index))

    def _mark(self, row: Row, index: int) -> Moves:
        """CAS of (generation, bits): a word that was reset since does not take the bit."""
        puller, word = row.pullers[index], self._word(index, row.pullers[index].step)
        generation, bits = row.coverage[word]
        if bits != puller.bits or not (generation == puller.generation or self.words_without_generation):
            yield "mark fails", _puller(row, index, pc="load", bits=0)
            return
        bits |= 1 << self.shares[index][puller.step]
        row = row._replace(coverage=put(row.coverage, word, (generation, bits)))
        if puller.step + 1 < len(self.shares[index]):
            yield "marks", _puller(row, index, pc="load", step=puller.step + 1, bits=0)
        elif self.reads_words_before_marking:
            yield "marks", _end_well(row, index, self._bits(index))
        else:
            yield "marks", _puller(row, index, pc="read_words", step=0, bits=0)

    def _read_words(self, row: Row, index: int) -> Moves:
        puller, early = row.pullers[index], self.reads_words_before_marking
        if self._is_full(row, puller.step, puller.generation):
            last = puller.step + 1 == len(row.coverage)
            yield (
                "word is full",
                _puller(row, index, pc="consume" if last else "read_words", step=puller.step + 1),
            )
        elif early:
            yield "word is not full", _puller(row, index, pc="load", step=0)
        else:
            yield "word is not full", _end_well(row, index, self._bits(index))

    def _consume(self, row: Row, index: int) -> Moves:
        generation = row.pullers[index].generation
        yield "consumes", _end_well(_end_row(row, generation, "CONSUMED"), index, self._bits(index))

    # the owner

    def _owner_call(self, row: Row) -> Moves:
        generation, state = row.state
        if state == "LIVE":
            yield "remove", self._remove(row)
            if generation == 1:
                yield "unbind", _end_row(row, generation, "UNBOUND")
        elif generation == 1:
            row = row._replace(state=(2, "UNBOUND"))
            yield "bind", row._replace(owner="go_live" if self.live_before_reset else "reset")
        for index, puller in enumerate(row.pullers):
            if not puller.alive and not puller.reaped:
                yield f"reaps {index}", _puller(row, index, reaped=True)._replace(owner="reap")

    def _remove(self, row: Row) -> Row:
        generation = row.state[0]
        return (
            row._replace(owner="store_removed")
            if self.remove_is_a_store
            else _end_row(row, generation, "REMOVED")
        )

    def _owner_store_removed(self, row: Row) -> Moves:
        generation = row.state[0]
        ends = put(row.ends, generation, (*row.ends[generation], "REMOVED"))
        yield "removes by a store", row._replace(state=(generation, "REMOVED"), ends=ends, owner="call")

    def _owner_reset(self, row: Row) -> Moves:
        row = row._replace(coverage=put(row.coverage, row.step, (row.state[0], 0)))
        if row.step + 1 < len(row.coverage):
            yield "resets word", row._replace(step=row.step + 1)
        else:
            yield "resets word", row._replace(step=0, owner="call" if self.live_before_reset else "go_live")

    def _owner_go_live(self, row: Row) -> Moves:
        after = "reset" if self.live_before_reset else "call"
        yield "row LIVE", row._replace(state=(row.state[0], "LIVE"), owner=after)

    def _owner_reap(self, row: Row) -> Moves:
        """Reads the row, then every word: all full at its generation means that a dead puller owed the
        CAS."""
        generation, state = row.state
        if state == "LIVE" and not self.reaper_forgets_full_rows:
            yield "row is LIVE", row._replace(owner="reap_words", found=generation)
        else:
            yield "nothing to consume", row._replace(owner="call")

    def _owner_reap_words(self, row: Row) -> Moves:
        if not self._is_full(row, row.step, row.found):
            yield "word is not full", row._replace(owner="call", step=0, found=0)
        elif row.step + 1 < len(row.coverage):
            yield "word is full", row._replace(step=row.step + 1)
        else:
            yield "word is full", row._replace(owner="reap_consume", step=0)

    def _owner_reap_consume(self, row: Row) -> Moves:
        yield "consumes", _end_row(row, row.found, "CONSUMED")._replace(owner="call", found=0)

    # words and bits

    def _bits(self, index: int) -> int:
        return sum(1 << tensor for tensor in self.shares[index])

    def _word(self, index: int, step: int) -> int:
        return self.shares[index][step] // self.tensors_per_word

    def _is_full(self, row: Row, word: int, generation: int) -> bool:
        tensors = range(word * self.tensors_per_word, (word + 1) * self.tensors_per_word)
        full = sum(1 << tensor for tensor in tensors)
        return row.coverage[word][1] == full and (
            self.words_without_generation or row.coverage[word][0] == generation
        )

    def covered_is_consumed(self, row: Row) -> bool:
        """When no pull runs and the dead are reaped, a row whose tensors were all covered is not LIVE:
        neither by pulls that ended well, nor by its words."""
        resting = all(
            puller.reaped or (puller.alive and puller.pc in ("done", "find")) for puller in row.pullers
        )
        generation, state = row.state
        if state != "LIVE" or row.owner != "call" or not resting:
            return True
        marked = all(self._is_full(row, word, generation) for word in range(len(row.coverage)))
        return not marked and row.ended_well[generation] != (1 << TENSORS) - 1


def _puller(row: Row, index: int, **fields: Any) -> Row:
    return row._replace(pullers=put(row.pullers, index, row.pullers[index]._replace(**fields)))


def _next_pull(row: Row, index: int) -> Row:
    pulls = row.pullers[index].pulls - 1
    fresh = Puller(pulls=pulls, pc="find" if pulls else "done")
    return row._replace(pullers=put(row.pullers, index, fresh))


def _end_well(row: Row, index: int, bits: int) -> Row:
    ended_well = _add(row.ended_well, row.pullers[index].generation, bits)
    return _next_pull(row._replace(ended_well=ended_well), index)


def _end_row(row: Row, generation: int, how: str) -> Row:
    """CAS (generation, LIVE): the one way in which a row ends. Unbinding moves the generation on in the
    same CAS."""
    if row.state != (generation, "LIVE"):
        return row
    after = (generation + 1, how) if how == "UNBOUND" else (generation, how)
    return row._replace(state=after, ends=put(row.ends, generation, (*row.ends[generation], how)))


def _add(sets: tuple[int, ...], generation: int, bits: int) -> tuple[int, ...]:
    return put(sets, generation, sets[generation] | bits)


def _ends_once(row: Row) -> bool:
    """A key ends once: consumed, removed or unbound, never two of them and never twice."""
    return all(len(ends) <= 1 for ends in row.ends)


def _consumed_means_copied(row: Row) -> bool:
    """A key is consumed only when every tensor was copied whole from it: a late mark never counts for a
    later key."""
    return all(
        row.copied[generation] == (1 << TENSORS) - 1
        for generation, ends in enumerate(row.ends)
        if "CONSUMED" in ends
    )
