// Linear layers and what prepares their weights (linear_hip.py). FP8 weights (e4m3) take rows through ActQuant8 as BF16
// numbers, BF16 ones any rows.
//
//   *_few          at most 16 rows. Grid (G * ceil(tiles / (16 / S)), 1); a wave has 32 columns and one of S segments
//   *_64, *_128    so many rows a workgroup. Grid (ceil(R / 64 or 128), G * ceil(N / 128) * parts)
//   linear_sum     adds the segments where `parts` workgroups had one each. Grid (ceil(R * G * N / 256), 1)
//   prepare_*      codes into tiles. Grid (ceil(lanes of all tiles / 256), 1)
//
// 256 threads = 8 waves each; LDS FEW_LDS_BYTES, tiled_lds_bytes() of the binding. Columns come in G groups of N, each
// with channels of its own (backbone.md section 5.6); G = 1 is the plain linear.
//
// Budget on gfx1100: e4m3_few: 168 VGPRs, 16384 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: bf16_few: 112 VGPRs, 16384 bytes of LDS, 12 waves per SIMD, no scratch.
// Budget on gfx1100: e4m3_64: 112 VGPRs, 20480 bytes of LDS, 12 waves per SIMD, no scratch.
// Budget on gfx1100: bf16_64: 112 VGPRs, 20480 bytes of LDS, 12 waves per SIMD, no scratch.
// Budget on gfx1100: e4m3_128: 184 VGPRs, 30720 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: bf16_128: 184 VGPRs, 30720 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: linear_sum: 16 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: prepare_e4m3: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: prepare_bf16: 16 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "wmma_gemm.hip.h"

constexpr int kThreads = 256;

struct Linear {
  rl_u16* out_bf16;   // [R, G, N], or
  float* out_f32;     // [R, G, N], or [parts, R, G, N] of segments
  rl_u8* finite;      // [R], 0 is written where an output is no number; or null
  const rl_u16* x;    // [R, G, K]
  const rl_u8* codes;
  const rl_u8* scales;
  int n_rows, n_cols, n_groups;
  int blocks, segment;  // of 32 channels: all, and of a segment

  RL_DEV void put(const Linear& a, rl_i64 row, int group, int col, rl_i64 part, float v) {
    const rl_i64 width = (rl_i64)a.n_groups * a.n_cols, at = row * width + (rl_i64)group * a.n_cols + col;
    if (a.out_bf16) a.out_bf16[at] = rl::f32_to_bf16(v);
    else a.out_f32[part * a.n_rows * width + at] = v;
    if (a.finite && (rl::as_int(v) & 0x7F800000) == 0x7F800000) a.finite[row] = 0;
  }
};

template <class W, int kRows> RL_DEV void linear_tiled(rl_u16* lds, const Linear& a, int parts) {
  typedef Tiled<W, kRows> T;
  const int tiles = (a.n_cols + kTile - 1) / kTile, col_blocks = (a.n_cols + kCols - 1) / kCols;
  const int part = rl_bid_y() % parts, group = rl_bid_y() / parts / col_blocks;
  const int col0 = rl_bid_y() / parts % col_blocks * kCols, row0 = rl_bid_x() * kRows;
  T t;
  t.lds = lds;
#pragma unroll
  for (int n = 0; n < T::kNFrags; ++n)
    t.weight[n] = W::at({a.codes, a.scales},
                        ((rl_i64)group * tiles + smaller((col0 + T::frag_col(n)) / kTile, tiles - 1)) * a.blocks);
  t.n_rows = smaller(a.n_rows - row0, kRows);
  t.x = a.x + (rl_i64)row0 * a.n_groups * a.blocks * kStep;
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j) {
    const int row = smaller(T::row_of_piece(j), t.n_rows - 1);
    t.piece_bytes[j] = 2u * ((row * a.n_groups + group) * a.blocks * kStep + T::channel_of_piece());
  }
  run(t, part * a.segment, parts > 1 ? smaller((part + 1) * a.segment, a.blocks) : a.blocks, a.segment);
#pragma unroll
  for (int m = 0; m < T::kMFrags; ++m)
#pragma unroll
    for (int n = 0; n < T::kNFrags; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = T::frag_row(m) + rl::acc_row(i), col = col0 + T::frag_col(n) + rl::acc_col(i);
        if (row < t.n_rows && col < a.n_cols) Linear::put(a, row0 + row, group, col, part, t.total[m][n].v[i]);
      }
}

template <class W> RL_DEV void linear_few(rl_u16* lds, const Linear& a, int waves_a_tile) {
  const int tiles = (a.n_cols + kTile - 1) / kTile, own_tiles = kWaves / waves_a_tile * kFewTiles;
  const int groups_wide = (tiles + own_tiles - 1) / own_tiles;
  const int group = rl_bid_x() / groups_wide, tile0 = rl_bid_x() % groups_wide * own_tiles;
  const int first = rl::wave() % waves_a_tile * a.segment, last = smaller(first + a.segment, a.blocks);
  W weight[kFewTiles];
#pragma unroll
  for (int t = 0; t < kFewTiles; ++t) {
    const int tile = smaller(tile0 + rl::wave() / waves_a_tile * kFewTiles + t, tiles - 1);
    weight[t] = W::at({a.codes, a.scales}, ((rl_i64)group * tiles + tile) * a.blocks);
  }
  const rl_u16* rows[rl::kFragRows];
#pragma unroll
  for (int i = 0; i < rl::kFragRows; ++i)
    rows[i] = a.x + (rl_i64)(smaller(rl::frag_row(i), a.n_rows - 1) * a.n_groups + group) * a.blocks * kStep;
  rl::AccF32 acc[kFewTiles];
  few_rows(acc, lds + rl::wave() * kOwnElements, weight, first, last, rows);
  float* sums = (float*)lds;
  put_sums(sums, acc);
  for (int i = rl_tid(); i < own_tiles * kTile * kTile; i += kThreads) {
    const int own = i / (kTile * kTile), row = i / kTile % kTile, col = (tile0 + own) * kTile + i % kTile;
    if (row >= a.n_rows || col >= a.n_cols) continue;
    const int wave = own / kFewTiles * waves_a_tile, element = i % (kTile * kTile);
    Linear::put(a, row, group, col, 0, sum_segments(sums, wave, waves_a_tile, own % kFewTiles, element));
  }
}

