"""CacheManager: the second generation's manager. Its mode can be chosen at init; its calls are not in this version."""
from __future__ import annotations

from shmkv.errors import LLMException, LLMStatusCode


class CacheManager:
    """Named here so that programs can import it; cannot be made: LLM_FEATURE_NOT_ENABLED."""

    def __init__(self) -> None:
        raise LLMException("CacheManager is not part of this version of shmkv: use kv_cache_manager without enable_cache_manager",
                           status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
