/* The device and its memory: addresses without RAM behind them, and an account of the bytes that were asked for. */
#define _GNU_SOURCE
#include "stack.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE (2 * MIB) /* a driver takes whole pages of the device */
#define ARENA (64ull << 40)
#define BUCKETS 65536

#define DEFAULT_DEVICE "NVIDIA H100 80GB HBM3,90,132,84943715696"

device_model model;
unsigned long long capacity, kept_bytes;
__thread int current_device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned long long context_bytes, used[MAX_DEVICES], peak[MAX_DEVICES];
static unsigned long long mallocs, refusals, frees, copies_kept, copies_dropped;
static int traced, expands;
static char *arena, *lowest; /* addresses fall, as published peaks of reserved memory show of a real driver's */

unsigned long long setting(const char *name, unsigned long long otherwise) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 0) : otherwise;
}

static void report(void) {
  fprintf(stderr, "[emulate] %llu launches, %llu cudaMalloc (%llu refused), %llu cudaFree, %llu copies kept, %llu dropped",
          launches(), mallocs, refusals, frees, copies_kept, copies_dropped);
  for (int device = 0; device < MAX_DEVICES && peak[device]; device++)
    fprintf(stderr, ", device %d peak %.1f MiB", device, peak[device] / (double)MIB);
  fprintf(stderr, "\n");
  report_nccl();
  fprintf(stderr, "[emulate] called, and did nothing:");
  for (int i = 0; default_names[i]; i++)
    if (default_calls[i]) fprintf(stderr, " %s:%lu", default_names[i], default_calls[i]);
  fprintf(stderr, "\n");
}

/* Such as "NVIDIA A10,86,72,23609475072". */
static int read_model(const char *text) {
  static char name[256];
  int capability;
  model = (device_model){.name = name};
  if (sscanf(text, "%255[^,],%d,%d,%llu", name, &capability, &model.multiprocessors, &model.capacity) != 4) return 0;
  model.major = capability / 10, model.minor = capability % 10;
  return 1;
}

__attribute__((constructor)) static void read_settings(void) {
  const char *text = getenv("EMULATE_DEVICE");
  if (!text || !*text) text = DEFAULT_DEVICE;
  if (!read_model(text)) {
    fprintf(stderr, "[emulate] EMULATE_DEVICE=%s: give NAME,CAPABILITY,MULTIPROCESSORS,BYTES, such as %s\n", text, DEFAULT_DEVICE);
    exit(2);
  }
  capacity = setting("EMULATE_CAPACITY", model.capacity);
  context_bytes = setting("EMULATE_CONTEXT_BYTES", 500 * MIB);
  kept_bytes = setting("EMULATE_COPIED_BYTES", 0);
  traced = (int)setting("EMULATE_TRACE", 0);
  expands = (int)setting("EMULATE_VIRTUAL_MEMORY", 1);
  if (setting("EMULATE_CALLS", 0)) atexit(report);
}

/* CUDA reads the variable at its first use, which may be after the program has changed it. */
int device_count(void) {
  static int count = -1;
  if (count >= 0) return count;
  int there = (int)setting("EMULATE_DEVICE_COUNT", 1);
  if (there > MAX_DEVICES) there = MAX_DEVICES;
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (!visible) return count = there;
  int listed = 0;
  for (const char *at = visible; *at && *at != '-' && listed < there; listed++) {
    if (strtol(at, NULL, 10) >= there) break; /* CUDA ignores what follows a device that does not exist */
    at += strcspn(at, ",");
    at += *at == ',';
  }
  return count = listed;
}

/* ---- the account */

int take_bytes(int device, unsigned long long size) {
  pthread_mutex_lock(&lock);
  mallocs++;
  int fits = context_bytes + used[device] + size <= capacity;
  if (fits) used[device] += size;
  else refusals++;
  if (used[device] > peak[device]) peak[device] = used[device];
  pthread_mutex_unlock(&lock);
  if (traced) fprintf(stderr, "[emulate] %.2f MiB asked for: %s\n", size / (double)MIB, fits ? "given" : "REFUSED");
  return fits;
}

void give_back_bytes(int device, unsigned long long size) {
  pthread_mutex_lock(&lock);
  frees++;
  used[device] -= size;
  pthread_mutex_unlock(&lock);
  if (traced) fprintf(stderr, "[emulate] %.2f MiB given back\n", size / (double)MIB);
}

