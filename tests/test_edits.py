"""Every mistake that is put into the sources on purpose still has its place there: an edit that fits nowhere would show nothing."""
from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import test_thread_sanitizer
from builds import ROOT, Edit
from fuzz import mutants as fuzzed
from torture import seeded as torture

sys.path.insert(0, str(Path(__file__).with_name("mutants")))
import seeded as mutants

GROUPS: dict[str, list[Edit]] = {
    **{f"mutant {number}": [edit] for number, edit in enumerate(mutants.MUTANTS)},
    **{f"torture {name}": edits for name, edits in torture.BUGS.items()},
    **{f"fuzz {name}": edits for kind in (fuzzed.UNCHECKED, fuzzed.READ_TWICE, fuzzed.ENDLESS) for name, edits in kind.items()},
    **{f"order {name}": edits for name, (_, edits) in test_thread_sanitizer.WEAKENED.items()},
}


@pytest.mark.parametrize("edits", GROUPS.values(), ids=GROUPS.keys())
def test_an_edit_has_one_place_and_changes_it(edits: list[Edit], tmp_path: Path) -> None:
    for file in {edit.file for edit in edits}:
        shutil.copy(ROOT / "shmkv" / file, tmp_path)
    before = {edit.file: (tmp_path / edit.file).read_text() for edit in edits}
    for edit in edits:
        edit.apply(tmp_path)
    assert all((tmp_path / file).read_text() != text for file, text in before.items())


def test_there_are_as_many_mutants_as_were_wanted() -> None:
    assert len(mutants.MUTANTS) >= 60
