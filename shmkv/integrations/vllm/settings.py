"""What a user may write into ``kv_connector_extra_config``, checked before anything else happens."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from shmkv.checks import INT32_MAX, INT64_MAX, UINT32_MAX, UINT64_MAX, check_bool, check_int_between, check_str
from shmkv.errors import LLMParamError


@dataclass(frozen=True)
class ConnectorSettings:
    """`namespace`: who is met, None = SHMKV_NAMESPACE or its default. `cluster_id`: of this process, None = a random one.

    `capacity_bytes`: what a producer keeps in shared memory at most; the least recently used blocks go first. `key_ttl_ms`: blocks
    go so long after they were published, None = when there is no room. `timeout_ms`: the longest that one pull of one layer takes,
    and all of a load together: what a step loads, counted from its beginning, or what one request loads beside the batch, counted
    from the end of the loads before it. `async_load`: requests wait beside the batch while their blocks come, instead of waiting
    for each layer within it. `look_ms`: how often members that come and go are looked for.
    """

    namespace: str | None = None
    cluster_id: int | None = None
    capacity_bytes: int = 1 << 30
    key_ttl_ms: int | None = None
    timeout_ms: int = 2000
    async_load: bool = False
    look_ms: int = 200

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ConnectorSettings:
        """LLMParamError for a name that is none of these or a value that cannot be used; TypeError for one of a wrong type."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                raise LLMParamError(f"kv_connector_extra_config has no setting '{name}'; there are {', '.join(known)}")
        return cls(**{name: _CHECKS[name](f"kv_connector_extra_config['{name}']", value)
                      for name, value in given.items() if value is not None})


def _number(low: int, high: int, kind: str) -> Callable[[str, Any], Any]:
    return lambda name, value: check_int_between(name, value, low, high, kind)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "namespace": check_str,
    "cluster_id": _number(0, UINT64_MAX, "uint64"),
    "capacity_bytes": _number(0, INT64_MAX, "int64"),
    "key_ttl_ms": _number(0, UINT32_MAX, "uint32"),
    "timeout_ms": _number(1, INT32_MAX, "int32"),
    "async_load": check_bool,
    "look_ms": _number(1, INT32_MAX, "int32"),
}
