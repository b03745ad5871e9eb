"""The engine of the protocol model: every order of steps, with a failure before each of them.

A model is a start state, a function that names the steps possible in a state, and promises that must hold in
every state that can be reached. States are immutable and hashable; one step is one access to shared memory,
one system call, or one failure of a process. Memory is sequentially consistent here, except where a model
delays a store; which order each access of the code needs to make that true says `weak_memory`.

Sub-models: `model_lock` (the two-sided word), `model_link` (the life and re-use of a link's slot),
`model_cache` (hazard, retire, recycle), `model_rows` (coverage, consume), `model_members` (join, sweep,
leave), `model_segments` (a cache's file, and mappings of it), `model_publish` (progress and its waiters),
`model_index` (keys found while the index changes), `model_waits` (layers that are waited for with a
lease), `model_leases` (views and forks that outlive call, link and holder). The code uses their names for
states and transitions.
`model_points` says which step stands for which point of the crash matrix.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

S = TypeVar("S", bound=Hashable)
T = TypeVar("T")

#: A label that starts with this is a failure (crash, stop, lost life byte): it may happen, and never helps.
FAULT = "!"

Promise = Callable[[Any], bool]
Steps = Callable[[S], Iterable[tuple[str, S]]]


class Model(Protocol[S]):
    """What `check` needs: where to start, what may happen, what must always hold."""

    @property
    def promises(self) -> Sequence[Promise]: ...

    def initial(self) -> S: ...

    def steps(self, state: S, /) -> Iterable[tuple[str, S]]: ...


class Violation(AssertionError):
    """A reachable state breaks a promise; the message holds the shortest way to it."""


@dataclass(frozen=True)
class Explored(Generic[S]):
    """All reachable states and, by index, where the steps that are not failures lead.

    `reached_from[i]` is (index of the state before, label): a shortest way back to the start.
    """

    states: list[S]
    successors: list[list[int]]
    reached_from: list[tuple[int, str]]
    transitions: int

    def trace(self, index: int) -> str:
        """The shortest way from the start to state `index`, one line a step."""
        lines = []
        while index:
            index_before, label = self.reached_from[index]
            lines.append(f"  {label:<38} {_difference(self.states[index_before], self.states[index])}")
            index = index_before
        return "\n".join(["  start: " + repr(self.states[0]), *reversed(lines)])

    def assert_always_reaches(self, goal: Callable[[S], bool], what: str) -> None:
        """From every reachable state some order of steps without a further failure leads to `goal`."""
        hopeful = self._states_that_reach(goal)
        for index in range(len(self.states)):
            if index not in hopeful:
                raise Violation(f"stuck: {what} can no longer happen\n{self.trace(index)}")

    def assert_always_ends(self, excused: Callable[[S], bool], what: str) -> None:
        """Without a further failure no order of steps goes on for ever, save through `excused` states."""
        waiting = [0] * len(self.states)
        kept = [not excused(state) for state in self.states]
        for index, following in enumerate(self.successors):
            for target in following if kept[index] else ():
                waiting[target] += 1
        ready = [index for index, count in enumerate(waiting) if kept[index] and count == 0]
        for index in ready:  # grows while it is walked: Kahn's order
            for target in self.successors[index]:
                waiting[target] -= 1
                if waiting[target] == 0 and kept[target]:
                    ready.append(target)
        on_a_circle = set(range(len(self.states))).difference(ready)
        for index in sorted(on_a_circle):
            if kept[index]:
                raise Violation(f"livelock: {what} may never happen\n{self.trace(index)}")

    def _states_that_reach(self, goal: Callable[[S], bool]) -> set[int]:
        predecessors: list[list[int]] = [[] for _ in self.states]
        for index, following in enumerate(self.successors):
            for target in following:
                predecessors[target].append(index)
        found = {index for index, state in enumerate(self.states) if goal(state)}
        queue = list(found)
        while queue:
            for before in predecessors[queue.pop()]:
                if before not in found:
                    found.add(before)
                    queue.append(before)
        return found


def explore(initial: S, steps: Steps[S], promises: Sequence[Promise]) -> Explored[S]:
    """Visit every state reachable from `initial`, breadth first; raise Violation at the first broken promise.

    `steps` yields (label, next state); a promise answers whether it holds, its docstring says what it is.
    """
    found = Explored[S]([initial], [], [(0, "start")], 0)
    index_of = {initial: 0}
    queue = deque([0])
    transitions = 0
    _check_promises(found, 0, promises)
    while queue:
        following: list[int] = []
        for label, state in steps(found.states[queue.popleft()]):
            transitions += 1
            index = index_of.setdefault(state, len(found.states))
            if index == len(found.states):
                found.states.append(state)
                found.reached_from.append((len(found.successors), label))
                _check_promises(found, index, promises)
                queue.append(index)
            if not label.startswith(FAULT):
                following.append(index)
        found.successors.append(following)
    return Explored(found.states, found.successors, found.reached_from, transitions)


def check(model: Model[S]) -> Explored[S]:
    """Explore a model with its own promises."""
    return explore(model.initial(), model.steps, model.promises)


def put(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """`values` with one place changed."""
    return (*values[:index], value, *values[index + 1 :])


def _check_promises(found: Explored[S], index: int, promises: Sequence[Promise]) -> None:
    for promise in promises:
        if not promise(found.states[index]):
            words = " ".join((promise.__doc__ or promise.__name__).split())
            raise Violation(f"broken: {words}\n{found.trace(index)}")


def _difference(before: object, after: object) -> str:
    """What a step changed, by field names; nested named tuples and tuples of them are opened."""
    return ", ".join(_changes("", before, after))


def _changes(name: str, before: Any, after: Any) -> Iterator[str]:
    if before == after:
        return
    if hasattr(after, "_fields") and type(before) is type(after):
        for field in after._fields:
            yield from _changes(f"{name}.{field}".lstrip("."), getattr(before, field), getattr(after, field))
    elif isinstance(after, tuple) and isinstance(before, tuple) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from _changes(f"{name}[{index}]", old, new)
    else:
        yield f"{name}={after!r}"
