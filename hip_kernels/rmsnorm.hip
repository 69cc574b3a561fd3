// rmsnorm: one workgroup a row (backbone.md section 2.2). Grid (R, 1); 128 threads = 4 waves; LDS a float a wave.
// WIDTH channels, a multiple of 8. The sum of squares: a thread's channels ascending, then group_sum.
//
// Budget on gfx1100: rmsnorm: 72 VGPRs, 16 bytes of LDS, 16 waves per SIMD, no scratch.
#include "rms.hip.h"

RL_KERNEL(kNormThreads) rmsnorm(rl_u16* out,           // [R, WIDTH], may be x
                            const rl_u16* x,       // [R, WIDTH]
                            const rl_u16* weight,  // [WIDTH]
                            float eps) {
  RL_DYN_SHARED(float, sums);
  const rl_i64 row = (rl_i64)rl_bid_x() * WIDTH;
  Norm<WIDTH>::by_group({out + row, nullptr}, x + row, weight, eps, sums);
}
RL_EXPORT(rmsnorm)
