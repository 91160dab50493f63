/* Makes one call of the file system fail, or ends the process at it.
 *
 * Loaded by LD_PRELOAD. After `inject_arm`, every call that changes a file below a folder is
 * counted, whoever makes it (Python, torch, safetensors), and the call with a number has a fault.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, KILL, TORN, FULL, BROKEN, READ_ONLY, VANISHED };
/* What a call needs: FULL refuses those that need space, READ_ONLY all of them. */
enum { SPACE, NO_SPACE };

static char folder[PATH_MAX];
static size_t length;
static atomic_long count;
static long at;
static int mode;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void inject_arm(const char *below, int what, long number) {
    strncpy(folder, below, sizeof folder - 1);
    length = strlen(folder);
    atomic_store(&count, 0);
    mode = what;
    at = number;
}

long inject_count(void) { return atomic_load(&count); }

static int is_below(const char *path) {
    return !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

static int of_descriptor(int descriptor, char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(name, path, PATH_MAX - 1);
    path[size < 0 ? 0 : size] = 0;
    return size > 0;
}

static int watched(int directory, const char *path) {
    char whole[2 * PATH_MAX] = "";
    if (!length || !path) return 0;
    if (path[0] == '/') return is_below(path);
    if (directory == AT_FDCWD) {
        if (!getcwd(whole, PATH_MAX)) return 0;
    } else if (!of_descriptor(directory, whole)) {
        return 0;
    }
    size_t size = strlen(whole);
    snprintf(whole + size, PATH_MAX, "/%s", path);
    return is_below(whole);
}

static int watched_descriptor(int descriptor) {
    char path[PATH_MAX];
    return length && of_descriptor(descriptor, path) && is_below(path);
}

/* Returns an error number, or 0 where the call is to be made; -1 for a write of which only a part
 * succeeds. */
static int fault(int needs, int is_write) {
    long number = atomic_fetch_add(&count, 1) + 1;
    if (!mode || number < at) return 0;
    switch (mode) {
    case KILL:
        kill(getpid(), SIGKILL);
        for (;;) pause();
    case TORN:
        if (number == at && is_write) return -1;
        if (number > at) {
            kill(getpid(), SIGKILL);
            for (;;) pause();
        }
        return 0;
    case FULL:
        if (number == at && is_write) return -1;
        return needs == SPACE ? ENOSPC : 0;
    case BROKEN:
        return number == at ? EIO : 0;
    case READ_ONLY:
        return EROFS;
    case VANISHED:
        if (number == at) {
            char gone[PATH_MAX + 8];
            snprintf(gone, sizeof gone, "%s.gone", folder);
            REAL(rename)(folder, gone);
        }
    }
    return 0;
}

#define CHECK(is_watched, needs)                 \
    if (is_watched) {                            \
        int error = fault(needs, 0);             \
        if (error > 0) {                         \
            errno = error;                       \
            return -1;                           \
        }                                        \
    }

#define OPEN(name, declared, passed, directory)                                              \
    int name declared {                                                                      \
        mode_t permissions = 0;                                                              \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                 \
            va_list rest;                                                                    \
            va_start(rest, flags);                                                           \
            permissions = va_arg(rest, mode_t);                                              \
            va_end(rest);                                                                    \
        }                                                                                    \
        int changes = flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR);                       \
        CHECK(changes && watched(directory, path), SPACE)                                    \
        return REAL(name) passed;                                                            \
    }

OPEN(open, (const char *path, int flags, ...), (path, flags, permissions), AT_FDCWD)
OPEN(open64, (const char *path, int flags, ...), (path, flags, permissions), AT_FDCWD)
OPEN(openat, (int at_, const char *path, int flags, ...), (at_, path, flags, permissions), at_)
OPEN(openat64, (int at_, const char *path, int flags, ...), (at_, path, flags, permissions), at_)

#define FOPEN(name)                                                        \
    FILE *name(const char *path, const char *how) {                        \
        if (strpbrk(how, "wa+") && watched(AT_FDCWD, path)) {              \
            int error = fault(SPACE, 0);                                   \
            if (error > 0) {                                               \
                errno = error;                                             \
                return NULL;                                               \
            }                                                              \
        }                                                                  \
        return REAL(name)(path, how);                                      \
    }

FOPEN(fopen)
FOPEN(fopen64)

#define CALL(name, declared, passed, is_watched, needs) \
    int name declared {                                 \
        CHECK(is_watched, needs)                        \
        return REAL(name) passed;                       \
    }

