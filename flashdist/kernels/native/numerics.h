// Device twins of numerics/weight_split.py, fingerprint.py and companding.py, on vectors or on a whole group of GROUP
// neighbours. Where a comment is missing here, the reason stands at the torch function of the same name.

#pragma once

#include "vector.h"

namespace {

constexpr int32_t MAGNITUDE = 0x7fffffff, SIGN = ~MAGNITUDE, FP32_INF = 0x7f800000;
constexpr int32_t BF16_INF = 0x7f80, BF16_NAN = 0x7fc0, FP16_INF = 0x7c00, FP16_NAN = 0x7e00;
constexpr int32_t FP16_REBIAS = (127 - 15) << 23;
constexpr float SMALLEST_NORMAL = 0x1p-126f;

inline Floats magnitude_of(Floats x) { return float_of(bits_of(x) & MAGNITUDE); }

// numerics/weight_split.py. Patterns of 16 bits travel sign-extended, so that narrow() finds them in its range.

inline Floats widen_bf16(Ints pattern) { return float_of(pattern << 16); }

inline Floats widen_fp16(Ints pattern) {
  Ints magnitude = pattern & 0x7fff;
  Ints bits = magnitude < 0x400 ? bits_of(to_floats(magnitude) * 0x1p-24f) : (magnitude << 13) + FP16_REBIAS;
  bits = magnitude >= FP16_INF ? FP32_INF + ((magnitude - FP16_INF) << 13) : bits;
  return float_of(bits | (pattern & SIGN));
}

template <int EXTRA> inline Floats join_bf16(Ints pattern, Ints lo) {
  Ints magnitude = pattern & 0x7fff, q = largest((magnitude << EXTRA) + lo, Ints{});
  Ints bits = magnitude >= BF16_INF ? magnitude << 16 : q << (16 - EXTRA);
  return float_of(bits | (pattern & SIGN));
}

template <int EXTRA> inline Floats join_fp16(Ints pattern, Ints lo) {
  Ints magnitude = pattern & 0x7fff, q = largest((magnitude << EXTRA) + lo, Ints{});
  Ints normal = (EXTRA == 8 ? q << 5 : q >> 3) + FP16_REBIAS;
  Ints bits = q < (0x400 << EXTRA) ? bits_of(to_floats(q) * (EXTRA == 8 ? 0x1p-32f : 0x1p-40f)) : normal;
  bits = magnitude >= FP16_INF ? FP32_INF + ((magnitude - FP16_INF) << 13) : bits;
  return float_of(bits | (pattern & SIGN));
}

// Of pairs that a split made: the correction is added to the bits as they are.
template <int EXTRA> inline Floats join_ordinary_bf16(Ints pattern, Ints lo) {
  return float_of((pattern << 16) + (lo << (16 - EXTRA)));
}

struct Split { Ints pattern, lo; };

template <int EXTRA> inline Split split_bf16(Floats p) {
  Ints bits = bits_of(p), magnitude = bits & MAGNITUDE, q = smallest(magnitude, FP32_INF - Ints{});
  q = EXTRA == 8 ? (q + 0x80) >> 8 : q;
  Ints h = (q + (1 << (EXTRA - 1))) >> EXTRA;
  Ints lo = h >= BF16_INF ? Ints{} : q - (h << EXTRA);
  h = smallest(h, BF16_INF - Ints{}) | (bits >> 31 << 15);
  return {magnitude > FP32_INF ? BF16_NAN - Ints{} : h, lo};
}

// Of finite numbers whose pattern does not round to infinity: the sign is bit 31, which no rounding reaches.
template <int EXTRA> inline Split split_ordinary_bf16(Floats p) {
  Ints q = EXTRA == 8 ? (bits_of(p) + 0x80) >> 8 : bits_of(p);
  Ints h = (q + (1 << (EXTRA - 1))) >> EXTRA;
  return {h, q - (h << EXTRA)};
}

template <int EXTRA> inline Split split_fp16(Floats p) {
  Ints bits = bits_of(p), magnitude = bits & MAGNITUDE, cut = smallest(magnitude, 0x47800000 - Ints{});
  Ints rebased = cut - FP16_REBIAS, normal = EXTRA == 8 ? (rebased + 0x10) >> 5 : rebased << 3;
  Floats scaled = float_of(cut) * (EXTRA == 8 ? 0x1p32f : 0x1p40f);
  Ints whole = truncated(scaled < 0x1p30f ? scaled : 0x1p30f - Floats{});
  Ints subnormal = whole - (scaled - to_floats(whole) >= 0.5f);  // true is -1
  Ints q = cut < 0x38800000 ? subnormal : normal;
  Ints h = (q + (1 << (EXTRA - 1))) >> EXTRA;
  Ints lo = h >= FP16_INF ? Ints{} : q - (h << EXTRA);
  h = smallest(h, FP16_INF - Ints{}) | (bits >> 31 << 15);
  return {magnitude > FP32_INF ? FP16_NAN - Ints{} : h, lo};
}

inline Ints narrow_bf16(Floats p) {
  Ints bits = bits_of(p), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & MAGNITUDE) > FP32_INF ? BF16_NAN - Ints{} : rounded;
}

