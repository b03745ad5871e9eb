"""A transformers cache whose keys and values live in somebody else's memory, here that of a shmkv cache.

The owner's tensors are laid out [batch, tokens, heads, head_dim]: the filled tokens of a request are then one
contiguous prefix of its row, which is what `pull_cache(..., size=...)` moves. The model sees the same bytes
as [batch, heads, tokens, head_dim], by a transposed view.

Each row of the batch has its own number of filled tokens, so requests of different lengths share a batch
without padding on the left, and a request keeps its bytes when it moves to another row.

This file knows torch and transformers. It knows nothing of shmkv.
"""
from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


# The project's type check looks into neither torch nor transformers, so these base classes are Any to it.
class InPlaceLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer, written in place.

    `keys` and `values` are [batch, tokens, heads, head_dim] and stay the memory they are: never reallocated.
    """

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.filled = torch.zeros(keys.shape[0], dtype=torch.int64)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory was there first."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [batch, heads, new, head_dim] behind each row's filled tokens.

        Returns views [batch, heads, filled, head_dim] as long as the fullest row; what stands behind the end
        of a shorter row is for the attention mask to hide. Raises ValueError when a row has no room left.
        """
        new = key_states.shape[2]
        end = self.get_seq_length() + new
        if end > self.get_max_length():
            raise ValueError(f"{end} tokens do not fit into a cache of {self.get_max_length()}")
        rows = torch.arange(len(self.filled)).unsqueeze(1)
        columns = self.filled.unsqueeze(1) + torch.arange(new)
        self.keys[rows, columns] = key_states.transpose(1, 2)
        self.values[rows, columns] = value_states.transpose(1, 2)
        self.filled = self.filled + new
        return self.keys[:, :end].transpose(1, 2), self.values[:, :end].transpose(1, 2)

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Length and offset of the keys that `update` is going to return for so many new tokens."""
        # Older versions of transformers give the positions of the new tokens instead of their number.
        new = query_length if isinstance(query_length, int) else len(query_length)
        return self.get_seq_length() + new, 0

    def get_seq_length(self) -> int:
        """Filled tokens of the fullest row."""
        return int(self.filled.max())

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return int(self.keys.shape[1])

    get_max_cache_shape = get_max_length  # its name in older versions of transformers


class InPlaceCache(Cache):  # type: ignore[misc]
    """One `InPlaceLayer` for each pair of `tensors`, which come in the order key, value, key, value, ..."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        super().__init__(layers=[InPlaceLayer(keys, values) for keys, values in pairs])

    @property
    def filled(self) -> torch.Tensor:
        """Filled tokens of each row, int64 [batch]."""
        filled: torch.Tensor = self.layers[0].filled
        return filled

    def set_filled(self, lengths: torch.Tensor) -> None:
        """Declare how many tokens of each row hold keys and values (int64 [batch])."""
        for layer in self.layers:
            layer.filled = lengths.clone()


def prefill(model: Any, cache: InPlaceCache, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Fill row i of an empty `cache` from token ids `prompts[i]`. Returns the token behind each prompt."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    width = int(lengths.max())
    # Padded on the right, so that each row begins at column 0. No token sees what stands to its right: the
    # padding changes nothing, and its keys and values lie beyond `filled`, where nobody looks.
    tokens = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts])
    seen = torch.arange(width) < lengths.unsqueeze(1)
    positions = torch.arange(width).expand(len(prompts), -1)
    # Logits only where a prompt ends: an array of [batch, batch, vocabulary], whose diagonal is wanted.
    logits = _forward(model, cache, tokens, seen, positions, logits_to_keep=lengths - 1)
    cache.set_filled(lengths)
    rows = torch.arange(len(prompts))
    return list(logits[rows, rows].argmax(-1).tolist())


def step(model: Any, cache: InPlaceCache, tokens: Sequence[int]) -> torch.Tensor:
    """Feed one token a row, each at its row's own position. Returns the logits, [batch, vocabulary]."""
    filled = cache.filled
    seen = torch.arange(cache.get_seq_length() + 1) <= filled.unsqueeze(1)
    return _forward(model, cache, torch.tensor(tokens).unsqueeze(1), seen, filled.unsqueeze(1))[:, -1]


def decode(model: Any, cache: InPlaceCache, first: Sequence[int], steps: int) -> list[list[int]]:
    """Greedy decoding of `steps` tokens a row behind the tokens `first`. Returns `first` and them."""
    rows = [[token] for token in first]
    for _ in range(steps):
        following = step(model, cache, [row[-1] for row in rows]).argmax(-1).tolist()
        for row, token in zip(rows, following, strict=True):
            row.append(token)
    return rows


def _forward(
    model: Any,
    cache: InPlaceCache,
    tokens: torch.Tensor,
    seen: torch.Tensor,
    positions: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    # The argument is called `cache` in transformers 5.24, `past_key_values` in older versions.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    options |= {"input_ids": tokens, "attention_mask": seen, "position_ids": positions, name: cache}
    with torch.no_grad():
        logits: torch.Tensor = model(**options).logits
    return logits
