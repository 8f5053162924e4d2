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
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#define EXPORT __attribute__((visibility("default")))
#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SEPARATOR '\x1f' /* of EMULATE_FOLDERS */
#define MAX_LINKS 40

enum place { TOO_LONG = -1, ELSEWHERE, IN_SCRATCH, IN_MIRROR };
enum content { FOLDERS_ONLY, EMPTY, WHOLE }; /* of what replaces a link */

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

/* Writes the path in the mirror of a path in a folder of the user; returns 1, 0 if there is none, or -1 with errno. */
static int find_in_mirror(const char *path, char *mirrored) {
  if (is_in_folder_of("EMULATE_CACHE", path) || is_in_folder_of("EMULATE_RECORDS", path)) return 0;
  const char *user = getenv("EMULATE_FOLDERS");
  while (user && *user) {
    const char *mirror = strchr(user, SEPARATOR) + 1, *end = strchr(mirror, SEPARATOR);
    size_t length = (size_t)(mirror - user) - 1;
    if (is_below(path, user, length)) return print(mirrored, "%.*s%s", (int)(end - mirror), mirror, path + length) ? -1 : 1;
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

/* Writes the absolute path that a path means, or the one in the mirror of a folder of the user. A link at its end is not followed. Folders that do
 * not exist are written as they are named. */
static enum place resolve(int folder, const char *path, char *found, int *is_missing) {
  char full[PATH_MAX], parent[PATH_MAX], real[PATH_MAX];
  int error = errno, failed = 0;
  *is_missing = 0;
  if (!path || !*path) {
    *found = 0;
    return ELSEWHERE;
  }
  if (*path == '/') failed = print(full, "%s", path);
  else if (folder == AT_FDCWD) failed = print(full, "./%s", path);
  else failed = print(full, "/proc/self/fd/%d/%s", folder, path);
  *found = 0; /* not before, since it may be the path */
  if (failed) return TOO_LONG;
  size_t cut = strlen(full), name = last_name(full, cut);
  int is_dots = full[name] == '.' && strspn(full + name, "./") == cut - name;
  if (!is_dots) cut = name;
  while (cut && (print(parent, "%.*s", (int)cut, full) || !NEXT(realpath)(parent, real))) {
    if (errno == ENAMETOOLONG) return TOO_LONG;
    cut = errno == ENOENT || errno == ENOTDIR ? last_name(full, cut) : 0;
    *is_missing = 1;
  }
  errno = error;
  if (!cut) return ELSEWHERE;
  if (print(found, "%s%s%s", real[1] ? real : "", full[cut] ? "/" : "", full + cut)) return TOO_LONG;
  if (is_in_scratch(found)) return IN_SCRATCH;
  int has_mirror = find_in_mirror(found, full);
  if (has_mirror < 0) return TOO_LONG;
  if (has_mirror) strcpy(found, full);
  return has_mirror ? IN_MIRROR : ELSEWHERE;
}

/* Returns whether an absolute path is a link of the mirror to an entry of the user. Such a link is in a real folder of the scratch folder and names a
 * real path; the program's own links lead into the scratch folder, see symlink(), or elsewhere, as links of the user in a linked folder do. */
static int is_link_to_user(const char *path, char *target) {
  char found[PATH_MAX], mirrored[PATH_MAX];
  int is_missing;
  return read_link(path, target) && *target == '/' && !is_in_scratch(target) && find_in_mirror(target, mirrored) == 1
         && resolve(AT_FDCWD, path, found, &is_missing) == IN_SCRATCH && resolve(AT_FDCWD, target, found, &is_missing) == IN_MIRROR
         && !strcmp(found, mirrored);
}

/* Like resolve(), also for folders that the program has created in the mirror only. */
static enum place find(int folder, const char *path, char *found) {
  char other[PATH_MAX], target[PATH_MAX];
  int is_missing;
  enum place place = resolve(folder, path, found, &is_missing);
  if (place == IN_MIRROR && is_missing) {
    enum place created = resolve(AT_FDCWD, found, other, &is_missing);
    if (created == TOO_LONG) return TOO_LONG;
    if (created != ELSEWHERE) strcpy(found, other);
  }
  /* With a slash at its end, a link would be followed to the user. */
  size_t length = place > ELSEWHERE ? strlen(found) : 0;
  while (length > 1 && found[length - 1] == '/') length--;
  if (length && found[length] && !print(other, "%.*s", (int)length, found) && is_link_to_user(other, target)) found[length] = 0;
  return place;
}

static int lock_scratch(void) { /* ranks write to the same files */
  int lock = open_as_it_is(AT_FDCWD, getenv("EMULATE_SCRATCH"), O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (lock >= 0) flock(lock, LOCK_EX);
  return lock;
}

static int unlock(int lock, int result) {
  int error = errno;
  if (lock >= 0) {
    flock(lock, LOCK_UN); /* a forked process may have it open */
    close(lock);
  }
  errno = error;
  return result;
}

static int is_dots(const char *name) { return !strcmp(name, ".") || !strcmp(name, ".."); }

/* Replaces a link to a folder of the user by a folder of links, in one step where the file system can. */
static int make_folder(const char *link, const char *user) {
  char new[PATH_MAX], from[PATH_MAX], to[PATH_MAX];
  if (print(new, "%s.%d.new", link, (int)getpid())) return -1;
  int folder = open_as_it_is(AT_FDCWD, user, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  DIR *entries = folder < 0 ? NULL : fdopendir(folder);
  if (!entries) return -1;
  int is_made = !syscall(SYS_mkdir, new, 0777), failed = !is_made;
  for (struct dirent *entry; !failed && (entry = readdir(entries));)
    if (!is_dots(entry->d_name))
      failed = print(from, "%s/%s", user, entry->d_name) || print(to, "%s/%s", new, entry->d_name) || syscall(SYS_symlink, from, to);
  if (!failed) {
    closedir(entries);
    if (!syscall(SYS_renameat2, AT_FDCWD, new, AT_FDCWD, link, RENAME_EXCHANGE)) return (int)syscall(SYS_unlink, new);
    return syscall(SYS_unlink, link) || syscall(SYS_rename, new, link) ? -1 : 0;
  }
  int error = errno;
  rewinddir(entries);
  for (struct dirent *entry; is_made && (entry = readdir(entries));)
    if (!is_dots(entry->d_name) && !print(to, "%s/%s", new, entry->d_name)) syscall(SYS_unlink, to);
  if (is_made) syscall(SYS_rmdir, new);
  closedir(entries);
  errno = error;
  return -1;
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

/* Replaces a link to a file of the user by a copy, in one step, so that other processes find one or the other. */
static int make_copy(const char *link, const char *user, mode_t mode, enum content content) {
  char new[PATH_MAX];
  if (print(new, "%s.%d.new", link, (int)getpid())) return -1;
  int source = open_as_it_is(AT_FDCWD, user, O_RDONLY | O_CLOEXEC, 0);
  int target = source < 0 ? -1 : open_as_it_is(AT_FDCWD, new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  int failed = target < 0 || (content == WHOLE && copy(source, target)) || fchmod(target, (mode & 0777) | 0200);
  int error = errno;
  if (source >= 0) close(source);
  if (target >= 0) close(target);
  if (!failed && !syscall(SYS_rename, new, link)) return 0;
  if (!failed) error = errno;
  if (target >= 0) syscall(SYS_unlink, new);
  errno = error;
  return -1;
}

/* Replaces a path that is a link to an entry of the user. Links of the user to folders stay. */
static int replace_link(const char *path, enum content content) {
  char user[PATH_MAX];
  struct stat status;
  if (!is_link_to_user(path, user)) return 0;
  int lock = lock_scratch(), failed = 0;
  if (!is_link_to_user(path, user)) return unlock(lock, 0); /* another process has replaced it */
  if (!syscall(SYS_newfstatat, AT_FDCWD, user, &status, AT_SYMLINK_NOFOLLOW) && S_ISDIR(status.st_mode)) failed = make_folder(path, user);
  else if (content != FOLDERS_ONLY) {
    if (syscall(SYS_newfstatat, AT_FDCWD, user, &status, 0)) failed = errno == ENOENT ? (int)syscall(SYS_unlink, path) : -1;
    else if (S_ISREG(status.st_mode)) failed = make_copy(path, user, status.st_mode, content);
  }
  return unlock(lock, failed);
}

/* Replaces the links to folders of the user in a path of the scratch folder, except at its end. */
static int make_folders(char *path) {
  for (char *slash = path + strlen(getenv("EMULATE_SCRATCH")); (slash = strchr(slash + 1, '/'));) {
    *slash = 0;
    int failed = replace_link(path, FOLDERS_ONLY);
    *slash = '/';
    if (failed) return -1;
  }
  return 0;
}

/* Replaces the links to entries of the user at and below a path of the scratch folder. */
static int replace_links(const char *path, enum content content) {
  char below[PATH_MAX];
  if (replace_link(path, content)) return -1;
  int error = errno, failed = 0, folder = open_as_it_is(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC, 0);
  DIR *entries = folder < 0 ? NULL : fdopendir(folder);
  errno = error;
  if (!entries) return 0;
  for (struct dirent *entry; !failed && (entry = readdir(entries));)
    if (!is_dots(entry->d_name)) failed = print(below, "%s/%s", path, entry->d_name) || replace_links(below, content);
  error = errno;
  closedir(entries);
  errno = error;
  return failed ? -1 : 0;
}

/* The next functions find the path for a call and return 0, or -1 with errno. */

static int to_read(int folder, const char **path, char *found) {
  char target[PATH_MAX];
  enum place place = find(folder, *path, found);
  if (place == TOO_LONG || place == ELSEWHERE) return place;
  if (is_link_to_user(found, target)) strcpy(found, target);
  else if (place == IN_SCRATCH) return 0;
  *path = found;
  return 0;
}

static int to_create(int folder, const char **path, char *found) {
  enum place place = find(folder, *path, found);
  if (place == TOO_LONG || place == ELSEWHERE) return place;
  *path = found;
  return place == IN_SCRATCH ? 0 : make_folders(found);
}

static int to_remove(int folder, const char **path, char *found) {
  if (to_create(folder, path, found)) return -1;
  return *path == found ? replace_link(found, FOLDERS_ONLY) : 0;
}

/* A file that is open for reading may be one of the user. */
static int to_change(int file) {
  char link[PATH_MAX], name[PATH_MAX], mirrored[PATH_MAX];
  if (print(link, "/proc/self/fd/%d", file) || !read_link(link, name) || is_in_scratch(name) || !find_in_mirror(name, mirrored)) return 0;
  errno = EROFS;
  return -1;
}

static int to_write(int folder, const char **path, int follows, enum content content, char *found) {
  char target[PATH_MAX], next[PATH_MAX];
  const char *current = *path;
  if (!current || !*current) return to_change(folder);
  for (int links = 0; links < MAX_LINKS; links++) {
    enum place place = find(folder, current, found);
    if (place == TOO_LONG) return -1;
    /* A stream of the process may be a file of the user. */
    if (!*found || is_below(found, "/proc", 5)) return 0;
    if (place == IN_MIRROR && make_folders(found)) return -1;
    if (place != ELSEWHERE) *path = found;
    if (place != ELSEWHERE && is_link_to_user(found, target)) return replace_link(found, content);
    if (!follows || !read_link(found, target)) return 0;
    /* A link of the program, or outside the scratch folder. */
    int length = *target == '/' ? 0 : (int)last_name(found, strlen(found));
    if (print(next, "%.*s%s", length, found, target)) return -1;
    current = next;
    folder = AT_FDCWD;
  }
  errno = ELOOP;
  return -1;
}

/* Links to folders below a renamed path would lead to other paths of the mirror, and links out of the scratch folder would remain at the end. */
static int to_rename(int from, const char **old, char *found, int to, const char **new, char *found_new) {
  if (to_create(from, old, found) || to_create(to, new, found_new)) return -1;
  int leaves = *new != found_new;
  if (*old == found && replace_links(found, leaves ? WHOLE : FOLDERS_ONLY)) return -1;
  return leaves ? 0 : replace_links(found_new, FOLDERS_ONLY);
}

static int open_for(int folder, const char *path, int flags, mode_t mode) {
  char found[PATH_MAX];
  int failed;
  if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) failed = to_create(folder, &path, found);
  else if ((flags & O_ACCMODE) == O_RDONLY && !(flags & (O_TRUNC | O_CREAT))) failed = to_read(folder, &path, found);
  else failed = to_write(folder, &path, !(flags & O_NOFOLLOW), flags & O_TRUNC ? EMPTY : WHOLE, found);
  return failed ? -1 : open_as_it_is(folder, path, flags, mode);
}

static int find_for_mode(const char **path, const char *mode, char *found) {
  if (strchr(mode, 'x')) return to_create(AT_FDCWD, path, found);
  if (!strpbrk(mode, "wa+")) return to_read(AT_FDCWD, path, found);
  return to_write(AT_FDCWD, path, 1, *mode == 'w' ? EMPTY : WHOLE, found);
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
#define CREATES(name, parameters, arguments) WITH_PATH(int, -1, to_create(AT_FDCWD, &path, found), name, parameters, arguments)
#define CREATES_AT(name, parameters, arguments) WITH_PATH(int, -1, to_create(folder, &path, found), name, parameters, arguments)
#define REMOVES(name, parameters, arguments) WITH_PATH(int, -1, to_remove(AT_FDCWD, &path, found), name, parameters, arguments)
#define WRITES(name, parameters, arguments) WITH_PATH(int, -1, to_write(AT_FDCWD, &path, 1, WHOLE, found), name, parameters, arguments)
#define WRITES_LINK(name, parameters, arguments) WITH_PATH(int, -1, to_write(AT_FDCWD, &path, 0, WHOLE, found), name, parameters, arguments)
#define WRITES_AT(name, parameters, arguments) \
  WITH_PATH(int, -1, to_write(folder, &path, !(flags & AT_SYMLINK_NOFOLLOW), WHOLE, found), name, parameters, arguments)

WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), fopen, (const char *path, const char *mode), (path, mode))
WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), fopen64, (const char *path, const char *mode), (path, mode))
WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), freopen, (const char *path, const char *mode, FILE *stream), (path, mode, stream))
WITH_PATH(FILE *, NULL, find_for_mode(&path, mode, found), freopen64, (const char *path, const char *mode, FILE *stream), (path, mode, stream))

