// router_choose: the experts of each row from its logits (backbone.md section 10), bit for bit as router_ref.
// Grid (ceil(R / 8), 1); 256 threads = 8 waves, a row each; LDS 8 bytes an expert and wave.
//
// Budget on gfx1100: router_choose: 24 VGPRs, 24576 bytes of LDS, 10 waves per SIMD, no scratch.
#include "explog.hip.h"

constexpr int kThreads = 256, kRows = kThreads / 32;
constexpr int kTaken = (int)0x80000000;  // below every key

RL_DEV float sqrt_softplus(float x) {
  const bool is_far = x < -20.0f;  // e^x may be subnormal there: its root is taken in the exponent
  const float e = rl::exp(is_far ? x * 0.5f : x < 0.0f ? x : -x), u = e + 1.0f;
  const float log1p = rl::log(u) + (e - (u - 1.0f)) / u;
  const float root = rl::sqrt(x > 20.0f ? x : (x < 0.0f ? 0.0f : x) + log1p);
  return is_far ? e : root;
}

// Integers in the order of the numbers: -0 is 0, a NaN the largest.
RL_DEV int to_key(float v) {
  const int bits = rl::as_int(v == 0.0f ? 0.0f : v);
  return v != v ? 0x7FFFFFFF : bits < 0 ? bits ^ 0x7FFFFFFF : bits;
}

RL_KERNEL(kThreads) router_choose(float* scores,        // [R, E], may be the logits
                                  int* ids,             // [R, k]
                                  float* weights,       // [R, k]
                                  const float* logits,  // [R, E]
                                  const float* bias,    // [E]
                                  int n_rows, int n_experts, int k, float factor) {
  RL_DYN_SHARED(float, lds);
  const rl_i64 row = (rl_i64)rl_bid_x() * kRows + rl::wave();
  if (row >= n_rows) return;  // whole waves, which wait for no other
  float* own_scores = lds + rl::wave() * 2 * n_experts;
  int* keys = (int*)own_scores + n_experts;
  for (int e = rl::lane(); e < n_experts; e += 32) {
    const float score = sqrt_softplus(logits[row * n_experts + e]);
    scores[row * n_experts + e] = own_scores[e] = score;
    keys[e] = to_key(score + bias[e]);
  }
  rl_wave_sync();
  float total = 0.0f, own = 0.0f;  // lane j keeps choice j's
  for (int j = 0; j < k; ++j) {
    int best = kTaken, at = 0;
    for (int e = rl::lane(); e < n_experts; e += 32)
      if (keys[e] > best) {
        best = keys[e];
        at = e;
      }
    const int most = rl::wave_max(best);
    const int chosen = -rl::wave_max(best == most ? -at : -n_experts);  // of equals the lowest
    const float score = own_scores[chosen];
    total += score;
    if (rl::lane() == j) {
      ids[row * k + j] = chosen;
      own = score;
      keys[chosen] = kTaken;
    }
    rl_wave_sync();
  }
  if (rl::lane() < k) weights[row * k + rl::lane()] = own / (total + 1e-20f) * factor;
}
RL_EXPORT(router_choose)
