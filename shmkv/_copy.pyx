# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""The movers, memory, `pread` and `pwrite`, and the choice of the memory mover's loop.

The loop follows from the CPU (or from `configure`) and from the *total* bytes of a pull: ordinary stores below the threshold,
non-temporal ones from there on, since the destination of a big pull would only push itself out of the cache.
"""
from libc.stdlib cimport free, malloc

from shmkv import _crew

from shmkv._attached cimport read_whole, write_whole
from shmkv._crash cimport crash_point
from shmkv._crew cimport crew_limit, crew_run
from shmkv._futex cimport add64_relaxed
from shmkv._plan cimport Span, advance, seek

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

cdef extern from *:
    """
    /* The calling thread's note of its last copy: a thread's own, because several threads pull at once. */
    struct shmkv_copy_note {
        uint64_t nbytes;
        int64_t wait_ns, copy_ns;
        const char *mover, *moving;     /* NULL = none yet; `moving` may belong to a copy that fails */
        int streamed, streaming;
    };
    static __thread struct shmkv_copy_note copy_note_of_thread;
    static inline struct shmkv_copy_note *copy_note(void) { return &copy_note_of_thread; }
    """
    struct shmkv_copy_note:
        uint64_t nbytes
        int64_t wait_ns
        int64_t copy_ns
        const char* mover
        const char* moving
        bint streamed
        bint streaming
    shmkv_copy_note* copy_note() noexcept nogil

cdef struct Run:
    const char* src
    char* dst
    size_t nbytes


DEFAULT_NT_THRESHOLD = 4 << 20
CREW_THRESHOLD = 8 << 20            # below this a second thread costs more than it brings

cdef const shmkv_kernel* chosen = shmkv_kernel_best()
cdef uint64_t nt_threshold = DEFAULT_NT_THRESHOLD
cdef uint64_t crew_threshold = CREW_THRESHOLD
cdef uint64_t streamed_count = 0


cdef struct Job:
    const Plan* plan
    const char* src
    int fd                          # -1, or the file instead of `src`, or of `dst`
    char* dst
    int mode
    uint64_t share_nbytes
    shmkv_copy_fn copy
    bint streaming
    CheckFn check
    void* context


cdef int move(const Plan* plan, const char* src, int fd, char* dst, int mode, CheckFn check, void* context) noexcept nogil:
    """Copy all runs; `check` is asked after each share, on the calling thread, and ends the copy by a status other than 0.
    Source and destination do not overlap; both are memory, but for the one that is a file when `fd` is not -1: the destination in
    mode MOVE_TO_FILE, else the source. All bytes are visible to whoever sees a later store of this thread."""
    return move_part(plan, plan.nbytes, src, fd, dst, mode, check, context)


cdef int move_part(const Plan* plan, uint64_t whole_nbytes, const char* src, int fd, char* dst, int mode, CheckFn check,
                   void* context) noexcept nogil:
    """The same for a plan that is a part of a whole: much does not belong into the processor's cache, however small its parts."""
    cdef Job job
    cdef const shmkv_kernel* kernel = chosen        # once: another thread may choose meanwhile
    cdef uint32_t threads = 1
    job.plan, job.src, job.fd, job.dst, job.mode, job.check, job.context = plan, src, fd, dst, mode, check, context
    job.streaming = fd < 0 and whole_nbytes >= nt_threshold
    if job.streaming:
        add64_relaxed(&streamed_count, 1)
    job.copy = kernel.streaming if job.streaming else kernel.ordinary
    copy_moves_by(kernel.name if fd < 0 else system_call(mode), job.streaming)
    job.share_nbytes = share_of(plan.nbytes, &threads)
    if plan.nbytes <= job.share_nbytes:
        return copy_share(&job, 0)
    return crew_run(copy_share, &job, (plan.nbytes + job.share_nbytes - 1) // job.share_nbytes, threads, copy_share_and_look)


cdef const char* system_call(int mode) noexcept nogil:
    """The one that moves bytes where an end is a file."""
    if mode == MOVE_TO_FILE:
        return b"pwrite"
    return b"pread"


cdef uint64_t share_of(uint64_t nbytes, uint32_t* threads) noexcept nogil:
    """In shares of how many bytes so much is moved, and on how many threads."""
    threads[0] = crew_limit() if nbytes >= crew_threshold else 1
    return CHUNK_NBYTES if threads[0] == 1 else SHARE_NBYTES


cdef int copy_share(void* context, uint64_t share) noexcept nogil:
    """Bytes [share, share + 1) * share_nbytes of a plan. Streaming stores are fenced here, on the core that made them."""
    cdef Job* job = <Job*>context
    cdef uint64_t at = share * job.share_nbytes
    cdef uint64_t end = min(at + job.share_nbytes, job.plan.nbytes)
    cdef uint64_t step
    cdef int status = 0
    cdef uint32_t number = 0
    cdef Span span = seek(job.plan, at, &number)
    while True:
        step = min(min(span.src_left, span.dst_left), min(span.nbytes, end - at))
        crash_point(b"copying")
        if job.fd < 0:
            job.copy(job.dst + (at if job.mode == MOVE_GATHER else span.dst),
                     job.src + (at if job.mode == MOVE_SCATTER else span.src), step)
        elif job.mode == MOVE_TO_FILE:
            status = write_whole(job.fd, job.src + span.src, step, span.dst)
        else:
            status = read_whole(job.fd, job.dst + span.dst, step, span.src)
        at += step
        if at == end or status != 0:
            break
        advance(&span, step)
        if span.nbytes == 0:
            number += 1
            span = job.plan.spans[number]
    if job.streaming:
        shmkv_copy_fence()
    return status


cdef int copy_share_and_look(void* context, uint64_t share) noexcept nogil:
    cdef Job* job = <Job*>context
    cdef int status = copy_share(context, share)
    return status if status != 0 else job.check(job.context)


cdef void copy_moves_by(const char* mover, bint streaming) noexcept nogil:
    """What the calling thread copies with now: a loop or a system call, a name that lasts. Noted when the copy has succeeded."""
    cdef shmkv_copy_note* note = copy_note()
    note.moving, note.streaming = mover, streaming


cdef void last_copy_note(uint64_t nbytes, int64_t wait_ns, int64_t copy_ns) noexcept nogil:
    """Remember what a successful pull or copy of the calling thread did."""
    cdef shmkv_copy_note* note = copy_note()
    note.nbytes, note.wait_ns, note.copy_ns = nbytes, wait_ns, copy_ns
    note.mover, note.streamed = note.moving, note.streaming


cdef tuple last_copy():
    """(bytes, ns waited, ns copied, by what, was it streamed) of the calling thread's last successful pull or copy; 0, "" and False
    before the first."""
    cdef shmkv_copy_note* note = copy_note()
    return note.nbytes, note.wait_ns, note.copy_ns, note.mover.decode() if note.mover != NULL else "", note.streamed


def supported_kernels() -> list:
    """Names of the copy loops that this CPU can run, fastest family first."""
    return [shmkv_kernel_at(i).name.decode() for i in range(shmkv_kernel_count()) if shmkv_kernel_at(i).supported()]


def configure(str kernel="auto", threshold=None, threads=None) -> None:
    """Choose the loop by name ("auto": the best one), the bytes from which a pull streams, and the threads of a big copy (None:
    the defaults).

    ValueError naming the accepted values.
    """
    global chosen, nt_threshold
    if threshold is not None and not 0 <= threshold < 1 << 63:
        raise ValueError(f"the streaming threshold must be 0 to 2**63-1 bytes, not {threshold}")
    if kernel != "auto" and kernel not in supported_kernels():
        raise ValueError(f"kernel {kernel!r} is not one of auto, {', '.join(supported_kernels())}")
    _crew.configure(threads)
    chosen = shmkv_kernel_best() if kernel == "auto" else shmkv_kernel_find(kernel.encode())
    nt_threshold = DEFAULT_NT_THRESHOLD if threshold is None else threshold


def current() -> dict:
    """The loop in use, from how many bytes it streams, how many threads a copy of at least `crew_threshold` bytes uses."""
    return {"kernel": chosen.name.decode(), "nt_threshold": nt_threshold, "crew_threshold": crew_threshold,
            "threads": crew_limit()}


def streamed() -> int:
    """How many copies of this process, parts of a transfer each counted, were made with streaming stores so far."""
    return streamed_count


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
