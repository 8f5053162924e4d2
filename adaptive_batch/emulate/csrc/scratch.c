/* Preloaded into each process of an emulated program, whose scratch folder mirrors the user's folder with a link for each file.
 *
 * EMULATE_FOLDERS lists folders of the user, each with its mirror. A call that names a path in a folder of the user gets the path in the mirror. Before
 * a file is written, its link in the mirror becomes a copy. Before an entry is created or removed in a folder that is linked as a whole, this link
 * becomes a folder of links. So the user's folders stay as they are, however the program names their files. To the program, a link to an entry of
 * the user looks like the entry. */
#undef _FORTIFY_SOURCE /* it declares some of these functions otherwise */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#define EXPORT __attribute__((visibility("default")))
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SEPARATOR '\x1f' /* of EMULATE_FOLDERS */
#define MAX_LINKS 40

enum place { ELSEWHERE, IN_SCRATCH, IN_MIRROR };

/* Below, this file calls the kernel where its own functions would replace those of the C library. */

static int open_as_it_is(int folder, const char *path, int flags, mode_t mode) {
  return (int)syscall(SYS_openat, folder, path, flags | O_LARGEFILE, mode);
}

/* Returns whether a path is a link. */
static int read_link(const char *path, char *target) {
  long size = syscall(SYS_readlink, path, target, PATH_MAX - 1);
  target[size > 0 ? size : 0] = 0;
  return size > 0;
}

static int __attribute__((format(printf, 2, 3))) print(char *path, const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int size = vsnprintf(path, PATH_MAX, format, arguments);
  va_end(arguments);
  if (size < PATH_MAX) return 0;
  errno = ENAMETOOLONG;
  return -1;
}

static int is_below(const char *path, const char *folder, size_t length) {
  return !strncmp(path, folder, length) && (!path[length] || path[length] == '/');
}

static int is_in_folder_of(const char *variable, const char *path) {
  const char *folder = getenv(variable);
  return folder && is_below(path, folder, strlen(folder));
}

static int is_in_scratch(const char *path) { return is_in_folder_of("EMULATE_SCRATCH", path); }

/* Writes the path in the mirror of a path in a folder of the user; returns whether there is one. */
static int find_in_mirror(const char *path, char *mirrored) {
  if (is_in_folder_of("EMULATE_CACHE", path) || is_in_folder_of("EMULATE_RECORDS", path)) return 0;
  const char *user = getenv("EMULATE_FOLDERS");
  while (user && *user) {
    const char *mirror = strchr(user, SEPARATOR) + 1, *end = strchr(mirror, SEPARATOR);
    size_t length = (size_t)(mirror - user) - 1;
    if (is_below(path, user, length)) return !print(mirrored, "%.*s%s", (int)(end - mirror), mirror, path + length);
    user = end + 1;
  }
  return 0;
}

/* The position of the last name in the first `length` characters of a path. */
static size_t last_name(const char *path, size_t length) {
  while (length && path[length - 1] == '/') length--;
  while (length && path[length - 1] != '/') length--;
  return length;
}

/* Writes the absolute path that a path means, or the one in the mirror of a folder of the user. A link at its end is not followed. */
static enum place find(int folder, const char *path, char *found) {
  char full[PATH_MAX], parent[PATH_MAX], real[PATH_MAX];
  int error = errno;
  enum place place = ELSEWHERE;
  int is_given = path && *path
                 && !(*path == '/' ? print(full, "%s", path)
                      : folder == AT_FDCWD ? print(full, "./%s", path)
                                           : print(full, "/proc/self/fd/%d/%s", folder, path));
  *found = 0; /* not before, since it may be the path */
  if (!is_given) goto end;
  size_t cut = strlen(full), name = last_name(full, cut);
  int is_dots = full[name] == '.' && strspn(full + name, "./") == cut - name;
  if (!is_dots) cut = name;
  /* Resolve the part that exists. The program may have created the other folders, in the mirror only. */
  while (cut && (print(parent, "%.*s", (int)cut, full) || !NEXT(realpath)(parent, real))) {
    name = last_name(full, cut);
    if (errno != ENOENT || !strncmp(full + name, "..", 2)) goto end;
    cut = name;
  }
  if (!cut || print(found, "%s%s%s", real[1] ? real : "", full[cut] ? "/" : "", full + cut)) goto end;
  if (is_in_scratch(found)) place = IN_SCRATCH;
  else if (find_in_mirror(found, full)) {
    place = IN_MIRROR;
    strcpy(found, full);
  }
end:
  errno = error;
  return place;
}

