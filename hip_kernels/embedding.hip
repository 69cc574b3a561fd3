// embed: table rows, the same in every stream (backbone.md section 3). Grid (R, 1); 128 threads; no LDS.
//
// Budget on gfx1100: embed: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "port.hip.h"

constexpr int kThreads = 128;

RL_KERNEL(kThreads) embed(rl::Words4* streams,       // [R, n_streams, pieces]
                          const int* ids,            // [R]
                          const rl::Words4* table,   // [V, pieces], 16 bytes each
                          int n_streams, int pieces) {
  const rl::Words4* from = table + (rl_i64)ids[rl_bid_x()] * pieces;
  rl::Words4* to = streams + (rl_i64)rl_bid_x() * n_streams * pieces;
  for (int i = rl_tid(); i < pieces; i += kThreads) {
    const int a = from[i].word[0], b = from[i].word[1], c = from[i].word[2], d = from[i].word[3];
    for (int stream = 0; stream < n_streams; ++stream) to[stream * pieces + i] = {{a, b, c, d}};
  }
}
RL_EXPORT(embed)
