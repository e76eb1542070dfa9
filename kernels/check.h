// What is refused before a byte moves. Host only; the same checks stand before the CPU copies and every launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "address.h"

namespace kvcore {

// A batch that has passed: its parts, and how long a chunk's share of them is.
struct Prepared {
  std::vector<Part> parts;
  uint64_t share_bytes = 0;  // of all planes in one chunk
};

inline int32_t refuse(kvcore_failure *failure, kvcore_status status, int64_t where, int64_t value) {
  if (failure) *failure = {int32_t(status), where, value};
  return int32_t(status);
}

// The field of the plane that cannot be, in the order of the struct; 7: a share is too large for 32 bits; -1: none.
inline int32_t bad_field(const kvcore_plane &plane, int64_t num_blocks) {
  constexpr int64_t kShareMax = std::numeric_limits<int32_t>::max();
  if (plane.base == 0) return 0;
  if (plane.outer_count < 1) return 2;
  if (plane.tokens < 1) return 4;
  if (plane.run_bytes < 1) return 6;
  if (num_blocks > 1 && plane.block_stride_bytes < plane.run_bytes) return 1;
  if (plane.outer_count > 1 && plane.outer_stride_bytes < plane.run_bytes) return 3;
  if (plane.tokens > 1 && plane.token_stride_bytes < plane.run_bytes) return 5;
  int64_t bytes = 0;
  if (__builtin_mul_overflow(plane.outer_count, plane.tokens, &bytes)) return 7;
  if (__builtin_mul_overflow(bytes, plane.run_bytes, &bytes) || bytes > kShareMax) return 7;
  return -1;
}

inline int32_t check_shape(const kvcore_batch &batch, kvcore_failure *failure) {
  const int64_t counts[] = {batch.plane_count, batch.num_blocks, batch.block_tokens, batch.chunk_count,
                            batch.blocks_per_chunk};
  for (const int64_t count : counts)
    if (count < 1 || count > std::numeric_limits<int32_t>::max()) return refuse(failure, KVCORE_BAD_SHAPE, 0, count);
  if (batch.chunk_offset_bytes < 0) return refuse(failure, KVCORE_BAD_SHAPE, 0, batch.chunk_offset_bytes);
  const bool named = batch.planes && batch.block_ids && batch.chunks;
  return named ? KVCORE_OK : refuse(failure, KVCORE_BAD_SHAPE, 0, 0);
}

inline int32_t prepare_parts(const kvcore_batch &batch, Prepared *prepared, kvcore_failure *failure) {
  int64_t offset = batch.chunk_offset_bytes;
  prepared->parts.reserve(size_t(batch.plane_count));
  for (int64_t index = 0; index < batch.plane_count; ++index) {
    const int32_t field = bad_field(batch.planes[index], batch.num_blocks);
    if (field >= 0) return refuse(failure, KVCORE_BAD_PLANE, index, field);
    prepared->parts.push_back(prepare_part(batch.planes[index], uint64_t(offset)));
    const int64_t share = int64_t(prepared->parts.back().block_bytes) * batch.blocks_per_chunk;  // 31 + 31 bits
    if (__builtin_add_overflow(offset, share, &offset)) return refuse(failure, KVCORE_BAD_PLANE, index, 7);
  }
  prepared->share_bytes = uint64_t(offset - batch.chunk_offset_bytes);
  return offset <= batch.chunk_bytes ? KVCORE_OK : refuse(failure, KVCORE_CHUNK_ROOM, 0, offset);
}

inline int32_t check_ids(const kvcore_batch &batch, kvcore_failure *failure) {
  const int64_t count = batch.chunk_count * batch.blocks_per_chunk;
  for (int64_t index = 0; index < count; ++index) {
    const int64_t id = batch.block_ids[index];
    if (id < 0 || id >= batch.num_blocks) return refuse(failure, KVCORE_BLOCK_RANGE, index, id);
  }
  return KVCORE_OK;
}

// A skip lies inside the chunk, and no plane would be cut elsewhere than between two of its tokens.
inline int32_t check_skips(const kvcore_batch &batch, const Prepared &prepared, kvcore_failure *failure) {
  for (int64_t chunk = 0; batch.skip_tokens && chunk < batch.chunk_count; ++chunk) {
    const int64_t skip = batch.skip_tokens[chunk];
    if (skip < 0 || skip > batch.blocks_per_chunk * batch.block_tokens)
      return refuse(failure, KVCORE_SKIP_RANGE, chunk, skip);
    const int64_t inside = skip % batch.block_tokens;
    for (size_t index = 0; inside && index < prepared.parts.size(); ++index) {
      const int64_t tokens = prepared.parts[index].cut_tokens;
      if (tokens == 0 || inside * tokens % batch.block_tokens)
        return refuse(failure, KVCORE_SKIP_INSIDE, chunk, int64_t(index));
    }
  }
  return KVCORE_OK;
}

// Two writers of one block would race. Blocks that are skipped whole are written by nobody.
inline int32_t check_blocks_once(const kvcore_batch &batch, kvcore_failure *failure) {
  std::vector<int64_t> ids;
  ids.reserve(size_t(batch.chunk_count * batch.blocks_per_chunk));
  for (int64_t chunk = 0; chunk < batch.chunk_count; ++chunk) {
    const int64_t first = batch.skip_tokens ? batch.skip_tokens[chunk] / batch.block_tokens : 0;
    const int64_t *row = batch.block_ids + chunk * batch.blocks_per_chunk;
    ids.insert(ids.end(), row + first, row + batch.blocks_per_chunk);
  }
  std::sort(ids.begin(), ids.end());
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  return twice == ids.end() ? KVCORE_OK : refuse(failure, KVCORE_BLOCK_TWICE, 0, *twice);
}

inline int32_t check_chunks_apart(const kvcore_batch &batch, const Prepared &prepared, kvcore_failure *failure) {
  std::vector<uint64_t> chunks(batch.chunks, batch.chunks + batch.chunk_count);
  std::sort(chunks.begin(), chunks.end());
  for (size_t index = 1; index < chunks.size(); ++index)
    if (chunks[index] - chunks[index - 1] < prepared.share_bytes)
      return refuse(failure, KVCORE_CHUNK_OVERLAP, 0, int64_t(chunks[index]));
  return KVCORE_OK;
}

// All checks. On KVCORE_OK `prepared` is filled.
inline int32_t prepare(const kvcore_batch &batch, bool scatter, Prepared *prepared, kvcore_failure *failure) {
  if (const int32_t status = check_shape(batch, failure)) return status;
  if (const int32_t status = prepare_parts(batch, prepared, failure)) return status;
  if (const int32_t status = check_ids(batch, failure)) return status;
  for (int64_t chunk = 0; chunk < batch.chunk_count; ++chunk)
    if (batch.chunks[chunk] == 0) return refuse(failure, KVCORE_BAD_SHAPE, chunk, 0);
  if (!scatter) return check_chunks_apart(batch, *prepared, failure);
  if (const int32_t status = check_skips(batch, *prepared, failure)) return status;
  return check_blocks_once(batch, failure);
}

}  // namespace kvcore
