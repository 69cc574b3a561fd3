// Linear layers and what prepares their weights (linear_hip.py). FP8 weights (e4m3) take rows through ActQuant8 as BF16
// numbers, BF16 ones any rows.
//
//   *_few           at most 16 rows. Grid (G * ceil(tiles / own tiles), 1); a wave has one or two tiles of 16 columns
//                   and one of S segments, a workgroup 8 / S times as many
//   e4m3_few_round  the same, of rows that have not been through ActQuant8
//   *_64, *_128     so many rows a workgroup. Grid (ceil(R / 64 or 128), G * ceil(N / 128) * parts)
//   linear_sum      adds the segments where `parts` workgroups had one each. Grid (ceil(R * G * N / 256), 1)
//   prepare_*       codes into tiles. Grid (ceil(lanes of all tiles / 256), 1)
//
// 256 threads = 8 waves each; LDS FEW_LDS_BYTES, tiled_lds_bytes() of the binding. Columns come in G groups of N, each
// with channels of its own (backbone.md section 5.6); G = 1 is the plain linear. Two products of the same rows share a
// launch: the second one's workgroups follow the first one's, along x of *_few and linear_sum, along y of the others.
//
// Budget on gfx1100: e4m3_few: 168 VGPRs, 16384 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: e4m3_few_round: 168 VGPRs, 51456 bytes of LDS, 4 waves per SIMD, no scratch.
// Budget on gfx1100: bf16_few: 112 VGPRs, 16384 bytes of LDS, 12 waves per SIMD, no scratch.
// Budget on gfx1100: e4m3_64: 112 VGPRs, 20480 bytes of LDS, 12 waves per SIMD, no scratch.
// Budget on gfx1100: bf16_64: 120 VGPRs, 20480 bytes of LDS, 12 waves per SIMD, no scratch.
// Budget on gfx1100: e4m3_128: 184 VGPRs, 30720 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: bf16_128: 184 VGPRs, 30720 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: linear_sum: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: prepare_e4m3: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: prepare_bf16: 16 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "few_product.hip.h"
#include "finish.hip.h"
#include "wmma_gemm.hip.h"

constexpr int kThreads = 256;

struct Product {  // of the rows with one weight
  rl_u16* out_bf16;  // [R, G, N], or
  float* out_f32;    // [R, G, N], or [parts, R, G, N] of segments
  const rl_u8* codes;
  const rl_u8* scales;
  int n_cols;
  int segment;  // its blocks of 32 channels
  int parts;    // waves, or workgroups, that have a segment each
};
struct Linear {
  const rl_u16* x;  // [R, G, K]
  rl_u8* finite;    // [R], 0 is written where an output is no number; or null
  int n_rows, n_groups, blocks;
  Product p;
  Finish finish;

  RL_DEV void put(const Linear& a, rl_i64 row, int group, int col, rl_i64 part, float v) {
    const rl_i64 width = (rl_i64)a.n_groups * a.p.n_cols, at = row * width + (rl_i64)group * a.p.n_cols + col;
    if (a.p.out_bf16) a.p.out_bf16[at] = rl::f32_to_bf16(v);
    else a.p.out_f32[part * a.n_rows * width + at] = v;
    if (a.finite && (rl::as_int(v) & 0x7F800000) == 0x7F800000) a.finite[row] = 0;
  }
};

// The workgroup's product, of the two that share a launch, and its place in the grid of that one alone.
RL_DEV int choose(Linear& a, const Product& second, int place, int n_first) {
  if (place < n_first) return place;
  a.p = second;
  a.finish = Finish{};
  return place - n_first;
}

template <class T> RL_DEV void put_tile(const Linear& a, const T& t, int row0, int group, int col0, int part) {
#pragma unroll
  for (int m = 0; m < T::kMFrags; ++m)
#pragma unroll
    for (int n = 0; n < T::kNFrags; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = T::frag_row(m) + T::acc_row(i), col = col0 + T::frag_col(n) + T::acc_col(i);
        if (row < t.n_rows && col < a.p.n_cols) Linear::put(a, row0 + row, group, col, part, t.total[m][n].v[i]);
      }
}

