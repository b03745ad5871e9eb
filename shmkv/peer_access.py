"""May processes reach each other's private memory here? From the numbers of the mover to status codes and sentences, with what the
system says about it: Yama, capabilities, seccomp, users.

Everything here is asked after the kernel has refused, or by a person; nothing is decided by it.
"""
from __future__ import annotations

import errno
import os
from pathlib import Path

from shmkv import _addresses, _link, _peer_memory
from shmkv._link import LinkEnd
from shmkv.cluster import Cluster
from shmkv.config import Settings
from shmkv.errors import LLMStatusCode

PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
CAP_SYS_PTRACE = 19
STATUSES = frozenset(range(_peer_memory.NO_ROOM, _peer_memory.FORBIDDEN + 1))


def access_code(status: int, settings: Settings) -> LLMStatusCode:
    """The status code of the contract for an answer of `_peer_memory`."""
    return {
        _link.PEER_GONE: settings.timeout_status,
        _link.TIMEOUT: settings.timeout_status,
        _peer_memory.REPLACED: settings.timeout_status,
        _peer_memory.NO_ROOM: settings.out_of_memory_status,
        _peer_memory.UNSURE: LLMStatusCode.LLM_FAILED,
    }.get(status, LLMStatusCode.LLM_PARAM_INVALID if status in STATUSES else LLMStatusCode.LLM_FAILED)


def reach_sentence(status: int, cluster: Cluster, cluster_id: int, link: LinkEnd | int | None) -> str:
    """What happened to a copy over a link, out of the private memory of a peer or into it."""
    pid = next((member.pid for member in cluster.namespace.members() if member.cluster_id == cluster_id), 0)
    return access_sentence(status, f"cluster {cluster_id}", pid, _place(link) if isinstance(link, LinkEnd) else "the address")


def _place(link: LinkEnd) -> str:
    """The address that had no memory, and which tensor that is, if it is one of the peer's."""
    found = None if link.directory is None else _addresses.tensor_of(link.directory, link.fault)
    return f"address {link.fault:#x}" + ("" if found is None else f" (tensor {found[1]} of its cache {found[0]})")


def access_sentence(status: int, peer: str, pid: int, place: str) -> str:
    """What happened. `peer`: as it is called in messages; `pid`: as it recorded it; `place`: the address at fault, and whose."""
    if status in (_peer_memory.FORBIDDEN, _peer_memory.UNSUPPORTED):
        return f"the memory that {peer} registered is private to process {pid}, and {_refusal(status)}: {how_to_allow(pid)}"
    return {
        _peer_memory.ELSEWHERE: f"the memory that {peer} registered is private to a process that cannot be named here: it recorded "
                                f"the pid {pid}, and the kernel names another one, or none, for the holder of its life byte; both "
                                "processes have to be in one pid namespace (containers: a common one, such as --pid=host)",
        _peer_memory.REPLACED: f"process {pid} did not start when {peer} recorded it: {peer} died and its pid was given to another "
                               "process, or the two are in different time namespaces",
        _peer_memory.UNMAPPED: f"{peer} has no memory at {place}, or none that may be used so: what it registered there is gone, "
                               "or never was",
        _peer_memory.OWN_UNMAPPED: f"this process has no memory at {place}, or none that may be used so",
        _peer_memory.UNSURE: f"it cannot be told whether process {pid} still is {peer}: the life file, or /proc/{pid}/stat, could "
                             "not be read",
        _peer_memory.NO_ROOM: f"the kernel has no memory for a transfer with process {pid}",
    }[status]


def _refusal(status: int) -> str:
    if status == _peer_memory.UNSUPPORTED:
        return "there is no process_vm_readv here"
    return "the kernel does not let this process reach it"


def how_to_allow(pid: int) -> str:
    """What stands in the way of reaching the memory of a process, as far as that can be told, and what to do about it."""
    found = _own_limits()
    theirs = _user_of(pid)
    if theirs is not None and theirs != os.geteuid():
        found.append(f"process {pid} runs as user {theirs} and this one as user {os.geteuid()}: run both as one user")
    if not found:
        found.append(f"process {pid} has made itself untraceable (prctl PR_SET_DUMPABLE 0, or a set-user-id program), has more "
                     "capabilities or is in another user namespace, or a security module forbids it")
    return "; ".join(found) + "; or allocate the cache in a segment (allocate_cache), which any linked process reaches"


def _own_limits() -> list[str]:
    """What keeps this process from the memory of any other process of its user."""
    if _words_of("self", "CapEff") and int(_words_of("self", "CapEff")[0], 16) >> CAP_SYS_PTRACE & 1:
        return [] if not _is_filtered() else [_filter_sentence()]
    scope = ptrace_scope()
    found = []
    if scope == 1:
        found.append("kernel.yama.ptrace_scope is 1: set it to 0 (sysctl kernel.yama.ptrace_scope=0), give this process "
                     "CAP_SYS_PTRACE, or let the owner of the memory allow it by SHMKV_ALLOW_PTRACE=1 (prctl PR_SET_PTRACER)")
    elif scope == 2:
        found.append("kernel.yama.ptrace_scope is 2: set it to 0 (sysctl kernel.yama.ptrace_scope=0) or give this process "
                     "CAP_SYS_PTRACE")
    elif scope is not None and scope >= 3:
        found.append(f"kernel.yama.ptrace_scope is {scope}, which forbids it until the machine starts again")
    if _is_filtered():
        found.append(_filter_sentence())
    return found


def _is_filtered() -> bool:
    return _words_of("self", "Seccomp") == ["2"]


def _filter_sentence() -> str:
    return ("a seccomp filter is set (containers: the default profile of older runtimes forbids process_vm_readv; start them with "
            "--cap-add=SYS_PTRACE or a profile that allows it)")


def ptrace_scope() -> int | None:
    """Of the security module Yama, None where there is none (then processes of one user may reach each other)."""
    try:
        return int(PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return None


def _user_of(pid: int) -> int | None:
    words = _words_of(str(pid), "Uid")
    return int(words[1]) if len(words) > 1 else None


def _words_of(process: str, name: str) -> list[str]:
    """A line of /proc/<pid>/status."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return []
    return next((line.split()[1:] for line in lines if line.startswith(f"{name}:")), [])


def refusal() -> str:
    """Why the kernel would not let another process of this user read memory of this one; "" if it would."""
    number = -_peer_memory.ask()
    if number == 0:
        return ""
    if number not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
        return os.strerror(number)
    return "; ".join(_own_limits()) or ("there is no process_vm_readv here" if number == errno.ENOSYS else "the kernel forbids it")
