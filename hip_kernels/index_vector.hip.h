// index_vector.hip.h: index queries and keys on their way into what is stored and what scoring reads (backbone.md
// section 6, and 7 steps 1 and 2): rotation, ActQuant4 (E8M0), the prepared form. A wave has a vector of 128 channels, a
// lane four of them. For index_vectors.hip, compressor.hip.
#pragma once
#include "index_form.hip.h"
#include "row_terms.hip.h"

constexpr int kRopePairs = 32, kKeyBytes = kChannels / 2 + kGroups;  // of a stored row: codes, then scales
constexpr int kFirstRotated = (kChannels - 2 * kRopePairs) / 4;        // lane; each has 4 channels
constexpr float kSixth = 0.16666667163372039794921875f;  // fp32(1/6), which the reference multiplies by
constexpr float kLeastKeyAmax = 7.052966104933725e-38f;  // 6 * 2^-126
// Groups whose exponents lie this close are stored under the least one: 12 * 2^3 still is an INT8.
constexpr int kAlignReach = 3;

// E2M1, nearest, ties to the even code, saturating; of what is not a NaN.
RL_DEV int e2m1_of_number(float v) {
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

struct Vector {  // a lane's four channels
  float v[4];
};

RL_DEV Vector load_vector(const rl_u16* x) {
  Vector own;
#pragma unroll
  for (int i = 0; i < 4; ++i) own.v[i] = rl::bf16_to_f32(x[rl::lane() * 4 + i]);
  return own;
}

RL_DEV void rotate(Vector& own, const float* cosines, const float* sines) {  // of its row
  if (rl::lane() < kFirstRotated) return;
  const int first = (rl::lane() - kFirstRotated) * 2;
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const float real = own.v[2 * p], imag = own.v[2 * p + 1], cosine = cosines[first + p], sine = sines[first + p];
    own.v[2 * p] = rl::round_bf16(real * cosine - imag * sine);
    own.v[2 * p + 1] = rl::round_bf16(real * sine + imag * cosine);
  }
}

struct Quantised {
  int codes;   // four of E2M1, the even channel in the low nibble
  int scales;  // of all groups, E8M0, the same in all lanes
};

RL_DEV Quantised quantise(const Vector& own) {
  int most = 0;  // as bits: a NaN is the largest
#pragma unroll
  for (int i = 0; i < 4; ++i) most = rl::Max::of(most, rl::as_int(own.v[i]) & 0x7FFFFFFF);
  most = group_max(most);
  most = rl::Max::of(most, rl::as_int(kLeastKeyAmax));
  const int bits = rl::as_int(rl::as_float(most) * kSixth);
  int scale = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0);
  if (scale > kNotANumber || most > 0x7F800000) scale = kNotANumber;

  const float inverse = rl::as_float(scale == 254 ? 1 << 22 : (254 - scale) << 23);  // exact: a power of two
  Quantised q = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int code = scale == kNotANumber ? 0 : e2m1_of_number(own.v[i] * inverse);
    q.codes |= code << (4 * i);
  }
#pragma unroll
  for (int g = 0; g < kGroups; ++g) q.scales |= rl::shfl(scale, 8 * g) << (8 * g);
  return q;
}

RL_DEV void store_row(rl_u8* row, const Quantised& q) {
  ((rl_u16*)row)[rl::lane()] = (rl_u16)q.codes;
  if (rl::lane() % 8 == 0) row[kChannels / 2 + rl::lane() / 8] = (rl_u8)scale_byte(q.scales, rl::lane() / 8);
}

RL_DEV int doubled(int code) {  // E2M1 times 2: 0 1 2 3 4 6 8 12
  const int m = code & 7, size = m < 2 ? m : (2 + (m & 1)) << ((m >> 1) - 1);
  return code & 8 ? -size : size;
}

// tiles: [slots/16, n_heads, kTileBytes]
RL_DEV void store_prepared(rl_u8* tiles, rl_i64 slot, int head, int n_heads, const Quantised& q) {
  const int lane = rl::lane(), group = lane / 8;
  const rl_u32 nonzero = rl::ballot((q.codes & 0x7777) != 0);
  int least = 256, most = -1;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int scale = scale_byte(q.scales, g);
    if (((nonzero >> (8 * g)) & 255) == 0 && scale != kNotANumber) continue;  // a group of zeros goes with any scale
    if (scale < least) least = scale;
    if (scale > most) most = scale;
  }
  if (most < 0) least = most = 127;
  const bool align = least >= 127 - kScaleReach && most <= 127 + kScaleReach && most - least <= kAlignReach;
  int words = 0, shift = 0;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int scale = scale_byte(q.scales, g);
    const bool zero = ((nonzero >> (8 * g)) & 255) == 0 && scale != kNotANumber;
    words |= (align || zero ? least : scale) << (8 * g);
    if (g == group && align && !zero) shift = scale - least;
  }
  int packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) packed |= ((doubled(q.codes >> (4 * i)) << shift) & 255) << (8 * i);

  rl_u8* tile = tiles + (slot / kTileRows * n_heads + head) * kTileBytes;
  const int tile_row = (int)(slot % kTileRows);
  *(int*)(tile + group * (kTileRows * kGroupBytes) + tile_row * kGroupBytes + lane % 8 * 4) = packed;
  if (lane == 0) *(int*)(tile + kScalesAt + tile_row * kGroups) = words;
}

RL_DEV rl_i64 page_slot(const int* pages, int position, int rows_per_page) {
  return (rl_i64)pages[position / rows_per_page] * rows_per_page + position % rows_per_page;
}

// Index keys (backbone.md section 6) on their way, by one wave each.
struct Keys {
  rl_u8* rows;             // [N, kKeyBytes], or null
  rl_u8* pool;             // [pages, rows_per_page, kKeyBytes], or null
  rl_u8* prepared;         // [pages, rows_per_page/16, kTileBytes], or null
  const rl_u16* x;         // [N, 128] BF16, projected
  const rl_u16* weight;    // [128] of the norm
  const float* cosines;    // [N, 32]
  const float* sines;      // [N, 32]
  const int* positions;    // [N] place in the sequence, negative: not in pages
  const int* sequences;    // [N]
  const int* page_tables;  // [sequences, table_width]
  int n_rows, rows_per_page, table_width;
  float eps;

  RL_DEV void write(const Keys& a, int row) {
    if (row >= a.n_rows) return;
    Vector own = load_vector(a.x + (rl_i64)row * kChannels);
    const Vector w = load_vector(a.weight);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += own.v[i] * own.v[i];
    const float inverse = 1.0f / rl::sqrt(rl::wave_sum(squares) / (float)kChannels + a.eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) own.v[i] = rl::round_bf16(w.v[i] * (own.v[i] * inverse));
    rotate(own, a.cosines + (rl_i64)row * kRopePairs, a.sines + (rl_i64)row * kRopePairs);
    const Quantised q = quantise(own);
    if (a.rows) store_row(a.rows + (rl_i64)row * kKeyBytes, q);
    if (!a.pool || a.positions[row] < 0) return;
    const int* pages = a.page_tables + (rl_i64)a.sequences[row] * a.table_width;
    const rl_i64 slot = page_slot(pages, a.positions[row], a.rows_per_page);
    store_row(a.pool + slot * kKeyBytes, q);
    if (a.prepared) store_prepared(a.prepared, slot, 0, 1, q);
  }
};
