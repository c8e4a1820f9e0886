/* Preloaded into a worker (LD_PRELOAD): counts the calls that change files below CALLS_DIR, and
 * does something at one of them.
 *
 * CALLS_LOG   each call is appended: "RANK PID CALL done PATH [-> PATH]"; E28 and not done
 *             where it failed with that errno; "hit" before the act
 * CALLS_AT    create:3, write:12, sync:1, rename:2, remove:1, mkdir:1: the third of its kind in a
 *             process, from the first call on that concerns a checkpoint (step_N or last)
 * CALLS_RANK  only the process with this RANK acts; unset: each
 * CALLS_DO    signal:N:before, signal:N:after   send it to CALLS_WHOM: self, parent or both
 *             error:N:once, error:N:always      it fails so; always: and all later ones that need room
 *             hold:FILE                         wait until FILE is there
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { CREATE, WRITE, SYNC, RENAME, REMOVE, MKDIR, KINDS };
static const char *const NAMES[KINDS] = {"create", "write", "sync", "rename", "remove", "mkdir"};
static int counts[KINDS];
static int is_saving; /* the first call that concerns a checkpoint has come */
static int is_full; /* errno of `error:N:always`, once it was met */

struct call {
    enum kind kind;
    int is_hit;
    char path[PATH_MAX];
};

static const char *setting(const char *name)
{
    const char *text = getenv(name);
    return text ? text : "";
}

/* Where `name` lies, all links of its directory followed; 0: not below CALLS_DIR. */
static int locate(int dirfd, const char *name, char *out)
{
    char near[PATH_MAX], parent[PATH_MAX], link[64];
    const char *below = setting("CALLS_DIR");
    if (!*below || !name) return 0;
    if (*name == '/' || dirfd == AT_FDCWD) {
        if (snprintf(near, sizeof near, "%s", name) >= (int)sizeof near) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", dirfd);
        if (snprintf(near, sizeof near, "%s/%s", link, name) >= (int)sizeof near) return 0;
    }
    char *slash = strrchr(near, '/');
    const char *base = slash ? slash + 1 : near;
    if (slash) *slash = 0;
    if (!realpath(slash ? (*near ? near : "/") : ".", parent)) return 0;
    if (snprintf(out, PATH_MAX, "%s/%s", parent, base) >= PATH_MAX) return 0;
    return !strncmp(out, below, strlen(below));
}

/* Python's handler of a signal writes to a pipe, on a small stack of its own. */
static int is_file(int fd)
{
    struct stat found;
    return fd > 2 && !fstat(fd, &found) && S_ISREG(found.st_mode);
}

static int locate_file(int fd, char *out)
{
    char link[64];
    const char *below = setting("CALLS_DIR");
    if (!*below) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) return 0;
    out[length] = 0;
    return !strncmp(out, below, strlen(below));
}

static void note(const char *what, const char *result, const char *path, const char *to)
{
    char line[2 * PATH_MAX + 128];
    const char *rank = getenv("RANK"), *log = setting("CALLS_LOG");
    int fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0) return;
    int length = snprintf(line, sizeof line, "%s %d %s %s %s%s%s\n", rank ? rank : "-",
                          (int)getpid(), what, result, path, to ? " -> " : "", to ? to : "");
    syscall(SYS_write, fd, line, length);
    syscall(SYS_close, fd);
}

static void send_signal(int signum)
{
    const char *whom = setting("CALLS_WHOM");
    if (strcmp(whom, "self")) kill(getppid(), signum);
    if (strcmp(whom, "parent"))
        kill(getpid(), signum);
    else
        while (signum == SIGKILL) pause(); /* until this process ends as its parent's children do */
}

/* Whether CALLS_DO is so: `how` is its last word. */
static int does(const char *what, const char *how, int *number)
{
    char act[16], when[PATH_MAX];
    if (sscanf(setting("CALLS_DO"), "%15[a-z]:%d:%s", act, number, when) != 3) return 0;
    return !strcmp(act, what) && (!how || !strcmp(when, how));
}

static int begin(struct call *call, enum kind kind)
{
    char at[16] = "";
    int number = 0, which = 0, saved = errno;
    const char *rank = getenv("CALLS_RANK"), *own = getenv("RANK"), *what = setting("CALLS_DO");
    call->kind = kind;
    call->is_hit = 0;
    const char *name = call->path + strlen(setting("CALLS_DIR"));
    is_saving |= strstr(name, "step_") || strstr(name, "last");
    if (!is_saving) return 0;
    int count = __atomic_add_fetch(&counts[kind], 1, __ATOMIC_SEQ_CST);
    int acts = *what && (!rank || (own && !strcmp(rank, own)));
    if (acts && sscanf(setting("CALLS_AT"), "%15[a-z]:%d", at, &which) == 2)
        call->is_hit = which == count && !strcmp(at, NAMES[kind]);
    if (call->is_hit && strncmp(what, "signal", 6)) note("hit", NAMES[kind], call->path, NULL);
    if (call->is_hit && !strncmp(what, "hold:", 5))
        while (syscall(SYS_faccessat, AT_FDCWD, what + 5, F_OK)) usleep(2000);
    if (call->is_hit && does("signal", "before", &number)) {
        note("hit", NAMES[kind], call->path, NULL);
        send_signal(number);
    }
    if (call->is_hit && does("error", NULL, &number)) {
        if (does("error", "always", &number)) is_full = number;
        return errno = number;
    }
    if (is_full && kind != REMOVE && kind != RENAME) return errno = is_full;
    errno = saved;
    return 0;
}