// By way of LDS, where what was staged is not needed any more: a thread gets eight channels of a row.
template <class T> RL_DEV void finish_tile(const Linear& a, const T& t, int row0, int group, int col0) {
  constexpr int kPassRows = 64, kWidth = kCols + 8;
  static_assert(kPassRows * kWidth <= 2 * T::kRows * kStride + kWaves * kOwnElements, "as much as there is");
#pragma unroll
  for (int pass = 0; pass < T::kRows / kPassRows; ++pass) {
    rl_sync();
#pragma unroll
    for (int m = 0; m < T::kMFrags; ++m) {
      if (T::frag_row(m) / kPassRows != pass) continue;
#pragma unroll
      for (int n = 0; n < T::kNFrags; ++n)
        rl::store_tile(t.lds + T::frag_row(m) % kPassRows * kWidth + T::frag_col(n), kWidth, t.total[m][n]);
    }
    rl_sync();
    for (int i = rl_tid(); i < kPassRows * kCols / kPiece; i += kThreads) {
      const int in_pass = i / (kCols / kPiece), at = i % (kCols / kPiece) * kPiece;
      const int row = row0 + pass * kPassRows + in_pass, col = col0 + at;
      const bool real = row < a.n_rows && col < a.p.n_cols;
      const rl::Words4 sums = load_words(t.lds + in_pass * kWidth + at);
      const rl::Words4 words = Finish::any(a.finish) ? finish_words(a.finish, sums, real ? row : 0, col) : sums;
      const rl_i64 width = (rl_i64)a.n_groups * a.p.n_cols;
      if (real) store_words(a.p.out_bf16 + row * width + (rl_i64)group * a.p.n_cols + col, words);
    }
  }
}

template <class W, int kRows> RL_DEV void linear_tiled(rl_u16* lds, Linear a, const Product& second) {
  typedef Tiled<W, kRows> T;
  const int n_first = a.n_groups * ((a.p.n_cols + kCols - 1) / kCols) * a.p.parts;
  const int place = choose(a, second, rl_bid_y(), n_first);
  const int tiles = (a.p.n_cols + kTile - 1) / kTile, col_blocks = (a.p.n_cols + kCols - 1) / kCols;
  const int parts = a.p.parts, part = place % parts, group = place / parts / col_blocks;
  const int col0 = place / parts % col_blocks * kCols, row0 = rl_bid_x() * kRows;
  T t;
  t.lds = lds;
#pragma unroll
  for (int n = 0; n < T::kNFrags; ++n)
    t.weight[n] = W::at({a.p.codes, a.p.scales},
                        ((rl_i64)group * tiles + smaller((col0 + T::frag_col(n)) / kTile, tiles - 1)) * a.blocks);
  t.n_rows = smaller(a.n_rows - row0, kRows);
  t.x = a.x + (rl_i64)row0 * a.n_groups * a.blocks * kStep;
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j) {
    const int row = smaller(T::row_of_piece(j), t.n_rows - 1);
    t.piece_bytes[j] = 2u * ((row * a.n_groups + group) * a.blocks * kStep + T::channel_of_piece());
  }
  const int segment = a.p.segment;
  run(t, part * segment, parts > 1 ? smaller((part + 1) * segment, a.blocks) : a.blocks, segment);
  const bool by_rows = rl::kWeightFirst && a.p.out_bf16 && !a.finite && a.p.n_cols % kPiece == 0;
  if (by_rows || Finish::touches(a.finish, col0, kCols)) finish_tile(a, t, row0, group, col0);
  else put_tile(a, t, row0, group, col0, part);
}

constexpr int kStagedPad = 8;  // channels behind a row

