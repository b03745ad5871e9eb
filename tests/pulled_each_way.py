"""In a Peer: one pull made plainly, by a prepared object twice, and by one that is warm, each into an equal destination.

Imported by agent.py's process; the test gives keys and arguments as Peer does.
"""
from __future__ import annotations

import base64
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import cache_bytes
import reference
from agent_keys import make_key

import shmkv

DESTINATION = "each way"


class Steps:
    """Pulls into one cache, which is full of canaries before each."""

    def __init__(self, agent: Any) -> None:
        self.manager = agent.dist.kv_cache_manager
        self.cache = agent.caches[DESTINATION]

    def step(self, call: Callable[[Any], None], key: list[Any]) -> list[Any]:
        """[status, did it go the quick way, is the key still there, the destination's bytes]"""
        cache_bytes.write(self.cache, reference.canary(cache_bytes.geometry_of(self.cache)))
        status, quick = outcome(call, make_key(key))
        left = key[0] == "key" and self.manager.contains(make_key(key))
        return [status, quick, left, base64.b64encode(cache_bytes.read(self.cache).tobytes()).decode()]

    def prepare(self, how: dict[str, Any]) -> Callable[[Any], None]:
        """A prepared pull; one that is refused at once is refused by each call."""
        try:
            return self.manager.prepare_pull(self.cache, **how)     # type: ignore[no-any-return]
        except shmkv.LLMException as error:
            refusal = error

        def refused(_: Any) -> None:
            raise refusal

        return refused


def outcome(call: Callable[[Any], None], key: Any) -> tuple[str, bool]:
    """The status, and whether the arguments were not looked at again."""
    checks = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal checks
        checks += event == "call" and frame.f_code is shmkv.PullRequest.__init__.__code__

    sys.setprofile(see)
    try:
        call(key)
    except shmkv.LLMException as error:
        return error.status_code.name, not checks
    finally:
        sys.setprofile(None)
    return reference.SUCCESS, not checks


def pull_each_way(agent: Any, keys: list[list[Any]], warm: list[Any] | None, how: dict[str, Any]) -> list[list[Any]]:
    """The steps: plain, prepared, prepared again, and, where `warm` names a row that fits, one that pulled that row before. `keys`
    name equal rows, one a step."""
    steps = Steps(agent)
    made = [steps.step(lambda key: steps.manager.pull_cache(key, steps.cache, **how), keys[0])]
    prepared = steps.prepare(how)
    made += [steps.step(prepared, key) for key in keys[1:3]]
    if warm:
        prepared = steps.prepare(how)
        prepared(make_key(warm))
        made.append(steps.step(prepared, keys[3]))
    return made
