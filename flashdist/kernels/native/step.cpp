// The step on a CPU: what numerics/ does, rounding by rounding, a tile at a time.
//
// A group of 32 elements goes through the whole step in the first cache: join, decode, rule, split, encode. A tile is
// the TILE_GROUPS groups that share a fingerprint. The constants in capitals that are not defined here or in numerics.h
// come from the Python side (cpu_native.py), so that each has one definition. Compiled without fused products: every
// operation rounds once, as torch's do.

#include <thread>
#include <vector>

#include "numerics.h"

namespace {

constexpr int TILE = TILE_GROUPS * GROUP;

// A master weight of this size (2^126, as bits) or more, old or new, goes through the exact join and split.
constexpr int32_t ORDINARY = 0x7e800000;

enum Type { BF16, FP16, FP32 };
enum Rule { ADAMW, ADAM, LION, SGD, SGDW };

// What is known of a tensor: a row of the integer table, and one of the scalars.
struct Tensor {
  const int64_t* row;
  const float* scalars;  // in the order of numerics.rules.StepScalars, then the gradients' factor
  int64_t operator[](int column) const { return row[column]; }
  template <typename T> T* pointer(int column) const { return reinterpret_cast<T*>(row[column]); }
};

// Where the data of a tile, or of one of its groups, is: in the tensors themselves, or in a Stage.
struct Place {
  char *weight, *grad, *correction, *moment1, *moment2;
  uint16_t* scale1;
  float* scale2;
};

struct Stage {
  alignas(64) char weight[4 * TILE], grad[4 * TILE], correction[2 * TILE], moment1[4 * TILE], moment2[4 * TILE];
  alignas(64) uint16_t scale1[TILE_GROUPS];
  alignas(64) float scale2[TILE_GROUPS];
};

// A tile in fp32: the weights, before the step too where updates are counted, the moments and the roots of the second.
struct Work {
  Floats p[TILE / LANES], old_p[TILE / LANES], m[TILE / LANES], v[TILE / LANES], r[TILE / LANES];
};

// What the tiles of a tensor share.
struct Shared {
  const float* scalars;
  Floats dither[VECTORS];
  uint32_t places[TILE / 2];
};

// How a tensor is kept. The usual kinds are known to the compiler, which makes a function of its own for each.
struct Kind {
  Type weight, grad;
  Rule rule;
  int lo_bits, moments;
  bool quantized, counting;
};

template <Rule RULE_, int MOMENTS> struct Usual {
  static constexpr Type weight = BF16, grad = BF16;
  static constexpr Rule rule = RULE_;
  static constexpr int lo_bits = 8, moments = MOMENTS;
  static constexpr bool quantized = true, counting = false;

  static bool is(const Kind& kind) {
    return kind.weight == weight && kind.grad == grad && kind.rule == rule && kind.lo_bits == lo_bits &&
           kind.moments == moments && kind.quantized == quantized && kind.counting == counting;
  }
};

template <class K> Place groups_on(const K& kind, const Place& p, int64_t groups) {
  const int64_t e = groups * GROUP, moment = kind.quantized ? 1 : 4;
  return {p.weight + e * (kind.weight == FP32 ? 4 : 2),
          p.grad + e * (kind.grad == FP32 ? 4 : 2),
          p.correction + e * (kind.lo_bits / 8),
          p.moment1 + e * moment,
          p.moment2 + e * moment,
          p.scale1 + groups,
          p.scale2 + groups};
}

template <typename T> T* as(char* p) { return reinterpret_cast<T*>(p); }

// numerics/rules.py; s in the order of StepScalars. The root of the variance is left in r.

// numerics.rules.StepScalars, then the gradients' factor.
struct Scalars {
  float lr, shrink, l2, decay1, gain1, decay2, gain2, eps, step_size, root_bias2, grad_weight, buffer_weight;
  float grad_factor;
  explicit Scalars(const float* row) { std::memcpy(this, row, sizeof *this); }
};
static_assert(sizeof(Scalars) == 4 * SCALARS);

inline bool adaptive(Rule rule) { return rule == ADAMW || rule == ADAM; }

// The moments and the root of the second; for the other rules the weight, too.
inline void update_moments(Rule rule, const Scalars& s, Floats& p, Floats g, Floats& m, Floats& v, Floats& r) {
  if (rule == ADAM || rule == SGD) g = g + s.l2 * p;
  const Floats old_m = m;
  if (rule != LION) m = s.decay1 * m + s.gain1 * g;
  if (adaptive(rule)) {
    v = s.decay2 * v + s.gain2 * (g * g);
    r = root(v);
  } else if (rule == LION) {
    const Floats c = s.decay1 * old_m + s.gain1 * g, zero = {}, one = 1.0f - zero;
    const Floats direction = c > 0.0f ? one : c < 0.0f ? -one : c == 0.0f ? zero : c;
    p = s.shrink * p - s.lr * direction;
    m = s.decay2 * old_m + s.gain2 * g;
  } else {
    p = s.shrink * p - s.lr * (s.grad_weight * g + s.buffer_weight * m);
  }
}

// The weights of Adam and AdamW. A loop of its own: roots and divisions in one chain leave the processor waiting.
inline Floats adapted(const Scalars& s, Floats p, Floats m, Floats r) {
  return s.shrink * p - s.step_size * (m / (r * s.root_bias2 + s.eps));
}

// From storage to fp32 and back, a vector (number j of its group) or a group at a time.

inline Floats widen_any(Type type, char* from, int j) {
  if (type == FP32) return load<Floats>(as<float>(from) + j * LANES);
  Ints pattern = widen(as<int16_t>(from) + j * LANES);
  return type == BF16 ? widen_bf16(pattern) : widen_fp16(pattern);
}

// Vector number j of a tile's fp32 weights. The exact join, or the one for pairs that a split made.
template <class K> inline Floats load_weight(const K& kind, const Place& at, int j, bool exact) {
  if (kind.lo_bits == 0) return widen_any(kind.weight, at.weight, j);
  const Ints hi = widen(as<int16_t>(at.weight) + j * LANES);
  const Ints lo = kind.lo_bits == 8 ? widen(as<int8_t>(at.correction) + j * LANES)
                                    : widen(as<int16_t>(at.correction) + j * LANES);
  if (kind.weight == FP16) return kind.lo_bits == 8 ? join_fp16<8>(hi, lo) : join_fp16<16>(hi, lo);
  if (exact) return kind.lo_bits == 8 ? join_bf16<8>(hi, lo) : join_bf16<16>(hi, lo);
  return kind.lo_bits == 8 ? join_ordinary_bf16<8>(hi, lo) : join_ordinary_bf16<16>(hi, lo);
}

template <class K> inline void store_weights(const K& kind, const Place& at, const Floats* p, bool exact) {
  if (kind.weight == FP32) {
    std::memcpy(at.weight, p, 4 * TILE);
    return;
  }
  for (int k = 0; k < TILE_GROUPS; k++, p += VECTORS) {
    Ints hi[VECTORS], lo[VECTORS];
    for (int j = 0; j < VECTORS; j++) {
      Split both = {};
      if (kind.lo_bits == 0) both.pattern = kind.weight == BF16 ? narrow_bf16(p[j]) : narrow_fp16(p[j]);
      else if (kind.weight == FP16) both = kind.lo_bits == 8 ? split_fp16<8>(p[j]) : split_fp16<16>(p[j]);
      else if (exact) both = kind.lo_bits == 8 ? split_bf16<8>(p[j]) : split_bf16<16>(p[j]);
      else both = kind.lo_bits == 8 ? split_ordinary_bf16<8>(p[j]) : split_ordinary_bf16<16>(p[j]);
      hi[j] = both.pattern, lo[j] = both.lo;
    }
    narrow(hi, as<int16_t>(at.weight) + k * GROUP);
    if (kind.lo_bits == 8) narrow(lo, as<int8_t>(at.correction) + k * GROUP);
    if (kind.lo_bits == 16) narrow(lo, as<int16_t>(at.correction) + k * GROUP);
  }
}

// Vectors of the moments; the scale is their group's.
template <class K> inline Floats load_moment1(const K& kind, const Place& at, int j, float scale) {
  if (kind.moments < 1) return Floats{};
  if (!kind.quantized) return load<Floats>(as<float>(at.moment1) + j * LANES);
  return decode_momentum(widen(as<int8_t>(at.moment1) + j * LANES), scale);
}

template <class K> inline Floats load_moment2(const K& kind, const Place& at, int j, float scale) {
  if (kind.moments < 2) return Floats{};
  if (!kind.quantized) return load<Floats>(as<float>(at.moment2) + j * LANES);
  return decode_variance(widen(as<uint8_t>(at.moment2) + j * LANES), scale);
}

template <class K> inline void store_moments(const K& kind, const Shared& shared, const Place& at, const Floats* m,
                                             const Floats* v, Floats* r) {
  if (kind.moments >= 1 && !kind.quantized) std::memcpy(at.moment1, m, 4 * TILE);
  if (kind.moments >= 2 && !kind.quantized) std::memcpy(at.moment2, v, 4 * TILE);
  if (!kind.quantized) return;
  for (int k = 0; k < TILE_GROUPS; k += LANES) {
    const int j = k * VECTORS, i = k * GROUP;
    if (kind.moments >= 1) encode_momentum(m + j, shared.dither, as<int8_t>(at.moment1) + i, at.scale1 + k);
    if (kind.moments >= 2) encode_variance(v + j, r + j, shared.dither, as<uint8_t>(at.moment2) + i, at.scale2 + k);
  }
}

// Elements whose new fp32 weight p differs from the old one while what is stored does not.
template <class K> int64_t count_lost(const K& kind, const Floats* old_p, const Floats* p) {
  alignas(64) char hi[4 * TILE], lo[2 * TILE];
  const Place other = {hi, nullptr, lo, nullptr, nullptr, nullptr, nullptr};
  store_weights(kind, other, p, true);
  int64_t lost = 0;
  for (int j = 0; j < TILE / LANES; j++) {
    const Ints same = bits_of(load_weight(kind, other, j, true)) == bits_of(old_p[j]), both = same & (p[j] != old_p[j]);
    for (int i = 0; i < LANES; i++) lost -= both[i];
  }
  return lost;
}

// The fp32 weights, moments and roots of a tile after the step. Returns whether all weights are of ordinary size.
template <class K>
inline bool compute(const K& kind, const Shared& shared, const Place at, bool exact, Work& w) {
  const Scalars s(shared.scalars);
  Ints size = {};
  for (int k = 0; k < TILE_GROUPS; k++) {
    const float scale1 = kind.quantized && kind.moments >= 1 ? float_of(at.scale1[k] << 16) : 0.0f;
    const float scale2 = kind.quantized && kind.moments >= 2 ? at.scale2[k] : 0.0f;
    for (int j = k * VECTORS; j < (k + 1) * VECTORS; j++) {
      Floats p = load_weight(kind, at, j, exact), g = widen_any(kind.grad, at.grad, j) * s.grad_factor;
      Floats m = load_moment1(kind, at, j, scale1), v = load_moment2(kind, at, j, scale2), r = {};
      if (kind.counting) w.old_p[j] = p;
      update_moments(kind.rule, s, p, g, m, v, r);
      w.p[j] = p, w.m[j] = m, w.v[j] = v, w.r[j] = r;
    }
  }
  for (int j = 0; j < TILE / LANES; j++) {
    if (adaptive(kind.rule)) w.p[j] = adapted(s, w.p[j], w.m[j], w.r[j]);
    size = largest(size, bits_of(w.p[j]) & MAGNITUDE);
  }
  return !any(size >= ORDINARY);
}

// The tile at `at`; returns the lost updates where they are counted.
template <class K> int64_t step_tile(const K& kind, const Shared& shared, const Place& at, uint32_t* mark, Work& w) {
  // Corrections count only while the weights are the ones that the last step wrote; 0 is not known, and trusted.
  if (mark && *mark != 0 && *mark != fingerprint(at.weight, shared.places))
    std::memset(at.correction, 0, TILE * kind.lo_bits / 8);
  bool exact = !mark || *mark == 0;
  if (!compute(kind, shared, at, exact, w) && !exact) {
    exact = true;
    compute(kind, shared, at, exact, w);
  }
  const int64_t lost = kind.counting ? count_lost(kind, w.old_p, w.p) : 0;
  store_weights(kind, at, w.p, exact);
  if (mark) *mark = fingerprint(at.weight, shared.places);
  store_moments(kind, shared, at, w.m, w.v, w.r);
  return lost;
}

// Full tiles that lie side by side; `mark` is the first one's fingerprint, if there are any.
template <class K> int64_t step_tiles(const K& kind, const Shared& shared, const Place& all, uint32_t* marks,
                                      int64_t first, int64_t last) {
  Work w;
  int64_t lost = 0;
  for (int64_t tile = first; tile < last; tile++)
    lost += step_tile(kind, shared, groups_on(kind, all, tile * TILE_GROUPS), marks ? marks + tile : nullptr, w);
  return lost;
}

// Which tensors of a tile there are, with the bytes of an element.
struct Part { char* tensor; char* staged; int64_t size; bool written; };

std::vector<Part> parts_of(const Kind& kind, const Place& all, Stage& stage) {
  const int64_t moment = kind.quantized ? 1 : 4;
  std::vector<Part> parts = {{all.weight, stage.weight, kind.weight == FP32 ? 4 : 2, true},
                             {all.grad, stage.grad, kind.grad == FP32 ? 4 : 2, false}};
  if (kind.lo_bits) parts.push_back({all.correction, stage.correction, kind.lo_bits / 8, true});
  if (kind.moments >= 1) parts.push_back({all.moment1, stage.moment1, moment, true});
  if (kind.moments >= 2) parts.push_back({all.moment2, stage.moment2, moment, true});
  return parts;
}

// A tile with gaps (rows that end in a partial group) or at the end: through a stage that is filled up with zeros.
int64_t step_staged(const Tensor& t, const Kind& kind, const Shared& shared, const Place& all, int64_t tile,
                    uint32_t* mark, Stage& stage) {
  Work w;
  const int64_t elements = t[ROW], per_row = (elements + GROUP - 1) / GROUP, first = tile * TILE_GROUPS;
  const int64_t groups = std::min<int64_t>(TILE_GROUPS, t[NUM_GROUPS] - first);
  const int64_t scales1 = kind.quantized && kind.moments >= 1 ? groups : 0;
  const int64_t scales2 = kind.quantized && kind.moments >= 2 ? groups : 0;
  const std::vector<Part> parts = parts_of(kind, all, stage);
  auto each_group = [&](bool back) {
    for (int64_t k = 0; k < groups; k++) {
      const int64_t row = (first + k) / per_row, in_row = (first + k) % per_row * GROUP;
      const int64_t start = row * elements + in_row, width = std::min<int64_t>(GROUP, elements - in_row);
      for (const Part& part : parts) {
        char *outside = part.tensor + start * part.size, *inside = part.staged + k * GROUP * part.size;
        if (!back) std::memcpy(inside, outside, width * part.size);
        else if (part.written) std::memcpy(outside, inside, width * part.size);
        if (back) std::memset(inside + width * part.size, 0, (GROUP - width) * part.size);
      }
    }
  };
  stage = Stage();
  each_group(false);
  std::copy_n(all.scale1 + first, scales1, stage.scale1);
  std::copy_n(all.scale2 + first, scales2, stage.scale2);
  const Place at = {stage.weight,  stage.grad,   stage.correction, stage.moment1,
                    stage.moment2, stage.scale1, stage.scale2};
  const int64_t lost = step_tile(kind, shared, at, mark, w);
  each_group(true);
  // What was filled up counts as 0 in the fingerprint, whatever the rule made of it (0 / 0, say).
  std::memset(stage.weight + groups * GROUP * 2, 0, (TILE_GROUPS - groups) * GROUP * 2);
  if (mark) *mark = fingerprint(stage.weight, shared.places);
  std::copy_n(stage.scale1, scales1, all.scale1 + first);
  std::copy_n(stage.scale2, scales2, all.scale2 + first);
  return lost;
}

// The tiles [first, last) of one tensor.
int64_t step_tensor(const Tensor& t, Shared& shared, Stage& stage, bool counting, int64_t first, int64_t last) {
  const Kind kind = {Type(t[WEIGHT_TYPE]), Type(t[GRAD_TYPE]), Rule(t[RULE]), int(t[LO_BITS]), int(t[NUM_MOMENTS]),
                     t[QUANTIZED] != 0, counting};
  const Place all = {t.pointer<char>(WEIGHT),     t.pointer<char>(GRAD),    t.pointer<char>(CORRECTION),
                     t.pointer<char>(MOMENT1),    t.pointer<char>(MOMENT2), t.pointer<uint16_t>(SCALE1),
                     t.pointer<float>(SCALE2)};
  uint32_t* marks = kind.lo_bits ? t.pointer<uint32_t>(FINGERPRINT) : nullptr;
  shared.scalars = t.scalars;
  for (int lane = 0; lane < GROUP; lane++) {
    const uint32_t phase = uint32_t(t[DITHER_BASE]) + uint32_t(lane) * DITHER_LANE;
    shared.dither[lane / LANES][lane % LANES] = t[DITHER_BASE] < 0 ? 0.5f : float(int32_t(phase >> 8)) * 0x1p-24f;
  }
  const bool flat = t[ROW] % GROUP == 0 || t[NUM_GROUPS] == (t[ROW] + GROUP - 1) / GROUP;
  const int64_t full = std::max(first, std::min(last, flat ? t[NUMEL] / TILE : 0));
  auto step_full = [&](auto usual) { return step_tiles(usual, shared, all, marks, first, full); };
  int64_t lost = Usual<ADAMW, 2>::is(kind)  ? step_full(Usual<ADAMW, 2>())
                 : Usual<ADAM, 2>::is(kind) ? step_full(Usual<ADAM, 2>())
                 : Usual<LION, 1>::is(kind) ? step_full(Usual<LION, 1>())
                 : Usual<SGD, 1>::is(kind)  ? step_full(Usual<SGD, 1>())
                 : Usual<SGDW, 1>::is(kind) ? step_full(Usual<SGDW, 1>())
                                            : step_full(kind);
  for (int64_t tile = full; tile < last; tile++)
    lost += step_staged(t, kind, shared, all, tile, marks ? marks + tile : nullptr, stage);
  return lost;
}

// The tiles [first, last) of all tensors, which are numbered through.
void step_range(const int64_t* table, const float* scalars, int64_t n, int64_t first, int64_t last, int64_t* lost) {
  Shared shared;
  Stage stage;
  for (int i = 0; i < TILE / 2; i++) shared.places[i] = uint32_t(i) * PLACE_MULTIPLIER + PLACE_OFFSET;
  for (int64_t i = 0; i < n; i++) {
    const int64_t* row = table + i * COLUMNS;
    const Tensor t = {row, scalars + row[SCALAR_ROW] * SCALARS};
    const int64_t tiles = (t[NUM_GROUPS] + TILE_GROUPS - 1) / TILE_GROUPS;
    const int64_t begin = std::max<int64_t>(first - t[FIRST_TILE], 0), end = std::min(last - t[FIRST_TILE], tiles);
    if (begin >= end) continue;
    const int64_t found = step_tensor(t, shared, stage, lost != nullptr, begin, end);
    if (lost) lost[i] += found;
  }
}

}  // namespace

// Step n tensors of `tiles` tiles together. `lost`, where given, holds a zeroed count a tensor for each thread.
extern "C" void flashdist_step(const int64_t* table, const float* scalars, int64_t n, int64_t tiles, int64_t threads,
                               int64_t* lost) {
  std::vector<std::thread> helpers;
  auto work = [=](int64_t k) {
    step_range(table, scalars, n, tiles * k / threads, tiles * (k + 1) / threads, lost ? lost + k * n : nullptr);
  };
  for (int64_t k = 1; k < threads; k++) helpers.emplace_back(work, k);
  work(0);
  for (std::thread& helper : helpers) helper.join();
}
