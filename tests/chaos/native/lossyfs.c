// A file system that forgets what was not synced, and that fails on command.
//
//     lossyfs BACKING MOUNTPOINT
//
// It passes everything through to the directory BACKING, and remembers in memory how to undo each change until that
// change is durable: bytes and sizes of a file until the file is synced (fsync, fdatasync, O_SYNC, O_DSYNC), names in a
// directory until the directory is synced. Nothing is written to a device by it: the page cache of BACKING survives
// every kill of a process. Changes that no call has brought here, such as those of a memory map, come with writeback.
//
// Commands, a line each, on stdin; each is answered with a line:
//
//     stall OPS     these wait until `go`; OPS are letters: w write, s sync, r read, n names (create, rename, ...)
//     fail OPS      these fail with EIO
//     full          what needs space fails with ENOSPC, and statfs reports none
//     slow MS       a sync takes so much longer
//     go            all of these end
//     lose all      when it is unmounted, everything that is not durable is undone
//     lose SEED     the same, but each file and each directory keeps some of its oldest changes
//
// It ends when it is unmounted, prints what was undone as JSON, and unmounts itself when stdin ends.
// Opening the file /.sync syncs everything, as syncfs(2) does, which FUSE does not pass on.
#define FUSE_USE_VERSION 31
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#define GRAVE ".lossyfs-removed"
#define SYNC_ALL "/.sync"
#define BUCKETS 4096
#define PATH_BYTES 4096

enum Kind { DATA, CREATED, REMOVED, RENAMED };

typedef struct Place {  // a file or a directory, by its inode: it stays the same when it is renamed
    ino_t inode;
    int fd;
    long pending;  // changes that are not durable
    long kept;     // of them, when power is lost
    int is_drawn;
    struct Place *next;
} Place;

typedef struct Change {
    enum Kind kind;
    Place *place;  // the file, or the directory that is synced for it
    Place *from;   // RENAMED: the directory of the old name
    off_t offset, old_size;
    size_t length;
    char *old;                  // DATA: bytes that were overwritten
    char *name, *from_name;     // CREATED, REMOVED, RENAMED
    char grave[64];             // what was removed or replaced is kept under this name
    struct Change *before, *after;
} Change;

static int root_fd, grave_fd;
static const char *mountpoint;
static Place *places[BUCKETS];
static Change *oldest, *newest;
static long graves, undone_changes, undone_writes, undone_names;

static pthread_mutex_t mode_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t mode_changed = PTHREAD_COND_INITIALIZER;
static char stalled[16], failing[16];
static int is_full, slow_ms, loses;
static uint64_t loss_seed;

static void *must(void *allocated) {
    if (allocated == NULL) abort();
    return allocated;
}

// ---------------------------------------------------------------- what is not durable

static Place *place_of(int fd) {
    struct stat st;
    if (fstat(fd, &st) != 0) abort();
    Place **bucket = &places[st.st_ino % BUCKETS];
    for (Place *p = *bucket; p != NULL; p = p->next)
        if (p->inode == st.st_ino) return p;
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    Place *made = must(calloc(1, sizeof *made));
    // Held for good: the inode's number is not used again while it is.
    made->fd = open(link, S_ISDIR(st.st_mode) ? O_RDONLY | O_DIRECTORY : O_RDWR);
    if (made->fd < 0) abort();
    made->inode = st.st_ino;
    made->next = *bucket;
    return *bucket = made;
}

static Change *note(enum Kind kind, Place *place) {
    Change *change = must(calloc(1, sizeof *change));
    change->kind = kind;
    change->place = place;
    change->before = newest;
    if (newest != NULL) newest->after = change; else oldest = change;
    newest = change;
    place->pending++;
    return change;
}

static void forget(Change *change) {
    if (change->before != NULL) change->before->after = change->after; else oldest = change->after;
    if (change->after != NULL) change->after->before = change->before; else newest = change->before;
    change->place->pending--;
    if (change->grave[0]) {
        if (unlinkat(grave_fd, change->grave, 0) != 0) unlinkat(grave_fd, change->grave, AT_REMOVEDIR);
    }
    free(change->old);
    free(change->name);
    free(change->from_name);
    free(change);
}

