/* Preloaded into each process of an emulated program. Any library may write a file of the scratch folder: before it does, this one replaces the link
 * to the program's own file by a copy, so the own file stays as it is. */
#undef _FORTIFY_SOURCE /* it declares some of these functions otherwise */
#define _GNU_SOURCE
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
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static int open_as_it_is(int folder, const char *path, int flags, mode_t mode) {
  return (int)syscall(SYS_openat, folder, path, flags | O_LARGEFILE, mode);
}

static int is_below(const char *path, const char *folder) {
  size_t length = strlen(folder);
  return !strncmp(path, folder, length) && (!path[length] || path[length] == '/');
}

static int is_in_scratch(const char *path, const char *scratch) {
  char folder[PATH_MAX], resolved[PATH_MAX];
  const char *slash = strrchr(path, '/');
  snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
  return realpath(folder, resolved) && is_below(resolved, scratch);
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

/* The link becomes a copy in one step, so that other processes find one or the other. */
static int replace_link(const char *link, const char *own, mode_t mode, int truncates) {
  char new[PATH_MAX + 32];
  snprintf(new, sizeof new, "%s.%d.new", link, (int)getpid());
  int source = open_as_it_is(AT_FDCWD, own, O_RDONLY, 0);
  int target = source < 0 ? -1 : open_as_it_is(AT_FDCWD, new, O_WRONLY | O_CREAT | O_TRUNC, 0600);
  int failed = target < 0 || (!truncates && copy(source, target)) || fchmod(target, (mode & 0777) | 0200);
  int error = errno;
  if (source >= 0) close(source);
  if (target >= 0) close(target);
  if (!failed && !rename(new, link)) return 0;
  if (!failed) error = errno;
  unlink(new);
  errno = error;
  return -1;
}

/* Returns 0 if the file may be written: it is no link of the scratch folder to a file outside, or no longer. */
static int before_writing(int folder, const char *path, int truncates) {
  const char *scratch = getenv("EMULATE_SCRATCH");
  int error = errno, result = 0;
  struct stat status;
  char full[PATH_MAX], own[PATH_MAX];
  if (!scratch || !path || fstatat(folder, path, &status, AT_SYMLINK_NOFOLLOW) || !S_ISLNK(status.st_mode)) goto end;
  if (folder == AT_FDCWD || *path == '/') snprintf(full, sizeof full, "%s", path);
  else snprintf(full, sizeof full, "/proc/self/fd/%d/%s", folder, path);
  if (!is_in_scratch(full, scratch)) goto end;
  int lock = open_as_it_is(AT_FDCWD, scratch, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (lock >= 0) flock(lock, LOCK_EX); /* ranks write to the same files */
  int is_link = !lstat(full, &status) && S_ISLNK(status.st_mode);
  if (is_link && realpath(full, own) && !is_below(own, scratch) && !stat(own, &status) && S_ISREG(status.st_mode))
    result = replace_link(full, own, status.st_mode, truncates);
  if (lock >= 0) {
    int kept = errno;
    close(lock);
    errno = kept;
  }
  if (result) return result;
end:
  errno = error;
  return 0;
}

static int open_for(int folder, const char *path, int flags, mode_t mode) {
  int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_TRUNC;
  if (writes && before_writing(folder, path, flags & O_TRUNC)) return -1;
  return open_as_it_is(folder, path, flags, mode);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
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
#define FOPEN(name)                                                                                                                  \
  EXPORT FILE *name(const char *path, const char *mode) {                                                                            \
    return strpbrk(mode, "wa+") && before_writing(AT_FDCWD, path, *mode == 'w' && !strchr(mode, 'x')) ? NULL : NEXT(name)(path, mode); \
  }
#define FREOPEN(name)                                                                                                                        \
  EXPORT FILE *name(const char *path, const char *mode, FILE *stream) {                                                                      \
    return strpbrk(mode, "wa+") && before_writing(AT_FDCWD, path, *mode == 'w') ? NULL : NEXT(name)(path, mode, stream);                      \
  }
#define TRUNCATE(name) \
  EXPORT int name(const char *path, off_t length) { return before_writing(AT_FDCWD, path, 0) ? -1 : NEXT(name)(path, length); }

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
FOPEN(fopen)
FOPEN(fopen64)
FREOPEN(freopen)
FREOPEN(freopen64)
TRUNCATE(truncate)
TRUNCATE(truncate64)

EXPORT int chmod(const char *path, mode_t mode) { return before_writing(AT_FDCWD, path, 0) ? -1 : NEXT(chmod)(path, mode); }
EXPORT int fchmodat(int folder, const char *path, mode_t mode, int flags) {
  return before_writing(folder, path, 0) ? -1 : NEXT(fchmodat)(folder, path, mode, flags);
}
