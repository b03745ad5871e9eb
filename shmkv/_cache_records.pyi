"""Types of the owner's side of its caches in a directory."""
from collections.abc import Iterable
from typing import Any, TypeAlias

from shmkv._index import KeyIndex
from shmkv._mapping import Region
from shmkv._plan import ShapeList

_Tensors: TypeAlias = ShapeList | list[tuple[int, int, int, int, int, int]]

class CacheRecords:
    @property
    def region(self) -> Region: ...
    @property
    def index(self) -> KeyIndex: ...
    def insert(
        self,
        segment: Region | None,
        owner: object,
        *,
        cache_id: int,
        serial: int,
        tensors: _Tensors,
        num_rows: int,
        published: int,
        kind: int = 0,
        blocks_model_id: int | None = None,
        format: int = 0,
        base_address: int = 0,
        nbytes: int = 0,
        remote_accessible: bool = True,
    ) -> tuple[int, int]: ...
    @property
    def owners(self) -> dict[int, Any]: ...
    def retire(self, slot: int) -> None: ...
    def release(self, slot: int) -> None: ...
    def row_number(self, slot: int, batch_index: int) -> int: ...
    def end_blocks_key(self, slot: int) -> None: ...
    def find_blocks(self, model_id: int) -> int | None: ...
    def pinned(self, generation: int, life_fd: int, members: Region, initiated: Iterable[tuple[Region, int]]) -> bool: ...
