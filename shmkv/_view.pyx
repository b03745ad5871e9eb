# cython: language_level=3, freethreading_compatible=True
"""Views of tensors in shared memory, zero-copy for whoever understands one of three protocols.

A view keeps its memory mapped for as long as it or anything made from it lives, and counts as an export meanwhile: the owner does
not give exported memory to another cache. Knows nothing of caches, keys or links.
"""
import numpy as np

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_F_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
)
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy

from shmkv._dlpack cimport DL_CPU, DL_FLAG_COPIED, DL_FLOAT8, dl_managed, dl_tensor, dl_versioned
from shmkv._futex cimport add32_seq

cdef enum:
    ALIGNMENT = 64


@cython.no_gc_clear                # its export is counted until __dealloc__, in a cycle too
cdef class TensorView:
    """One tensor of a cache, on the shared memory itself.

    `shape` is a tuple, `dtype` the DataType, `nbytes` the size in bytes, `data_ptr` the address in this process. Written
    through by the owner; `readonly` views refuse that. `pitch`: bytes from one index of the first axis to the next where there are
    gaps, 0 = none.
    """

    def __cinit__(self, Region region not None, uint64_t offset, tuple shape, dtype, storage, bytes format, tuple dlpack,
                  bint readonly=False, Py_ssize_t pitch=0):
        cdef Py_ssize_t stride
        cdef int i
        if len(shape) > 32:
            raise ValueError(f"a view has at most 32 dimensions, not {len(shape)}")
        self.itemsize = storage.itemsize
        stride = self.itemsize
        for i in reversed(range(len(shape))):
            self.buffer_shape[i] = shape[i]
            self.buffer_strides[i] = stride
            stride *= shape[i]
        self.nbytes = self.extent = stride
        if pitch and len(shape) > 1 and shape[0] > 1:
            if pitch < self.buffer_strides[0]:
                raise ValueError(f"rows of {self.buffer_strides[0]} bytes do not fit a pitch of {pitch}")
            self.extent += (shape[0] - 1) * (pitch - self.buffer_strides[0])
            self.buffer_strides[0] = pitch
        if offset > region.nbytes or self.extent > region.nbytes - offset:
            raise ValueError(f"{self.extent} bytes at {offset} do not fit {region.nbytes} bytes of memory")
        self.offset, self.shape, self.dtype, self.storage, self.format = offset, shape, dtype, storage, format
        self.dlpack_code, self.dlpack_bits = dlpack
        self.readonly = readonly or not region.writable
        self.region = region
        add32_seq(&region.export_count, 1)

    def __dealloc__(self):
        if self.region is not None:
            add32_seq(&self.region.export_count, <uint32_t>-1)

    @property
    def data_ptr(self):
        """Address of the first byte in this process."""
        return <size_t>(self.region.address + self.offset)

    @property
    def is_dense(self):
        """Does nothing lie between the elements?"""
        return self.extent == self.nbytes

    @property
    def raw(self):
        """The bytes as a memoryview of format "B", whatever the dtype. BufferError if there are gaps between them."""
        if not self.is_dense:
            raise BufferError("this view has gaps between its rows: use numpy()")
        return memoryview(self.numpy().reshape(-1).view(np.uint8))

    def numpy(self):
        """A numpy array of the same memory: shape and dtype of the tensor, bfloat16 by ml_dtypes."""
        if not self.is_dense:
            return self.numpy_with_gaps()
        array = np.frombuffer(self, dtype=self.storage).reshape(self.shape)
        if self.readonly:
            array.flags.writeable = False
        return array

    cdef object numpy_with_gaps(self):
        """Over plain bytes: numpy's as_strided does not know every element type."""
        whole = TensorView(self.region, self.offset, (self.extent,), self.dtype, np.dtype(np.uint8), b"B", (1, 8), self.readonly)
        strides = tuple(self.buffer_strides[i] for i in range(len(self.shape)))
        return np.ndarray(self.shape, self.storage, np.frombuffer(whole, np.uint8), 0, strides)

    def __array__(self, dtype=None, copy=None):
        array = self.numpy()
        if dtype is not None and np.dtype(dtype) != array.dtype:
            if copy is False:
                raise ValueError(f"a view of {array.dtype} cannot be had as {np.dtype(dtype)} without a copy")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return f"TensorView(shape={list(self.shape)}, dtype={self.dtype}, data_ptr={self.data_ptr:#x})"

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        """Bytes for whoever asks for no format; typed elements otherwise. Where the protocol has no letter for the dtype, a
        request for a format is refused rather than answered with another type: numpy then takes `__array__`."""
        if flags & PyBUF_WRITABLE and self.readonly:
            raise BufferError("this view is read-only")
        if flags & PyBUF_FORMAT and not self.format:
            raise BufferError(f"the buffer protocol has no format for {self.dtype}: use numpy(), raw or from_dlpack")
        if not self.is_dense and (flags & PyBUF_STRIDES != PyBUF_STRIDES or not flags & PyBUF_FORMAT
                                  or flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS
                                  or flags & PyBUF_C_CONTIGUOUS == PyBUF_C_CONTIGUOUS
                                  or flags & PyBUF_ANY_CONTIGUOUS == PyBUF_ANY_CONTIGUOUS):
            raise BufferError("this view has gaps between its rows: it is not contiguous")
        if flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS and len(self.shape) > 1 and flags & PyBUF_FORMAT:
            raise BufferError("this view is C-contiguous, not Fortran-contiguous")
        buffer.obj = self
        buffer.buf = self.region.address + self.offset
        buffer.len = self.nbytes
        buffer.readonly = self.readonly
        buffer.internal = NULL
        buffer.suboffsets = NULL
        buffer.shape = buffer.strides = NULL
        if flags & PyBUF_FORMAT:
            buffer.itemsize = self.itemsize
            buffer.format = self.format
            buffer.ndim = len(self.shape)
            buffer.shape = self.buffer_shape
            buffer.strides = self.buffer_strides if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
            return
        buffer.itemsize = 1
        buffer.format = NULL
        buffer.ndim = 1
        if flags & PyBUF_ND:
            buffer.shape = <Py_ssize_t*>&self.nbytes
            if flags & PyBUF_STRIDES == PyBUF_STRIDES:
                buffer.strides = &buffer.itemsize

    # -- DLPack -----------------------------------------------------------------------------------------------------

    def __dlpack_device__(self):
        """(kDLCPU, 0)."""
        return DL_CPU, 0

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        """A capsule on the same memory, or with ``copy=True`` on a private copy. BufferError for what cannot be given: another
        device, a read-only view without a copy, a dtype that DLPack does not have."""
        if dl_device is not None and tuple(dl_device) != (DL_CPU, 0):
            raise BufferError(f"the memory is on the CPU (1, 0), not on {tuple(dl_device)}")
        if stream is not None:
            raise BufferError(f"memory on the CPU has no stream, got {stream!r}")
        if self.dlpack_bits == 0:
            raise BufferError(f"DLPack has no type for {self.dtype}")
        if self.readonly and not copy:
            raise BufferError("a read-only view is exported with copy=True only: importers ignore the flag and would crash on a "
                              "write")
        if max_version is not None and tuple(max_version) >= (1, 0):
            return versioned_capsule(self, bool(copy))
        return plain_capsule(self, bool(copy))


