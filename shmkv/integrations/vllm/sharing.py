"""What the two sides of an engine share where scheduler and worker live in one process, which can have but one cluster."""
from __future__ import annotations

import os
import threading
from multiprocessing.util import Finalize

from shmkv.errors import LLMException
from shmkv.integrations.vllm.counters import Counters
from shmkv.integrations.vllm.endpoint import Endpoint
from shmkv.integrations.vllm.identity import CacheIdentity
from shmkv.integrations.vllm.peers import Peers
from shmkv.integrations.vllm.settings import ConnectorSettings
from shmkv.types import LLMRole


class Shared:
    """Cluster, peers and counts of a process, from the first `open_shared` to the last `close`."""

    def __init__(self, settings: ConnectorSettings, identity: CacheIdentity, *, consumes: bool, produces: bool) -> None:
        self.made_for = (settings, identity, consumes, produces)
        self.users = 0
        self.counters = Counters()
        self.endpoint = Endpoint(settings, LLMRole.PROMPT if produces else LLMRole.DECODER)
        self.peers = Peers(self.endpoint, identity, self.counters, consumes=consumes)
        try:
            self.peers.start()
        except BaseException:
            self.endpoint.close()
            raise
        # Processes that multiprocessing made, as vLLM's are, do not run what stands in atexit. After threads and queues of others.
        self._at_exit = Finalize(None, self._end, exitpriority=0)

    def _end(self) -> None:
        self.peers.close()
        self.endpoint.close()

    def close(self) -> None:
        """One side has ended; the last one ends all."""
        with _opening:
            self.users -= 1
            if self.users > 0 or _open.get(os.getpid()) is not self:
                return
            del _open[os.getpid()]
            self._at_exit.cancel()
            self._end()


_opening = threading.Lock()
_open: dict[int, Shared] = {}           # by pid: what a forked child inherits is not its own


def open_shared(settings: ConnectorSettings, identity: CacheIdentity, *, consumes: bool, produces: bool) -> Shared:
    """What this process has, made if there is nothing yet.

    Raises:
        LLMException: it was made for something else; and what `LLMDataDist.init` raises.
    """
    with _opening:
        shared = _open.get(os.getpid())
        if shared is None:
            shared = _open[os.getpid()] = Shared(settings, identity, consumes=consumes, produces=produces)
        elif shared.made_for != (settings, identity, consumes, produces):
            raise LLMException(f"this process has a connector already, with {shared.made_for}; it cannot have one with "
                               f"{(settings, identity, consumes, produces)}")
        shared.users += 1
        return shared
