"""Weak memory: every order in which processors may carry out the accesses of a few threads.

A thread is a short list of accesses. Each may be carried out before accesses that stand in front of it, unless an order, a
fence, the place or a value that it needs forbids it; what is carried out is seen by everybody at once. That is the memory of
x86, ARMv8 and RISC-V ("multi-copy atomic"), with one thing taken from C11: an exchange, add or compare-and-swap is a load and a
store that nobody gets between, but the thread's later accesses wait for its load alone. (On x86, and with ARMv8.1's atomic
instructions, they wait for both; a loop of load-exclusive and store-exclusive behaves as here.)

What comes before what:
  an acquire load (of an exchange, too) before everything later; a release store after everything earlier; a seq_cst store
  before a later seq_cst load; two accesses to one place in their order; a store after every condition it stands under.
A load may be carried out before the condition it stands under is known: processors do.

An access or a fence bears the *site* it stands for, a call in the sources:
"<file>:<function>:<call>#<n>". The order follows from the name of the call; `Scenario.weakened` gives it another one, and
`Scenario.without` drops a load that looks at a place a second time.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

ACQUIRE, RELEASE, SEQ = 1, 2, 4
ORDERS = {"relaxed": 0, "acquire": ACQUIRE, "release": RELEASE, "acq_rel": ACQUIRE | RELEASE, "seq": ACQUIRE | RELEASE | SEQ}

Registers = Mapping[str, Any]
Value = Callable[[Registers], Any]


class _NotYet(Exception):
    """A register that no load has filled so far."""


class _Known(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise _NotYet


@dataclass(frozen=True)
class Access:
    """One access, or a fence (which has no place). A swap, exchange or add loads and stores."""

    place: str
    order: int = 0
    loads: bool = False
    stores: bool = False
    into: str = ""                      # the register that takes what was loaded
    value: Value | None = None          # what is stored; of a load: taken instead of a look at the place
    expected: Value | None = None       # a compare-and-swap stores only where it finds this
    when: Value | None = None           # the condition that a store stands under
    site: str = ""
    again: str = ""                     # a second look: the register of the first

    def halves(self) -> tuple[Access, ...]:
        """What is carried out in one step each: a swap's load, then its store."""
        if not (self.loads and self.stores):
            return (self,)
        return replace(self, stores=False, order=self.order & ~RELEASE), replace(self, loads=False, order=self.order & ~ACQUIRE)


def comes_first(first: Access, later: Access) -> bool:
    """Must `first`, which stands in front of `later`, be over before `later` is carried out?"""
    if not first.place:
        return bool(first.order & ACQUIRE or later.stores or not later.place)
    if not later.place:
        return bool(first.loads or later.order & RELEASE)
    return bool(first.place == later.place or (first.loads and first.order & ACQUIRE) or (later.stores and later.order & RELEASE)
                or (first.stores and later.loads and first.order & later.order & SEQ))


Filled = tuple[tuple[str, Any], ...]
State = tuple[tuple[Hashable, ...], tuple[tuple[int, Filled], ...]]     # places; of each thread what is done, and its registers
Thread = tuple[Access, ...]


@dataclass(frozen=True)
class Scenario:
    """Threads on a few places, and what must hold when all are over (`promise` gets registers and places, by name).

    `may_die`: threads that may go no further at any access.
    """

    name: str
    start: Mapping[str, Any]
    threads: tuple[Thread, ...]
    promise: Value
    may_die: frozenset[int] = frozenset()
    states: list[int] = field(default_factory=list, compare=False)      # how many each whole exploration visited

    def sites(self) -> dict[str, Access]:
        return {access.site: access for thread in self.threads for access in thread if access.site}

    def weakened(self, site: str, order: int) -> Scenario:
        """One access with another order; a fence without any is gone."""
        return self._changed(site, lambda access: replace(access, order=order) if access.place or order else None)

    def without(self, site: str) -> Scenario:
        """A second look that does not take place: what the first saw is taken for granted."""
        first = self.sites()[site].again
        return self._changed(site, lambda access: replace(access, place="-", order=0, value=lambda seen: seen[first]))

    def _changed(self, site: str, change: Callable[[Access], Access | None]) -> Scenario:
        assert site in self.sites(), f"{self.name} has no {site}"
        threads = tuple(tuple(new for access in thread if (new := change(access) if access.site == site else access))
                        for thread in self.threads)
        return replace(self, threads=threads)

    def failure(self) -> str:
        """"" if the promise holds however it goes; else one way to break it."""
        machine = _Machine(self)
        begin: State = (tuple(self.start.values()), tuple((0, ()) for _ in self.threads))
        before: dict[State, tuple[State, str] | None] = {begin: None}
        stack = [begin]
        while stack:
            state = stack.pop()
            if machine.is_over(state) and not self.promise(machine.everything(state)):
                return _way(before, state)
            for label, following in machine.steps(state):
                if following not in before:
                    before[following] = (state, label)
                    stack.append(following)
        self.states.append(len(before))
        return ""


