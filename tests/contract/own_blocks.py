"""Caches of blocks in one process, which pulls from its own cluster; what is refused is looked at for what it may have changed."""
from __future__ import annotations

from typing import Any

import cache_bytes
import numpy as np
import pytest
from reference import canary, noise

from shmkv import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMDataDist, LLMRole

OWN = 1
BLOCKS = CacheDesc(4, [8, 16], DataType.DT_INT8)
ROWS = CacheDesc(4, [2, 64], DataType.DT_INT8)
KEY, ROW_KEY = BlocksCacheKey(OWN), CacheKey(OWN, 7)


class OwnBlocks:
    """`src` is a blocks cache under KEY, `row` an ordinary one whose row 0 is under ROW_KEY; `dst` and `into` are their like."""

    def __init__(self, dist: LLMDataDist) -> None:
        self.dist, self.manager = dist, dist.kv_cache_manager
        self.src = self.manager.allocate_blocks_cache(BLOCKS, KEY)
        self.row = self.manager.allocate_cache(ROWS, [ROW_KEY])
        self.dst, self.into = self.manager.allocate_blocks_cache(BLOCKS), self.manager.allocate_cache(ROWS)
        for seed, cache in enumerate((self.src, self.row)):
            cache_bytes.write(cache, noise(cache_bytes.geometry_of(cache), seed))
        self.clear()
        self.before = [cache_bytes.read(cache) for cache in (self.src, self.row)]
        dist.switch_role(LLMRole.DECODER)

    def clear(self) -> None:
        for cache in (self.dst, self.into):
            cache_bytes.write(cache, canary(cache_bytes.geometry_of(cache)))

    def pull(self, **arguments: Any) -> None:
        """Block 1 to block 2, arguments can be replaced."""
        given: dict[str, Any] = {"prompt_cache_key": KEY, "decoder_kv_cache": self.dst, "prompt_blocks": [1], "decoder_blocks": [2]}
        self.manager.pull_blocks(**{**given, **arguments})

    def pull_row(self, **arguments: Any) -> None:
        """Row 0 to blocks 3 and 4, by its request key."""
        self.pull(**{"prompt_cache_key": ROW_KEY, "prompt_blocks": [], "decoder_blocks": [3, 4], **arguments})

    def refuses(self, error: type[Exception], **arguments: Any) -> Exception:
        """The error of that class that pull_blocks raises; nothing was copied, and both keys can be pulled by afterwards."""
        with pytest.raises(error) as refusal:
            self.pull(**arguments)
        self.assert_untouched()
        self.assert_keys_live()
        return refusal.value

    def assert_untouched(self) -> None:
        """No byte of any cache has changed."""
        for cache in (self.dst, self.into):
            assert (cache_bytes.read(cache) == 0x5A).all()
        for cache, before in zip((self.src, self.row), self.before, strict=True):
            np.testing.assert_array_equal(cache_bytes.read(cache), before)

    def assert_keys_live(self) -> None:
        """Both keys name what they named. An offset keeps a request key."""
        self.pull()
        np.testing.assert_array_equal(cache_bytes.read(self.dst)[:, :, 2], self.before[0][:, :, 1])
        self.manager.pull_cache(ROW_KEY, self.into, src_cache_offset=0)
        self.clear()