WRITES(truncate, (const char *path, off_t length), (path, length))
WRITES(truncate64, (const char *path, off64_t length), (path, length))
WRITES(chmod, (const char *path, mode_t mode), (path, mode))
WRITES(chown, (const char *path, uid_t user, gid_t group), (path, user, group))
WRITES_LINK(lchown, (const char *path, uid_t user, gid_t group), (path, user, group))
WRITES(utime, (const char *path, const struct utimbuf *times), (path, times))
WRITES(utimes, (const char *path, const struct timeval times[2]), (path, times))
WRITES(setxattr, (const char *path, const char *name, const void *value, size_t size, int flags), (path, name, value, size, flags))
WRITES(removexattr, (const char *path, const char *name), (path, name))
WRITES_LINK(lutimes, (const char *path, const struct timeval times[2]), (path, times))
WRITES_LINK(lsetxattr, (const char *path, const char *name, const void *value, size_t size, int flags), (path, name, value, size, flags))
WRITES_LINK(lremovexattr, (const char *path, const char *name), (path, name))
WITH_PATH(int, -1, to_write(folder, &path, 1, WHOLE, found), futimesat, (int folder, const char *path, const struct timeval times[2]),
          (folder, path, times))
WRITES_AT(fchmodat, (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags))
WRITES_AT(fchownat, (int folder, const char *path, uid_t user, gid_t group, int flags), (folder, path, user, group, flags))
WRITES_AT(utimensat, (int folder, const char *path, const struct timespec times[2], int flags), (folder, path, times, flags))