// The group's rows through ActQuant8 into LDS: once for all columns of the workgroup.
RL_DEV void stage_rounded(rl_u16* staged, const Linear& a, int group) {
  constexpr int kBatch = 4;  // on their way together
  const int row_pieces = a.blocks * (kStep / kPiece), n = a.n_rows * row_pieces;
  for (int start = 0; start < n; start += kBatch * kThreads) {  // all of a wave go round as often
    rl::Words4 words[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = smaller(start + j * kThreads + rl_tid(), n - 1), row = i / row_pieces;
      words[j] = load_words(a.x + ((rl_i64)(row * a.n_groups + group) * row_pieces + i % row_pieces) * kPiece);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = start + j * kThreads + rl_tid(), row = i / row_pieces;
      const rl::Words4 rounded = round_words(words[j]);
      rl_u16* to = staged + row * (row_pieces * kPiece + kStagedPad) + i % row_pieces * kPiece;
      if (i < n) store_words(to, rounded);
    }
  }
  rl_sync();
}

// Columns tile0 * 16 on, of group `group`; a wave has kTiles tiles of them, and the waves of a tile a segment each.
template <class R, class W, int kTiles, bool kRounds>
RL_DEV void few_columns(rl_u16* lds, const Linear& a, int group, int tile0) {
  const int waves_a_tile = a.p.parts, tiles = (a.p.n_cols + kTile - 1) / kTile;
  const int first = rl::wave() % waves_a_tile * a.p.segment;
  FewStream<W, kTiles, R> stream;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int tile = smaller(tile0 + rl::wave() / waves_a_tile * kTiles + t, tiles - 1);
    stream.weight[t] = W::at({a.p.codes, a.p.scales}, ((rl_i64)group * tiles + tile) * a.blocks + first);
  }
  rl_u16* staged = lds + kWaves * kOwnElements;
  if (kRounds) stage_rounded(staged, a, group);
  const int width = a.blocks * kStep;
  stream.x = (kRounds ? staged : a.x + group * width) + first * kStep;
#pragma unroll
  for (int i = 0; i < R::kOwn; ++i)
    stream.row_bytes[i] =
        2u * smaller(R::own_row(i), a.n_rows - 1) * (kRounds ? width + kStagedPad : a.n_groups * width);
  typename R::Sums acc[kTiles];
  // As far as registers reach.
  constexpr int kAhead = kTiles > 1 ? W::kAhead : R::kMost == 8 ? 2 * W::kAhead : W::kAhead < 3 ? 3 : W::kAhead;
  few_product<W, kTiles, kAhead>(acc, lds + rl::wave() * kOwnElements, stream,
                                 smaller(a.p.segment, a.blocks - first));
  float* sums = (float*)lds;
  leave_sums<R>(sums, acc);
  constexpr int kOwnCols = kTiles * kTile;  // neighbouring ones, of the waves that share them
  for (int i = rl_tid(); i < kWaves / waves_a_tile * kOwnCols * kTile; i += kThreads) {
    const int own = i / (kOwnCols * kTile), row = i / kOwnCols % kTile, at = i % kOwnCols;
    if (row >= a.n_rows) continue;
    const int col = tile0 * kTile + own * kOwnCols + at, element = row * kTile + at % kTile;
    float v = over_segments<kTiles>(sums, own * waves_a_tile, waves_a_tile, at / kTile, element);
    if (kOwnCols == 32 && Finish::touches(a.finish, col - at, 32)) v = finish_lane(a.finish, v, row, col);
    if (col < a.p.n_cols) Linear::put(a, row, group, col, 0, v);
  }
}

template <class R, class W, bool kRounds>
RL_DEV void few_columns(rl_u16* lds, const Linear& a, int group, int tile0, int wave_tiles) {
  if (wave_tiles == 1) few_columns<R, W, 1, kRounds>(lds, a, group, tile0);
  else few_columns<R, W, 2, kRounds>(lds, a, group, tile0);
}

template <class W, bool kRounds = false>
RL_DEV void linear_few(rl_u16* lds, Linear a, const Product& second, int wave_tiles) {
  const auto own_tiles = [&](const Product& p) { return kWaves / p.parts * wave_tiles; };
  const auto workgroups = [&](const Product& p) {  // of a group
    return ((p.n_cols + kTile - 1) / kTile + own_tiles(p) - 1) / own_tiles(p);
  };
  const int place = choose(a, second, rl_bid_x(), a.n_groups * workgroups(a.p)), wide = workgroups(a.p);
  const int group = place / wide, tile0 = place % wide * own_tiles(a.p);
  if (rl::EightRows::serve(a.n_rows)) few_columns<rl::EightRows, W, kRounds>(lds, a, group, tile0, wave_tiles);
  else few_columns<rl::SixteenRows, W, kRounds>(lds, a, group, tile0, wave_tiles);
}

