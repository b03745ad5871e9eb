"""What the tests of docs/llm_datadist.md stand on."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from guide_rows import Own


@pytest.fixture
def own(here: Callable[..., Any]) -> Own:
    """One process that pulls from itself."""
    return Own(here("PROMPT", 1, enable_switch_role=True))