static void make_durable(Place *place) {  // NULL: everything
    for (Change *change = oldest, *after; change != NULL && (place == NULL || place->pending > 0); change = after) {
        after = change->after;
        if (place == NULL || change->place == place) forget(change);
    }
}

static void undo(Change *change) {
    switch (change->kind) {
    case DATA:
        if (ftruncate(change->place->fd, change->old_size) != 0) abort();
        if (change->length && pwrite(change->place->fd, change->old, change->length, change->offset) < 0) abort();
        undone_writes++;
        break;
    case CREATED:
        if (unlinkat(change->place->fd, change->name, 0) != 0)
            unlinkat(change->place->fd, change->name, AT_REMOVEDIR);
        undone_names++;
        break;
    case REMOVED:
        renameat(grave_fd, change->grave, change->place->fd, change->name);
        change->grave[0] = 0;
        undone_names++;
        break;
    case RENAMED:
        renameat(change->place->fd, change->name, change->from->fd, change->from_name);
        if (change->grave[0]) renameat(grave_fd, change->grave, change->place->fd, change->name);
        change->grave[0] = 0;
        undone_names++;
        break;
    }
    undone_changes++;
}

static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Each place keeps its oldest `kept` changes; the others are undone, newest first.
static void lose_power(void) {
    for (Change *change = newest; change != NULL; change = change->before) {
        Place *place = change->place;
        if (loss_seed != 0 && !place->is_drawn)
            place->kept = (long)(mixed(loss_seed ^ place->inode) % (uint64_t)(place->pending + 1));
        place->is_drawn = 1;
    }
    for (Change *change = newest, *before; change != NULL; change = before) {
        before = change->before;
        if (change->place->pending <= change->place->kept) continue;
        undo(change);
        forget(change);
    }
    make_durable(NULL);
}

// ---------------------------------------------------------------- faults

static int disturbed(char op) {
    pthread_mutex_lock(&mode_lock);
    while (strchr(stalled, op) != NULL) pthread_cond_wait(&mode_changed, &mode_lock);
    int fails = strchr(failing, op) != NULL;
    int ms = op == 's' ? slow_ms : 0;
    pthread_mutex_unlock(&mode_lock);
    if (ms) nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000L}, NULL);
    return fails ? -EIO : 0;
}

static int has_no_space(void) {
    pthread_mutex_lock(&mode_lock);
    int full = is_full;
    pthread_mutex_unlock(&mode_lock);
    return full;
}

static void *read_commands(void *unused) {
    char line[256];
    while (fgets(line, sizeof line, stdin) != NULL) {
        line[strcspn(line, "\n")] = 0;
        const char *argument = strchr(line, ' ');
        argument = argument == NULL ? "" : argument + 1;
        int known = 1;
        pthread_mutex_lock(&mode_lock);
        if (!strncmp(line, "stall ", 6)) snprintf(stalled, sizeof stalled, "%s", argument);
        else if (!strncmp(line, "fail ", 5)) snprintf(failing, sizeof failing, "%s", argument);
        else if (!strncmp(line, "slow ", 5)) slow_ms = atoi(argument);
        else if (!strncmp(line, "lose ", 5)) loses = 1, loss_seed = strtoull(argument, NULL, 10);
        else if (!strcmp(line, "full")) is_full = 1;
        else if (!strcmp(line, "go")) stalled[0] = failing[0] = 0, is_full = slow_ms = 0;
        else known = 0;
        pthread_cond_broadcast(&mode_changed);
        pthread_mutex_unlock(&mode_lock);
        printf(known ? "done %s\n" : "unknown command: %s\n", line);
        fflush(stdout);
    }
    pthread_mutex_lock(&mode_lock);
    stalled[0] = 0;
    pthread_cond_broadcast(&mode_changed);
    pthread_mutex_unlock(&mode_lock);
    umount2(mountpoint, MNT_DETACH);
    return unused;
}

