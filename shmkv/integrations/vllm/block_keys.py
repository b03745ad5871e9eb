"""Names of blocks: SHA-256 over all tokens up to the block's end and over everything else that decides what is in it.

vLLM's own hashes begin with a random number that each process draws for itself, so they cannot be shared.
"""
from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import NamedTuple

from shmkv.keys import U64MAX, CacheKey

# Names what no chain of hashes comes to but by chance: the card of a producer.
CARD_WORDS = (0, 0)
_WORDS = struct.Struct("<QQ")
_PART = struct.Struct("<II")


class Media(NamedTuple):
    """An image or the like in a prompt: what it is, and the tokens that it takes the place of."""

    identifier: str
    offset: int
    length: int


class Prompt(NamedTuple):
    """What the blocks of a request depend on. `lora`: name and path of the adapter, and a digest of its weights."""

    token_ids: Sequence[int]
    cache_salt: str | None = None
    lora: tuple[str, ...] | None = None
    media: tuple[Media, ...] = ()


def block_hashes(seed: bytes, prompt: Prompt, block_size: int) -> list[bytes]:
    """One hash a whole block, each over the one before it; a last block that is not full has none. Salt and adapter go into the
    first and so into all of them, media into the blocks that they touch."""
    link = hashlib.sha256(seed + _text(prompt.cache_salt, prompt.lora)).digest()
    hashes = []
    for begin in range(0, len(prompt.token_ids) - block_size + 1, block_size):
        tokens = prompt.token_ids[begin:begin + block_size]
        touched = [(item.identifier, item.offset - begin) for item in prompt.media
                   if item.offset < begin + block_size and item.offset + item.length > begin]
        link = hashlib.sha256(link + struct.pack(f"<{block_size}q", *tokens) + (_text(touched) if touched else b"")).digest()
        hashes.append(link)
    return hashes


def _text(*values: object) -> bytes:
    """The same bytes for equal values only."""
    return repr(values).encode()


def key_words(block_hash: bytes, shard: int, group: int) -> tuple[int, int]:
    """(prefix_id, model_id) of what tensor-parallel rank `shard` has of a block in the layers of a group: the first 128 bits of a
    SHA-256."""
    prefix_id, model_id = _WORDS.unpack_from(hashlib.sha256(block_hash + _PART.pack(shard, group)).digest())
    return (prefix_id if prefix_id != U64MAX else 1, model_id)     # a prefix id of U64MAX would mean "none"


def cache_key(cluster_id: int, words: tuple[int, int]) -> CacheKey:
    """The key of a cluster that has the two words."""
    return CacheKey(cluster_id, U64MAX, words[1], words[0])
