"""Each call of the matrix and what it takes to come to it."""
from __future__ import annotations

from crash.block_scenarios import BLOCK_SCENARIOS
from crash.house import PROMPTS
from crash.lend_scenarios import LEND_SCENARIOS
from crash.link_scenarios import (
    Link,
    LinkMore,
    LinkOverDead,
    LinkWithoutMemory,
    Unlink,
    UnlinkByForce,
    UnlinkIncoming,
    UnlinkIncomingInUse,
    UnlinkIncomingInVain,
)
from crash.push_scenarios import PUSH_SCENARIOS
from crash.scenarios import (
    Allocate,
    AllocateManyRows,
    Bind,
    Finalize,
    FirstInit,
    Free,
    FreeAndKeep,
    GiveBackIndex,
    Init,
    LastFinalize,
    Publish,
    Pull,
    PullLastPart,
    PullWaitedFor,
    RemoveKey,
    Reuse,
    Scenario,
    Settle,
    Sweep,
    Unbind,
)
from crash.waits import WAITS

SCENARIOS: dict[str, type[Scenario]] = {
    "init": Init, "first init": FirstInit, "sweep": Sweep, "finalize": Finalize, "last finalize": LastFinalize,
    "allocate": Allocate, "allocate many rows": AllocateManyRows, "collect": GiveBackIndex, "reuse": Reuse, "publish": Publish,
    "bind": Bind, "unbind": Unbind, "remove": RemoveKey, "free": Free, "free and keep": FreeAndKeep, "settle": Settle,
    "pull": Pull, "pull the last part": PullLastPart, "pull waited for": PullWaitedFor,
    "link": Link, "link without memory": LinkWithoutMemory, "link over a dead one": LinkOverDead, "link one more": LinkMore,
    "unlink": Unlink, "unlink by force": UnlinkByForce, "unlink by the prompt": UnlinkIncoming,
    "unlink in use": UnlinkIncomingInUse, "unlink in vain": UnlinkIncomingInVain,
    **BLOCK_SCENARIOS, **LEND_SCENARIOS, **PUSH_SCENARIOS, **WAITS,
}
assert set(PROMPTS) == {1, 4}
