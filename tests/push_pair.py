"""A prompt and a decoder in one process, for pushes over the core of a link."""
from __future__ import annotations

from typing import Any

import memory
import numpy as np
from memory import ACCEPTOR, NO_LIFE_FILE, Owner, Source

from shmkv import _link_record, _push, _push_key, segment
from shmkv._acceptor import AcceptedLink
from shmkv._blocks import BlockLists
from shmkv._push import Addresses
from shmkv.keys import CacheKeyByIdAndIndex

PATIENT_MS = 20000
TENSORS, ROWS, INNER = 4, 2, 64
ALL_TENSORS = (0, -1, 0, -1)


class PushPair:
    """A prompt, the owner of the link's record, and a decoder with one cache, whose tensors are TENSORS x ROWS x INNER bytes."""

    def __init__(self, namespace: str, by_system_calls: bool = False) -> None:
        self.prompt, self.decoder = Owner(0xA1, 1), Owner(0xB2, 2)
        self.prefix = f"{namespace}.c.{0xB2:016x}."
        self.record = self.prompt.claim(1, 0xB2, 2)
        self.link = AcceptedLink(self.prompt.region, self.prompt.members, NO_LIFE_FILE, self.record, 1)
        self.link.attach(self.decoder.region, f"{segment.SHM_DIR}/{self.prefix}".encode(), by_system_calls)
        self.target = Source(self.decoder, self.prefix, 1, np.full((TENSORS, 1, ROWS, INNER), 0x5A, np.uint8))
        self.source, self.bytes = memory.destination(TENSORS, 1, ROWS, INNER)
        self.bytes[:] = np.random.default_rng(1).integers(0, 256, self.bytes.shape)

    def close(self) -> None:
        self.target.unlink()
        for owner in (self.prompt, self.decoder):
            owner.close()

    def tensor(self, index: int, name: str) -> Any:
        return memory.word(self.decoder.region, "TensorRecord", index, "TensorRecord", name)

    def cache(self, name: str) -> Any:
        return memory.word(self.decoder.region, "CacheRecord", self.target.slot, "CacheRecord", name)

    @property
    def addresses(self) -> list[int]:
        return [int(self.tensor(index, "base_address").value) for index in range(TENSORS)]

    @property
    def written(self) -> Any:
        return memory.content(self.target.region, 4096).reshape(TENSORS, ROWS, INNER)

    def push(self, addresses: list[int] | None = None, first: int = 0, row: int = 0, lists: BlockLists | None = None,
             timeout_ms: int = PATIENT_MS) -> int:
        """All addresses in one call; nothing may be left of it in the record."""
        made = Addresses(self.addresses if addresses is None else addresses)
        status = int(_push.push(self.link, self.source, made, 0, made.count, first, row, lists, timeout_ms))
        record = _link_record.read(self.prompt.region, self.record)
        side = record["sides"][ACCEPTOR]
        assert (side["hazard"], side["open"], record["word"], self.link.users) == (0, 0, 0, 0)
        return status

    def push_by_id(self, *, src_row: int = 0, row: int = 0, cache_id: int | None = None, timeout_ms: int = PATIENT_MS,
                   tensors: tuple[int, int, int, int] = ALL_TENSORS) -> int:
        """A whole row to the one that a key names; `tensors`: first and how many (-1: all) of the source, of the destination."""
        key = CacheKeyByIdAndIndex(2, self.target.cache_id if cache_id is None else cache_id, row)
        return int(_push_key.push(self.link, self.source, key.packed, (-1, 0, 0, src_row, 0, *tensors, 0), None, timeout_ms))

    @property
    def word(self) -> Any:
        """Of the link, in shared memory."""
        return memory.word(self.prompt.region, "LinkRecord", self.record, "LinkRecord", "word")

    def is_untouched(self) -> bool:
        return bool((self.written == 0x5A).all())