// ---------------------------------------------------------------- paths

static const char *relative(const char *path) { return path[1] ? path + 1 : "."; }

// Opens the directory of a path; *name is its last part.
static int parent_of(const char *path, const char **name) {
    char directory[PATH_BYTES];
    const char *slash = strrchr(path, '/');
    size_t length = (size_t)(slash - path);
    if (length >= sizeof directory) return -1;
    memcpy(directory, path, length);
    directory[length] = 0;
    *name = slash + 1;
    return openat(root_fd, length ? relative(directory) : ".", O_RDONLY | O_DIRECTORY);
}

// Moves what is at a name out of sight, under a name of its own.
static int bury(int directory, const char *name, char *grave) {
    sprintf(grave, "%ld", graves++);
    return renameat(directory, name, grave_fd, grave);
}

// ---------------------------------------------------------------- operations

static int lossy_getattr(const char *path, struct stat *st, struct fuse_file_info *fi) {
    int rc = fi != NULL ? fstat((int)fi->fh, st) : fstatat(root_fd, relative(path), st, AT_SYMLINK_NOFOLLOW);
    return rc == 0 ? 0 : -errno;
}

static int lossy_open(const char *path, struct fuse_file_info *fi) {
    if (!strcmp(path, SYNC_ALL)) {
        int rc = disturbed('s');
        if (rc) return rc;
        make_durable(NULL);
    }
    int fd = openat(root_fd, relative(path), (fi->flags & ~(O_ACCMODE | O_TRUNC | O_APPEND)) | O_RDWR);
    if (fd < 0) return -errno;
    fi->fh = (uint64_t)fd;
    return 0;
}

static int created(const char *path, int (*make)(int, const char *, mode_t), mode_t mode) {
    int rc = disturbed('n');
    if (rc) return rc;
    if (has_no_space()) return -ENOSPC;
    const char *name;
    int directory = parent_of(path, &name);
    if (directory < 0) return -errno;
    int made = make(directory, name, mode);
    rc = made < 0 ? -errno : made;
    if (made >= 0) note(CREATED, place_of(directory))->name = must(strdup(name));
    close(directory);
    return rc;
}

static int make_file(int directory, const char *name, mode_t mode) {
    return openat(directory, name, O_RDWR | O_CREAT | O_EXCL, mode);
}

static int make_directory(int directory, const char *name, mode_t mode) { return mkdirat(directory, name, mode); }

static int lossy_create(const char *path, mode_t mode, struct fuse_file_info *fi) {
    int fd = created(path, make_file, mode);
    if (fd == -EEXIST) return lossy_open(path, fi);
    if (fd < 0) return fd;
    fi->fh = (uint64_t)fd;
    return 0;
}

static int lossy_mkdir(const char *path, mode_t mode) {
    int rc = created(path, make_directory, mode);
    return rc < 0 ? rc : 0;
}

static int lossy_remove(const char *path) {
    int rc = disturbed('n');
    if (rc) return rc;
    const char *name;
    int directory = parent_of(path, &name);
    if (directory < 0) return -errno;
    char grave[64];
    rc = bury(directory, name, grave) == 0 ? 0 : -errno;
    if (rc == 0) {
        Change *change = note(REMOVED, place_of(directory));
        change->name = must(strdup(name));
        strcpy(change->grave, grave);
    }
    close(directory);
    return rc;
}

static int lossy_rmdir(const char *path) {
    int fd = openat(root_fd, relative(path), O_RDONLY | O_DIRECTORY);
    if (fd < 0) return -errno;
    DIR *directory = fdopendir(fd);
    int entries = 0;
    while (readdir(directory) != NULL) entries++;
    closedir(directory);
    return entries > 2 ? -ENOTEMPTY : lossy_remove(path);
}

