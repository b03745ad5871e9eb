/* Loaded before libc: CLOCK_REALTIME as the process sees it stands as many seconds off as shift_clock_to() said last. */
#define _GNU_SOURCE 1
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

static volatile long long shift = 0;

void shift_clock_to(long long seconds) { shift = seconds; }

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int status = ((int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime"))(clock, now);
    if (status == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift;
    return status;
}

int gettimeofday(struct timeval *now, void *zone)
{
    int status = ((int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday"))(now, zone);
    if (status == 0) now->tv_sec += shift;
    return status;
}

time_t time(time_t *now)
{
    time_t found = ((time_t (*)(time_t *))dlsym(RTLD_NEXT, "time"))(NULL) + shift;
    if (now) *now = found;
    return found;
}
