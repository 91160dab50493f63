/* A clock that is set an hour forward and back all the time.
 *
 * Loaded by LD_PRELOAD. Each time of day that is asked for is the true one, an hour later or an hour
 * earlier, in turns; monotonic clocks are left alone.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/time.h>
#include <time.h>

static atomic_long count;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static long offset(void) { return (atomic_fetch_add(&count, 1) % 3 - 1) * 3600; }

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = REAL(clock_gettime)(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += offset();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = REAL(gettimeofday)(now, zone);
    if (!failed) now->tv_sec += offset();
    return failed;
}

time_t time(time_t *now) {
    time_t found = REAL(time)(0) + offset();
    if (now) *now = found;
    return found;
}
