/* Loaded before libc: writes down every open, sizing and removal, and lets posix_fallocate fail on demand.
   A line: pid, call, path, flags, mode or length, result, F_GETFL, F_GETFD, separated by tabs. */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void note(const char *call, const char *path, long flags, long mode, long result)
{
    const char *log = getenv("INTERPOSE_LOG");
    char line[1024];
    int saved = errno, fd, opened = strcmp(call, "open") == 0 || strcmp(call, "shm_open") == 0;
    long status = opened && result >= 0 ? fcntl((int)result, F_GETFL) : 0;
    long descriptor = opened && result >= 0 ? fcntl((int)result, F_GETFD) : 0;
    int length = snprintf(line, sizeof line, "%d\t%s\t%s\t%ld\t%ld\t%ld\t%ld\t%ld\n", (int)getpid(), call,
                          path, flags, mode, result, status, descriptor);
    if (log && length > 0 && length < (int)sizeof line) {
        fd = (int)syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CLOEXEC);
        if (fd >= 0) {
            if (syscall(SYS_write, fd, line, length) < 0) abort();
            syscall(SYS_close, fd);
        }
    }
    errno = saved;
}

static int calls_in_shm = 0;

/* Before each call on a file in /dev/shm: is this the one to die at? */
static void count(const char *path)
{
    const char *at = getenv("INTERPOSE_KILL_AT");
    if (strncmp(path, "/dev/shm/", 9) == 0 && at && ++calls_in_shm == atoi(at)) raise(SIGKILL);
}

static const char *path_of(int fd, char *path, size_t room)
{
    char link[64];
    ssize_t length;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    length = readlink(link, path, room - 1);
    path[length < 0 ? 0 : length] = 0;
    return path;
}

int shm_open(const char *name, int flags, mode_t mode)
{
    char path[512];
    int fd;
    snprintf(path, sizeof path, "/dev/shm%s%s", *name == '/' ? "" : "/", name);
    count(path);
    fd = REAL(shm_open)(name, flags, mode);
    note("shm_open", path, flags, mode, fd);
    return fd;
}

int shm_unlink(const char *name)
{
    char path[512];
    int status;
    snprintf(path, sizeof path, "/dev/shm%s%s", *name == '/' ? "" : "/", name);
    count(path);
    status = REAL(shm_unlink)(name);
    note("unlink", path, 0, 0, status);
    return status;
}

int unlink(const char *path)
{
    int status = REAL(unlink)(path);
    note("unlink", path, 0, 0, status);
    return status;
}

#define OPEN(name)                                                                                  \
    int name(const char *path, int flags, ...)                                                      \
    {                                                                                               \
        int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        mode_t mode = 0;                                                                            \
        int fd;                                                                                     \
        if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        fd = real(path, flags, mode);                                                               \
        note("open", path, flags, mode, fd);                                                        \
        return fd;                                                                                  \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                                \
    int name(int at, const char *path, int flags, ...)                                              \
    {                                                                                               \
        int (*real)(int, const char *, int, ...) = (int (*)(int, const char *, int, ...))dlsym(RTLD_NEXT, #name); \
        mode_t mode = 0;                                                                            \
        int fd;                                                                                     \
        if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
        fd = real(at, path, flags, mode);                                                           \
        note("open", path, flags, mode, fd);                                                        \
        return fd;                                                                                  \
    }
OPENAT(openat)
OPENAT(openat64)

/* What a compiler that fortifies calls for an open without a mode. */
#define OPEN_2(name)                                                                                \
    int name(const char *path, int flags)                                                           \
    {                                                                                               \
        int fd = ((int (*)(const char *, int))dlsym(RTLD_NEXT, #name))(path, flags);                \
        note("open", path, flags, 0, fd);                                                           \
        return fd;                                                                                  \
    }
OPEN_2(__open_2)
OPEN_2(__open64_2)

#define SIZE(name, type)                                                                            \
    int name(int fd, type length)                                                                   \
    {                                                                                               \
        char path[512];                                                                             \
        int status;                                                                                 \
        count(path_of(fd, path, sizeof path));                                                      \
        status = ((int (*)(int, type))dlsym(RTLD_NEXT, #name))(fd, length);                         \
        note("ftruncate", path, 0, (long)length, status);                 \
        return status;                                                                              \
    }
SIZE(ftruncate, off_t)
SIZE(ftruncate64, off64_t)

static int interruptions = 3;

static int fault(void)
{
    const char *wanted = getenv("INTERPOSE_FAULT");
    if (wanted && strcmp(wanted, "unsupported") == 0) return EOPNOTSUPP;
    if (wanted && strcmp(wanted, "interrupted") == 0 && interruptions-- > 0) return EINTR;
    return 0;
}

#define RESERVE(name, type)                                                                         \
    int name(int fd, type offset, type length)                                                      \
    {                                                                                               \
        char path[512];                                                                             \
        int status = fault();                                                                       \
        count(path_of(fd, path, sizeof path));                                                      \
        if (status == 0) status = ((int (*)(int, type, type))dlsym(RTLD_NEXT, #name))(fd, offset, length); \
        note("fallocate", path, (long)offset, (long)length, status);      \
        return status;                                                                              \
    }
RESERVE(posix_fallocate, off_t)
RESERVE(posix_fallocate64, off64_t)
