// latents_few: low-rank queries and window rows of at most 8 rows (backbone.md section 5.1, 5.2), from rounded rows on:
// both products, and in the last workgroup to be done the norm of the queries, four waves a row, and norm, rotation and
// ActQuant8 of the window rows. The bits are those of linear.hip and window_row.hip.
// Grid (ceil(tiles of QUERY_WIDTH / (8 / S)) + ceil(tiles of WIDTH / (8 / S)), 1), S segments of K; 256 threads = 8 waves;
// LDS a tile of columns a wave, and a word.
//
// Budget on gfx1100: latents_few: 144 VGPRs, 10244 bytes of LDS, 10 waves per SIMD, no scratch.
#include "few_product.hip.h"
#include "packed_row.hip.h"
#include "rms.hip.h"

constexpr int kThreads = 256;
constexpr int kAhead = 5;  // blocks on their way: few waves have all of the weights
typedef rl::EightRows Rows;
static_assert(QUERY_WIDTH % kTile == 0, "whole tiles of columns");

struct Weight {  // [n_cols, K] in tiles
  WeightE4m3 tiles;
  rl_u16* out;  // [R, n_cols]
  int n_cols, segment, n_segments;

  RL_DEV int workgroups(const Weight& w) {
    const int own_tiles = kWaves / w.n_segments;
    return (w.n_cols / kTile + own_tiles - 1) / own_tiles;
  }
};

RL_DEV void multiply(rl_u16* lds, const Weight& w, const rl_u16* x, int n_rows, int blocks, int group) {
  const int own_tiles = kWaves / w.n_segments, tile0 = group * own_tiles;
  const int tile = smaller(tile0 + rl::wave() / w.n_segments, w.n_cols / kTile - 1);
  const int first = rl::wave() % w.n_segments * w.segment;
  const WeightE4m3 weight = WeightE4m3::at(w.tiles, (rl_i64)tile * blocks + first);
  FewStream<WeightE4m3, 1, Rows> stream = {{weight}, x + first * kStep, {}};
#pragma unroll
  for (int i = 0; i < Rows::kOwn; ++i)
    stream.row_bytes[i] = 2u * kStep * (rl_u32)(smaller(Rows::own_row(i), n_rows - 1) * blocks);
  Rows::Sums acc[1];
  few_product<WeightE4m3, 1, kAhead>(acc, lds + rl::wave() * kOwnElements, stream, smaller(w.segment, blocks - first));
  float* sums = (float*)lds;
  leave_sums<Rows>(sums, acc);
  for (int i = rl_tid(); i < own_tiles * kTile * kTile; i += kThreads) {
    const int own = i / (kTile * kTile), row = i / kTile % kTile, col = (tile0 + own) * kTile + i % kTile;
    if (row < n_rows && col < w.n_cols)
      w.out[(rl_i64)row * w.n_cols + col] =
          rl::f32_to_bf16(over_segments<1>(sums, own * w.n_segments, w.n_segments, 0, i % (kTile * kTile)));
  }
}

RL_KERNEL(kThreads) latents_few(WINDOW_ROW_ARGUMENTS,        // projected is made here
                                rl_u16* queries,             // [R, QUERY_WIDTH]
                                rl_u16* rounded,             // [R, QUERY_WIDTH] through ActQuant8, or null
                                const rl_u16* query_weight,  // [QUERY_WIDTH] of the norm
                                const rl_u16* x,             // [R, K] rounded
                                const rl_u8* codes_q, const rl_u8* scales_q, const rl_u8* codes_kv,
                                const rl_u8* scales_kv,
                                int* counter,  // 0, before and after
                                int blocks, int segment_q, int segments_q, int segment_kv, int segments_kv) {
  RL_DYN_SHARED(rl_u16, lds);
  const Weight q = {{codes_q, scales_q}, queries, QUERY_WIDTH, segment_q, segments_q};
  const Weight kv = {{codes_kv, scales_kv}, (rl_u16*)projected, WIDTH, segment_kv, segments_kv};
  const int n_first = Weight::workgroups(q), group = rl_bid_x();
  if (group < n_first) multiply(lds, q, x, n_rows, blocks, group);
  else multiply(lds, kv, x, n_rows, blocks, group - n_first);
  if (!rl::last_of(n_first + Weight::workgroups(kv), counter, (int*)lds + kWaves * kOwnElements / 2)) return;
  typedef Norm<QUERY_WIDTH> N;
  float* squares = (float*)lds;  // [R, 4]
  const int n_quarters = n_rows * N::kWaves;
  for (int job = rl::wave(); job < n_quarters; job += kWaves) {
    const float sum = N::sum_of_wave(queries + (rl_i64)(job / N::kWaves) * QUERY_WIDTH, job % N::kWaves);
    if (rl::lane() == 0) squares[job] = sum;
  }
  rl_sync();
  for (int job = rl::wave(); job < n_quarters + n_rows; job += kWaves) {
    if (job >= n_quarters) {
      WindowRow::write(WINDOW_ROW, job - n_quarters);
      continue;
    }
    const int row = job / N::kWaves;
    const Normed out = Normed::at(queries, rounded, (rl_i64)row * QUERY_WIDTH);
    N::store_of_wave(out, out.row, query_weight, eps, squares + row * N::kWaves, job % N::kWaves);
  }
}
RL_EXPORT(latents_few)
