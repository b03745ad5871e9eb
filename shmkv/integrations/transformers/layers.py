"""Layers of a transformers cache that write into memory which somebody else owns, and never move.

Keys and values are [rows, tokens, heads, dim], so that the filled tokens of a row are its first bytes; attention sees them as
[rows, heads, tokens, dim], by a view. A row begins at token 0, whatever the others do: rows of unequal lengths share a batch
without padding on the left. Nothing here knows shmkv's caches.
"""
from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers.cache_utils import CacheLayerMixin

from shmkv.errors import LLMParamError


# The project's type check looks into neither torch nor transformers, so these base classes are Any to it.
class ShmLayer(CacheLayerMixin):  # type: ignore[misc]
    """Keys and values of one layer of full attention. `filled`: tokens that each row holds. `closed`: why nothing may be written
    now; None while it may."""

    is_sliding = False
    is_croppable = True
    window = 0

    def __init__(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.number = number
        self.keys, self.values = keys, values
        self.device, self.dtype = keys.device, keys.dtype
        self.filled = [0] * keys.shape[0]
        self.closed: str | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory was there first."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append [rows, heads, new, dim] behind each row's filled tokens.

        Returns views [rows, heads, tokens, dim] of what a query may see, up to the end of the fullest row; what stands behind the
        end of a shorter row is for the attention mask to hide. LLMParamError, and nothing is written, for states of another shape
        or type, for more tokens than there is room for, and after a `handoff`.
        """
        new = key_states.shape[2]
        self._check(key_states, value_states, new)
        first, end = self._seen_from(), self.get_seq_length() + new
        with torch.no_grad():
            self._write(self.keys, key_states, new)
            self._write(self.values, value_states, new)
        self.filled = [count + new for count in self.filled]
        return self.keys[:, first:end].transpose(1, 2), self.values[:, first:end].transpose(1, 2)

    def _check(self, key_states: torch.Tensor, value_states: torch.Tensor, new: int) -> None:
        if self.closed is not None:
            raise LLMParamError(f"layer {self.number}: {self.closed}")
        for what, states, memory in (("keys", key_states, self.keys), ("values", value_states, self.values)):
            rows, _, heads, dim = memory.shape
            expected = (rows, heads, new, dim)
            if tuple(states.shape) != expected or states.dtype != memory.dtype:
                raise LLMParamError(f"layer {self.number}: {what} of shape {list(states.shape)} and {states.dtype}, the cache "
                                    f"takes {list(expected)} and {memory.dtype}")
        if self.get_seq_length() + new > self.get_max_length():
            raise LLMParamError(f"layer {self.number}: {self.get_seq_length() + new} tokens do not fit into a cache of "
                                f"{self.get_max_length()}")
        if self._is_ragged and (new > 1 or self.is_sliding):
            what = "one token at a time" if not self.is_sliding else "no more tokens in a sliding layer"
            raise LLMParamError(f"layer {self.number}: rows of unequal lengths {self.filled} take {what}: the model's mask is made "
                                "for the longest")

    def _write(self, memory: torch.Tensor, states: torch.Tensor, new: int) -> None:
        if self._is_ragged:
            rows = torch.arange(len(self.filled))
            memory[rows, torch.tensor(self.filled)] = states[:, :, 0]
        else:
            memory[:, self.filled[0]:self.filled[0] + new] = states.transpose(1, 2)

    @property
    def _is_ragged(self) -> bool:
        return len(set(self.filled)) > 1

    def _seen_from(self) -> int:
        """The first token that the next query sees."""
        return 0

    def get_mask_sizes(self, query_length: int | torch.Tensor) -> tuple[int, int]:
        """Length and offset of the keys that `update` is going to return for so many new tokens."""
        # Older versions of transformers give the positions of the new tokens instead of their number.
        new = query_length if isinstance(query_length, int) else len(query_length)
        first = self._seen_from()
        return self.get_seq_length() + new - first, first

    def get_seq_length(self) -> int:
        """Filled tokens of the fullest row."""
        return max(self.filled)

    def get_max_length(self) -> int:
        """Tokens that a row can hold."""
        return int(self.keys.shape[1])

    get_max_cache_shape = get_max_length        # its name in older versions of transformers

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of each row: a negative number says how many. A positive one says how many to keep, as it did in
        older versions of transformers."""
        self._check_open()
        kept = [count + tokens_to_remove if tokens_to_remove < 0 else min(count, tokens_to_remove) for count in self.filled]
        self.filled = self.filled if tokens_to_remove == 0 else [max(0, count) for count in kept]

    def reset(self) -> None:
        """Forget all tokens; their bytes stay until others are written."""
        self._check_open()
        self.filled = [0] * len(self.filled)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i becomes what row ``beam_idx[i]`` was, in place."""
        self._check_open()
        end = self.get_seq_length()
        for memory in (self.keys, self.values):
            memory[:, :end] = memory[:, :end].index_select(0, beam_idx)
        self.filled = [self.filled[row] for row in beam_idx.tolist()]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """LLMParamError: a ShmCache has the rows that it was made with."""
        self._refuse_rows(f"batch_repeat_interleave({repeats})")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """LLMParamError: a ShmCache has the rows that it was made with."""
        self._refuse_rows("batch_select_indices")

    def _refuse_rows(self, what: str) -> NoReturn:
        raise LLMParamError(f"layer {self.number}: {what} would change the number of rows, which is that of the shared memory: "
                            "make the cache with as many rows as are needed")

    def _check_open(self) -> None:
        if self.closed is not None:
            raise LLMParamError(f"layer {self.number}: {self.closed}")


class ShmSlidingLayer(ShmLayer):
    """The same for a layer whose queries see `window` tokens. It keeps all of them, so that tokens never move and can be taken
    back, and shows those that are seen."""

    is_sliding = True

    def __init__(self, number: int, keys: torch.Tensor, values: torch.Tensor, window: int) -> None:
        super().__init__(number, keys, values)
        self.window = self.sliding_window = window

    def _seen_from(self) -> int:
        return max(self.get_seq_length() - self.window + 1, 0)
