// engram_terms.hip.h: Engram's table rows decoded, exact (backbone.md section 11.4). For engram_rows.hip, engram.hip.
#pragma once
#include "row_terms.hip.h"

RL_DEV bool has_nan(int codes) {  // E4M3's are 0x7F and 0xFF
  const rl_u32 sizes = (rl_u32)codes & 0x7F7F7F7Fu;
  return ((sizes + 0x01010101u) & 0x80808080u) != 0;
}

struct TablePiece {  // eight channels as stored
  int low, high;     // codes
  int scale;
};
// Of rows [N, 32 groups] of E4M3 and [N, groups] of E8M0.
RL_DEV TablePiece load_table_piece(const rl_u8* codes, const rl_u8* scales, int piece) {
  const int* own = (const int*)(codes + (rl_i64)piece * kPiece);
  return {own[0], own[1], scales[piece / 4]};
}
RL_DEV rl::Words4 table_values(const TablePiece& p) {
  rl::Words4 words = e4m3_values(p.low, p.high, p.scale);
  if (has_nan(p.low) || has_nan(p.high)) {
#pragma unroll
    for (int c = 0; c < kPiece; ++c)
      if ((((c < 4 ? p.low : p.high) >> (8 * (c % 4))) & 0x7F) == 0x7F) words.word[c / 2] |= 0x7FC0 << (16 * (c % 2));
  }
  return words;
}
