"""What must be the same on two sides before a block of one means anything to the other.

It goes into every key, so that what differs is never found; and onto a card that each producer publishes, so that somebody is told
what differs.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

CARD_NBYTES = 4096


@dataclass(frozen=True)
class GroupLayout:
    """The layers of a KV cache group, which have block ids in common. `window`: how many tokens a token looks at, itself among
    them; 0: all before it."""

    window: int
    cache_dtype: str
    block_nbytes: int
    num_layers: int
    num_kv_heads: int
    head_size: int


@dataclass(frozen=True)
class CacheIdentity:
    """`model`: name or path with its revision; `model_digest`: of its configuration; `weights`: how they are computed with;
    `weight_files`: a digest of the files that they came from; `layout`: order of the axes, as vLLM names it; `attention`:
    instruction set and kernel that pack a block; `engine`: vLLM's version; `block_size`: tokens of a block, in each group;
    `num_shards`: ranks that share a block."""

    model: str
    model_digest: str
    weights: str
    weight_files: str
    layout: str
    attention: str
    engine: str
    block_size: int
    num_shards: int
    groups: tuple[GroupLayout, ...]

    @property
    def fails_by_block(self) -> bool:
        """Can vLLM go on before a block whose load failed? Not with several groups, for block ids do not say which is meant; nor
        with a window, for the blocks that the tokens before look at were never there."""
        return len(self.groups) == 1 and not self.groups[0].window

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
        ours, theirs = _by_name(asdict(self)), _by_name(theirs)
        return [f"{name}: {theirs.get(name)!r} instead of {value!r}" for name, value in ours.items() if theirs.get(name) != value]


def _by_name(said: dict[str, Any]) -> dict[str, object]:
    """A description with a line for each thing that can differ: how many groups there are, and what each of them is."""
    named: dict[str, object] = {name: value for name, value in said.items() if name != "groups"}
    groups = said.get("groups")
    if not isinstance(groups, (list, tuple)):
        return named
    for number, group in enumerate(groups):
        named |= {f"{name} of group {number}": value for name, value in group.items()} if isinstance(group, dict) else {}
    return {**named, "groups": len(groups)}
