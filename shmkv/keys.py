"""The three ways to name what a transfer reads or writes. Keys are values: equal by content, hashable, fixed.

A request id or prefix id of ``U64MAX`` means "none".
"""
from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

from shmkv.checks import UINT64_MAX, check_int64, check_uint32, check_uint64
from shmkv.errors import LLMParamError

U64MAX = UINT64_MAX

# What a key is for the core: six 64-bit numbers, made once, since the same key may be pulled by a thousand times a second:
# cluster id, kind, then the words of the record (or the cache id), and the row for a cache id. `words` has those of the record.
KEY_NONE, KEY_REQUEST, KEY_PREFIX, KEY_BLOCKS, KEY_UNUSABLE = 0, 1, 2, 3, 255
KeyWords = tuple[int, int, int, int]        # kind, req_id, prefix_id, model_id
_PACK = struct.Struct("=6Q").pack


class _Key:
    """Equality and hash over the tuple of numbers that the constructor of a subclass stored."""

    _identity: tuple[int, ...]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Key) or type(self) is not type(other):
            return NotImplemented
        return self._identity == other._identity

    def __hash__(self) -> int:
        return hash((type(self).__name__, self._identity))


def _arguments(
    kind: str, names: Sequence[str], required: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], str]:
    """Bind arguments to names; return them, and the spelling of the cluster id that was used."""
    if len(args) + len(kwargs) > len(names):
        raise LLMParamError(f"{kind} takes at most {len(names)} arguments, got {len(args) + len(kwargs)}")
    bound = dict(zip(names, args, strict=False))
    given = dict(kwargs)
    spelling = "cluster_id"
    if "prompt_cluster_id" in given:
        # Of two spellings the shorter wins, so the longer one counts only where it stands alone.
        spelling = "cluster_id" if "cluster_id" in given else "prompt_cluster_id"
        given.setdefault("cluster_id", given.pop("prompt_cluster_id"))
    for name in bound:
        if name in given:
            raise LLMParamError(f"{kind}: {name} is given by position and by keyword")
    bound.update(given)
    for name in required:
        if name not in bound:
            prefix = "prompt_cluster_id or " if name == "cluster_id" else ""
            raise LLMParamError(f"{kind}: {prefix}{name} is required")
    for name in given:
        if name not in names:
            raise LLMParamError(f"{kind}: Unsupported keyword argument '{name}'")
    return bound, spelling


class _ClusterKey(_Key):
    """A key that an owner binds; `prompt_cluster_id` is another spelling of `cluster_id`."""

    _cluster_id: int

    @property
    def cluster_id(self) -> int:
        """Cluster that owns the cache; ignored when the key is bound at allocation."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same as cluster_id."""
        return self._cluster_id


class CacheKey(_ClusterKey):
    """Names a row of a cache by request id or by prefix id.

    ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64 - 1)``, by position or by keyword;
    ``prompt_cluster_id`` is another spelling of ``cluster_id``. All numbers are uint64, and 2**64 - 1 means "none": a request is
    ``CacheKey(1, 7)``, a prefix ``CacheKey(1, 2**64 - 1, prefix_id=5)``, and a place in a list that names nothing
    ``CacheKey(1, 2**64 - 1)``.

    Raises:
        TypeError: not an int.
        LLMParamError: out of range, missing, unknown, given twice, or too many.
    """

    _NAMES = ("cluster_id", "req_id", "model_id", "prefix_id")

    def __init__(self, *args: int, **kwargs: int) -> None:
        bound, _ = _arguments("CacheKey", self._NAMES, ("cluster_id", "req_id"), args, kwargs)
        self._cluster_id = check_uint64("cluster_id", bound["cluster_id"])
        self._req_id = check_uint64("req_id", bound["req_id"])
        self._model_id = check_uint64("model_id", bound.get("model_id", 0))
        self._prefix_id = check_uint64("prefix_id", bound.get("prefix_id", U64MAX))
        self._identity = (self._cluster_id, self._req_id, self._model_id, self._prefix_id)
        kind = (KEY_REQUEST if self._prefix_id == U64MAX else KEY_PREFIX) if self.is_usable else KEY_UNUSABLE
        self.packed = _PACK(self._cluster_id, kind, self._req_id, self._prefix_id, self._model_id, 0)
        self.words = (kind, self._req_id, self._prefix_id, self._model_id)

    @property
    def req_id(self) -> int:
        """Request id, U64MAX if there is none."""
        return self._req_id

    @property
    def model_id(self) -> int:
        """Model id."""
        return self._model_id

    @property
    def prefix_id(self) -> int:
        """Prefix id, U64MAX if there is none."""
        return self._prefix_id

    @property
    def is_usable(self) -> bool:
        """True if exactly one of request id and prefix id is set: only such a key can be pulled by."""
        return (self._req_id == U64MAX) != (self._prefix_id == U64MAX)

    @property
    def is_padding(self) -> bool:
        """True if neither id is set: fills a place in a list of keys and names nothing."""
        return self._req_id == U64MAX and self._prefix_id == U64MAX

    @property
    def is_ambiguous(self) -> bool:
        """True if both ids are set."""
        return self._req_id != U64MAX and self._prefix_id != U64MAX

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, "
            f"prefix_id={self._prefix_id}, model_id={self._model_id})"
        )


class BlocksCacheKey(_ClusterKey):
    """Names a whole blocks cache.

    ``BlocksCacheKey(cluster_id, model_id=0)``, both uint64; spellings and errors as for CacheKey.
    """

    _NAMES = ("cluster_id", "model_id")

    def __init__(self, *args: int, **kwargs: int) -> None:
        bound, self._spelling = _arguments("BlocksCacheKey", self._NAMES, ("cluster_id",), args, kwargs)
        self._cluster_id = check_uint64("cluster_id", bound["cluster_id"])
        self._model_id = check_uint64("model_id", bound.get("model_id", 0))
        self._identity = (self._cluster_id, self._model_id)
        self.packed = _PACK(self._cluster_id, KEY_BLOCKS, 0, 0, self._model_id, 0)
        self.words = (KEY_BLOCKS, 0, 0, self._model_id)

    @property
    def model_id(self) -> int:
        """Model id."""
        return self._model_id

    def __repr__(self) -> str:
        return f"BlocksCacheKey({self._spelling}={self._cluster_id}, model_id={self._model_id})"


class CacheKeyByIdAndIndex(_Key):
    """Names a row by the id of its cache: cluster_id uint64, cache_id int64, batch_index uint32."""

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._cache_id = check_int64("cache_id", cache_id)
        self._batch_index = check_uint32("batch_index", batch_index)
        self._identity = (self._cluster_id, self._cache_id, self._batch_index)
        self.packed = _PACK(self._cluster_id, KEY_NONE, max(self._cache_id, 0), 0, 0, self._batch_index)

    @property
    def cluster_id(self) -> int:
        """Cluster that owns the cache."""
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        """Id that the owner's manager gave to the cache."""
        return self._cache_id

    @property
    def batch_index(self) -> int:
        """Row."""
        return self._batch_index

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self._cluster_id}, cache_id={self._cache_id}, "
            f"batch_index={self._batch_index})"
        )
