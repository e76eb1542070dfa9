// A batch as contiguous pieces: what plain copies move, on the CPU and by a device's copy engine.
//
// All bytes of a batch are numbered in the order plane, chunk, block, dense position; `walk` visits a range of these
// numbers, so threads that share a batch take a range each. A piece that continues the one before it on both sides
// is joined to it: neighbouring blocks of a dense plane become one copy.
#pragma once

#include <algorithm>
#include <cstdint>

#include "check.h"

namespace kvcore {

template <class Sink>
class Joining {
 public:
  explicit Joining(Sink &sink) : sink_(sink) {}

  void add(uint64_t block_side, uint64_t chunk_side, int64_t bytes) {
    if (block_side == run_.block_side + uint64_t(run_.bytes) && chunk_side == run_.chunk_side + uint64_t(run_.bytes)) {
      run_.bytes += bytes;
      return;
    }
    finish();
    run_ = {block_side, chunk_side, bytes};
  }

  void finish() {
    if (run_.bytes > 0) sink_(run_);
    run_ = {0, 0, 0};
  }

 private:
  Sink &sink_;
  kvcore_run run_{0, 0, 0};
};

// Where one block's share of a plane is, and what of every outer is left alone.
struct Share {
  const Part &part;
  uint64_t block;
  uint64_t chunk;
  uint64_t block_in_chunk;
  uint32_t skip_bytes;
};

// Dense positions [first, last) of one share.
template <class Sink>
void walk_share(const Share &share, uint32_t first, uint32_t last, Joining<Sink> &out) {
  const Part &part = share.part;
  const uint32_t step = share.skip_bytes ? std::min(part.run_bytes, part.outer_bytes) : part.run_bytes;
  for (uint32_t at = first; at < last;) {
    const uint32_t end = uint32_t(std::min<uint64_t>(last, (uint64_t(at) / step + 1) * step));
    const uint32_t outer = at / part.outer_bytes * part.outer_bytes;
    const uint32_t start = share.skip_bytes ? std::max(at, outer + share.skip_bytes) : at;
    if (start < end)
      out.add(block_position(part, share.block, start),
              chunk_position(part, share.chunk, share.block_in_chunk, start), int64_t(end) - start);
    at = end;
  }
}

inline uint64_t batch_bytes(const kvcore_batch &batch, const Prepared &prepared) {
  return prepared.share_bytes * uint64_t(batch.chunk_count);
}

// Bytes [first, last) of the batch. `skips` is null for a gather.
template <class Sink>
void walk(const kvcore_batch &batch, const Prepared &prepared, const int64_t *skips, uint64_t first, uint64_t last,
          Sink &sink) {
  Joining<Sink> out(sink);
  const auto blocks = uint64_t(batch.blocks_per_chunk);
  uint64_t part_start = 0;
  for (const Part &part : prepared.parts) {
    const uint64_t size = part.block_bytes, part_end = part_start + uint64_t(batch.chunk_count) * blocks * size;
    const uint64_t from = std::max(first, part_start), to = std::min(last, part_end);
    for (uint64_t at = from; at < to;) {
      const uint64_t index = (at - part_start) / size, chunk = index / blocks, in_chunk = index % blocks;
      const uint64_t share_start = part_start + index * size, end = std::min(to, share_start + size);
      const uint32_t skip = skips ? skipped_bytes(part, skips[chunk], batch.block_tokens, int64_t(in_chunk)) : 0;
      const Share share{part, uint64_t(batch.block_ids[index]), batch.chunks[chunk], in_chunk, skip};
      walk_share(share, uint32_t(at - share_start), uint32_t(end - share_start), out);
      at = end;
    }
    part_start = part_end;
  }
  out.finish();
}

}  // namespace kvcore
