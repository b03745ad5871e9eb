"""A refusal names arguments of the call that was made, as its caller writes them: every public call of both managers and of
LLMDataDist, with each of its arguments replaced by what it cannot be."""
from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import shmkv
from shmkv import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

pytestmark = pytest.mark.timeout(120)
Managed = Callable[..., Any]
NONE_ID = 2**64 - 1
DESC, BLOCKS = CacheDesc(4, [2, 8], DataType.DT_FLOAT16), CacheDesc(4, [4, 16], DataType.DT_FLOAT16)
UNUSABLE = CacheKey(1, 5, prefix_id=6)
ROW = CacheKeyByIdAndIndex(1, 1, 0)
NAMED = re.compile(r"arguments? '([^']+)'(?: and '([^']+)')?")
WORD = re.compile(r"(?<![\w.])(?:src|dst|[a-z]+(?:_[a-z]+)+)(?![\w(])")
# What ends the world that the other calls need, or takes no argument of its own.
NOT_TRIED = {"finalize", "init", "switch_role"}
GIVEN = {"timeout_ms", "src_blocks", "dst_blocks"}       # although they have a default
OF_BLOCKS = {"pull_blocks", "copy_blocks", "swap_blocks", "push_blocks", "deallocate_blocks_cache"}


class Computed(LayerSynchronizer):
    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return True


def unlike(value: Any) -> list[Any]:
    """What an argument that takes `value` may refuse: other types, other numbers, keys that name nothing, caches that are not
    alike, ranges and lists that do not fit."""
    host = CacheDesc(4, [2, 8], DataType.DT_FLOAT16, Placement.HOST)
    return [None, "text", -1, 2**70, 3, 1.5, object(), [], [None], [-1], [99], [0, 1, 2], {}, {0: None}, {"a": 1}, {0: 99},
            {99: [0]}, {0: UNUSABLE}, {99: CacheKey(1, 77)}, [UNUSABLE], [CacheKey(1, 1)] * 9, range(2, 2), range(9),
            range(0, 4, 2), UNUSABLE, CacheKey(9, 1), BlocksCacheKey(9), CacheKeyByIdAndIndex(1, 1, 99),
            CacheKeyByIdAndIndex(1, 99), host, CacheDesc(4, [2, 8], DataType.DT_FLOAT16, batch_dim_index=1), b"buffer",
            [TransferConfig(1, [1])], [TransferWithCacheKeyConfig(ROW, range(9), range(9))]]


class World:
    """One cluster with what its calls take, by the name of the argument."""

    def __init__(self, dist: LLMDataDist, manager: Any) -> None:
        self.dist, self.manager = dist, manager
        self.row, self.other = manager.allocate_cache(DESC), manager.allocate_cache(DESC)
        self.blocks = manager.allocate_blocks_cache(BLOCKS, BlocksCacheKey(1))
        self.host = self._host()
        row_key = CacheKeyByIdAndIndex(1, self.row.cache_id, 0)
        info = LLMClusterInfo()
        info.remote_cluster_id = 9
        self._by_name: dict[str, Any] = {
            "cache_key": row_key, "prompt_cache_key": BlocksCacheKey(1), "src_cache_key": BlocksCacheKey(1),
            "dst_cache_key": row_key, "key": row_key, "blocks_cache_key": None, "keys": {}, "cache_keys": [],
            "kv_cache": self.other, "decoder_kv_cache": self.blocks, "cache": self.row, "dst": self.other, "src": self.row,
            "src_cache": self.row, "dst_cache": self.blocks, "cache_desc": DESC, "cache_id": 77, "addrs": [1, 2, 3, 4],
            "buffers": bytearray(DESC.size * 4), "mem_infos": [], "requests": [], "rows": [0], "nbytes": 1,
            "prompt_blocks": [0], "decoder_blocks": [1], "src_blocks": [0], "dst_blocks": [1], "copy_block_info": {0: [1]},
            "src_to_dst": {0: 1}, "layer_synchronizer": Computed(), "transfer_configs": [],
            "clusters": [info], "timeout": 1, "timeout_ms": 1, "remote_cluster_id": 9, "older_than_ms": 2**31, "callback": None,
            "comm_name": "comm", "cluster_rank_info": {1: 0, 2: 1}, "rank_table": "", "comm_id": 77,
        }

    def _host(self) -> Any:
        kind = shmkv.KvCache if isinstance(self.manager, shmkv.KvCacheManager) else shmkv.Cache
        self._memory = [np.zeros((4, 16), np.float16) for _ in range(4)]
        return kind.create_cpu_cache(CacheDesc(4, [4, 16], DataType.DT_FLOAT16, Placement.HOST),
                                     [each.ctypes.data for each in self._memory])

    def arguments(self, name: str, call: Callable[..., Any]) -> dict[str, Any]:
        """Values for the arguments without a default, and for some others."""
        found = {}
        for parameter in inspect.signature(call).parameters.values():
            if parameter.name in self._by_name and (parameter.default is parameter.empty or parameter.name in GIVEN):
                found[parameter.name] = self._by_name[parameter.name]
            else:
                assert parameter.default is not parameter.empty, f"{name}: no value for {parameter.name}"
        if name in OF_BLOCKS:
            found = {argument: self.blocks if argument in ("cache", "src_cache", "dst_cache") else value
                     for argument, value in found.items()}
            if name == "push_blocks":
                found["dst_cache_key"] = BlocksCacheKey(1)
        return found

    def refusals(self) -> Iterator[tuple[str, Callable[..., Any], dict[str, Any], str]]:
        """(call, itself, arguments, text) of all that is refused."""
        for name, call in self.calls():
            good = self.arguments(name, call)
            for argument in inspect.signature(call).parameters:
                for bad in [*unlike(good.get(argument)), self.row, self.blocks, self.host]:
                    given = {**good, argument: bad}
                    text = refusal(call, given)
                    if text is not None:
                        yield name, call, given, text

    def calls(self) -> list[tuple[str, Callable[..., Any]]]:
        """Those that take caches away come last."""
        found = [(name, getattr(owner, name)) for owner in (self.manager, self.dist)
                 for name, _ in inspect.getmembers(type(owner), callable)
                 if not name.startswith("_") and name not in NOT_TRIED and inspect.signature(getattr(owner, name)).parameters]
        return sorted(found, key=lambda call: call[0].startswith(("deallocate", "unregister")))


