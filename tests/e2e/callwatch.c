/* Preloaded into a daemon: tells of each system call on files below CALLWATCH_BELOW, and which thread made it. A line of
 * CALLWATCH_LOG: "loop" (the process's first thread) or "lane", the call, the path. With CALLWATCH_BLOCKING, also of
 * writes by the first thread to descriptors that may block and are no regular files: "loop blocking-write FD". */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>

struct iovec;
long syscall(long number, ...);
typedef long offset;

/* Longer paths are cut off. All that a call needs of the stack must stay small: Python's signal handlers call write() on
 * an alternate stack of a few KiB, which lies in the heap. */
enum { PATH_BYTES = 512, LINE_BYTES = PATH_BYTES + 64 };

static int is_below(const char *path) {
    const char *below = getenv("CALLWATCH_BELOW");
    return below && path[0] == '/' && !strncmp(path, below, strlen(below));
}

static void write_line(const char *call, const char *path) {
    const char *log = getenv("CALLWATCH_LOG");
    char line[LINE_BYTES];
    int first = syscall(SYS_gettid) == syscall(SYS_getpid);
    int size = snprintf(line, sizeof line, "%s %s %s\n", first ? "loop" : "lane", call, path);
    if (size >= (int)sizeof line) size = sizeof line - 1;
    int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0) return;
    syscall(SYS_write, fd, line, (long)size);
    syscall(SYS_close, fd);
}

