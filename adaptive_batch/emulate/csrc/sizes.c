/* Sizes that libraries give before they compute. Those of cuSOLVER, cuSPARSE, cuFFT and cuDNN's older functions are not published: 0 is given, and
 * the report names who was asked. */
#include "stack.h"

#include <string.h>

enum { MOST_UNKNOWN = 64 };
static const char *unknown[MOST_UNKNOWN];

void unknown_workspace(const char *function) {
  for (int i = 0; i < MOST_UNKNOWN; i++) {
    if (!unknown[i]) unknown[i] = function;
    if (!strcmp(unknown[i], function)) return;
  }
}
EXPORT const char *cudastub_unknown_workspace(int i) { return i < MOST_UNKNOWN ? unknown[i] : NULL; }

/* Of the functions that nobody wrote: the name of the i-th, and how often it was called. */
EXPORT const char *cudastub_default(int i, unsigned long *calls) {
  if (default_names[i]) *calls = default_calls[i];
  return default_names[i];
}

/* A function whose argument at `place`, the first is 1, points to the size. Arguments that are not passed are read, and not used. */
#define ARGUMENTS long a1, long a2, long a3, long a4, long a5, long a6, long a7, long a8, long a9, long a10, long a11, long a12, long a13, long a14, \
                  long a15, long a16, long a17, long a18, long a19, long a20
#define ALL_ARGUMENTS a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17, a18, a19, a20
#define SIZES(name, type, first, last)                              \
  EXPORT int name(ARGUMENTS) {                                      \
    long all[] = {ALL_ARGUMENTS};                                   \
    for (int place = first; place <= last; place++)                 \
      if (all[place - 1]) *(type *)all[place - 1] = 0;              \
    unknown_workspace(#name);                                       \
    return 0;                                                       \
  }
#define SIZE(name, type, place) SIZES(name, type, place, place)
#define REAL(name, place) SIZE(cusolverDnS##name##_bufferSize, int, place) SIZE(cusolverDnD##name##_bufferSize, int, place)
#define COMPLEX(name, place) SIZE(cusolverDnC##name##_bufferSize, int, place) SIZE(cusolverDnZ##name##_bufferSize, int, place)
#define BOTH(name, place) REAL(name, place) COMPLEX(name, place)
#define DEVICE_AND_HOST(name, place) SIZES(cusolverDnX##name##_bufferSize, size_t, place, place + 1)
#define SPARSE(name, type, place) \
  SIZE(cusparseS##name, type, place) SIZE(cusparseD##name, type, place) SIZE(cusparseC##name, type, place) SIZE(cusparseZ##name, type, place)

BOTH(geqrf, 6)
BOTH(gesvd, 4)
BOTH(gesvdj, 13)
BOTH(gesvdjBatched, 12)
BOTH(gesvdaStridedBatched, 17)
BOTH(getrf, 6)
BOTH(potrf, 6)
BOTH(sytrf, 5)
REAL(syevd, 8)
REAL(syevj, 8)
REAL(syevjBatched, 8)
REAL(orgqr, 8)
REAL(ormqr, 12)
COMPLEX(heevd, 8)
COMPLEX(heevj, 8)
COMPLEX(heevjBatched, 8)
COMPLEX(ungqr, 8)
COMPLEX(unmqr, 12)
DEVICE_AND_HOST(geqrf, 11)
DEVICE_AND_HOST(potrf, 9)
DEVICE_AND_HOST(syevd, 12)
DEVICE_AND_HOST(syevBatched, 12)
DEVICE_AND_HOST(sytrs, 12)
DEVICE_AND_HOST(geev, 18)

SIZE(cusparseSpMV_bufferSize, size_t, 10)
SIZE(cusparseSpMM_bufferSize, size_t, 11)
SIZE(cusparseSpSV_bufferSize, size_t, 10)
SIZE(cusparseSpSM_bufferSize, size_t, 11)
SIZE(cusparseSDDMM_bufferSize, size_t, 11)
SIZE(cusparseSpGEMM_workEstimation, size_t, 12)
SIZE(cusparseSpGEMM_compute, size_t, 12)
SIZE(cusparseXcoosort_bufferSizeExt, size_t, 7)
SIZE(cusparseXcsrsort_bufferSizeExt, size_t, 7)
SPARSE(csrgeam2_bufferSizeExt, size_t, 20)
SPARSE(bsrsv2_bufferSize, int, 12)
SPARSE(bsrsm2_bufferSize, int, 14)
SIZE(cusparseLtMatmulGetWorkspace, size_t, 3)

SIZE(cufftXtMakePlanMany, size_t, 13)
SIZE(cufftGetSize, size_t, 2)

SIZE(cudnnGetCTCLossWorkspaceSize, size_t, 9)
SIZE(cudnnGetCTCLossWorkspaceSize_v8, size_t, 6)
SIZE(cudnnGetConvolutionForwardWorkspaceSize, size_t, 7)
SIZE(cudnnGetConvolutionBackwardDataWorkspaceSize, size_t, 7)
SIZE(cudnnGetConvolutionBackwardFilterWorkspaceSize, size_t, 7)
SIZE(cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, size_t, 9)
SIZE(cudnnGetBatchNormalizationBackwardExWorkspaceSize, size_t, 11)
SIZE(cudnnGetBatchNormalizationTrainingExReserveSpaceSize, size_t, 6)
