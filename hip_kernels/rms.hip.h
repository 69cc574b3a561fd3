// rms.hip.h: RMSNorm of a row that a workgroup holds in registers, WIDTH channels of BF16 in pieces of 8.
#pragma once
#include "row_terms.hip.h"

constexpr int kThreads = 128;
static_assert(WIDTH % kPiece == 0, "rows are read in pieces of 16 bytes");
constexpr int kOwnPieces = (WIDTH / kPiece + kThreads - 1) / kThreads;

// A thread's i-th piece; at or past WIDTH there is none.
RL_DEV int own_channel(int i) { return (i * kThreads + rl_tid()) * kPiece; }

RL_DEV void norm_row(rl_u16* out, const rl::Words4 (&words)[kOwnPieces], const rl_u16* weight, float eps,
                     float* sums) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kOwnPieces; ++i) {
    if (own_channel(i) >= WIDTH) continue;
    const Piece x = unpack(words[i]);
#pragma unroll
    for (int c = 0; c < kPiece; ++c) sum += x.v[c] * x.v[c];
  }
  const float inverse = inverse_rms(group_sum<kThreads>(sum, sums), WIDTH, eps);
#pragma unroll
  for (int i = 0; i < kOwnPieces; ++i) {
    if (own_channel(i) >= WIDTH) continue;
    Piece x = unpack(words[i]);
    const Piece w = load_piece(weight + own_channel(i));
#pragma unroll
    for (int c = 0; c < kPiece; ++c) x.v[c] = w.v[c] * (x.v[c] * inverse);
    store_words(out + own_channel(i), pack(x));
  }
}
