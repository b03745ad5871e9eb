"""`shmkv run`: a program as plain `python SCRIPT` runs it, but with llm_datadist resolving to shmkv.

This process becomes that Python (exec), so that arguments, `__main__`, tracebacks, signals and the exit status are its own. What
differs is one folder on PYTHONPATH, whose sitecustomize answers for the names. Being part of the environment it also reaches
whatever the program starts: processes of multiprocessing by spawn or forkserver, and other Pythons.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shmkv.errors import LLMException

STARTUP = Path(__file__).with_name("startup")


def become(script: str, arguments: Sequence[str], *, module: bool, stub_npu: bool) -> NoReturn:
    """Go on as `python SCRIPT ARGUMENTS`, or with `module` as `python -m SCRIPT ARGUMENTS`.

    Raises:
        LLMException: this Python ignores PYTHONPATH or sitecustomize.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise LLMException("shmkv run works by PYTHONPATH and sitecustomize, which -E, -I and -S turn off: leave them out")
    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{STARTUP}{os.pathsep}{path}" if path else str(STARTUP)}
    environment.pop("SHMKV_STUB_NPU", None)
    if stub_npu:
        environment["SHMKV_STUB_NPU"] = "1"
    how = ["-m"] if module else []
    os.execve(sys.executable, [sys.executable, *_interpreter_options(), *how, script, *arguments], environment)


def _interpreter_options() -> list[str]:
    """What stood between `python` and the program: -u, -X dev, -W error and the like."""
    options = sys.orig_argv[1:len(sys.orig_argv) - len(sys.argv)]
    if options and sys.argv[0].endswith("__main__.py") and options[-1].startswith("-"):
        last = options.pop().removesuffix("m")          # -m, or -um, was followed by shmkv
        options += [last] if last != "-" else []
    return options
