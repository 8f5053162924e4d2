/* NCCL between processes of one machine, through shared memory.
 *
 * A collective returns when every rank has called it. It carries at most EMULATE_COPIED_BYTES bytes of floating-point numbers, and MOST_CARRIED of
 * integers, among which are pickled objects; of the rest only the size is compared. Where real NCCL would hang or mix up ranks that call different things, each of them gets an error that says what it called.
 * A message from one rank to another is left in a box, of which a pair has DEPTH; the call returns once it is left, or taken.
 */
#define _GNU_SOURCE
#include "stack.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { NCCL_SUCCESS = 0, NCCL_UNHANDLED_CUDA_ERROR = 1, NCCL_SYSTEM_ERROR = 2, NCCL_INVALID_USAGE = 5 };
enum { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, SCALED_SUM };
enum { MOST_CARRIED = 4 << 20, DEPTH = 8, NOTICE_SECONDS = 60 };

typedef enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE, ALL_TO_ALL, SPLIT, SEND, RECEIVE } operation;
static const char *const operation_names[] = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AlltoAll", "CommSplit", "Send", "Recv"};

typedef struct { char bytes[128]; } unique_id;

/* What a rank asks for. `count` elements of `type` are each rank's part; `other` is the root, the peer or the reduction. */
typedef struct { operation is; size_t count; int type, other, reduction; } request;
typedef struct { request asked; char content[MOST_CARRIED]; } message;
typedef struct { atomic_uint left, taken; message messages[DEPTH]; } box;
typedef struct { atomic_uint calls; message newest[2]; } rank_part; /* one is read while the next is written */

/* In memory that the ranks share: rank_part[size], then box[from][to]. */
typedef struct { atomic_uint news, joined; } meeting;

typedef struct {
  meeting *shared;
  rank_part *parts;
  box *boxes;
  size_t mapped_bytes;
  int size, rank, device, splits;
  unique_id id;
  unsigned calls;
  atomic_int aborted;
  unsigned long long device_bytes;
} communicator;

typedef struct { communicator *of; request asked; const void *from; void *to; int done; } call;

static __thread char last_words[256];
static atomic_ullong collectives, messages, bytes_sent;

void report_nccl(void) {
  if (collectives + messages)
    fprintf(stderr, "[emulate] NCCL: %llu collectives, %llu messages, %.1f MiB given to them by this rank\n", (unsigned long long)collectives,
            (unsigned long long)messages, (double)bytes_sent / (double)MIB);
}

/* ---- waiting */

static void tell(communicator *of) {
  atomic_fetch_add(&of->shared->news, 1);
  syscall(SYS_futex, &of->shared->news, FUTEX_WAKE, 1 << 30, NULL, NULL, 0);
}

/* Waits for news after `seen`; an error once this communicator was aborted. */
static int wait_for_news(communicator *of, unsigned seen, const char *during, time_t *since) {
  struct timespec tick = {0, 100 * 1000 * 1000};
  if (atomic_load(&of->aborted)) {
    snprintf(last_words, sizeof last_words, "rank %d of %d was told to abort in %s", of->rank, of->size, during);
    return NCCL_SYSTEM_ERROR;
  }
  time_t now = time(NULL);
  if (!*since) *since = now;
  if (now - *since >= NOTICE_SECONDS) {
    fprintf(stderr, "[emulate] rank %d of %d waits in %s for %d s and more\n", of->rank, of->size, during, NOTICE_SECONDS);
    *since = now;
  }
  syscall(SYS_futex, &of->shared->news, FUTEX_WAIT, seen, &tick, NULL, 0);
  return NCCL_SUCCESS;
}

/* ---- elements */

static size_t element_size(int type) {
  static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* ncclInt8, Uint8, Int32, Uint32, Int64, Uint64, Float16, 32, 64, Bfloat16, two of 8 bits */
  return sizes[type];
}

static float from_bfloat16(uint16_t bits) {
  union { uint32_t bits; float value; } wide = {(uint32_t)bits << 16};
  return wide.value;
}
static uint16_t to_bfloat16(float value) {
  union { float value; uint32_t bits; } wide = {value};
  return (uint16_t)((wide.bits + 0x7fff + (wide.bits >> 16 & 1)) >> 16);
}

