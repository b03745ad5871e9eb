"""What prompts and decoders have in common: a life, calls with a deadline, faults, what is left of them.

A worker runs until it is killed or told to end. Whatever the contract does not allow it writes into the run's file of faults; the
referee ends the run then.
"""
from __future__ import annotations

import gc
import json
import os
import random
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum, auto
from pathlib import Path

from shmkv import LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from shmkv.kv_cache_manager import KvCacheManager
from torture.arguments import Plan
from torture.board import Board, Field, Wanted
from torture.clock import Clock

SYNC_KV_TIMEOUT_MS = 10_000


class Call(IntEnum):
    """What a worker is doing, for whoever finds it hanging."""

    NOTHING = 0
    INIT = auto()
    FINALIZE = auto()
    ALLOCATE = auto()
    FREE = auto()
    PUBLISH = auto()
    LINK = auto()
    UNLINK = auto()
    PULL = auto()
    CHECK = auto()
    LEND = auto()
    PUSH = auto()
    WAIT = auto()


class Fault(Exception):
    """Something that must not happen."""


def cluster_info(cluster_id: int) -> LLMClusterInfo:
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("127.0.0.1", 1)
    info.append_remote_ip_info("127.0.0.1", 1)
    return info


def cluster_of(worker: int) -> int:
    """Cluster ids are the numbers of the workers, from 1."""
    return worker + 1


class Worker(ABC):
    """Common to `Prompt` and `Decoder`."""

    role: LLMRole
    manager: KvCacheManager

    def __init__(self, plan: Plan, board: Board, number: int, faults: Path) -> None:
        self.plan = plan
        self.board = board
        self.number = number
        self.faults = faults
        self.mine = board.fields[number]
        self.life = int(self.mine[Field.LIFE])
        self.random = random.Random(f"{plan.seed}-{number}-{self.life}")
        self.clock = Clock(board, number)
        self.fds = len(os.listdir("/proc/self/fd"))

    # -- a life -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until it is told to end; a fault ends it at once."""
        try:
            self.start()
            while self.mine[Field.WANTED] == Wanted.RUN:
                self.step()
            self.settle()
            self.finalize()
            self.count_leaks()
            self.mine[Field.ENDED] = 1
        except Exception as error:
            self.report(error)
            raise SystemExit(3) from error

    def start(self) -> None:
        """init, under the number of a new life."""
        with self.calls(Call.INIT):
            config = LLMConfig()
            config.sync_kv_timeout = SYNC_KV_TIMEOUT_MS
            self.dist = LLMDataDist(self.role, cluster_of(self.number))
            self.dist.init(config.generate_options())
            self.manager = self.dist.kv_cache_manager
        assert self.dist._cluster is not None
        self.mine[Field.INCARNATION] = self.dist._cluster.member.incarnation - 2**63
        self.prepare()
        self.mine[Field.READY] = self.life

    def finalize(self) -> None:
        self.mine[Field.LEAVING] = self.life
        with self.calls(Call.FINALIZE):
            self.dist.finalize()

    def restart(self) -> None:
        """finalize and init again, in the same process and under the same cluster id."""
        self.finalize()
        self.life += 1
        self.mine[Field.LIFE] = self.life
        self.count(Field.RESTARTS)
        self.start()

    def prepare(self) -> None:
        """What it needs before it works."""

    @abstractmethod
    def step(self) -> None:
        """One call or a few."""

    def settle(self) -> None:
        """What it frees by itself before it finalizes."""

    def forget(self) -> None:
        """Let go of every cache."""

    # -- counting ---------------------------------------------------------------------------------------------------

    def count(self, field: Field, number: int = 1) -> None:
        self.mine[field] += number

    @contextmanager
    def calls(self, call: Call) -> Iterator[None]:
        """The referee takes a worker that is inside for too long for a hanging one."""
        self.mine[Field.CALL] = call
        self.mine[Field.CALL_NS] = time.monotonic_ns()
        yield
        self.mine[Field.CALL_NS] = 0

    def choose(self, actions: list[tuple[float, Callable[[], None]]]) -> None:
        """Do one of (weight, action)."""
        (action,) = self.random.choices([action for _, action in actions], [weight for weight, _ in actions])
        action()

    # -- faults and leaks ---------------------------------------------------------------------------------------------

    def report(self, error: Exception) -> None:
        known = isinstance(error, (Fault, LLMException))
        self.count(Field.FAULTS)
        with self.faults.open("a") as file:
            file.write(json.dumps({"worker": f"{self.role.name.lower()} {self.number}", "life": self.life, "pid": os.getpid(),
                                   "fault": str(error) if known else repr(error),
                                   "trace": traceback.format_exc()}) + "\n")

    def count_leaks(self) -> None:
        """After finalize, with nothing held any more. One descriptor may stay open: the life file of a namespace in which others
        live."""
        self.forget()
        del self.manager, self.dist
        gc.collect()
        maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if f"/{self.plan.namespace}." in line]
        ends = [[int(end, 16) for end in line[0].split("-")] for line in maps]
        self.mine[Field.MAPS] = len(maps)
        self.mine[Field.MAP_NBYTES] = sum(end - begin for begin, end in ends)
        self.mine[Field.FDS] = len(os.listdir("/proc/self/fd")) - self.fds - self._life_files()

    def _life_files(self) -> int:
        descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        targets = [os.readlink(each) for each in descriptors if os.path.islink(each)]
        return min(1, sum(target.startswith(f"/dev/shm/{self.plan.namespace}.life") for target in targets))


def only(result: tuple[LLMStatusCode, list[LLMStatusCode]]) -> LLMStatusCode:
    """The status of a link call for one cluster."""
    overall, each = result
    if len(each) != 1:
        raise Fault(f"a link call for one cluster answered {overall!r}, {each!r}")
    return each[0]
