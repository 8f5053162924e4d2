/* The device's properties; streams, events and kernels, which do nothing and are done at once; CUDA's driver. */
#define _GNU_SOURCE
#include "stack.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static __thread int last_error;

int failed(int error) { return last_error = error; }

EXPORT int cudaGetLastError(void) {
  int error = last_error;
  last_error = SUCCESS;
  return error;
}
EXPORT int cudaPeekAtLastError(void) { return last_error; }
EXPORT const char *cudaGetErrorString(int error) {
  switch (error) {
    case SUCCESS: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    default: return "unknown error";
  }
}
EXPORT const char *cudaGetErrorName(int error) {
  switch (error) {
    case SUCCESS: return "cudaSuccess";
    case INVALID_VALUE: return "cudaErrorInvalidValue";
    case OUT_OF_MEMORY: return "cudaErrorMemoryAllocation";
    case NO_DEVICE: return "cudaErrorNoDevice";
    case INVALID_DEVICE: return "cudaErrorInvalidDevice";
    default: return "cudaErrorUnknown";
  }
}
EXPORT int cuGetErrorString(int error, const char **text) { *text = cudaGetErrorString(error); return SUCCESS; }

/* ---- devices */

static int set(int *to, int value) { *to = value; return SUCCESS; }

EXPORT int cudaGetDeviceCount(int *count) { return set(count, device_count()), *count ? SUCCESS : failed(NO_DEVICE); }
EXPORT int cudaGetDevice(int *device) { return set(device, current_device); }
EXPORT int cudaSetDevice(int device) {
  if (device < 0 || device >= device_count()) return failed(INVALID_DEVICE);
  return set(&current_device, device);
}
EXPORT int cudaDriverGetVersion(int *version) { return set(version, CUDA_VERSION); }
EXPORT int cudaRuntimeGetVersion(int *version) { return set(version, CUDA_VERSION); }
EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer) { return set(can, device != peer); }
EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return set(least, 0), set(greatest, -5); }
EXPORT int cudaDeviceGetDefaultMemPool(void **pool, int device) { *pool = (void *)(uintptr_t)(0x4000 + device); return SUCCESS; }
EXPORT int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  snprintf(text, (size_t)size, "0000:%02x:00.0", device + 1);
  return SUCCESS;
}

static size_t shared_per_multiprocessor(void) { /* CUDA C++ programming guide, technical specifications per compute capability */
  if (model.major == 7) return model.minor == 5 ? 65536 : 98304;
  if (model.major == 9 || model.major == 10) return 233472;
  return model.major == 8 && model.minor == 0 ? 167936 : 102400;
}

static int threads_per_multiprocessor(void) { /* the same table of the guide */
  if (model.major == 7 && model.minor == 5) return 1024;
  return (model.major == 8 && model.minor != 0) || model.major == 12 ? 1536 : 2048;
}

EXPORT int cudaGetDeviceProperties(device_properties *of, int device) {
  memset(of, 0, sizeof *of);
  snprintf(of->name, sizeof of->name, "%s", model.name);
  memset(of->uuid, device + 1, sizeof of->uuid);
  of->totalGlobalMem = capacity;
  of->major = model.major;
  of->minor = model.minor;
  of->multiProcessorCount = model.multiprocessors;
  of->l2CacheSize = 50 * MIB;
  of->sharedMemPerBlock = 49152;
  of->sharedMemPerMultiprocessor = shared_per_multiprocessor();
  of->sharedMemPerBlockOptin = of->sharedMemPerMultiprocessor - 1024;
  of->reservedSharedMemPerBlock = 1024;
  of->regsPerBlock = of->regsPerMultiprocessor = 65536;
  of->warpSize = 32;
  of->maxThreadsPerBlock = of->maxThreadsDim[0] = of->maxThreadsDim[1] = 1024;
  of->maxThreadsDim[2] = 64;
  of->maxGridSize[0] = 2147483647;
  of->maxGridSize[1] = of->maxGridSize[2] = 65535;
  of->maxThreadsPerMultiProcessor = threads_per_multiprocessor();
  of->maxBlocksPerMultiProcessor = 32;
  of->memPitch = 2147483647;
  of->totalConstMem = 65536;
  of->textureAlignment = 512;
  of->texturePitchAlignment = 32;
  of->memoryBusWidth = 5120;
  of->asyncEngineCount = 3;
  of->pciBusID = device + 1;
  of->canMapHostMemory = of->concurrentKernels = of->ECCEnabled = of->unifiedAddressing = of->streamPrioritiesSupported = 1;
  of->globalL1CacheSupported = of->localL1CacheSupported = of->managedMemory = of->cooperativeLaunch = 1;
  of->hostRegisterSupported = of->memoryPoolsSupported = of->unifiedFunctionPointers = 1;
  of->clusterLaunch = model.major >= 9;
  return SUCCESS;
}
EXPORT int cudaGetDeviceProperties_v2(device_properties *of, int device) { return cudaGetDeviceProperties(of, device); }

