# cython: language_level=3, freethreading_compatible=True, cdivision=True
"""Moves bytes between this process and the private memory of a peer.

Whose memory it is stands on what the kernel says and not on a number in shared memory: the process that holds the peer's life byte
has the pid that the peer recorded, and started when it recorded to have started. That is asked before the first byte and after the
last, and the life byte's holder before each call in between. What is left is a peer that ends between the look and the call and
whose pid is given away within that time; pids are given out in turn, so that takes as many new processes as there are pids.
"""
from libc.errno cimport EACCES, EFAULT, EINTR, ENOENT, ENOMEM, ENOSYS, EPERM, ESRCH
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memset

from shmkv._copy cimport share_of
from shmkv._crash cimport crash_point
from shmkv._crew cimport crew_run
from shmkv._futex cimport fence_acquire, load64_acquire, load_words, store64_relaxed
from shmkv._layout cimport MemberRecord, member_at
from shmkv._life cimport life_holder
from shmkv._link cimport LINK_INTERRUPTED, LINK_PEER_GONE, Patience, patience_init, raise_pending
from shmkv._mapping cimport Region
from shmkv._plan cimport Span, add, advance, plan_free, reserve_spans, seek
from shmkv._within cimport look_at_clock

cdef extern from *:
    """
    #define _GNU_SOURCE 1
    #include <errno.h>
    #include <fcntl.h>
    #include <limits.h>
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/prctl.h>
    #include <sys/uio.h>
    #include <sys/wait.h>
    #include <unistd.h>

    #ifndef PR_SET_PTRACER
    #define PR_SET_PTRACER 0x59616d61
    #endif

    #define RUNS_A_CALL 1024        /* IOV_MAX of Linux; the C library has no constant for it everywhere */

    /* Bytes moved, which may be fewer than there are runs for, or -errno. */
    static inline int64_t reach(int pid, const struct iovec *mine, const struct iovec *theirs, unsigned long count, int writes)
    {
        ssize_t done = writes ? process_vm_writev(pid, mine, count, theirs, count, 0)
                              : process_vm_readv(pid, mine, count, theirs, count, 0);
        return done < 0 ? -errno : done;
    }

    /* One byte of a process, into a byte that is thrown away: 0 or -errno. */
    static inline int reach_byte(int pid, uint64_t address)
    {
        char byte;
        struct iovec mine = {&byte, 1}, theirs = {(void *)(uintptr_t)address, 1};
        int64_t done = reach(pid, &mine, &theirs, 1, 0);
        return done < 0 ? (int)done : done == 1 ? 0 : -EFAULT;
    }

    /* Clock ticks after boot at which a process started, the 22nd word of its line in /proc: 0 or -errno. The second word is its
       name in parentheses, which may hold any byte. */
    static int started_at(int pid, uint64_t *ticks)
    {
        char path[40], line[1024], *at;
        int fd, word;
        ssize_t got;
        snprintf(path, sizeof path, "/proc/%d/stat", pid);
        do fd = open(path, O_RDONLY | O_CLOEXEC); while (fd < 0 && errno == EINTR);
        if (fd < 0) return -errno;
        do got = read(fd, line, sizeof line - 1); while (got < 0 && errno == EINTR);
        if (got < 0) { int e = errno; close(fd); return -e; }
        close(fd);
        line[got] = 0;
        at = strrchr(line, ')');
        for (word = 2; at && word < 22; word++) at = strchr(at + 1, ' ');
        if (!at) return -EIO;
        *ticks = strtoull(at, NULL, 10);
        return 0;
    }

    static int allow_any_tracer(void) { return prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0) == 0 ? 0 : -errno; }

    /* May a process that is no ancestor of this one read its memory? Asked by a child, which the kernel takes for any other process
       of the user: 0 or -errno. */
    static int ask_by_child(void)
    {
        static char byte;
        int said, pid = fork();
        if (pid < 0) return -errno;
        if (pid == 0) _exit(-reach_byte(getppid(), (uint64_t)(uintptr_t)&byte) & 127);
        while (waitpid(pid, &said, 0) < 0)
            if (errno != EINTR) return -errno;
        return WIFEXITED(said) ? -WEXITSTATUS(said) : -ECHILD;
    }
    """
    enum:
        RUNS_A_CALL
    struct iovec:
        void* iov_base
        size_t iov_len
    int64_t reach(int pid, const iovec* mine, const iovec* theirs, unsigned long count, bint writes) noexcept nogil
    int reach_byte(int pid, uint64_t address) noexcept nogil
    int started_at(int pid, uint64_t* ticks) noexcept nogil
    int allow_any_tracer() noexcept nogil
    int ask_by_child() noexcept nogil
    int getpid() noexcept nogil


# -- whose memory ------------------------------------------------------------------------------------------------------

