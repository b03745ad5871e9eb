"""docs/vllm.md names tests that are there, and settings as they are."""
from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from shmkv.integrations.vllm.counters import COUNTED
from shmkv.integrations.vllm.settings import ConnectorSettings

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = (TESTS.parent / "docs" / "vllm.md").read_text()


@pytest.mark.parametrize(("file", "name"), sorted(set(re.findall(r"(\w+\.py)::(\w+)", DOCUMENT))))
def test_a_test_that_is_named_is_there(file: str, name: str) -> None:
    (path,) = [path for folder in ("engines", "integrations") for path in (TESTS / folder).glob(file)]
    assert f"\ndef {name}(" in path.read_text()


def test_all_settings_and_counts_are_named() -> None:
    for name in [*(field.name for field in fields(ConnectorSettings)), *COUNTED]:
        assert f"`{name}`" in DOCUMENT
