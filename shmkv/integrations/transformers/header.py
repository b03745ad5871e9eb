"""The header of a row: tensor 0 of a cache, which says what the other tensors hold and how much of it.

It travels with the row. So a decoder needs the key and nothing else, and looks at the header before it takes a byte of the rest.
"""
from __future__ import annotations

import json
import secrets
from typing import NamedTuple

from shmkv.errors import LLMParamError
from shmkv.integrations.transformers.layouts import HEADER_NBYTES, ModelLayout

FORMAT = "shmkv.transformers 1"


class Header(NamedTuple):
    """`length` tokens of `room` are filled; `nonce` tells this filling of the row from all others."""

    layout: ModelLayout
    room: int
    length: int
    nonce: str

    @staticmethod
    def new(layout: ModelLayout, room: int, length: int) -> Header:
        """The header of a row that is complete now."""
        return Header(layout, room, length, secrets.token_hex(8))

    def pack(self) -> bytes:
        """HEADER_NBYTES bytes. LLMParamError for a model with so many kinds of layers that they do not fit."""
        values = {"format": FORMAT, "room": self.room, "length": self.length, "nonce": self.nonce, **self.layout.to_json()}
        text = json.dumps(values, separators=(",", ":")).encode()
        if len(text) > HEADER_NBYTES:
            raise LLMParamError(f"the layers of model {self.layout.model} are {len(text)} bytes of description, a row's header has "
                                f"room for {HEADER_NBYTES}")
        return text.ljust(HEADER_NBYTES, b"\0")

    @staticmethod
    def unpack(raw: bytes) -> Header:
        """LLMParamError for bytes that `pack` did not make."""
        try:
            values = json.loads(raw.rstrip(b"\0"))
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']!r}, expected {FORMAT!r}")
            header = Header(ModelLayout.from_json(values), int(values["room"]), int(values["length"]), str(values["nonce"]))
            if not 0 < header.length <= header.room:
                raise ValueError(f"{header.length} of {header.room} tokens")
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
            raise LLMParamError(f"the row was not made by handoff(): {type(error).__name__}: {error}") from error
        return header
