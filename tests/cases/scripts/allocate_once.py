"""Initialises cluster 1, allocates a float16 cache with a key, says so, and waits for its stdin to end."""
from __future__ import annotations

import sys

import shmkv

prompt = shmkv.LLMDataDist(shmkv.LLMRole.PROMPT, 1)
prompt.init(shmkv.LLMConfig().generate_options())
desc = shmkv.CacheDesc(4, [2, 64], shmkv.DataType.DT_FLOAT16)
cache = prompt.kv_cache_manager.allocate_cache(desc, [shmkv.CacheKey(1, 7)])
print("allocated", flush=True)
sys.stdin.read()
