/* Which calls count and which of them fail: told by the address that a call returns to, and by what the program has asked for. */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CALLER __builtin_return_address(0)
#define REAL(name) ((__typeof__(&name))real(#name))
#define FAIL(answer) do { errno = number; return answer; } while (0)

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