cdef void copy_rows(char* to, TensorView view):
    """The elements without the gaps between rows."""
    cdef const char* at = view.region.address + view.offset
    cdef size_t count = view.shape[0] if not view.is_dense else 1, each = view.nbytes // count, i
    for i in range(count):
        memcpy(to + i * each, at + i * view.buffer_strides[0], each)


cdef int fill(dl_tensor* tensor, TensorView view, bint copied) except -1:
    """Describe the view; shape and strides (and the bytes of a copy) stand in one block that the deleter frees."""
    cdef int ndim = len(view.shape)
    cdef size_t header = 2 * (ndim + 1) * sizeof(int64_t)
    cdef int i
    tensor.shape = <int64_t*>malloc(header + (view.nbytes + ALIGNMENT if copied else 0))
    if tensor.shape == NULL:
        raise MemoryError(f"no memory for a copy of {view.nbytes} bytes")
    tensor.strides = tensor.shape + ndim
    for i in range(ndim):
        tensor.shape[i] = view.buffer_shape[i]
        tensor.strides[i] = view.buffer_strides[i] // view.itemsize
    if copied and not view.is_dense:
        tensor.strides[0] = view.nbytes // view.shape[0] // view.itemsize
    tensor.data = view.region.address + view.offset
    if copied:
        tensor.data = <char*>(<size_t>(<char*>tensor.shape + header + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT)
        copy_rows(<char*>tensor.data, view)
    tensor.device.device_type = DL_CPU
    tensor.ndim = ndim
    tensor.dtype.code = <uint8_t>view.dlpack_code
    tensor.dtype.bits = <uint8_t>view.dlpack_bits
    tensor.dtype.lanes = 1
    return 0


cdef object plain_capsule(TensorView view, bint copied):
    cdef object owner
    cdef dl_managed* managed = <dl_managed*>calloc(1, sizeof(dl_managed))
    if managed == NULL:
        raise MemoryError("no memory for a capsule")
    try:
        fill(&managed.tensor, view, copied)
    except MemoryError:
        free(managed)
        raise
    owner = None if copied else view
    managed.manager_ctx = <void*>owner
    managed.deleter = drop_plain
    Py_INCREF(owner)
    return PyCapsule_New(managed, b"dltensor", destroy_plain)


cdef object versioned_capsule(TensorView view, bint copied):
    cdef object owner
    cdef dl_versioned* managed = <dl_versioned*>calloc(1, sizeof(dl_versioned))
    if managed == NULL:
        raise MemoryError("no memory for a capsule")
    try:
        fill(&managed.tensor, view, copied)
    except MemoryError:
        free(managed)
        raise
    managed.version.major = 1
    managed.version.minor = 1 if view.dlpack_code >= DL_FLOAT8 else 0
    managed.flags = DL_FLAG_COPIED if copied else 0
    owner = None if copied else view
    managed.manager_ctx = <void*>owner
    managed.deleter = drop_versioned
    Py_INCREF(owner)
    return PyCapsule_New(managed, b"dltensor_versioned", destroy_versioned)


# An importer may drop its tensor on a thread without the GIL.
cdef void drop_plain(dl_managed* managed) noexcept with gil:
    Py_DECREF(<object>managed.manager_ctx)
    free(managed.tensor.shape)
    free(managed)


cdef void drop_versioned(dl_versioned* managed) noexcept with gil:
    Py_DECREF(<object>managed.manager_ctx)
    free(managed.tensor.shape)
    free(managed)


# A capsule that was imported has another name; only one that nobody took still owns the tensor.
cdef void destroy_plain(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, b"dltensor"):
        drop_plain(<dl_managed*>PyCapsule_GetPointer(capsule, b"dltensor"))


cdef void destroy_versioned(object capsule) noexcept:
    if PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        drop_versioned(<dl_versioned*>PyCapsule_GetPointer(capsule, b"dltensor_versioned"))
