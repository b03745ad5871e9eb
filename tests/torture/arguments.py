"""What a run is asked for."""
from __future__ import annotations

import argparse
import json
import os
import secrets
from dataclasses import asdict, dataclass

from torture.seeded import BUGS, SHARES

SEEDED_MINUTES = 5.0


@dataclass(frozen=True)
class Plan:
    """The same for all processes of a run; handed to them as JSON."""

    namespace: str
    seed: int
    prompts: int = 3
    decoders: int = 4
    minutes: float = 1.0
    kills: int = 0                      # go on until there were so many, too
    pulls: int = 0
    kills_per_s: float = 30.0
    stops_per_s: float = 300.0
    hunt: float = 0.3                   # share of the kills that wait for somebody who holds a lock
    apart: float = 0.05                 # share of the restarts that start a new interpreter
    lend: float = 0.3                   # share of a decoder's steps that open, look at and close views and forks
    push: float = 0.15                  # share of a decoder's steps that look after pushes
    phase_s: float = 10.0               # on all cores, then on one, and so on
    seeded: str = ""
    log: str = ""

    @property
    def workers(self) -> int:
        return self.prompts + self.decoders

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        return cls(**json.loads(text))


def parse(words: list[str]) -> Plan:
    """The command line of `python -m torture`."""
    parser = argparse.ArgumentParser("torture", description="Kill and stop prompts and decoders while they work; "
                                     "exit 1 on a fault.")
    parser.add_argument("--minutes", type=float, help="how long, at least (default 1; with --seeded: at most 5)")
    parser.add_argument("--kills", type=int, help="go on until so many processes were killed")
    parser.add_argument("--pulls", type=int, help="go on until so many pulls were checked")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--decoders", type=int)
    parser.add_argument("--kills-per-s", type=float)
    parser.add_argument("--stops-per-s", type=float)
    parser.add_argument("--hunt", type=float, help="share of the kills that wait for a process that holds a lock")
    parser.add_argument("--apart", type=float, help="share of the restarts that start a new interpreter instead of forking one")
    parser.add_argument("--lend", type=float, help="share of a decoder's steps that are views and forks, 0 for none")
    parser.add_argument("--push", type=float, help="share of a decoder's steps that look after pushes, 0 for none")
    parser.add_argument("--phase-s", type=float, help="seconds on all cores, then on one, and so on")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--seeded", choices=sorted(BUGS), help="run a build that has this bug, until the storm finds it")
    parser.add_argument("--json", dest="log", metavar="FILE", help="write the report there, too")
    given = {name: value for name, value in vars(parser.parse_args(words)).items() if value is not None}
    if "log" in given:
        given["log"] = os.path.abspath(given["log"])
    if "seeded" in given:
        given = {"minutes": SEEDED_MINUTES, **SHARES.get(given["seeded"], {}), **given}
    return Plan(namespace=f"torture{os.getpid():x}-{secrets.token_hex(4)}", **given)