#define CHANGES(name, parameters, arguments) \
  EXPORT int name parameters { return to_change(file) ? -1 : NEXT(name) arguments; }
CHANGES(fchmod, (int file, mode_t mode), (file, mode))
CHANGES(fchown, (int file, uid_t user, gid_t group), (file, user, group))
CHANGES(futimes, (int file, const struct timeval times[2]), (file, times))
CHANGES(futimens, (int file, const struct timespec times[2]), (file, times))
CHANGES(fsetxattr, (int file, const char *name, const void *value, size_t size, int flags), (file, name, value, size, flags))
CHANGES(fremovexattr, (int file, const char *name), (file, name))

int __xmknod(int version, const char *path, mode_t mode, dev_t *device);
int __xmknodat(int version, int folder, const char *path, mode_t mode, dev_t *device);
CREATES(mkdir, (const char *path, mode_t mode), (path, mode))
CREATES(mkfifo, (const char *path, mode_t mode), (path, mode))
CREATES(mknod, (const char *path, mode_t mode, dev_t device), (path, mode, device))
CREATES(__xmknod, (int version, const char *path, mode_t mode, dev_t *device), (version, path, mode, device))
CREATES_AT(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode))
CREATES_AT(mkfifoat, (int folder, const char *path, mode_t mode), (folder, path, mode))
CREATES_AT(mknodat, (int folder, const char *path, mode_t mode, dev_t device), (folder, path, mode, device))
CREATES_AT(__xmknodat, (int version, int folder, const char *path, mode_t mode, dev_t *device), (version, folder, path, mode, device))
REMOVES(rmdir, (const char *path), (path))
REMOVES(unlink, (const char *path), (path))
REMOVES(remove, (const char *path), (path))
WITH_PATH(int, -1, to_remove(folder, &path, found), unlinkat, (int folder, const char *path, int flags), (folder, path, flags))

