/* The C interface of the copy kernels. No torch, no CUDA and no C++ in it: addresses, strides, a stream handle.
 *
 * A plane is one tensor part of one layer. Byte r of token t of outer o of block b lies at
 *
 *     base + b * block_stride_bytes + o * outer_stride_bytes + t * token_stride_bytes + r      0 <= r < run_bytes
 *
 * A chunk is dense: for each plane in order, for each block of the chunk in order, for o, for t: run_bytes bytes. A
 * block's share of a plane (outer_count * tokens * run_bytes bytes) is therefore contiguous in the chunk.
 *
 * gather reads blocks and writes chunks, scatter reads chunks and writes blocks. Both refuse a batch that is not in
 * order before the first byte moves (see kvcore_failure).
 *
 * Who holds: the caller holds every buffer that a batch names. The CPU calls are done when they return; a CUDA call
 * is done when an event recorded behind it on its stream is, and the batch's workspace is in use until then. The
 * structs and arrays of the batch itself are free again when any call returns.
 */
#ifndef KVCORE_COPY_H
#define KVCORE_COPY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVCORE_COPY_ABI 1
#define KVCORE_EXPORT __attribute__((visibility("default")))

typedef struct kvcore_plane {
  uint64_t base; /* address of block 0 */
  int64_t block_stride_bytes;
  int64_t outer_count;
  int64_t outer_stride_bytes;
  int64_t tokens;
  int64_t token_stride_bytes;
  int64_t run_bytes;
  int64_t token_separable; /* 0: token t of the plane is not token t of the block; it cannot be cut inside a block */
} kvcore_plane;

typedef struct kvcore_batch {
  const kvcore_plane *planes;
  int64_t plane_count;
  const int64_t *block_ids; /* [chunk_count][blocks_per_chunk] */
  int64_t num_blocks;       /* ids are in [0, num_blocks) */
  int64_t block_tokens;     /* engine tokens of one block: the unit of skip_tokens */
  int64_t chunk_count;
  int64_t blocks_per_chunk;
  const uint64_t *chunks;      /* [chunk_count] address of each chunk's first byte */
  int64_t chunk_bytes;         /* bytes that each chunk buffer has */
  int64_t chunk_offset_bytes;  /* where the first of `planes` begins in a chunk: layer-wise copies */
  const int64_t *skip_tokens;  /* [chunk_count] or null; scatter only: leading tokens that are not written */
} kvcore_batch;

typedef enum kvcore_status {
  KVCORE_OK = 0,
  KVCORE_BAD_PLANE = 1,        /* where: the plane; value: which field, in the struct's order; 7: 2 GiB or more */
  KVCORE_BAD_SHAPE = 2,        /* value: a count or size of the batch that cannot be */
  KVCORE_BLOCK_RANGE = 3,      /* where: index into block_ids; value: the id */
  KVCORE_BLOCK_TWICE = 4,      /* value: an id that a scatter would write twice */
  KVCORE_CHUNK_ROOM = 5,       /* value: bytes that a chunk needs to have */
  KVCORE_CHUNK_OVERLAP = 6,    /* value: address of a chunk that a gather would write into another one */
  KVCORE_SKIP_RANGE = 7,       /* where: the chunk; value: its skip_tokens */
  KVCORE_SKIP_INSIDE = 8,      /* where: the chunk; value: the plane that cannot be cut at that token */
  KVCORE_NO_WORKSPACE = 9,     /* value: bytes that the workspace must have */
  KVCORE_CUDA_ERROR = 10,      /* where: the step (see copy_kernels.cu); value: the runtime's error code */
  KVCORE_NO_MEMORY = 11        /* the host has none left */
} kvcore_status;

/* Filled when a call does not return KVCORE_OK. */
typedef struct kvcore_failure {
  int32_t status;
  int64_t where;
  int64_t value;
} kvcore_failure;

/* One contiguous piece of a batch: what a plain copy can move. */
typedef struct kvcore_run {
  uint64_t block_side;
  uint64_t chunk_side;
  int64_t bytes;
} kvcore_run;

/* ---- CPU (libkvcore_copy) ---- */

KVCORE_EXPORT int32_t kvcore_abi(void);
/* `threads` >= 1 of them share the bytes; small batches take fewer. */
KVCORE_EXPORT int32_t kvcore_cpu_gather(const kvcore_batch *batch, int32_t threads, kvcore_failure *failure);
KVCORE_EXPORT int32_t kvcore_cpu_scatter(const kvcore_batch *batch, int32_t threads, kvcore_failure *failure);
/* The batch as the fewest contiguous pieces, neighbouring blocks joined. Writes up to `capacity` of them to `runs` and
 * their whole number to `count`. `scatter` != 0 leaves the skipped tokens out. */
KVCORE_EXPORT int32_t kvcore_runs(const kvcore_batch *batch, int32_t scatter, kvcore_run *runs, int64_t capacity,
                                  int64_t *count, kvcore_failure *failure);

/* ---- CUDA (libkvcore_copy_cuda) ---- */

KVCORE_EXPORT int32_t kvcore_cuda_abi(void);
/* The compute capabilities whose code is in this library, as 80, 90, 100; returns how many there are. */
KVCORE_EXPORT int32_t kvcore_cuda_architectures(int32_t *out, int32_t capacity);
/* Bytes that the two workspace buffers of a batch need. */
KVCORE_EXPORT int32_t kvcore_cuda_workspace(const kvcore_batch *batch, int64_t *bytes, kvcore_failure *failure);

typedef struct kvcore_cuda_call {
  int32_t device;
  int32_t grid_max;        /* most blocks of threads at a time; 0: as many as fill the device */
  void *stream;            /* a cudaStream_t */
  uint64_t workspace_host; /* pinned host memory; both 16-byte aligned, untouched until the batch's event is done */
  uint64_t workspace_device;
  int64_t workspace_bytes;
} kvcore_cuda_call;

/* One launch for the whole batch. The blocks lie on the device; the chunks on it or in pinned host memory. */
KVCORE_EXPORT int32_t kvcore_cuda_gather(const kvcore_batch *batch, const kvcore_cuda_call *call,
                                         kvcore_failure *failure);
KVCORE_EXPORT int32_t kvcore_cuda_scatter(const kvcore_batch *batch, const kvcore_cuda_call *call,
                                          kvcore_failure *failure);
/* The same bytes by the copy engine: one asynchronous copy per run of kvcore_runs. Needs no workspace. */
KVCORE_EXPORT int32_t kvcore_cuda_direct(const kvcore_batch *batch, int32_t scatter, const kvcore_cuda_call *call,
                                         kvcore_failure *failure);

#ifdef __cplusplus
}
#endif
#endif
