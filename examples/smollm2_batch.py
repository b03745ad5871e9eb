"""A batch of prompts of different lengths through a model whose cache is a ShmCache: prefill, and greedy decoding.

Each row of the batch has its own number of tokens, so requests of different lengths share a batch without padding on the left, and
a request keeps its bytes when it moves to another row. For one request at a time `model.generate` does all of this by itself.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shmkv.integrations.transformers import ShmCache, cache_argument


def prefill(model: Any, cache: ShmCache, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Fill row i of an empty `cache` from token ids `prompts[i]`. Returns the token behind each prompt."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    # Padded on the right, so that each row begins at column 0. No token sees what stands to its right: the
    # padding changes nothing, and its keys and values lie beyond the row's length, where nobody looks.
    tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    seen = torch.arange(width) < lengths.unsqueeze(1)
    positions = torch.arange(width).expand(len(prompts), -1)
    # Logits only where a prompt ends: an array of [batch, batch, vocabulary], whose diagonal is wanted.
    logits = _forward(model, cache, tokens, seen, positions, logits_to_keep=lengths - 1)
    cache.set_lengths(lengths.tolist())
    rows = torch.arange(len(prompts))
    return list(logits[rows, rows].argmax(-1).tolist())


def step(model: Any, cache: ShmCache, tokens: Sequence[int]) -> torch.Tensor:
    """Feed one token a row, each at its row's own position. Returns the logits, [batch, vocabulary]."""
    lengths = torch.tensor(cache.lengths).unsqueeze(1)
    seen = torch.arange(int(lengths.max()) + 1) <= lengths
    return _forward(model, cache, torch.tensor(tokens).unsqueeze(1), seen, lengths)[:, -1]


def decode(model: Any, cache: ShmCache, first: Sequence[int], steps: int) -> list[list[int]]:
    """Greedy decoding of `steps` tokens a row behind the tokens `first`. Returns `first` and them."""
    rows = [[token] for token in first]
    for _ in range(steps):
        following = step(model, cache, [row[-1] for row in rows]).argmax(-1).tolist()
        for row, token in zip(rows, following, strict=True):
            row.append(token)
    return rows


def _forward(model: Any, cache: ShmCache, tokens: torch.Tensor, seen: torch.Tensor, positions: torch.Tensor,
             **options: Any) -> torch.Tensor:
    options |= {"input_ids": tokens, "attention_mask": seen, "position_ids": positions, cache_argument(model): cache}
    with torch.no_grad():
        logits: torch.Tensor = model(**options).logits
    return logits
