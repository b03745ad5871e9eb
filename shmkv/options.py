"""LLMConfig, which callers fill with attributes, and the option keys that it writes them under.

The result is a ``dict[str, str]`` that callers may add to before they hand it to init. Setters check one
value at a time; what several options mean together is judged in config.py.
"""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

from shmkv.checks import (
    INT32_MAX,
    check_bool,
    check_dict,
    check_int,
    check_int_between,
    check_sequence,
    check_str,
    check_type,
    check_uint32,
    shown,
)
from shmkv.errors import LLMParamError

T = TypeVar("T")
DeviceId = int | list[int] | tuple[int, ...] | None

DEVICE_ID = "ge.exec.deviceId"
SESSION_DEVICE_ID = "ge.session_device_id"
FLOW_GRAPH_MEM = "ge.flowGraphMemMaxSize"
LISTEN_IP_INFO = "llm.listenIpInfo"
SYNC_KV_TIME = "llm.SyncKvCacheWaitTime"
SWITCH_ROLE = "llm.EnableSwitchRole"
MEMORY_UTILIZATION = "llm.MemoryUtilization"
CACHE_MANAGER = "llm.EnableCacheManager"
REMOTE_ACCESSIBLE = "llm.EnableRemoteCacheAccessible"
MEM_POOL = "llm.MemPoolConfig"
HOST_MEM_POOL = "llm.HostMemPoolConfig"
LOCAL_COMM_RES = "llm.LocalCommRes"
TRANSFER_BACKEND = "llm.TransferBackend"
COPY = "shmkv.Copy"                 # ours, not of llm_datadist, and so is the next
NAMESPACE = "shmkv.Namespace"


def parse_digits(text: str) -> int | None:
    """Value of 1 to 19 ASCII digits, else None; int() would also take signs, blanks and underscores."""
    return int(text) if re.fullmatch(r"[0-9]{1,19}", text) else None


def _check_device_id(name: str, value: Any) -> DeviceId:
    """One device or a list of them, each an int32 from 0; the value is kept as it was given."""
    check_type(name, value, int, list, tuple)
    devices = [value] if isinstance(value, int) else check_sequence(name, value, int)
    if not devices:
        raise LLMParamError(f"argument '{name}' must name at least one device, got {shown(value)}")
    for device in devices:
        check_int_between(name, device, 0, INT32_MAX, "int32")
    return value  # type: ignore[no-any-return]


def _device_text(value: DeviceId) -> str:
    devices = value if isinstance(value, list | tuple) else [value]
    return ";".join(str(int(device or 0)) for device in devices)


def _check_timeout(name: str, value: object) -> int | str | None:
    """A number of milliseconds, as int or as a text of digits, from 1 to 2**31 - 1."""
    number = check_type(name, value, int, str)
    if isinstance(number, str):
        parsed = parse_digits(number)
        if parsed is None:
            raise LLMParamError(f"argument '{name}' must consist of digits, got {shown(number)}")
        check_int_between(name, parsed, 1, INT32_MAX, "int32")
        return number
    return check_int_between(name, number, 1, INT32_MAX, "int32")


def _check_share(name: str, value: object) -> float:
    share = check_type(name, value, float)
    if not 0.0 <= share <= 1.0:
        raise LLMParamError(f"argument '{name}' must be in [0, 1], got {share}")
    return share


def _check_json(name: str, value: object) -> str:
    text = check_str(name, value)
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LLMParamError(f"argument '{name}' must be JSON, got {shown(text)}: {error}") from error
    return text


def _check_retries(name: str, value: object) -> int:
    return check_int_between(name, value, 1, 100)


def _flag(value: object) -> str:
    return "1" if value else "0"


def _number(value: int | str | None) -> str:
    return str(int(value or 0))


class _Option(Generic[T]):
    """A property of LLMConfig: checks what is set, knows its option key and how its value is written there.

    `unset` is what reading gives before anything was set, and after ``del``. An empty text is left out of the
    options unless `keep_empty`; `always` writes the option even when nothing was set.
    """

    def __init__(
        self,
        key: str,
        unset: T,
        check: Callable[[str, Any], T],
        text: Callable[[T], str] = str,
        *,
        keep_empty: bool = False,
        always: bool = False,
        doc: str,
    ) -> None:
        self.key, self.unset, self.check, self.text = key, unset, check, text
        self.keep_empty, self.always = keep_empty, always
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, config: None, owner: type) -> _Option[T]: ...
    @overload
    def __get__(self, config: LLMConfig, owner: type) -> T: ...
    def __get__(self, config: LLMConfig | None, owner: type) -> _Option[T] | T:
        if config is None:
            return self
        value: T = config._values.get(self.name, self.unset)
        return value

    def __set__(self, config: LLMConfig, value: T) -> None:
        config._values[self.name] = self.check(self.name, value)

    def __delete__(self, config: LLMConfig) -> None:
        config._values.pop(self.name, None)

    def written(self, config: LLMConfig) -> str | None:
        """Text of the option, None if it is to be left out."""
        if not (self.always or self.name in config._values):
            return None
        text = self.text(config._values.get(self.name, self.unset))
        return text if text or self.keep_empty else None


