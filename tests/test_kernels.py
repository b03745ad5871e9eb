"""The copy kernels of _kernels.h, compiled into a C program of their own: the header needs no Python."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

import shmkv

HEADER_DIR = Path(shmkv.__file__).resolve().parent
PROGRAM = Path(__file__).resolve().parent / "c" / "kernels_test.c"
COMPILER = shutil.which(os.environ.get("CC", "cc"))
WARNINGS = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
FORMS = {"ordinary", "streaming"}
SANITIZED = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
DEADLINE_S = 100

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@dataclass(frozen=True)
class Report:
    """What the C program printed: which kernels the processor has, and which (kernel, form) were run."""

    best: str
    supported: set[str]
    unsupported: set[str]
    tested: dict[tuple[str, str], int]
    last_line: str


def run_compiled(directory: Path, *flags: str) -> Report:
    binary = directory / "kernels_test"
    command = [str(COMPILER), *WARNINGS, *flags, f"-I{HEADER_DIR}", str(PROGRAM), "-o", str(binary)]
    compiled = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert compiled.returncode == 0, compiled.stderr
    ran = subprocess.run([str(binary)], capture_output=True, text=True, timeout=DEADLINE_S)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return parse(ran.stdout)


def parse(output: str) -> Report:
    lines = [line.split() for line in output.splitlines()]
    return Report(
        best=next(line[1] for line in lines if line[0] == "best"),
        supported={line[1] for line in lines if line[0] == "supported"},
        unsupported={line[1] for line in lines if line[0] == "unsupported"},
        tested={(line[1], line[2]): int(line[3]) for line in lines if line[0] == "tested"},
        last_line=output.splitlines()[-1],
    )


def assert_every_supported_kernel_ran(report: Report) -> None:
    assert report.last_line == "all kernels agree"
    assert {"c", "memcpy"} <= report.supported
    assert set(report.tested) == {(name, form) for name in report.supported for form in FORMS}
    assert min(report.tested.values()) > 2 * 64 * 64 * 320
    assert report.best in report.supported
    assert not report.supported & report.unsupported


def processor_flags() -> set[str]:
    text = Path("/proc/cpuinfo").read_text()
    return {word for line in text.splitlines() if line.startswith("flags") for word in line.split()}


@pytest.mark.parametrize("flags", [["-O3"], ["-O0"], SANITIZED], ids=["O3", "O0", "sanitized"])
def test_every_supported_kernel_copies_exactly_its_range(tmp_path: Path, flags: list[str]) -> None:
    report = run_compiled(tmp_path, *flags)
    print("not supported by this processor:", ", ".join(sorted(report.unsupported)) or "none")
    assert_every_supported_kernel_ran(report)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86-64 has kernels of its own")
def test_kernels_are_offered_exactly_where_the_processor_has_the_instructions(tmp_path: Path) -> None:
    flags = processor_flags()
    report = run_compiled(tmp_path, "-O2")
    assert ("avx2" in report.supported) == ("avx2" in flags)
    assert ("avx512" in report.supported) == ("avx512f" in flags)
    assert report.best == ("avx2" if "avx2" in flags else "avx512" if "avx512f" in flags else "c")


def test_processor_without_instructions_of_its_own_has_the_kernels_of_any(tmp_path: Path) -> None:
    report = run_compiled(tmp_path, "-O2", "-D__builtin_cpu_supports(name)=0")
    assert_every_supported_kernel_ran(report)
    assert (report.supported, report.best) == ({"c", "memcpy"}, "c")


def test_portable_build_has_only_the_kernels_of_any_processor(tmp_path: Path) -> None:
    report = run_compiled(tmp_path, "-O2", "-DSHMKV_PORTABLE_ONLY")
    assert_every_supported_kernel_ran(report)
    assert report.supported == {"c", "memcpy"}
    assert report.unsupported == set()
    assert report.best == "c"


def test_portable_loop_is_not_compiled_into_a_call_of_memcpy(tmp_path: Path) -> None:
    source = tmp_path / "loop.c"
    source.write_text(
        '#include "_kernels.h"\n'
        "void loop(void *d, const void *s, size_t n);\n"
        "void loop(void *d, const void *s, size_t n) { shmkv_copy_c(d, s, n); }\n"
    )
    command = [str(COMPILER), *WARNINGS, "-O3", f"-I{HEADER_DIR}", "-S", "-o", "-", str(source)]
    assembly = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "loop:" in assembly
    assert "memcpy" not in assembly
    assert "memmove" not in assembly