/* Returns whether an absolute path is a link of the mirror to an entry of the user. Such a link is in a real folder of the scratch folder and names a
 * real path; the program's own links lead into the scratch folder, see symlink(), or elsewhere, as links of the user in a linked folder do. */
static int is_link_to_user(const char *path, char *target) {
  char found[PATH_MAX], mirrored[PATH_MAX];
  return read_link(path, target) && *target == '/' && !is_in_scratch(target) && find_in_mirror(target, mirrored)
         && find(AT_FDCWD, path, found) == IN_SCRATCH && find(AT_FDCWD, target, found) == IN_MIRROR && !strcmp(found, mirrored);
}

static int lock_scratch(void) { /* ranks write to the same files */
  int lock = open_as_it_is(AT_FDCWD, getenv("EMULATE_SCRATCH"), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (lock >= 0) flock(lock, LOCK_EX);
  return lock;
}

static int unlock(int lock, int result) {
  int error = errno;
  if (lock >= 0) close(lock);
  errno = error;
  return result;
}

/* Replaces a link to a folder of the user by a folder of links, in one step where the file system can. */
static int make_folder(const char *link, const char *user) {
  char new[PATH_MAX], from[PATH_MAX], to[PATH_MAX];
  int folder = open_as_it_is(AT_FDCWD, user, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  DIR *entries = folder < 0 ? NULL : fdopendir(folder);
  if (!entries) return -1;
  int failed = print(new, "%s.%d.new", link, (int)getpid()) || syscall(SYS_mkdir, new, 0777);
  for (struct dirent *entry; !failed && (entry = readdir(entries));)
    if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
      failed = print(from, "%s/%s", user, entry->d_name) || print(to, "%s/%s", new, entry->d_name) || syscall(SYS_symlink, from, to);
  closedir(entries);
  if (failed) return -1;
  if (!syscall(SYS_renameat2, AT_FDCWD, new, AT_FDCWD, link, RENAME_EXCHANGE)) return (int)syscall(SYS_unlink, new);
  return syscall(SYS_unlink, link) || syscall(SYS_rename, new, link) ? -1 : 0;
}

/* Makes the folders of a path of the scratch folder where it has links to folders of the user. */
static int make_folders(char *path) {
  char target[PATH_MAX];
  for (char *slash = path + strlen(getenv("EMULATE_SCRATCH")); (slash = strchr(slash + 1, '/'));) {
    int failed = 0;
    *slash = 0;
    if (is_link_to_user(path, target)) {
      int lock = lock_scratch();
      failed = unlock(lock, is_link_to_user(path, target) && make_folder(path, target));
    }
    *slash = '/';
    if (failed) return -1;
  }
  return 0;
}

/* Returns 0, or -1 with errno if not all of it could be written. */
static int copy(int source, int target) {
  static __thread char block[1 << 16];
  ssize_t size;
  while ((size = read(source, block, sizeof block)) > 0)
    for (ssize_t done = 0, written; done < size; done += written)
      if ((written = write(target, block + done, (size_t)(size - done))) < 0) return -1;
  return (int)size;
}

/* Replaces a link to an entry of the user by a copy, in one step, so that other processes find one or the other. */
static int make_copy(const char *link, const char *user, int truncates) {
  char new[PATH_MAX];
  struct stat status;
  if (syscall(SYS_newfstatat, AT_FDCWD, user, &status, 0)) return errno == ENOENT ? (int)syscall(SYS_unlink, link) : -1;
  if (S_ISDIR(status.st_mode)) return make_folder(link, user);
  if (!S_ISREG(status.st_mode)) return 0;
  int source = print(new, "%s.%d.new", link, (int)getpid()) ? -1 : open_as_it_is(AT_FDCWD, user, O_RDONLY, 0);
  int target = source < 0 ? -1 : open_as_it_is(AT_FDCWD, new, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  int failed = target < 0 || (!truncates && copy(source, target)) || fchmod(target, (status.st_mode & 0777) | 0200);
  int error = errno;
  if (source >= 0) close(source);
  if (target >= 0) close(target);
  if (!failed && !syscall(SYS_rename, new, link)) return 0;
  if (!failed) error = errno;
  syscall(SYS_unlink, new);
  errno = error;
  return -1;
}

/* The next three find the path for a call and return 0, or -1 with errno. */

static int to_read(int folder, const char **path, char *found) {
  char target[PATH_MAX];
  enum place place = find(folder, *path, found);
  if (place == ELSEWHERE) return 0;
  if (is_link_to_user(found, target)) strcpy(found, target);
  else if (place == IN_SCRATCH) return 0;
  *path = found;
  return 0;
}

static int to_create_or_remove(int folder, const char **path, char *found) {
  enum place place = find(folder, *path, found);
  if (place == ELSEWHERE) return 0;
  *path = found;
  return place == IN_SCRATCH ? 0 : make_folders(found);
}

static int to_write(int folder, const char **path, int truncates, char *found) {
  char target[PATH_MAX], next[PATH_MAX];
  const char *current = *path;
  for (int links = 0; links < MAX_LINKS; links++) {
    enum place place = find(folder, current, found);
    /* A stream of the process may be a file of the user. */
    if (!*found || is_below(found, "/proc", 5)) return 0;
    if (place == IN_MIRROR && make_folders(found)) return -1;
    if (place != ELSEWHERE) *path = found;
    if (place != ELSEWHERE && is_link_to_user(found, target)) {
      int lock = lock_scratch();
      return unlock(lock, is_link_to_user(found, target) ? make_copy(found, target, truncates) : 0);
    }
    if (!read_link(found, target)) return 0;
    /* A link of the program, or outside the scratch folder. */
    int length = *target == '/' ? 0 : (int)last_name(found, strlen(found));
    if (print(next, "%.*s%s", length, found, target)) return -1;
    current = next;
    folder = AT_FDCWD;
  }
  errno = ELOOP;
  return -1;
}

static int open_for(int folder, const char *path, int flags, mode_t mode) {
  char found[PATH_MAX];
  int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_TRUNC | O_CREAT);
  if (writes ? to_write(folder, &path, flags & O_TRUNC, found) : to_read(folder, &path, found)) return -1;
  return open_as_it_is(folder, path, flags, mode);
}

static int find_for_mode(const char **path, const char *mode, char *found) {
  if (!strpbrk(mode, "wa+")) return to_read(AT_FDCWD, path, found);
  return to_write(AT_FDCWD, path, *mode == 'w' && !strchr(mode, 'x'), found);
}

#define MODE_OF(flags)                                        \
  mode_t mode = 0;                                            \
  if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {  \
    va_list arguments;                                        \
    va_start(arguments, flags);                               \
    mode = va_arg(arguments, mode_t);                         \
    va_end(arguments);                                        \
  }
#define OPEN(name) \
  EXPORT int name(const char *path, int flags, ...) { MODE_OF(flags) return open_for(AT_FDCWD, path, flags, mode); }
#define OPENAT(name) \
  EXPORT int name(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_for(folder, path, flags, mode); }
#define CREAT(name) \
  EXPORT int name(const char *path, mode_t mode) { return open_for(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

OPEN(open)
OPEN(open64)
OPEN(__open_2)
OPEN(__open64_2)
OPENAT(openat)
OPENAT(openat64)
OPENAT(__openat_2)
OPENAT(__openat64_2)
CREAT(creat)
CREAT(creat64)

/* A function of the C library with the path that `find_path` has found. */
#define WITH_PATH(type, failed, find_path, name, parameters, arguments) \
  EXPORT type name parameters {                                         \
    char found[PATH_MAX];                                               \
    return find_path ? failed : NEXT(name) arguments;                   \
  }
#define READS(type, failed, name, parameters, arguments) WITH_PATH(type, failed, to_read(AT_FDCWD, &path, found), name, parameters, arguments)
#define READS_AT(type, name, parameters, arguments) WITH_PATH(type, -1, to_read(folder, &path, found), name, parameters, arguments)
#define CHANGES(name, parameters, arguments) WITH_PATH(int, -1, to_create_or_remove(AT_FDCWD, &path, found), name, parameters, arguments)
#define CHANGES_AT(name, parameters, arguments) WITH_PATH(int, -1, to_create_or_remove(folder, &path, found), name, parameters, arguments)
#define WRITES(name, parameters, arguments) WITH_PATH(int, -1, to_write(AT_FDCWD, &path, 0, found), name, parameters, arguments)
#define WRITES_AT(name, parameters, arguments) WITH_PATH(int, -1, to_write(folder, &path, 0, found), name, parameters, arguments)

WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), fopen, (const char *path, const char *mode), (path, mode))
WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), fopen64, (const char *path, const char *mode), (path, mode))
WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), freopen, (const char *path, const char *mode, FILE *stream), (path, mode, stream))
WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), freopen64, (const char *path, const char *mode, FILE *stream), (path, mode, stream))

