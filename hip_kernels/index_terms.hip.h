// index_terms.hip.h: what index scoring computes per head (backbone.md section 7, steps 3 and 4), from queries and keys
// in index_form.hip.h's form. For index_score.hip, index_slots.hip.
//
// A dot is four group sums S_g of whole numbers, each times its power of two, added in FP32 in group order. Three ways
// to the same bits, chosen for 16 query vectors x 32 positions at a time:
//   aligned  both sides' groups share one scale (prepared so while their exponents lie within 3): one integer sum; the
//            scales are left out of every head and come back with the weight and at the end. Powers of two commute
//            with rounding while nothing leaves the normal range.
//   grouped  scales differ: four sums, scaled and added in order.
//   exact    some scale or weight is beyond what may be left out, or not a number: the reference's own operations.
// On gfx1100 a tile of 16 x 16 dots takes 291 cycles aligned and about 390 grouped, 256 of them in the WMMAs; with the
// grouped way alone an H200 takes 2.2 times as long for the same scores.
#pragma once
#include "index_form.hip.h"

constexpr int kStride = kChannels + 16;  // of a vector in LDS: 16 vectors' pieces fall on different banks
constexpr int kWavePositions = 32, kColTiles = kWavePositions / kTileRows;
constexpr int kBlock = 8;  // positions of a candidate block

// A sum starts here: 1.5 * 2^23 + S has the bits kBias + S while |S| < 2^22, so no conversion is needed.
constexpr int kBias = 0x4B400000;
constexpr float kBiasF32 = 12582912.0f;
// As kScaleReach, of a weight's exponent.
constexpr int kWeightReach = 40;
constexpr int kNoScale = 0x7F7F7F7F;  // of what is not there: four times 1

struct Vectors {  // 16 of them, as an operand
  rl::FragI8 group[kGroups];
};

RL_DEV Vectors load_vectors(const rl_i8* rows) {
  Vectors v;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) v.group[g] = rl::load_rows_lds(rows + g * kGroupBytes, kStride);
  return v;
}

RL_DEV float e8m0(int code) { return rl::as_float(code == 0 ? 1 << 22 : code == 255 ? 0x7FC00000 : code << 23); }

RL_DEV bool one_scale(int word) { return word == (int)((rl_u32)(word & 255) * 0x01010101u); }
RL_DEV bool scales_in_reach(int word) {
  bool in = true;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int exponent = scale_byte(word, g) - 127;
    in = in && exponent >= -kScaleReach && exponent <= kScaleReach;
  }
  return in;
}
RL_DEV bool weight_in_reach(rl_u16 weight) {
  const int exponent = ((weight >> 7) & 255) - 127;
  return (weight & 0x7FFF) == 0 || (exponent >= -kWeightReach && exponent <= kWeightReach);
}
// Where a position's scales are left out they are this one: the largest, so that ratios are at most one.
RL_DEV int common_scale(int word) {
  int most = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) most = scale_byte(word, g) > most ? scale_byte(word, g) : most;
  return most;
}

RL_DEV float unit_of(int word) {  // codes are doubled on both sides: a quarter
  return rl::as_float((common_scale(word) - 2) << 23);
}

// To BF16 precision, nearest, ties to even, in two operations: x - 65536 x keeps 24 bits, so it drops what lies below
// x's upper 8. Right for every x with 65536 x in the normal range (all 2^24 significands checked).
RL_DEV float to_bf16(float x) { return rl::fma(x, 65536.0f, rl::fma(x, -65536.0f, x)); }

// ---- bf16(relu(bf16(dot)) * weight) of 16 query vectors x 16 positions; per accumulator element, in registers ----

RL_DEV void weigh(float (&terms)[8], const float* weights) {
#pragma unroll
  for (int i = 0; i < 8; ++i) terms[i] = to_bf16(to_bf16(rl::max(terms[i], 0.0f)) * weights[rl::acc_row(i)]);
}

RL_DEV void aligned_terms(float (&terms)[8], const rl::AccI32& bias, const Vectors& q, const Vectors& k,
                          const float* scaled_weights) {
  rl::AccI32 acc = rl::mma_from(bias, q.group[0], k.group[0]);
#pragma unroll
  for (int g = 1; g < kGroups; ++g) rl::mma(acc, q.group[g], k.group[g]);
#pragma unroll
  for (int i = 0; i < 8; ++i) terms[i] = rl::as_float(acc.v[i]) - kBiasF32;
  weigh(terms, scaled_weights);
}

