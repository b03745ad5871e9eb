# cython: language_level=3, freethreading_compatible=True
"""Memory of an object of the caller: where it is, how it is laid out, and what keeps it there. No byte is read, written or copied.

Three protocols are asked in this order: the buffer protocol, numpy's array interface (for element types that the buffer protocol
has no letter for), DLPack. Knows nothing of caches: what shape and strides have to be is for others to say.
"""
import re
import sys

import numpy as np

cimport cython
from cpython.buffer cimport PyBUF_FULL_RO, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_SetName

from shmkv._dlpack cimport (
    DL_CPU,
    DL_CUDA_HOST,
    DL_FLAG_COPIED,
    DL_FLAG_PADDED,
    DL_FLAG_READ_ONLY,
    DL_INT,
    DL_ROCM_HOST,
    DL_UINT,
    dl_managed,
    dl_tensor,
    dl_versioned,
)

_DLPACK_VERSION = (1, 1)             # the newest one that is known here; 1.1 brought float8
# DLPack's device types that people meet; others are shown by number.
_DEVICES = {2: "cuda", 4: "opencl", 7: "vulkan", 8: "mps", 10: "rocm", 12: "extension", 13: "cuda-managed", 14: "oneapi",
            16: "hexagon", 17: "maia"}
_FOREIGN_ORDER = ">" if sys.byteorder == "little" else "<"


@cython.no_gc_clear                # an export is given back by __dealloc__, in a cycle too
cdef class Imported:
    """The memory of `source`: `address`, `shape`, `strides` in bytes, `itemsize`, `readonly`.

    `format` is the element type in the words of the protocol that answered, for messages; `is_bytes` says that elements are plain
    bytes. The memory is held, that is exported, until `release` or the end of this object; the numbers stay.

    Raises TypeError for an object with none of the protocols, BufferError for one whose memory cannot be had or used: on another
    device, elements that are Python objects or in foreign byte order, something else than strided memory.
    """

    def __cinit__(self, object source):
        cdef object refusal = None
        if isinstance(source, type):
            raise TypeError("a class has no memory")
        if PyObject_CheckBuffer(source):
            try:
                PyObject_GetBuffer(source, &self.buffer, PyBUF_FULL_RO)
                self.is_exported = True
            except (BufferError, ValueError) as error:
                refusal = error
        if self.is_exported:
            self.take_buffer()
            return
        interface = getattr(source, "__array_interface__", None)
        if isinstance(interface, dict):
            self.take_interface(source, interface)
        elif hasattr(source, "__dlpack__"):
            self.take_dlpack(source)
        elif refusal is not None:
            raise BufferError(str(refusal)) from refusal
        else:
            raise TypeError("neither the buffer protocol nor __array_interface__ nor DLPack")

    def __dealloc__(self):
        self.release()

    def release(self):
        """Let go of the memory; idempotent."""
        cdef dl_managed* managed
        cdef dl_versioned* versioned
        cdef bint is_exported
        with cython.critical_section(self):
            managed, versioned, is_exported = self.managed, self.versioned, self.is_exported
            self.managed, self.versioned, self.is_exported = NULL, NULL, False
            self.owner = None
        if is_exported:
            PyBuffer_Release(&self.buffer)
        if managed != NULL and managed.deleter != NULL:
            managed.deleter(managed)
        if versioned != NULL and versioned.deleter != NULL:
            versioned.deleter(versioned)

    def __repr__(self):
        return f"Imported({self.address:#x}, shape={list(self.shape)}, strides={list(self.strides)}, format={self.format!r})"

    cdef int take_buffer(self) except -1:
        cdef Py_buffer* buffer = &self.buffer
        cdef int i
        if buffer.suboffsets != NULL and any([buffer.suboffsets[i] >= 0 for i in range(buffer.ndim)]):
            raise BufferError("its memory is not strided: it has suboffsets")
        self.address = <size_t>buffer.buf
        self.itemsize = buffer.itemsize
        if buffer.shape == NULL and buffer.ndim:
            raise BufferError("its exporter does not tell its shape")
        self.shape = tuple([buffer.shape[i] for i in range(buffer.ndim)])
        # They were asked for, and are left out by ctypes all the same.
        if buffer.strides == NULL:
            self.strides = dense_strides(self.shape, self.itemsize)
        else:
            self.strides = tuple([buffer.strides[i] for i in range(buffer.ndim)])
        self.readonly = buffer.readonly
        self.format = "B" if buffer.format == NULL else buffer.format.decode("utf-8", "replace")
        self.is_bytes = self.itemsize == 1 and self.format.lstrip("@=<>!") in ("B", "b", "c")
        check_format(self.format, self.itemsize)
        return 0

    cdef int take_interface(self, object source, dict interface) except -1:
        """The array interface of numpy: a dict that says where the memory is, without an export."""
        data = interface.get("data")
        if not isinstance(data, tuple):
            raise BufferError("its __array_interface__ has no address")
        self.owner = (source, interface)
        self.address, self.readonly = data
        self.shape = tuple(interface["shape"])
        self.format = interface["typestr"]
        self.itemsize = typestr_itemsize(self.format)
        strides = interface.get("strides")
        self.strides = dense_strides(self.shape, self.itemsize) if strides is None else tuple(strides)
        self.is_bytes = self.format[1:] in ("u1", "i1")
        if isinstance(source, np.ndarray) and source.dtype.hasobject or "|O" in str(interface.get("descr")):
            raise BufferError("its elements are Python objects")
        check_format(self.format, self.itemsize)
        return 0

    cdef int take_dlpack(self, object source) except -1:
        check_device(source)
        capsule = capsule_of(source)
        # The new name says that the tensor is ours, and ours to delete.
        if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
            self.versioned = <dl_versioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned")
            PyCapsule_SetName(capsule, b"used_dltensor_versioned")
        elif PyCapsule_IsValid(capsule, b"dltensor"):
            self.managed = <dl_managed*>PyCapsule_GetPointer(capsule, b"dltensor")
            PyCapsule_SetName(capsule, b"used_dltensor")
        else:
            raise BufferError(f"its __dlpack__ answered {type(capsule).__name__}, not a capsule of DLPack")
        return self.take_tensor()

    cdef int take_tensor(self) except -1:
        cdef dl_tensor* tensor
        cdef bint is_padded = False
        cdef int bits, i
        if self.versioned != NULL:
            if self.versioned.version.major != 1:
                raise BufferError(f"its capsule is of DLPack {self.versioned.version.major}, not 1")
            if self.versioned.flags & DL_FLAG_COPIED:
                raise BufferError("its __dlpack__ answered a copy of the memory")
            self.readonly = self.versioned.flags & DL_FLAG_READ_ONLY != 0
            is_padded = self.versioned.flags & DL_FLAG_PADDED != 0
            tensor = &self.versioned.tensor
        else:
            tensor = &self.managed.tensor
        if tensor.device.device_type not in (DL_CPU, DL_CUDA_HOST, DL_ROCM_HOST):
            raise BufferError(on_device(tensor.device.device_type, tensor.device.device_id))
        bits = tensor.dtype.bits * tensor.dtype.lanes
        if bits % 8 and not is_padded:
            raise BufferError(f"its elements of {bits} bits are no whole bytes")
        self.itemsize = (bits + 7) // 8
        self.format = f"DLPack code {tensor.dtype.code}, {tensor.dtype.bits} bits, {tensor.dtype.lanes} lanes"
        self.is_bytes = bits == 8 and tensor.dtype.lanes == 1 and tensor.dtype.code in (DL_INT, DL_UINT)
        self.shape = tuple([tensor.shape[i] for i in range(tensor.ndim)])
        if tensor.strides == NULL:
            self.strides = dense_strides(self.shape, self.itemsize)
        else:
            self.strides = tuple([tensor.strides[i] * self.itemsize for i in range(tensor.ndim)])
        if tensor.data == NULL and 0 not in self.shape:
            raise BufferError("this tensor has no memory")
        self.address = <size_t>tensor.data + tensor.byte_offset
        return 0