#define LINEAR_ARGUMENTS                                                                                             \
  const rl_u16 *x, rl_u8 *finite, int n_rows, int n_groups, int blocks, int wave_tiles, rl_u16 *out_bf16,            \
      float *out_f32, const rl_u8 *codes, const rl_u8 *scales, int n_cols, int segment, int parts,                    \
      const float *cosines, const float *sines, int head_width, int turned, int rounds, rl_u16 *out2_bf16,            \
      float *out2_f32, const rl_u8 *codes2, const rl_u8 *scales2, int n_cols2, int segment2, int parts2
#define LINEAR                                                                            \
  {x, finite, n_rows, n_groups, blocks,                                                   \
   {out_bf16, out_f32, codes, scales, n_cols, segment, parts},                            \
   {cosines, sines, head_width, turned, rounds}},                                         \
      {out2_bf16, out2_f32, codes2, scales2, n_cols2, segment2, parts2}

RL_KERNEL(kThreads) e4m3_few(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_few<WeightE4m3>(lds, LINEAR, wave_tiles);
}
RL_EXPORT(e4m3_few)

RL_KERNEL(kThreads) e4m3_few_round(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_few<WeightE4m3, true>(lds, LINEAR, wave_tiles);
}
RL_EXPORT(e4m3_few_round)

RL_KERNEL(kThreads) bf16_few(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_few<WeightBf16>(lds, LINEAR, wave_tiles);
}
RL_EXPORT(bf16_few)

RL_KERNEL(kThreads) e4m3_64(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightE4m3, 64>(lds, LINEAR);
}
RL_EXPORT(e4m3_64)

RL_KERNEL(kThreads) bf16_64(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightBf16, 64>(lds, LINEAR);
}
RL_EXPORT(bf16_64)

#if defined(RL_CUDA)
// Launches ask for what gfx1100 needs; the test double gives as much as this says, where that is more than 64 KiB.
extern "C" __device__ int e4m3_128_lds_bytes = kTotalBytes<Tiled<WeightE4m3, 128>> + 512;
#endif
RL_KERNEL(kThreads) e4m3_128(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightE4m3, 128>(lds, LINEAR);
}
RL_EXPORT(e4m3_128)

RL_KERNEL_LARGE(kThreads) bf16_128(LINEAR_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  linear_tiled<WeightBf16, 128>(lds, LINEAR);
}
RL_EXPORT(bf16_128)

// Of one product or of two; parts is 0 where there is no second.
RL_KERNEL(kThreads) linear_sum(rl_u8* finite, int n_rows, rl_u16* out_bf16, float* out_f32,
                               const float* sums,  // [parts, R, width]
                               int width, int parts, const float* cosines, const float* sines, int head_width,
                               int turned, int rounds, rl_u16* out2_bf16, float* out2_f32, const float* sums2,
                               int width2, int parts2) {
  const rl_i64 n_first = ((rl_i64)n_rows * width + kThreads - 1) / kThreads;
  Finish finish = {cosines, sines, head_width, turned, rounds};
  rl_i64 i = (rl_i64)rl_bid_x() * kThreads + rl_tid();
  if (rl_bid_x() >= n_first) {
    out_bf16 = out2_bf16, out_f32 = out2_f32, sums = sums2, width = width2, parts = parts2;
    finish = Finish{};
    i -= n_first * kThreads;
  }
  const rl_i64 n = (rl_i64)n_rows * width;
  if (i >= n) return;  // whole waves where there is something to finish
  float total = 0.0f;
  for (int part = 0; part < parts; ++part) total += sums[part * n + i];
  if (Finish::any(finish)) total = finish_lane(finish, total, (int)(i / width), (int)(i % width));
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
    rl::e4m3_put(words, i, code);
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
