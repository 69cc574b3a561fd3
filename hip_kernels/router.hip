// The experts of each row from its logits (backbone.md section 10), bit for bit as router_ref.
//
//   router_few     at most 16 rows, from the rows on: logits, scores, and in the last workgroup to be done the choice;
//                  also rounds the rows for the experts. Grid (ceil(tiles of columns / (8 / S)), 1), S segments of K
//   router_choose  from logits that are there. Grid (ceil(R / 8), 1)
//
// 256 threads = 8 waves; a row a wave for the choice. LDS 8 bytes an expert and wave, router_few one word more.
//
// Budget on gfx1100: router_few: 160 VGPRs, 24580 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: router_choose: 24 VGPRs, 24576 bytes of LDS, 10 waves per SIMD, no scratch.
#include "act_terms.hip.h"
#include "explog.hip.h"
#include "few_product.hip.h"

constexpr int kThreads = 256, kRows = kThreads / 32;
constexpr int kAtOnce = 12;  // experts that a lane reads before it needs the first
constexpr int kAhead = 5;  // blocks on their way: few waves have all of the weight
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

struct Choice {
  int* ids;        // [R, k]
  float* weights;  // [R, k]
  int n_experts, k;
  float factor;
};
// One wave, when own has the row's scores and keys in LDS; a lane reads kAtOnce of them at a time.
template <int kAtOnce> RL_DEV void choose(const Choice& a, float* own, rl_i64 row) {
  int* keys = (int*)own + a.n_experts;
  float total = 0.0f, own_score = 0.0f;  // lane j keeps choice j's
  for (int j = 0; j < a.k; ++j) {
    int best = kTaken, at = 0;
#pragma unroll kAtOnce
    for (int e = rl::lane(); e < a.n_experts; e += 32) {
      const int key = keys[e];
      if (key > best) {
        best = key;
        at = e;
      }
    }
    const int most = rl::wave_max(best);
    const int chosen = -rl::wave_max(best == most ? -at : -a.n_experts);  // of equals the lowest
    const float score = own[chosen];
    total += score;
    if (rl::lane() == j) {
      a.ids[row * a.k + j] = chosen;
      own_score = score;
      keys[chosen] = kTaken;
    }
    rl_wave_sync();
  }
  if (rl::lane() < a.k) a.weights[row * a.k + rl::lane()] = own_score / (total + 1e-20f) * a.factor;
}

RL_KERNEL(kThreads) router_choose(float* scores,  // [R, E], may be the logits
                                  int* ids, float* weights,
                                  const float* logits,  // [R, E]
                                  const float* bias,    // [E]
                                  int n_rows, int n_experts, int k, float factor) {
  RL_DYN_SHARED(float, lds);
  const rl_i64 row = (rl_i64)rl_bid_x() * kRows + rl::wave();
  if (row >= n_rows) return;  // whole waves, which wait for no other
  const Choice a = {ids, weights, n_experts, k, factor};
  float* own = lds + rl::wave() * 2 * n_experts;
  for (int e = rl::lane(); e < n_experts; e += 32) {
    const float score = sqrt_softplus(logits[row * n_experts + e]);
    scores[row * n_experts + e] = own[e] = score;
    ((int*)own + n_experts)[e] = to_key(score + bias[e]);
  }
  rl_wave_sync();
  choose<1>(a, own, row);
}
RL_EXPORT(router_choose)

// The wave's tile of columns over its segment of n of a row's blocks, left in LDS.
template <class R>
RL_DEV void multiply(rl_u16* lds, const WeightBf16& weight, const rl_u16* x, int n_rows, int blocks, int n) {
  FewStream<WeightBf16, 1, R> stream = {{weight}, x, {}};
#pragma unroll
  for (int i = 0; i < R::kOwn; ++i)
    stream.row_bytes[i] = 2u * kStep * (rl_u32)(smaller(R::own_row(i), n_rows - 1) * blocks);
  typename R::Sums acc[1];
  few_product<WeightBf16, 1, kAhead>(acc, lds + rl::wave() * kOwnElements, stream, n);
  leave_sums<R>((float*)lds, acc);
}

RL_KERNEL(kThreads) router_few(float* scores, int* ids, float* weights,
                               rl_u16* rounded,    // [R, D] the rows through ActQuant8, or null
                               int* counter,       // 0, before and after
                               const rl_u16* x,    // [R, D]
                               const rl_u8* gate,  // tiles of [E, D]
                               const float* bias, int n_rows, int n_experts, int blocks, int segment, int n_segments,
                               int n_workgroups, int k, float factor) {
  RL_DYN_SHARED(rl_u16, lds);
  const int n_pieces = rounded ? n_rows * blocks * (kStep / kPiece) : 0;
  for (int start = rl_bid_x() * kThreads; start < n_pieces; start += n_workgroups * kThreads) {
    const int i = start + rl_tid();  // groups of four are there or not; lanes that have none go along
    const rl::Words4 words = round_words(load_words(x + smaller(i, n_pieces - 1) * kPiece));
    if (i < n_pieces) store_words(rounded + i * kPiece, words);
  }

  const int tiles = (n_experts + kTile - 1) / kTile, own_tiles = kWaves / n_segments, tile0 = rl_bid_x() * own_tiles;
  const int tile = smaller(tile0 + rl::wave() / n_segments, tiles - 1), first = rl::wave() % n_segments * segment;
  const WeightBf16 own_weight = WeightBf16::at({gate, nullptr}, (rl_i64)tile * blocks + first);
  const int n_blocks = smaller(segment, blocks - first);
  const rl_u16* own_x = x + first * kStep;
  if (rl::EightRows::serve(n_rows)) multiply<rl::EightRows>(lds, own_weight, own_x, n_rows, blocks, n_blocks);
  else multiply<rl::SixteenRows>(lds, own_weight, own_x, n_rows, blocks, n_blocks);
  float* sums = (float*)lds;
  for (int i = rl_tid(); i < own_tiles * kTile * kTile; i += kThreads) {
    const int own = i / (kTile * kTile), row = i / kTile % kTile, col = (tile0 + own) * kTile + i % kTile;
    if (row < n_rows && col < n_experts)
      scores[row * n_experts + col] =
          sqrt_softplus(over_segments<1>(sums, own * n_segments, n_segments, 0, i % (kTile * kTile)));
  }
  const int free_word = rl::Max::of(kRows * 2 * n_experts, kWaves * kOwnElements / 2);
  if (!rl::last_of(n_workgroups, counter, (int*)lds + free_word)) return;
  const Choice a = {ids, weights, n_experts, k, factor};
  for (int row = rl::wave(); row < n_rows; row += kRows) {
    float* own = sums + rl::wave() * 2 * n_experts;
    for (int start = rl::lane(); start < n_experts; start += 32 * kAtOnce) {
      float score[kAtOnce], own_bias[kAtOnce];  // read all at once: one workgroup does this for all
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int e = smaller(start + 32 * j, n_experts - 1);
        score[j] = scores[row * n_experts + e];
        own_bias[j] = bias[e];
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int e = start + 32 * j;
        if (e >= n_experts) break;
        own[e] = score[j];
        ((int*)own + n_experts)[e] = to_key(score[j] + own_bias[j]);
      }
    }
    rl_wave_sync();
    choose<kAtOnce>(a, own, row);
    rl_wave_sync();
  }
}
RL_EXPORT(router_few)
