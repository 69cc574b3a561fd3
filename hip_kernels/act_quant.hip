// act_quant8, act_round8: ActQuant8 of BF16 rows (backbone.md section 2.4), as codes and scales, or as the BF16 numbers
// they stand for. Grid (ceil(R * K / 2048), 1); 256 threads, 8 channels each, 4 threads a group of 32; no LDS.
//
// Budget on gfx1100: act_quant8: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: act_round8: 16 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "act_terms.hip.h"

constexpr int kThreads = 256;

RL_KERNEL(kThreads) act_quant8(rl_u8* codes,      // [R, K]
                               rl_u8* scales,     // [R, K/32]
                               const rl_u16* x,   // [R, K]
                               rl_i64 n_pieces) {  // R * K / 8
  const rl_i64 piece = (rl_i64)rl_bid_x() * kThreads + rl_tid();
  if (piece >= n_pieces) return;  // whole groups of four leave together
  const Piece p = load_piece(x + piece * kPiece);
  const int scale = group_scale(p);
  rl_u32 words[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPiece; ++i) words[i / 4] |= (rl_u32)code_of(p.v[i], scale) << (8 * (i % 4));
  ((rl_u32*)codes)[2 * piece] = words[0];
  ((rl_u32*)codes)[2 * piece + 1] = words[1];
  if (piece % 4 == 0) scales[piece / 4] = (rl_u8)scale;
}
RL_EXPORT(act_quant8)

RL_KERNEL(kThreads) act_round8(rl_u16* out,      // [R, K], may be x
                               const rl_u16* x,  // [R, K]
                               rl_i64 n_pieces) {
  const rl_i64 piece = (rl_i64)rl_bid_x() * kThreads + rl_tid();
  if (piece >= n_pieces) return;
  store_words(out + piece * kPiece, act_round(load_piece(x + piece * kPiece)));
}
RL_EXPORT(act_round8)