cdef int peer_verify(PeerProcess* peer) noexcept nogil:
    """Does the process that the member's record names live, and is it to be reached by its pid? 0, LINK_PEER_GONE, or
    MEMORY_ELSEWHERE, _REPLACED, _UNSURE."""
    cdef MemberRecord copy
    cdef uint64_t ticks = 0
    cdef int status = copy_member(peer, &copy)
    if status == 0:
        status = look_at_holder(peer, <int>copy.pid)
    if status != 0:
        return status
    status = started_at(<int>copy.pid, &ticks)
    if status == -ENOENT or status == -ESRCH:       # ended just now, or /proc does not show it
        status = look_at_holder(peer, <int>copy.pid)
        return status if status != 0 else MEMORY_UNSURE
    if status != 0:
        return MEMORY_UNSURE
    peer.pid = <int>copy.pid
    return 0 if ticks == copy.start_time else MEMORY_REPLACED


cdef int copy_member(const PeerProcess* peer, MemberRecord* copy) noexcept nogil:
    """The peer's record, if it still is the peer's: 0 or LINK_PEER_GONE."""
    cdef MemberRecord* shared = member_at(peer.members, peer.slot)
    if load64_acquire(&shared.incarnation) != peer.incarnation:
        return LINK_PEER_GONE
    load_words(copy, shared, sizeof(MemberRecord))
    fence_acquire()
    return 0 if load64_acquire(&shared.incarnation) == peer.incarnation else LINK_PEER_GONE


cdef int look_at_holder(const PeerProcess* peer, int pid) noexcept nogil:
    """Does the process `pid` hold the peer's life byte? 0, LINK_PEER_GONE, MEMORY_ELSEWHERE or MEMORY_UNSURE."""
    cdef int holder = 0
    cdef int held = life_holder(peer.life_fd, peer.slot, &holder)
    if held < 0:
        return MEMORY_UNSURE
    if held == 0:
        return LINK_PEER_GONE
    return 0 if holder == pid and pid > 0 else MEMORY_ELSEWHERE


# -- moving ------------------------------------------------------------------------------------------------------------

cdef struct Move:
    const Plan* plan
    const PeerProcess* peer
    char* here
    uint64_t there
    bint writes
    uint64_t share_nbytes
    CheckFn check
    void* context
    uint64_t fault


