"""The decoder's side of the chat: pulls what is new in each turn behind what it has, and says the answer."""
from __future__ import annotations

import time
from typing import Any

import torch
from smollm2 import DECODER_CLUSTER, PROMPT_CLUSTER, Message, link, start_engine
from smollm2_model import load
from transformers import DynamicCache

from shmkv import CacheKey, LLMRole
from shmkv.integrations.transformers import ShmCache, cache_argument, receive_into


class Decoder:
    """One conversation in a cache of its own."""

    def __init__(self, dtype: str, room: int) -> None:
        self.model, self.tokenizer = load(dtype)
        self.engine = start_engine(LLMRole.DECODER, DECODER_CLUSTER)
        self.cache = ShmCache(self.model, self.engine.kv_cache_manager, room)
        self.answer: list[int] = []

    def meet(self, message: Message) -> Message:
        """{} -> {}: link to the prefill process."""
        link(self.engine, PROMPT_CLUSTER)
        return {}

    def pull(self, message: Message) -> Message:
        """The answer of the prefill's turn -> how much was pulled, and how long it took."""
        started_ns = time.perf_counter_ns()
        held = self.cache.lengths[0]
        length = receive_into(CacheKey(PROMPT_CLUSTER, message["req_id"]), self.cache, start=held)
        pull_ms = (time.perf_counter_ns() - started_ns) / 1e6
        self.answer = [message["first_token"]]
        return {"pulled": length - held, "nbytes": self.cache.nbytes(length - held), "pull_ms": pull_ms}

    def more(self, message: Message) -> Message:
        """{"steps": n} -> the answer so far, after up to n tokens more; "ended" once it has come to its end."""
        for _ in range(message["steps"]):
            if self.answer[-1] == self.tokenizer.eos_token_id:
                break
            self.answer.append(self._next(self.cache, [self.answer[-1]]))
        ended = self.answer[-1] == self.tokenizer.eos_token_id
        return {"tokens": self.answer, "text": self.tokenizer.decode(self.answer, skip_special_tokens=True), "ended": ended}

    def recompute(self, message: Message) -> Message:
        """{"token_ids": the conversation, "steps": n} -> what one process says that has nothing, and ms to its first token."""
        cache = DynamicCache(config=self.model.config)
        started_ns = time.perf_counter_ns()
        tokens = [self._next(cache, message["token_ids"])]
        first_ms = (time.perf_counter_ns() - started_ns) / 1e6
        while len(tokens) < message["steps"]:
            tokens.append(self._next(cache, tokens[-1:]))
        return {"tokens": tokens, "first_ms": first_ms}

    def _next(self, cache: Any, token_ids: list[int]) -> int:
        told: dict[str, Any] = {cache_argument(self.model): cache}
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([token_ids]), logits_to_keep=1, **told).logits
        return int(logits[0, -1].argmax())

    def close(self) -> None:
        """Leave nothing in /dev/shm."""
        self.cache.close()
        self.engine.finalize()
