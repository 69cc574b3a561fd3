// engram_decode: Engram's table rows to BF16, exact (backbone.md section 11.4).
// Grid (ceil(pieces/256), 1); 256 threads, eight channels each; no LDS.
//
// Budget on gfx1100: engram_decode: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "row_terms.hip.h"

constexpr int kThreads = 256;

RL_DEV bool has_nan(int codes) {  // E4M3's are 0x7F and 0xFF
  const rl_u32 sizes = (rl_u32)codes & 0x7F7F7F7Fu;
  return ((sizes + 0x01010101u) & 0x80808080u) != 0;
}

RL_KERNEL(kThreads) engram_decode(rl_u16* out,           // [N, 32 groups]
                                        const rl_u8* codes,    // [N, 32 groups] E4M3
                                        const rl_u8* scales,   // [N, groups] E8M0
                                        int n_pieces) {        // of 8 channels: 4 N groups
  const int piece = rl_bid_x() * kThreads + rl_tid();
  if (piece >= n_pieces) return;
  const int* own = (const int*)(codes + (rl_i64)piece * kPiece);
  rl::Words4 words = e4m3_values(own[0], own[1], scales[piece / 4]);
  if (has_nan(own[0]) || has_nan(own[1])) {
#pragma unroll
    for (int c = 0; c < kPiece; ++c)
      if (((own[c / 4] >> (8 * (c % 4))) & 0x7F) == 0x7F) words.word[c / 2] |= 0x7FC0 << (16 * (c % 2));
  }
  store_words(out + (rl_i64)piece * kPiece, words);
}
RL_EXPORT(engram_decode)
