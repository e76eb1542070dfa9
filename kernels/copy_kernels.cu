// The CUDA path: a batch in one launch.
//
// Theory of operation
// -------------------
// 1. The batch is checked on the host (check.h). Nothing is launched when it is refused.
// 2. A share (one block of one plane of one chunk) is cut into tiles of kTileBytes. All tiles of the batch are
//    numbered: plane by plane, in a plane chunk by chunk, block by block, tile by tile. `first_tile` of each plane
//    is where its numbers begin.
// 3. Everything that the kernel looks up (parts, block ids, chunk addresses, skips) is packed into the workspace's
//    pinned half, copied to its device half on the stream, and found there by the kernel: a batch of any size is one
//    launch.
// 4. A block of threads takes tiles grid-stride. Thread t moves vectors t, t + kThreads, ... of the tile, kInFlight of
//    them at a time: all loads of a round are under way before its first store. That, times all threads of the device,
//    is what covers the latency of host memory.
// 5. A vector is the widest of 16, 8, 4, 2 and 1 bytes that divides every address, stride and length of its plane, so
//    it never crosses the end of a run and is never misaligned. The width belongs to the plane: a plane of odd sizes
//    does not slow the others down.
//
// No shared memory, no barrier, no atomics: each byte is moved by exactly one thread, whatever the order. That is why
// running every block and thread one after the other (emulation.h) tells the whole truth about the arithmetic.
// Loads and stores are marked as used once, so that the copy does not push the model's weights out of L2.
//
// Rejected: kernel parameters instead of the workspace (4 KiB to 32 KiB: many chunks would need many launches); TMA
// (sm_90 on, aligned tiles only, and the link to the host is the limit here, not the instruction issue); one
// template instance per width (the plane decides, and a branch that all threads of a block take alike costs nothing).
#include <cstdint>
#include <cstring>
#include <new>

#ifndef KVCORE_EMULATION
#include <cuda_runtime.h>
#endif

#include "address.h"
#include "check.h"
#include "walk.h"

