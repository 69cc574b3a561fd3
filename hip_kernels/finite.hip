// rows_finite: whether all BF16 numbers of a row are finite, a byte a row (design.md section 7). Grid (R, 1); 256
// threads = 8 waves; LDS an int a wave.
//
// Budget on gfx1100: rows_finite: 24 VGPRs, 32 bytes of LDS, 16 waves per SIMD, no scratch.
#include "port.hip.h"

constexpr int kThreads = 256;
constexpr rl_u32 kLow = 0x7f80, kHigh = 0x7f800000;  // the exponents of a word's two numbers; all ones is no number

RL_KERNEL(kThreads) rows_finite(rl_u8* finite,             // [R]
                                const rl::Words4* values,  // [R, pieces], 16 bytes each
                                int pieces) {
  RL_DYN_SHARED(int, bad_waves);
  const rl::Words4* row = values + (rl_i64)rl_bid_x() * pieces;
  bool bad = false;
  for (int i = rl_tid(); i < pieces; i += kThreads) {
    const rl::Words4 piece = row[i];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const rl_u32 pair = (rl_u32)piece.word[word];
      bad = bad || (pair & kLow) == kLow || (pair & kHigh) == kHigh;
    }
  }
  const rl_u32 bad_lanes = rl::ballot(bad);
  if (rl::lane() == 0) bad_waves[rl::wave()] = bad_lanes != 0;
  rl_sync();
  if (rl_tid() != 0) return;
  int n_bad = 0;
  for (int wave = 0; wave < kThreads / 32; ++wave) n_bad += bad_waves[wave];
  finite[rl_bid_x()] = n_bad == 0;
}
RL_EXPORT(rows_finite)
