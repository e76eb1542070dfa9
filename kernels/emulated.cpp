// The CUDA source as a host library for the tests, and the handles of its emulation. Not part of the package.
#define KVCORE_EMULATION 1
#include "emulation.h"

#include "copy_kernels.cu"

extern "C" {

// Order of blocks and threads from the next launch on, and how many processors the device has.
KVCORE_EXPORT void kvcore_emulation_set(uint64_t seed, int32_t processors) {
  kvcore_emulation::seed = seed;
  kvcore_emulation::processors = processors;
}

// launches, blocks, threads, loads, stores since the last call
KVCORE_EXPORT void kvcore_emulation_statistics(int64_t *out) {
  std::memcpy(out, &kvcore_emulation::statistics, sizeof(kvcore_emulation::statistics));
  kvcore_emulation::statistics = {};
}
}