#define REDUCED(a, b) (by == PRODUCT ? (a) * (b) : by == MAXIMUM ? ((a) > (b) ? (a) : (b)) : by == MINIMUM ? ((a) < (b) ? (a) : (b)) : (a) + (b))
#define REDUCE_ALL(TYPE) for (size_t i = 0; i < count; i++) ((TYPE *)into)[i] = (TYPE)REDUCED(((TYPE *)into)[i], ((const TYPE *)from)[i])
static void reduce_into(void *into, const void *from, size_t count, int type, int by) {
  switch (type) {
    case 0: REDUCE_ALL(int8_t); break;
    case 1: REDUCE_ALL(uint8_t); break;
    case 2: REDUCE_ALL(int32_t); break;
    case 3: REDUCE_ALL(uint32_t); break;
    case 4: REDUCE_ALL(int64_t); break;
    case 5: REDUCE_ALL(uint64_t); break;
    case 6: REDUCE_ALL(_Float16); break;
    case 7: REDUCE_ALL(float); break;
    case 8: REDUCE_ALL(double); break;
    case 9:
      for (size_t i = 0; i < count; i++) {
        float a = from_bfloat16(((uint16_t *)into)[i]), b = from_bfloat16(((const uint16_t *)from)[i]);
        ((uint16_t *)into)[i] = to_bfloat16(REDUCED(a, b));
      }
  }
}

#define DIVIDE_ALL(TYPE) for (size_t i = 0; i < count; i++) ((TYPE *)values)[i] = (TYPE)(((TYPE *)values)[i] / (TYPE)by)
static void divide(void *values, size_t count, int type, int by) {
  switch (type) {
    case 2: DIVIDE_ALL(int32_t); break;
    case 4: DIVIDE_ALL(int64_t); break;
    case 6: DIVIDE_ALL(_Float16); break;
    case 7: DIVIDE_ALL(float); break;
    case 8: DIVIDE_ALL(double); break;
    case 9: for (size_t i = 0; i < count; i++) ((uint16_t *)values)[i] = to_bfloat16(from_bfloat16(((uint16_t *)values)[i]) / (float)by);
  }
}

/* ---- collectives */

static size_t bytes_of_part(const request *asked) { return asked->count * element_size(asked->type); }

/* What a rank gives to a collective, in bytes. */
static size_t given_bytes(const communicator *of, const request *asked) {
  int for_each = asked->is == REDUCE_SCATTER || asked->is == ALL_TO_ALL;
  if (asked->is == BROADCAST && asked->other != of->rank) return 0;
  return bytes_of_part(asked) * (size_t)(for_each ? of->size : 1);
}

static int is_carried(const communicator *of, const request *asked) {
  enum { FLOAT16 = 6 };
  int is_exact = kept_bytes && asked->type < FLOAT16;
  size_t limit = asked->is == SPLIT || is_exact || kept_bytes > MOST_CARRIED ? MOST_CARRIED : kept_bytes;
  size_t parts = asked->is == REDUCE_SCATTER || asked->is == ALL_TO_ALL ? (size_t)of->size : 1;
  return bytes_of_part(asked) * parts <= limit;
}

static message *of_rank(communicator *of, int rank) { return &of->parts[rank].newest[of->calls % 2]; }

/* Gives this rank's part and returns when all have given theirs, which stay where they are until the next collective but one. */
static int meet(communicator *of, const request *asked, const void *from) {
  const char *name = operation_names[asked->is];
  message *mine = of_rank(of, of->rank);
  mine->asked = *asked;
  size_t given = given_bytes(of, asked);
  if (given && is_carried(of, asked)) memcpy(mine->content, from, given);
  collectives++;
  bytes_sent += given;
  atomic_store(&of->parts[of->rank].calls, of->calls + 1);
  tell(of);
  time_t since = 0;
  for (int rank = 0; rank < of->size; rank++)
    for (;;) {
      unsigned seen = atomic_load(&of->shared->news);
      if ((int)(atomic_load(&of->parts[rank].calls) - of->calls) > 0) break;
      int error = wait_for_news(of, seen, name, &since);
      if (error) return error;
    }
  for (int rank = 0; rank < of->size; rank++) {
    const request *other = &of_rank(of, rank)->asked;
    if (memcmp(other, asked, sizeof *asked)) {
      snprintf(last_words, sizeof last_words, "rank %d of %d calls %s of %zu bytes (type %d, %d, %d), rank %d %s of %zu (type %d, %d, %d)", of->rank, of->size, name,
               bytes_of_part(asked), asked->type, asked->other, asked->reduction, rank, operation_names[other->is], bytes_of_part(other), other->type, other->other, other->reduction);
      fprintf(stderr, "[emulate] %s\n", last_words);
      return NCCL_INVALID_USAGE;
    }
  }
  return NCCL_SUCCESS;
}

