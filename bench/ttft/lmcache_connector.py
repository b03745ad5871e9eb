"""LMCache's connector for vLLM, in a module by which an engine on a CPU starts.

LMCache imports numba and with it llvmlite, which has an object that makes up every attribute that it is asked for, `__dict__`
included. When vLLM starts on a CPU it reads the `__dict__` of every object of every module, and ends there ("'_lib_fn_wrapper'
object has no attribute 'get'"). So that object learns to say that it has none. Nothing of LMCache is changed.
"""
from __future__ import annotations

import importlib
from typing import Any

LMCacheMPConnector: Any = importlib.import_module("lmcache.integration.vllm.lmcache_mp_connector").LMCacheMPConnector

library_class: Any = type(importlib.import_module("llvmlite.binding.ffi").lib)
made_up = library_class.__getattr__


def attribute(library: Any, name: str) -> Any:
    if name == "__dict__":
        raise AttributeError(name)
    return made_up(library, name)


library_class.__getattr__ = attribute
