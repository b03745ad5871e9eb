"""What several of these files begin with."""
from __future__ import annotations

import pytest
from lent import offer_rows
from peer import Peer, StartPeer


@pytest.fixture
def offered(prompt: StartPeer, decoder: StartPeer) -> tuple[Peer, Peer]:
    """A prompt whose cache 1 has three rows of noise (request 7, prefix 9, request 8), and a decoder."""
    p, d = prompt(1), decoder(2)
    offer_rows(p)
    return p, d