cdef tuple dense_strides(tuple shape, Py_ssize_t itemsize):
    strides = []
    stride = itemsize
    for dim in reversed(shape):
        strides.append(stride)
        stride *= dim
    return tuple(reversed(strides))


cdef Py_ssize_t typestr_itemsize(str typestr) except -1:
    """Bytes of an element. Read from the text: numpy does not know all that its extension types say here (float8: "<f1")."""
    found = re.fullmatch(r"[<>|=](?P<kind>[a-zA-Z])(?P<size>\d+)(?:\[.*\])?", typestr)
    if found is None or found["kind"] == "t" or int(found["size"]) == 0:
        raise BufferError(f"its __array_interface__ has elements of unknown size: {typestr!r}")
    return int(found["size"]) * (4 if found["kind"] == "U" else 1)


cdef int check_format(str format, Py_ssize_t itemsize) except -1:
    """Refuse what may not be overwritten by bytes from elsewhere, or would mean something else there."""
    letters = re.sub(r":[^:]*:", "", format)            # without the names of fields
    if "O" in letters:
        raise BufferError("its elements are Python objects")
    if itemsize > 1 and (_FOREIGN_ORDER in letters or "!" in letters):
        raise BufferError(f"its elements, format {format!r}, are not in this machine's byte order")
    return 0


cdef str on_device(object kind, object number):
    return f"this tensor is on {_DEVICES.get(int(kind), f'device type {int(kind)}')}:{int(number)}; its memory has to be the CPU's"


cdef int check_device(object source) except -1:
    """BufferError unless the memory is the CPU's. The tensor's own word for its device, where it has one, is the better name."""
    own_name = str(getattr(source, "device", ""))
    try:
        kind, number = source.__dlpack_device__()
    except Exception as error:
        if not own_name:
            raise BufferError(f"its __dlpack_device__ failed: {error}") from error
        raise BufferError(f"this tensor is on {own_name}; its memory has to be the CPU's") from error
    if int(kind) in (DL_CPU, DL_CUDA_HOST, DL_ROCM_HOST):
        return 0
    raise BufferError(f"this tensor is on {own_name}; its memory has to be the CPU's" if own_name else on_device(kind, number))


cdef object capsule_of(object source):
    """A capsule on the tensor's own memory. Exporters before DLPack 1 know no keywords."""
    is_negated = getattr(source, "is_neg", None)
    # torch exports such a view as if its bytes were its values.
    if callable(is_negated) and is_negated():
        raise BufferError("its memory holds the negatives of its values (torch's negative bit): give what it is a view of")
    try:
        for options in ({"max_version": _DLPACK_VERSION, "copy": False}, {"max_version": _DLPACK_VERSION}):
            try:
                return source.__dlpack__(**options)
            except TypeError:
                continue
        return source.__dlpack__()
    except Exception as error:
        raise BufferError(f"its __dlpack__ refused: {error}") from error