/* Reduces the part of all ranks that begins `offset` bytes into what they gave. */
static void reduce_parts(communicator *of, const request *asked, size_t offset, void *to) {
  size_t bytes = bytes_of_part(asked);
  char *sum = malloc(bytes ? bytes : 1);
  memcpy(sum, of_rank(of, 0)->content + offset, bytes);
  for (int rank = 1; rank < of->size; rank++) reduce_into(sum, of_rank(of, rank)->content + offset, asked->count, asked->type, asked->reduction);
  if (asked->reduction == AVERAGE) divide(sum, asked->count, asked->type, of->size);
  memcpy(to, sum, bytes);
  free(sum);
}

static int run_collective(call *one) {
  communicator *of = one->of;
  request *asked = &one->asked;
  size_t bytes = bytes_of_part(asked), mine = bytes * (size_t)of->rank;
  int error = meet(of, asked, one->from);
  if (!error && is_carried(of, asked)) switch (asked->is) {
    case ALL_REDUCE: reduce_parts(of, asked, 0, one->to); break;
    case REDUCE: if (asked->other == of->rank) reduce_parts(of, asked, 0, one->to); break;
    case REDUCE_SCATTER: reduce_parts(of, asked, mine, one->to); break;
    case BROADCAST: memcpy(one->to, of_rank(of, asked->other)->content, bytes); break;
    default: /* ALL_GATHER, ALL_TO_ALL */
      for (int rank = 0; rank < of->size; rank++)
        memcpy((char *)one->to + (size_t)rank * bytes, of_rank(of, rank)->content + (asked->is == ALL_TO_ALL ? mine : 0), bytes);
  }
  of->calls++;
  return error;
}

/* ---- messages */

static int passed(call *one) {
  communicator *of = one->of;
  int sends = one->asked.is == SEND, peer = one->asked.other;
  box *between = &of->boxes[sends ? of->rank * of->size + peer : peer * of->size + of->rank];
  unsigned left = atomic_load(&between->left), taken = atomic_load(&between->taken);
  if (sends ? left - taken == DEPTH : left == taken) return 0;
  message *place = &between->messages[(sends ? left : taken) % DEPTH];
  size_t bytes = bytes_of_part(&one->asked);
  if (sends) {
    place->asked = one->asked;
    if (is_carried(of, &one->asked)) memcpy(place->content, one->from, bytes);
    messages++;
    bytes_sent += bytes;
  } else if (bytes_of_part(&place->asked) != bytes) {
    snprintf(last_words, sizeof last_words, "rank %d of %d receives %zu bytes where rank %d sends %zu", of->rank, of->size, bytes, peer, bytes_of_part(&place->asked));
    fprintf(stderr, "[emulate] %s\n", last_words);
  } else if (is_carried(of, &one->asked)) {
    memcpy(one->to, place->content, bytes);
  }
  atomic_fetch_add(sends ? &between->left : &between->taken, 1);
  tell(of);
  return one->done = 1;
}

/* Passes all messages of a group in whichever order they can be; between two ranks, in the order of the calls. */
static int pass_messages(call *calls, int count) {
  time_t since = 0;
  for (;;) {
    int progress = 0;
    call *waits = NULL;
    unsigned seen = 0;
    for (int i = 0; i < count; i++) {
      call *one = &calls[i];
      if (one->done || one->asked.is < SEND) continue;
      int held_up = 0; /* by an earlier one of the same kind with the same rank */
      for (int j = 0; j < i; j++)
        held_up |= !calls[j].done && calls[j].of == one->of && calls[j].asked.is == one->asked.is && calls[j].asked.other == one->asked.other;
      if (!waits) seen = atomic_load(&one->of->shared->news);
      if (!held_up && passed(one)) progress = 1;
      else if (!waits) waits = one;
    }
    if (!waits) return NCCL_SUCCESS;
    int error = progress ? NCCL_SUCCESS : wait_for_news(waits->of, seen, operation_names[waits->asked.is], &since);
    if (error) return error;
  }
}

