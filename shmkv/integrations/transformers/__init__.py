"""Caches of transformers whose keys and values lie in shared memory: `pip install '.[transformers]'` in a clone.

The prompt's forward writes into them, `handoff` lets others have what it wrote, and `receive` brings that into a cache of another
process, whose forward goes on behind it:

    from shmkv.integrations.transformers import ShmCache, cache_argument, handoff, receive

`docs/transformers.md` has whole programs, the models that work, and what is refused.
"""
from __future__ import annotations

from shmkv.integrations.transformers.exchange import handoff, receive, receive_fork, receive_into
from shmkv.integrations.transformers.forward import cache_argument
from shmkv.integrations.transformers.layouts import LayerLayout, ModelLayout
from shmkv.integrations.transformers.probe import layout_of
from shmkv.integrations.transformers.shm_cache import ShmCache

__all__ = [
    "LayerLayout",
    "ModelLayout",
    "ShmCache",
    "cache_argument",
    "handoff",
    "layout_of",
    "receive",
    "receive_fork",
    "receive_into",
]