static int path_of(int fd, char *path, int size) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int length = syscall(SYS_readlinkat, AT_FDCWD, link, path, (long)(size - 1));
    path[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static void look_fd(const char *call, int fd) {
    char path[PATH_BYTES];
    if (path_of(fd, path, sizeof path) && is_below(path)) write_line(call, path);
}

static void look_at(const char *call, int dir_fd, const char *name) {
    char path[PATH_BYTES] = "", full[PATH_BYTES];
    if (!name) return;
    if (!strncmp(name, "/proc/self/fd/", 14)) {
        look_fd(call, atoi(name + 14));
    } else if (name[0] == '/') {
        if (is_below(name)) write_line(call, name);
    } else if (dir_fd != AT_FDCWD && path_of(dir_fd, path, sizeof path) && is_below(path)) {
        snprintf(full, sizeof full, "%s/%s", path, name);
        write_line(call, full);
    }
}

static void look_blocking(int fd) {
    char path[PATH_BYTES], text[32];
    if (!getenv("CALLWATCH_BLOCKING") || syscall(SYS_gettid) != syscall(SYS_getpid)) return;
    if (syscall(SYS_fcntl, fd, F_GETFL) & O_NONBLOCK || !path_of(fd, path, sizeof path)) return;
    if (strncmp(path, "pipe:", 5) && strncmp(path, "/dev/", 5) && strncmp(path, "socket:", 7)) return;
    snprintf(text, sizeof text, "%d", fd);
    write_line("blocking-write", text);
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define ON_FD(name, call, result, declared, passed) \
    result name declared; \
    result name declared { REAL(name); look_fd(call, fd); return real passed; }

#define ON_PATH(name, call, result, declared, passed, dir_fd, path) \
    result name declared; \
    result name declared { REAL(name); look_at(call, dir_fd, path); return real passed; }

#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        REAL(name); va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        look_at("open", AT_FDCWD, path); return real(path, flags, mode); }
#define OPENAT(name) \
    int name(int dir_fd, const char *path, int flags, ...) { \
        REAL(name); va_list rest; va_start(rest, flags); int mode = va_arg(rest, int); va_end(rest); \
        look_at("open", dir_fd, path); return real(dir_fd, path, flags, mode); }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
ON_FD(close, "close", int, (int fd), (fd))
ON_FD(read, "read", long, (int fd, void *bytes, unsigned long size), (fd, bytes, size))
ON_FD(pread64, "read", long, (int fd, void *bytes, unsigned long size, offset at), (fd, bytes, size, at))
ON_FD(preadv, "read", long, (int fd, const struct iovec *parts, int count, offset at), (fd, parts, count, at))
ON_FD(preadv64, "read", long, (int fd, const struct iovec *parts, int count, offset at), (fd, parts, count, at))
ON_FD(preadv2, "read", long, (int fd, const struct iovec *p, int n, offset at, int flags), (fd, p, n, at, flags))
ON_FD(preadv64v2, "read", long, (int fd, const struct iovec *p, int n, offset at, int flags), (fd, p, n, at, flags))
ON_FD(pwrite64, "write", long, (int fd, const void *bytes, unsigned long size, offset at), (fd, bytes, size, at))
ON_FD(pwritev, "write", long, (int fd, const struct iovec *parts, int count, offset at), (fd, parts, count, at))
ON_FD(pwritev64, "write", long, (int fd, const struct iovec *parts, int count, offset at), (fd, parts, count, at))
ON_FD(pwritev2, "write", long, (int fd, const struct iovec *p, int n, offset at, int flags), (fd, p, n, at, flags))
ON_FD(pwritev64v2, "write", long, (int fd, const struct iovec *p, int n, offset at, int flags), (fd, p, n, at, flags))
ON_FD(fsync, "sync", int, (int fd), (fd))
ON_FD(fdatasync, "sync", int, (int fd), (fd))
ON_FD(fallocate, "allocate", int, (int fd, int mode, offset at, offset size), (fd, mode, at, size))
ON_FD(fallocate64, "allocate", int, (int fd, int mode, offset at, offset size), (fd, mode, at, size))
ON_FD(posix_fallocate64, "allocate", int, (int fd, offset at, offset size), (fd, at, size))
ON_FD(posix_fadvise64, "advise", int, (int fd, offset at, offset size, int advice), (fd, at, size, advice))
ON_FD(ftruncate64, "truncate", int, (int fd, offset size), (fd, size))
ON_FD(flock, "lock", int, (int fd, int operation), (fd, operation))
ON_FD(fstat64, "stat", int, (int fd, void *found), (fd, found))
ON_FD(fstatvfs64, "stat", int, (int fd, void *found), (fd, found))
ON_FD(fdopendir, "names", void *, (int fd), (fd))
ON_PATH(stat64, "stat", int, (const char *path, void *found), (path, found), AT_FDCWD, path)
ON_PATH(lstat64, "stat", int, (const char *path, void *found), (path, found), AT_FDCWD, path)
ON_PATH(fstatat64, "stat", int, (int dir, const char *path, void *found, int flags), (dir, path, found, flags), dir, path)
ON_PATH(statvfs64, "stat", int, (const char *path, void *found), (path, found), AT_FDCWD, path)
ON_PATH(opendir, "names", void *, (const char *path), (path), AT_FDCWD, path)
ON_PATH(access, "stat", int, (const char *path, int mode), (path, mode), AT_FDCWD, path)
ON_PATH(unlink, "unlink", int, (const char *path), (path), AT_FDCWD, path)
ON_PATH(unlinkat, "unlink", int, (int dir, const char *path, int flags), (dir, path, flags), dir, path)
ON_PATH(rename, "rename", int, (const char *path, const char *to), (path, to), AT_FDCWD, path)
ON_PATH(renameat, "rename", int, (int dir, const char *path, int to_dir, const char *to), (dir, path, to_dir, to), dir, path)
ON_PATH(mkdir, "make", int, (const char *path, unsigned mode), (path, mode), AT_FDCWD, path)
ON_PATH(mkdirat, "make", int, (int dir, const char *path, unsigned mode), (dir, path, mode), dir, path)

long write(int fd, const void *bytes, unsigned long size);
long write(int fd, const void *bytes, unsigned long size) {
    REAL(write);
    look_fd("write", fd);
    look_blocking(fd);
    return real(fd, bytes, size);
}

long writev(int fd, const struct iovec *parts, int count);
long writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    look_fd("write", fd);
    look_blocking(fd);
    return real(fd, parts, count);
}
