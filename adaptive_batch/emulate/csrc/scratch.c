/* Preloaded into each process of an emulated program. Before a file of the scratch folder is opened for writing, the link to the program's own file
 * is replaced by a copy, so that the own file stays as it is, whichever library writes. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

static int open_as_it_is(int folder, const char *path, int flags, mode_t mode) {
  return (int)syscall(SYS_openat, folder, path, flags | O_LARGEFILE, mode);
}

static int is_in_scratch(const char *path) {
  const char *scratch = getenv("EMULATE_SCRATCH");
  char folder[PATH_MAX], resolved[PATH_MAX];
  const char *slash = strrchr(path, '/');
  if (!scratch) return 0;
  snprintf(folder, sizeof folder, "%.*s", slash ? (int)(slash - path) + 1 : 1, slash ? path : ".");
  size_t length = strlen(scratch);
  return realpath(folder, resolved) && !strncmp(resolved, scratch, length) && (!resolved[length] || resolved[length] == '/');
}

static void copy(const char *from, const char *to) {
  struct stat status;
  int source = open_as_it_is(AT_FDCWD, from, O_RDONLY, 0);
  if (source < 0) return;
  int target = fstat(source, &status) ? -1 : open_as_it_is(AT_FDCWD, to, O_WRONLY | O_CREAT | O_EXCL, status.st_mode & 0777);
  if (target >= 0) {
    while (sendfile(target, source, NULL, 1 << 30) > 0) {}
    close(target);
  }
  close(source);
}

static void before_writing(int folder, const char *path, int truncates) {
  int error = errno;
  struct stat status;
  char full[PATH_MAX], own[PATH_MAX];
  int is_link = path && !fstatat(folder, path, &status, AT_SYMLINK_NOFOLLOW) && S_ISLNK(status.st_mode);
  if (is_link) {
    if (folder == AT_FDCWD || *path == '/') snprintf(full, sizeof full, "%s", path);
    else snprintf(full, sizeof full, "/proc/self/fd/%d/%s", folder, path);
    if (is_in_scratch(full)) {
      int has_own = realpath(full, own) && !stat(own, &status) && S_ISREG(status.st_mode);
      if (has_own && !unlink(full) && !truncates) copy(own, full);
    }
  }
  errno = error;
}

static int open_for(int folder, const char *path, int flags, mode_t mode) {
  if ((flags & O_ACCMODE) != O_RDONLY) before_writing(folder, path, flags & O_TRUNC);
  return open_as_it_is(folder, path, flags, mode);
}

#define MODE_OF(flags)                        \
  mode_t mode = 0;                            \
  if ((flags) & (O_CREAT | O_TMPFILE)) {      \
    va_list arguments;                        \
    va_start(arguments, flags);               \
    mode = va_arg(arguments, mode_t);         \
    va_end(arguments);                        \
  }

#define OPEN(name)                                                                                                       \
  EXPORT int name(const char *path, int flags, ...) { MODE_OF(flags) return open_for(AT_FDCWD, path, flags, mode); }
#define OPENAT(name)                                                                                                     \
  EXPORT int name(int folder, const char *path, int flags, ...) { MODE_OF(flags) return open_for(folder, path, flags, mode); }
#define CREAT(name)                                                                                                      \
  EXPORT int name(const char *path, mode_t mode) { return open_for(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
#define FOPEN(name)                                                                                                      \
  EXPORT FILE *name(const char *path, const char *mode) {                                                                \
    FILE *(*next)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, #name);        \
    if (strpbrk(mode, "wa+")) before_writing(AT_FDCWD, path, *mode == 'w');                                              \
    return next(path, mode);                                                                                             \
  }

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