RL_DEV void grouped_terms(float (&terms)[8], const rl::AccI32& bias, const Vectors& q, const Vectors& k,
                          const float* weights, const float* q_scales, int n, const int* k_words) {
#pragma unroll
  for (int i = 0; i < 8; ++i) terms[i] = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const rl::AccI32 acc = rl::mma_from(bias, q.group[g], k.group[g]);
    rl::no_overlap();  // between groups: they need 10 registers more side by side
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int word = k_words[rl::acc_col(i)];
      const float ratio = rl::as_float((scale_byte(word, g) - common_scale(word) + 127) << 23);
      const float scale = q_scales[g * n + rl::acc_row(i)] * ratio;
      terms[i] = rl::fma(rl::as_float(acc.v[i]) - kBiasF32, scale, terms[i]);  // the product is exact
    }
    rl::no_overlap();
  }
  weigh(terms, weights);
}

RL_DEV void exact_terms(float (&terms)[8], const rl::AccI32& bias, const Vectors& q, const Vectors& k,
                        const float* weights, const float* q_scales, int n, const int* k_words) {
#pragma unroll
  for (int i = 0; i < 8; ++i) terms[i] = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const rl::AccI32 acc = rl::mma_from(bias, q.group[g], k.group[g]);
    rl::no_overlap();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float sum = (rl::as_float(acc.v[i]) - kBiasF32) * 0.25f;  // the codes are doubled, on both sides
      const float scaled = sum * q_scales[g * n + rl::acc_row(i)];
      terms[i] += scaled * e8m0(scale_byte(k_words[rl::acc_col(i)], g));
    }
    rl::no_overlap();
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float dot = rl::round_bf16(terms[i]);
    terms[i] = rl::round_bf16((dot < 0.0f ? 0.0f : dot) * weights[rl::acc_row(i)]);  // a NaN stays one
  }
}

RL_DEV void add(float (&total)[8], const float (&terms)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) total[i] += terms[i];
}

// ---- query vectors: what 16 of them need beside their codes ----

struct QueryScales {      // LDS
  int n;                  // 16 x their count, and up to a whole wave
  float* scales;          // [group][n]
  float* scaled_weights;  // [n] weight times the one scale
  float* weights;         // [n]
  int* differ;            // [n/16] one bit a vector: its groups have different scales
};

RL_DEV void put_scales(const QueryScales& out, int i, int word, rl_u16 weight) {
#pragma unroll
  for (int g = 0; g < kGroups; ++g) out.scales[g * out.n + i] = e8m0(scale_byte(word, g));
  out.weights[i] = rl::bf16_to_f32(weight);
  out.scaled_weights[i] = rl::bf16_to_f32(weight) * e8m0(scale_byte(word, 0));
  const rl_u32 differ = rl::ballot(!one_scale(word));
  if ((i & 15) == 0) out.differ[i / 16] = (int)((differ >> (rl::lane() & 16)) & 0xFFFFu);
}

// ---- scores as sortable 16-bit keys: 0 is never chosen (unseen, NaN, -inf), -0 equals +0 ----

RL_DEV float unseen() { return rl::as_float((int)0xFF800000); }  // -inf

RL_DEV int to_key(rl_u16 bf16) {
  if ((bf16 & 0x7FFF) > 0x7F80 || bf16 == 0xFF80) return 0;
  if ((bf16 & 0x7FFF) == 0) return 0x8000;
  return bf16 & 0x8000 ? bf16 ^ 0xFFFF : bf16 | 0x8000;
}

// ---- where they lie ----

RL_DEV const rl_i8* key_tile(const rl_i8* keys, const int* pages, int rows_per_page, int position) {
  const rl_i64 row = (rl_i64)pages[position / rows_per_page] * rows_per_page + position % rows_per_page;
  return keys + row / kTileRows * kTileBytes;
}

RL_DEV QueryScales carve_scales(char* lds, int n) {
  float* scales = (float*)lds;
  return {n, scales, scales + kGroups * n, scales + (kGroups + 1) * n, (int*)(scales + (kGroups + 2) * n)};
}
RL_DEV int padded_vectors(int n) { return (n + 31) & ~31; }
