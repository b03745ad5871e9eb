"""`shmkv info` and what every command has in common."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shmkv import __version__, _copy, _layout, peer_access
from shmkv.cli import info

pytestmark = pytest.mark.timeout(120)


def facts(cli: Any, **env: str) -> dict[str, Any]:
    done = cli("info", "--json", env=env)
    assert (done.returncode, done.stderr) == (0, "")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_json_has_versions_kernel_and_limits(cli: Any) -> None:
    found = facts(cli, SHMKV_NAMESPACE="some-name")
    assert (found["shmkv"], found["layout_version"], found["namespace"]) == (__version__, _layout.VERSION, "some-name")
    assert int(found["layout_fingerprint"], 16) == _layout.FINGERPRINT
    assert found["supported_kernels"] == _copy.supported_kernels()
    assert found["kernel"] in found["supported_kernels"]
    assert 0 < found["usable_cpus"] <= found["cpu_count"]
    assert 0 < found["shm_free_bytes"] <= found["shm_total_bytes"]
    assert found["max_map_count"] > 0
    assert (found["peer_memory_refusal"], found["ptrace_scope"]) == (peer_access.refusal(), peer_access.ptrace_scope())
    assert found["cython"] is None or found["cython"].count(".") >= 2


def test_kernel_threshold_and_threads_come_from_the_environment(cli: Any) -> None:
    found = facts(cli, SHMKV_KERNEL="c", SHMKV_NT_THRESHOLD="12345", SHMKV_COPY_THREADS="3")
    assert (found["kernel"], found["kernel_why"], found["nt_threshold_bytes"]) == ("c", "SHMKV_KERNEL=c", 12345)
    assert found["copy_threads"] == 3


def test_every_other_setting_comes_from_the_environment(cli: Any) -> None:
    names = ("copy", "recycle_bytes", "max_leases", "async_threads", "allow_ptrace")
    found = facts(cli)
    assert [found[name] for name in names] == ["memory", 1 << 30, 192, 4, False]
    environment = {"SHMKV_COPY": "pread", "SHMKV_RECYCLE_BYTES": "0", "SHMKV_MAX_LEASES": "7", "SHMKV_ASYNC_THREADS": "9",
                   "SHMKV_ALLOW_PTRACE": "1"}
    found = facts(cli, **environment)
    assert [found[name] for name in names] == ["pread", 0, 7, 9, True]
    said = " ".join(cli("info", env=environment).stdout.split())
    for wanted in ("copies by pread", "freed segments 0 B", "leases 7 on a link", "asyncio 9 threads",
                   "traceable by every process"):
        assert wanted in said


@pytest.mark.parametrize(("variable", "value"), [
    ("SHMKV_KERNEL", "z80"), ("SHMKV_KERNEL", "AVX2"), ("SHMKV_KERNEL", ""),
    ("SHMKV_COPY_THREADS", "0"), ("SHMKV_COPY", "mmap"), ("SHMKV_MAX_LEASES", "193"),
])
def test_variable_that_cannot_be_used_is_one_red_line(cli: Any, variable: str, value: str) -> None:
    done = cli("info", env={variable: value})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert re.findall(r"SHMKV_\w+", done.stderr) == [variable], "the one, and no other"
    if variable == "SHMKV_KERNEL":
        assert f"must be one of {', '.join(['auto', *_copy.supported_kernels()])}, got '{value}'" in done.stderr


def test_facts_for_people(cli: Any) -> None:
    done = cli("info")
    assert done.returncode == 0
    for wanted in (__version__, "copy kernel", "copy threads", "/dev/shm", "vm.max_map_count", "huge pages", "peer memory"):
        assert wanted in done.stdout


MOUNT = "tmpfs /dev/shm tmpfs rw,nosuid,nodev"


@pytest.mark.parametrize(("mounts", "huge"), [
    ("", None), ("proc /proc proc rw 0 0\n", None), (f"{MOUNT},size=65536k 0 0\n", "never"),
    (f"{MOUNT},huge=advise,inode64 0 0\n", "advise"), (f"{MOUNT},huge=within_size 0 0\n", "within_size"),
    ("tmpfs /dev/shm/below tmpfs rw,huge=always 0 0\n", None), (f"tmpfs /run tmpfs rw,huge=always 0 0\n{MOUNT} 0 0\n", "never"),
    (f"{MOUNT} 0 0\n{MOUNT},huge=always 0 0\n", "always"), (f"{MOUNT},huge=always 0 0\noverlay /dev/shm overlay rw 0 0\n", None),
    ("\nodd\n", None),
])
def test_option_of_the_mount_at_dev_shm(mounts: str, huge: str | None) -> None:
    assert info.mount_huge(mounts) == huge


def test_huge_pages_of_the_mount_that_is_there(cli: Any) -> None:
    """As the kernel's other table of mounts has it."""
    lines = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    kind, _, options = ["", "", "", *(field for fields in lines if fields[4] == "/dev/shm" for field in fields[-3:])][-3:]
    found = re.search(r"\bhuge=(\w+)", options)
    huge = (found[1] if found else "never") if kind == "tmpfs" else None
    assert facts(cli)["shm_mount_huge"] == huge
    said = " ".join(cli("info").stdout.split())
    assert (f"/dev/shm is mounted with huge={huge}; shmem_enabled is" if huge else "/dev/shm is not a tmpfs;") in said


def test_layout_shows_every_field_and_table(cli: Any) -> None:
    done = cli("info", "--layout")
    assert done.returncode == 0
    for struct, field, _, _ in _layout.fields():
        assert struct in done.stdout
        assert field in done.stdout
    for record, _, _, offset in _layout.tables():
        assert record in done.stdout
        assert str(offset) in done.stdout


def test_layout_as_json_is_the_compiled_one(cli: Any) -> None:
    found = json.loads(cli("info", "--layout", "--json").stdout)
    assert [tuple(each.values()) for each in found["fields"]] == list(_layout.fields())
    assert [tuple(each.values()) for each in found["tables"]] == list(_layout.tables())


def test_version_option(cli: Any) -> None:
    assert cli("--version").stdout == f"shmkv {__version__}\n"


def test_importing_the_library_brings_no_command_line_with_it() -> None:
    code = "import sys, shmkv, shmkv.cli; print({'typer', 'rich', 'click'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")
