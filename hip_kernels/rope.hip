// rope: the last 8 * pieces channels of each head, in adjacent pairs (backbone.md section 5.3); a thread turns four
// pairs of one head, or copies as many channels of those that do not turn.
// Grid (ceil(R H pieces of a launch / 256), 1); 256 threads; no LDS.
//
// Budget on gfx1100: rope: 40 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "row_terms.hip.h"

constexpr int kThreads = 256;

RL_KERNEL(kThreads) rope(rl_u16* out,           // [R, H, width], may be x
                         const rl_u16* x,       // [R, H, width]
                         const float* cosines,  // [R, 4 turned]
                         const float* sines,    // [R, 4 turned]
                         int n_rows, int n_heads, int width,
                         int turned,   // pieces of 8 channels that turn, at the end of a head
                         int touched,  // pieces that a launch writes, up to the end of a head: those, or all
                         float sign) {  // of the sine: -1 turns back
  const int i = rl_bid_x() * kThreads + rl_tid();
  if (i >= n_rows * n_heads * touched) return;
  const int head = i / touched, from_end = touched - i % touched;  // 1 is the last piece
  const rl_i64 at = (rl_i64)head * width + width - from_end * kPiece;
  rl::Words4 words = load_words(x + at);
  if (from_end <= turned) {
    Piece p = unpack(words);
    const rl_i64 pair = (rl_i64)(head / n_heads * turned + turned - from_end) * (kPiece / 2);
#pragma unroll
    for (int c = 0; c < kPiece / 2; ++c)
      rotate(p.v[2 * c], p.v[2 * c + 1], cosines[pair + c], sign * sines[pair + c]);
    words = pack(p);
  }
  store_words(out + at, words);
}
RL_EXPORT(rope)
