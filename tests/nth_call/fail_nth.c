/* Loaded before libc: counts the calls that can fail and lets the n-th one fail, or every one from the n-th on.

   Counted is what shmkv asks for, told by the address that the call returns to: every call of an extension of shmkv; every call of
   posix_ipc, which only segment.py uses; and of Python's own library the calls on a path or descriptor in /dev/shm, /proc or
   /sys/fs/cgroup, for those stand behind the os.* calls of segment.py, life_file.py, membership.py, cluster.py and link.py.

   A failed call has not been made. close, munmap, free and the clock are not in the list: on a valid descriptor of a tmpfs, a whole
   mapping and CLOCK_MONOTONIC they cannot fail. */
#define _GNU_SOURCE 1
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define CALLER __builtin_return_address(0)
#define REAL(name) ((__typeof__(&name))real(#name))
#define FAIL(answer) do { errno = number; return answer; } while (0)

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void __libc_free(void *);

enum { STRANGER, EXTENSION, POSIX_IPC, PYTHON };
enum { MAPS_MAX = 128, TALLIES = 32, BLOCKS_MAX = 4096 };

static struct { uintptr_t begin, end; int who; } maps[MAPS_MAX];
static int maps_known;
static unsigned armed, seen, failed;            /* armed: from here on calls count; seen: how many did; failed: how many of them */
static unsigned nth, last, variant;             /* calls nth to last fail, with the first or the second errno of their list */
static int without_fallocate;                   /* as on a file system that has no such call */
static void *blocks[BLOCKS_MAX];                /* what extensions have allocated and nobody has freed */
static char first_failed[128];
static struct { const char *call; unsigned count; } tallies[TALLIES];

/* -- who calls ------------------------------------------------------------------------------------------------------------- */

static int who_is(const char *file)
{
    if (strstr(file, "/shmkv/_")) return EXTENSION;
    if (strstr(file, "/posix_ipc")) return POSIX_IPC;
    return strstr(file, "/libpython") || !*file ? PYTHON : STRANGER;    /* "": the program, a Python without that library */
}

static int note_object(struct dl_phdr_info *object, size_t size, void *nothing)
{
    int i, who = who_is(object->dlpi_name);
    (void)size, (void)nothing;
    for (i = 0; who != STRANGER && i < object->dlpi_phnum; i++)
        if (object->dlpi_phdr[i].p_type == PT_LOAD && object->dlpi_phdr[i].p_flags & PF_X && maps_known < MAPS_MAX) {
            maps[maps_known].begin = object->dlpi_addr + object->dlpi_phdr[i].p_vaddr;
            maps[maps_known].end = maps[maps_known].begin + object->dlpi_phdr[i].p_memsz;
            maps[maps_known++].who = who;
        }
    return 0;
}

static int caller_of(const void *address)
{
    int i;
    for (i = 0; i < maps_known; i++)
        if ((uintptr_t)address >= maps[i].begin && (uintptr_t)address < maps[i].end) return maps[i].who;
    return STRANGER;
}

static void *real(const char *name)
{
    return dlsym(RTLD_NEXT, name);
}

static int is_ours(const char *path)
{
    return strncmp(path, "/dev/shm", 8) == 0 || strncmp(path, "/proc/", 6) == 0 || strncmp(path, "/sys/fs/cgroup", 14) == 0;
}

static int is_ours_open(int fd)
{
    char link[64], path[256];
    ssize_t length;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return is_ours(path);
}

/* -- does this one fail ------------------------------------------------------------------------------------------------------ */

static void tally(const char *call)
{
    int i;
    for (i = 0; i < TALLIES - 1 && tallies[i].call && strcmp(tallies[i].call, call) != 0; i++) {}
    tallies[i].call = call;
    tallies[i].count++;
}

/* 0, or the errno with which this call fails: `once` is what a call that fails once may say that could not be said for ever. */
static int next_call(const char *call, const void *caller, int first, int second, int once)
{
    unsigned place = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    Dl_info info;
    if (nth == 0) tally(call);
    if (nth == 0 || place < nth || place > last) return 0;
    if (__atomic_add_fetch(&failed, 1, __ATOMIC_SEQ_CST) == 1) {
        info.dli_sname = info.dli_fname = NULL;
        dladdr(caller, &info);
        snprintf(first_failed, sizeof first_failed, "%s from %s", call, info.dli_fname && strrchr(info.dli_fname, '/')
                 ? strrchr(info.dli_fname, '/') + 1 : "?");
    }
    return variant == 0 ? first : last == nth && once ? once : second;
}

static int counts(const void *caller, int fd, const char *path)
{
    int who;
    if (!__atomic_load_n(&armed, __ATOMIC_ACQUIRE)) return 0;
    who = caller_of(caller);
    return who == EXTENSION || who == POSIX_IPC || (who == PYTHON && (path ? is_ours(path) : fd >= 0 && is_ours_open(fd)));
}

/* `number` is the errno with which the call fails, 0 when it is made. */
#define DECIDE_ONCE(call, fd, path, first, second, once) \
    int number = counts(CALLER, fd, path) ? next_call(call, CALLER, first, second, once) : 0
#define DECIDE(call, fd, path, first, second) DECIDE_ONCE(call, fd, path, first, second, 0)

/* -- for the program: nth_scan once, then nth_arm, the calls, nth_disarm --------------------------------------------------------- */

void nth_scan(void)
{
    maps_known = 0;
    dl_iterate_phdr(note_object, NULL);
}

void nth_arm(unsigned from, unsigned to, unsigned which)
{
    seen = failed = 0;
    first_failed[0] = 0;
    memset(tallies, 0, sizeof tallies);
    nth = from, last = to, variant = which;
    __atomic_store_n(&armed, 1, __ATOMIC_RELEASE);
}

void nth_disarm(void) { __atomic_store_n(&armed, 0, __ATOMIC_RELEASE); }
void nth_without_fallocate(int yes) { without_fallocate = yes; }
unsigned nth_seen(void) { return seen; }
unsigned nth_failed(void) { return failed; }
unsigned nth_blocks(void)
{
    unsigned i, count = 0;
    for (i = 0; i < BLOCKS_MAX; i++) count += blocks[i] != NULL;
    return count;
}
unsigned nth_extensions(void)
{
    unsigned count = 0;
    int i;
    for (i = 0; i < maps_known; i++) count += maps[i].who == EXTENSION;
    return count;
}
const char *nth_first_failed(void) { return first_failed; }
const char *nth_tally_name(unsigned place) { return place < TALLIES ? tallies[place].call : NULL; }
unsigned nth_tally_count(unsigned place) { return place < TALLIES ? tallies[place].count : 0; }

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
