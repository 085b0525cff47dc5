// Vectors of LANES 32-bit numbers, in GCC's and clang's vector extension: arithmetic, comparisons and ?: are the
// language's own. Only what moves between widths or between lanes is written twice, for AVX2 and for any machine.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 8, VECTORS = GROUP / LANES;
static_assert(GROUP == 32, "narrow() packs four vectors");

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

inline Ints bits_of(Floats x) { return reinterpret_cast<Ints>(x); }
inline Floats float_of(Ints x) { return reinterpret_cast<Floats>(x); }
inline Ints bits_of(float x) { int32_t b; std::memcpy(&b, &x, 4); return b - Ints{}; }
inline float float_of(int32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
inline Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
inline Ints truncated(Floats x) { return __builtin_convertvector(x, Ints); }
inline Ints largest(Ints a, Ints b) { return a > b ? a : b; }
inline Ints smallest(Ints a, Ints b) { return a < b ? a : b; }

template <typename V> inline V load(const void* from) { V x; std::memcpy(&x, from, sizeof x); return x; }
template <typename V> inline void store(void* to, V x) { std::memcpy(to, &x, sizeof x); }

#if defined(__AVX2__)

inline Floats root(Floats x) { return Floats(_mm256_sqrt_ps(__m256(x))); }
// The bound in place of NaN.
inline Floats at_least(float bound, Floats x) { return Floats(_mm256_max_ps(__m256(x), _mm256_set1_ps(bound))); }
inline Floats at_most(float bound, Floats x) { return Floats(_mm256_min_ps(__m256(x), _mm256_set1_ps(bound))); }

inline Ints widen(const int8_t* x) { return Ints(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x))); }
inline Ints widen(const uint8_t* x) { return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x))); }
inline Ints widen(const int16_t* x) { return Ints(_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i*)x))); }
inline Ints widen(const uint16_t* x) { return Ints(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)x))); }

// Four vectors to a group of narrower numbers. The packing instructions saturate, and work on halves of 128 bits.
inline void narrow(const Ints* x, uint8_t* to) {
  __m256i low = _mm256_packs_epi32(__m256i(x[0]), __m256i(x[1]));
  __m256i high = _mm256_packs_epi32(__m256i(x[2]), __m256i(x[3]));
  __m256i all = _mm256_packus_epi16(low, high);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
inline void narrow(const Ints* x, int8_t* to) {
  __m256i low = _mm256_packs_epi32(__m256i(x[0]), __m256i(x[1]));
  __m256i high = _mm256_packs_epi32(__m256i(x[2]), __m256i(x[3]));
  __m256i all = _mm256_packs_epi16(low, high);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(all, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}
inline void narrow(const Ints* x, int16_t* to) {
  for (int j = 0; j < VECTORS; j += 2) {
    __m256i all = _mm256_packs_epi32(__m256i(x[j]), __m256i(x[j + 1]));
    _mm256_storeu_si256((__m256i*)(to + j * LANES), _mm256_permute4x64_epi64(all, 0xd8));
  }
}

// Lane k of the result is the largest lane of x[k].
inline Ints largest_of_each(const Ints* x) {
  Ints pairs[4], fours[2];
  for (int k = 0; k < 4; k++) {
    __m256i a = __m256i(x[2 * k]), b = __m256i(x[2 * k + 1]);
    pairs[k] = largest(Ints(_mm256_unpacklo_epi32(a, b)), Ints(_mm256_unpackhi_epi32(a, b)));
  }
  for (int k = 0; k < 2; k++) {
    __m256i a = __m256i(pairs[2 * k]), b = __m256i(pairs[2 * k + 1]);
    fours[k] = largest(Ints(_mm256_unpacklo_epi64(a, b)), Ints(_mm256_unpackhi_epi64(a, b)));
  }
  __m256i a = __m256i(fours[0]), b = __m256i(fours[1]);
  return largest(Ints(_mm256_permute2x128_si256(a, b, 0x20)), Ints(_mm256_permute2x128_si256(a, b, 0x31)));
}
inline bool any(Ints condition) { return _mm256_movemask_epi8(__m256i(condition)); }

#else

inline Floats root(Floats x) {
  for (int i = 0; i < LANES; i++) x[i] = std::sqrt(x[i]);
  return x;
}
inline Floats at_least(float bound, Floats x) { return x > bound ? x : bound - Floats{}; }
inline Floats at_most(float bound, Floats x) { return x < bound ? x : bound - Floats{}; }
template <typename T> inline Ints widen(const T* x) {
  Ints y;
  for (int i = 0; i < LANES; i++) y[i] = x[i];
  return y;
}
template <typename T> inline void narrow(const Ints* x, T* to) {
  constexpr int32_t least = std::numeric_limits<T>::min(), most = std::numeric_limits<T>::max();
  for (int i = 0; i < GROUP; i++) to[i] = T(std::min(std::max(x[i / LANES][i % LANES], least), most));
}
inline Ints largest_of_each(const Ints* x) {
  Ints y;
  for (int k = 0; k < LANES; k++) {
    y[k] = x[k][0];
    for (int i = 1; i < LANES; i++) y[k] = std::max<int32_t>(y[k], x[k][i]);
  }
  return y;
}
inline bool any(Ints condition) {
  int32_t y = 0;
  for (int i = 0; i < LANES; i++) y |= condition[i];
  return y;
}

#endif

}  // namespace