static long end(struct call *call, long result, const char *to)
{
    int number, saved = errno;
    char error[16];
    snprintf(error, sizeof error, "E%d", saved);
    note(NAMES[call->kind], result < 0 ? error : "done", call->path, to);
    if (call->is_hit && does("signal", "after", &number)) {
        note("hit", NAMES[call->kind], call->path, to);
        send_signal(number);
    }
    errno = saved;
    return result;
}

#define AROUND(kind, to, system_call) \
    (begin(&call, kind) ? end(&call, -1, to) : end(&call, (system_call), to))

static int opened(int dirfd, const char *name, int flags, mode_t mode)
{
    struct call call;
    int is_new = (flags & O_CREAT) && locate(dirfd, name, call.path);
    if (!is_new) return syscall(SYS_openat, dirfd, name, flags, mode);
    return AROUND(CREATE, NULL, syscall(SYS_openat, dirfd, name, flags, mode));
}

#define MODE(flags) \
    mode_t mode = 0; \
    va_list rest; \
    va_start(rest, flags); \
    if (flags & (O_CREAT | O_TMPFILE)) mode = va_arg(rest, mode_t); \
    va_end(rest)

int open(const char *name, int flags, ...)
{
    MODE(flags);
    return opened(AT_FDCWD, name, flags, mode);
}

int open64(const char *name, int flags, ...)
{
    MODE(flags);
    return opened(AT_FDCWD, name, flags, mode);
}

int openat(int fd, const char *name, int flags, ...)
{
    MODE(flags);
    return opened(fd, name, flags, mode);
}

int openat64(int fd, const char *name, int flags, ...)
{
    MODE(flags);
    return opened(fd, name, flags, mode);
}

__attribute__((noinline)) static ssize_t written(int fd, const void *data, size_t size)
{
    struct call call;
    if (!locate_file(fd, call.path)) return syscall(SYS_write, fd, data, size);
    return AROUND(WRITE, NULL, syscall(SYS_write, fd, data, size));
}

ssize_t write(int fd, const void *data, size_t size)
{
    return is_file(fd) ? written(fd, data, size) : syscall(SYS_write, fd, data, size);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
{
    struct call call;
    if (!locate_file(fd, call.path)) return syscall(SYS_pwrite64, fd, data, size, at);
    return AROUND(WRITE, NULL, syscall(SYS_pwrite64, fd, data, size, at));
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
{
    return pwrite64(fd, data, size, at);
}

ssize_t writev(int fd, const struct iovec *parts, int num)
{
    struct call call;
    if (fd < 3 || !locate_file(fd, call.path)) return syscall(SYS_writev, fd, parts, num);
    return AROUND(WRITE, NULL, syscall(SYS_writev, fd, parts, num));
}

static int synced(int fd, long number)
{
    struct call call;
    if (!locate_file(fd, call.path)) return syscall(number, fd);
    return AROUND(SYNC, NULL, syscall(number, fd));
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags)
{
    struct call call;
    char target[PATH_MAX];
    int is_ours = locate(to, new, target) | locate(from, old, call.path);
    if (!is_ours) return syscall(SYS_renameat2, from, old, to, new, flags);
    return AROUND(RENAME, target, syscall(SYS_renameat2, from, old, to, new, flags));
}

int renameat(int from, const char *old, int to, const char *new)
{
    return renameat2(from, old, to, new, 0);
}

int rename(const char *old, const char *new)
{
    return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int linkat(int from, const char *old, int to, const char *new, int flags)
{
    struct call call;
    char target[PATH_MAX];
    int is_ours = locate(to, new, target) | locate(from, old, call.path);
    if (!is_ours) return syscall(SYS_linkat, from, old, to, new, flags);
    return AROUND(RENAME, target, syscall(SYS_linkat, from, old, to, new, flags));
}

int link(const char *old, const char *new)
{
    return linkat(AT_FDCWD, old, AT_FDCWD, new, 0);
}

int unlinkat(int fd, const char *name, int flags)
{
    struct call call;
    if (!locate(fd, name, call.path)) return syscall(SYS_unlinkat, fd, name, flags);
    return AROUND(REMOVE, NULL, syscall(SYS_unlinkat, fd, name, flags));
}

int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int fd, const char *name, mode_t mode)
{
    struct call call;
    if (!locate(fd, name, call.path)) return syscall(SYS_mkdirat, fd, name, mode);
    return AROUND(MKDIR, NULL, syscall(SYS_mkdirat, fd, name, mode));
}

int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
