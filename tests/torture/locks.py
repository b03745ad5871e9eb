"""Who holds which link, read from outside: the words in the prompts' directories, as a survivor sees them."""
from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from shmkv import _layout, _link_record
from shmkv._mapping import Region
from torture.board import Board, Field

_OFFSETS = {(struct, name): offset for struct, name, offset, _ in _layout.fields()}
_NBYTES = {name: nbytes for name, nbytes, _, _ in _layout.tables()}["LinkRecord"]
_WORD = _OFFSETS["LinkRecord", "word"]
_SIDES = _OFFSETS["LinkRecord", "sides"]
_SIDE_NBYTES = (_NBYTES - _SIDES) // 2
_INITIATOR = _SIDES + _SIDE_NBYTES + _OFFSETS["LinkSide", "incarnation"]
HELD_BY_ACCEPTOR, HELD_BY_INITIATOR = 1, 2
_WAITERS = 1 << 31


def incarnation(board: Board, number: int) -> int:
    """Of the cluster that a worker has joined with; 0 before the first."""
    stored = int(board.fields[number, Field.INCARNATION])
    return stored + 2**63 if stored else 0


class Directory:
    """The link records of one prompt's directory, mapped here."""

    def __init__(self, namespace: str, incarnation: int) -> None:
        self.incarnation = incarnation
        self._region = Region.attach(f"/dev/shm/{namespace}.d.{incarnation:016x}")

    def links(self) -> list[tuple[int, int]]:
        """(word without its waiters bit, incarnation of the initiator) of each record."""
        count = _link_record.links_reserved(self._region)
        memory = memoryview((ctypes.c_char * (count * _NBYTES)).from_address(_link_record.address(self._region, 0))).cast("B")
        rows: npt.NDArray[np.uint8] = np.frombuffer(memory, np.uint8).reshape(count, _NBYTES)
        words = rows[:, _WORD:_WORD + 4].copy().view(np.uint32)[:, 0] & ~np.uint32(_WAITERS)
        makers = rows[:, _INITIATOR:_INITIATOR + 8].copy().view(np.uint64)[:, 0]
        return list(zip(words.tolist(), makers.tolist(), strict=True))


class Directories:
    """Of all prompts, found by what the board says of their incarnations."""

    def __init__(self, namespace: str, board: Board, prompts: int) -> None:
        self._namespace = namespace
        self._board = board
        self._prompts = prompts
        self._mapped: dict[int, Directory] = {}

    def of(self, prompt: int) -> Directory | None:
        """The directory of a prompt's present life, or of its last one as long as no other has begun."""
        wanted = incarnation(self._board, prompt)
        found = self._mapped.get(prompt)
        if (found is not None and found.incarnation == wanted) or not wanted:
            return found
        try:
            self._mapped[prompt] = Directory(self._namespace, wanted)
        except OSError:
            return None                 # swept already
        return self._mapped[prompt]

    def all(self) -> list[Directory]:
        return [found for prompt in range(self._prompts) if (found := self.of(prompt)) is not None]

    def holders(self, side: int = HELD_BY_INITIATOR) -> set[int]:
        """Incarnations of the decoders, or of the prompts, that hold a link now."""
        return {maker if side == HELD_BY_INITIATOR else directory.incarnation
                for directory in self.all() for word, maker in directory.links() if word == side}

    def is_held_for(self, incarnation: int) -> bool:
        """Does a prompt hold a link of this decoder?"""
        return any((HELD_BY_ACCEPTOR, incarnation) in directory.links() for directory in self.all())

    def is_held_by_decoder(self, incarnation: int) -> bool:
        """Does a record still say that this decoder holds it? Asked after its death."""
        return incarnation in self.holders()

    def is_held_in(self, prompt: int) -> tuple[bool, bool]:
        """Is a link of this prompt held by itself, by a decoder?"""
        directory = self.of(prompt)
        words = {word for word, _ in directory.links()} if directory is not None else set()
        return HELD_BY_ACCEPTOR in words, HELD_BY_INITIATOR in words
