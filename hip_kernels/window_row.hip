// window_row: norm, rotation and ActQuant8 of window rows (backbone.md section 5.2), one wave a row of WIDTH channels.
// Grid (ceil(R/4), 1); 128 threads = 4 waves; no LDS. A lane has WIDTH / 32 adjacent channels, an even number; the sum
// of squares: a lane's channels ascending, then wave_sum.
//
// Budget on gfx1100: window_row: 72 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "packed_row.hip.h"

RL_KERNEL(kThreads) window_row(rl_u8* rows,               // [R, WIDTH + WIDTH / 32] codes, then scales
                               const rl_u16* projected,   // [R, WIDTH]
                               const rl_u16* weight,      // [WIDTH]
                               const float* cosines,      // [R, n_pairs]
                               const float* sines,        // [R, n_pairs]
                               int n_rows, int n_pairs, float eps) {
  const int row = rl_bid_x() * kRowsAGroup + rl::wave();
  if (row >= n_rows) return;
  Own x = load_own(projected + (rl_i64)row * WIDTH);
  norm_own(x, weight, eps);
  rotate_own(x, cosines + (rl_i64)row * n_pairs, sines + (rl_i64)row * n_pairs, n_pairs);

  const int scale = scale_of_e4m3(group_size_bits<32>(x));
  const float inverse = one_over_e8m0(scale);
  rl_u8* out = rows + (rl_i64)row * (WIDTH + WIDTH / 32);
  rl_u8* codes = out + first_own();
#pragma unroll
  for (int c = 0; c < kOwn; c += 2) {
    const int low = scale == kNotANumber ? nan_code(x.v[c]) : e4m3(x.v[c] * inverse);
    const int high = scale == kNotANumber ? nan_code(x.v[c + 1]) : e4m3(x.v[c + 1] * inverse);
    *(rl_u16*)(codes + c) = (rl_u16)(low | high << 8);
  }
  if (first_own() % 32 == 0) out[WIDTH + first_own() / 32] = (rl_u8)scale;
}
RL_EXPORT(window_row)
