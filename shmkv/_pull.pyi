"""Types of the hot path's calls."""
from collections.abc import Callable, Sequence
from typing import Any, Final

from shmkv._blocks import BlockLists
from shmkv._lend import Loan
from shmkv._link_handle import LinkHandle
from shmkv._local import LocalCache
from shmkv.errors import LLMException

DST_GONE: Final[int]

# `select` has ten numbers, or fourteen for some of the heads or strict formats: its length is not part of the type.
def pull(
    handle: LinkHandle,
    dst: LocalCache,
    packed: bytes,
    select: tuple[int, ...],
    consumes: bool,
    timeout_ms: int,
    *,
    lists: BlockLists | None = None,
) -> int: ...
def pull_many(
    handle: LinkHandle, requests: Sequence[tuple[LocalCache, bytes, tuple[int, ...], bool]], timeout_ms: int
) -> tuple[int, int]: ...
def lend(
    handle: LinkHandle, packed: bytes, select: tuple[int, ...], consumes: bool, timeout_ms: int, limit: int
) -> tuple[int, Loan | None]: ...
def copy(
    src: LocalCache,
    dst: LocalCache,
    select: tuple[int, ...],
    timeout_ms: int,
    *,
    lists: BlockLists | None = None,
    disjoint: bool = False,
) -> int: ...
def check(dst: LocalCache, select: tuple[int, ...], *, lists: BlockLists | None = None) -> int: ...
def last_pull() -> tuple[int, int, int, str, bool]: ...

class PreparedPull:
    def __init__(
        self,
        dst: LocalCache,
        select: tuple[int, ...],
        consumes: bool,
        timeout_ms: int,
        key_types: tuple[type, ...],
        again: Callable[[Any, int], LinkHandle | None],
        fail: Callable[[Any, int, int], LLMException],
        remark: Callable[[LinkHandle, Any], object],
    ) -> None: ...
    @property
    def dst(self) -> LocalCache: ...
    def __call__(self, key: object) -> None: ...
    def pull(self, key: object, row: int) -> None: ...
    def note_options(self, options: tuple[object, ...]) -> None: ...
    def pull_same(
        self,
        key: object,
        row: int,
        size: object,
        src_layers: object,
        dst_layers: object,
        src_offset: object,
        dst_offset: object,
        per_layer: object,
        heads: object,
        strict_format: object,
    ) -> bool: ...
    def forget(self, handle: object) -> None: ...
