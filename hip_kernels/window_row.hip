// window_row: norm, rotation and ActQuant8 of window rows (backbone.md section 5.2), one wave a row of WIDTH channels,
// into the rows' own order or into slots of rings. Grid (ceil(R/4), 1); 128 threads = 4 waves; no LDS. A lane has
// WIDTH / 32 adjacent channels, an even number; the sum of squares: a lane's channels ascending, then wave_sum.
//
// latent_norms: the same, after rmsnorm of as many low-rank queries in place, a workgroup a row of QUERY_WIDTH channels.
// Grid (R + ceil(R/4), 1); LDS a float a wave.
//
// Budget on gfx1100: window_row: 40 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: latent_norms: 48 VGPRs, 16 bytes of LDS, 16 waves per SIMD, no scratch.
#include "packed_row.hip.h"
#include "rms.hip.h"

RL_KERNEL(kRowThreads) window_row(WINDOW_ROW_ARGUMENTS) {
  WindowRow::write(WINDOW_ROW, rl_bid_x() * kRowsAGroup + rl::wave());
}
RL_EXPORT(window_row)

#if defined(QUERY_WIDTH)
static_assert(kRowThreads == kNormThreads, "either is a workgroup's work");
RL_KERNEL(kRowThreads) latent_norms(WINDOW_ROW_ARGUMENTS,
                                 rl_u16* queries,              // [R, QUERY_WIDTH]
                                 rl_u16* rounded,              // [R, QUERY_WIDTH] through ActQuant8, or null
                                 const rl_u16* query_weight) {  // [QUERY_WIDTH]
  RL_DYN_SHARED(float, sums);
  const int group = rl_bid_x();
  if (group >= n_rows) {
    WindowRow::write(WINDOW_ROW, (group - n_rows) * kRowsAGroup + rl::wave());
    return;
  }
  const Normed out = Normed::at(queries, rounded, (rl_i64)group * QUERY_WIDTH);
  Norm<QUERY_WIDTH>::by_group(out, out.row, query_weight, eps, sums);
}
RL_EXPORT(latent_norms)
#endif
