"""Objects with DLPack and nothing else, for tests of what imports memory: capsules made by hand, and a count of deleters."""
from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

FLAG_READ_ONLY, FLAG_COPIED, FLAG_PADDED = 1, 2, 4


class DlTensor(ctypes.Structure):
    """DLPack's C structure, as its specification lays it out."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64)]


class DlManaged(ctypes.Structure):
    _fields_ = [("tensor", DlTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class DlVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", DlTensor)]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi))


class Foreign:
    """A tensor of another library over the memory of `array`, one for each test: ``deleted`` counts calls of the deleter.

    `tensor` sets fields of DLPack's structure; `keywords` are those that its ``__dlpack__`` knows; `device` is what
    ``__dlpack_device__`` answers, or raises.
    """

    def __init__(self, array: np.ndarray[Any, Any], *, code: int = 2, version: tuple[int, int] | None = (1, 0), flags: int = 0,
                 device: Any = (1, 0), keywords: tuple[str, ...] = ("max_version", "copy"), no_strides: bool = False,
                 **tensor: Any) -> None:
        self.array, self.device_of, self.keywords = array, device, keywords
        self.deleted = 0
        self.asked: dict[str, Any] = {}
        self._shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._strides = (ctypes.c_int64 * array.ndim)(*(stride // array.itemsize for stride in array.strides))
        self._deleter = DELETER(self._delete)
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p).value
        described = DlTensor(array.ctypes.data, 1, 0, array.ndim, code, 8 * array.itemsize, 1, self._shape,
                             None if no_strides else self._strides, 0)
        for name, value in tensor.items():
            setattr(described, name, value)
        self._managed: Any = (DlManaged(described, None, deleter) if version is None else
                              DlVersioned(*version, None, deleter, flags, described))
        self._name = b"dltensor" if version is None else b"dltensor_versioned"

    def _delete(self, _: int) -> None:
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        if isinstance(self.device_of, Exception):
            raise self.device_of
        return self.device_of  # type: ignore[no-any-return]

    def __dlpack__(self, **asked: Any) -> Any:
        if not set(asked) <= set(self.keywords):
            raise TypeError(f"unexpected keywords: {sorted(asked)}")
        self.asked = asked
        return new_capsule(ctypes.addressof(self._managed), self._name, None)