unsigned long long taken_bytes(int device) {
  pthread_mutex_lock(&lock);
  unsigned long long bytes = context_bytes + used[device];
  pthread_mutex_unlock(&lock);
  return bytes;
}

/* For a program on the stack: ctypes.CDLL("libcudastub.so").cudastub_set_reserved(ctypes.c_ulonglong(bytes)) */
EXPORT void cudastub_set_reserved(unsigned long long bytes) {
  pthread_mutex_lock(&lock);
  context_bytes = bytes;
  pthread_mutex_unlock(&lock);
}

void set_context_bytes_by(long long difference) {
  pthread_mutex_lock(&lock);
  context_bytes += (unsigned long long)difference;
  pthread_mutex_unlock(&lock);
}

/* ---- addresses */

static unsigned long long whole_pages(unsigned long long size) { return (size + PAGE - 1) / PAGE * PAGE; }

static void reserve_arena(void) {
  if (!arena) { /* with EMULATE_COPIED_BYTES, what is written costs RAM */
    int access = kept_bytes ? PROT_READ | PROT_WRITE : PROT_NONE;
    arena = mmap(NULL, ARENA, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (arena == MAP_FAILED) { perror("[emulate] mmap"); abort(); }
    madvise(arena, ARENA, MADV_DONTDUMP);
    lowest = (char *)((uintptr_t)(arena + ARENA) / PAGE * PAGE);
  }
}

/* Where the memory of all devices begins, for who reads it on the host. */
EXPORT void *cudastub_arena(unsigned long long *size) {
  pthread_mutex_lock(&lock);
  reserve_arena();
  pthread_mutex_unlock(&lock);
  *size = ARENA;
  return arena;
}

void *new_address(unsigned long long size) {
  pthread_mutex_lock(&lock);
  reserve_arena();
  if ((unsigned long long)(lowest - arena) < whole_pages(size)) { fprintf(stderr, "[emulate] no address is left\n"); abort(); }
  lowest -= whole_pages(size);
  void *address = lowest;
  pthread_mutex_unlock(&lock);
  return address;
}

int on_device(const void *address) { return arena && (const char *)address >= lowest && (const char *)address < arena + ARENA; }

static void forget_content(void *address, unsigned long long size) {
  if (kept_bytes) madvise(address, size, MADV_DONTNEED);
}

/* ---- cudaMalloc */

typedef struct block { void *address; unsigned long long size; int device; struct block *next; } block;
static block *buckets[BUCKETS];
static block **bucket(void *address) { return &buckets[(uintptr_t)address / PAGE % BUCKETS]; }

EXPORT int cudaMalloc(void **address, size_t size) {
  size = whole_pages(size);
  if (!take_bytes(current_device, size)) return failed(OUT_OF_MEMORY);
  *address = new_address(size);
  block *new = malloc(sizeof *new);
  pthread_mutex_lock(&lock);
  *new = (block){*address, size, current_device, *bucket(*address)};
  *bucket(*address) = new;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}

EXPORT int cudaFree(void *address) {
  if (!address) return SUCCESS;
  pthread_mutex_lock(&lock);
  block **at = bucket(address);
  while (*at && (*at)->address != address) at = &(*at)->next;
  block *found = *at;
  if (found) *at = found->next;
  pthread_mutex_unlock(&lock);
  if (!found) return failed(INVALID_VALUE);
  forget_content(address, found->size);
  give_back_bytes(found->device, found->size);
  free(found);
  return SUCCESS;
}

EXPORT int cudaMallocAsync(void **address, size_t size) { return cudaMalloc(address, size); }
EXPORT int cudaFreeAsync(void *address) { return cudaFree(address); }

EXPORT int cudaMemGetInfo(size_t *unused, size_t *total) {
  unsigned long long taken = taken_bytes(current_device);
  *total = capacity;
  *unused = taken > capacity ? 0 : capacity - taken;
  return SUCCESS;
}

EXPORT int cudaMemPoolGetAttribute(void *pool, int attribute, uint64_t *value) {
  (void)pool, (void)attribute;
  *value = used[current_device];
  return SUCCESS;
}

/* ---- memory of the host: pinned, or managed, which is not counted, as a device may evict it */

typedef struct range { const char *address; size_t size; struct range *next; } range;
static range *pinned;

EXPORT int cudaHostRegister(void *address, size_t size) {
  range *new = malloc(sizeof *new);
  pthread_mutex_lock(&lock);
  *new = (range){address, size, pinned};
  pinned = new;
  pthread_mutex_unlock(&lock);
  return SUCCESS;
}
EXPORT int cudaHostUnregister(void *address) {
  pthread_mutex_lock(&lock);
  range **at = &pinned;
  while (*at && (*at)->address != address) at = &(*at)->next;
  range *found = *at;
  if (found) *at = found->next;
  pthread_mutex_unlock(&lock);
  free(found);
  return SUCCESS;
}
static int is_pinned(const char *address) {
  pthread_mutex_lock(&lock);
  range *at = pinned;
  while (at && (address < at->address || address >= at->address + at->size)) at = at->next;
  pthread_mutex_unlock(&lock);
  return at != NULL;
}

EXPORT int cudaHostAlloc(void **address, size_t size) {
  if (posix_memalign(address, 4096, size ? size : 1)) return failed(OUT_OF_MEMORY);
  return cudaHostRegister(*address, size);
}
EXPORT int cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size); }
EXPORT int cudaFreeHost(void *address) { cudaHostUnregister(address); free(address); return SUCCESS; }
EXPORT int cudaMallocManaged(void **address, size_t size) {
  return posix_memalign(address, 4096, size ? size : 1) ? failed(OUT_OF_MEMORY) : SUCCESS;
}