static int lossy_rename(const char *from, const char *to, unsigned int flags) {
    if (flags) return -EINVAL;
    int rc = disturbed('n');
    if (rc) return rc;
    const char *from_name, *to_name;
    int source = parent_of(from, &from_name), target = parent_of(to, &to_name);
    char grave[64] = "";
    if (source < 0 || target < 0) {
        rc = -errno;
    } else {
        if (faccessat(target, to_name, F_OK, AT_SYMLINK_NOFOLLOW) == 0) bury(target, to_name, grave);
        rc = renameat(source, from_name, target, to_name) == 0 ? 0 : -errno;
        if (rc != 0 && grave[0]) renameat(grave_fd, grave, target, to_name);
        if (rc == 0) {
            Change *change = note(RENAMED, place_of(target));
            change->from = place_of(source);
            change->name = must(strdup(to_name));
            change->from_name = must(strdup(from_name));
            strcpy(change->grave, grave);
        }
    }
    if (source >= 0) close(source);
    if (target >= 0) close(target);
    return rc;
}

static void note_data(int fd, off_t offset, size_t length) {
    Place *place = place_of(fd);
    struct stat st;
    fstat(fd, &st);
    Change *change = note(DATA, place);
    change->old_size = st.st_size;
    change->offset = offset;
    if (offset < st.st_size && length) {
        size_t overlap = (off_t)(offset + (off_t)length) > st.st_size ? (size_t)(st.st_size - offset) : length;
        change->old = must(malloc(overlap));
        ssize_t got = pread(fd, change->old, overlap, offset);
        change->length = got > 0 ? (size_t)got : 0;
    }
}

static int lossy_read(const char *path, char *buffer, size_t size, off_t offset, struct fuse_file_info *fi) {
    (void)path;
    int rc = disturbed('r');
    if (rc) return rc;
    ssize_t got = pread((int)fi->fh, buffer, size, offset);
    return got < 0 ? -errno : (int)got;
}

static int lossy_write(const char *path, const char *buffer, size_t size, off_t offset, struct fuse_file_info *fi) {
    (void)path;
    int rc = disturbed('w');
    if (rc) return rc;
    struct stat st;
    fstat((int)fi->fh, &st);
    if (has_no_space() && offset + (off_t)size > (off_t)st.st_blocks * 512) return -ENOSPC;
    note_data((int)fi->fh, offset, size);
    ssize_t put = pwrite((int)fi->fh, buffer, size, offset);
    if (put < 0) return -errno;
    if (fi->flags & O_DSYNC) make_durable(place_of((int)fi->fh));
    return (int)put;
}

static int lossy_truncate(const char *path, off_t size, struct fuse_file_info *fi) {
    int rc = disturbed('w');
    if (rc) return rc;
    int fd = fi != NULL ? (int)fi->fh : openat(root_fd, relative(path), O_RDWR);
    if (fd < 0) return -errno;
    struct stat st;
    fstat(fd, &st);
    note_data(fd, size, size < st.st_size ? (size_t)(st.st_size - size) : 0);
    rc = ftruncate(fd, size) == 0 ? 0 : -errno;
    if (fi == NULL) close(fd);
    return rc;
}

static int lossy_fallocate(const char *path, int mode, off_t offset, off_t length, struct fuse_file_info *fi) {
    (void)path;
    if (mode) return -EOPNOTSUPP;
    struct stat st;
    fstat((int)fi->fh, &st);
    if (has_no_space() && offset + length > (off_t)st.st_blocks * 512) return -ENOSPC;
    note_data((int)fi->fh, offset, 0);
    return -posix_fallocate((int)fi->fh, offset, length);
}

static int lossy_fsync(const char *path, int only_data, struct fuse_file_info *fi) {
    (void)path, (void)only_data;
    int rc = disturbed('s');
    if (rc == 0) make_durable(place_of((int)fi->fh));
    return rc;
}

static int lossy_opendir(const char *path, struct fuse_file_info *fi) {
    int fd = openat(root_fd, relative(path), O_RDONLY | O_DIRECTORY);
    if (fd < 0) return -errno;
    fi->fh = (uint64_t)fd;
    return 0;
}

static int lossy_fsyncdir(const char *path, int only_data, struct fuse_file_info *fi) {
    return lossy_fsync(path, only_data, fi);
}

