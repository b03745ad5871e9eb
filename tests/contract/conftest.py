"""Fixtures of the contract's tests."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from own_blocks import OwnBlocks


@pytest.fixture
def own(here: Callable[..., Any]) -> OwnBlocks:
    """A decoder in this process with keys of blocks and of a row of its own."""
    return OwnBlocks(here("PROMPT", 1, enable_switch_role=True))
