"""Peers that run models: commands of model_agent.py, by a Peer's `execute`."""
from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peer import Answer, Namespace, Peer, req

HERE = str(Path(__file__).parent)
NEEDED = "needs torch and transformers: make test-llm installs them"


def need_models() -> None:
    """Skip where there is no torch or no transformers."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package, reason=NEEDED)


class ModelPeer:
    """A Peer, asked for things with models."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer

    def send(self, command: str, **arguments: Any) -> None:
        """Without waiting: `peer.receive()` has the answer."""
        code = f"import sys\nsys.path[:0] = [{HERE!r}]\nimport model_agent\nresult = model_agent.{command}(agent, **{arguments!r})"
        self.peer.send("execute", code=code)

    def attempt(self, command: str, **arguments: Any) -> Answer:
        """An error is an answer too."""
        self.send(command, **arguments)
        return self.peer.receive()

    def call(self, command: str, **arguments: Any) -> Any:
        """The value of a command that has to work."""
        answer = self.attempt(command, **arguments)
        assert not answer.kinds, f"{command} {arguments} in the other process:\n{answer.trace}"
        return answer.value

    def refusal(self, command: str, **arguments: Any) -> str:
        """The text of an LLMParamError that a command has to end with."""
        answer = self.attempt(command, **arguments)
        assert answer.outcome == "LLM_PARAM_INVALID", answer
        return answer.text


class Pair(NamedTuple):
    """A prompt process (cluster 1) and a decoder that is linked to it."""

    prompt: ModelPeer
    decoder: ModelPeer
    numbers: Iterator[int]

    def key(self) -> list[Any]:
        """A request key that no other test of the pair has."""
        return req(1, next(self.numbers))


def pair_in(namespace: Namespace) -> Iterator[Pair]:
    """For fixtures of a module: to import torch and transformers takes longer than all tests of a family."""
    need_models()
    prompt = namespace.start_cluster("PROMPT", 1)
    decoder = namespace.start_cluster("DECODER", 2)
    assert decoder.call("link", ids=[1]) == ["LLM_SUCCESS", ["LLM_SUCCESS"]]
    yield Pair(ModelPeer(prompt), ModelPeer(decoder), itertools.count(1))
    complaints = namespace.close()
    assert not complaints, "\n".join(complaints)
