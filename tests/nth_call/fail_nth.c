/* Loaded before libc: counts the calls that can fail and lets the n-th one fail, or every one from the n-th on.

   Counted is what shmkv asks for, told by the address that the call returns to: every call of an extension of shmkv; every call of
   posix_ipc, which only segment.py uses; and of Python's own library the calls on a path or descriptor in /dev/shm, /proc or
   /sys/fs/cgroup, for those stand behind the os.* calls of segment.py, life_file.py, membership.py, cluster.py and link.py.

   A failed call has not been made. close, munmap, free and the clock are not in the list: on a valid descriptor of a tmpfs, a whole
   mapping and CLOCK_MONOTONIC they cannot fail. */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "which_fail.h"

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void __libc_free(void *);

/* -- allocations: of extensions alone ---------------------------------------------------------------------------------------- */

/* A block stands at its place or shortly behind it; who frees it is not asked, for a call at the end of a function hides its caller. */
enum { REACH = 64 };

static void exchange(void *block, void *from, void *to)
{
    unsigned i, begin = (unsigned)((uintptr_t)block >> 4) % BLOCKS_MAX;
    for (i = 0; block && i < REACH; i++) {
        void *expected = from;
        if (__atomic_compare_exchange_n(&blocks[(begin + i) % BLOCKS_MAX], &expected, to, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return;
    }
}

static void *noted(void *block, int mine)
{
    if (mine) exchange(block, NULL, block);
    return block;
}

static int fails(const char *call, const void *caller, int mine)
{
    return mine && __atomic_load_n(&armed, __ATOMIC_ACQUIRE) && next_call(call, caller, ENOMEM, ENOMEM, 0);
}

void *malloc(size_t nbytes)
{
    int mine = maps_known && caller_of(CALLER) == EXTENSION;
    if (fails("malloc", CALLER, mine)) { errno = ENOMEM; return NULL; }
    return noted(__libc_malloc(nbytes), mine);
}

void *calloc(size_t count, size_t nbytes)
{
    int mine = maps_known && caller_of(CALLER) == EXTENSION;
    if (fails("calloc", CALLER, mine)) { errno = ENOMEM; return NULL; }
    return noted(__libc_calloc(count, nbytes), mine);
}

void *realloc(void *old, size_t nbytes)
{
    int mine = maps_known && caller_of(CALLER) == EXTENSION;
    void *block;
    if (fails("realloc", CALLER, mine)) { errno = ENOMEM; return NULL; }
    exchange(old, old, NULL);
    block = __libc_realloc(old, nbytes);
    if (!block && nbytes) noted(old, mine);
    return noted(block, mine);
}

void free(void *block)
{
    if (maps_known) exchange(block, block, NULL);
    __libc_free(block);
}

/* -- files --------------------------------------------------------------------------------------------------------------------- */

int shm_open(const char *name, int flags, mode_t mode)
{
    DECIDE("shm_open", -1, NULL, EMFILE, EACCES);
    if (number) FAIL(-1);
    return REAL(shm_open)(name, flags, mode);
}

int shm_unlink(const char *name)
{
    DECIDE("shm_unlink", -1, NULL, EACCES, ENOMEM);
    if (number) FAIL(-1);
    return REAL(shm_unlink)(name);
}

#define OPEN(name)                                                                                      \
    int name(const char *path, int flags, ...)                                                          \
    {                                                                                                   \
        mode_t mode = 0;                                                                                \
        DECIDE("open", -1, path, EMFILE, EACCES);                                                       \
        if (number) FAIL(-1);                                                                           \
        if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        return ((int (*)(const char *, int, ...))real(#name))(path, flags, mode);                       \
    }
OPEN(open)
OPEN(open64)

#define TRUNCATE(name, type)                                                                            \
    int name(int fd, type length)                                                                       \
    {                                                                                                   \
        DECIDE("ftruncate", fd, NULL, ENOMEM, EFBIG);                                                   \
        if (number) FAIL(-1);                                                                           \
        return ((int (*)(int, type))real(#name))(fd, length);                                           \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define FALLOCATE(name, type)                                                                           \
    int name(int fd, type offset, type length)                                                          \
    {                                                                                                   \
        DECIDE_ONCE("posix_fallocate", fd, NULL, ENOSPC, ENOMEM, EINTR);                                \
        if (number) return number;                                                                      \
        if (without_fallocate && is_ours_open(fd)) return EOPNOTSUPP;                                   \
        return ((int (*)(int, type, type))real(#name))(fd, offset, length);                             \
    }
FALLOCATE(posix_fallocate, off_t)
FALLOCATE(posix_fallocate64, off64_t)

int fchmod(int fd, mode_t mode)
{
    DECIDE("fchmod", fd, NULL, EPERM, ENOMEM);
    if (number) FAIL(-1);
    return REAL(fchmod)(fd, mode);
}

#define STAT(name, path_type, fd, path, type)                                                           \
    int name(path_type where, type *found)                                                              \
    {                                                                                                   \
        DECIDE(#name, fd, path, ENOMEM, EACCES);                                                        \
        if (number) FAIL(-1);                                                                           \
        return ((int (*)(path_type, type *))real(#name))(where, found);                                 \
    }
STAT(stat, const char *, -1, where, struct stat)
STAT(stat64, const char *, -1, where, struct stat64)
STAT(lstat, const char *, -1, where, struct stat)
STAT(lstat64, const char *, -1, where, struct stat64)
STAT(fstat, int, where, NULL, struct stat)
STAT(fstat64, int, where, NULL, struct stat64)
STAT(statvfs, const char *, -1, where, struct statvfs)
STAT(statvfs64, const char *, -1, where, struct statvfs64)

DIR *opendir(const char *path)
{
    DECIDE("opendir", -1, path, EMFILE, ENOMEM);
    if (number) FAIL(NULL);
    return REAL(opendir)(path);
}

ssize_t read(int fd, void *into, size_t nbytes)
{
    DECIDE_ONCE("read", fd, NULL, EIO, ENOMEM, EINTR);
    if (number) FAIL(-1);
    return syscall(SYS_read, fd, into, nbytes);
}

/* At a place of a file: out of segments, into them, and zeros where there is no fallocate. */
#define AT_A_PLACE(name, called, buffer, type, first, second)                                           \
    ssize_t name(int fd, buffer bytes, size_t nbytes, type offset)                                      \
    {                                                                                                   \
        DECIDE_ONCE(called, fd, NULL, first, second, EINTR);                                            \
        if (number) FAIL(-1);                                                                           \
        return ((ssize_t (*)(int, buffer, size_t, type))real(#name))(fd, bytes, nbytes, offset);        \
    }
AT_A_PLACE(pread, "pread", void *, off_t, EIO, ENOMEM)
AT_A_PLACE(pread64, "pread", void *, off64_t, EIO, ENOMEM)
AT_A_PLACE(pwrite, "pwrite", const void *, off_t, ENOSPC, ENOMEM)
AT_A_PLACE(pwrite64, "pwrite", const void *, off64_t, ENOSPC, ENOMEM)

ssize_t getrandom(void *into, size_t nbytes, unsigned flags)
{
    int asked = __atomic_load_n(&armed, __ATOMIC_ACQUIRE) && caller_of(CALLER) == PYTHON;
    int number = asked ? next_call("getrandom", CALLER, ENOSYS, EPERM, EINTR) : 0;
    if (number) FAIL(-1);
    return REAL(getrandom)(into, nbytes, flags);
}

#define FCNTL(name)                                                                                     \
    int name(int fd, int command, ...)                                                                  \
    {                                                                                                   \
        va_list rest;                                                                                   \
        void *argument;                                                                                 \
        int number = __atomic_load_n(&armed, __ATOMIC_ACQUIRE) && caller_of(CALLER) == EXTENSION        \
                     ? next_call("fcntl", CALLER, ENOLCK, EINVAL, EINTR) : 0;                           \
        if (number) FAIL(-1);                                                                           \
        va_start(rest, command);                                                                        \
        argument = va_arg(rest, void *);                                                                \
        va_end(rest);                                                                                   \
        return ((int (*)(int, int, ...))real(#name))(fd, command, argument);                            \
    }
FCNTL(fcntl)
FCNTL(fcntl64)

/* -- memory, threads, futexes: of extensions alone (Python's own mappings are none of shmkv's) ------------------------------------ */

#define MMAP(name, type)                                                                                \
    void *name(void *address, size_t nbytes, int protection, int flags, int fd, type offset)            \
    {                                                                                                   \
        int number = __atomic_load_n(&armed, __ATOMIC_ACQUIRE) && caller_of(CALLER) == EXTENSION        \
                     ? next_call("mmap", CALLER, ENOMEM, EAGAIN, 0) : 0;                                \
        if (number) FAIL(MAP_FAILED);                                                                   \
        return (void *)syscall(SYS_mmap, address, nbytes, protection, flags, fd, offset);               \
    }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

int madvise(void *address, size_t nbytes, int advice)
{
    DECIDE("madvise", -1, NULL, ENOMEM, EAGAIN);
    if (number) FAIL(-1);
    return (int)syscall(SYS_madvise, address, nbytes, advice);
}

/* Into and out of another process: of extensions alone, as all of it. */
#define PROCESS_VM(name)                                                                                \
    ssize_t name(pid_t pid, const struct iovec *mine, unsigned long count, const struct iovec *theirs,  \
                 unsigned long their_count, unsigned long flags)                                        \
    {                                                                                                   \
        DECIDE_ONCE(#name, -1, NULL, ENOMEM, EPERM, EINTR);                                             \
        if (number) FAIL(-1);                                                                           \
        return REAL(name)(pid, mine, count, theirs, their_count, flags);                                \
    }
PROCESS_VM(process_vm_readv)
PROCESS_VM(process_vm_writev)

/* -- processes: of extensions alone. A child counts on from where its parent was, beside it ---------------------------------------- */

pid_t fork(void)
{
    DECIDE("fork", -1, NULL, EAGAIN, ENOMEM);
    if (number) FAIL(-1);
    return REAL(fork)();
}

/* A child that is not waited for is one that somebody else has waited for. */
pid_t waitpid(pid_t pid, int *status, int options)
{
    DECIDE_ONCE("waitpid", -1, NULL, ECHILD, ECHILD, EINTR);
    if (number && number != EINTR) REAL(waitpid)(pid, status, options);
    if (number) FAIL(-1);
    return REAL(waitpid)(pid, status, options);
}

int prctl(int option, ...)
{
    unsigned long a[4];
    va_list rest;
    int i;
    DECIDE("prctl", -1, NULL, EINVAL, EPERM);
    if (number) FAIL(-1);
    va_start(rest, option);
    for (i = 0; i < 4; i++) a[i] = va_arg(rest, unsigned long);
    va_end(rest);
    return ((int (*)(int, unsigned long, unsigned long, unsigned long, unsigned long))real("prctl"))(option, a[0], a[1], a[2], a[3]);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*body)(void *), void *argument)
{
    DECIDE("pthread_create", -1, NULL, EAGAIN, EPERM);
    if (number) return number;
    return REAL(pthread_create)(thread, attributes, body, argument);
}

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

long syscall(long call, ...)
{
    static long (*next)(long, ...);
    long a[6];
    va_list rest;
    int i, number, sleeps = call == SYS_futex || call == SYS_futex_waitv;
    va_start(rest, call);
    for (i = 0; i < 6; i++) a[i] = va_arg(rest, long);
    va_end(rest);
    if (sleeps && __atomic_load_n(&armed, __ATOMIC_ACQUIRE) && caller_of(CALLER) == EXTENSION) {
        number = call == SYS_futex_waitv ? next_call("futex waitv", CALLER, EINTR, ENOSYS, EAGAIN)
                 : (a[1] & 127) == 1 ? next_call("futex wake", CALLER, EFAULT, ENOSYS, 0)
                                     : next_call("futex wait", CALLER, EINTR, ENOSYS, EAGAIN);
        if (number) FAIL(-1);
    }
    if (!next) next = real("syscall");
    return next(call, a[0], a[1], a[2], a[3], a[4], a[5]);
}