class _Machine:
    """A scenario taken apart: halves of accesses, and for each the ones that come first, as bits."""

    def __init__(self, scenario: Scenario) -> None:
        self.places = {place: number for number, place in enumerate(scenario.start)}
        self.may_die = scenario.may_die
        self.threads = [[half for access in thread for half in access.halves()] for thread in scenario.threads]
        self.first = [[sum(1 << i for i in range(j) if comes_first(thread[i], thread[j])) for j in range(len(thread))]
                      for thread in self.threads]

    def is_over(self, state: State) -> bool:
        return all(done == (1 << len(self.threads[index])) - 1 or index in self.may_die
                   for index, (done, _) in enumerate(state[1]))

    def everything(self, state: State) -> dict[str, Any]:
        registers = {name: value for _, filled in state[1] for name, value in filled}
        return {**{place: state[0][number] for place, number in self.places.items()}, **registers}

    def steps(self, state: State) -> Iterator[tuple[str, State]]:
        memory, progress = state
        for index, (done, filled) in enumerate(progress):
            known = _Known(filled)
            for number, access in enumerate(self.threads[index]):
                if done >> number & 1 or self.first[index][number] & ~done:
                    continue
                try:
                    after, gained = self._carry_out(access, memory, known, self._is_taken(state, index, access.place))
                except _NotYet:
                    continue
                registers = tuple(sorted({**known, **gained}.items(), key=lambda item: item[0]))
                label = f"{index}: {access.site or access.place} {'stores' if access.stores else gained}"
                yield label, (after, (*progress[:index], (done | 1 << number, registers), *progress[index + 1:]))

    def _carry_out(self, access: Access, memory: tuple[Hashable, ...], known: _Known,
                   is_taken: bool) -> tuple[tuple[Hashable, ...], dict[str, Any]]:
        """The places afterwards and the registers filled; _NotYet if it has to wait."""
        if not access.place:
            return memory, {}
        if not access.stores:
            return memory, self._load(access, memory, known, is_taken)
        assert access.value is not None
        if access.when is not None and not access.when(known):
            return memory, {}
        if is_taken or (access.expected is not None and not known[access.into + "?"]):
            if is_taken:
                raise _NotYet
            return memory, {}
        at = self.places[access.place]
        return (*memory[:at], access.value(known), *memory[at + 1:]), {}

    def _load(self, access: Access, memory: tuple[Hashable, ...], known: _Known, is_taken: bool) -> dict[str, Any]:
        if access.place == "-":
            assert access.value is not None
            return {access.into: access.value(known)}
        found = memory[self.places[access.place]]
        if access.value is None:
            return {access.into: found}
        if access.when is not None and not access.when(known):
            return {access.into: None, access.into + "?": False}
        if is_taken:
            raise _NotYet
        return {access.into: found, access.into + "?": access.expected is None or access.expected(known) == found}

    def _is_taken(self, state: State, me: int, place: str) -> bool:
        """Is another thread's swap of this place half done? Then nobody else stores there."""
        for index, (done, _) in enumerate(state[1]):
            thread = self.threads[index]
            for number in range(len(thread) - 1) if index != me else ():
                swaps = thread[number].value is not None and thread[number].loads and thread[number].place == place
                if swaps and done >> number & 1 and not done >> number + 1 & 1:
                    return True
        return False


def _way(before: Mapping[State, tuple[State, str] | None], state: State) -> str:
    lines = []
    while (step := before[state]) is not None:
        state, label = step
        lines.append("  " + label)
    return "\n".join(reversed(lines))


# -- how scenarios are written ---------------------------------------------------------------------------------------

def read(place: str, into: str) -> Access:
    """A load without any order: of bytes, of a field of a record."""
    return Access(place, loads=True, into=into)


def write(place: str, value: Any, when: Value | None = None) -> Access:
    """A store without any order."""
    return Access(place, stores=True, value=_value(value), when=when)


def at(site: str, place: str = "", value: Any = None, *, into: str = "", expected: Any = None, when: Value | None = None,
       again: str = "") -> Access:
    """The access or fence of a call in the sources, with the order that its name says."""
    call = site.rsplit(":", 1)[1].split("#")[0]
    verb, _, order = call.rpartition("_")
    verb = verb.rstrip("0123456789")
    bits = ORDERS[order]
    if verb == "fence":
        return Access("", bits, site=site)
    loads, stores = verb != "store", verb != "load"
    bits &= ~(0 if loads else ACQUIRE) & ~(0 if stores else RELEASE)
    return Access(place, bits, loads, stores, into or (site if loads else ""), _value(value) if stores else None,
                  None if expected is None else _value(expected), when, site, again)


def _value(value: Any) -> Value:
    return value if callable(value) else lambda seen: value
