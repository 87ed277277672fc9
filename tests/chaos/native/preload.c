// Loaded into a node (LD_PRELOAD) to disturb it from within.
//
//     CHAOS_CLOCK    a file of 8 bytes: nanoseconds that are added to the wall clock, now
//     CHAOS_SYNC     the file /.sync of its lossyfs, which syncfs(2) opens instead
//     CHAOS_UNSYNCED if it is set, no fdatasync reaches the disk: a defect that a run with losses of power finds
//
// Only the Python interpreter sees the other time. Libraries that pass wall-clock deadlines to the kernel would wait for
// ever after a jump of a clock that the kernel does not have.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_ns;
static void *interpreter;
static int (*real_clock_gettime)(clockid_t, struct timespec *);
static int (*real_syncfs)(int);

__attribute__((constructor)) static void set_up(void) {
    real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    real_syncfs = dlsym(RTLD_NEXT, "syncfs");
    const char *path = getenv("CHAOS_CLOCK");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof *offset_ns, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    Dl_info found;
    void *symbol = dlsym(RTLD_DEFAULT, "PyLong_FromLong");
    if (mapped == MAP_FAILED || symbol == NULL || !dladdr(symbol, &found)) return;
    interpreter = found.dli_fbase;
    offset_ns = mapped;
}

static int is_interpreter(void *caller) {
    Dl_info found;
    return offset_ns != NULL && dladdr(caller, &found) && found.dli_fbase == interpreter;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    if (real_clock_gettime == NULL) real_clock_gettime = dlsym(RTLD_NEXT, "clock_gettime");
    int rc = real_clock_gettime(clock, at);
    if (rc == 0 && clock == CLOCK_REALTIME && offset_ns != NULL && *offset_ns != 0 &&
        is_interpreter(__builtin_return_address(0))) {
        int64_t ns = at->tv_sec * 1000000000LL + at->tv_nsec + *offset_ns;
        at->tv_sec = ns / 1000000000LL;
        at->tv_nsec = ns % 1000000000LL;
    }
    return rc;
}

int fdatasync(int fd) { return getenv("CHAOS_UNSYNCED") != NULL ? 0 : (int)syscall(SYS_fdatasync, fd); }

int syncfs(int fd) {
    if (getenv("CHAOS_UNSYNCED") != NULL) return 0;
    const char *path = getenv("CHAOS_SYNC");
    if (path == NULL) return real_syncfs(fd);
    int opened = open(path, O_RDONLY | O_CLOEXEC);
    if (opened < 0) return -1;
    close(opened);
    return 0;
}