def refusal(call: Callable[..., Any], given: dict[str, Any]) -> str | None:
    """What a call says to arguments that it does not take; None if it took them."""
    try:
        found = call(**given)
        if inspect.iscoroutine(found):
            asyncio.run(found)
        if hasattr(found, "close"):
            found.close()
    except (TypeError, ValueError, shmkv.LLMException) as error:
        return str(error)
    return None


def parameters_of(kind: Callable[..., Any]) -> set[str]:
    names = {parameter.lstrip("_") for parameter in inspect.signature(kind).parameters}
    return names | set(getattr(kind, "_NAMES", ()))


ARGUMENTS = {argument for kind in (shmkv.KvCacheManager, shmkv.CacheManager, LLMDataDist)
             for name, call in inspect.getmembers(kind, callable) if not name.startswith("_") for argument in parameters_of(call)}


def strangers(call: Callable[..., Any], given: dict[str, Any], text: str) -> set[str]:
    """The arguments that a text names and that neither the call nor the values given to it have."""
    own = parameters_of(call)
    known = set(own)
    for value in given.values():
        for each in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else [value]:
            if type(each).__module__.startswith("shmkv"):
                known |= parameters_of(type(each))
    named = {re.split(r"[\[.]", name)[0] for found in NAMED.findall(text) for name in found if name}
    return (named - known) | {word for word in WORD.findall(text) if word in ARGUMENTS} - known


@pytest.fixture(params=["PROMPT", "DECODER"])
def first(here: Managed, request: pytest.FixtureRequest) -> World:
    dist = here("PROMPT", 1, enable_switch_role=True, sync_kv_timeout=100)
    world = World(dist, dist.kv_cache_manager)
    if request.param == "DECODER":
        dist.switch_role(LLMRole.DECODER)
    return world


@pytest.fixture(params=[False, True], ids=["local", "remote"])
def second(managed: Managed, request: pytest.FixtureRequest) -> World:
    dist = managed(remote=request.param, sync_kv_timeout=100)
    return World(dist, dist.cache_manager)


def test_first_generation(first: World) -> None:
    wrong = {(name, text) for name, call, given, text in first.refusals() if strangers(call, given, text)}
    assert wrong == set()


def test_second_generation(second: World) -> None:
    wrong = {(name, text) for name, call, given, text in second.refusals() if strangers(call, given, text)}
    assert wrong == set()


@pytest.mark.parametrize(("text", "found"), [
    ("argument 'cache_key' must have", {"cache_key"}), ("argument 'prompt_blocks[3]' must be", set()),
    ("src_layer_range range(0, 2) and dst_layer_range", set()), ("one of src and dst", {"src", "dst"}),
    ("dst_block_indices are not there", {"dst_block_indices"})])
def test_a_text_that_names_another_calls_argument_is_found(first: World, text: str, found: set[str]) -> None:
    assert strangers(first.manager.pull_blocks, {"prompt_cache_key": BlocksCacheKey(1)}, text) == found


@pytest.mark.parametrize("first", ["DECODER"], indirect=True)
def test_pull_blocks_names_the_key_as_it_was_written(first: World) -> None:
    given = first.arguments("pull_blocks", first.manager.pull_blocks)
    text = refusal(first.manager.pull_blocks, {**given, "prompt_cache_key": UNUSABLE, "prompt_blocks": []})
    assert text == f"argument 'prompt_cache_key' must have exactly one of req_id and prefix_id, got {UNUSABLE!r}"


@pytest.mark.parametrize("second", [False], indirect=True)
def test_pull_blocks_of_the_second_generation_does_so_too(second: World) -> None:
    given = second.arguments("pull_blocks", second.manager.pull_blocks)
    text = refusal(second.manager.pull_blocks, {**given, "src_cache_key": UNUSABLE, "src_blocks": []})
    assert text == f"argument 'src_cache_key' must have exactly one of req_id and prefix_id, got {UNUSABLE!r}"