#define LINEAR_ARGUMENTS                                                                                     \
  rl_u16 *out_bf16, float *out_f32, rl_u8 *finite, const rl_u16 *x, const rl_u8 *codes, const rl_u8 *scales, \
      int n_rows, int n_cols, int n_groups, int blocks, int segment, int parts
#define LINEAR {out_bf16, out_f32, finite, x, codes, scales, n_rows, n_cols, n_groups, blocks, segment}

RL_KERNEL(kThreads) e4m3_few(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_few<WeightE4m3>(lds, LINEAR, parts);
}
RL_EXPORT(e4m3_few)

RL_KERNEL(kThreads) bf16_few(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_few<WeightBf16>(lds, LINEAR, parts);
}
RL_EXPORT(bf16_few)

RL_KERNEL(kThreads) e4m3_64(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightE4m3, 64>(lds, LINEAR, parts);
}
RL_EXPORT(e4m3_64)

RL_KERNEL(kThreads) bf16_64(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightBf16, 64>(lds, LINEAR, parts);
}
RL_EXPORT(bf16_64)

RL_KERNEL_LARGE(kThreads) e4m3_128(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightE4m3, 128>(lds, LINEAR, parts);
}
RL_EXPORT(e4m3_128)

RL_KERNEL_LARGE(kThreads) bf16_128(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightBf16, 128>(lds, LINEAR, parts);
}
RL_EXPORT(bf16_128)

RL_KERNEL(kThreads) linear_sum(rl_u16* out_bf16, float* out_f32, rl_u8* finite,
                               const float* sums,  // [parts, R, width]
                               int n_rows, int width, int parts) {
  const rl_i64 i = (rl_i64)rl_bid_x() * kThreads + rl_tid(), n = (rl_i64)n_rows * width;
  if (i >= n) return;
  float total = 0.0f;
  for (int part = 0; part < parts; ++part) total += sums[part * n + i];
  if (out_bf16) out_bf16[i] = rl::f32_to_bf16(total);
  else out_f32[i] = total;
  if (finite && (rl::as_int(total) & 0x7F800000) == 0x7F800000) finite[i / width] = 0;
}
RL_EXPORT(linear_sum)

// ---- weights into tiles ----

RL_KERNEL(kThreads) prepare_e4m3(rl_u8* to_codes, rl_u8* to_scales, const rl_u8* codes,  // [G * N, K]
                                 const rl_u8* scales,                                   // [ceil(G * N / 32), K/32]
                                 int n_cols, int n_groups, int blocks) {
  const TileLane at = tile_lane(kThreads, n_cols, blocks);
  if (at.group >= n_groups) return;
  rl_u32 words[4] = {};
#pragma unroll
  for (int i = 0; i < kLaneCodes; ++i) {
    const int col = rl::tile_col(at.lane, i), channel = at.channel0 + rl::tile_channel(at.lane, i);
    if (at.col0 + col >= n_cols) continue;
    const rl_u32 code = codes[(at.row + col) * blocks * kStep + channel];
    // The first pair of a word in the upper bytes of its halves.
    words[i / 4] |= code << (i % 2 * 16 + (i / 2 % 2 ? 0 : 8));
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) ((rl_u32*)(to_codes + at.tile * 512 + at.lane * 16))[j] = words[j];
  if (at.lane < 2) {
    const rl_i64 row = at.row + at.lane * 8;
    const bool real = at.col0 + at.lane * 8 < n_cols;
    to_scales[at.tile * 2 + at.lane] = real ? scales[row / 32 * blocks + at.channel0 / kStep] : (rl_u8)127;
  }
}
RL_EXPORT(prepare_e4m3)

RL_KERNEL(kThreads) prepare_bf16(rl_u8* to_codes, const rl_u16* weight,  // [G * N, K]
                                 int n_cols, int n_groups, int blocks) {
  const TileLane at = tile_lane(kThreads, n_cols, blocks);
  if (at.group >= n_groups) return;
  rl_u16* to = (rl_u16*)(to_codes + at.tile * 1024 + at.lane * 32);
#pragma unroll
  for (int i = 0; i < kLaneCodes; ++i) {
    const int col = rl::tile_col(at.lane, i), channel = at.channel0 + rl::tile_channel(at.lane, i);
    to[i] = at.col0 + col < n_cols ? weight[(at.row + col) * blocks * kStep + channel] : (rl_u16)0;
  }
}
RL_EXPORT(prepare_bf16)
