// engram_decode: Engram's table rows to BF16, exact (backbone.md section 11.4).
// Grid (ceil(pieces/256), 1); 256 threads, eight channels each; no LDS.
//
// Budget on gfx1100: engram_decode: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "engram_terms.hip.h"

constexpr int kThreads = 256;

RL_KERNEL(kThreads) engram_decode(rl_u16* out,           // [N, 32 groups]
                                        const rl_u8* codes,    // [N, 32 groups] E4M3
                                        const rl_u8* scales,   // [N, groups] E8M0
                                        int n_pieces) {        // of 8 channels: 4 N groups
  const int piece = rl_bid_x() * kThreads + rl_tid();
  if (piece >= n_pieces) return;
  store_words(out + (rl_i64)piece * kPiece, table_values(load_table_piece(codes, scales, piece)));
}
RL_EXPORT(engram_decode)