static int lossy_release(const char *path, struct fuse_file_info *fi) {
    (void)path;
    close((int)fi->fh);
    return 0;
}

static int lossy_readdir(const char *path, void *buffer, fuse_fill_dir_t fill, off_t offset, struct fuse_file_info *fi,
                         enum fuse_readdir_flags flags) {
    (void)path, (void)offset, (void)flags;
    DIR *directory = fdopendir(openat((int)fi->fh, ".", O_RDONLY | O_DIRECTORY));
    if (directory == NULL) return -errno;
    for (struct dirent *entry; (entry = readdir(directory)) != NULL;)
        if (strcmp(entry->d_name, GRAVE)) fill(buffer, entry->d_name, NULL, 0, 0);
    closedir(directory);
    return 0;
}

static int lossy_statfs(const char *path, struct statvfs *st) {
    (void)path;
    if (fstatvfs(root_fd, st) != 0) return -errno;
    if (has_no_space()) st->f_bfree = st->f_bavail = 0;
    return 0;
}

static int lossy_chmod(const char *path, mode_t mode, struct fuse_file_info *fi) {
    int rc = fi != NULL ? fchmod((int)fi->fh, mode) : fchmodat(root_fd, relative(path), mode, 0);
    return rc == 0 ? 0 : -errno;
}

static int lossy_chown(const char *path, uid_t user, gid_t group, struct fuse_file_info *fi) {
    int rc = fi != NULL ? fchown((int)fi->fh, user, group) : fchownat(root_fd, relative(path), user, group, 0);
    return rc == 0 ? 0 : -errno;
}

static int lossy_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *fi) {
    int rc = fi != NULL ? futimens((int)fi->fh, times) : utimensat(root_fd, relative(path), times, 0);
    return rc == 0 ? 0 : -errno;
}

static void *lossy_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    (void)connection;
    config->hard_remove = 1;
    config->nullpath_ok = 1;
    config->use_ino = 1;
    pthread_t thread;
    if (pthread_create(&thread, NULL, read_commands, NULL) != 0) abort();
    printf("ready\n");
    fflush(stdout);
    return NULL;
}

static const struct fuse_operations OPERATIONS = {
    .init = lossy_init, .getattr = lossy_getattr, .open = lossy_open, .create = lossy_create, .mkdir = lossy_mkdir,
    .unlink = lossy_remove, .rmdir = lossy_rmdir, .rename = lossy_rename, .read = lossy_read, .write = lossy_write,
    .truncate = lossy_truncate, .fallocate = lossy_fallocate, .fsync = lossy_fsync, .fsyncdir = lossy_fsyncdir,
    .release = lossy_release, .opendir = lossy_opendir, .releasedir = lossy_release, .readdir = lossy_readdir, .statfs = lossy_statfs, .chmod = lossy_chmod,
    .chown = lossy_chown, .utimens = lossy_utimens,
};

int main(int count, char **arguments) {
    if (count != 3) {
        fprintf(stderr, "usage: lossyfs BACKING MOUNTPOINT\n");
        return 2;
    }
    mountpoint = arguments[2];
    root_fd = open(arguments[1], O_RDONLY | O_DIRECTORY);
    if (root_fd < 0 || (mkdirat(root_fd, GRAVE, 0700) != 0 && errno != EEXIST)) {
        perror(arguments[1]);
        return 1;
    }
    grave_fd = openat(root_fd, GRAVE, O_RDONLY | O_DIRECTORY);
    close(openat(root_fd, relative(SYNC_ALL), O_RDWR | O_CREAT, 0600));
    // One thread: changes have an order.
    char *options[] = {arguments[0], "-f", "-s", "-o", "default_permissions,allow_other,fsname=tidelog-lossyfs",
                       arguments[2], NULL};
    int rc = fuse_main(6, options, &OPERATIONS, NULL);
    if (rc != 0) return rc;
    if (loses) lose_power(); else make_durable(NULL);
    printf("{\"changes\": %ld, \"writes\": %ld, \"names\": %ld}\n", undone_changes, undone_writes, undone_names);
    return 0;
}
