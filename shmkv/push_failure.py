"""Pushes that were not done: from the numbers of the core to a status code and a sentence for the log."""
from __future__ import annotations

import errno

from shmkv import _attached, _link, _lookup, _plan, _pull, _push, _push_key, peer_access
from shmkv.cluster import Cluster
from shmkv.errors import LLMStatusCode
from shmkv.link import Links

ARGUMENT_FAULTS = frozenset([_push.ADDRESS, _push.ROOM, _push.ROW, _push_key.CLOSED, *_plan.ARGUMENT_FAULTS])


def push_code(status: int, cluster: Cluster) -> LLMStatusCode:
    """The status code of the contract."""
    settings = cluster.settings
    if status in ARGUMENT_FAULTS:
        return LLMStatusCode.LLM_PARAM_INVALID
    if status in peer_access.STATUSES:
        return peer_access.access_code(status, settings)
    return {
        0: LLMStatusCode.LLM_SUCCESS,
        _link.ENDED: LLMStatusCode.LLM_NOT_YET_LINK,
        _link.BUSY: LLMStatusCode.LLM_LINK_BUSY,
        _link.PEER_GONE: settings.timeout_status,
        _link.TIMEOUT: settings.timeout_status,
        _lookup.REMOVED: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        _lookup.NEVER: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        _pull.DST_GONE: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        -errno.ENOENT: LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,
        -errno.ENOMEM: settings.out_of_memory_status,
    }.get(status, LLMStatusCode.LLM_FAILED)


def push_sentence(status: int, cluster: Cluster, links: Links, cluster_id: int, address: int) -> str:
    """What happened, for a push to a cluster; `address`: the one that was looked at last."""
    peer = f"cluster {cluster_id}"
    if status in peer_access.STATUSES:
        return peer_access.reach_sentence(status, cluster, cluster_id, links.to_push(cluster_id))
    return {
        _push.ADDRESS: f"address {address:#x} lies in no tensor of a living cache that {peer} allocated or registered by address",
        _push_key.CLOSED: f"address {address:#x} lies in memory that {peer} registered not to be remote-accessible",
        _push.ROOM: f"the bytes to push do not fit between address {address:#x} and the end of that tensor of {peer}",
        _push.ROW: "the source has no row with that src_batch_index",
        _plan.SRC_BLOCK: "argument 'src_block_indices' names blocks that the source does not have",
        _link.ENDED: f"not linked: {peer} has to link to this one first, or the link was removed",
        _link.BUSY: f"the link with {peer} is being removed",
        _link.PEER_GONE: f"{peer} died or was restarted: it has to link again",
        _link.TIMEOUT: f"not done within sync_kv_timeout of {cluster.settings.sync_kv_timeout_ms} ms",
        _link.FORKED: "the link belongs to the parent process",
        _pull.DST_GONE: "the destination was deallocated",
        _lookup.REMOVED: f"{peer} freed the destination meanwhile: it has taken this process for dead",
        _plan.DAMAGED: f"the tensors recorded by {peer} do not lie inside their segment",
        -errno.ENOENT: f"the segment of {peer} has no name any more",
        -errno.ENOMEM: "cannot map the segment: out of memory, or vm.max_map_count mappings are in use",
    }.get(status) or f"cannot map the segment of {peer}: {_attached.describe(status)}"
