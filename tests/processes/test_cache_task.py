"""Waiting for a task: threads, signals, a system without threads. The pushes are to the own cluster, gated by the test."""
from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Callable
from typing import Any

import cache_bytes
import numpy as np
import pytest
from agent_pushes import Gates
from reference import noise

from shmkv import CacheDesc, CacheTask, DataType, LLMException, LLMStatusCode, TransferConfig

pytestmark = pytest.mark.timeout(60)
Here = Callable[..., Any]
OK, TIMEOUT = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT


class Pushing:
    """A prompt that pushes to itself; layer 0 has to be let go."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.src, self.dst = (manager.allocate_cache(CacheDesc(4, [2, 8], DataType.DT_FLOAT16)) for _ in range(2))
        cache_bytes.write(self.src, noise(cache_bytes.geometry_of(self.src), seed=3))
        self.gates = Gates([0], [], [])

    def start(self) -> CacheTask:
        configs = [TransferConfig(1, self.dst.per_device_tensor_addrs[0])]
        task = self.manager.transfer_cache_async(self.src, self.gates, configs)
        assert isinstance(task, CacheTask)
        return task

    def is_done(self) -> bool:
        return bool((cache_bytes.read(self.dst)[:, :, 0] == cache_bytes.read(self.src)[:, :, 0]).all())


@pytest.fixture
def pushing(here: Here) -> Pushing:
    return Pushing(here("PROMPT", 1).kv_cache_manager)


def test_all_who_wait_are_told(pushing: Pushing) -> None:
    task = pushing.start()
    found: list[Any] = []
    waiting = [threading.Thread(target=lambda: found.append(task.synchronize())) for _ in range(3)]
    waiting.append(threading.Thread(target=lambda: found.append(task.get_results())))
    for thread in waiting:
        thread.start()
    pushing.gates.gates[0].set()
    for thread in waiting:
        thread.join()
    assert [each for each in found if each != [OK]] == [OK] * 3
    assert pushing.is_done()


def test_a_wait_that_is_too_short_changes_nothing(pushing: Pushing) -> None:
    task = pushing.start()
    assert (task.synchronize(0), task.get_results(20), task.synchronize(20)) == (TIMEOUT, [TIMEOUT], TIMEOUT)
    pushing.gates.gates[0].set()
    assert (task.synchronize(), task.get_results(), task.synchronize(0), task.get_results(0)) == (OK, [OK], OK, [OK])


def test_a_signal_handler_may_ask_in_the_middle_of_a_wait(pushing: Pushing) -> None:
    task = pushing.start()
    seen: list[Any] = []

    def handler(number: int, frame: object) -> None:
        seen.append(task.synchronize(0))
        pushing.gates.gates[0].set()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.main_thread().ident
        assert main is not None
        threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGUSR1)).start()
        assert task.synchronize() == OK
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [TIMEOUT]


def test_an_interrupted_wait_leaves_the_transfer_alone(pushing: Pushing) -> None:
    task = pushing.start()
    main = threading.main_thread().ident
    assert main is not None
    threading.Timer(0.05, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        task.synchronize()
    pushing.gates.gates[0].set()
    assert task.synchronize() == OK
    assert pushing.is_done()


def test_a_dropped_task_goes_on(pushing: Pushing) -> None:
    task = pushing.start()
    other = pushing.start()
    del task
    pushing.gates.gates[0].set()
    assert other.synchronize() == OK
    assert pushing.is_done()


def test_a_task_is_not_copied(pushing: Pushing) -> None:
    pushing.gates.gates[0].set()
    task = pushing.start()
    with pytest.raises(TypeError):
        copy.copy(task)
    assert task.synchronize() == OK


def test_a_system_without_threads_is_an_answer(pushing: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(LLMException, match="cannot push") as failure:
            pushing.start()
    assert failure.value.status_code == LLMStatusCode.LLM_FAILED
    assert pushing.src._own.local.uses == 0                 # nothing holds the source
    pushing.gates.gates[0].set()
    assert pushing.start().synchronize() == OK


def test_a_start_that_is_interrupted_leaves_nothing(pushing: Pushing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the start of the thread and the return: the thread may run, or not; the source is left once."""
    original = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        original(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pushing.start()
    pushing.gates.gates[0].set()
    for thread in threading.enumerate():
        if thread.name == "shmkv-push":
            thread.join()
    assert pushing.src._own.local.uses == 0


def test_the_caller_may_change_its_configs_while_they_are_pushed(pushing: Pushing) -> None:
    addresses = list(pushing.dst.per_device_tensor_addrs[0])
    config = TransferConfig(1, addresses)
    configs = [config]
    task = pushing.manager.transfer_cache_async(pushing.src, pushing.gates, configs)
    addresses[:] = [0] * 4
    config.dst_cluster_id, config.src_layer_range = 99, range(1)
    configs.clear()
    pushing.gates.gates[0].set()
    assert task.get_results() == [OK]
    assert config.src_layer_range == range(1)
    assert pushing.is_done()


def test_what_a_synchronizer_answers_counts_by_its_truth(pushing: Pushing) -> None:
    class Odd(Gates):
        answers: Any = None

        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            return self.answers         # type: ignore[no-any-return]

    pushing.gates = Odd([], [], [])
    for answer, status in ((None, LLMStatusCode.LLM_PARAM_INVALID), (0, LLMStatusCode.LLM_PARAM_INVALID), (1, OK),
                           (np.True_, OK)):
        Odd.answers = answer
        assert pushing.start().synchronize() == status
