"""Memory of a caller in many layouts, for the process that registers it and, made once more, as its twin in the test.

A stretch is a piece of memory full of 0x5A between 64 bytes of 0xA5; the tensors are views into stretches. The functions at the end
run in another process, called by `within`.
"""
from __future__ import annotations

import base64
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from agent_keys import make_key
from reference import Bytes, Geometry, Tensors, geometry, noise

import shmkv

if TYPE_CHECKING:
    from agent import Agent
    from peer import Answer, Peer

EDGE, CANARY, FILL = 64, 0xA5, 0x5A
DTYPES: dict[str, Any] = {
    "DT_INT8": np.dtype("i1"), "DT_FLOAT16": np.dtype("f2"), "DT_FLOAT": np.dtype("f4"), "DT_BF16": np.dtype(ml_dtypes.bfloat16),
    "DT_FLOAT8_E4M3FN": np.dtype(ml_dtypes.float8_e4m3fn), "DT_FLOAT8_E5M2": np.dtype(ml_dtypes.float8_e5m2)}
KINDS = ("apart", "pairs", "one", "interleaved", "pitch", "rows first", "mmap", "bytearray", "mixed")


@dataclass(frozen=True)
class Spec:
    """What a Memory is made from; `pad`: elements of a gap, where the layout has gaps."""

    kind: str
    num_tensors: int
    shape: Sequence[int]
    dtype: str = "DT_INT8"
    batch_dim: int = 0
    pad: int = 3

    @property
    def geometry(self) -> Geometry:
        return geometry(self.num_tensors, list(self.shape), DTYPES[self.dtype].itemsize, self.batch_dim)


