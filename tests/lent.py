"""Views and forks in another process: functions that run there, called by `ask` and `within`.

Views are kept there by name, and so is what was made of them.
"""
from __future__ import annotations

import base64
import gc
from typing import TYPE_CHECKING, Any

import numpy as np
from agent_keys import make_key
from peer import prefix, req
from reference import Bytes, geometry, noise

import shmkv

# Rows of noise for views: request 7, prefix 9, request 8.
SHAPE = [3, 96]
SENT = noise(geometry(4, SHAPE, 1), 5)
KEYS = [req(1, 7), prefix(1, 9), req(1, 8)]
# An owner looks for dead readers at most every 20 ms.
LOOK = "import time\nfor _ in range(10):\n    agent.collect()\n    time.sleep(0.01)"

if TYPE_CHECKING:
    from agent import Agent
    from peer import Answer, Peer


def offer_rows(p: Peer) -> None:
    """Cluster 1's first cache, "kv", gets SENT and KEYS."""
    p.call("allocate", name="kv", shape=SHAPE, dtype="DT_INT8", keys=KEYS)
    p.call("noise", name="kv", seed=5)


def ask(peer: Peer, function: str, **arguments: Any) -> Answer:
    """Run a function of this module in a peer."""
    return peer.attempt("execute", code=f"import lent\nresult = lent.{function}(agent, **{arguments!r})")


def within(peer: Peer, function: str, **arguments: Any) -> Any:
    """The value of one that has to work."""
    answer = ask(peer, function, **arguments)
    assert not answer.kinds, answer.trace
    return answer.value


def row_of(peer: Peer, name: str) -> list[Bytes]:
    """The bytes of each tensor of a view or fork of a peer."""
    return [np.frombuffer(base64.b64decode(tensor), np.uint8) for tensor in within(peer, "row", name=name)]


def assert_row(peer: Peer, name: str, wanted: Any, window: slice = slice(None)) -> None:
    """A view or fork has these bytes: `wanted` is (tensors, outer, inner) of one row."""
    found = row_of(peer, name)
    assert len(found) == len(wanted)
    for got, tensor in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got, np.asarray(tensor).reshape(-1)[window])


def let_go(owner: Peer) -> None:
    """The owner wants its cache "kv" with prefixes 1 and 2 no more, and looks as often as it may."""
    owner.call("deallocate", name="kv")
    for number in (1, 2):
        owner.call("remove_key", key=["key", 1, 2**64 - 1, 0, number])
    owner.call("execute", code=LOOK)


# -- in another process ---------------------------------------------------------------------------------------------------

def kept(agent: Any) -> dict[str, Any]:
    """Views, forks and arrays by name."""
    if not hasattr(agent, "lent"):
        agent.lent = {}
    found: dict[str, Any] = agent.lent
    return found


def _desc(shapes: list[Any], dtypes: list[str] | str, batch_dim: int) -> shmkv.CacheDesc:
    kinds = [shmkv.DataType[dtype] for dtype in ([dtypes] * len(shapes) if isinstance(dtypes, str) else dtypes)]
    return shmkv.CacheDesc.of_tensors(shapes, kinds, batch_dim_index=batch_dim)


def view(agent: Agent, name: str, key: list[Any], layers: list[int] | None = None, shapes: list[Any] | None = None,
         dtypes: list[str] | str = "DT_INT8", batch_dim: int = 0, **how: Any) -> list[Any]:
    """Open a view; `layers`: the source's range. Shape, numpy's dtype and size of each array."""
    if layers is not None:
        how["src_layer_range"] = range(*layers)
    if shapes is not None:
        how["cache_desc"] = _desc(shapes, dtypes, batch_dim)
    made = kept(agent)[name] = agent.dist.kv_cache_manager.view_cache(make_key(key), **how)
    return [[list(tensor.shape), str(tensor.numpy().dtype), tensor.nbytes] for tensor in made.tensors]


def fork(agent: Agent, name: str, key: list[Any], shapes: list[Any] | None = None, dtypes: list[str] | str = "DT_INT8",
         batch_dim: int = 0, **how: Any) -> list[Any]:
    """Make a fork, which is a cache of the agent as well. Shape, numpy's dtype and size of each array."""
    desc = None if shapes is None else _desc(shapes, dtypes, batch_dim)
    made = agent.dist.kv_cache_manager.fork_cache(make_key(key), desc, **how)
    kept(agent)[name] = agent.caches[name] = made
    return [[list(tensor.shape), str(tensor.numpy().dtype), tensor.nbytes] for tensor in made.tensors]


def arrays(agent: Agent, name: str, of: str) -> None:
    """Keep the arrays of a view or fork under another name; with them a view or fork may go."""
    kept(agent)[name] = [tensor.numpy() for tensor in kept(agent)[of].tensors]


def row(agent: Agent, name: str) -> list[str]:
    made = kept(agent)[name]
    found = made if isinstance(made, list) else [tensor.numpy() for tensor in made.tensors]
    return [base64.b64encode(np.ascontiguousarray(array).tobytes()).decode() for array in found]


def write(agent: Agent, name: str, seed: int) -> list[str]:
    """Random bytes into each tensor of a fork: what it has then."""
    for place, tensor in enumerate(kept(agent)[name].tensors):
        array = tensor.numpy()
        noise = np.random.default_rng(seed + place).integers(0, 256, array.nbytes, np.uint8)
        array[...] = noise.view(array.dtype).reshape(array.shape)
    return row(agent, name)


def close(agent: Agent, name: str) -> None:
    """Close a view, and keep it."""
    kept(agent)[name].close()


def drop(agent: Agent, *, names: list[str]) -> None:
    """Let go of views, forks or arrays, in this order."""
    for name in names:
        del kept(agent)[name]
        agent.caches.pop(name, None)
    gc.collect()


def leases(agent: Agent, cluster_id: int = 1) -> int:
    """How many this process has of a link."""
    handle = agent.dist._links.handle(cluster_id)
    return int(handle.leases)


def contains(agent: Agent, key: list[Any]) -> bool:
    return bool(agent.dist.kv_cache_manager.contains(make_key(key)))


def set_prefix_capacity(agent: Agent, nbytes: int | None) -> None:
    agent.dist.kv_cache_manager.set_prefix_capacity(nbytes)


def mapped(agent: Any, serial: str = "") -> list[tuple[str, str]]:
    """(permissions, name) of this process's mappings of cache segments."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(None, 5) for line in maps if ".c." in line and "/dev/shm/" in line]
    return [(line[1], line[5].rstrip()) for line in lines]


def private_dirty(agent: Any) -> int:
    """KiB of private pages of this process's mappings of cache segments."""
    total, counts = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            if "-" in line.split()[0] and not line.split()[0].endswith(":"):
                counts = ".c." in line and "/dev/shm/" in line
            elif counts and line.startswith("Private_Dirty:"):
                total += int(line.split()[1])
    return total
