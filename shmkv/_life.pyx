# cython: language_level=3, freethreading_compatible=True
"""Life bytes by fcntl, and an epoch that changes in a forked child.

The weakness of POSIX record locks: any open and close of the life file in this process drops them all. So the file is opened
once and never closed while a byte is held, and `own` tells whether the lock is still ours. No look shows this process's own locks.
"""
import os

from libc.errno cimport EACCES, EAGAIN, ENOLCK, errno

from shmkv._layout cimport COLD_BYTE, LIFE_FIRST

cdef extern from *:
    """
    #define _GNU_SOURCE 1
    #include <errno.h>
    #include <fcntl.h>
    #include <pthread.h>
    #include <string.h>
    #include <unistd.h>
    #ifndef F_OFD_GETLK
    #define F_OFD_GETLK 36
    #endif

    /* A record lock call on [byte, byte + count), count 0 = to the end of all files. 0 or -errno. */
    static int life_call(int fd, int command, int type, unsigned byte, unsigned count, int *found_type, int *found_pid)
    {
        struct flock lock;
        int status;
        memset(&lock, 0, sizeof lock);
        lock.l_type = (short)type;
        lock.l_whence = SEEK_SET;
        lock.l_start = byte;
        lock.l_len = count;
        do status = fcntl(fd, command, &lock); while (status != 0 && errno == EINTR);
        *found_type = lock.l_type;
        *found_pid = lock.l_pid;
        return status == 0 ? 0 : -errno;
    }

    static int open_file(const char *path)
    { return open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK); }

    static unsigned long long epoch_of_process = 1;
    static void epoch_next(void) { epoch_of_process++; }
    static int epoch_watch(void) { return pthread_atfork(NULL, NULL, epoch_next); }
    static unsigned long long epoch_now(void) { return epoch_of_process; }
    """
    int F_GETLK
    int F_SETLK
    int F_OFD_GETLK
    int F_WRLCK
    int F_UNLCK
    int close(int fd) noexcept nogil
    int life_call(int fd, int command, int type, unsigned byte, unsigned count, int* found_type, int* found_pid) noexcept nogil
    int open_file(const char* path) noexcept nogil
    unsigned long long epoch_now() noexcept nogil
    int epoch_watch() noexcept nogil

cdef enum:
    GIVE_TRIES = 3


cdef uint64_t process_epoch() noexcept nogil:
    """Differs between a process and its forked child, also when C code forked."""
    return epoch_now()


cdef int look(int fd, uint32_t byte, uint32_t count, int* pid) noexcept nogil:
    """1: another process holds a byte of the range. 0: nobody does (or this process itself). -errno: cannot tell."""
    cdef int kind = 0
    cdef int status = life_call(fd, F_GETLK, F_WRLCK, byte, count, &kind, pid)
    if status != 0:
        return status
    return kind != F_UNLCK


cdef int life_holder(int fd, uint32_t slot, int* pid) noexcept nogil:
    """As `look`, for the life byte of a member slot; with 1 also the holder's pid, 0 if this pid namespace does not show it."""
    return look(fd, LIFE_FIRST + slot, 1, pid)


cdef int life_look(int fd, uint32_t slot) noexcept nogil:
    """As `look`, for the life byte of a member slot."""
    cdef int pid = 0
    return life_holder(fd, slot, &pid)


if epoch_watch() != 0:
    raise ImportError("pthread_atfork failed: no memory for a fork handler")


def epoch() -> int:
    """A number that is another one in a forked child."""
    return epoch_now()


cdef bint take(int fd, uint32_t byte) except -1:
    cdef int kind = 0, pid = 0
    cdef int status = life_call(fd, F_SETLK, F_WRLCK, byte, 1, &kind, &pid)
    if status == 0:
        return True
    if status == -EAGAIN or status == -EACCES:
        return False
    raise OSError(-status, f"cannot lock byte {byte} of the life file: {os.strerror(-status)}")


cdef int give(int fd, uint32_t byte) except -1:
    cdef int kind = 0, pid = 0, _i
    cdef int status = -ENOLCK
    for _i in range(GIVE_TRIES):
        if status == -ENOLCK:           # short of memory: the kernel splits a lock to free a part of it
            status = life_call(fd, F_SETLK, F_UNLCK, byte, 1, &kind, &pid)
    if status != 0:
        raise OSError(-status, f"cannot unlock byte {byte} of the life file: {os.strerror(-status)}")
    return 0


def hold(int fd, uint32_t slot) -> bool:
    """Take a slot's life byte for this process; False if another one holds it."""
    return take(fd, LIFE_FIRST + slot)


def drop(int fd, uint32_t slot) -> None:
    """Give a slot's life byte back; nothing happens if it is not ours."""
    give(fd, LIFE_FIRST + slot)


def hold_cold(int fd) -> bool:
    """Take the byte of the cold lock; False if another process holds it."""
    return take(fd, COLD_BYTE)


def drop_cold(int fd) -> None:
    """Give the byte of the cold lock back."""
    give(fd, COLD_BYTE)


def cold_holder_pid(int fd) -> int:
    """Pid of the other process that holds the cold lock as this pid namespace sees it, 0 if none or not visible."""
    cdef int pid = 0
    return pid if look(fd, COLD_BYTE, 1, &pid) == 1 and pid > 0 else 0


def holder_pid(int fd, uint32_t slot) -> int:
    """Pid of the other process that holds the slot's byte as this pid namespace sees it, 0 if none or not visible."""
    cdef int pid = 0
    return pid if look(fd, LIFE_FIRST + slot, 1, &pid) == 1 and pid > 0 else 0


def held_by_other(int fd, uint32_t slot) -> bool:
    """Does another process hold the slot's byte? "Cannot tell" counts as yes."""
    return life_look(fd, slot) != 0


def anybody(int fd) -> bool:
    """Does any other process hold a life byte, of whatever layout version?"""
    cdef int pid = 0
    return look(fd, COLD_BYTE + 1, 0, &pid) != 0


def open_into(str path, list opened) -> None:
    """Open a life file and put its descriptor into `opened`, with no moment in between for a signal handler. OSError."""
    cdef bytes name = os.fsencode(path)
    cdef int fd = open_file(name)
    if fd < 0:
        raise OSError(errno, os.strerror(errno), path)
    opened.append(fd)


def close_kept(dict kept, str namespace) -> None:
    """Take a life file out of those that are kept and close it, with no moment in between for a signal handler."""
    cdef int fd = kept.pop(namespace).fd
    close(fd)


def own(int fd, uint32_t slot) -> bool:
    """Does this process still hold the slot's byte? (An open-file-description lock conflicts with our own POSIX lock.)"""
    cdef int kind = 0, pid = 0
    cdef int status = life_call(fd, F_OFD_GETLK, F_WRLCK, LIFE_FIRST + slot, 1, &kind, &pid)
    if status != 0:
        raise OSError(-status, f"cannot query the life byte of slot {slot}: {os.strerror(-status)}")
    return kind != F_UNLCK and life_look(fd, slot) == 0