namespace {

using namespace kvcore;

#ifndef KVCORE_SMALL
constexpr int kThreads = 256;
constexpr uint32_t kTileBytes = 32768;
#else  // tests: many tiles, and several rounds in each, with few bytes
constexpr int kThreads = 8;
constexpr uint32_t kTileBytes = 1024;
#endif
constexpr int kInFlight = 4;
constexpr int kGridPerProcessor = 4;

struct DevicePart {
  Part part;
  uint64_t first_tile;
  uint32_t tiles_per_block;
  uint32_t vector_bytes;
};

// What the kernel is given: addresses inside the workspace's device half.
struct Job {
  const DevicePart *parts;
  const uint64_t *chunks;
  const int64_t *skips;  // null: nothing is skipped
  const uint32_t *block_ids;
  uint64_t tiles;
  int64_t block_tokens;
  uint32_t part_count;
  uint32_t blocks_per_chunk;
  uint32_t chunk_count;
};

// One tile, looked up.
struct Tile {
  const DevicePart *plane;
  uint64_t block;
  uint64_t chunk_side;  // of dense position 0 of the share
  uint32_t first;
  uint32_t last;
  uint32_t skip_bytes;
};

__device__ inline const DevicePart *find_part(const Job &job, uint64_t tile) {
  uint32_t low = 0, high = job.part_count - 1;  // the last part whose first_tile is not behind `tile`
  while (low < high) {
    const uint32_t middle = (low + high + 1) / 2;
    if (job.parts[middle].first_tile <= tile)
      low = middle;
    else
      high = middle - 1;
  }
  return job.parts + low;
}

__device__ inline Tile find_tile(const Job &job, uint64_t number) {
  Tile tile;
  tile.plane = find_part(job, number);
  const Part &part = tile.plane->part;
  const uint64_t inside = number - tile.plane->first_tile;
  const uint64_t index = inside / tile.plane->tiles_per_block;  // of the share: chunk * blocks_per_chunk + block
  const uint32_t chunk = uint32_t(index / job.blocks_per_chunk);
  const uint32_t in_chunk = uint32_t(index - uint64_t(chunk) * job.blocks_per_chunk);
  tile.block = job.block_ids[index];
  tile.chunk_side = chunk_position(part, job.chunks[chunk], in_chunk, 0);
  tile.first = uint32_t(inside - index * tile.plane->tiles_per_block) * kTileBytes;
  tile.last = part.block_bytes - tile.first > kTileBytes ? tile.first + kTileBytes : part.block_bytes;
  tile.skip_bytes = job.skips ? skipped_bytes(part, job.skips[chunk], job.block_tokens, in_chunk) : 0;
  return tile;
}

template <typename Vector, bool kScatter>
__device__ inline void copy_tile(const Tile &tile) {
  constexpr uint32_t kStep = kThreads * uint32_t(sizeof(Vector));
  const Part &part = tile.plane->part;
  for (uint32_t round = tile.first + threadIdx.x * uint32_t(sizeof(Vector)); round < tile.last;
       round += kInFlight * kStep) {
    Vector moved[kInFlight];
    Vector *targets[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const uint32_t dense = round + uint32_t(i) * kStep;
      targets[i] = nullptr;
      if (dense >= tile.last) continue;
      if (kScatter && tile.skip_bytes && dense % part.outer_bytes < tile.skip_bytes) continue;
      const uint64_t block_side = block_position(part, tile.block, dense), chunk_side = tile.chunk_side + dense;
      targets[i] = reinterpret_cast<Vector *>(kScatter ? block_side : chunk_side);
      moved[i] = __ldcs(reinterpret_cast<const Vector *>(kScatter ? chunk_side : block_side));
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i)
      if (targets[i]) __stcs(targets[i], moved[i]);
  }
}

template <bool kScatter>
__global__ void __launch_bounds__(kThreads) copy_tiles(const Job job) {
  for (uint64_t number = blockIdx.x; number < job.tiles; number += gridDim.x) {
    const Tile tile = find_tile(job, number);
    if (kScatter && tile.skip_bytes == tile.plane->part.outer_bytes) continue;
    switch (tile.plane->vector_bytes) {
      case 16: copy_tile<uint4, kScatter>(tile); break;
      case 8: copy_tile<uint2, kScatter>(tile); break;
      case 4: copy_tile<unsigned int, kScatter>(tile); break;
      case 2: copy_tile<unsigned short, kScatter>(tile); break;
      default: copy_tile<unsigned char, kScatter>(tile);
    }
  }
}

// ---- host ----------------------------------------------------------------------------------------------------------

// The steps of KVCORE_CUDA_ERROR.
enum Step { kSelectDevice = 1, kReadDevice = 2, kCopyWorkspace = 3, kLaunch = 4, kCopyRun = 5 };

int32_t check_cuda(cudaError_t error, Step step, kvcore_failure *failure) {
  return error == cudaSuccess ? KVCORE_OK : refuse(failure, KVCORE_CUDA_ERROR, step, error);
}

uint32_t vector_bytes(const Part &part, const kvcore_batch &batch, bool cut) {
  uint64_t bits = part.base | part.chunk_offset | part.block_bytes;
  if (cut) bits |= part.token_bytes;
  if (batch.num_blocks > 1) bits |= part.block_stride;
  if (part.run_bytes != part.block_bytes) bits |= part.outer_stride | part.run_bytes;
  if (part.runs > 1) bits |= part.run_stride;
  for (int64_t chunk = 0; chunk < batch.chunk_count; ++chunk) bits |= batch.chunks[chunk];
  for (uint32_t bytes = 16; bytes > 1; bytes /= 2)
    if (bits % bytes == 0) return bytes;
  return 1;
}

// Offsets of what lies in each half of the workspace; the widest type first, so all of it is aligned.
struct Arrangement {
  size_t parts, chunks, skips, block_ids, bytes;
};

Arrangement arrange(const kvcore_batch &batch) {
  Arrangement at{};
  at.chunks = size_t(batch.plane_count) * sizeof(DevicePart);
  at.skips = at.chunks + size_t(batch.chunk_count) * sizeof(uint64_t);
  at.block_ids = at.skips + size_t(batch.chunk_count) * sizeof(int64_t);
  at.bytes = at.block_ids + size_t(batch.chunk_count * batch.blocks_per_chunk) * sizeof(uint32_t);
  return at;
}

uint64_t pack_parts(const kvcore_batch &batch, const Prepared &prepared, bool cut, DevicePart *out) {
  uint64_t tiles = 0;
  for (const Part &part : prepared.parts) {
    const uint32_t per_block = (part.block_bytes - 1) / kTileBytes + 1;
    *out++ = {part, tiles, per_block, vector_bytes(part, batch, cut)};
    tiles += uint64_t(batch.chunk_count) * uint64_t(batch.blocks_per_chunk) * per_block;
  }
  return tiles;
}

// Fill the pinned half and say where the kernel finds it all in the device half.
Job pack(const kvcore_batch &batch, const Prepared &prepared, const int64_t *skips, const kvcore_cuda_call &call) {
  const Arrangement at = arrange(batch);
  auto *host = reinterpret_cast<char *>(call.workspace_host);
  const auto *device = reinterpret_cast<const char *>(call.workspace_device);
  const uint64_t tiles = pack_parts(batch, prepared, skips != nullptr, reinterpret_cast<DevicePart *>(host));
  std::memcpy(host + at.chunks, batch.chunks, size_t(batch.chunk_count) * sizeof(uint64_t));
  if (skips) std::memcpy(host + at.skips, skips, size_t(batch.chunk_count) * sizeof(int64_t));
  auto *ids = reinterpret_cast<uint32_t *>(host + at.block_ids);
  for (int64_t i = 0; i < batch.chunk_count * batch.blocks_per_chunk; ++i) ids[i] = uint32_t(batch.block_ids[i]);
  return {reinterpret_cast<const DevicePart *>(device),
          reinterpret_cast<const uint64_t *>(device + at.chunks),
          skips ? reinterpret_cast<const int64_t *>(device + at.skips) : nullptr,
          reinterpret_cast<const uint32_t *>(device + at.block_ids),
          tiles,
          batch.block_tokens,
          uint32_t(batch.plane_count),
          uint32_t(batch.blocks_per_chunk),
          uint32_t(batch.chunk_count)};
}

int32_t choose_grid(const kvcore_cuda_call &call, uint64_t tiles, unsigned int *grid, kvcore_failure *failure) {
  int processors = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, call.device);
  if (const int32_t status = check_cuda(error, kReadDevice, failure)) return status;
  const uint64_t most = call.grid_max > 0 ? uint64_t(call.grid_max) : uint64_t(processors) * kGridPerProcessor;
  *grid = unsigned(std::min(tiles, most));
  return KVCORE_OK;
}

