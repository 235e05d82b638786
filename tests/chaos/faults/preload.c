/* Fails the n-th call that changes a disk, for any program: cc -shared -fPIC, LD_PRELOAD.
 *
 * Only calls on files under one root count. What may happen is the Fault of faults/injector.py,
 * with the same numbers. No sync is really done: a process that dies loses no page of the
 * kernel's. Stores through mmap are not seen.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, KILL, KILL_AFTER, TORN, IO_ERROR, DEAD, NO_SPACE, FULL, SHORT, INTERRUPT, LOST };
enum { NEEDS_SPACE = 1, IS_WRITE = 2 };
enum { MAX_CALLS = 4096, MAX_PATH = 4096 };

static char root[MAX_PATH];
static const char *names[MAX_CALLS];
static long count, point;
static int fault, armed;

void faults_arm(const char *path, long at, int what) {
    snprintf(root, sizeof root, "%s/", path);
    count = 0, point = at, fault = what, armed = 1;
}

long faults_disarm(void) { return armed = 0, count; }

const char *faults_call(long number) { return names[number % MAX_CALLS]; }

static int is_below(const char *path) { return !strncmp(path, root, strlen(root)); }

static int is_root(const char *path) {
    return strlen(path) + 1 == strlen(root) && !strncmp(path, root, strlen(path));
}

static int fd_counts(int fd) {
    char link[64], path[MAX_PATH];
    if (!armed) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_below(path) || is_root(path);
}

static int path_counts(int directory, const char *path) {
    if (!armed) return 0;
    if (path[0] == '/') return is_below(path);
    return directory != AT_FDCWD && fd_counts(directory);
}

static void die(void) { kill(getpid(), SIGKILL); }

/* Count a call; what happens to it. Errors are set in errno. */
static int met(const char *name, int kind) {
    names[count++ % MAX_CALLS] = name;
    int what = count == point ? fault : NONE;
    if (count > point && point > 0 && (fault == DEAD || (fault == FULL && kind & NEEDS_SPACE)))
        what = fault;
    if (what == KILL) die();
    if (what == IO_ERROR || what == DEAD || what == LOST) errno = EIO;
    if (what == NO_SPACE || what == FULL) errno = ENOSPC;
    if (what == INTERRUPT) errno = EINTR;
    return what;
}

static int fails(int what) {
    return what == IO_ERROR || what == DEAD || what == NO_SPACE || what == FULL ||
           what == INTERRUPT || what == LOST;
}

#define REAL(name) \
    static typeof(name) *real; \
    if (!real) real = (typeof(name) *)dlsym(RTLD_NEXT, #name)

/* A call that either happens or does not. */
#define WHOLE(label, counts, kind, failed, call) \
    do { \
        if (!(counts)) return call; \
        int what = met(label, kind); \
        if (fails(what)) return failed; \
        typeof(call) done = call; \
        if (what == KILL_AFTER) die(); \
        return done; \
    } while (0)

/* A write of `size` bytes, of which a disk may take half. */
#define PARTIAL(fd, size, call_of) \
    do { \
        size_t asked = (size); \
        if (!fd_counts(fd)) return call_of(asked); \
        int what = met("write", NEEDS_SPACE | IS_WRITE); \
        if (fails(what)) return -1; \
        if (what == TORN || what == SHORT) asked = asked / 2 ? asked / 2 : 1; \
        ssize_t done = call_of(asked); \
        if (what == TORN || what == KILL_AFTER) die(); \
        return done; \
    } while (0)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(write);
#define CALL(n) real(fd, data, n)
    PARTIAL(fd, size, CALL);
#undef CALL
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(pwrite64);
#define CALL(n) real(fd, data, n, at)
    PARTIAL(fd, size, CALL);
#undef CALL
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    return pwrite64(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int number) {
    REAL(writev);
    WHOLE("write", fd_counts(fd), NEEDS_SPACE, -1, real(fd, parts, number));
}

static int synced(int fd) {
    struct stat found;
    if (!fd_counts(fd)) return 0;
    int what = met("fsync", NEEDS_SPACE);
    if (what == LOST && !fstat(fd, &found) && S_ISREG(found.st_mode)) {
        armed = 0; /* what was to be synced is gone */
        if (ftruncate(fd, 0) || ftruncate(fd, found.st_size)) die();
        armed = 1, errno = EIO;
    }
    if (what == KILL_AFTER) die();
    return fails(what) ? -1 : 0;
}

int fsync(int fd) { return synced(fd); }

int fdatasync(int fd) { return synced(fd); }

int ftruncate64(int fd, off64_t size) {
    REAL(ftruncate64);
    WHOLE("ftruncate", fd_counts(fd), 0, -1, real(fd, size));
}

int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int posix_fallocate64(int fd, off64_t at, off64_t size) {
    REAL(posix_fallocate64);
    WHOLE("posix_fallocate", fd_counts(fd), NEEDS_SPACE, errno, real(fd, at, size));
}

int posix_fallocate(int fd, off_t at, off_t size) { return posix_fallocate64(fd, at, size); }

#define CHANGES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define MODE(flags) \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = va_arg(rest, mode_t); \
    va_end(rest)

int open64(const char *path, int flags, ...) {
    REAL(open64);
    MODE(flags);
    int counts = CHANGES(flags) && path_counts(AT_FDCWD, path);
    WHOLE("open", counts, NEEDS_SPACE, -1, real(path, flags, mode));
}

int open(const char *path, int flags, ...) {
    MODE(flags);
    return open64(path, flags, mode);
}

int openat64(int directory, const char *path, int flags, ...) {
    REAL(openat64);
    MODE(flags);
    int counts = CHANGES(flags) && path_counts(directory, path);
    WHOLE("open", counts, NEEDS_SPACE, -1, real(directory, path, flags, mode));
}

int openat(int directory, const char *path, int flags, ...) {
    MODE(flags);
    return openat64(directory, path, flags, mode);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    WHOLE("rename", path_counts(AT_FDCWD, to), NEEDS_SPACE, -1, real(from, to));
}

int renameat(int from_directory, const char *from, int to_directory, const char *to) {
    REAL(renameat);
    int counts = path_counts(to_directory, to);
    WHOLE("rename", counts, NEEDS_SPACE, -1, real(from_directory, from, to_directory, to));
}

int link(const char *from, const char *to) {
    REAL(link);
    WHOLE("link", path_counts(AT_FDCWD, to), NEEDS_SPACE, -1, real(from, to));
}

int linkat(int from_directory, const char *from, int to_directory, const char *to, int flags) {
    REAL(linkat);
    int counts = path_counts(to_directory, to);
    WHOLE("link", counts, NEEDS_SPACE, -1, real(from_directory, from, to_directory, to, flags));
}

int unlink(const char *path) {
    REAL(unlink);
    WHOLE("unlink", path_counts(AT_FDCWD, path), 0, -1, real(path));
}

int unlinkat(int directory, const char *path, int flags) {
    REAL(unlinkat);
    const char *name = flags & AT_REMOVEDIR ? "rmdir" : "unlink";
    WHOLE(name, path_counts(directory, path), 0, -1, real(directory, path, flags));
}

int rmdir(const char *path) {
    REAL(rmdir);
    WHOLE("rmdir", path_counts(AT_FDCWD, path), 0, -1, real(path));
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    WHOLE("mkdir", path_counts(AT_FDCWD, path), NEEDS_SPACE, -1, real(path, mode));
}