EXPORT int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  device_properties of;
  cudaGetDeviceProperties(&of, device);
  switch (attribute) { /* cudaDeviceAttr and CUdevice_attribute have the same numbers */
    case 1: return set(value, of.maxThreadsPerBlock);
    case 2: case 3: case 4: return set(value, of.maxThreadsDim[attribute - 2]);
    case 5: case 6: case 7: return set(value, of.maxGridSize[attribute - 5]);
    case 8: return set(value, (int)of.sharedMemPerBlock);
    case 10: return set(value, of.warpSize);
    case 12: return set(value, of.regsPerBlock);
    case 13: return set(value, 1980000); /* clock, kHz */
    case 16: return set(value, of.multiProcessorCount);
    case 19: return set(value, of.canMapHostMemory);
    case 31: return set(value, of.concurrentKernels);
    case 36: return set(value, 2619000); /* clock of its memory, kHz */
    case 37: return set(value, of.memoryBusWidth);
    case 38: return set(value, of.l2CacheSize);
    case 39: return set(value, of.maxThreadsPerMultiProcessor);
    case 41: return set(value, of.unifiedAddressing);
    case 75: return set(value, of.major);
    case 76: return set(value, of.minor);
    case 78: return set(value, of.streamPrioritiesSupported);
    case 81: return set(value, (int)of.sharedMemPerMultiprocessor);
    case 82: return set(value, of.regsPerMultiprocessor);
    case 83: return set(value, of.managedMemory);
    case 95: return set(value, of.cooperativeLaunch);
    case 97: return set(value, (int)of.sharedMemPerBlockOptin);
    case 106: return set(value, of.maxBlocksPerMultiProcessor);
    case 111: return set(value, (int)of.reservedSharedMemPerBlock);
    case 115: return set(value, of.memoryPoolsSupported);
    case 120: return set(value, of.clusterLaunch);
    default: return set(value, 0);
  }
}

/* ---- streams, events, graphs */

void *new_handle(void) {
  static uintptr_t newest = 0x10000;
  return (void *)__atomic_add_fetch(&newest, 16, __ATOMIC_RELAXED);
}
static int give_handle(void **to) { *to = new_handle(); return SUCCESS; }

EXPORT int cudaStreamCreate(void **stream) { return give_handle(stream); }
EXPORT int cudaStreamCreateWithFlags(void **stream) { return give_handle(stream); }
EXPORT int cudaStreamCreateWithPriority(void **stream) { return give_handle(stream); }
EXPORT int cudaStreamGetPriority(void *stream, int *priority) { (void)stream; return set(priority, 0); }

/* An event has the host's time, as what was asked of the device is done at once; 0 would be divided by. */
EXPORT int cudaEventCreate(double **event) { *event = calloc(1, sizeof **event); return SUCCESS; }
EXPORT int cudaEventCreateWithFlags(double **event) { return cudaEventCreate(event); }
EXPORT int cudaEventDestroy(double *event) { free(event); return SUCCESS; }
EXPORT int cudaEventRecord(double *event) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *event = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
  return SUCCESS;
}
EXPORT int cudaEventRecordWithFlags(double *event) { return cudaEventRecord(event); }
EXPORT int cudaEventElapsedTime(float *milliseconds, const double *start, const double *end) {
  *milliseconds = *end - *start > 0.001 ? (float)(*end - *start) : 0.001f;
  return SUCCESS;
}

