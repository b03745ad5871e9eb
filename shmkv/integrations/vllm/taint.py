"""Which of an engine's blocks hold what nobody computed: those whose load failed, and those that were computed from them.

The engine computes them again. Until then they must not be published, for in another engine nothing would show what they are.
"""
from __future__ import annotations

from collections.abc import Iterable

from shmkv.integrations.vllm.plans import Store


class Taint:
    """Block ids. A block that was freed meanwhile and is written by somebody else's decode stays in here until a prompt is computed
    into it: what relies on it before then is not published, which costs no more than that."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def failed(self, block_ids: Iterable[int]) -> None:
        """These were not loaded."""
        self._blocks.update(block_ids)

    def loaded(self, block_ids: Iterable[int]) -> None:
        """These hold now what they should."""
        self._blocks.difference_update(block_ids)

    def spoils(self, store: Store) -> bool:
        """Did a step compute from blocks that are tainted? Then those that it wrote to are, too; else they are not any more."""
        if not self._blocks:
            return False
        if self._blocks.isdisjoint(store.relied_on):
            self._blocks.difference_update(store.computed)
            return False
        self._blocks.update(store.computed)
        return True
