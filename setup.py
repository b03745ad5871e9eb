"""The extensions of shmkv and four switches of their build; all else stands in pyproject.toml.

SHMKV_DEBUG=1         no optimisation, full debug information, the macro SHMKV_DEBUG
SHMKV_SANITIZE=LIST   the value goes to -fsanitize= (address,undefined or thread)
SHMKV_COVERAGE=1      no optimisation, counts of lines and branches for gcov
SHMKV_CRASH_POINTS=1  a test build: named points at which a process stops or dies when told so, sparse segments (see _crash.pxd)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

if not sys.platform.startswith("linux"):
    raise SystemExit("shmkv needs Linux: it is built on POSIX shared memory, futexes and /proc.")

from Cython.Build import cythonize  # after the check, whose sentence needs no Cython

SOURCES = sorted(Path("shmkv").glob("*.pyx"))

DEBUG = os.environ.get("SHMKV_DEBUG", "") not in ("", "0")
SANITIZE = os.environ.get("SHMKV_SANITIZE", "")
COVERAGE = os.environ.get("SHMKV_COVERAGE", "") not in ("", "0")
CRASH_POINTS = os.environ.get("SHMKV_CRASH_POINTS", "") not in ("", "0")

# Left out of -Wextra: what generated code does by nature (unused parameters of method tables and the like).
COMPILE = [
    "-std=c11",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-Wno-unused-function",
    "-Wno-missing-field-initializers",
    "-Wno-cast-function-type",
    "-Wno-sign-compare",
]
COMPILE += ["-O0", "-g"] if DEBUG or COVERAGE else ["-O3", "-g1"]
LINK: list[str] = []
MACROS: list[tuple[str, str | None]] = []

if DEBUG:
    MACROS.append(("SHMKV_DEBUG", "1"))
if CRASH_POINTS:
    MACROS.append(("SHMKV_CRASH_POINTS", "1"))
if SANITIZE:
    COMPILE += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
    LINK.append(f"-fsanitize={SANITIZE}")
if COVERAGE:
    COMPILE += ["--coverage", "-fprofile-update=atomic"]  # threads without the GIL count, too
    LINK.append("--coverage")

EXTENSIONS = [
    Extension(
        f"shmkv.{source.stem}",
        [str(source)],
        depends=["shmkv/_kernels.h"],
        define_macros=MACROS,
        extra_compile_args=COMPILE,
        extra_link_args=LINK,
    )
    for source in SOURCES
]

setup(
    ext_modules=cythonize(EXTENSIONS),
    options={"build_ext": {"parallel": True}},  # as many compilers as there are processors
)
