"""What must be the same on two sides before a block of one means anything to the other.

It goes into every key, so that what differs is never found; and onto a card that each producer publishes, so that somebody is told
what differs.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields

CARD_NBYTES = 4096


@dataclass(frozen=True)
class CacheIdentity:
    """`model`: name or path with its revision; `model_digest`: of its configuration; `layout`: order of the axes, as vLLM names it;
    `attention`: instruction set and kernel that pack a block; `engine`: vLLM's version; `num_shards`: ranks that share a block."""

    model: str
    model_digest: str
    weights: str
    cache_dtype: str
    layout: str
    attention: str
    engine: str
    block_size: int
    block_nbytes: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    num_shards: int

    def seed(self) -> bytes:
        """Where the chain of hashes of every prompt begins."""
        return hashlib.sha256(self._text().encode()).digest()

    def card(self) -> bytes:
        """CARD_NBYTES bytes that say all of it, padded with zeros."""
        text = self._text().encode()
        if len(text) > CARD_NBYTES:
            raise ValueError(f"the description of the cache has {len(text)} bytes, {CARD_NBYTES} is the most: {text[:200]!r}...")
        return text.ljust(CARD_NBYTES, b"\0")

    def _text(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def differences(self, card: bytes) -> list[str]:
        """What another side's card says otherwise, as "name: its value instead of ours"; [] if nothing."""
        try:
            theirs = json.loads(card.rstrip(b"\0").decode())
        except ValueError as error:
            return [f"card that cannot be read: {error}"]
        if not isinstance(theirs, dict):
            return [f"card that is no description: {theirs!r}"]
        return [f"{field.name}: {theirs.get(field.name)!r} instead of {getattr(self, field.name)!r}" for field in fields(self)
                if theirs.get(field.name) != getattr(self, field.name)]
