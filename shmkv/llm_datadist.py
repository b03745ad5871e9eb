"""The name shim: `llm_datadist` and `llm_datadist_v1`, with the submodules that programs import, resolve to this library.

Only in a process that asked for it, by `shmkv.install_as_llm_datadist()` or by being started through `shmkv run`. It is one entry
of `sys.meta_path`, before all others: an llm_datadist that is installed beside it is neither imported nor changed.
"""
from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any, NoReturn

from shmkv import checks, data_type, npu_stand_in
from shmkv.cache import Cache
from shmkv.cache_manager import CacheManager
from shmkv.cache_task import CacheTask
from shmkv.checks import ApiObject, not_offered
from shmkv.cluster_info import LLMClusterInfo, parse_ip_port
from shmkv.datadist import LLMDataDist, _finalize_at_exit
from shmkv.errors import LLMException, LLMParamError, LLMStatusCode, Status
from shmkv.keys import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from shmkv.kv_cache import KvCache
from shmkv.kv_cache_manager import KvCacheManager
from shmkv.options import LLMConfig, LlmConfig
from shmkv.tensor import Tensor, TensorDesc
from shmkv.transfer_config import LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from shmkv.types import CacheDesc, DataType, LLMRole, MemInfo, Memtype, Placement, RegisterMemStatus

Names = Mapping[str, object]
PACKAGES = ("llm_datadist", "llm_datadist_v1")

_STATUS: Names = {"LLMException": LLMException, "LLMParamError": LLMParamError, "LLMStatusCode": LLMStatusCode, "Status": Status}
_CONFIGS: Names = {"LLMClusterInfo": LLMClusterInfo, "LLMConfig": LLMConfig, "LLMRole": LLMRole, "LlmConfig": LlmConfig}
_TYPES: Names = {
    "BlocksCacheKey": BlocksCacheKey, "Cache": Cache, "CacheDesc": CacheDesc, "CacheKey": CacheKey,
    "CacheKeyByIdAndIndex": CacheKeyByIdAndIndex, "CacheTask": CacheTask, "DataType": DataType, "KvCache": KvCache,
    "LayerSynchronizer": LayerSynchronizer, "MemInfo": MemInfo, "Memtype": Memtype, "Placement": Placement,
    "RegisterMemStatus": RegisterMemStatus, "TransferConfig": TransferConfig,
    "TransferWithCacheKeyConfig": TransferWithCacheKeyConfig,
}
_TENSOR: Names = {"Tensor": Tensor, "TensorDesc": TensorDesc}
_MANAGERS: Names = {"CacheManager": CacheManager, "KvCacheManager": KvCacheManager}
_DATADIST: Names = {"LLMDataDist": LLMDataDist, "_shutdown_handler": _finalize_at_exit}
_LLM_UTILS: Names = {"layer_range_to_tensor_indices": checks.layer_range_to_tensor_indices, "parse_listen_ip_info": parse_ip_port}
_CHECKS: Names = {name: getattr(checks, name) for name in (
    "check_int32", "check_int64", "check_list_int32", "check_uint16", "check_uint32", "check_uint64", "check_uint8")}
_DTYPES: Names = {
    "DataType": DataType, "dtype_to_np_dtype": data_type.data_type_to_np, "np_dtype_to_dtype": data_type.np_to_data_type,
    "valid_np_dtypes": data_type.valid_np_dtypes,
}

# What each module has, under the names that the two packages, and earlier versions of them, have it under.
SUBMODULES: dict[str, Names] = {
    "configs": _CONFIGS,
    "data_type": _DTYPES,
    "kv_cache_manager": {"KvCacheManager": KvCacheManager},
    "llm_datadist": _DATADIST,
    "llm_types": _TYPES,
    "llm_utils": _LLM_UTILS,
    "status": _STATUS,
    "tensor": _TENSOR,
    "utils": {},
    "utils.utils": _CHECKS,
    "v2": {},
    "v2.cache_manager": {"CacheManager": CacheManager},
    "v2.llm_datadist": _DATADIST,
    "v2.llm_types": _TYPES,
    "v2.llm_utils": _LLM_UTILS,
}
# v2_list: what only the second generation has.
PACKAGE: Names = {**_CONFIGS, **_MANAGERS, **_STATUS, **_TENSOR, **_TYPES, "LLMDataDist": LLMDataDist,
                  "v2_list": ["Cache", "CacheManager"]}
MODULES: dict[str, Names] = {
    name: names for package in PACKAGES
    for name, names in ((package, PACKAGE), *((f"{package}.{inner}", names) for inner, names in SUBMODULES.items()))
}


class ShimFinder(MetaPathFinder, Loader):
    """Finds the modules of `modules` and makes them out of their names; a package's submodules come with it."""

    def __init__(self, modules: Mapping[str, Names]) -> None:
        self.modules = modules

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where to get a module from: from here, or None."""
        if fullname not in self.modules:
            return None
        return spec_from_loader(fullname, self, origin=__file__, is_package=bool(self._inner(fullname)))

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module that was just made."""
        name = module.__name__
        names = self.modules[name]
        vars(module).update(names, __all__=sorted(word for word in names if not word.startswith("_")), __file__=__file__,
                            __doc__=f"`{name}` as shmkv offers it: docs/llm_datadist.md.", __getattr__=_refuser(name))
        for inner in self._inner(name):
            import_module(inner)

    def _inner(self, package: str) -> list[str]:
        return [name for name in self.modules if name.rpartition(".")[0] == package]


def _refuser(module: str) -> Callable[[str], NoReturn]:
    """The `__getattr__` of a module."""

    def refuse(name: str) -> NoReturn:
        raise AttributeError(not_offered(f"module '{module}'", name), name=name, obj=sys.modules.get(module))

    return refuse


def _refuse(self: ApiObject, name: str) -> NoReturn:
    """The `__getattr__` of resources. Given to them here and not in their class, because a class that has one makes each look at an
    attribute slower: a plain pull of 4 KiB took 893 ns instead of 774 in `make bench`."""
    raise AttributeError(not_offered(f"'{type(self).__name__}' object", name), name=name, obj=self)


def install(*, stub_npu: bool = False) -> ShimFinder:
    """From now on `import llm_datadist` and `import llm_datadist_v1` give this library, in this process alone. Twice is no error.

    With `stub_npu`, `torch_npu`, `torchair` and `torch.npu` are a small stand-in (`npu_stand_in`) as well.

    Raises:
        LLMException: another module of one of these names was imported before, whose objects would not be those of this library.
    """
    modules = {**MODULES, **(npu_stand_in.MODULES if stub_npu else {})}
    for name in modules:
        _check_not_imported(name)
    finder = _installed()
    if finder is None:
        finder = ShimFinder(modules)
        sys.meta_path.insert(0, finder)
    finder.modules = {**finder.modules, **modules}
    ApiObject.__getattr__ = _refuse         # type: ignore[attr-defined]
    if stub_npu:
        npu_stand_in.install()
    return finder


def _installed() -> ShimFinder | None:
    return next((finder for finder in sys.meta_path if isinstance(finder, ShimFinder)), None)


def _check_not_imported(name: str) -> None:
    module: Any = sys.modules.get(name)
    if module is not None and not isinstance(getattr(module, "__loader__", None), ShimFinder):
        raise LLMException(f"{name} was imported before, from {getattr(module, '__file__', None) or 'an unknown place'}: call "
                           "install_as_llm_datadist before the first import of it")
