"""Ways to get a cache's bytes out of another process, each as a contender: ours, the bare C copy, and what a user would write.

Every one of them reads memory that is mapped and warm and writes rows that begin at the same byte of their page. The bare C copy
does exactly our runs, from the same pages to the same addresses.
"""
from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import programs
from cluster import Attached, ByteArray, Source, bytes_at
from measure import Contender, repeat
from workloads import PAGE, Runs, equal_parts

import shmkv
from shmkv._copy import RunList

# Enough to see a wrong copy, too little to cost more than the copy: one byte in every `SAMPLE`, a prime number.
SAMPLE = 4093
GIVEN_IOV = 1024

OURS, OURS_TWO, PREPARED = "ours", "ours, 2 threads", "ours, prepared"
OURS_TWO_WOKEN = "ours, 2 threads, woken for it"
BARE, BARE_TWO = "bare C", "bare C, 2 threads"
NUMPY, TORCH, TORCH_TWO = "numpy", "torch", "torch, 2 threads"
READV, SOCKET = "process_vm_readv", "unix socket"


def same_bytes(name: str, src: list[ByteArray], dst: list[ByteArray]) -> Callable[[], None]:
    """A check that the rows arrived; it spoils them, so that the next check sees bytes of its own contender."""

    def check() -> None:
        for index, (there, here) in enumerate(zip(src, dst, strict=True)):
            if not (np.array_equal(there[::SAMPLE], here[::SAMPLE]) and np.array_equal(there[-64:], here[-64:])):
                raise AssertionError(f"{name}: tensor {index} did not arrive")
            here[::SAMPLE] = ~here[::SAMPLE]
            here[-64:] = 0

    return check


class BareCopy:
    """The runs of a pull, bare: from a mapping of the source's segment to the addresses that the pull writes.

    `runs`: (byte of the segment, byte from `base`, nbytes) each. Every page of both sides is touched here.
    """

    def __init__(self, source: Source, base: int, runs: Runs) -> None:
        self.attached = Attached(source.path)
        self.source = source
        self.base = base
        self.runs = runs
        self.rows = [bytes_at(base + dst, nbytes) for _, dst, nbytes in runs]
        self.src_rows = [bytes_at(self.attached.base + src, nbytes) for src, _, nbytes in runs]
        for row in self.rows:
            row[::1024] = 0xAA

    def contender(self, name: str, call: Callable[[], object], threads: int = 1) -> Contender:
        return Contender(name, repeat(call), same_bytes(name, self.src_rows, self.rows), threads)

    def run_list(self, kernel: str, streaming: bool) -> RunList:
        return RunList(self.runs, self.attached.base, self.base, kernel=kernel, streaming=streaming)

    def bare(self, kernel: str, streaming: bool, name: str = BARE) -> Contender:
        return self.contender(name, self.run_list(kernel, streaming).copy)

    def bare_two(self, kernel: str, streaming: bool, stack: contextlib.ExitStack) -> Contender:
        """Half of the bytes on each of two threads; the second one is parked between copies."""
        halves = [RunList(runs, self.attached.base, self.base, kernel=kernel, streaming=streaming)
                  for runs in equal_parts(self.runs)]
        pair = stack.enter_context(ParkedThread(halves[1].copy))

        def both() -> None:
            pair.go()
            halves[0].copy()
            pair.wait()

        return self.contender(BARE_TWO, both, threads=2)


