"""Prompts of seeded tokens, for models of random numbers."""
from __future__ import annotations

import random

from models import VOCABULARY


def prompt(seed: int, tokens: int) -> list[int]:
    """The same ones for the same seed."""
    return random.Random(seed).choices(range(VOCABULARY), k=tokens)