template <bool kScatter>
int32_t launch(const Job &job, const kvcore_cuda_call &call, kvcore_failure *failure) {
  cudaLaunchConfig_t config{};
  if (const int32_t status = choose_grid(call, job.tiles, &config.gridDim.x, failure)) return status;
  config.blockDim.x = kThreads;
  config.stream = static_cast<cudaStream_t>(call.stream);
  return check_cuda(cudaLaunchKernelEx(&config, copy_tiles<kScatter>, job), kLaunch, failure);
}

// Makes the call's device current and gives the caller's back: its other libraries share the current one.
class OnDevice {
 public:
  OnDevice(int32_t device, kvcore_failure *failure) {
    status_ = check_cuda(cudaGetDevice(&before_), kSelectDevice, failure);
    if (status_ == KVCORE_OK && before_ != device)
      changed_ = (status_ = check_cuda(cudaSetDevice(device), kSelectDevice, failure)) == KVCORE_OK;
  }
  OnDevice(const OnDevice &) = delete;
  OnDevice &operator=(const OnDevice &) = delete;
  ~OnDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  int32_t status() const { return status_; }

 private:
  int before_ = 0;
  int32_t status_ = KVCORE_OK;
  bool changed_ = false;
};

template <bool kScatter>
int32_t copy_batch(const kvcore_batch *batch, const kvcore_cuda_call *call, kvcore_failure *failure) try {
  Prepared prepared;
  if (const int32_t status = prepare(*batch, kScatter, &prepared, failure)) return status;
  const auto bytes = int64_t(arrange(*batch).bytes);
  const uint64_t misaligned = (call->workspace_host | call->workspace_device) % 16;
  if (!call->workspace_host || !call->workspace_device || misaligned || call->workspace_bytes < bytes)
    return refuse(failure, KVCORE_NO_WORKSPACE, 0, bytes);
  const OnDevice device(call->device, failure);
  if (device.status()) return device.status();
  const Job job = pack(*batch, prepared, kScatter ? batch->skip_tokens : nullptr, *call);
  const cudaError_t error = cudaMemcpyAsync(reinterpret_cast<void *>(call->workspace_device),
                                            reinterpret_cast<const void *>(call->workspace_host), size_t(bytes),
                                            cudaMemcpyHostToDevice, static_cast<cudaStream_t>(call->stream));
  if (const int32_t status = check_cuda(error, kCopyWorkspace, failure)) return status;
  return launch<kScatter>(job, *call, failure);
} catch (const std::bad_alloc &) {
  return refuse(failure, KVCORE_NO_MEMORY, 0, 0);
}