WRITES(truncate, (const char *path, off_t length), (path, length))
WRITES(truncate64, (const char *path, off64_t length), (path, length))
WRITES(chmod, (const char *path, mode_t mode), (path, mode))
WRITES(chown, (const char *path, uid_t user, gid_t group), (path, user, group))
WRITES(lchown, (const char *path, uid_t user, gid_t group), (path, user, group))
WRITES(utime, (const char *path, const struct utimbuf *times), (path, times))
WRITES(utimes, (const char *path, const struct timeval times[2]), (path, times))
WRITES(setxattr, (const char *path, const char *name, const void *value, size_t size, int flags), (path, name, value, size, flags))
WRITES(removexattr, (const char *path, const char *name), (path, name))
WRITES_AT(fchmodat, (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags))
WRITES_AT(fchownat, (int folder, const char *path, uid_t user, gid_t group, int flags), (folder, path, user, group, flags))
WRITES_AT(utimensat, (int folder, const char *path, const struct timespec times[2], int flags), (folder, path, times, flags))

CHANGES(mkdir, (const char *path, mode_t mode), (path, mode))
CHANGES(mkfifo, (const char *path, mode_t mode), (path, mode))
CHANGES(rmdir, (const char *path), (path))
CHANGES(unlink, (const char *path), (path))
CHANGES(remove, (const char *path), (path))
CHANGES_AT(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
CHANGES_AT(unlinkat, (int folder, const char *path, int flags), (folder, path, flags))

/* Two paths. */

#define RENAMES(name, old_folder, new_folder, parameters, arguments)                                                                   \
  EXPORT int name parameters {                                                                                                         \
    char found[PATH_MAX], found_new[PATH_MAX];                                                                                         \
    if (to_create_or_remove(old_folder, &old, found) || to_create_or_remove(new_folder, &new, found_new)) return -1;                    \
    return NEXT(name) arguments;                                                                                                       \
  }
RENAMES(rename, AT_FDCWD, AT_FDCWD, (const char *old, const char *new), (old, new))
RENAMES(renameat, from, to, (int from, const char *old, int to, const char *new), (from, old, to, new))
RENAMES(renameat2, from, to, (int from, const char *old, int to, const char *new, unsigned flags), (from, old, to, new, flags))

/* A second name of a file of the user would write to it. */
#define LINKS(name, old_folder, new_folder, parameters, arguments)                                                       \
  EXPORT int name parameters {                                                                                           \
    char found[PATH_MAX], found_new[PATH_MAX];                                                                           \
    if (to_write(old_folder, &old, 0, found) || to_create_or_remove(new_folder, &new, found_new)) return -1;              \
    return NEXT(name) arguments;                                                                                         \
  }
LINKS(link, AT_FDCWD, AT_FDCWD, (const char *old, const char *new), (old, new))
LINKS(linkat, from, to, (int from, const char *old, int to, const char *new, int flags), (from, old, to, new, flags))

static int point_into_scratch(const char **target, char *found) {
  if (**target == '/' && find(AT_FDCWD, *target, found) != ELSEWHERE) *target = found;
  return 0;
}
#define MAKES_LINK(name, folder, parameters, arguments)                                                         \
  EXPORT int name parameters {                                                                                  \
    char found[PATH_MAX], pointed[PATH_MAX];                                                                    \
    if (point_into_scratch(&target, pointed) || to_create_or_remove(folder, &path, found)) return -1;            \
    return NEXT(name) arguments;                                                                                \
  }
MAKES_LINK(symlink, AT_FDCWD, (const char *target, const char *path), (target, path))
MAKES_LINK(symlinkat, folder, (const char *target, int folder, const char *path), (target, folder, path))

READS(int, -1, stat, (const char *path, struct stat *status), (path, status))
READS(int, -1, stat64, (const char *path, struct stat64 *status), (path, status))
READS(int, -1, lstat, (const char *path, struct stat *status), (path, status))
READS(int, -1, lstat64, (const char *path, struct stat64 *status), (path, status))
READS(int, -1, access, (const char *path, int mode), (path, mode))
READS(int, -1, eaccess, (const char *path, int mode), (path, mode))
READS(int, -1, euidaccess, (const char *path, int mode), (path, mode))
READS(int, -1, chdir, (const char *path), (path))
READS(int, -1, statvfs, (const char *path, struct statvfs *status), (path, status))
READS(int, -1, statvfs64, (const char *path, struct statvfs64 *status), (path, status))
/* Files with names that the C library invents. */
static void take_name(char *template, const char *path) {
  size_t name = last_name(path, strlen(path));
  memmove(template + last_name(template, strlen(template)), path + name, strlen(path) - name);
}
#define TEMPORARY(type, failed, result, name, parameters, arguments)                   \
  EXPORT type name parameters {                                                        \
    char found[PATH_MAX], *path = template;                                            \
    if (to_create_or_remove(AT_FDCWD, (const char **)&path, found)) return failed;      \
    type made = NEXT(name) arguments;                                                  \
    take_name(template, path);                                                         \
    return result;                                                                     \
  }
TEMPORARY(int, -1, made, mkstemp, (char *template), (path))
TEMPORARY(int, -1, made, mkstemp64, (char *template), (path))
TEMPORARY(int, -1, made, mkostemp, (char *template, int flags), (path, flags))
TEMPORARY(int, -1, made, mkostemp64, (char *template, int flags), (path, flags))
TEMPORARY(int, -1, made, mkstemps, (char *template, int suffix), (path, suffix))
TEMPORARY(int, -1, made, mkstemps64, (char *template, int suffix), (path, suffix))
TEMPORARY(char *, NULL, made ? template : NULL, mkdtemp, (char *template), (path))

/* Makes the program ask whether an entry is a link. */
#define READDIR(name, entry_type)                          \
  EXPORT struct entry_type *name(DIR *folder) {            \
    struct entry_type *entry = NEXT(name)(folder);         \
    if (entry && entry->d_type == DT_LNK) entry->d_type = DT_UNKNOWN; \
    return entry;                                          \
  }
READDIR(readdir, dirent)
READDIR(readdir64, dirent64)

READS(DIR *, NULL, opendir, (const char *path), (path))
READS(char *, NULL, realpath, (const char *path, char *resolved), (path, resolved))
READS(ssize_t, -1, readlink, (const char *path, char *target, size_t size), (path, target, size))
READS(ssize_t, -1, getxattr, (const char *path, const char *name, void *value, size_t size), (path, name, value, size))
READS(ssize_t, -1, lgetxattr, (const char *path, const char *name, void *value, size_t size), (path, name, value, size))
READS(ssize_t, -1, listxattr, (const char *path, char *names, size_t size), (path, names, size))
READS(ssize_t, -1, llistxattr, (const char *path, char *names, size_t size), (path, names, size))
READS_AT(int, fstatat, (int folder, const char *path, struct stat *status, int flags), (folder, path, status, flags))
READS_AT(int, fstatat64, (int folder, const char *path, struct stat64 *status, int flags), (folder, path, status, flags))
READS_AT(int, statx, (int folder, const char *path, int flags, unsigned mask, struct statx *status), (folder, path, flags, mask, status))
READS_AT(int, faccessat, (int folder, const char *path, int mode, int flags), (folder, path, mode, flags))
READS_AT(ssize_t, readlinkat, (int folder, const char *path, char *target, size_t size), (folder, path, target, size))

/* The names in programs that were compiled with an older C library, or with checks. */

int __xstat(int version, const char *path, struct stat *status);
int __xstat64(int version, const char *path, struct stat64 *status);
int __lxstat(int version, const char *path, struct stat *status);
int __lxstat64(int version, const char *path, struct stat64 *status);
int __fxstatat(int version, int folder, const char *path, struct stat *status, int flags);
int __fxstatat64(int version, int folder, const char *path, struct stat64 *status, int flags);
char *__realpath_chk(const char *path, char *resolved, size_t length);
ssize_t __readlink_chk(const char *path, char *target, size_t size, size_t length);
ssize_t __readlinkat_chk(int folder, const char *path, char *target, size_t size, size_t length);
READS(int, -1, __xstat, (int version, const char *path, struct stat *status), (version, path, status))
READS(int, -1, __xstat64, (int version, const char *path, struct stat64 *status), (version, path, status))
READS(int, -1, __lxstat, (int version, const char *path, struct stat *status), (version, path, status))
READS(int, -1, __lxstat64, (int version, const char *path, struct stat64 *status), (version, path, status))
READS(char *, NULL, __realpath_chk, (const char *path, char *resolved, size_t length), (path, resolved, length))
READS(ssize_t, -1, __readlink_chk, (const char *path, char *target, size_t size, size_t length), (path, target, size, length))
READS_AT(int, __fxstatat, (int version, int folder, const char *path, struct stat *status, int flags), (version, folder, path, status, flags))
READS_AT(int, __fxstatat64, (int version, int folder, const char *path, struct stat64 *status, int flags), (version, folder, path, status, flags))
READS_AT(ssize_t, __readlinkat_chk, (int folder, const char *path, char *target, size_t size, size_t length), (folder, path, target, size, length))
