// One contiguous copy that goes around the caches where that was measured faster (docs/kernels.md): x86-64 with AVX.
//
// A plain store first reads the line that it is going to overwrite. A streaming store does not, which saves a third of
// the traffic when the bytes come from and go to memory. Lines ahead of the loads are asked for early, but only
// inside the piece: what lies behind it is somebody else's.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvcore {

#if defined(__x86_64__)

constexpr bool kHasStreams = true;
constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 16 * kLine;

// Sanitizers do not see streaming stores: theirs is a plain one, to the same address with the same alignment.
__attribute__((target("avx"))) inline void stream_store(__m256i *target, __m256i value) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  *target = value;
#else
  _mm256_stream_si256(target, value);
#endif
}

__attribute__((target("avx"))) inline void stream_two_lines(char *target, const char *source) {
  const auto *from = reinterpret_cast<const __m256i *>(source);
  auto *to = reinterpret_cast<__m256i *>(target);
  const __m256i a = _mm256_loadu_si256(from), b = _mm256_loadu_si256(from + 1);
  const __m256i c = _mm256_loadu_si256(from + 2), d = _mm256_loadu_si256(from + 3);
  stream_store(to, a);
  stream_store(to + 1, b);
  stream_store(to + 2, c);
  stream_store(to + 3, d);
}

__attribute__((target("avx"))) inline void stream_copy(char *target, const char *source, int64_t bytes) {
  const int64_t head = -int64_t(reinterpret_cast<uintptr_t>(target)) & (kLine - 1);  // streaming stores need alignment
  if (bytes < head + 2 * kLine) {
    std::memcpy(target, source, size_t(bytes));
    return;
  }
  std::memcpy(target, source, size_t(head));
  int64_t at = head;
  for (; at + kAhead + 2 * kLine <= bytes; at += 2 * kLine) {
    _mm_prefetch(source + at + kAhead, _MM_HINT_NTA);
    _mm_prefetch(source + at + kAhead + kLine, _MM_HINT_NTA);
    stream_two_lines(target + at, source + at);
  }
  for (; at + 2 * kLine <= bytes; at += 2 * kLine) stream_two_lines(target + at, source + at);
  std::memcpy(target + at, source + at, size_t(bytes - at));
}

inline bool can_stream() { return __builtin_cpu_supports("avx"); }
// Streaming stores are not ordered with anything else: before another thread is told of them.
inline void finish_streams() { _mm_sfence(); }

#else

constexpr bool kHasStreams = false;
inline void stream_copy(char *target, const char *source, int64_t bytes) { std::memcpy(target, source, size_t(bytes)); }
inline bool can_stream() { return false; }
inline void finish_streams() {}

#endif

}  // namespace kvcore