EXPORT int cudaPointerGetAttributes(pointer_attributes *of, const void *address) {
  memset(of, 0, sizeof *of);
  int there = on_device(address);
  int of_host = !there && is_pinned(address);
  of->type = there ? DEVICE_MEMORY : of_host ? HOST_MEMORY : UNREGISTERED_MEMORY;
  of->device = there || of_host ? current_device : -1;
  of->devicePointer = there || of_host ? address : NULL;
  return SUCCESS;
}
EXPORT int cuPointerGetAttribute(void *value, int attribute, void *address) {
  enum { CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3 };
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(void **)value = address;
  else *(unsigned *)value = 0;
  return SUCCESS;
}

/* ---- expandable segments: addresses are reserved; memory is created, which counts, and then mapped there */

typedef struct { unsigned long long size; int device; } physical_memory;

EXPORT int cuMemGetAllocationGranularity(size_t *granularity) { *granularity = PAGE; return SUCCESS; }
EXPORT int cuMemAddressReserve(void **address, size_t size) {
  if (!expands) return NOT_SUPPORTED;
  *address = new_address(size);
  return SUCCESS;
}

EXPORT int cuMemCreate(physical_memory **handle, size_t size, const allocation_properties *properties) {
  physical_memory memory = {whole_pages(size), properties ? properties->device : current_device};
  if (!take_bytes(memory.device, memory.size)) return OUT_OF_MEMORY;
  *handle = malloc(sizeof **handle);
  **handle = memory;
  return SUCCESS;
}

EXPORT int cuMemUnmap(void *address, size_t size) { forget_content(address, size); return SUCCESS; }

EXPORT int cuMemRelease(physical_memory *handle) { /* PyTorch has unmapped it */
  give_back_bytes(handle->device, handle->size);
  free(handle);
  return SUCCESS;
}

/* ---- copies: between the host and itself always; to and from the device as far as EMULATE_COPIED_BYTES says, and else zeros arrive */

static int copy(void *to, const void *from, size_t size) {
  if (!size) return SUCCESS;
  if (size <= kept_bytes || (!on_device(to) && !on_device(from))) {
    memmove(to, from, size);
    copies_kept++;
  } else {
    if (!on_device(to)) memset(to, 0, size);
    copies_dropped++;
  }
  return SUCCESS;
}

EXPORT int cudaMemcpy(void *to, const void *from, size_t size) { return copy(to, from, size); }
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t size) { return copy(to, from, size); }
EXPORT int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size) {
  (void)to_device, (void)from_device;
  return copy(to, from, size);
}
EXPORT int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height) {
  for (size_t row = 0; row < height; row++) copy(to + row * to_pitch, from + row * from_pitch, width);
  return SUCCESS;
}
EXPORT int cudaMemsetAsync(void *to, int value, size_t size) {
  if (size <= kept_bytes) memset(to, value, size);
  return SUCCESS;
}
EXPORT int cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size); }

/* The most that PyTorch had from the driver, and how often the driver refused. */
EXPORT void cudastub_account(int device, unsigned long long *taken, unsigned long long *refused) {
  *taken = peak[device];
  *refused = refusals;
}
