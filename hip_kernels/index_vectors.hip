// index_query: rotation and ActQuant4 (E8M0) of index queries and keys; index_prepare: the form that scoring reads.
// Both: grid (ceil(vectors/8), 1); 256 threads = 8 waves of 32, one vector of 128 channels a wave; no LDS.
//
// Budget on gfx1100: index_query: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: index_prepare: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "index_terms.hip.h"

constexpr int kThreads = 256, kRopePairs = 32, kRowBytes = kChannels / 2 + kGroups;
constexpr int kFirstRotated = (kChannels - 2 * kRopePairs) / 4;  // lane; each has 4 channels
constexpr int kNotANumber = 255;                                  // E8M0
constexpr float kSixth = 0.16666667163372039794921875f;           // fp32(1/6), which the reference multiplies by
constexpr float kLeastAmax = 7.052966104933725e-38f;              // 6 * 2^-126
// Groups whose exponents lie this close are stored under the least one: 12 * 2^3 still is an INT8.
constexpr int kAlignReach = 3;

// E2M1, nearest, ties to the even code, saturating. A NaN is a zero: its group's scale is the NaN.
RL_DEV int e2m1(float v) {
  const float size = rl::as_float(rl::as_int(v) & 0x7FFFFFFF);
  const int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                   (size >= 3.5f) + (size > 5.0f);
  return code | (int)((rl_u32)rl::as_int(v) >> 31) << 3;
}

RL_DEV int group_max(int v) {  // of 8 lanes
  v = rl::Max::of(v, rl::shfl_xor<1>(v));
  v = rl::Max::of(v, rl::shfl_xor<2>(v));
  return rl::Max::of(v, rl::shfl_xor<4>(v));
}

RL_KERNEL(kThreads) index_query(rl_u8* rows,          // [N, H, 68] codes, then scales
                                const rl_u16* x,      // [N, H, 128] BF16
                                const float* cosines, // [N, 32]
                                const float* sines,   // [N, 32]
                                int n_rows, int n_heads) {
  const rl_i64 vector = (rl_i64)rl_bid_x() * (kThreads / 32) + rl::wave();
  if (vector >= (rl_i64)n_rows * n_heads) return;
  const int lane = rl::lane();
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = rl::bf16_to_f32(x[vector * kChannels + lane * 4 + i]);
  if (lane >= kFirstRotated) {
    const rl_i64 pair = vector / n_heads * kRopePairs + (lane - kFirstRotated) * 2;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const float real = v[2 * p], imag = v[2 * p + 1], cosine = cosines[pair + p], sine = sines[pair + p];
      v[2 * p] = rl::round_bf16(real * cosine - imag * sine);
      v[2 * p + 1] = rl::round_bf16(real * sine + imag * cosine);
    }
  }
  int most = 0;  // as bits: a NaN is the largest
#pragma unroll
  for (int i = 0; i < 4; ++i) most = rl::Max::of(most, rl::as_int(v[i]) & 0x7FFFFFFF);
  most = group_max(most);
  most = rl::Max::of(most, rl::as_int(kLeastAmax));
  const int bits = rl::as_int(rl::as_float(most) * kSixth);
  int scale = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0);
  if (scale > kNotANumber || most > 0x7F800000) scale = kNotANumber;

  const float inverse = rl::as_float(scale == 254 ? 1 << 22 : (254 - scale) << 23);  // exact: a power of two
  int packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int code = scale == kNotANumber ? 0 : e2m1(v[i] * inverse);
    packed |= code << (4 * i);
  }
  rl_u8* row = rows + vector * kRowBytes;
  ((rl_u16*)row)[lane] = (rl_u16)packed;  // the even channel in the low nibble
  if (lane % 8 == 0) row[kChannels / 2 + lane / 8] = (rl_u8)scale;
}
RL_EXPORT(index_query)

RL_DEV int doubled(int code) {  // E2M1 times 2: 0 1 2 3 4 6 8 12
  const int m = code & 7, size = m < 2 ? m : (2 + (m & 1)) << ((m >> 1) - 1);
  return code & 8 ? -size : size;
}

// Slot of row n: itself, or first + n through the page table.
RL_KERNEL(kThreads) index_prepare(rl_u8* prepared,    // [slots/16, H, kTileBytes]
                                  const rl_u8* rows,  // [N, H, 68]
                                  const int* pages,   // page table, or null
                                  int n_rows, int n_heads, int first, int rows_per_page) {
  const rl_i64 vector = (rl_i64)rl_bid_x() * (kThreads / 32) + rl::wave();
  if (vector >= (rl_i64)n_rows * n_heads) return;
  const int lane = rl::lane(), group = lane / 8, head = (int)(vector % n_heads), row = (int)(vector / n_heads);
  rl_i64 slot = row;
  if (pages) slot = (rl_i64)pages[(first + row) / rows_per_page] * rows_per_page + (first + row) % rows_per_page;

  const rl_u8* stored = rows + vector * kRowBytes;
  const int codes = ((const rl_u16*)stored)[lane], scales = *(const int*)(stored + kChannels / 2);
  const rl_u32 nonzero = rl::ballot((codes & 0x7777) != 0);
  int least = 256, most = -1;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int scale = scale_byte(scales, g);
    if (((nonzero >> (8 * g)) & 255) == 0 && scale != kNotANumber) continue;  // a group of zeros goes with any scale
    if (scale < least) least = scale;
    if (scale > most) most = scale;
  }
  if (most < 0) least = most = 127;
  const bool align = least >= 127 - kScaleReach && most <= 127 + kScaleReach && most - least <= kAlignReach;
  int words = 0, shift = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int scale = scale_byte(scales, g);
    const bool zero = ((nonzero >> (8 * g)) & 255) == 0 && scale != kNotANumber;
    words |= (align || zero ? least : scale) << (8 * g);
    if (g == group && align && !zero) shift = scale - least;
  }
  int packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed |= ((doubled(codes >> (4 * i)) << shift) & 255) << (8 * i);

  rl_u8* tile = prepared + (slot / kTileRows * n_heads + head) * kTileBytes;
  const int tile_row = (int)(slot % kTileRows);
  *(int*)(tile + group * (kTileRows * kGroupBytes) + tile_row * kGroupBytes + lane % 8 * 4) = packed;
  if (lane == 0) *(int*)(tile + kScalesAt + tile_row * kGroups) = words;
}
RL_EXPORT(index_prepare)