CALL(fsync, (int f), (f), watched_descriptor(f), SPACE)
CALL(fdatasync, (int f), (f), watched_descriptor(f), SPACE)
CALL(ftruncate, (int f, off_t size), (f, size), watched_descriptor(f), NO_SPACE)
CALL(ftruncate64, (int f, off64_t size), (f, size), watched_descriptor(f), NO_SPACE)
CALL(mkdir, (const char *p, mode_t m), (p, m), watched(AT_FDCWD, p), SPACE)
CALL(mkdirat, (int d, const char *p, mode_t m), (d, p, m), watched(d, p), SPACE)
CALL(rmdir, (const char *p), (p), watched(AT_FDCWD, p), NO_SPACE)
CALL(unlink, (const char *p), (p), watched(AT_FDCWD, p), NO_SPACE)
CALL(unlinkat, (int d, const char *p, int flags), (d, p, flags), watched(d, p), NO_SPACE)
CALL(symlink, (const char *t, const char *p), (t, p), watched(AT_FDCWD, p), SPACE)
CALL(symlinkat, (const char *t, int d, const char *p), (t, d, p), watched(d, p), SPACE)
CALL(link, (const char *from, const char *to), (from, to), watched(AT_FDCWD, to), SPACE)
CALL(linkat, (int d, const char *from, int e, const char *to, int flags),
     (d, from, e, to, flags), watched(e, to), SPACE)
CALL(truncate, (const char *p, off_t size), (p, size), watched(AT_FDCWD, p), NO_SPACE)
CALL(truncate64, (const char *p, off64_t size), (p, size), watched(AT_FDCWD, p), NO_SPACE)
CALL(fallocate, (int f, int how, off_t o, off_t n), (f, how, o, n), watched_descriptor(f), SPACE)
CALL(fallocate64, (int f, int how, off64_t o, off64_t n), (f, how, o, n), watched_descriptor(f),
     SPACE)
CALL(chmod, (const char *p, mode_t m), (p, m), watched(AT_FDCWD, p), NO_SPACE)
CALL(fchmod, (int f, mode_t m), (f, m), watched_descriptor(f), NO_SPACE)
CALL(fchmodat, (int d, const char *p, mode_t m, int flags), (d, p, m, flags), watched(d, p),
     NO_SPACE)
CALL(utimensat, (int d, const char *p, const struct timespec times[2], int flags),
     (d, p, times, flags), watched(d, p), NO_SPACE)
CALL(rename, (const char *from, const char *to), (from, to),
     watched(AT_FDCWD, from) || watched(AT_FDCWD, to), NO_SPACE)
CALL(renameat, (int d, const char *from, int e, const char *to), (d, from, e, to),
     watched(d, from) || watched(e, to), NO_SPACE)
CALL(renameat2, (int d, const char *from, int e, const char *to, unsigned flags),
     (d, from, e, to, flags), watched(d, from) || watched(e, to), NO_SPACE)

#define WRITE(name, declared, passed, half, f, size)         \
    ssize_t name declared {                                  \
        if (watched_descriptor(f)) {                         \
            int error = fault(SPACE, (size) > 1);            \
            if (error < 0) return REAL(name) half;           \
            if (error > 0) {                                 \
                errno = error;                               \
                return -1;                                   \
            }                                                \
        }                                                    \
        return REAL(name) passed;                            \
    }

WRITE(write, (int f, const void *b, size_t n), (f, b, n), (f, b, n / 2), f, n)
WRITE(pwrite, (int f, const void *b, size_t n, off_t o), (f, b, n, o), (f, b, n / 2, o), f, n)
WRITE(pwrite64, (int f, const void *b, size_t n, off64_t o), (f, b, n, o), (f, b, n / 2, o), f, n)
WRITE(writev, (int f, const struct iovec *v, int n), (f, v, n), (f, v, n / 2), f, n)
WRITE(pwritev, (int f, const struct iovec *v, int n, off_t o), (f, v, n, o), (f, v, n / 2, o), f, n)
WRITE(pwritev64, (int f, const struct iovec *v, int n, off64_t o), (f, v, n, o),
      (f, v, n / 2, o), f, n)
WRITE(sendfile, (int f, int g, off_t *o, size_t n), (f, g, o, n), (f, g, o, n / 2), f, n)
WRITE(sendfile64, (int f, int g, off64_t *o, size_t n), (f, g, o, n), (f, g, o, n / 2), f, n)
WRITE(copy_file_range, (int g, off64_t *p, int f, off64_t *o, size_t n, unsigned flags),
      (g, p, f, o, n, flags), (g, p, f, o, n / 2, flags), f, n)
