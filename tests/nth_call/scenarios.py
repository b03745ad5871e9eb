"""What is made to fail: for each scenario what comes before, which steps are armed, and how such a life goes on afterwards."""
from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import memory
from block_lives import BlockLife
from kernel_lives import KernelLife
from lend_lives import LendLife
from lives import Life
from private_lives import PrivateLife
from push_lives import PushLife, invite
from wait_lives import WaitLife

from shmkv import _copy
from shmkv._futex import LockWord
from shmkv.cli import gc as cleaning

MISSED = 10_000                 # segments that a peer gave up


@dataclass(frozen=True)
class Scenario:
    """`before` and `armed` are steps of a Life. `alone`: in a namespace of its own, without the peer."""

    armed: tuple[str, ...]
    before: tuple[str, ...] = ()
    role: str = "DECODER"
    alone: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    timeout_ms: int = 5000                                          # of pulls
    prepare: Callable[[Life], Callable[[], None]] | None = None     # after `before`; answers what takes it back
    run: Callable[[Life], None] | None = None                       # instead of `armed`
    kind: type[Life] = Life


def _leave_a_dead_one(life: Life) -> Callable[[], None]:
    """A process that joined, allocated and died."""
    child = os.fork()
    if child == 0:
        os._exit(0 if Life("PROMPT", life.environment).steps("init", "allocate_small") else 1)
    _, status = os.waitpid(child, 0)
    if status != 0:
        life.faults.append("the one that was to die could not begin")
    return lambda: None


def _hold_the_word(life: Life) -> Callable[[], None]:
    """The link's lock as a peer has it that does not go on."""
    handle = life.links().handle(1)
    assert handle is not None
    word = LockWord(handle.directory, handle.address + memory.OFFSETS["LinkRecord", "word"], 0)
    if not word.acquire(1000):
        life.faults.append("the word was not free")
    return word.release


def _miss_a_ring(life: Life) -> Callable[[], None]:
    """The peer gave up more segments than its ring remembers, as far as this process can tell."""
    handle = life.links().handle(1)
    assert handle is not None
    count = memory.word(handle.directory, "DirectoryHeader", 0, "DirectoryHeader", "segments_unlinked")
    count.value += MISSED

    def take_back() -> None:
        count.value -= MISSED

    return take_back


def _take_fallocate_away(life: Life) -> Callable[[], None]:
    """As on a file system that does not have it."""
    library = ctypes.CDLL(None)
    library.nth_without_fallocate(1)
    return lambda: library.nth_without_fallocate(0)


def _keep_runs(life: Life) -> None:
    """The list of runs of `bench/`."""
    try:
        _copy.RunList([(0, 0, 8)] * 3, 1, 1)
    except MemoryError:
        life.outcomes.append("runs: MemoryError")
    else:
        life.outcomes.append("runs: LLM_SUCCESS")


def _wait_on_two_threads(life: Life) -> None:
    """One waits for the word, the other behind it in the queue of this process."""
    other = threading.Thread(target=life.steps, args=("pull_small",))
    other.start()
    life.steps("pull_small")
    other.join()


def _clean(life: Life) -> None:
    life.step("gc", lambda: cleaning.clean(os.environ["SHMKV_NAMESPACE"]) and None)


BY_CALLS = {"SHMKV_COPY": "pread"}
HOLDING = ("init", "register", "register_host")
LINKED = ("init", "link", "allocate_small")
SCENARIOS: dict[str, Scenario] = {
    "init, alone": Scenario(("init",), alone=True),
    "init": Scenario(("init",)),
    "init after a death": Scenario(("init",), prepare=_leave_a_dead_one),
    "gc": Scenario((), prepare=_leave_a_dead_one, run=_clean),
    "link": Scenario(("link",), ("init",)),
    "allocate and publish": Scenario(("allocate_published",), ("init",), role="PROMPT"),
    "fallocate unsupported": Scenario(("init", "allocate_published"), role="PROMPT", prepare=_take_fallocate_away),
    "pull": Scenario(("pull_small",), LINKED),
    "pull by pread": Scenario(("pull_small",), LINKED, environment=BY_CALLS),
    "pull from many segments": Scenario(("pull_more",), LINKED),
    "pull after many segments went": Scenario(("pull_small",), (*LINKED, "pull_more"), prepare=_miss_a_ring),
    "pull after one segment went": Scenario(("pull_small",), (*LINKED, "pull_more", "let_one_go")),
    "a list of runs": Scenario((), LINKED, run=_keep_runs),
    "pull with the crew": Scenario(("pull_big",), ("init", "link", "allocate_big")),
    "pull_many and copy": Scenario(("pull_many", "copy"), LINKED),
    "wait for the lock": Scenario((), LINKED, prepare=_hold_the_word, run=_wait_on_two_threads, timeout_ms=100),
    "views": Scenario(("view",), LINKED),
    "view_cache": Scenario(("look", "look_at_own"), LINKED, kind=LendLife),
    "arrays of a view": Scenario(("view",), LINKED, kind=LendLife),
    "fork_cache": Scenario(("fork", "drop_fork", "fork_own"), LINKED, kind=LendLife),
    "recycle": Scenario(("deallocate", "allocate_zero", "deallocate"), LINKED),
    "index growth": Scenario(("grow", "shrink"), ("init",), role="PROMPT"),
    "deallocate": Scenario(("deallocate",), (*LINKED, "pull_small"), environment={"SHMKV_RECYCLE_BYTES": "0"}),
    "unlink": Scenario(("unlink",), (*LINKED, "pull_small")),
    "finalize": Scenario(("finalize",), (*LINKED, "pull_small")),
    "finalize, alone": Scenario(("finalize",), ("init", "allocate_small"), alone=True),
    "register": Scenario(("register", "register_host", "unregister"), ("init",), kind=BlockLife),
    "pull_blocks": Scenario(("pull_row_into_blocks", "pull_blocks"), ("init", "link", "register"), kind=BlockLife),
    "pull_blocks of its own": Scenario(("pull_own_blocks",), ("init", "register", "allocate_small"), kind=BlockLife),
    "copy_blocks": Scenario(("copy_blocks", "copy_in_turn"), ("init", "link", "register", "pull_blocks"), kind=BlockLife),
    "swap_blocks": Scenario(("swap_blocks",), (*HOLDING, "link", "pull_blocks"), kind=BlockLife),
    "swap_blocks by address": Scenario(("swap_by_address",), HOLDING, kind=BlockLife),
    "what the kernel allows": Scenario(("ask", "register_private"), ("init_manager",), kind=KernelLife,
                                       environment={"SHMKV_ALLOW_PTRACE": "1"}),
    "private memory": Scenario(("pull_private", "push_private"), ("init", "link"), kind=PrivateLife),
    "push": Scenario(("push", "push_blocks"), ("init", "allocate_source"), role="PROMPT", prepare=invite, kind=PushLife),
    "push by pwrite": Scenario(("push", "push_blocks"), ("init", "allocate_source"), role="PROMPT", prepare=invite, kind=PushLife,
                               environment=BY_CALLS),
    "push to its own": Scenario(("push_own",), ("init", "allocate_source", "allocate_target"), role="PROMPT", kind=PushLife),
    "waits for rows": Scenario(("wait_for_key", "waiting_pull"), LINKED, kind=WaitLife),
    "waits for many rows": Scenario(("waiting_pulls",), LINKED, kind=WaitLife),
    "pull_layers": Scenario(("pull_layers",), LINKED, kind=WaitLife),
    "a whole life, again": Scenario((*LINKED, "pull_small", "deallocate", "unlink", "finalize", "init", "link", "finalize")),
}
