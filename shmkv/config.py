"""Settings: the options given to init and the environment, checked and frozen into one value for the rest.

Only what has a meaning on one host is kept. This is the only module that reads environment variables.
"""
from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmkv.checks import INT32_MAX, INT64_MAX, check_str, check_type, shown
from shmkv.cluster_info import parse_listen_ip_info
from shmkv.errors import LLMParamError, LLMStatusCode
from shmkv.options import (
    CACHE_MANAGER,
    COPY,
    DEVICE_ID,
    FLOW_GRAPH_MEM,
    HOST_MEM_POOL,
    LISTEN_IP_INFO,
    LOCAL_COMM_RES,
    MEM_POOL,
    MEMORY_UTILIZATION,
    NAMESPACE,
    REMOTE_ACCESSIBLE,
    SWITCH_ROLE,
    SYNC_KV_TIME,
    TRANSFER_BACKEND,
    LLMConfig,
    LlmConfig,
    parse_digits,
)

__all__ = ["LLMConfig", "LlmConfig", "MemPool", "Settings"]

DEFAULT_SYNC_KV_TIMEOUT_MS = 1000
DEFAULT_PAGE_SHIFT = 16
DEFAULT_ASYNC_THREADS = 4
MOST_LEASES = 192           # as the layout has room for; `_lease` says the same number


@dataclass(frozen=True)
class MemPool:
    """A memory limit: `memory_size` bytes, handed out in pages of ``1 << page_shift`` bytes."""

    memory_size: int
    page_shift: int = DEFAULT_PAGE_SHIFT

    def rounded(self, nbytes: int) -> int:
        """Bytes that a tensor of `nbytes` bytes takes out of the pool."""
        return -(-nbytes >> self.page_shift) << self.page_shift

    @classmethod
    def from_json(cls, key: str, text: str) -> MemPool:
        """Parse ``{"memory_size": bytes, "page_shift": 10..30}``. Raises LLMParamError naming `key`."""
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LLMParamError(f"option {key} must be JSON, got {shown(text)}: {error}") from error
        size, shift = (
            (fields.get("memory_size"), fields.get("page_shift", DEFAULT_PAGE_SHIFT))
            if isinstance(fields, dict)
            else (None, None)
        )
        if type(size) is not int or not 0 < size <= INT64_MAX:
            raise LLMParamError(f"option {key}: memory_size must be bytes, 1 to 2**63 - 1, got {shown(text)}")
        if type(shift) is not int or not 10 <= shift <= 30:
            raise LLMParamError(f"option {key}: page_shift must be an int from 10 to 30, got {shown(text)}")
        return cls(size, shift)


@dataclass(frozen=True)
class Settings:
    """What an initialised cluster goes by.

    Sizes are bytes, times milliseconds; None leaves a choice to the module concerned.
    """

    namespace: str
    sync_kv_timeout_ms: int
    enable_switch_role: bool
    cache_manager: bool
    remote_accessible: bool
    local_comm_res: str
    mem_pool: MemPool | None
    host_mem_pool: MemPool | None
    listen_ip_info: str
    recycle_bytes: int | None
    kernel: str                     # as it was given: which there are is for `choose_kernel` to say
    nt_threshold: int | None
    copy_threads: int | None
    copy: str
    async_threads: int              # for calls of asyncio
    max_leases: int                 # a link: views, forks and waiting pulls of this process
    allow_ptrace: bool              # who registers memory for its peers lets every process of the user trace it

    @property
    def timeout_status(self) -> LLMStatusCode:
        """What an operation that took too long answers."""
        return LLMStatusCode.LLM_TIMEOUT if self.cache_manager else LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT

    @property
    def out_of_memory_status(self) -> LLMStatusCode:
        """What an allocation without memory answers."""
        return LLMStatusCode.LLM_OUT_OF_MEMORY if self.cache_manager else LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY

    @property
    def pools_nbytes(self) -> int | None:
        """Bytes of the pools together, None if there is none."""
        sizes = [pool.memory_size for pool in (self.mem_pool, self.host_mem_pool) if pool]
        return sum(sizes) if sizes else None

    @classmethod
    def from_options(cls, options: dict[str, str], environ: Mapping[str, str] | None = None) -> Settings:
        """Check the options given to init, and the environment; `options` is not changed.

        Raises:
            LLMNoneError: `options` is None.
            TypeError: `options` is not a dict, or an option that is used is not a str.
            LLMParamError: a value that is not allowed, naming the option or the environment variable.
        """
        if isinstance(options, LLMConfig):
            raise TypeError("argument 'options' only support dict, got an LLMConfig: pass config.generate_options()")
        given = dict(check_type("options", options, dict))
        env = os.environ if environ is None else environ
        _check_unused(given)
        listen_ip_info = _text(given, LISTEN_IP_INFO)
        if listen_ip_info is not None:
            parse_listen_ip_info(listen_ip_info, LISTEN_IP_INFO)
        cache_manager, remote_accessible = _mode(given)
        return cls(
            namespace=_namespace(given, env),
            sync_kv_timeout_ms=_timeout_ms(given),
            enable_switch_role=_switch(given, SWITCH_ROLE) or False,
            cache_manager=cache_manager,
            remote_accessible=remote_accessible,
            local_comm_res=_text(given, LOCAL_COMM_RES) or "",
            mem_pool=_pool(given, MEM_POOL) if cache_manager else None,
            host_mem_pool=_pool(given, HOST_MEM_POOL) if cache_manager else None,
            listen_ip_info=listen_ip_info or "",
            recycle_bytes=_env_int(env, "SHMKV_RECYCLE_BYTES", 0, INT64_MAX),
            kernel=env.get("SHMKV_KERNEL", "auto"),
            nt_threshold=_env_int(env, "SHMKV_NT_THRESHOLD", 0, INT64_MAX),
            copy_threads=_env_int(env, "SHMKV_COPY_THREADS", 1, 256),
            copy=_copy(given, env),
            async_threads=_env_int(env, "SHMKV_ASYNC_THREADS", 1, 256) or DEFAULT_ASYNC_THREADS,
            max_leases=_env_int(env, "SHMKV_MAX_LEASES", 1, MOST_LEASES) or MOST_LEASES,
            allow_ptrace=_env_int(env, "SHMKV_ALLOW_PTRACE", 0, 1) == 1,
        )