/* A stream that captures says so until its capture ends, which steers the allocator. The graph holds nothing. */
enum { MOST_CAPTURES = 64 };
static struct { void *stream; unsigned long long number; } captures[MOST_CAPTURES];
static unsigned long long newest_capture;
static pthread_mutex_t capturing = PTHREAD_MUTEX_INITIALIZER;

static unsigned long long capture_of(void *stream) {
  unsigned long long number = 0;
  pthread_mutex_lock(&capturing);
  for (int i = 0; i < MOST_CAPTURES; i++)
    if (captures[i].number && captures[i].stream == stream) number = captures[i].number;
  pthread_mutex_unlock(&capturing);
  return number;
}
static int change_capture(unsigned long long from, unsigned long long to, void *stream) {
  int found = 0;
  pthread_mutex_lock(&capturing);
  for (int i = 0; i < MOST_CAPTURES && !found; i++)
    if (captures[i].number == from) captures[i].stream = stream, captures[i].number = to, found = 1;
  pthread_mutex_unlock(&capturing);
  return found ? SUCCESS : failed(INVALID_VALUE);
}
EXPORT int cudaStreamBeginCapture(void *stream) {
  return change_capture(0, __atomic_add_fetch(&newest_capture, 1, __ATOMIC_RELAXED), stream);
}
EXPORT int cudaStreamBeginCaptureToGraph(void *stream) { return cudaStreamBeginCapture(stream); }
EXPORT int cudaStreamEndCapture(void *stream, void **graph) {
  unsigned long long number = capture_of(stream);
  if (graph) *graph = new_handle();
  return number ? change_capture(number, 0, NULL) : SUCCESS;
}
EXPORT int cudaStreamIsCapturing(void *stream, int *status) { return set(status, capture_of(stream) != 0); }
EXPORT int cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *number, void **graph, void **dependencies, size_t *count) {
  unsigned long long found = capture_of(stream);
  if (number) *number = found;
  if (graph) *graph = found ? new_handle() : NULL;
  if (dependencies) *dependencies = NULL;
  if (count) *count = 0;
  return set(status, found != 0);
}
EXPORT int cudaStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *number, void **graph, void **dependencies, void **edges, size_t *count) {
  if (edges) *edges = NULL;
  return cudaStreamGetCaptureInfo_v2(stream, status, number, graph, dependencies, count);
}
#if CUDA_VERSION >= 13000
EXPORT int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *number, void **graph, void **dependencies, void **edges, size_t *count) {
  return cudaStreamGetCaptureInfo_v3(stream, status, number, graph, dependencies, edges, count);
}
#else
EXPORT int cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *number) {
  return cudaStreamGetCaptureInfo_v2(stream, status, number, NULL, NULL, NULL);
}
#endif
EXPORT int cudaGraphCreate(void **graph) { return give_handle(graph); }
EXPORT int cudaGraphInstantiate(void **graph) { return give_handle(graph); }
EXPORT int cudaGraphInstantiateWithFlags(void **graph) { return give_handle(graph); }
EXPORT int cudaGraphGetNodes(void *graph, void **nodes, size_t *count) { /* PyTorch warns of an empty graph */
  (void)graph;
  if (nodes && *count) *nodes = new_handle();
  *count = 1;
  return SUCCESS;
}
EXPORT int cudaGraphNodeGetDependencies(void *node, void **dependencies, size_t *count) {
  (void)node, (void)dependencies;
  if (CUDA_VERSION < 13000) *count = 0; /* since 13 the edges come before the count, which PyTorch sets to 0 */
  return SUCCESS;
}

EXPORT int cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) { (void)stream; function(data); return SUCCESS; }
EXPORT int cudaStreamAddCallback(void *stream, void (*function)(void *, int, void *), void *data) {
  function(stream, SUCCESS, data);
  return SUCCESS;
}

