// CUDA on the CPU, as much of it as copy_kernels.cu uses: every block and every thread is executed.
//
// Theory of operation
// -------------------
// The kernels' own source is compiled as C++ with this file in the place of cuda_runtime.h. A launch runs the kernel
// body once for each (block, thread), one after the other, in an order drawn from a seed: the kernels have no barrier
// and no shared memory, so each order is one that a GPU may take, and all must give the same bytes. "Device memory" is
// host memory; what the CUDA runtime would do with streams is done at once.
//
// Under AddressSanitizer and UBSan each load and store of the kernel is checked for bounds and alignment, at the width
// that the GPU would use. What this cannot show: time, streams, and what only a real memory system does.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(threads)
#define __CUDA_ARCH_LIST__ 0

struct alignas(8) uint2 {
  unsigned int x, y;
};
struct alignas(16) uint4 {
  unsigned int x, y, z, w;
};
struct dim3 {
  unsigned int x = 1, y = 1, z = 1;
};

namespace kvcore_emulation {

struct Statistics {
  int64_t launches, blocks, threads, loads, stores;
};

inline uint64_t seed = 0;  // 0: blocks and threads in their natural order
inline int processors = 2;
inline Statistics statistics{};

inline std::vector<unsigned int> order_of(unsigned int count, uint64_t salt) {
  std::vector<unsigned int> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (seed) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed + salt));
  return order;
}

}  // namespace kvcore_emulation

inline dim3 gridDim, blockDim, blockIdx, threadIdx;  // one thread at a time: plain variables do

template <typename Vector>
Vector __ldcs(const Vector *source) {
  ++kvcore_emulation::statistics.loads;
  return *source;
}

template <typename Vector>
void __stcs(Vector *target, Vector value) {
  ++kvcore_emulation::statistics.stores;
  *target = value;
}

using cudaStream_t = void *;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidDevice = 101 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDefault = 4 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  cudaStream_t stream = nullptr;
};

inline cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr, int) {
  *value = kvcore_emulation::processors;
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  namespace here = kvcore_emulation;
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  ++here::statistics.launches;
  for (const unsigned int block : here::order_of(gridDim.x, 0)) {
    blockIdx.x = block;
    ++here::statistics.blocks;
    for (const unsigned int thread : here::order_of(blockDim.x, block + 1)) {
      threadIdx.x = thread;
      ++here::statistics.threads;
      kernel(arguments...);
    }
  }
  return cudaSuccess;
}