cdef int peer_move(const Plan* plan, PeerProcess* peer, char* here, uint64_t there, bint writes, CheckFn check, void* context,
                   uint64_t* fault) noexcept nogil:
    """See the head of the .pxd."""
    cdef Move move
    cdef uint32_t threads = 1
    cdef int after, status = peer_verify(peer)
    fault[0] = 0
    if status != 0 or plan.nbytes == 0:
        return status
    move.plan, move.peer, move.here, move.there, move.writes, move.fault = plan, peer, here, there, writes, 0
    move.check, move.context = check, context
    move.share_nbytes = share_of(plan.nbytes, &threads)
    status = crew_run(move_share, &move, (plan.nbytes + move.share_nbytes - 1) // move.share_nbytes, threads, move_share_and_look)
    fault[0] = move.fault
    if status != 0 and not is_of_memory(status):
        return status                   # of `check`: the deadline, a signal, the end of the link
    after = peer_verify(peer)
    return after if after != 0 else status


cdef inline bint is_of_memory(int status) noexcept nogil:
    return MEMORY_NO_ROOM <= status <= MEMORY_FORBIDDEN


cdef int move_share_and_look(void* context, uint64_t share) noexcept nogil:
    cdef Move* move = <Move*>context
    cdef int status = move_share(context, share)
    return status if status != 0 or is_last(move, share) else move.check(move.context)


cdef inline bint is_last(const Move* move, uint64_t share) noexcept nogil:
    return (share + 1) * move.share_nbytes >= move.plan.nbytes


cdef int move_share(void* context, uint64_t share) noexcept nogil:
    """Bytes [share, share + 1) * share_nbytes of the plan, up to RUNS_A_CALL runs a call. What a call did not do is left to the
    next one, which then begins at the byte that could not be moved."""
    cdef Move* move = <Move*>context
    cdef uint64_t at = share * move.share_nbytes
    cdef uint64_t end = min(at + move.share_nbytes, move.plan.nbytes)
    cdef iovec mine[RUNS_A_CALL]
    cdef iovec theirs[RUNS_A_CALL]
    cdef unsigned long count
    cdef int64_t done
    cdef int status
    while at < end:
        count = gather(move, at, end, mine, theirs)
        crash_point(b"copying")
        status = look_at_holder(move.peer, move.peer.pid)
        if status != 0:
            return status
        done = reach(move.peer.pid, mine, theirs, count, move.writes)
        if done > 0:
            at += <uint64_t>done
        elif done != -EINTR:
            return failed(move, done, <uint64_t>mine[0].iov_base, <uint64_t>theirs[0].iov_base)
    return 0


cdef unsigned long gather(const Move* move, uint64_t at, uint64_t end, iovec* mine, iovec* theirs) noexcept nogil:
    """The runs of bytes `at` to `end` - 1, as many as one call takes: how many."""
    cdef uint32_t number = 0
    cdef unsigned long count = 0
    cdef uint64_t step
    cdef Span span = seek(move.plan, at, &number)
    while True:
        step = min(min(span.src_left, span.dst_left), min(span.nbytes, end - at))
        mine[count].iov_base = move.here + (span.src if move.writes else span.dst)
        theirs[count].iov_base = <void*>(move.there + (span.dst if move.writes else span.src))
        mine[count].iov_len = theirs[count].iov_len = step
        count += 1
        at += step
        if at == end or count == RUNS_A_CALL:
            return count
        advance(&span, step)
        if span.nbytes == 0:
            number += 1
            span = move.plan.spans[number]


cdef int failed(Move* move, int64_t status, uint64_t mine, uint64_t theirs) noexcept nogil:
    """What a call's -errno means, or 0 bytes; both addresses are those of the first byte that was not moved."""
    if status == -ESRCH:
        return LINK_PEER_GONE
    if status == -EPERM or status == -EACCES:
        return MEMORY_FORBIDDEN
    if status == -ENOSYS:
        return MEMORY_UNSUPPORTED
    if status == -ENOMEM:
        return MEMORY_NO_ROOM
    if is_own_fault(move, mine, theirs):
        store64_relaxed(&move.fault, mine)
        return MEMORY_OWN_UNMAPPED
    store64_relaxed(&move.fault, theirs)
    return MEMORY_UNMAPPED


cdef bint is_own_fault(const Move* move, uint64_t mine, uint64_t theirs) noexcept nogil:
    """Which side has no memory there? Of a write the own side is read, of a read the peer's; the other one is to blame if that
    goes well."""
    if move.writes:
        return reach_byte(getpid(), mine) == -EFAULT
    return reach_byte(move.peer.pid, theirs) == 0


# -- as Python calls it ------------------------------------------------------------------------------------------------

def transfer(Region members, int life_fd, uint32_t slot, uint64_t incarnation, list runs, bint writes, int64_t timeout_ms):
    """Carry out runs (address here, address in the peer's process, nbytes): (status, address at fault, the peer's pid).

    `writes`: from here to there; else from there to here. The status is 0 or negative, as in the head of the .pxd. The memory here
    must stay where it is. ValueError for a run that no memory can have.
    """
    cdef Plan plan
    cdef PeerProcess peer
    cdef Patience wait
    cdef uint64_t fault = 0
    cdef int status
    memset(&plan, 0, sizeof(Plan))
    memset(&peer, 0, sizeof(PeerProcess))
    peer.life_fd, peer.members, peer.slot, peer.incarnation = life_fd, members.address, slot, incarnation
    patience_init(&wait, timeout_ms)
    try:
        make_plan(&plan, runs, writes)
        with nogil:
            status = peer_move(&plan, &peer, NULL, 0, writes, look_at_clock, &wait, &fault)
    finally:
        plan_free(&plan)
    if status == LINK_INTERRUPTED:
        raise_pending()
    return status, fault, peer.pid


cdef int make_plan(Plan* plan, list runs, bint writes) except -1:
    cdef Span span
    if reserve_spans(plan, len(runs)) != 0:
        raise MemoryError(f"no memory for {len(runs)} runs")
    memset(&span, 0, sizeof(Span))
    for here, there, nbytes in runs:
        if min(here, there, nbytes) <= 0 or max(here, there) + nbytes > 1 << 63:
            raise ValueError(f"no run: {nbytes} bytes between address {here} here and address {there} of the peer")
        span.src, span.dst = (here, there) if writes else (there, here)
        span.nbytes = span.src_left = span.dst_left = nbytes
        add(plan, &span)
    return 0


def allow_all() -> int:
    """Tell Yama that any process of the user may reach this one's memory, and trace it, from now on: 0 or -errno; -EINVAL where
    there is no Yama, which then forbids nothing."""
    return allow_any_tracer()


def ask() -> int:
    """Would the kernel let another process of this user, which is no ancestor of it, read the memory of this one? 0 or -errno."""
    return ask_by_child()


FORBIDDEN, UNSUPPORTED, ELSEWHERE, REPLACED = MEMORY_FORBIDDEN, MEMORY_UNSUPPORTED, MEMORY_ELSEWHERE, MEMORY_REPLACED
UNMAPPED, OWN_UNMAPPED, UNSURE, NO_ROOM = MEMORY_UNMAPPED, MEMORY_OWN_UNMAPPED, MEMORY_UNSURE, MEMORY_NO_ROOM