/* ---- groups */

static __thread call *grouped;
static __thread int group_depth, group_count, group_room;

static int run_group(void) {
  int error = NCCL_SUCCESS;
  for (int i = 0; i < group_count && !error; i++)
    if (grouped[i].asked.is < SEND) error = run_collective(&grouped[i]);
  if (!error) error = pass_messages(grouped, group_count);
  group_count = 0;
  return error;
}

static int add(communicator *of, request asked, const void *from, void *to) {
  if (group_count == group_room) grouped = realloc(grouped, (size_t)(group_room = 2 * group_room + 16) * sizeof *grouped);
  grouped[group_count++] = (call){of, asked, from, to, 0};
  return group_depth ? NCCL_SUCCESS : run_group();
}

EXPORT int ncclGroupStart(void) { group_depth++; return NCCL_SUCCESS; }
EXPORT int ncclGroupEnd(void) { return --group_depth ? NCCL_SUCCESS : run_group(); }

static request plain(operation is, size_t count, int type, int other, int reduction) {
  request asked;
  memset(&asked, 0, sizeof asked); /* compared byte by byte */
  asked.is = is, asked.count = count, asked.type = type, asked.other = other, asked.reduction = reduction;
  return asked;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int reduction, communicator *of) {
  return add(of, plain(ALL_REDUCE, count, type, 0, reduction), from, to);
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int reduction, communicator *of) {
  return add(of, plain(REDUCE_SCATTER, count, type, 0, reduction), from, to);
}
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *of) {
  return add(of, plain(ALL_GATHER, count, type, 0, 0), from, to);
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *of) {
  return add(of, plain(ALL_TO_ALL, count, type, 0, 0), from, to);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, communicator *of) {
  return add(of, plain(BROADCAST, count, type, root, 0), from, to);
}
EXPORT int ncclBcast(void *values, size_t count, int type, int root, communicator *of) {
  return ncclBroadcast(values, values, count, type, root, of);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int reduction, int root, communicator *of) {
  return add(of, plain(REDUCE, count, type, root, reduction), from, to);
}
EXPORT int ncclSend(const void *from, size_t count, int type, int peer, communicator *of) {
  return add(of, plain(SEND, count, type, peer, 0), from, NULL);
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, communicator *of) {
  return add(of, plain(RECEIVE, count, type, peer, 0), NULL, to);
}
EXPORT int ncclRedOpCreatePreMulSum(int *reduction) { *reduction = SCALED_SUM; return NCCL_SUCCESS; } /* of gradients, which are zeros */

/* ---- communicators: the ranks with the same unique identifier meet in a file of shared memory, which is gone once all have it */

EXPORT int ncclGetUniqueId(unique_id *id) {
  memset(id, 0, sizeof *id);
  return getrandom(id, 16, 0) == 16 ? NCCL_SUCCESS : NCCL_SYSTEM_ERROR;
}