/* ---- kernels: counted; after so many of them another process takes or gives back memory (EMULATE_SQUEEZE) */

static unsigned long long launched_kernels;
static struct { unsigned long long after; long long bytes; } squeezes[16];
static int squeeze_count, squeezes_done;
static pthread_mutex_t squeezing = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void read_squeezes(void) {
  for (const char *at = getenv("EMULATE_SQUEEZE"); at && *at && squeeze_count < 16; squeeze_count++) {
    char *end;
    squeezes[squeeze_count].after = strtoull(at, &end, 0);
    squeezes[squeeze_count].bytes = *end == ':' ? strtoll(end + 1, &end, 0) : 0;
    at = *end == ',' ? end + 1 : end + strlen(end);
  }
}

unsigned long long launches(void) { return __atomic_load_n(&launched_kernels, __ATOMIC_RELAXED); }
EXPORT unsigned long long cudastub_launches(void) { return launches(); }

static int launch(void) {
  unsigned long long count = __atomic_add_fetch(&launched_kernels, 1, __ATOMIC_RELAXED);
  if (squeezes_done == squeeze_count) return SUCCESS;
  pthread_mutex_lock(&squeezing);
  while (squeezes_done < squeeze_count && count >= squeezes[squeezes_done].after) {
    long long bytes = squeezes[squeezes_done++].bytes;
    set_context_bytes_by(bytes);
    fprintf(stderr, "[emulate] launch %llu: %+.1f MiB are taken from outside\n", count, bytes / (double)MIB);
  }
  pthread_mutex_unlock(&squeezing);
  return SUCCESS;
}

/* Two kernels compute, on tensors of 64-bit integers, where values are kept: the comparison and the sum of all. torch.distributed sends
 * pickled objects over NCCL in tensors, and needs both for their lengths. */
typedef struct { unsigned x, y, z; } dimensions;
typedef void computation(void **arguments);
static struct { const void *function; computation *compute; } computed[32];
static int computed_count;

static void compare(void **arguments) {
  enum { GREATER_OR_EQUAL, GREATER, LESS_OR_EQUAL, LESS };
  int count = *(int *)arguments[0], which = *(int *)arguments[1];
  void **data = arguments[2]; /* the result and the two operands */
  const int64_t *a = data[1], *b = data[2];
  for (int i = 0; i < count; i++)
    ((char *)data[0])[i] = which == GREATER_OR_EQUAL ? a[i] >= b[i] : which == GREATER ? a[i] > b[i] : which == LESS_OR_EQUAL ? a[i] <= b[i] : a[i] < b[i];
}

static void sum(void **arguments) {
  const union { /* at::native::ReduceOp */
    FIELD(20, int inputs);
    FIELD(24, int outputs);
    FIELD(992, const int64_t *from);
    FIELD(1000, int64_t *to);
  } *reduction = arguments[0];
  if (reduction->outputs != 1 || !on_device(reduction->from) || !on_device(reduction->to)) return;
  int64_t total = 0;
  for (int i = 0; i < reduction->inputs; i++) total += reduction->from[i];
  *reduction->to = total;
}

EXPORT int __cudaRegisterFunction(void **module, const void *function, const char *unused, const char *name) {
  (void)module, (void)unused;
  computation *compute = NULL;
  if (!kept_bytes || computed_count == 32) return SUCCESS;
  int of_three_places = strstr(name, "arrayIPcLm3EE") || strstr(name, "ArrayIPcLi3EE");
  if (strstr(name, "elementwise_kernelI") && strstr(name, "14CompareFunctorIlEE") && of_three_places) compute = compare;
  if (strstr(name, "13reduce_kernelILi512ELi1E") && strstr(name, "11sum_functorIlll")) compute = sum;
  if (compute) computed[computed_count].function = function, computed[computed_count++].compute = compute;
  return SUCCESS;
}

static int launch_kernel(const void *function, void **arguments) {
  for (int i = 0; i < computed_count; i++)
    if (computed[i].function == function) computed[i].compute(arguments);
  return launch();
}

