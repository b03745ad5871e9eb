/* Loaded before libc: stops or kills the process right before its first futex call on shared memory. FUTEX_AT is "wait" (stop) or
   "wake" (SIGKILL). Only the library calls syscall() for a futex without the private flag. */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

static int stopped = 0;

long syscall(long number, ...)
{
    long (*real)(long, ...) = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    const char *at = getenv("FUTEX_AT");
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (int i = 0; i < 6; i++) a[i] = va_arg(rest, long);      /* as many as any system call has */
    va_end(rest);
    if (number == SYS_futex && at != NULL) {
        if ((int)a[1] == FUTEX_WAIT_BITSET && strcmp(at, "wait") == 0 && !stopped++) raise(SIGSTOP);
        if ((int)a[1] == FUTEX_WAKE && strcmp(at, "wake") == 0) raise(SIGKILL);
    }
    return real(number, a[0], (int)a[1], a[2], a[3], a[4], a[5]);
}