// A sink of walk.h: one asynchronous copy per run. The first error ends it.
struct AsyncCopies {
  bool scatter;
  cudaStream_t stream;
  cudaError_t error = cudaSuccess;

  void operator()(const kvcore_run &run) {
    if (error != cudaSuccess) return;
    error = cudaMemcpyAsync(reinterpret_cast<void *>(scatter ? run.block_side : run.chunk_side),
                            reinterpret_cast<const void *>(scatter ? run.chunk_side : run.block_side),
                            size_t(run.bytes), cudaMemcpyDefault, stream);
  }
};

}  // namespace

int32_t kvcore_cuda_abi(void) { return KVCORE_COPY_ABI; }

int32_t kvcore_cuda_architectures(int32_t *out, int32_t capacity) {
  const int32_t built[] = {__CUDA_ARCH_LIST__};  // nvcc's: 800, 900, ...
  const auto count = int32_t(sizeof(built) / sizeof(built[0]));
  for (int32_t i = 0; i < std::min(count, capacity); ++i) out[i] = built[i] / 10;
  return count;
}

int32_t kvcore_cuda_workspace(const kvcore_batch *batch, int64_t *bytes, kvcore_failure *failure) {
  if (const int32_t status = check_shape(*batch, failure)) return status;
  *bytes = int64_t(arrange(*batch).bytes);
  return KVCORE_OK;
}

int32_t kvcore_cuda_gather(const kvcore_batch *batch, const kvcore_cuda_call *call, kvcore_failure *failure) {
  return copy_batch<false>(batch, call, failure);
}

int32_t kvcore_cuda_scatter(const kvcore_batch *batch, const kvcore_cuda_call *call, kvcore_failure *failure) {
  return copy_batch<true>(batch, call, failure);
}

int32_t kvcore_cuda_direct(const kvcore_batch *batch, int32_t scatter, const kvcore_cuda_call *call,
                           kvcore_failure *failure) try {
  Prepared prepared;
  if (const int32_t status = prepare(*batch, scatter != 0, &prepared, failure)) return status;
  const OnDevice device(call->device, failure);
  if (device.status()) return device.status();
  AsyncCopies copies{scatter != 0, static_cast<cudaStream_t>(call->stream)};
  walk(*batch, prepared, scatter ? batch->skip_tokens : nullptr, 0, batch_bytes(*batch, prepared), copies);
  return check_cuda(copies.error, kCopyRun, failure);
} catch (const std::bad_alloc &) {
  return refuse(failure, KVCORE_NO_MEMORY, 0, 0);
}
