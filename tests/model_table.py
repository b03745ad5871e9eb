"""The explorations of the protocol as it is: docs/reliability.md has their sizes, `python tests/model_table.py` counts them."""
from __future__ import annotations

from typing import Any

from model import Model, check
from model_cache import HazardModel
from model_index import IndexModel
from model_leases import LeaseModel
from model_link import A, B, C, LinkModel
from model_lock import LockModel
from model_members import SWEEPER, Member, MembersModel
from model_publish import PublishModel
from model_rows import CoverageModel
from model_segments import SegmentsModel
from model_waits import WaitModel

CRASH_OR_STOP = frozenset({"crashes", "stops"})

#: (sub-model, what runs) -> the model.
EXPLORED: dict[tuple[str, str], Model[Any]] = {
    ("model_lock", "two sides, two calls each, a crash anywhere"): LockModel(faults=frozenset({"crashes"})),
    ("model_lock", "a lost life byte anywhere"): LockModel(faults=frozenset({"loses its life byte"})),
    ("model_lock", "steps take no time, crashes and stops"): LockModel(prompt=True, deadlines=False, faults=CRASH_OR_STOP),
    ("model_lock", "the same with deadlines"): LockModel(prompt=True, faults=CRASH_OR_STOP),
    ("model_lock", "stops and deadlines alone"): LockModel(faults=frozenset({"stops"})),
    ("model_link", "acceptor acts, one new linker"): LinkModel((A, B, C)),
    ("model_link", "two new linkers"): LinkModel(acceptor_acts=False),
    ("model_cache", "a reader by key, one by id"): HazardModel((False, True)),
    ("model_cache", "two by key"): HazardModel((False, False)),
    ("model_cache", "a reader by key, one by id, lost life bytes"): HazardModel((False, True), last=2, lost_life_bytes=True),
    ("model_cache", "two by key, lost life bytes"): HazardModel((False, False), last=2, lost_life_bytes=True),
    ("model_rows", "halves in one word"): CoverageModel(((0,), (1,)), 2),
    ("model_rows", "halves in a word each"): CoverageModel(((0,), (1,)), 1),
    ("model_rows", "overlapping, one word"): CoverageModel(((0, 1), (1,)), 2),
    ("model_rows", "overlapping, a word each"): CoverageModel(((0, 1), (1,)), 1),
    ("model_members", "three join"): MembersModel((Member(1), Member(1), Member(2))),
    ("model_members", "two of one id join, one sweeps"): MembersModel((Member(1), Member(1), SWEEPER)),
    ("model_members", "two join, one sweeps"): MembersModel((Member(1), Member(2), SWEEPER)),
    ("model_members", "two layout versions"): MembersModel((Member(1), Member(2, version=1), Member(3, version=1))),
    ("model_segments", "an owner makes three caches in one slot, a reader with two calls, a sweeper"): SegmentsModel(),
    ("model_publish", "two tensors, one waiting reader, steps take no time"): PublishModel(prompt=True),
    ("model_publish", "two tensors, one waiting reader"): PublishModel(prompt=False),
    ("model_index", "two growths, one reader with two probes"): IndexModel(),
    ("model_waits", "two layers of a key, a reader that sleeps between them"): WaitModel(),
    ("model_waits", "two layers of a cache by its id"): WaitModel(by_id=True),
    ("model_leases", "a view, its owner, who wants the record, a sweeper"): LeaseModel(),
    ("model_leases", "a fork"): LeaseModel(forks=True),
    ("model_leases", "a view, a lost life byte while it is open"): LeaseModel(lost_life_bytes=True, ends_in_two_steps=False),
    ("model_leases", "a fork, a lost life byte while it stands"): LeaseModel(True, lost_life_bytes=True, ends_in_two_steps=False),
}


def row(name: tuple[str, str]) -> str:
    """The line of the page, counted."""
    explored = check(EXPLORED[name])
    return f"| `{name[0]}` | {name[1]} | {len(explored.states):,} | {explored.transitions:,} |"


def main() -> None:
    rows = [row(name) for name in EXPLORED]
    print("\n".join(rows))
    print(f"{len(rows)} explorations, {sum(int(each.split('|')[3].replace(',', '')) for each in rows):,} states")


if __name__ == "__main__":
    main()