def _text(options: Mapping[str, Any], key: str) -> str | None:
    return check_str(key, options[key]) if key in options else None


def _switch(options: Mapping[str, Any], key: str) -> bool | None:
    text = _text(options, key)
    if text not in (None, "0", "1"):
        raise LLMParamError(f'option {key} must be "0" or "1", got {shown(text)}')
    return None if text is None else text == "1"


def _check_unused(options: Mapping[str, Any]) -> None:
    """Options without a meaning on a CPU whose form is checked all the same."""
    memory = _text(options, FLOW_GRAPH_MEM)
    if memory is not None and not re.fullmatch(r"[0-9]+", memory):
        raise LLMParamError(f"option {FLOW_GRAPH_MEM} must be one number of digits, got {shown(memory)}")
    share = _text(options, MEMORY_UTILIZATION)
    try:
        float("0" if share is None else share)
    except ValueError as error:
        raise LLMParamError(f"option {MEMORY_UTILIZATION} must be a number, got {shown(share)}") from error
    devices = _text(options, DEVICE_ID)
    numbers = [parse_digits(device) for device in (devices or "0").split(";")]
    if devices == "" or not all(number is not None and number <= INT32_MAX for number in numbers):
        raise LLMParamError(f'option {DEVICE_ID} must be device numbers joined by ";", got {shown(devices)}')


def _mode(options: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (cache manager mode, remote accessible); local_comm_res turns on what is not set itself."""
    implied = _text(options, LOCAL_COMM_RES) is not None
    manager, remote = _switch(options, CACHE_MANAGER), _switch(options, REMOTE_ACCESSIBLE)
    if implied and manager is False:
        raise LLMParamError(f'option {CACHE_MANAGER} must not be "0" when {LOCAL_COMM_RES} is given')
    manager = implied if manager is None else manager
    if _text(options, TRANSFER_BACKEND):
        if not manager:
            raise LLMParamError(f'option {TRANSFER_BACKEND} needs {CACHE_MANAGER} "1"')
        if remote is False:
            raise LLMParamError(f'option {TRANSFER_BACKEND} needs {REMOTE_ACCESSIBLE} not to be "0"')
        if LISTEN_IP_INFO not in options:
            raise LLMParamError(f"option {TRANSFER_BACKEND} needs {LISTEN_IP_INFO}")
    return manager, implied if remote is None else remote


def _timeout_ms(options: Mapping[str, Any]) -> int:
    text = _text(options, SYNC_KV_TIME)
    number = DEFAULT_SYNC_KV_TIMEOUT_MS if text is None else parse_digits(text)
    if number is None or not 0 < number <= INT32_MAX:
        raise LLMParamError(f"option {SYNC_KV_TIME} must be ms from 1 to {INT32_MAX}, got {shown(text)}")
    return number


def _pool(options: Mapping[str, Any], key: str) -> MemPool | None:
    text = _text(options, key)
    return MemPool.from_json(key, text) if text else None


def _namespace(options: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    given = _text(options, NAMESPACE)
    source = "SHMKV_NAMESPACE" if given is None else NAMESPACE
    name = environ.get(source, f"shmkv-{os.getuid()}") if given is None else given
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", name):
        raise LLMParamError(f"{source} must be 1 to 100 characters of A-Za-z0-9_-, got {shown(name)}")
    return name


def _copy(options: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    name, text = (COPY, _text(options, COPY)) if COPY in options else ("SHMKV_COPY", environ.get("SHMKV_COPY", "memory"))
    if text not in ("memory", "pread"):
        raise LLMParamError(f'{name} must be "memory" or "pread", got {shown(text)}')
    return text


def _env_int(environ: Mapping[str, str], name: str, low: int, high: int) -> int | None:
    text = environ.get(name)
    number = None if text is None else parse_digits(text)
    if text is not None and (number is None or not low <= number <= high):
        raise LLMParamError(f"{name} must be an integer from {low} to {high}, got {shown(text)}")
    return number
