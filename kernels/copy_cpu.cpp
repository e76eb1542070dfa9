// The CPU path: the batch walked as contiguous pieces, by as many threads as the caller grants.
//
// Theory of operation
// -------------------
// 1. The batch is checked (check.h). Nothing has moved when it is refused.
// 2. Its bytes are numbered (walk.h) and cut into equal ranges, one per thread; ranges end on cache lines of the
//    numbering, so two threads seldom share one. The calling thread takes the last range.
// 3. Each piece is copied by streaming stores when the batch is larger than what caches would keep anyway, and by
//    memcpy otherwise: a small batch is probably read again soon.
// 4. All threads have ended, and their streaming stores are ordered, when the call returns.
//
// Threads live for one call: they cost some 20 us each, a thread's smallest share takes ten times as long, and nothing
// has to be said about fork, shutdown or the process's limits. Where a thread cannot be had its range is done here.
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "stream_copy.h"
#include "walk.h"

namespace {

using namespace kvcore;

#ifndef KVCORE_SMALL
constexpr uint64_t kStreamFrom = uint64_t(1) << 20;   // bytes of a batch; below, the caches are the better place
constexpr int64_t kStreamPiece = 512;                 // bytes of a piece
constexpr uint64_t kThreadShare = uint64_t(2) << 20;  // least bytes that are worth a thread
constexpr uint64_t kRangeAlign = 4096;
#else  // tests: every path with few bytes
constexpr uint64_t kStreamFrom = 1;
constexpr int64_t kStreamPiece = 1;
constexpr uint64_t kThreadShare = 16;
constexpr uint64_t kRangeAlign = 8;
#endif

template <bool kScatter, bool kStream>
struct Mover {
  void operator()(const kvcore_run &run) const {
    auto *target = reinterpret_cast<char *>(kScatter ? run.block_side : run.chunk_side);
    const auto *source = reinterpret_cast<const char *>(kScatter ? run.chunk_side : run.block_side);
    if (kStream && run.bytes >= kStreamPiece)
      stream_copy(target, source, run.bytes);
    else
      std::memcpy(target, source, size_t(run.bytes));
  }
};

template <bool kScatter, bool kStream>
void move_range(const kvcore_batch &batch, const Prepared &prepared, uint64_t first, uint64_t last) {
  Mover<kScatter, kStream> mover;
  walk(batch, prepared, kScatter ? batch.skip_tokens : nullptr, first, last, mover);
  if (kStream) finish_streams();
}

using MoveRange = void (*)(const kvcore_batch &, const Prepared &, uint64_t, uint64_t);

void move_in_threads(const kvcore_batch &batch, const Prepared &prepared, int32_t threads, MoveRange move) {
  const uint64_t total = batch_bytes(batch, prepared);
  const uint64_t parts = std::max<uint64_t>(1, std::min<uint64_t>(uint64_t(threads), total / kThreadShare));
  const uint64_t range = (total / parts + kRangeAlign - 1) / kRangeAlign * kRangeAlign;
  std::vector<std::thread> others;
  others.reserve(parts);
  uint64_t first = 0;
  for (uint64_t part = 1; part < parts; ++part) {
    try {
      others.emplace_back(move, std::cref(batch), std::cref(prepared), first, std::min(total, first + range));
    } catch (const std::system_error &) {
      break;
    }
    first = std::min(total, first + range);
  }
  move(batch, prepared, first, total);
  for (std::thread &other : others) other.join();
}

template <bool kScatter>
int32_t copy_batch(const kvcore_batch *batch, int32_t threads, kvcore_failure *failure) try {
  Prepared prepared;
  if (const int32_t status = prepare(*batch, kScatter, &prepared, failure)) return status;
  if (threads < 1) return refuse(failure, KVCORE_BAD_SHAPE, 0, threads);
  const bool stream = kHasStreams && can_stream() && batch_bytes(*batch, prepared) >= kStreamFrom;
  move_in_threads(*batch, prepared, threads, stream ? move_range<kScatter, true> : move_range<kScatter, false>);
  return KVCORE_OK;
} catch (const std::bad_alloc &) {
  return refuse(failure, KVCORE_NO_MEMORY, 0, 0);
}

struct Listing {
  kvcore_run *runs;
  int64_t capacity;
  int64_t count = 0;

  void operator()(const kvcore_run &run) {
    if (count < capacity) runs[count] = run;
    ++count;
  }
};

}  // namespace

int32_t kvcore_abi(void) { return KVCORE_COPY_ABI; }

int32_t kvcore_cpu_gather(const kvcore_batch *batch, int32_t threads, kvcore_failure *failure) {
  return copy_batch<false>(batch, threads, failure);
}

int32_t kvcore_cpu_scatter(const kvcore_batch *batch, int32_t threads, kvcore_failure *failure) {
  return copy_batch<true>(batch, threads, failure);
}

int32_t kvcore_runs(const kvcore_batch *batch, int32_t scatter, kvcore_run *runs, int64_t capacity, int64_t *count,
                    kvcore_failure *failure) try {
  Prepared prepared;
  if (const int32_t status = prepare(*batch, scatter != 0, &prepared, failure)) return status;
  Listing listing{runs, capacity};
  walk(*batch, prepared, scatter ? batch->skip_tokens : nullptr, 0, batch_bytes(*batch, prepared), listing);
  *count = listing.count;
  return KVCORE_OK;
} catch (const std::bad_alloc &) {
  return refuse(failure, KVCORE_NO_MEMORY, 0, 0);
}