EXPORT void **__cudaRegisterFatBinary(void) { static void *handle; return &handle; }
EXPORT int __cudaGetKernel(const void **kernel, const void *function) { *kernel = function; return SUCCESS; }
EXPORT int __cudaLaunchKernel(const void *function, dimensions grid, dimensions block, void **arguments) {
  (void)grid, (void)block;
  return launch_kernel(function, arguments);
}
EXPORT int cudaLaunchKernel(const void *function, dimensions grid, dimensions block, void **arguments) {
  return __cudaLaunchKernel(function, grid, block, arguments);
}
EXPORT int cudaLaunchCooperativeKernel(void) { return launch(); }
EXPORT int cudaLaunchKernelExC(void) { return launch(); }
EXPORT int cuLaunchKernel(void) { return launch(); }
EXPORT int cuLaunchKernelEx(void) { return launch(); }

EXPORT int cudaFuncGetAttributes(function_attributes *of) {
  /* CUB chooses by what was compiled for the device: the newest of the wheel's architectures that it can run. */
  static const int compiled[] = {120, 100, 90, 86, 80};
  int architecture = model.major * 10 + model.minor;
  for (size_t i = 0; i < sizeof compiled / sizeof *compiled; i++)
    if (compiled[i] <= architecture && compiled[i] / 10 == model.major) { architecture = compiled[i]; break; }
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->numRegs = 64;
  of->ptxVersion = of->binaryVersion = architecture;
  of->maxDynamicSharedSizeBytes = 49152;
  return SUCCESS;
}
EXPORT int cuFuncGetAttribute(int *value, int attribute) {
  enum { CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0, CU_FUNC_ATTRIBUTE_NUM_REGS = 4 };
  return set(value, attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0);
}
static int blocks_of(int threads) { return threads > 512 ? 1 : 2; }
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads) {
  (void)function;
  return set(blocks, blocks_of(threads));
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads) {
  (void)function;
  return set(blocks, blocks_of(threads));
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads) {
  (void)function;
  return set(blocks, blocks_of(threads));
}
EXPORT int cuOccupancyMaxActiveClusters(int *clusters) { return set(clusters, 1); }
EXPORT int cudaGetSymbolAddress(void **address) { *address = new_address(1); return SUCCESS; }
EXPORT int cudaLibraryLoadData(void **library) { return give_handle(library); }
EXPORT int cudaLibraryGetKernel(void **kernel) { return give_handle(kernel); }

/* ---- the driver: what PyTorch looks up by name */

static void *function_of_driver(const char *name) {
  static void *self;
  if (!self) {
    Dl_info here;
    dladdr((void *)&launches, &here);
    self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  }
  return dlsym(self, name);
}
static int entry_point(const char *name, void **function, int *result) {
  *function = function_of_driver(name);
  if (result) *result = *function ? 0 : 1; /* cudaDriverEntryPointSuccess, ...SymbolNotFound */
  return SUCCESS;
}
EXPORT int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *result) {
  (void)flags;
  return entry_point(name, function, result);
}
EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *result) {
  (void)version, (void)flags;
  return entry_point(name, function, result);
}

EXPORT int cuDriverGetVersion(int *version) { return set(version, CUDA_VERSION); }
EXPORT int cuDeviceGetCount(int *count) { return set(count, device_count()); }
EXPORT int cuDeviceGet(int *device, int number) { return set(device, number); }
EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) { return cudaDeviceGetAttribute(value, attribute, device); }
static int context_of(void **context, int device) { *context = (void *)(uintptr_t)(0x5000 + device); return SUCCESS; }
EXPORT int cuCtxGetCurrent(void **context) { return context_of(context, current_device); }
EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) { return context_of(context, device); }
EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { (void)device; *flags = 0; return set(active, 1); }
EXPORT int cuModuleLoad(void **module) { return give_handle(module); }
EXPORT int cuModuleLoadData(void **module) { return give_handle(module); }
EXPORT int cuModuleLoadDataEx(void **module) { return give_handle(module); }
EXPORT int cuModuleGetFunction(void **function) { return give_handle(function); }
