# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The memory mover and the choice of its loop.

The loop follows from the CPU (or from `configure`) and from the *total* bytes of a pull: ordinary stores below the threshold,
non-temporal ones from there on, since the destination of a big pull would only push itself out of the cache.
"""
from libc.stdlib cimport free, malloc

from shmkv._plan cimport Span, advance

cdef extern from "_kernels.h" nogil:
    ctypedef void (*shmkv_copy_fn)(void* dst, const void* src, size_t nbytes)
    struct shmkv_kernel:
        const char* name
        shmkv_copy_fn ordinary
        shmkv_copy_fn streaming
        int (*supported)()
    const shmkv_kernel* shmkv_kernel_find(const char* name)
    const shmkv_kernel* shmkv_kernel_best()
    const shmkv_kernel* shmkv_kernel_at(size_t index)
    size_t shmkv_kernel_count()
    void shmkv_copy_fence()

cdef struct Run:
    const char* src
    char* dst
    size_t nbytes


DEFAULT_NT_THRESHOLD = 4 << 20

cdef const shmkv_kernel* chosen = shmkv_kernel_best()
cdef uint64_t nt_threshold = DEFAULT_NT_THRESHOLD


cdef int move(const Plan* plan, const char* src, char* dst, int mode, CheckFn check, void* context) noexcept nogil:
    """Copy all runs; `check` is asked every CHUNK_NBYTES and ends the copy by a status other than 0. Source and destination
    do not overlap. All bytes are visible to whoever sees a later store of this thread (fence after streaming stores)."""
    cdef bint streaming = plan.nbytes >= nt_threshold
    cdef shmkv_copy_fn copy = chosen.streaming if streaming else chosen.ordinary
    cdef uint64_t budget = CHUNK_NBYTES, dense = 0, step
    cdef uint32_t i
    cdef int status = 0
    cdef Span span
    for i in range(plan.count):
        span = plan.spans[i]
        while span.nbytes and status == 0:
            step = min(min(span.src_left, span.dst_left), min(span.nbytes, budget))
            copy(dst + (dense if mode == MOVE_GATHER else span.dst), src + (dense if mode == MOVE_SCATTER else span.src), step)
            advance(&span, step)
            dense += step
            budget -= step
            if budget == 0:
                budget = CHUNK_NBYTES
                status = check(context)
    if streaming:
        shmkv_copy_fence()
    return status


def supported_kernels() -> list:
    """Names of the copy loops that this CPU can run, fastest family first."""
    return [shmkv_kernel_at(i).name.decode() for i in range(shmkv_kernel_count()) if shmkv_kernel_at(i).supported()]


def configure(str kernel="auto", threshold=None) -> None:
    """Choose the loop by name ("auto": the best one) and the bytes from which a pull streams (None: the default).

    ValueError naming the accepted values.
    """
    global chosen, nt_threshold
    if threshold is not None and not 0 <= threshold < 1 << 63:
        raise ValueError(f"the streaming threshold must be 0 to 2**63-1 bytes, not {threshold}")
    if kernel != "auto" and kernel not in supported_kernels():
        raise ValueError(f"kernel {kernel!r} is not one of auto, {', '.join(supported_kernels())}")
    chosen = shmkv_kernel_best() if kernel == "auto" else shmkv_kernel_find(kernel.encode())
    nt_threshold = DEFAULT_NT_THRESHOLD if threshold is None else threshold


def current() -> dict:
    """The loop in use and the threshold in bytes."""
    return {"kernel": chosen.name.decode(), "nt_threshold": nt_threshold}


cdef class RunList:
    """A fixed list of runs between two addresses and one loop: the yardstick of `bench/`; nothing else calls it.

    `runs`: [(source byte, destination byte, nbytes)]. The two ranges must not overlap and must outlive this object.
    """
    cdef Run* runs
    cdef size_t count
    cdef const shmkv_kernel* kernel
    cdef bint streaming

    def __cinit__(self, list runs, uint64_t src, uint64_t dst, *, str kernel="", bint streaming=False):
        self.kernel = shmkv_kernel_find(kernel.encode()) if kernel else chosen
        if self.kernel == NULL:
            raise ValueError(f"kernel {kernel!r} is not one of {', '.join(supported_kernels())}")
        self.streaming = streaming
        self.count = len(runs)
        self.runs = <Run*>malloc(max(self.count, 1) * sizeof(Run))
        if self.runs == NULL:
            raise MemoryError()
        for i, (src_byte, dst_byte, nbytes) in enumerate(runs):
            self.runs[i].src = <const char*><size_t>(src + <uint64_t>src_byte)
            self.runs[i].dst = <char*><size_t>(dst + <uint64_t>dst_byte)
            self.runs[i].nbytes = nbytes

    def __dealloc__(self):
        free(self.runs)

    def copy(self):
        """Carry the runs out once, on this thread, without the GIL."""
        cdef shmkv_copy_fn copy = self.kernel.streaming if self.streaming else self.kernel.ordinary
        cdef size_t i
        with nogil:
            for i in range(self.count):
                copy(self.runs[i].dst, self.runs[i].src, self.runs[i].nbytes)
            if self.streaming:
                shmkv_copy_fence()