class Target(BareCopy):
    """A destination cache of this process for one source and one byte of the page. Rows stand a page further apart than they
    are long, so that every row of every tensor can begin at that byte."""

    def __init__(self, manager: shmkv.KvCacheManager, source: Source, num_tensors: int, row_nbytes: int, at: int) -> None:
        desc = shmkv.CacheDesc(num_tensors, [1, (row_nbytes + PAGE) // 2], shmkv.DataType.DT_FLOAT16)
        self._manager = manager
        self.cache = manager.allocate_cache(desc)
        self.key: shmkv.CacheKey | shmkv.CacheKeyByIdAndIndex = source.key
        self.row_nbytes = row_nbytes
        self.at = at
        starts = [tensor.data_ptr + at for tensor in self.cache.tensors]
        runs = [(offset, start - starts[0], row_nbytes) for offset, start in zip(source.offsets, starts, strict=True)]
        super().__init__(source, starts[0], runs)

    def pull_call(self) -> Callable[[], None]:
        pull_cache, key, cache, size, at = self._manager.pull_cache, self.key, self.cache, self.row_nbytes, self.at

        def call() -> None:         # as one writes it: a functools.partial would put its keywords together at each call
            pull_cache(key, cache, size=size, dst_cache_offset=at)

        return call

    def pull(self, name: str = OURS) -> Contender:
        return self.contender(name, self.pull_call())

    def prepared(self) -> Contender | None:
        """None where the library has no prepared pulls."""
        prepare = getattr(self._manager, "prepare_pull", None)
        if prepare is None:
            return None
        return self.contender(PREPARED, partial(prepare(self.cache, size=self.row_nbytes, dst_cache_offset=self.at), self.key))

    def close(self) -> None:
        self._manager.deallocate_cache(self.cache)


class ParkedThread:
    """Runs one call on another thread whenever told."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._given, self._done = threading.Lock(), threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ParkedThread:
        self._given.acquire()
        self._done.acquire()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._given.release()
        self._thread.join()

    def _run(self) -> None:
        while self._given.acquire() and not self._ended:
            self._call()
            self._done.release()

    def go(self) -> None:
        self._given.release()

    def wait(self) -> None:
        self._done.acquire()


# -- what a user would write -------------------------------------------------------------------------------------------

class Private:
    """Memory of this process alone, written once, in which rows can begin at any byte of a page."""

    def __init__(self, nbytes: int) -> None:
        self._memory = np.zeros(nbytes + 2 * PAGE, np.uint8)
        self._memory[::1024] = 1
        self._first = -self._memory.ctypes.data % PAGE

    def rows(self, num_tensors: int, row_nbytes: int, at: int) -> list[ByteArray]:
        """Row after row; all begin at byte `at` of a page if their length is whole pages."""
        begin = self._first + at
        return [self._memory[begin + i * row_nbytes:begin + (i + 1) * row_nbytes] for i in range(num_tensors)]


def attach_shared_memory(name: str) -> ByteArray:
    """What SharedMemory(name) maps, as an array that keeps it mapped. Without that class: before Python 3.13 it takes whoever
    attaches for an owner, and it cannot be let go while arrays are left."""
    with open(f"/dev/shm/{name}", "r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)


class Shared:
    """The same bytes in multiprocessing.shared_memory, tensor after tensor, made by the prompt process."""

    def __init__(self, prompt: programs.Process, source: Source, num_tensors: int, row_nbytes: int) -> None:
        self._prompt = prompt
        self._name = prompt.call("share", cache_id=source.cache_id)
        self.whole = attach_shared_memory(self._name)
        int(self.whole[::PAGE].sum())
        self.rows = [self.whole[i * row_nbytes:(i + 1) * row_nbytes] for i in range(num_tensors)]

    def numpy(self, dst: list[ByteArray]) -> Contender:
        """One slice assignment for each tensor."""
        pairs = [(here.view(np.float16), there.view(np.float16)) for here, there in zip(dst, self.rows, strict=True)]

        def copy() -> None:
            for here, there in pairs:
                here[:] = there

        return Contender(NUMPY, repeat(copy), same_bytes(NUMPY, self.rows, dst))

    def torch(self, torch: Any, dst: list[ByteArray], threads: int) -> Contender:
        """copy_ for each tensor. torch's own shared tensors are the same: a file in /dev/shm, mapped."""
        name = TORCH if threads == 1 else TORCH_TWO
        pairs = [(torch.from_numpy(here).view(torch.float16), torch.from_numpy(there).view(torch.float16))
                 for here, there in zip(dst, self.rows, strict=True)]

        def copy() -> None:
            for here, there in pairs:
                here.copy_(there)

        def run(number: int) -> int:
            torch.set_num_threads(threads)
            return repeat(copy)(number)

        return Contender(name, run, same_bytes(name, self.rows, dst), threads)

    def close(self) -> None:
        self.rows.clear()
        self._prompt.call("unshare", name=self._name)


def import_torch() -> Any:
    """torch, or None where it is not installed."""
    try:
        import torch
    except ImportError:
        return None
    return torch


class IoVec(ctypes.Structure):
    """struct iovec"""

    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def readv(pid: int, addresses: list[int], src: list[ByteArray], dst: list[ByteArray]) -> Contender:
    """The kernel copies out of the other process's memory, from one address there for each row here; a call for each 1024 rows."""
    pairs = list(zip(addresses, dst, strict=True))
    calls = [_readv_call(pid, pairs[begin:begin + GIVEN_IOV]) for begin in range(0, len(pairs), GIVEN_IOV)]

    def read() -> None:
        for call in calls:
            call()

    return Contender(READV, repeat(read), same_bytes(READV, src, dst))


def _readv_call(pid: int, pairs: list[tuple[int, ByteArray]]) -> Callable[[], None]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    total = sum(row.nbytes for _, row in pairs)
    here = (IoVec * len(pairs))(*[IoVec(row.ctypes.data, row.nbytes) for _, row in pairs])
    there = (IoVec * len(pairs))(*[IoVec(address, row.nbytes) for address, row in pairs])
    counts = ctypes.c_ulong(len(pairs)), ctypes.c_ulong(len(pairs)), ctypes.c_ulong(0)

    def read() -> None:
        got = libc.process_vm_readv(pid, here, counts[0], there, counts[1], counts[2])
        if got != total:
            raise OSError(ctypes.get_errno(), f"process_vm_readv moved {got} of {total} bytes")

    return read


def unix_socket(prompt: programs.Process, source: Source, src: list[ByteArray], dst: list[ByteArray],
                stack: contextlib.ExitStack, blocks: Sequence[int] = ()) -> Contender:
    """Ask by one byte, receive row after row into the destination; of each tensor all of it, or `blocks` as long as a row here."""
    path = f"\0shmkv-bench-{os.getpid()}-{source.cache_id}-{id(dst):x}"
    prompt.call("listen", cache_id=source.cache_id, path=path, blocks=list(blocks), block_nbytes=dst[0].nbytes)
    connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    connection.connect(path)
    rows = [row.data for row in dst]

    def receive() -> None:
        connection.sendall(b"?")
        for row in rows:
            if connection.recv_into(row, row.nbytes, socket.MSG_WAITALL) != row.nbytes:
                raise ConnectionError("the sender ended")

    return Contender(SOCKET, repeat(receive), same_bytes(SOCKET, src, dst), threads=2)
