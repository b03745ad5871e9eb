"""The program of a run: for each position a fork of this process, which has done nothing but import the library.

Arguments: scenario, step. Prints a JSON line for the run without any failure, with which it begins, then one a position: each once
and for ever, and that with the first errno of a call's list and with the second. Must be started with fail_nth.so in LD_PRELOAD.
"""
from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import select
import sys
import time
from typing import Any

from lives import Life, compute_patterns
from scenarios import SCENARIOS, Scenario

import shmkv._inspect
import shmkv.cli.gc  # noqa: F401 - loaded before the addresses are looked up

WATCHDOG_S = 20.0
MOST_POSITIONS = 5000
FOR_EVER = 2**32 - 1
NAMESPACE = os.environ["SHMKV_NAMESPACE"]
library = ctypes.CDLL(None)
library.nth_first_failed.restype = library.nth_tally_name.restype = ctypes.c_char_p


def names(namespace: str) -> list[str]:
    """What stands in /dev/shm for a namespace; of one without the peer, nothing of the peer's."""
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(f"{namespace}."))


def holdings(namespace: str) -> dict[str, list[str]]:
    """Descriptors, mappings of shared memory and blocks of memory that this process has."""
    gc.collect()
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            descriptors.append(_without_incarnations(os.readlink(f"/proc/self/fd/{fd}")))
        except FileNotFoundError:
            continue                        # the descriptor of the listing itself
    with open("/proc/self/maps") as maps:
        mapped = [_without_incarnations(line.split(maxsplit=5)[5].strip()) for line in maps if f"/dev/shm/{namespace}" in line]
    descriptors = [name for name in descriptors if name != "/dev/urandom"]      # Python keeps it where it has no getrandom
    return {"descriptors": sorted(descriptors), "mappings": sorted(mapped), "blocks": ["block"] * library.nth_blocks()}


def _without_incarnations(path: str) -> str:
    """The kind of a file: names of directories and segments are others each time."""
    kind, _, rest = path.removesuffix(" (deleted)").partition(f"/{NAMESPACE}")
    return kind + ".".join(part for part in rest.split(".")[:2]) if rest else path.partition(":")[0]


def more_than(found: list[str], allowed: list[str]) -> list[str]:
    """What is there more often than allowed."""
    left = list(allowed)
    more = []
    for each in found:
        if each in left:
            left.remove(each)
        else:
            more.append(each)
    return more


def live(scenario: Scenario, nth: int, last: int, variant: int, allowed: dict[str, Any] | None) -> dict[str, Any]:
    """One process: what comes before, the armed steps, what is left, then a whole life to show that all still works."""
    namespace = f"{NAMESPACE}-alone" if scenario.alone else NAMESPACE
    life = scenario.kind(scenario.role, {"SHMKV_NAMESPACE": namespace, **scenario.environment}, scenario.timeout_ms)
    os.environ.update(life.environment)
    at_first = holdings(namespace)
    take_back = None
    if life.steps(*scenario.before) and scenario.prepare is not None:
        take_back = scenario.prepare(life)
    if life.faults or any(not said.endswith("LLM_SUCCESS") for said in life.outcomes):
        life.faults.append(f"before anything failed: {life.outcomes}")
    life.outcomes.clear()
    began = time.monotonic()
    library.nth_arm(nth, last, variant)
    if scenario.run is not None:
        scenario.run(life)
    else:
        life.steps(*scenario.armed)
    library.nth_disarm()
    report = {"seen": library.nth_seen(), "failed": library.nth_failed(), "seconds": time.monotonic() - began,
              "call": library.nth_first_failed().decode(), "outcomes": life.outcomes, "tally": tallies()}
    if take_back is not None:
        take_back()
    return {**report, **afterwards(life, scenario, namespace, allowed or at_first, allowed is None), "faults": life.faults}


