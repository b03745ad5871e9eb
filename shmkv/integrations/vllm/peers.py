"""The producers that this engine can read from: found in the members table, linked to, compared by their cards, forgotten when they
go.

A thread looks every `look_ms`, so that neither scheduler nor worker ever waits for a link; what they read is one tuple that is
replaced as a whole.
"""
from __future__ import annotations

import logging
import threading

import numpy as np

from shmkv.errors import LLMException, LLMStatusCode
from shmkv.integrations.vllm.block_keys import CARD_WORDS, cache_key
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.endpoint import Endpoint, Piece
from shmkv.integrations.vllm.identity import CARD_NBYTES, CacheIdentity
from shmkv.types import CacheDesc, DataType, LLMRole

LINK_TIMEOUT_MS = 500

log = logging.getLogger("shmkv")


class Peers:
    """`consumes`: look for others at all; a producer's thread only lets go of what has expired."""

    def __init__(self, endpoint: Endpoint, identity: CacheIdentity, counters: Counters, *, consumes: bool) -> None:
        self._endpoint = endpoint
        self._identity = identity
        self._counters = counters
        self._consumes = consumes
        self._linked: dict[int, int] = {}               # cluster id -> incarnation
        self._refused: dict[int, int] = {}              # those whose card says that they are none of ours
        self._usable: tuple[int, ...] = ()
        self._own = (endpoint.cluster_id,) if endpoint.role == LLMRole.PROMPT else ()       # others publish nothing
        self._last: int | None = None                   # any thread's, and no more than where to begin
        self._looking = threading.Lock()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def usable(self) -> tuple[int, ...]:
        """Cluster ids of those whose blocks fit, the own one first."""
        return (self._endpoint.cluster_id, *self._usable)

    def find(self, words: tuple[int, int]) -> int | None:
        """The cluster that has a block now, or None. Where the last one was is the first place, for blocks of a prompt are mostly
        together; then the own cluster."""
        asked = (*self._own, *self._usable)
        last = self._last
        if last in asked and last != asked[0]:
            asked = (last, *(cluster_id for cluster_id in asked if cluster_id != last))
        found = self._endpoint.holder(words, asked)
        if found is not None:
            self._last = found
        return found

    def start(self) -> None:
        """Look once, so that the first request finds what is there, and from then on by and by."""
        self.look()
        self._thread = threading.Thread(target=self._look_on, name="shmkv-vllm-peers", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more looks. Twice is no error."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _look_on(self) -> None:
        while not self._end.wait(self._endpoint.settings.look_ms / 1000):
            try:
                self.look()
                self._endpoint.manager.collect()
            except Exception as error:
                if isinstance(error, LLMException) and error.status_code == LLMStatusCode.LLM_ENGINE_FINALIZED:
                    return
                # Whatever it was, there is another look; without one, nobody new would ever be found.
                log.warning("looking for producers: %s", error, exc_info=not isinstance(error, LLMException))

    def look(self) -> None:
        """Link to who is new, let go of who is gone."""
        if not self._consumes:
            return
        with self._looking:
            there = {member.cluster_id: member.incarnation for member in self._endpoint.producers()}
            for cluster_id, incarnation in list(self._linked.items()):
                if there.get(cluster_id) != incarnation or not self._endpoint.is_usable(cluster_id):
                    self._forget(cluster_id)
            for cluster_id, incarnation in there.items():
                if cluster_id not in self._usable and self._refused.get(cluster_id) != incarnation:
                    self._try(cluster_id, incarnation)

    def _forget(self, cluster_id: int) -> None:
        self._usable = tuple(each for each in self._usable if each != cluster_id)
        self._linked.pop(cluster_id, None)
        self._endpoint.unlink(cluster_id)

    def _try(self, cluster_id: int, incarnation: int) -> None:
        """One that has no card yet may have one at the next look, or is none of ours."""
        if not self._endpoint.link(cluster_id, LINK_TIMEOUT_MS):
            return
        self._linked[cluster_id] = incarnation
        card = self._card(cluster_id)
        if card is None:
            return
        differences = self._identity.differences(card)
        if differences:
            self._refused[cluster_id] = incarnation
            self._forget(cluster_id)
            self._counters.add(refused_peers=1)
            log.warning("blocks of cluster %d are not used, for they are of another cache: %s", cluster_id, "; ".join(differences))
            return
        self._usable = (*self._usable, cluster_id)
        log.info("blocks of cluster %d can be used", cluster_id)

    def _card(self, cluster_id: int) -> bytes | None:
        if not self._endpoint.contains(cluster_id, CARD_WORDS):
            return None
        card = np.zeros((1, CARD_NBYTES), np.uint8)
        into = self._endpoint.manager.register_cache(CacheDesc(1, [1, CARD_NBYTES], DataType.DT_UINT8), [card])
        try:
            self._endpoint.pull([Piece(cache_key(cluster_id, CARD_WORDS), 0)], into, 0)
        except LLMException as error:
            log.warning("the card of cluster %d cannot be read: %s", cluster_id, error)
            return None
        finally:
            self._endpoint.manager.unregister_cache(into)
        return card.tobytes()
