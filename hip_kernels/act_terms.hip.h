// act_terms.hip.h: ActQuant8 of eight channels a thread, four adjacent lanes a group of 32 (backbone.md section 2.4).
#pragma once
#include "row_terms.hip.h"

// E8M0 of the group, the same in its four lanes.
RL_DEV int group_scale(const Piece& p) {
  int most = 0;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) most = rl::Max::of(most, size_bits(p.v[i]));
  most = rl::Max::of(most, rl::shfl_xor<1>(most));
  return scale_of_e4m3(rl::Max::of(most, rl::shfl_xor<2>(most)));
}

// E4M3 of a channel. A broken group's codes are NaNs, of which only a NaN among its channels keeps the sign.
RL_DEV int code_of(float v, int scale) {
  if (scale == kNotANumber) return size_bits(v) > kInfinity ? e4m3(v) : 0x7F;
  return e4m3(v * one_over_e8m0(scale));
}

// The group's channels as their codes and scale say them; exact in BF16.
RL_DEV rl::Words4 act_round(const Piece& p) {
  const int scale = group_scale(p);
  const float factor = rl::as_float(scale << 23);  // 105 at least: normal
  Piece rounded;
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    rounded.v[i] = scale == kNotANumber ? rl::as_float(0x7FC00000) : e4m3_value(code_of(p.v[i], scale)) * factor;
  return pack(rounded);
}

// act_round of eight channels as they are stored, in a quarter of the instructions where it can: all lanes of the wave
// together, four adjacent ones a group.
RL_DEV rl::Words4 round_words(rl::Words4 words) {
  int most = 0, near = 0;  // near: how far the smallest is from 2^15, which a zero is not
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const int size = words.word[i / 2] >> (16 * (i % 2)) & 0x7FFF;
    most = rl::Max::of(most, size);
    near = rl::Max::of(near, -size & 0x7FFF);
  }
  most = rl::Max::of(most, rl::shfl_xor<1>(most));
  near = rl::Max::of(near, rl::shfl_xor<1>(near));
  most = rl::Max::of(most, rl::shfl_xor<2>(most));
  near = rl::Max::of(near, rl::shfl_xor<2>(near));
  const int scale = scale_of_e4m3(most << 16);
  // Codes below 2^-6 of the scale, which have not three bits of mantissa, are seldom met.
  if (rl::ballot(scale == kNotANumber || 0x8000 - near < (scale - 6) << 7) != 0) return act_round(unpack(words));
#pragma unroll
  for (int w = 0; w < kPiece / 2; ++w) {  // nearest, ties to even; none is beyond 448, which has no more bits
    const rl_u32 pair = (rl_u32)words.word[w];
    words.word[w] = (int)((pair + 0x00070007u + (pair >> 4 & 0x00010001u)) & 0xFFF0FFF0u);
  }
  return words;
}
