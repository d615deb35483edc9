/* Writes and syncs of files whose path contains DISK_PATH fail with DISK_ERRNO, from the DISK_FROM-th of a
 * process on, unless the file DISK_OFF exists. For LD_PRELOAD. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static long count;

static int fails(int fd, int syncs) {
    const char *path = getenv("DISK_PATH"), *from = getenv("DISK_FROM"), *number = getenv("DISK_ERRNO");
    const char *what = getenv("DISK_CALLS"), *off = getenv("DISK_OFF");
    char link[64], target[4096];
    if (!path || !from || !number || (what && (strcmp(what, "sync") == 0) != syncs)) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, target, sizeof target - 1);
    errno = before;
    if (length < 0) return 0;
    target[length] = 0;
    if (!strstr(target, path)) return 0;
    if (__atomic_add_fetch(&count, 1, __ATOMIC_RELAXED) < atol(from)) return 0;
    if (off && access(off, F_OK) == 0) { errno = before; return 0; }
    errno = atoi(number);
    return 1;
}

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    return fails(fd, 0) ? -1 : real(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *pieces, int n) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    return fails(fd, 0) ? -1 : real(fd, pieces, n);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, "pwrite", int, const void *, size_t, off_t);
    return fails(fd, 0) ? -1 : real(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off64_t);
    return fails(fd, 0) ? -1 : real(fd, data, size, at);
}
ssize_t pwritev(int fd, const struct iovec *pieces, int n, off_t at) {
    REAL(ssize_t, "pwritev", int, const struct iovec *, int, off_t);
    return fails(fd, 0) ? -1 : real(fd, pieces, n, at);
}
int fsync(int fd) {
    REAL(int, "fsync", int);
    return fails(fd, 1) ? -1 : real(fd);
}
int fdatasync(int fd) {
    REAL(int, "fdatasync", int);
    return fails(fd, 1) ? -1 : real(fd);
}
