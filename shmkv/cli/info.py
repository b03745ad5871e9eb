"""`shmkv info`: versions, the copy kernel and why it was chosen, what the host allows; the layout as compiled."""
from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import shmkv
from shmkv import _copy, _layout, peer_access, segment
from shmkv.cli import console
from shmkv.cluster import choose_kernel
from shmkv.config import Settings

SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MOUNTS = Path("/proc/self/mounts")
MAX_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
BRACKETED = re.compile(r"\[(\w+)\]")


def gather() -> dict[str, Any]:
    """Everything that `info` shows. LLMParamError for a SHMKV_ variable that cannot be used."""
    settings = Settings.from_options({})
    return {
        "shmkv": shmkv.__version__, "layout_version": _layout.VERSION, "layout_fingerprint": f"{_layout.FINGERPRINT:#010x}",
        "python": platform.python_version(), "numpy": _version("numpy"), "cython": _cython_version(),
        "namespace": settings.namespace, **_kernel(settings), "copy": settings.copy,
        "recycle_bytes": segment.DEFAULT_RECYCLE_NBYTES if settings.recycle_bytes is None else settings.recycle_bytes,
        "max_leases": settings.max_leases, "async_threads": settings.async_threads, "allow_ptrace": settings.allow_ptrace,
        "cpu_count": os.cpu_count(), "usable_cpus": len(os.sched_getaffinity(0)),
        "shm_total_bytes": segment.total_nbytes(), "shm_free_bytes": segment.free_nbytes(),
        "shmem_huge_pages": _chosen(_text(SHMEM_HUGE_PAGES)), "shm_mount_huge": mount_huge(_text(MOUNTS) or ""),
        "memory_limit_left_bytes": segment.memory_limit_left(), "max_map_count": int(_text(MAX_MAP_COUNT) or 0),
        "peer_memory_refusal": peer_access.refusal(), "ptrace_scope": peer_access.ptrace_scope(),
    }


def _kernel(settings: Settings) -> dict[str, Any]:
    """The copy loop that a cluster of this environment has; chosen as `init` does it."""
    choose_kernel(settings)
    chosen = _copy.current()
    why = "the fastest that this CPU supports" if settings.kernel == "auto" else f"SHMKV_KERNEL={settings.kernel}"
    return {"kernel": chosen["kernel"], "kernel_why": why, "supported_kernels": _copy.supported_kernels(),
            "nt_threshold_bytes": chosen["nt_threshold"], "copy_threads": chosen["threads"],
            "crew_threshold_bytes": chosen["crew_threshold"]}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cython_version() -> str | None:
    """What the extensions were built with; Cython names the module of its function type after its version."""
    found = re.fullmatch(r"_cython_(\d+)_(\d+)_(\w+)", type(_layout.fields).__module__)
    return ".".join(found.groups()) if found else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _chosen(setting: str | None) -> str | None:
    """The word in brackets of a kernel setting: "always [never]" → "never"."""
    found = BRACKETED.search(setting or "")
    return found[1] if found else setting


def mount_huge(mounts: str) -> str | None:
    """The option `huge=` of the tmpfs at /dev/shm, by the text of /proc/self/mounts: what decides whether segments get huge pages.
    The kernel leaves out "never", the default. None if no tmpfs is mounted there."""
    found = [fields[2:4] for fields in map(str.split, mounts.splitlines()) if fields[1:2] == [segment.SHM_DIR]]
    if not found or found[-1][0] != "tmpfs":        # what was mounted last hides what lies below it
        return None
    options = dict(option.partition("=")[::2] for option in found[-1][1].split(","))
    return options.get("huge", "never")


# -- the layout --------------------------------------------------------------------------------------------------------

def layout_as_json() -> dict[str, Any]:
    """Structs, fields and tables as compiled; every number is bytes except `at_most`, which counts records."""
    return {
        "version": _layout.VERSION, "fingerprint": f"{_layout.FINGERPRINT:#010x}",
        "fields": [dict(zip(("struct", "field", "offset", "bytes"), each, strict=True)) for each in _layout.fields()],
        "tables": [dict(zip(("record", "bytes", "at_most", "offset"), each, strict=True)) for each in _layout.tables()],
    }


