"""What tests of docs/llm_datadist.md share: the rows of its tables, and one process that pulls from itself."""
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_bytes
import numpy as np
import pytest
from reference import Bytes, canary, noise

from shmkv import CacheDesc, CacheKey, DataType, KvCache, LLMDataDist, LLMException, LLMRole, LLMStatusCode

PAGE = Path(__file__).resolve().parents[3] / "docs" / "llm_datadist.md"
TESTS = Path(__file__).parent.glob("test_guide*.py")
TRIED = {number.upper() for path in TESTS for number in re.findall(r"^def test_([a-z]\d+)_", path.read_text(), re.MULTILINE)}
ROWS = set(re.findall(r"^\| ([A-Z]\d+) \|", PAGE.read_text(), re.MULTILINE))
U64MAX = 2**64 - 1
DESC = CacheDesc(4, [2, 8], DataType.DT_FLOAT16)


def key(req_id: int, **more: int) -> CacheKey:
    """A request key of cluster 1."""
    return CacheKey(1, req_id, **more)


def status_of(call: Callable[[], Any]) -> LLMStatusCode:
    """The status of the LLMException that a call raises."""
    with pytest.raises(LLMException) as caught:
        call()
    return caught.value.status_code


class Own:
    """A cluster that is a decoder and owns the cache `src` of keys 7 and 8, and `dst`."""

    def __init__(self, dist: LLMDataDist) -> None:
        self.dist, self.manager = dist, dist.kv_cache_manager
        self.src = self.filled(self.manager.allocate_cache(DESC, [key(7), key(8)]))
        self.dst = self.manager.allocate_cache(DESC)
        cache_bytes.write(self.dst, canary(cache_bytes.geometry_of(self.dst)))
        dist.switch_role(LLMRole.DECODER)

    @staticmethod
    def filled(cache: KvCache, seed: int = 3) -> KvCache:
        cache_bytes.write(cache, noise(cache_bytes.geometry_of(cache), seed))
        return cache

    def as_prompt(self) -> Any:
        """The manager, with the other role."""
        self.dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:1"})
        return self.manager

    def as_decoder(self) -> Any:
        self.dist.switch_role(LLMRole.DECODER)
        return self.manager

    def has(self, row: int, source_row: int, source: KvCache | None = None) -> bool:
        """Does row `row` of `dst` hold the bytes of a row of `src`, or of another cache?"""
        theirs: Bytes = cache_bytes.read(source or self.src)
        return bool(np.array_equal(cache_bytes.read(self.dst)[:, :, row], theirs[:, :, source_row]))

    def is_untouched(self) -> bool:
        return bool((cache_bytes.read(self.dst) == 0x5A).all())