class LLMConfig:
    """Options of a cluster, one attribute each. Setters raise TypeError or LLMParamError; ``del`` unsets."""

    device_id = _Option[DeviceId](
        DEVICE_ID, None, _check_device_id, _device_text,
        doc="One device number or several; checked, then taken as one logical device.",
    )
    listen_ip_info = _Option(
        LISTEN_IP_INFO, "", check_str, doc='"ip:port", several joined by ";"; shown to others, never bound.'
    )
    sync_kv_timeout = _Option[int | str | None](
        SYNC_KV_TIME, None, _check_timeout, _number,
        doc="Time limit of a transfer in ms, int or digits; default 1000.",
    )
    enable_switch_role = _Option(
        SWITCH_ROLE, False, check_bool, lambda on: "1" if on else "",
        doc="Allow switch_role where no cache manager is used.",
    )
    mem_utilization = _Option(
        MEMORY_UTILIZATION, 0.95, _check_share, always=True, doc="Float in [0, 1]; not used."
    )
    buf_pool_cfg = _Option("llm.BufPoolCfg", "", check_str, doc="Any text; not used.")
    cluster_info = _Option("llm.ClusterInfo", "", _check_json, doc="JSON text; not used.")
    output_max_size = _Option[Any]("llm.OutputMaxSize", "", check_int, _number, doc="Any int; not used.")
    deploy_res_path = _Option("llm.deployResPath", "", check_str, doc="Any text; not used.")
    enable_cache_manager = _Option(
        CACHE_MANAGER, False, check_bool, _flag, doc="Offer cache_manager instead of kv_cache_manager."
    )
    enable_remote_cache_accessible = _Option(
        REMOTE_ACCESSIBLE, False, check_bool, _flag,
        doc="Allow push and one-sided pull with the cache manager.",
    )
    mem_pool_cfg = _Option(
        MEM_POOL, "", check_str, doc='JSON {"memory_size": bytes, "page_shift": 10..30}; looked at by init.'
    )
    host_mem_pool_cfg = _Option(HOST_MEM_POOL, "", check_str, doc="The same for HOST caches.")
    local_comm_res = _Option(
        LOCAL_COMM_RES, "", check_str, keep_empty=True,
        doc="Any text; set, even empty, it turns on cache manager and remote access unless those are set.",
    )
    rdma_traffic_class = _Option[int | None](
        "llm.RdmaTrafficClass", None, check_uint32, _number, doc="uint32; not used."
    )
    rdma_service_level = _Option[int | None](
        "llm.RdmaServiceLevel", None, check_uint32, _number, doc="uint32; not used."
    )
    link_total_time = _Option("llm.LinkTotalTime", 0, check_uint32, _number, doc="uint32; not used.")
    link_retry_count = _Option("llm.LinkRetryCount", 1, _check_retries, _number, doc="1 to 100; not used.")
    transfer_backend = _Option(
        TRANSFER_BACKEND, "", check_str, doc="Any text; init checks that the other options go with it."
    )
    global_resource_config = _Option(
        "llm.GlobalResourceConfig", "", check_str, keep_empty=True, doc="Any text; not used."
    )

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._ge_options: dict[str, str] = {}

    @property
    def ge_options(self) -> dict[str, str]:
        """Further options, the caller's own dict; the attributes win over them."""
        return self._ge_options

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str]) -> None:
        self._ge_options = check_dict("ge_options", ge_options, str, str)

    @ge_options.deleter
    def ge_options(self) -> None:
        self._ge_options = {}

    def generate_options(self) -> dict[str, str]:
        """Return the options, a new dict made from the attributes of now; the caller may change it."""
        options = dict(self._ge_options)
        for entry in vars(LLMConfig).values():
            text = entry.written(self) if isinstance(entry, _Option) else None
            if text is not None:
                options[entry.key] = text
        devices = LLMConfig.device_id.written(self)
        if devices is not None:
            options[SESSION_DEVICE_ID] = devices.split(";")[0]
        return options

    gen_options = generate_options

    @property
    def options(self) -> dict[str, str]:
        """The same dict as generate_options gives, new for each access."""
        return self.generate_options()


LlmConfig = LLMConfig
