/* NVML, cuBLAS, cuDNN, NVRTC and the like: handles, and the few answers that steer PyTorch. */
#include "stack.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static int give_handle(void **to) { *to = new_handle(); return 0; }

/* ---- NVML: torch.cuda asks how many devices there are, the allocator who uses them when it words an out-of-memory error */

typedef struct { unsigned process; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; } nvml_process;

EXPORT int nvmlDeviceGetCount_v2(int *count) { *count = (int)setting("EMULATE_DEVICE_COUNT", 1); return 0; }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *place, void **device) { (void)place; *device = (void *)0x6000; return 0; }
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) { *device = (void *)(uintptr_t)(0x6000 + number); return 0; }
EXPORT int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  snprintf(text, size, "GPU-00000000-0000-0000-0000-%012lx", (unsigned long)(uintptr_t)device);
  return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION; return 0; }
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, nvml_process *of) {
  enum { NVML_ERROR_INSUFFICIENT_SIZE = 7 };
  (void)device;
  unsigned room = *count;
  *count = 1;
  if (!room) return NVML_ERROR_INSUFFICIENT_SIZE;
  *of = (nvml_process){(unsigned)getpid(), taken_bytes(current_device), ~0u, ~0u};
  return 0;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *device, char *info) { (void)device; memset(info + 4, 0, 25); return 0; /* none */ }

/* ---- cuBLAS and cuBLASLt: there is one algorithm, and it needs no workspace */

typedef struct { uint64_t algorithm[8]; size_t workspace; int state; float waves; int reserved[4]; } lt_result;

EXPORT int cublasCreate_v2(void **handle) { return give_handle(handle); }
EXPORT int cublasGetPointerMode_v2(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
EXPORT int cublasGetMathMode(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
EXPORT int cublasGetStream_v2(void *handle, void **stream) { (void)handle; *stream = NULL; return 0; }
EXPORT size_t cublasLtGetVersion(void) { return CUDA_VERSION * 10 + 101; }
EXPORT int cublasLtCreate(void **handle) { return give_handle(handle); }
EXPORT int cublasLtMatmulDescCreate(void **description) { return give_handle(description); }
EXPORT int cublasLtMatrixLayoutCreate(void **layout) { return give_handle(layout); }
EXPORT int cublasLtMatmulPreferenceCreate(void **preference) { return give_handle(preference); }
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference,
                                          int asked, lt_result *result, int *found) {
  (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)asked;
  memset(result, 0, sizeof *result);
  result->waves = 1;
  *found = 1;
  return 0;
}
EXPORT int cusparseCreate(void **handle) { return give_handle(handle); }
EXPORT int cusolverDnCreate(void **handle) { return give_handle(handle); }

/* ---- cuDNN: cudnn_frontend, compiled into PyTorch, finds one engine for each graph, which wants EMULATE_CUDNN_WORKSPACE bytes */

EXPORT int cudnnCreate(void **handle) { return give_handle(handle); }
EXPORT const char *cudnnGetErrorString(int error) { (void)error; return "an error of the stack"; }
EXPORT size_t cudnnGetVersion(void) { return CUDNN_VERSION; }
EXPORT size_t cudnnGetCudartVersion(void) { return CUDA_VERSION; }
EXPORT int cudnnGetProperty(int what, int *value) {
  int parts[] = {CUDNN_VERSION / 10000, CUDNN_VERSION / 100 % 100, CUDNN_VERSION % 100};
  *value = parts[what];
  return 0;
}
EXPORT int cudnnBackendCreateDescriptor(int type, void **descriptor) { (void)type; return give_handle(descriptor); }
EXPORT int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t asked, int64_t *count, void *value) {
  enum { HANDLE_OR_FLAG_A = 9, INT64 = 3, DESCRIPTOR = 15, HANDLE_OR_FLAG_B = 23 };
  enum { HEURISTIC_RESULTS = 202, CONFIGURATION_ENGINE = 300, PLAN_WORKSPACE_SIZE = 402 };
  (void)descriptor;
  int64_t found = 0;
  if (type == INT64) {
    found = 1;
    if (value && asked > 0) *(int64_t *)value = name == PLAN_WORKSPACE_SIZE ? (int64_t)setting("EMULATE_CUDNN_WORKSPACE", 0) : 0;
  } else if (type == DESCRIPTOR) {
    found = name == HEURISTIC_RESULTS || name == CONFIGURATION_ENGINE;
  } else if (type == HANDLE_OR_FLAG_A || type == HANDLE_OR_FLAG_B) {
    found = 1;
    if (value && asked > 0) *(int32_t *)value = 0;
  }
  if (count) *count = found;
  return 0;
}

/* ---- the compiler at run time, the profiler */

EXPORT int nvrtcVersion(int *major, int *minor) { *major = CUDA_VERSION / 1000; *minor = CUDA_VERSION / 10 % 100; return 0; }
EXPORT int nvrtcCreateProgram(void **program) { return give_handle(program); }
static int give_size(size_t *size) { *size = 1; return 0; }
EXPORT int nvrtcGetPTXSize(void *program, size_t *size) { (void)program; return give_size(size); }
EXPORT int nvrtcGetCUBINSize(void *program, size_t *size) { (void)program; return give_size(size); }
EXPORT int nvrtcGetProgramLogSize(void *program, size_t *size) { (void)program; return give_size(size); }
EXPORT int nvrtcGetLoweredName(void *program, const char *name, const char **lowered) { (void)program; *lowered = name; return 0; }
EXPORT int cuptiGetVersion(uint32_t *version) { *version = CUDA_VERSION * 10; return 0; }
