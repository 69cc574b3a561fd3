// finish.hip.h: what is done to a product's outputs before they are written: rounded to BF16, then the rotation of each
// head's last channels (backbone.md section 5.3) or ActQuant8 (section 2.4), with the bits of those operators.
#pragma once
#include "act_terms.hip.h"

struct Finish {
  const float* cosines;  // [R, turned / 2], or null: no rotation
  const float* sines;
  int head_width;  // channels of a head
  int turned;      // of them, at its end
  int rounds;      // 1: through ActQuant8

  RL_DEV bool any(const Finish& f) { return f.cosines || f.rounds; }
  // Whether any of n columns of a tile are changed.
  RL_DEV bool touches(const Finish& f, int col0, int n) {
    return f.rounds || (f.cosines && col0 % f.head_width + n > f.head_width - f.turned);
  }
  // Where in the tables a channel's pair is, below 0 where it does not turn. Even channels.
  RL_DEV rl_i64 pair_of(const Finish& f, int row, int col) {
    const int at = col % f.head_width - (f.head_width - f.turned);
    return at < 0 ? -1 : ((rl_i64)row * f.turned + at) / 2;
  }
};

// Eight neighbouring channels, all lanes of the wave together; four adjacent ones have a group of 32.
RL_DEV rl::Words4 finish_words(const Finish& f, const rl::Words4& words, int row, int col) {
  if (f.rounds) return round_words(words);
  const rl_i64 pair = Finish::pair_of(f, row, col);
  if (pair < 0) return words;
  Piece p = unpack(words);
#pragma unroll
  for (int c = 0; c < kPiece / 2; ++c) rotate(p.v[2 * c], p.v[2 * c + 1], f.cosines[pair + c], f.sines[pair + c]);
  return pack(p);
}

// One channel, the wave's 32 being neighbours in one row.
RL_DEV float finish_lane(const Finish& f, float v, int row, int col) {
  v = rl::round_bf16(v);
  if (f.rounds) {
    const int scale = scale_of_e4m3(rl::wave_max(size_bits(v)));
    const float factor = rl::as_float(scale << 23);
    return scale == kNotANumber ? rl::as_float(0x7FC00000) : e4m3_value(code_of(v, scale)) * factor;
  }
  const float other = rl::shfl_xor<1>(v);
  const bool odd = col % 2 != 0;
  const rl_i64 pair = Finish::pair_of(f, row, col & ~1);
  if (pair < 0) return v;
  float real = odd ? other : v, imag = odd ? v : other;
  rotate(real, imag, f.cosines[pair], f.sines[pair]);
  return odd ? imag : real;
}
