// row_terms.hip.h: what kernels on rows of BF16 channels share: eight channels at a time, sums in a fixed order, the
// rotation, and ActQuant8 and ActQuant4 (backbone.md section 2.2 to 2.5 and 5.3), bit for bit as formats.py.
#pragma once
#include "port.hip.h"

constexpr int kPiece = 8;  // channels of 16 bytes

struct Piece {  // one thread's channels
  float v[kPiece];
};

RL_DEV Piece unpack(const rl::Words4& words) {
  Piece p;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) p.v[i] = rl::bf16_to_f32((rl_u16)((rl_u32)words.word[i / 2] >> (16 * (i % 2))));
  return p;
}
RL_DEV rl::Words4 pack(const Piece& p) {
  rl::Words4 words;
#pragma unroll
  for (int i = 0; i < kPiece / 2; ++i)
    words.word[i] = (int)(rl::f32_to_bf16(p.v[2 * i]) | (rl_u32)rl::f32_to_bf16(p.v[2 * i + 1]) << 16);
  return words;
}
RL_DEV rl::Words4 load_words(const rl_u16* p) { return *(const rl::Words4*)p; }
RL_DEV void store_words(rl_u16* p, const rl::Words4& words) { *(rl::Words4*)p = words; }
RL_DEV Piece load_piece(const rl_u16* p) { return unpack(load_words(p)); }

// Of the workgroup's threads: waves by halves of their lanes, then the waves ascending. sums: one float a wave, free to
// be used again afterwards.
template <int kThreads> RL_DEV float group_sum(float v, float* sums) {
  v = rl::wave_sum(v);
  if (rl::lane() == 0) sums[rl::wave()] = v;
  rl_sync();
  float total = sums[0];
#pragma unroll
  for (int w = 1; w < kThreads / 32; ++w) total += sums[w];
  rl_sync();
  return total;
}

RL_DEV float inverse_rms(float sum_of_squares, int n, float eps) {
  return 1.0f / rl::sqrt(sum_of_squares / (float)n + eps);
}

// Two adjacent channels, each rounded to BF16.
RL_DEV void rotate(float& real, float& imag, float cosine, float sine) {
  const float r = real * cosine - imag * sine;
  imag = rl::round_bf16(real * sine + imag * cosine);
  real = rl::round_bf16(r);
}

constexpr int kNotANumber = 255;  // E8M0
constexpr int kInfinity = 0x7F800000;

RL_DEV int size_bits(float v) { return rl::as_int(v) & 0x7FFFFFFF; }  // as integers, a NaN is the largest

// Of 32 channels whose largest size has these bits.
constexpr float kFp32Of448th = 0.002232142956927418708801269531f;  // which the reference multiplies by
RL_DEV int scale_of_e4m3(int largest_bits) {
  largest_bits = rl::Max::of(largest_bits, rl::as_int(1e-4f));
  const int bits = rl::as_int(rl::as_float(largest_bits) * kFp32Of448th);
  const int scale = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0);
  return scale > kNotANumber || largest_bits > kInfinity ? kNotANumber : scale;
}
RL_DEV float one_over_e8m0(int scale) { return rl::as_float(scale == 254 ? 1 << 22 : (254 - scale) << 23); }

// E4M3, nearest, ties to even, saturating; a NaN keeps its sign.
RL_DEV int e4m3(float v) {
  const int sign = (int)((rl_u32)rl::as_int(v) >> 31) << 7, bits = size_bits(v);
  if (bits > kInfinity) return sign | 0x7F;
  if (bits >= 0x43E00000) return sign | 0x7E;  // 448
  if (bits < 0x3C800000)                       // below 2^-6 steps are 2^-9: adding 1.5 * 2^14 rounds to them
    return sign | ((rl::as_int(rl::as_float(bits) + 24576.0f) - rl::as_int(24576.0f)) & 15);
  return sign | (((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3));
}
RL_DEV float e4m3_value(int code) {  // never of a NaN's code
  return rl::as_float((int)((rl_u32)(code & 0x80) << 24) | (code & 0x7F) << 20) * 1.329227995784915872903807060280e36f;
}

// E2M1, nearest, ties to the even code, saturating; a NaN is +0.
RL_DEV int e2m1(float v) {
  const float size = rl::as_float(size_bits(v));
  const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                   (size >= 3.5f) + (size > 5.0f);
  return size_bits(v) > kInfinity ? 0 : code | (int)((rl_u32)rl::as_int(v) >> 31) << 3;
}

// Eight channels as BF16, exact: codes have at most four significant bits, and so have scales.
RL_DEV int upper_halves(float low, float high) {
  return (int)((rl_u32)rl::as_int(low) >> 16 | ((rl_u32)rl::as_int(high) & 0xFFFF0000u));
}
RL_DEV rl::Words4 e4m3_values(int low_codes, int high_codes, int e8m0_scale) {
  const float unit =
      rl::as_float(e8m0_scale == 0 ? 1 << 22 : e8m0_scale == kNotANumber ? 0x7FC00000 : e8m0_scale << 23);
  rl::Words4 words;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const rl_u32 codes = (rl_u32)(half ? high_codes : low_codes);
    const rl_u32 even = (codes & 0x00800080u) << 8 | (codes & 0x007F007Fu) << 4;  // channels 0 and 2
    const rl_u32 odd = (codes & 0x80008000u) | (codes & 0x7F007F00u) >> 4;
    const float up = 1.329227995784915872903807060280e36f;  // E4M3's bits in a BF16's place are 2^-120 times the value
    const float c0 = rl::as_float((int)(even << 16)) * up * unit;
    const float c1 = rl::as_float((int)(odd << 16)) * up * unit;
    const float c2 = rl::as_float((int)(even & 0xFFFF0000u)) * up * unit;
    const float c3 = rl::as_float((int)(odd & 0xFFFF0000u)) * up * unit;
    words.word[2 * half] = upper_halves(c0, c1);
    words.word[2 * half + 1] = upper_halves(c2, c3);
  }
  return words;
}

// The eight values of E2M1 times an E4M3 scale, as BF16 in pairs. Scales are at least 2^-9, so doubling adds
// to the exponent.
struct E2m1Table {
  int pairs[4];
};
RL_DEV E2m1Table e2m1_table(int e4m3_scale) {
  if ((e4m3_scale & 0x7F) == 0x7F) return {{0x7FC07FC0, 0x7FC07FC0, 0x7FC07FC0, 0x7FC07FC0}};
  const float unit = e4m3_value(e4m3_scale);
  const int ones = upper_halves(unit, 1.5f * unit);
  return {{(int)((rl_u32)rl::as_int(0.5f * unit) & 0xFFFF0000u), ones, ones + 0x00800080, ones + 0x01000100}};
}