class Memory:
    """`buffers` is what register_cache takes, `tensors` the same memory as (outer, rows, inner) bytes each."""

    def __init__(self, spec: Spec) -> None:
        self.spec, self.dtype = spec, DTYPES[spec.dtype]
        _, self.outer, self.rows, self.inner = spec.geometry
        self.stretches: list[Bytes] = []
        self.buffers: list[Any] = []
        self.tensors: list[Bytes] = []
        self._made()

    def _made(self) -> None:
        count, nbytes, row = self.spec.num_tensors, self.outer * self.rows * self.inner, self.outer * self.inner
        pad = self.spec.pad * int(self.dtype.itemsize)
        padded = self.rows * (self.inner + pad) + pad
        makers: dict[str, Callable[[], None]] = {
            "apart": lambda: self._strided(count, 1, nbytes, 0, self.inner, self.rows * self.inner),
            "pairs": lambda: self._blocks_of(2),
            "one": lambda: self._blocks_of(count),
            "interleaved": lambda: self._strided(count, 2, 2 * nbytes, self.inner, 2 * self.inner, 2 * self.rows * self.inner),
            "pitch": lambda: self._strided(count, 1, self.outer * padded, 0, self.inner + pad, padded),
            "rows first": lambda: self._strided(count, 1, self.rows * (row + pad), 0, row + pad, self.inner),
            "mmap": lambda: self._flat(count, mmap.mmap(-1, count * nbytes)),
            "bytearray": lambda: self._flat(count, bytearray(count * nbytes)),
            "mixed": self._mixed,
        }
        makers[self.spec.kind]()

    def _mixed(self) -> None:
        """The first half as flat bytes, the others each in an array."""
        half, nbytes = self.spec.num_tensors // 2, self.outer * self.rows * self.inner
        if half:
            self._flat(half, bytearray(half * nbytes))
        self._strided(self.spec.num_tensors - half, 1, nbytes, 0, self.inner, self.rows * self.inner)

    def _payload(self, nbytes: int) -> Bytes:
        whole = np.full(nbytes + 2 * EDGE, CANARY, np.uint8)
        whole[EDGE:-EDGE] = FILL
        self.stretches.append(whole)
        return whole[EDGE:-EDGE]

    def _add(self, payload: Bytes, offset: int, row_pitch: int, piece_pitch: int) -> None:
        """One tensor with these pitches."""
        self.buffers.append(np.ndarray(tuple(self.spec.shape), self.dtype, payload, offset, self._strides(row_pitch, piece_pitch)))
        self._add_bytes(payload, offset, row_pitch, piece_pitch)

    def _add_bytes(self, payload: Bytes, offset: int, row_pitch: int, piece_pitch: int) -> None:
        strides = (piece_pitch, row_pitch, 1)
        self.tensors.append(np.ndarray((self.outer, self.rows, self.inner), np.uint8, payload, offset, strides))

    def _strides(self, row_pitch: int, piece_pitch: int) -> tuple[int, ...]:
        shape, batch = self.spec.shape, self.spec.batch_dim
        before = [piece_pitch * math.prod(shape[dim + 1:batch]) for dim in range(batch)]
        behind = [self.dtype.itemsize * math.prod(shape[dim + 1:]) for dim in range(batch + 1, len(shape))]
        return (*before, row_pitch, *behind)

    def _strided(self, count: int, group: int, nbytes: int, step: int, row_pitch: int, piece_pitch: int) -> None:
        """`group` tensors to a stretch of `nbytes`, each `step` bytes behind the one before."""
        for number in range(count):
            if number % group == 0:
                payload = self._payload(nbytes)
            self._add(payload, number % group * step, row_pitch, piece_pitch)

    def _blocks_of(self, group: int) -> None:
        """Dense arrays with one axis in front that counts `group` tensors."""
        nbytes = self.outer * self.rows * self.inner
        for _ in range(self.spec.num_tensors // group):
            payload = self._payload(group * nbytes)
            self.buffers.append(payload.view(self.dtype).reshape(group, *self.spec.shape))
            for number in range(group):
                self._add_bytes(payload, number * nbytes, self.inner, self.rows * self.inner)

    def _flat(self, count: int, store: Any) -> None:
        """Dense tensors behind each other in an object that is exactly as long: no room for canaries."""
        payload = np.frombuffer(store, np.uint8)
        payload[:] = FILL
        self.stretches.append(payload)
        self.buffers.append(store)
        for number in range(count):
            self._add_bytes(payload, number * len(payload) // count, self.inner, self.rows * self.inner)

    def put(self, content: Tensors) -> None:
        """Overwrite the tensors, and no gap."""
        for tensor, wanted in zip(self.tensors, content, strict=True):
            tensor[...] = wanted


# -- in another process ---------------------------------------------------------------------------------------------------

def ask(peer: Peer, function: str, **arguments: Any) -> Answer:
    """Run a function of this module in a peer."""
    code = f"import caller_memory\nresult = caller_memory.{function}(agent, **arguments)"
    return peer.attempt("execute", code=f"arguments = {_sent(arguments)!r}\n{code}")


def within(peer: Peer, function: str, **arguments: Any) -> Any:
    """The value of one that has to work."""
    answer = ask(peer, function, **arguments)
    assert answer.status is None, answer.trace
    assert not answer.kinds, answer.trace
    return answer.value


def _sent(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: asdict(value) if isinstance(value, Spec) else value for name, value in arguments.items()}


def register(agent: Agent, name: str, spec: dict[str, Any], blocks: bool = False, placement: str = "DEVICE") -> int:
    """Make memory and register it: the cache's id."""
    made = Memory(Spec(**spec))
    _memories(agent)[name] = made
    return register_again(agent, name, name, blocks, placement)


def register_again(agent: Agent, name: str, memory: str, blocks: bool = False, placement: str = "DEVICE") -> int:
    """Register memory that is registered already, under another name."""
    made = _memories(agent)[memory]
    spec = made.spec
    desc = shmkv.CacheDesc(spec.num_tensors, list(spec.shape), shmkv.DataType[spec.dtype], shmkv.Placement[placement],
                           batch_dim_index=spec.batch_dim)
    manager = agent.dist.kv_cache_manager
    cache = (manager.register_blocks_cache if blocks else manager.register_cache)(desc, made.buffers)
    agent.caches[name] = cache
    return int(cache.cache_id)


def unregister(agent: Agent, name: str) -> None:
    agent.dist.kv_cache_manager.unregister_cache(agent.caches[name])


def stretches(agent: Agent, name: str) -> list[str]:
    """All bytes around and between the tensors as well."""
    return [base64.b64encode(stretch.tobytes()).decode() for stretch in _memories(agent)[name].stretches]


def put_noise(agent: Agent, name: str, seed: int) -> None:
    """Random bytes into the tensors of registered memory."""
    memory = _memories(agent)[name]
    memory.put(noise(memory.spec.geometry, seed))


def pull(agent: Agent, key: list[Any], name: str, how: str = "pull_cache", heads: dict[str, Any] | None = None,
         **options: Any) -> None:
    """One pull in one of the three ways; `heads` are the arguments of a HeadSlice."""
    manager, cache, made = agent.dist.kv_cache_manager, agent.caches[name], make_key(key)
    if heads is not None:
        options["heads"] = shmkv.HeadSlice(**heads)
    if how == "pull_cache":
        manager.pull_cache(made, cache, **options)
    elif how == "prepare_pull":
        manager.prepare_pull(cache, **options)(made)
    else:
        manager.pull_many([shmkv.PullRequest(made, cache, **options)] * 2)


def pull_blocks(agent: Agent, key: list[Any], name: str, **options: Any) -> None:
    agent.dist.kv_cache_manager.pull_blocks(make_key(key), agent.caches[name], **options)


def allocate_blocks(agent: Agent, name: str, num_tensors: int, shape: list[int], dtype: str, model_id: int | None = None) -> int:
    """A blocks cache in shared memory, with a key if a model is given."""
    desc = shmkv.CacheDesc(num_tensors, shape, shmkv.DataType[dtype])
    key = None if model_id is None else shmkv.BlocksCacheKey(agent.dist.cluster_id, model_id)
    agent.caches[name] = agent.dist.kv_cache_manager.allocate_blocks_cache(desc, key)
    return int(agent.caches[name].cache_id)


def copy_cache(agent: Agent, dst: str, src: str, **options: Any) -> None:
    agent.dist.kv_cache_manager.copy_cache(agent.caches[dst], agent.caches[src], **options)


def copy_blocks(agent: Agent, name: str, info: dict[int, list[int]]) -> None:
    agent.dist.kv_cache_manager.copy_blocks(agent.caches[name], info)


def swap_blocks(agent: Agent, src: str, dst: str, src_to_dst: dict[int, int]) -> None:
    agent.dist.kv_cache_manager.swap_blocks(agent.caches[src], agent.caches[dst], src_to_dst)


def _memories(agent: Any) -> dict[str, Memory]:
    if not hasattr(agent, "memories"):
        agent.memories = {}
    memories: dict[str, Memory] = agent.memories
    return memories


# -- what a test looks at -------------------------------------------------------------------------------------------------

def assert_same(peer: Peer, name: str, twin: Memory, what: str = "") -> None:
    """Every byte of the memory, gaps and canaries included."""
    for found, wanted in zip(within(peer, "stretches", name=name), twin.stretches, strict=True):
        got = np.frombuffer(base64.b64decode(found), np.uint8)
        np.testing.assert_array_equal(got, wanted, err_msg=what)