def _with_gaps(fields: Iterable[tuple[str, int, int]]) -> Iterable[tuple[str, int, int]]:
    """(name, offset, bytes) of fields and of the unused bytes between them."""
    end = 0
    for name, offset, nbytes in fields:
        if offset > end:
            yield "-", end, offset - end
        yield name, offset, nbytes
        end = offset + nbytes


def _print_layout(out: Console) -> None:
    out.print(f"layout version {_layout.VERSION}, fingerprint {_layout.FINGERPRINT:#010x}")
    structs: dict[str, list[tuple[str, int, int]]] = {}
    for struct, field, offset, nbytes in _layout.fields():
        structs.setdefault(struct, []).append((field, offset, nbytes))
    for struct, fields in structs.items():
        table = Table("offset", "bytes", "field", title=struct, title_justify="left")
        table.columns[0].justify = table.columns[1].justify = "right"
        for name, offset, nbytes in _with_gaps(fields):
            table.add_row(str(offset), str(nbytes), name, style="dim" if name == "-" else None)
        out.print(table)
    table = Table("record", "bytes", "at most", "first at", "end at", title="tables", title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for record, nbytes, count, offset in _layout.tables():
        table.add_row(record, str(nbytes), str(count), str(offset), str(offset + nbytes * count))
    out.print(table)


# -- printing ----------------------------------------------------------------------------------------------------------

def show(*, layout: bool, json: bool) -> None:
    """Print the facts, or the layout instead."""
    if layout and json:
        console.print_json(layout_as_json())
    elif layout:
        _print_layout(console.out())
    elif json:
        console.print_json(gather())
    else:
        _print_facts(console.out(), gather())


def _print_facts(out: Console, facts: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    for name, value in (
        ("shmkv", f"{facts['shmkv']}, layout version {facts['layout_version']}, fingerprint {facts['layout_fingerprint']}"),
        ("python", f"{facts['python']}, numpy {facts['numpy']}, built with Cython {facts['cython'] or 'of unknown version'}"),
        ("namespace", facts["namespace"]),
        ("copy kernel", f"{facts['kernel']}: {facts['kernel_why']} (supported: {', '.join(facts['supported_kernels'])})"),
        ("streaming stores", f"from {console.size(facts['nt_threshold_bytes'])} a pull"),
        ("copy threads", f"{facts['copy_threads']}, for a pull of {console.size(facts['crew_threshold_bytes'])} or more"),
        ("copies", _copy_text(facts["copy"])),
        ("freed segments", f"{console.size(facts['recycle_bytes'])} of them at most are kept for the next caches"),
        ("leases", f"{facts['max_leases']} on a link at most"),
        ("asyncio", f"{facts['async_threads']} threads at most"),
        ("CPUs", f"{facts['cpu_count']}, usable by this process: {facts['usable_cpus']}"),
        ("/dev/shm", f"{console.size(facts['shm_total_bytes'])}, free {console.size(facts['shm_free_bytes'])}"),
        ("huge pages", _huge_text(facts["shm_mount_huge"], facts["shmem_huge_pages"])),
        ("memory limit", _limit_text(facts["memory_limit_left_bytes"])),
        ("vm.max_map_count", str(facts["max_map_count"])),
        ("peer memory", _reach_text(facts["peer_memory_refusal"])),
        ("traceable", "by every process of the user, once this one registers memory" if facts["allow_ptrace"] else
         "by those that the kernel lets"),
    ):
        table.add_row(Text(name, style="bold"), value)
    out.print(table)


def _limit_text(left: int | None) -> str:
    return "no memory cgroup limits this process" if left is None else f"its memory cgroup leaves {console.size(left)}"


def _huge_text(mounted: str | None, everywhere: str | None) -> str:
    """The mount's option decides, unless the setting of the whole system is "deny" or "force"."""
    mount = f"mounted with huge={mounted}" if mounted else "not a tmpfs"
    return f"{segment.SHM_DIR} is {mount}; shmem_enabled is {everywhere or 'not known to this kernel'}"


def _copy_text(copy: str) -> str:
    """How bytes come out of other processes' segments, and into them."""
    return "by pread and pwrite calls" if copy == "pread" else "through mapped memory"


def _reach_text(refusal: str) -> str:
    """Of memory that a process registered, without a segment: can others of its user pull from it and push into it?"""
    return f"not to be reached: {refusal}" if refusal else "registered memory of other processes can be reached"