inline Ints narrow_fp16(Floats p) {  // to the nearest, ties to even
  Ints bits = bits_of(p), magnitude = bits & MAGNITUDE, cut = smallest(magnitude, 0x47800000 - Ints{});
  Ints rebased = cut - FP16_REBIAS, normal = (rebased + 0xfff + ((rebased >> 13) & 1)) >> 13;
  // Adding 1/2 rounds to a multiple of 2^-24, the step of fp16's subnormal numbers; they are the low bits then.
  Ints subnormal = bits_of(float_of(smallest(cut, 0x38800000 - Ints{})) + 0.5f) - bits_of(0.5f);
  Ints h = smallest(cut < 0x38800000 ? subnormal : normal, FP16_INF - Ints{});
  return (magnitude > FP32_INF ? FP16_NAN - Ints{} : h) | (bits >> 31 << 15);
}

// numerics/fingerprint.py, of a whole tile; places are its odd factors.

inline uint32_t fingerprint(const void* hi, const uint32_t* places) {
  uint32_t total = 0;
  for (int i = 0; i < TILE_GROUPS * GROUP / 2; i++) {
    uint32_t pair;
    std::memcpy(&pair, static_cast<const char*>(hi) + 4 * i, 4);
    uint32_t product = pair * places[i];
    total += product ^ product >> 16;
  }
  return total ? total : 1;
}

// numerics/companding.py

inline Floats decode_momentum(Ints code, float scale) {
  Floats c = to_floats(code);
  return c / (2.0f * MOMENTUM_CODES - magnitude_of(c)) * scale;
}

inline Floats decode_variance(Ints code, float scale) {
  Floats r = to_floats(code) * (scale * float(1.0 / VARIANCE_CODES));
  return r * r;
}

// The largest magnitudes of LANES groups, as bits: infinity and NaN order above every number.
inline Ints peaks_of(const Floats* x) {
  Ints peaks[LANES];
  for (int k = 0; k < LANES; k++, x += VECTORS) {
    peaks[k] = bits_of(x[0]) & MAGNITUDE;
    for (int j = 1; j < VECTORS; j++) peaks[k] = largest(peaks[k], bits_of(x[j]) & MAGNITUDE);
  }
  return largest_of_each(peaks);
}

// Both encode LANES groups together, so that what is done once a group is done on vectors, too.

inline void encode_momentum(const Floats* m, const Floats* dither, int8_t* codes, uint16_t* scales) {
  const Ints peak = smallest(peaks_of(m), FP32_INF - Ints{}), rounded = (peak + 0x7fff + ((peak >> 16) & 1)) >> 16;
  const Ints empty = rounded < 0x0080, lost = rounded >= 0x7e00;  // below 2^-126; from 2^125 on
  const Ints scale = empty ? Ints{} : lost ? BF16_NAN - Ints{} : rounded;
  // Over infinity every element has the code 0.
  const Floats over = float_of(empty | lost ? FP32_INF - Ints{} : scale << 16);
  for (int k = 0; k < LANES; k++, m += VECTORS, codes += GROUP) {
    Ints code[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      const Floats size = magnitude_of(m[j]);
      const Floats position = at_most(MOMENTUM_CODES, size / (over[k] + size) * (2.0f * MOMENTUM_CODES) + dither[j]);
      code[j] = truncated(float_of(bits_of(position) | (bits_of(m[j]) & SIGN)));
    }
    narrow(code, codes);
    scales[k] = uint16_t(scale[k]);
  }
  if (!any(lost)) return;
  for (int k = 0; k < LANES; k++)
    if (lost[k]) std::memset(codes + (k - LANES) * GROUP, 0, GROUP);
}

// r are the roots of v; those of variances below the smallest normal number count as 0.
inline void encode_variance(const Floats* v, Floats* r, const Floats* dither, uint8_t* codes, float* scales) {
  for (int j = 0; j < LANES * VECTORS; j++) r[j] = v[j] < SMALLEST_NORMAL ? Floats{} : r[j];
  const Ints peak = peaks_of(r), lost = peak >= FP32_INF;
  store(scales, lost ? 0x7fc00000 - Ints{} : peak);
  const Floats per_root = lost | (peak == 0) ? Floats{} : 1.0f / float_of(peak) * float(VARIANCE_CODES);
  for (int k = 0; k < LANES; k++, r += VECTORS, codes += GROUP) {
    Ints code[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      // narrow() cuts at 255
      code[j] = truncated(at_least(1.0f, r[j] * per_root[k] + dither[j])) & (r[j] > 0.0f);
    }
    narrow(code, codes);
  }
}

}  // namespace
