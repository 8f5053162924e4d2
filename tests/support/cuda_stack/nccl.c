/* NCCL: communicators know their size and rank; what is sent is lost, and nobody waits. */
#include "stack.h"

#include <stdlib.h>
#include <string.h>

typedef struct { char bytes[128]; } unique_id;
typedef struct { int size, rank; } communicator;

static int new_communicator(communicator **to, int size, int rank) {
  *to = malloc(sizeof **to);
  **to = (communicator){size, rank};
  return 0;
}

EXPORT int ncclGetVersion(int *version) { *version = NCCL_VERSION; return 0; }
EXPORT const char *ncclGetErrorString(int error) { (void)error; return "an error of the stack"; }
EXPORT const char *ncclGetLastError(communicator *of) { (void)of; return ""; }
EXPORT int ncclGetUniqueId(unique_id *id) { memset(id, 1, sizeof *id); return 0; }
EXPORT int ncclCommInitRank(communicator **to, int size, unique_id id, int rank) { (void)id; return new_communicator(to, size, rank); }
EXPORT int ncclCommInitRankConfig(communicator **to, int size, unique_id id, int rank) { return ncclCommInitRank(to, size, id, rank); }
EXPORT int ncclCommInitRankScalable(communicator **to, int size, int rank) { return new_communicator(to, size, rank); }
EXPORT int ncclCommSplit(communicator *of, int color, int key, communicator **to) { (void)color, (void)key; return new_communicator(to, of->size, of->rank); }
EXPORT int ncclCommCount(communicator *of, int *size) { *size = of->size; return 0; }
EXPORT int ncclCommUserRank(communicator *of, int *rank) { *rank = of->rank; return 0; }
EXPORT int ncclCommGetAsyncError(communicator *of, int *error) { (void)of; *error = 0; return 0; }
EXPORT int ncclMemAlloc(void **address, size_t size) { return cudaMalloc(address, size) ? 1 : 0; }
EXPORT int ncclMemFree(void *address) { return cudaFree(address) ? 1 : 0; }
void report_nccl(void) {}