EXPORT int ncclCommInitRank(communicator **to, int size, unique_id id, int rank) {
  uint64_t *number = (uint64_t *)id.bytes;
  char name[64];
  snprintf(name, sizeof name, "/cudastub-%016lx%016lx", (unsigned long)number[0], (unsigned long)number[1]);
  communicator *of = calloc(1, sizeof *of);
  *of = (communicator){.size = size, .rank = rank, .device = current_device, .id = id, .device_bytes = setting("EMULATE_NCCL_BYTES", 0)};
  if (!take_bytes(of->device, of->device_bytes)) {
    snprintf(last_words, sizeof last_words, "Failed to CUDA malloc %llu bytes", of->device_bytes);
    free(of);
    return NCCL_UNHANDLED_CUDA_ERROR;
  }
  of->mapped_bytes = sizeof(meeting) + (size_t)size * sizeof(rank_part) + (size_t)(size * size) * sizeof(box);
  int file = shm_open(name, O_RDWR | O_CREAT, 0600);
  if (file < 0 || ftruncate(file, (off_t)of->mapped_bytes)) { perror("[emulate] shm_open"); return NCCL_SYSTEM_ERROR; }
  of->shared = mmap(NULL, of->mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (of->shared == MAP_FAILED) { perror("[emulate] mmap"); return NCCL_SYSTEM_ERROR; }
  of->parts = (rank_part *)(of->shared + 1);
  of->boxes = (box *)(of->parts + size);
  *to = of;
  int last = atomic_fetch_add(&of->shared->joined, 1) == (unsigned)size - 1;
  if (last) shm_unlink(name);
  tell(of);
  time_t since = 0;
  for (;;) {
    unsigned seen = atomic_load(&of->shared->news);
    if (atomic_load(&of->shared->joined) == (unsigned)size) return NCCL_SUCCESS;
    int error = wait_for_news(of, seen, "CommInitRank", &since);
    if (error) return error;
  }
}
EXPORT int ncclCommInitRankConfig(communicator **to, int size, unique_id id, int rank) { return ncclCommInitRank(to, size, id, rank); }
EXPORT int ncclCommInitRankScalable(communicator **to, int size, int rank, int ids, unique_id *id) {
  (void)ids;
  return ncclCommInitRank(to, size, *id, rank);
}

/* Ranks of one color become a communicator, in the order of their keys; a negative color becomes none. */
EXPORT int ncclCommSplit(communicator *of, int color, int key, communicator **to) {
  int mine[2] = {color, key}, size = 0, rank = 0;
  request asked = plain(SPLIT, sizeof mine, 0, 0, 0);
  int error = meet(of, &asked, mine);
  for (int other = 0; other < of->size; other++) {
    const int *its = (const int *)of_rank(of, other)->content;
    if (its[0] != color) continue;
    size++;
    if (its[1] < key || (its[1] == key && other < of->rank)) rank++;
  }
  of->calls++;
  of->splits++;
  *to = NULL;
  if (error || color < 0) return error;
  unique_id id = of->id;
  ((uint64_t *)id.bytes)[0] += (uint64_t)of->splits << 32 | (uint32_t)color;
  ((uint64_t *)id.bytes)[1] += 0x9e3779b97f4a7c15ull; /* a split of a split has another name */
  return ncclCommInitRank(to, size, id, rank);
}

static int leave(communicator *of) {
  if (of->device_bytes) give_back_bytes(of->device, of->device_bytes);
  of->device_bytes = 0;
  return NCCL_SUCCESS;
}
EXPORT int ncclCommDestroy(communicator *of) {
  leave(of);
  munmap(of->shared, of->mapped_bytes);
  free(of);
  return NCCL_SUCCESS;
}
EXPORT int ncclCommAbort(communicator *of) { /* another thread may be waiting in it, so it stays where it is */
  atomic_store(&of->aborted, 1);
  tell(of);
  return leave(of);
}
EXPORT int ncclCommCount(communicator *of, int *size) { *size = of->size; return NCCL_SUCCESS; }
EXPORT int ncclCommUserRank(communicator *of, int *rank) { *rank = of->rank; return NCCL_SUCCESS; }
EXPORT int ncclCommGetAsyncError(communicator *of, int *error) { (void)of; *error = NCCL_SUCCESS; return NCCL_SUCCESS; }
EXPORT int ncclGetVersion(int *version) { *version = NCCL_VERSION; return NCCL_SUCCESS; }
EXPORT const char *ncclGetErrorString(int error) {
  switch (error) {
    case NCCL_SUCCESS: return "no error";
    case NCCL_UNHANDLED_CUDA_ERROR: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case NCCL_SYSTEM_ERROR: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case NCCL_INVALID_USAGE: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    default: return "unknown result code";
  }
}
EXPORT const char *ncclGetLastError(communicator *of) { (void)of; return last_words; }
EXPORT int ncclMemAlloc(void **address, size_t size) { return cudaMalloc(address, size) ? NCCL_UNHANDLED_CUDA_ERROR : NCCL_SUCCESS; }
EXPORT int ncclMemFree(void *address) { return cudaFree(address) ? NCCL_UNHANDLED_CUDA_ERROR : NCCL_SUCCESS; }
