/* Compares stack.h with NVIDIA's headers, for who has them (the wheel nvidia-cuda-runtime brings them):
 *
 *     gcc -fsyntax-only -w -DCUDA_VERSION_OF_STACK=13000 -I SITE_PACKAGES/nvidia/cu13/include layouts.c
 */
#include <cuda.h>
#include <cuda_runtime_api.h>

#undef CUDA_VERSION
#define CUDA_VERSION CUDA_VERSION_OF_STACK
#define cudaMalloc stack_cudaMalloc
#define cudaFree stack_cudaFree
#define cudaDeviceGetAttribute stack_cudaDeviceGetAttribute
#define cudaGetErrorString stack_cudaGetErrorString
#include "stack.h"

#define SAME(ours, theirs, field, of) _Static_assert(offsetof(ours, field) == offsetof(theirs, of), #of)
#define SAME_SIZE(ours, theirs) _Static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define PROPERTY(field) SAME(device_properties, struct cudaDeviceProp, field, field)

SAME_SIZE(device_properties, struct cudaDeviceProp);
PROPERTY(name);
PROPERTY(uuid);
PROPERTY(totalGlobalMem);
PROPERTY(sharedMemPerBlock);
PROPERTY(regsPerBlock);
PROPERTY(warpSize);
PROPERTY(memPitch);
PROPERTY(maxThreadsPerBlock);
PROPERTY(maxThreadsDim);
PROPERTY(maxGridSize);
PROPERTY(totalConstMem);
PROPERTY(major);
PROPERTY(minor);
PROPERTY(textureAlignment);
PROPERTY(texturePitchAlignment);
PROPERTY(multiProcessorCount);
PROPERTY(canMapHostMemory);
PROPERTY(concurrentKernels);
PROPERTY(ECCEnabled);
PROPERTY(pciBusID);
PROPERTY(asyncEngineCount);
PROPERTY(unifiedAddressing);
PROPERTY(memoryBusWidth);
PROPERTY(l2CacheSize);
PROPERTY(maxThreadsPerMultiProcessor);
PROPERTY(streamPrioritiesSupported);
PROPERTY(globalL1CacheSupported);
PROPERTY(localL1CacheSupported);
PROPERTY(sharedMemPerMultiprocessor);
PROPERTY(regsPerMultiprocessor);
PROPERTY(managedMemory);
PROPERTY(cooperativeLaunch);
PROPERTY(sharedMemPerBlockOptin);
PROPERTY(maxBlocksPerMultiProcessor);
PROPERTY(reservedSharedMemPerBlock);
PROPERTY(hostRegisterSupported);
PROPERTY(memoryPoolsSupported);
PROPERTY(clusterLaunch);
PROPERTY(unifiedFunctionPointers);

SAME_SIZE(pointer_attributes, struct cudaPointerAttributes);
SAME(pointer_attributes, struct cudaPointerAttributes, type, type);
SAME(pointer_attributes, struct cudaPointerAttributes, device, device);
SAME(pointer_attributes, struct cudaPointerAttributes, devicePointer, devicePointer);

SAME_SIZE(function_attributes, struct cudaFuncAttributes);
SAME(function_attributes, struct cudaFuncAttributes, maxThreadsPerBlock, maxThreadsPerBlock);
SAME(function_attributes, struct cudaFuncAttributes, numRegs, numRegs);
SAME(function_attributes, struct cudaFuncAttributes, ptxVersion, ptxVersion);
SAME(function_attributes, struct cudaFuncAttributes, binaryVersion, binaryVersion);
SAME(function_attributes, struct cudaFuncAttributes, maxDynamicSharedSizeBytes, maxDynamicSharedSizeBytes);

SAME_SIZE(allocation_properties, CUmemAllocationProp);
SAME(allocation_properties, CUmemAllocationProp, device, location.id);

_Static_assert(UNREGISTERED_MEMORY == cudaMemoryTypeUnregistered && HOST_MEMORY == cudaMemoryTypeHost && DEVICE_MEMORY == cudaMemoryTypeDevice, "cudaMemoryType");
_Static_assert(INVALID_VALUE == cudaErrorInvalidValue && OUT_OF_MEMORY == cudaErrorMemoryAllocation, "cudaError_t");
_Static_assert(NO_DEVICE == cudaErrorNoDevice && INVALID_DEVICE == cudaErrorInvalidDevice, "cudaError_t");
_Static_assert(INVALID_VALUE == CUDA_ERROR_INVALID_VALUE && OUT_OF_MEMORY == CUDA_ERROR_OUT_OF_MEMORY, "CUresult");
