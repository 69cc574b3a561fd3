// select_keys: the best of each row's keys, by selection_terms.hip.h; for a producer of candidate blocks also its own
// list, of other length and with no block forced. Grid (1 or 2 lists, R); 1,024 threads = 32 waves; LDS 4,096 counts and
// 34 words.
//
// Budget on gfx1100: select_keys: 48 VGPRs, 16520 bytes of LDS, 16 waves per SIMD, no scratch.
#include "selection_terms.hip.h"

constexpr int kThreads = 1024;

RL_KERNEL(kThreads) select_keys(int* chosen,          // [R, K] ascending, -1 at the end
                                int* listed,          // [R, n_listed] the second list
                                const rl_u16* keys,   // [R, stride]
                                const int* visible,   // [R]: keys are of the blocks that the row sees; or null
                                const int* blocks,    // [R, n_blocks]: or null; key i is of block i / 8
                                int stride, int k, int n_listed, int n_blocks) {
  RL_DYN_SHARED(Select<kThreads>::Lds, lds);
  const rl_i64 r = rl_bid_y();
  const bool second = rl_bid_x() != 0;
  const int n = visible ? (visible[r] + kKeysABlock - 1) / kKeysABlock : stride;
  const int forced = listed && !second ? n - 1 : -1;  // a producer's list has the newest block in any case
  const Chosen to = {second ? listed + r * n_listed : chosen + r * k, blocks ? blocks + r * n_blocks : nullptr,
                     second ? n_listed : k};
  Select<kThreads>::list(to, {keys + r * stride, n, forced}, *lds);
}
RL_EXPORT(select_keys)