/* Sockets with a path, which has to be short. */
static int find_socket(__CONST_SOCKADDR_ARG address, socklen_t *size, struct sockaddr_un *new, int creates) {
  char path[PATH_MAX], found[PATH_MAX];
  size_t start = offsetof(struct sockaddr_un, sun_path);
  memset(new, 0, sizeof *new);
  if (!address.__sockaddr__ || *size <= start || *size > sizeof *new || address.__sockaddr__->sa_family != AF_UNIX) return 0;
  if (print(path, "%.*s", (int)(*size - start), address.__sockaddr_un__->sun_path)) return -1;
  enum place place = find(AT_FDCWD, path, found);
  if (place != IN_MIRROR) return place == TOO_LONG ? -1 : 0;
  if (creates && make_folders(found)) return -1;
  if (strlen(found) >= sizeof new->sun_path) {
    errno = ENAMETOOLONG;
    return -1;
  }
  new->sun_family = AF_UNIX;
  strcpy(new->sun_path, found);
  *size = sizeof *new;
  return 0;
}
#define NAMES_SOCKET(name, creates)                                                    \
  EXPORT int name(int socket, __CONST_SOCKADDR_ARG address, socklen_t size) {          \
    struct sockaddr_un new;                                                            \
    if (find_socket(address, &size, &new, creates)) return -1;                         \
    if (new.sun_family) address.__sockaddr_un__ = &new;                                \
    return NEXT(name)(socket, address, size);                                          \
  }
