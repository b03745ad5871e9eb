"""Imported by each Python that `shmkv run` starts, and by those that such a program starts (multiprocessing, subprocess).

Light, since many of them never import llm_datadist: only the first import of one of its names imports shmkv. Then this folder goes
from sys.path, which is as it would be without, and the sitecustomize that would have been imported instead is.
"""
from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

STUB_NPU = os.environ.get("SHMKV_STUB_NPU") == "1"
NAMES = {"llm_datadist", "llm_datadist_v1", *(("torch", "torch_npu", "torchair") if STUB_NPU else ())}


class OnDemand(MetaPathFinder):
    """Gives way to the library's own finder when the first of the names is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the library's finder says, or None for names that are none of its."""
        if fullname.partition(".")[0] not in NAMES:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        from shmkv.llm_datadist import install

        install(stub_npu=STUB_NPU)
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def leave_the_place() -> None:
    """As if this file had not been there."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    spec = PathFinder.find_spec(__name__)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules[__name__] = module
        spec.loader.exec_module(module)


sys.meta_path.insert(0, OnDemand())
leave_the_place()
