"""Every field case has a test that carries its id, or stands in one of two lists with the reason, and never in both."""
from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
EVERY = set(range(1, 85))


def _tested() -> set[int]:
    found: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        found |= {int(number) for number in re.findall(r"^def test_fr_(\d{3})_", path.read_text(), re.MULTILINE)}
    return found


def _listed(name: str) -> dict[int, str]:
    lines = Path(__file__).with_name(name).read_text().splitlines()
    entries = [re.fullmatch(r"FR-(\d{3})  (\S.*)", line) for line in lines if not line.startswith("#")]
    assert all(entries), f"each line of {name} is an id, two spaces and a reason"
    return {int(entry[1]): entry[2] for entry in entries if entry}


def test_every_case_is_tested_or_listed_once() -> None:
    not_yet, cannot_run = _listed("not_yet.txt"), _listed("cannot_run.txt")
    places = {"a test": _tested(), "not_yet.txt": set(not_yet), "cannot_run.txt": set(cannot_run)}
    of = {number: [place for place, numbers in places.items() if number in numbers] for number in EVERY}
    assert {number: found for number, found in of.items() if len(found) != 1} == {}, "each in one place"
    assert set().union(*places.values()) == EVERY, "no other ids"
