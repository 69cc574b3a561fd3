// rms.hip.h: RMSNorm of a row of BF16 channels, a multiple of 8 of them, held in registers: by 128 threads of a
// workgroup, or by four of its waves, which add in the same order. What is normed may be written through ActQuant8 too.
#pragma once
#include "act_terms.hip.h"

constexpr int kNormThreads = 128;

struct Normed {  // where a row goes
  rl_u16* row;
  rl_u16* rounded;  // or null; wants a multiple of 32 channels

  RL_DEV Normed at(rl_u16* rows, rl_u16* rounded, rl_i64 first) { return {rows + first, rounded ? rounded + first : nullptr}; }
};

template <int kWidth> struct Norm {
  static_assert(kWidth % kPiece == 0, "rows are read in pieces of 16 bytes");
  static constexpr int kWaves = kNormThreads / 32;
  static constexpr int kPieces = (kWidth / kPiece + kNormThreads - 1) / kNormThreads;

  struct Own {  // of one of the threads
    rl::Words4 words[kPieces];
  };

  // Its i-th piece; at or past kWidth there is none.
  RL_DEV int channel(int i, int thread) { return (i * kNormThreads + thread) * kPiece; }

  RL_DEV Own load(const rl_u16* row, int thread) {
    Own own;
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      if (channel(i, thread) < kWidth) own.words[i] = load_words(row + channel(i, thread));
    return own;
  }

  RL_DEV float squares(const Own& own, int thread) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (channel(i, thread) >= kWidth) continue;
      const Piece x = unpack(own.words[i]);
#pragma unroll
      for (int c = 0; c < kPiece; ++c) sum += x.v[c] * x.v[c];
    }
    return sum;
  }

  // Eight channels, the first of them `at` from where out begins; lanes that have none go along: they round together.
  RL_DEV void store_piece(const Normed& out, rl_i64 at, const rl::Words4& own, const rl::Words4& weight, float inverse,
                          bool real) {
    Piece x = unpack(own);
    const Piece w = unpack(weight);
#pragma unroll
    for (int c = 0; c < kPiece; ++c) x.v[c] = w.v[c] * (x.v[c] * inverse);
    rl::Words4 words = pack(x);
    if (real) store_words(out.row + at, words);
    if (!out.rounded) return;
    words = round_words(words);
    if (real) store_words(out.rounded + at, words);
  }

  RL_DEV void store(const Normed& out, const Own& own, const rl_u16* weight, float inverse, int thread) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int at = channel(i, thread);
      const bool real = at < kWidth;
      const rl::Words4 none = {};
      store_piece(out, at, real ? own.words[i] : none, real ? load_words(weight + at) : none, inverse, real);
    }
  }

  // Of the four waves' sums.
  RL_DEV float inverse_of(const float* sums, float eps) {
    float total = sums[0];
#pragma unroll
    for (int i = 1; i < kWaves; ++i) total += sums[i];
    return inverse_rms(total, kWidth, eps);
  }

  // By a workgroup of kNormThreads; out.row may be row. sums: a float a wave.
  RL_DEV void by_group(const Normed& out, const rl_u16* row, const rl_u16* weight, float eps, float* sums) {
    const int thread = rl_tid();
    const Own own = load(row, thread);
    const float sum = group_sum<kNormThreads>(squares(own, thread), sums);
    store(out, own, weight, inverse_rms(sum, kWidth, eps), thread);
  }

  // The same bits in two steps, a quarter of the row a wave: each wave's sum, then, with all four, what it stores.
  RL_DEV float sum_of_wave(const rl_u16* row, int w) {
    const int thread = 32 * w + rl::lane();
    return rl::wave_sum(squares(load(row, thread), thread));
  }
  RL_DEV void store_of_wave(const Normed& out, const rl_u16* row, const rl_u16* weight, float eps, const float* sums,
                            int w) {
    const int thread = 32 * w + rl::lane();
    store(out, load(row, thread), weight, inverse_of(sums, eps), thread);
  }
};
