"""Keys as the commands of an agent name them."""
from __future__ import annotations

from typing import Any

import shmkv


def make_key(spec: list[Any]) -> Any:
    """The key object that a list made by peer.req(), prefix(), by_id(), padding() or blocks() stands for."""
    kind, *values = spec
    if kind == "id":
        return shmkv.CacheKeyByIdAndIndex(*values)
    if kind == "blocks":
        return shmkv.BlocksCacheKey(*values)
    cluster_id, req_id, model_id, prefix_id = values
    return shmkv.CacheKey(cluster_id, req_id, model_id, prefix_id)