def afterwards(life: Life, scenario: Scenario, namespace: str, allowed: dict[str, Any], first: bool) -> dict[str, Any]:
    """Finalize; nothing may be held that a run without failures does not hold. Then a life as if nothing had been."""
    said = list(life.outcomes)
    if not life.steps("finalize"):
        life.faults.append(f"finalize once nothing fails any more: {life.outcomes[-1:]}")
    life.caches.clear()
    life.dist = None
    held = holdings(namespace)
    again = Life("DECODER", life.environment)
    whole = ("init", "allocate_small", "finalize") if scenario.alone else (
        "init", "link", "allocate_small", "pull_small", "unlink", "deallocate", "finalize")
    if not again.steps(*whole):
        life.faults.append(f"a life afterwards: {again.outcomes} {again.faults}")
    life.faults += again.faults
    again.caches.clear()
    again.dist = None
    held_later = holdings(namespace)
    if not first:
        for when, found in (("after finalize", held), ("after a life more", held_later)):
            for what, here in found.items():
                more = more_than(here, allowed[what])
                life.faults += [f"{what} {when}: {more}"] if more else []
    life.outcomes[:] = said
    return {"held": {what: max(held[what], held_later[what], key=len) for what in held}}


def tallies() -> dict[str, int]:
    """Which calls were counted, how often; only of a run in which none fails."""
    found = {}
    for place in range(32):
        name = library.nth_tally_name(place)
        if name is None:
            break
        found[name.decode()] = library.nth_tally_count(place)
    return found


def fork_and_live(scenario: Scenario, nth: int, last: int, variant: int, allowed: dict[str, Any] | None) -> dict[str, Any]:
    """The report of a child, or that it hung or died of a signal."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(readable)
        os.write(writable, json.dumps(live(scenario, nth, last, variant, allowed)).encode())
        os._exit(0)
    os.close(writable)
    said, deadline = b"", time.monotonic() + WATCHDOG_S
    while select.select([readable], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(readable, 1 << 16)
        said += piece
        if not piece:
            break
    else:
        os.kill(child, 9)
    os.close(readable)
    _, status = os.waitpid(child, 0)
    if status != 0 or not said:
        return {"seen": 0, "failed": 1, "faults": [f"ended with wait status {status}"], "outcomes": [], "call": "?", "seconds": 0.0}
    report: dict[str, Any] = json.loads(said)
    return report


def sweep(namespace: str) -> None:
    """The next init in the namespace."""
    child = os.fork()
    if child == 0:
        os._exit(0 if Life("PROMPT", {"SHMKV_NAMESPACE": namespace}).steps("init", "finalize") else 1)
    os.waitpid(child, 0)


def run(scenario: Scenario, nth: int, last: int, variant: int, allowed: dict[str, Any] | None) -> dict[str, Any]:
    """One position and what it left in /dev/shm."""
    namespace = f"{NAMESPACE}-alone" if scenario.alone else NAMESPACE
    before = names(namespace)
    report = fork_and_live(scenario, nth, last, variant, allowed)
    report["position"], report["swept"] = nth, names(namespace) != before
    if report["swept"]:
        sweep(namespace)
        left = sorted(set(names(namespace)) - set(before))
        report["faults"] += [f"left in /dev/shm after the next init: {left}"] if left else []
    return report


def main(name: str, step: int) -> None:
    logging.getLogger("shmkv").addHandler(logging.NullHandler())
    logging.getLogger("shmkv").propagate = False
    compute_patterns()
    library.nth_scan()
    gc.freeze()                             # what stands here is not looked at, and so not copied, in the forks
    scenario = SCENARIOS[name]
    clean = run(scenario, 0, 0, 0, None)
    clean["extensions"] = library.nth_extensions()
    print(json.dumps(clean), flush=True)
    if not clean["faults"]:
        for how in ("once", "for ever"):
            for variant in (0, 1):
                fail_each(scenario, how, variant, step, clean["held"])


def fail_each(scenario: Scenario, how: str, variant: int, step: int, allowed: dict[str, Any]) -> None:
    """Position after position, until a run has fewer calls than that."""
    for nth in range(1, MOST_POSITIONS, step):
        report = run(scenario, nth, nth if how == "once" else FOR_EVER, variant, allowed)
        print(json.dumps({**report, "how": f"{how}, errno {variant + 1}"}), flush=True)
        if report["failed"] == 0:
            return
    raise SystemExit(f"no clean run within {MOST_POSITIONS} positions")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
