/* A CUDA without a device: what its files share, and the few of CUDA's own types that they need.
 *
 * CUDA's functions are written here with the arguments that they look at. What follows these in a caller's registers is left there,
 * which the calling conventions of x86-64 and AArch64 allow. Enumerations are `int`, handles are `void *`.
 */
#ifndef CUDA_STACK_H
#define CUDA_STACK_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define MIB (1024ull * 1024)
#define GIB (1024ull * MIB)
#define MAX_DEVICES 16

/* The same numbers in the runtime (cudaError_t) and in the driver (CUresult). */
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };

/* Fields at their places in CUDA's structures, which layouts.c compares with NVIDIA's headers. */
#define FIELD(place, declaration) FIELD_(place, declaration)
#define FIELD_(place, declaration) struct { char before_##place[place]; declaration; }

#if CUDA_VERSION >= 13000
#define SINCE_13(place, before) place
#define DEVICE_PROPERTIES_SIZE 1008
#define POINTER_ATTRIBUTES_SIZE 88
#else
#define SINCE_13(place, before) before
#define DEVICE_PROPERTIES_SIZE 1032
#define POINTER_ATTRIBUTES_SIZE 24
#endif
#define MOVED(place, before, declaration) FIELD(SINCE_13(place, before), declaration)

typedef union {
  char bytes[DEVICE_PROPERTIES_SIZE];
  char name[256];
  FIELD(256, char uuid[16]);
  FIELD(288, size_t totalGlobalMem);
  FIELD(296, size_t sharedMemPerBlock);
  FIELD(304, int regsPerBlock);
  FIELD(308, int warpSize);
  FIELD(312, size_t memPitch);
  FIELD(320, int maxThreadsPerBlock);
  FIELD(324, int maxThreadsDim[3]);
  FIELD(336, int maxGridSize[3]);
  FIELD(352, size_t totalConstMem);
  FIELD(360, int major);
  FIELD(364, int minor);
  FIELD(368, size_t textureAlignment);
  FIELD(376, size_t texturePitchAlignment);
  MOVED(384, 388, int multiProcessorCount);
  MOVED(392, 400, int canMapHostMemory);
  MOVED(560, 576, int concurrentKernels);
  MOVED(564, 580, int ECCEnabled);
  MOVED(568, 584, int pciBusID);
  MOVED(584, 600, int asyncEngineCount);
  MOVED(588, 604, int unifiedAddressing);
  MOVED(592, 612, int memoryBusWidth);
  MOVED(596, 616, int l2CacheSize);
  MOVED(604, 624, int maxThreadsPerMultiProcessor);
  MOVED(608, 628, int streamPrioritiesSupported);
  MOVED(612, 632, int globalL1CacheSupported);
  MOVED(616, 636, int localL1CacheSupported);
  MOVED(624, 640, size_t sharedMemPerMultiprocessor);
  MOVED(632, 648, int regsPerMultiprocessor);
  MOVED(636, 652, int managedMemory);
  MOVED(668, 688, int cooperativeLaunch);
  MOVED(672, 696, size_t sharedMemPerBlockOptin);
  MOVED(688, 712, int maxBlocksPerMultiProcessor);
  MOVED(696, 720, size_t reservedSharedMemPerBlock);
  MOVED(704, 728, int hostRegisterSupported);
  MOVED(720, 744, int memoryPoolsSupported);
  MOVED(748, 772, int clusterLaunch);
  MOVED(752, 776, int unifiedFunctionPointers);
} device_properties; /* cudaDeviceProp */
_Static_assert(sizeof(device_properties) == DEVICE_PROPERTIES_SIZE, "a field is not at its place");

typedef union {
  char bytes[POINTER_ATTRIBUTES_SIZE];
  int type;
  FIELD(4, int device);
  FIELD(8, const void *devicePointer);
} pointer_attributes; /* cudaPointerAttributes */
_Static_assert(sizeof(pointer_attributes) == POINTER_ATTRIBUTES_SIZE, "a field is not at its place");
enum { UNREGISTERED_MEMORY = 0, HOST_MEMORY = 1, DEVICE_MEMORY = 2 };

typedef union {
  char bytes[144];
  FIELD(24, int maxThreadsPerBlock);
  FIELD(28, int numRegs);
  FIELD(32, int ptxVersion);
  FIELD(36, int binaryVersion);
  FIELD(44, int maxDynamicSharedSizeBytes);
} function_attributes; /* cudaFuncAttributes */
_Static_assert(sizeof(function_attributes) == 144, "a field is not at its place");

typedef union {
  char bytes[32];
  FIELD(12, int device); /* location.id */
} allocation_properties; /* CUmemAllocationProp */
_Static_assert(sizeof(allocation_properties) == 32, "a field is not at its place");

/* ---- memory.c */

typedef struct {
  const char *name;
  int major, minor, multiprocessors;
  unsigned long long capacity; /* totalGlobalMem as drivers tell it */
} device_model;

extern device_model model;
extern unsigned long long capacity, kept_bytes;
extern __thread int current_device;

unsigned long long setting(const char *name, unsigned long long otherwise);
int failed(int error);                               /* remembers it for cudaGetLastError */
int device_count(void);                             /* those that CUDA_VISIBLE_DEVICES leaves */
int on_device(const void *address);
int take_bytes(int device, unsigned long long size); /* 0: the device has not so much */
void give_back_bytes(int device, unsigned long long size);
unsigned long long taken_bytes(int device);          /* the context's included */
void *new_address(unsigned long long size);          /* of a device, with no memory behind it */
void set_context_bytes_by(long long difference);
int cudaMalloc(void **address, size_t size);
int cudaFree(void *address);

/* ---- the other files */

void *new_handle(void);                        /* runtime.c */
unsigned long long launches(void);             /* runtime.c */
int cudaDeviceGetAttribute(int *value, int attribute, int device);
const char *cudaGetErrorString(int error);
void report_nccl(void);                        /* nccl.c */

/* Made by build.py: every function that PyTorch imports and no file here has; each returns 0 and counts its calls. */
extern const char *const default_names[];
extern unsigned long default_calls[];

void unknown_workspace(const char *function); /* sizes.c: for the report */

#endif
