// packed_row.hip.h: a row of WIDTH channels in one wave, on its way to a packed cache row. A lane has kOwn adjacent
// channels.
#pragma once
#include "row_terms.hip.h"

constexpr int kThreads = 128, kRowsAGroup = kThreads / 32;
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
