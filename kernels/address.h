// The address arithmetic: the one place where a byte of a chunk and a byte of a block are matched.
//
// Theory of operation
// -------------------
// A Part is a plane, prepared. A block's share of it is numbered densely, 0 <= dense < block_bytes, in the order of the
// chunk: outer, token, byte. Dense position d of block b, which is the j-th block of a chunk, lies
//
//     in the chunk at     chunk + part.chunk_offset + j * block_bytes + d
//     in the pages at     base + b * block_stride + (d / outer_bytes) * outer_stride
//                              + (d % outer_bytes) / run_bytes * run_stride + d % run_bytes
//
// `prepare_part` makes the runs as long as the strides allow: tokens that lie one behind the other become one run, then
// outers likewise. It keeps outer_bytes and token_bytes of the plane as it was given, because skipping n leading tokens
// leaves out the first n * token_bytes of every outer, however the runs were joined.
//
// Positions inside a block's share have 32 bits (a share is smaller than 2 GiB, which check.h makes sure of): 64-bit
// divisions are what a GPU is slow at.
//
// `cut_tokens` is 0 where a token of the plane is not one of the block: such a share is skipped whole or not at all.
//
// The CPU source, the CUDA source and its emulation all include this file and no other arithmetic exists.
#pragma once

#include <cstdint>

#include "kvcore_copy.h"

#if defined(__CUDACC__) || defined(KVCORE_EMULATION)
#define KVCORE_BOTH __host__ __device__
#else
#define KVCORE_BOTH
#endif

namespace kvcore {

struct Part {
  uint64_t base;
  uint64_t block_stride;
  uint64_t chunk_offset;
  uint64_t outer_stride;
  uint64_t run_stride;
  uint32_t block_bytes;
  uint32_t outer_bytes;  // of the plane as given: what a skip is counted in
  uint32_t token_bytes;  // likewise
  uint32_t runs;         // runs of one outer after joining
  uint32_t run_bytes;    // after joining
  uint32_t cut_tokens;   // tokens of the plane as given; 0: cannot be cut
};

inline Part prepare_part(const kvcore_plane &plane, uint64_t chunk_offset) {
  Part part{};
  part.base = plane.base;
  part.block_stride = uint64_t(plane.block_stride_bytes);
  part.chunk_offset = chunk_offset;
  part.outer_stride = uint64_t(plane.outer_stride_bytes);
  part.run_stride = uint64_t(plane.token_stride_bytes);
  part.token_bytes = uint32_t(plane.run_bytes);
  part.cut_tokens = plane.token_separable ? uint32_t(plane.tokens) : 0;
  part.outer_bytes = part.token_bytes * uint32_t(plane.tokens);
  part.block_bytes = part.outer_bytes * uint32_t(plane.outer_count);
  part.runs = uint32_t(plane.tokens);
  part.run_bytes = part.token_bytes;
  if (part.runs == 1 || part.run_stride == part.run_bytes) {  // the tokens of an outer lie one behind the other
    part.runs = 1;
    part.run_bytes = part.outer_bytes;
    if (plane.outer_count == 1 || part.outer_stride == part.run_bytes) part.run_bytes = part.block_bytes;
  }
  return part;
}

KVCORE_BOTH inline uint64_t chunk_position(const Part &part, uint64_t chunk, uint64_t block_in_chunk, uint32_t dense) {
  return chunk + part.chunk_offset + block_in_chunk * part.block_bytes + dense;
}

// Where dense position `dense` of block `block` lies in the pages.
KVCORE_BOTH inline uint64_t block_position(const Part &part, uint64_t block, uint32_t dense) {
  const uint64_t start = part.base + block * part.block_stride;
  if (part.run_bytes == part.block_bytes) return start + dense;
  const uint32_t outer = dense / part.outer_bytes;
  const uint32_t inside = dense - outer * part.outer_bytes;
  const uint32_t run = inside / part.run_bytes;
  return start + outer * part.outer_stride + run * part.run_stride + (inside - run * part.run_bytes);
}

// Leading bytes of every outer of the j-th block of a chunk that a scatter with `skip_tokens` leaves alone.
KVCORE_BOTH inline uint32_t skipped_bytes(const Part &part, int64_t skip_tokens, int64_t block_tokens,
                                          int64_t block_in_chunk) {
  const int64_t skip = skip_tokens - block_in_chunk * block_tokens;
  if (skip <= 0) return 0;
  if (skip >= block_tokens) return part.outer_bytes;
  return uint32_t(skip * part.cut_tokens / block_tokens) * part.token_bytes;
}

}  // namespace kvcore
