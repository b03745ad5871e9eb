"""A stand-in for what programs of an Ascend host call besides llm_datadist: `torch.npu.set_device` and its like, `Tensor.npu()`,
and `torchair.llm_datadist.create_npu_tensors`. There is no device: tensors are on the CPU.

torch is never imported here: whoever has a tensor, or an element type of one, has imported it. All else that `torch_npu` and
`torchair` have is not here and says so.
"""
from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shmkv._view import TensorView
from shmkv.checks import check_int_between, check_sequence, shown, wrong_type
from shmkv.cluster import Cluster
from shmkv.datadist import LLMDataDist
from shmkv.errors import LLMException, LLMParamError
from shmkv.kv_cache import view_of
from shmkv.types import DataType

MOST_DEVICES = 2**31 - 1
_device = 0


# -- torch.npu ---------------------------------------------------------------------------------------------------------

def set_device(device: object) -> None:
    """Remember the number of a device: an int, "npu:1", or a torch.device. It has no effect."""
    global _device
    if isinstance(device, int):
        _device = check_int_between("device", device, 0, MOST_DEVICES)
        return
    index = getattr(device, "index", None)
    text = device if isinstance(device, str) else f"npu:{index or 0}" if hasattr(device, "type") else None
    if text is None:
        raise wrong_type("device", device, int, str)
    found = re.fullmatch(r"npu(?::([0-9]{1,9}))?", text)
    if found is None:
        raise LLMParamError(f'argument \'device\' must be "npu" or "npu:<number>", got {shown(device)}')
    _device = int(found[1] or 0)


def current_device() -> int:
    """The number that `set_device` was given last; 0 before."""
    return _device


def synchronize(device: object = None) -> None:
    """Nothing runs that could be waited for."""


def _npu(tensor: Any, *_: object, **__: object) -> Any:
    """`Tensor.npu()`: a copy, as it would be on a device."""
    return tensor.clone()


# -- torchair.llm_datadist ---------------------------------------------------------------------------------------------

def create_npu_tensors(shape: Sequence[int], dtype: Any, addresses: Sequence[int]) -> list[Any]:
    """A torch tensor on each of the addresses, all of one shape and element type: zero-copy, on the shared memory itself.

    Every address, with all bytes of the tensor, has to lie within a tensor of a living cache that this process allocated, and to be
    a multiple of the element's bytes. The memory is kept, and not used again, as long as a tensor on it lives.

    Raises:
        TypeError: an argument.
        LLMParamError: an address that leads nowhere or beyond the end of a tensor.
        LLMException: LLM_FAILED without an initialised LLMDataDist.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(dtype, torch.dtype):
        raise wrong_type("dtype", dtype, _TorchDtype)
    dims = [check_int_between("shape", dim, 1, MOST_DEVICES) for dim in check_sequence("shape", shape, int)]
    check_sequence("addresses", addresses, int)
    itemsize = torch.empty((), dtype=dtype).element_size()
    instance = LLMDataDist.llm_engine_instance
    if instance is None:
        raise LLMException("create_npu_tensors finds memory by its address: there is none before LLMDataDist.init")
    cluster, _ = instance._joined()
    views = [_bytes_at(cluster, address, math.prod(dims) * itemsize, itemsize) for address in addresses]
    return [torch.from_dlpack(view).view(dtype).reshape(dims) for view in views]


class _TorchDtype:
    """Named in messages."""


_TorchDtype.__name__ = "torch.dtype"


def _bytes_at(cluster: Cluster, address: int, nbytes: int, itemsize: int) -> TensorView:
    """The bytes at an address, which must lie within one tensor of one cache."""
    if address % itemsize:
        raise LLMParamError(f"address {shown(address)} is not a multiple of the {itemsize} bytes of an element")
    with cluster.lock:          # so that the memory is not recycled between the look and the view
        for own in cluster.caches:
            offset = address - own.local.memory.base
            for place, start in enumerate(own.offsets if own.id_alive else ()):
                if start <= offset and offset + nbytes <= start + own.desc.tensor_size(place):
                    return view_of(own.segment.region, offset, (nbytes,), DataType.DT_UINT8)
    raise LLMParamError(f"{nbytes} bytes at address {shown(address)} do not lie within a tensor of a living cache that this "
                        "process allocated")


# -- modules -----------------------------------------------------------------------------------------------------------

_NPU = {"current_device": current_device, "set_device": set_device, "synchronize": synchronize}

# `_autoload` is what torch calls of a torch_npu that is installed, when it is imported.
MODULES: dict[str, Mapping[str, object]] = {
    "torch_npu": {"_autoload": lambda: None},
    "torch_npu.npu": _NPU,
    "torchair": {},
    "torchair.llm_datadist": {"create_npu_tensors": create_npu_tensors},
}


def install() -> None:
    """Give torch its `npu`: now if it is imported, else when it is."""
    torch = sys.modules.get("torch")
    if torch is not None:
        _attach(torch)
    elif not any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchFinder())


def _attach(torch: Any) -> None:
    torch.npu = importlib.import_module("torch_npu.npu")
    torch.Tensor.npu = _npu


class _TorchFinder(MetaPathFinder):
    """Finds torch as the others would, and gives it its `npu` once it is imported."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The others' answer."""
        if fullname != "torch" or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            # On the loader itself, which stays what others expect it to be; it is this one import's own.
            vars(spec.loader)["exec_module"] = _then_attach(spec.loader.exec_module)
        return spec


def _then_attach(exec_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    def exec_and_attach(module: ModuleType) -> None:
        exec_module(module)
        _attach(module)

    return exec_and_attach
