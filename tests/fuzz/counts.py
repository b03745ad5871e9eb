"""The counts of a run."""
from __future__ import annotations

from dataclasses import dataclass, field

EPISODE = 64                        # inputs that begin with fresh tables and a seed of their own


@dataclass
class Counts:
    """What is printed at the end."""

    inputs: int = 0
    owner_inputs: int = 0
    good_headers: int = 0           # inputs that pass magic, version, fingerprint and lengths
    copies: int = 0                 # inputs of which at least one pull moved bytes
    pulls: int = 0
    pushes: int = 0                 # that were done
    waits: int = 0                  # turns of waits that ended with nothing there
    flips: int = 0                  # words that were changed right after they had been loaded, or by the other process
    refusals: int = 0               # calls of an owner that ended with an exception
    mapped: int = 0                 # segments that a reader had mapped at the end of an episode
    guarded: int = 0                # of these, between two pages that fault
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    answers: dict[int, int] = field(default_factory=dict)
