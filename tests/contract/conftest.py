"""Fixtures of the contract's tests."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from own_blocks import OwnBlocks
from peer import Namespace, Peer, StartPeer


@pytest.fixture
def own(here: Callable[..., Any]) -> OwnBlocks:
    """A decoder in this process with keys of blocks and of a row of its own."""
    return OwnBlocks(here("PROMPT", 1, enable_switch_role=True))


POOL = '{"memory_size": 104857600}'
POOLS = {"enable_cache_manager": True, "mem_pool_cfg": POOL, "host_mem_pool_cfg": POOL}


@pytest.fixture
def managed(here: Callable[..., Any]) -> Callable[..., Any]:
    """managed(cluster_id=1, remote=False, role="MIX", **options): a cluster of this process in cache-manager mode."""

    def make(cluster_id: int = 1, *, remote: bool = False, role: str = "MIX", **options: Any) -> Any:
        return here(role, cluster_id, **{**POOLS, "enable_remote_cache_accessible": remote, **options})

    return make


@pytest.fixture
def member(namespace: Namespace) -> StartPeer:
    """member(cluster_id, link=(), remote=False, role="MIX", **options): a process in cache-manager mode, linked to others."""

    def start(cluster_id: int, *, link: tuple[int, ...] = (), remote: bool = False, role: str = "MIX", **options: Any) -> Peer:
        peer = namespace.start_cluster(role, cluster_id, **{**POOLS, "enable_remote_cache_accessible": remote, **options})
        if link:
            assert peer.call("link", ids=link) == ["LLM_SUCCESS", ["LLM_SUCCESS"] * len(link)]
        return peer

    return start
