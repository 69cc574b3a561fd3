// project_enter_few: wo_b of at most 8 rows (backbone.md section 5.6), and what stands between attention and experts
// (section 4), from rounded rows on. A workgroup has 32 columns; the last of the four in a segment of 128 channels passes
// over that segment's streams, the last of all segments norms and mixes. The bits are those of linear.hip and mhc.hip.
// Grid (ceil(WIDTH / 32), 1); 256 threads = 8 waves, a segment of K each; LDS as the pass needs it, and a word.
//
// Budget on gfx1100: project_enter_few: 168 VGPRs, 20740 bytes of LDS, 8 waves per SIMD, no scratch.
#include "few_product.hip.h"
#include "mhc_terms.hip.h"

constexpr int kThreads = 256;
constexpr int kTiles = 2, kOwnCols = kTiles * kTile, kGroups = (WIDTH + kOwnCols - 1) / kOwnCols;
constexpr int kSegmentGroups = kSegment / kOwnCols;
typedef rl::EightRows Rows;
static_assert(kWaves * kTiles * kTile * kTile * (int)sizeof(float) <= kFewBytes, "sums lie where the pass will be");

struct WoB {
  rl_u16* out;  // [R, WIDTH]
  const rl_u16* x;  // [R, K] rounded
  WeightE4m3 tiles;
  int n_rows, blocks, segment;
};
RL_DEV void multiply(rl_u16* lds, const WoB& a) {
  const int first = rl::wave() * a.segment, tile0 = rl_bid_x() * kTiles;
  FewStream<WeightE4m3, kTiles, Rows> stream;
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
    stream.weight[t] = WeightE4m3::at(a.tiles, (rl_i64)smaller(tile0 + t, WIDTH / kTile - 1) * a.blocks + first);
  stream.x = a.x + first * kStep;
#pragma unroll
  for (int i = 0; i < Rows::kOwn; ++i)
    stream.row_bytes[i] = 2u * kStep * (rl_u32)(smaller(Rows::own_row(i), a.n_rows - 1) * a.blocks);
  Rows::Sums acc[kTiles];
  few_product<WeightE4m3, kTiles>(acc, lds + rl::wave() * kOwnElements, stream,
                                  smaller(a.segment, a.blocks - first));
  float* sums = (float*)lds;
  leave_sums<Rows>(sums, acc);
  for (int i = rl_tid(); i < a.n_rows * kOwnCols; i += kThreads) {
    const int row = i / kOwnCols, at = i % kOwnCols, col = tile0 * kTile + at;
    if (col >= WIDTH) continue;
    const float v = over_segments<kTiles>(sums, 0, kWaves, at / kTile, row * kTile + at % kTile);
    a.out[(rl_i64)row * WIDTH + col] = rl::f32_to_bf16(v);
  }
}

RL_KERNEL(kThreads) project_enter_few(rl_u16* out, const rl_u16* x, const rl_u8* codes, const rl_u8* scales, int blocks,
                                      int segment, PASS_ARGUMENTS, FINISH_ARGUMENTS,
                                      int* counters) {  // [1 + segments] all 0, before and after
  RL_DYN_SHARED(rl_u16, lds);
  multiply(lds, {out, x, {codes, scales}, n_rows, blocks, segment});
  const int own = rl_bid_x() / kSegmentGroups, n_own = smaller(kSegmentGroups, kGroups - own * kSegmentGroups);
  if (!rl::last_of(n_own, counters + 1 + own, (int*)lds + kFewBytes / (int)sizeof(int))) return;
  pass_few<kThreads>(lds, PASS, own);
  if (!rl::last_of(kSegments, counters, (int*)lds)) return;
  finish_few<kThreads>(lds, {normed, rounded, weight, MIX, n_rows});
}
RL_EXPORT(project_enter_few)
