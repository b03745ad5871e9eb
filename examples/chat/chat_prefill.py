"""The prefill side of the chat: keeps the conversation's keys and values, and computes those of what is new in each turn."""
from __future__ import annotations

import time
from typing import Any

import torch
from smollm2 import PROMPT_CLUSTER, Message, start_engine
from smollm2_model import load

from shmkv import CacheKey, LLMRole
from shmkv.integrations.transformers import ShmCache, cache_argument, handoff


class Prefill:
    """One conversation in one cache, which is handed over after each turn and taken back for the next."""

    def __init__(self, dtype: str, room: int) -> None:
        self.model, self.tokenizer = load(dtype)
        self.engine = start_engine(LLMRole.PROMPT, PROMPT_CLUSTER)
        self.cache = ShmCache(self.model, self.engine.kv_cache_manager, room)
        self.token_ids: list[int] = []
        self.turns = 0

    def turn(self, message: Message) -> Message:
        """{"said": text, "steps": tokens that the answer may have} -> what the decoder has to know; {"full": True} when there is no
        room for that."""
        token_ids = self.token_ids + self._new_tokens(message["said"])
        if len(token_ids) + message["steps"] > self.cache.room:
            return {"full": True}
        started_ns = time.perf_counter_ns()
        reused = self.cache.lengths[0]
        first_token = self._feed(token_ids[reused:])
        self.turns += 1
        handoff(self.cache, CacheKey(PROMPT_CLUSTER, req_id=self.turns), keep=True)
        self.token_ids = token_ids
        return {"full": False, "req_id": self.turns, "token_ids": token_ids, "reused": reused, "first_token": first_token,
                "prefill_ms": (time.perf_counter_ns() - started_ns) / 1e6}

    def catch_up(self, message: Message) -> Message:
        """{"answer": tokens} -> {}: the decoder's answer, as a part of the conversation. Its keys and values are computed here once
        more, all tokens at once, while the person reads."""
        self.cache.resume()
        self._feed(message["answer"])
        self.token_ids += message["answer"]
        return {}

    def _new_tokens(self, said: str) -> list[int]:
        """What stands between the end of the last answer and the beginning of the next."""
        chat = self.tokenizer.apply_chat_template([{"role": "user", "content": said}], add_generation_prompt=True, tokenize=False)
        if self.turns:          # the template begins every conversation with the system's words
            end = "" if self.token_ids[-1] == self.tokenizer.eos_token_id else self.tokenizer.eos_token
            chat = end + "\n" + chat[chat.index("<|im_start|>user"):]
        return list(self.tokenizer(chat)["input_ids"])

    def _feed(self, token_ids: list[int]) -> int:
        told: dict[str, Any] = {cache_argument(self.model): self.cache}
        with torch.no_grad():
            logits = self.model(input_ids=torch.tensor([token_ids]), logits_to_keep=1, **told).logits
        return int(logits[0, -1].argmax())

    def close(self) -> None:
        """Leave nothing in /dev/shm."""
        self.cache.close()
        self.engine.finalize()