NAMES_SOCKET(bind, 1)
NAMES_SOCKET(connect, 0)

/* Two paths. */

#define RENAMES(name, old_folder, new_folder, parameters, arguments)                            \
  EXPORT int name parameters {                                                                  \
    char found[PATH_MAX], found_new[PATH_MAX];                                                  \
    return to_rename(old_folder, &old, found, new_folder, &new, found_new) ? -1 : NEXT(name) arguments; \
  }
RENAMES(rename, AT_FDCWD, AT_FDCWD, (const char *old, const char *new), (old, new))
RENAMES(renameat, from, to, (int from, const char *old, int to, const char *new), (from, old, to, new))
RENAMES(renameat2, from, to, (int from, const char *old, int to, const char *new, unsigned flags), (from, old, to, new, flags))

/* A second name of a file of the user would write to it. */
#define LINKS(name, old_folder, new_folder, follows, parameters, arguments)                                              \
  EXPORT int name parameters {                                                                                           \
    char found[PATH_MAX], found_new[PATH_MAX];                                                                           \
    if (to_write(old_folder, &old, follows, WHOLE, found) || to_create(new_folder, &new, found_new)) return -1;           \
    return NEXT(name) arguments;                                                                                         \
  }
LINKS(link, AT_FDCWD, AT_FDCWD, 0, (const char *old, const char *new), (old, new))
LINKS(linkat, from, to, flags &AT_SYMLINK_FOLLOW, (int from, const char *old, int to, const char *new, int flags), (from, old, to, new, flags))

static int point_into_scratch(const char **target, char *found) {
  enum place place = **target == '/' ? find(AT_FDCWD, *target, found) : ELSEWHERE;
  if (place == TOO_LONG || place == ELSEWHERE) return place;
  *target = found;
  return 0;
}
#define MAKES_LINK(name, folder, parameters, arguments)                                                         \
  EXPORT int name parameters {                                                                                  \
    char found[PATH_MAX], pointed[PATH_MAX];                                                                    \
    if (point_into_scratch(&target, pointed) || to_create(folder, &path, found)) return -1;                      \
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
    if (to_create(AT_FDCWD, (const char **)&path, found)) return failed;      \
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
TEMPORARY(int, -1, made, mkostemps, (char *template, int suffix, int flags), (path, suffix, flags))
TEMPORARY(int, -1, made, mkostemps64, (char *template, int suffix, int flags), (path, suffix, flags))
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
