// packed_row.hip.h: a row of WIDTH channels in one wave, on its way to a packed cache row. A lane has kOwn adjacent
// channels.
#pragma once
#include "row_terms.hip.h"

constexpr int kRowThreads = 128, kRowsAGroup = kRowThreads / 32;
static_assert(WIDTH % 64 == 0 && WIDTH <= 512, "a lane has 2 to 16 channels: whole pairs, at most one scale group");
constexpr int kOwn = WIDTH / 32;

struct Own {
  float v[kOwn];
};

RL_DEV int first_own() { return rl::lane() * kOwn; }

RL_DEV Own load_own(const rl_u16* row) {
  Own x;
#pragma unroll
  for (int c = 0; c < kOwn; c += 2) {
    const rl_u32 pair = *(const rl_u32*)(row + first_own() + c);
    x.v[c] = rl::bf16_to_f32((rl_u16)pair);
    x.v[c + 1] = rl::bf16_to_f32((rl_u16)(pair >> 16));
  }
  return x;
}

// RMSNorm, rounded to BF16.
RL_DEV void norm_own(Own& x, const rl_u16* weight, float eps) {
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) sum += x.v[c] * x.v[c];
  const float inverse = inverse_rms(rl::wave_sum(sum), WIDTH, eps);
  const Own w = load_own(weight);
#pragma unroll
  for (int c = 0; c < kOwn; ++c) x.v[c] = rl::round_bf16(w.v[c] * (x.v[c] * inverse));
}

// Of the last 2 n_pairs channels; n_pairs entries of cosines and sines are this row's.
RL_DEV void rotate_own(Own& x, const float* cosines, const float* sines, int n_pairs) {
  const int first = WIDTH - 2 * n_pairs;
#pragma unroll
  for (int c = 0; c < kOwn; c += 2) {
    const int pair = (first_own() + c - first) / 2;
    if (first_own() + c >= first) rotate(x.v[c], x.v[c + 1], cosines[pair], sines[pair]);
  }
}

// Bits of the largest size in each group of kChannels channels, in every lane of the group.
template <int kChannels> RL_DEV int group_size_bits(const Own& x) {
  static_assert(kOwn <= kChannels, "a lane is of one group");
  int most = 0;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) most = rl::Max::of(most, size_bits(x.v[c]));
  if constexpr (kOwn < kChannels) most = rl::Max::of(most, rl::shfl_xor<1>(most));
  if constexpr (2 * kOwn < kChannels) most = rl::Max::of(most, rl::shfl_xor<2>(most));
  if constexpr (4 * kOwn < kChannels) most = rl::Max::of(most, rl::shfl_xor<4>(most));
  if constexpr (8 * kOwn < kChannels) most = rl::Max::of(most, rl::shfl_xor<8>(most));
  return most;
}

// Of a group whose scale is not a number; on x86 the sign of a NaN among the channels survives.
RL_DEV int nan_code(float v) { return size_bits(v) > kInfinity ? e4m3(v) : 0x7F; }

// ActQuant8 of the row, as it is cached: codes, then scales.
RL_DEV void write_window_row(rl_u8* out, const Own& x) {
  const int scale = scale_of_e4m3(group_size_bits<32>(x));
  const float inverse = one_over_e8m0(scale);
  rl_u8* codes = out + first_own();
#pragma unroll
  for (int c = 0; c < kOwn; c += 2) {
    const int low = scale == kNotANumber ? nan_code(x.v[c]) : e4m3(x.v[c] * inverse);
    const int high = scale == kNotANumber ? nan_code(x.v[c + 1]) : e4m3(x.v[c + 1] * inverse);
    *(rl_u16*)(codes + c) = (rl_u16)(low | high << 8);
  }
  if (first_own() % 32 == 0) out[WIDTH + first_own() / 32] = (rl_u8)scale;
}

// Window rows (backbone.md section 5.2) on their way, by one wave each.
struct WindowRow {
  rl_u8* rows;              // [N, WIDTH + WIDTH / 32] codes, then scales
  const rl_u16* projected;  // [R, WIDTH]
  const rl_u16* weight;     // [WIDTH]
  const float* cosines;     // [R, n_pairs]
  const float* sines;       // [R, n_pairs]
  const int* slots;         // [R] where rows go, negative: nowhere; or null: row r
  int n_rows, n_pairs;
  float eps;

  RL_DEV void write(const WindowRow& a, int row) {
    if (row >= a.n_rows) return;
    const int slot = a.slots ? a.slots[row] : row;
    if (slot < 0) return;
    Own x = load_own(a.projected + (rl_i64)row * WIDTH);
    norm_own(x, a.weight, a.eps);
    rotate_own(x, a.cosines + (rl_i64)row * a.n_pairs, a.sines + (rl_i64)row * a.n_pairs, a.n_pairs);
    write_window_row(a.rows + (rl_i64)slot * (WIDTH + WIDTH / 32), x);
  }
};

#define WINDOW_ROW_ARGUMENTS                                                                                       \
  rl_u8 *rows, const rl_u16 *projected, const rl_u16 *weight, const float *cosines, const float *sines,           \
      const int *slots, int n_rows, int n_pairs, float eps
#define WINDOW_ROW {rows, projected, weight, cosines, sines, slots, n_rows, n_pairs, eps}
