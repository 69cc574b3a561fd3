// Routed FP4 experts and the shared FP8 one (experts_hip.py; backbone.md section 10).
//
//   expert_sort        (row, choice) pairs by expert, and the tiles of rows that the matrix kernels take. Grid (1, 1)
//   *_up_few, _64      gate and up, clamp and SiLU, the routing weight, ActQuant8. Grid (ceil(I / 64), tiles)
//   routed_down_*      Grid (ceil(D / 128), tiles)
//   expert_sum         outputs of a row's experts by ascending id, the shared one last. Grid (ceil(D / 2048), R)
//   prepare_e2m1       FP4 codes into tiles. Grid (ceil(lanes of all tiles / 256), 1)
//
// 256 threads = 8 waves, expert_sort 1,024; LDS as the binding says. A tile of rows has one expert: at most 16 rows
// (few) or 64. What is done for a row depends on nothing but that row, wherever it was sorted to.
//
// Budget on gfx1100: expert_sort: 24 VGPRs, 52488 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: routed_up_few: 152 VGPRs, 16384 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: routed_down_few: 152 VGPRs, 16384 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: shared_up_few: 168 VGPRs, 16384 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: routed_up_64: 128 VGPRs, 20480 bytes of LDS, 10 waves per SIMD, no scratch.
// Budget on gfx1100: routed_down_64: 128 VGPRs, 20480 bytes of LDS, 10 waves per SIMD, no scratch.
// Budget on gfx1100: shared_up_64: 128 VGPRs, 20480 bytes of LDS, 10 waves per SIMD, no scratch.
// Budget on gfx1100: expert_sum: 40 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: prepare_e2m1: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "act_terms.hip.h"
#include "explog.hip.h"
#include "wmma_gemm.hip.h"

constexpr int kThreads = 256;
constexpr int kFewSegments = 2;

// ---- rows by expert: a counting sort, stable, so that every run gives the same order ----

constexpr int kSortThreads = 1024, kSortWaves = kSortThreads / 32;

struct Pair {
  int expert;       // n_experts where there is no pair
  rl_u32 same;      // lanes with the same one
  RL_DEV bool leads(const Pair& p) { return (p.same & ((1u << rl::lane()) - 1)) == 0; }
};
RL_DEV Pair read_pair(const int* ids, int at, int n_pairs, int n_experts) {
  Pair p = {at < n_pairs ? ids[at] : n_experts, ~0u};
  for (int bit = 0; (n_experts >> bit) != 0; ++bit) {
    const bool set = (p.expert >> bit & 1) != 0;
    const rl_u32 lanes = rl::ballot(set);
    p.same &= set ? lanes : ~lanes;
  }
  return p;
}

// Exclusive over the threads; sums: 32 ints.
RL_DEV int sum_before(int v, int* sums) {
  int upto = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = rl::shfl(upto, (rl::lane() - d) & 31);
    if (rl::lane() >= d) upto += other;
  }
  if (rl::lane() == 31) sums[rl::wave()] = upto;
  rl_sync();
  int lower = 0;
  for (int w = 0; w < rl::wave(); ++w) lower += sums[w];
  rl_sync();
  return lower + upto - v;
}

RL_KERNEL(kSortThreads) expert_sort(int* pairs,      // [n] sorted: pair p is choice p % k of row p / k
                                    int* tiles,      // [most_tiles, 4] expert, first in pairs, rows, 0; no rows: none
                                    const int* ids,  // [n]
                                    int n_pairs, int n_experts, int tile_rows, int most_tiles) {
  RL_DYN_SHARED(int, counts);  // [wave][n_experts + 1] of the wave's pairs; then where its next one goes
  const int row = n_experts + 1;
  int* first_pair = counts + kSortWaves * row;  // [n_experts + 1]
  int* first_tile = first_pair + row;           // [n_experts + 1]
  int* sums = first_tile + row;                 // [32]
  for (int i = rl_tid(); i < kSortWaves * row; i += kSortThreads) counts[i] = 0;
  rl_sync();

  int* own = counts + rl::wave() * row;
  const int chunk = (n_pairs + kSortThreads - 1) / kSortThreads * 32, start = rl::wave() * chunk;
  for (int i = 0; i < chunk; i += 32) {
    const Pair p = read_pair(ids, start + i + rl::lane(), n_pairs, n_experts);
    if (Pair::leads(p)) own[p.expert] += rl::popcount(p.same);
    rl_wave_sync();
  }
  rl_sync();

  const int expert = rl_tid();
  int total = 0;
  if (expert < n_experts)
    for (int w = 0; w < kSortWaves; ++w) {
      const int of_wave = counts[w * row + expert];
      counts[w * row + expert] = total;
      total += of_wave;
    }
  const int own_tiles = (total + tile_rows - 1) / tile_rows;
  const int pairs_before = sum_before(total, sums), tiles_before = sum_before(own_tiles, sums);
  if (expert <= n_experts) {
    first_pair[expert] = pairs_before;
    first_tile[expert] = tiles_before;
  }
  rl_sync();

  for (int i = 0; i < chunk; i += 32) {
    const int at = start + i + rl::lane();
    const Pair p = read_pair(ids, at, n_pairs, n_experts);
    const int before = own[p.expert];
    if (at < n_pairs) pairs[first_pair[p.expert] + before + rl::rank(p.same)] = at;
    rl_wave_sync();
    if (Pair::leads(p)) own[p.expert] = before + rl::popcount(p.same);
    rl_wave_sync();
  }
  for (int t = rl_tid(); t < most_tiles; t += kSortThreads) {
    int low = 0, high = n_experts;  // the last expert whose first tile is at most t
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile[middle] <= t) low = middle;
      else high = middle;
    }
    const int first = first_pair[low] + (t - first_tile[low]) * tile_rows;
    const int left = t < first_tile[n_experts] ? first_pair[low + 1] - first : 0;
    tiles[4 * t] = low;
    tiles[4 * t + 1] = first;
    tiles[4 * t + 2] = smaller(left, tile_rows);
    tiles[4 * t + 3] = 0;
  }
}
RL_EXPORT(expert_sort)

// ---- matrix kernels ----

struct RowTile {
  int expert, first, n_rows;
};
// Without a table rows are in order, all of expert 0.
RL_DEV RowTile row_tile(const int* tiles, int n_rows, int tile_rows) {
  const int t = rl_bid_y();
  if (!tiles) return {0, t * tile_rows, smaller(n_rows - t * tile_rows, tile_rows)};
  return {rl::uniform(tiles[4 * t]), rl::uniform(tiles[4 * t + 1]), rl::uniform(tiles[4 * t + 2])};
}

struct Up {
  rl_u16* hidden;        // [n, I], rows as sorted, through ActQuant8
  const rl_u16* x;       // [R, D] through ActQuant8
  const rl_u8* gate;     // tiles of [E, I, D]
  const rl_u8* gate_scales;
  const rl_u8* up;
  const rl_u8* up_scales;
  const int* tiles;      // [T, 4] of expert_sort, or null
  const int* pairs;      // [n], or null
  const float* weights;  // [n] by pair, or null
  int n_rows, n_inner, blocks, segment, k;
  float limit;
};

// Eight channels of one row: gate and up already rounded to BF16.
RL_DEV void put_hidden(const Up& a, const RowTile& tile, int row, int col, const Piece& gate, const Piece& up) {
  const bool real = row < tile.n_rows && col < a.n_inner;
  const int sorted = tile.first + (real ? row : 0);
  const float weight = a.weights ? a.weights[a.pairs[sorted]] : 1.0f;
  Piece hidden;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) {
    const float g = gate.v[i] > a.limit ? a.limit : gate.v[i];  // a NaN stays
    const float u = up.v[i] > a.limit ? a.limit : up.v[i] < -a.limit ? -a.limit : up.v[i];
    const float h = g * rl::sigmoid(g) * u;
    hidden.v[i] = rl::round_bf16(a.weights ? h * weight : h);
  }
  const rl::Words4 words = act_round(hidden);  // lanes of a group act together, all of it there or none
  if (real) store_words(a.hidden + (rl_i64)sorted * a.n_inner + col, words);
}

template <class W> RL_DEV void up_64(rl_u16* lds, const Up& a) {
  typedef Tiled<W, 64> T;
  const RowTile tile = row_tile(a.tiles, a.n_rows, T::kRows);
  if (tile.n_rows <= 0) return;
  const int cols = kCols / 2, col0 = rl_bid_x() * cols, col_tiles = (a.n_inner + kTile - 1) / kTile;
  static_assert(T::kNFrags == 1, "a wave has gate or up");
  const bool is_up = T::frag_col(0) >= cols;
  T t;
  t.lds = lds;
  const W weight = {is_up ? a.up : a.gate, is_up ? a.up_scales : a.gate_scales};
  const int col_tile = smaller((col0 + T::frag_col(0) % cols) / kTile, col_tiles - 1);
  t.weight[0] = W::at(weight, ((rl_i64)tile.expert * col_tiles + col_tile) * a.blocks);
  t.n_rows = tile.n_rows;
  t.x = a.x;
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j) {
    const int sorted = tile.first + smaller(T::row_of_piece(j), tile.n_rows - 1);
    const int row = a.pairs ? a.pairs[sorted] / a.k : sorted;
    t.piece_bytes[j] = 2u * ((rl_u32)row * a.blocks * kStep + T::channel_of_piece());
  }
  run(t, 0, a.blocks, a.segment);

  constexpr int kWidth = kCols + 8;
  static_assert(T::kRows * kWidth <= 2 * T::kRows * kStride + kWaves * kOwnElements, "outputs replace what was staged");
#pragma unroll
  for (int m = 0; m < T::kMFrags; ++m)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      lds[(T::frag_row(m) + rl::acc_row(i)) * kWidth + T::frag_col(0) + rl::acc_col(i)] =
          rl::f32_to_bf16(t.total[m][0].v[i]);
  rl_sync();
  for (int i = rl_tid(); i < T::kRows * cols / kPiece; i += T::kThreads) {
    const int row = i / (cols / kPiece), col = i % (cols / kPiece) * kPiece;
    const rl_u16* from = lds + row * kWidth + col;
    put_hidden(a, tile, row, col0 + col, load_piece(from), load_piece(from + cols));
  }
}

template <class W> RL_DEV void up_few(rl_u16* lds, const Up& a) {
  const RowTile tile = row_tile(a.tiles, a.n_rows, kFewRows);
  if (tile.n_rows <= 0) return;
  // A wave has gate and up of one tile of columns, and one of the segments.
  constexpr int kUpCols = kWaves / kFewSegments * kTile;
  const int col0 = rl_bid_x() * kUpCols, col_tiles = (a.n_inner + kTile - 1) / kTile;
  const int col_tile = smaller(col0 / kTile + rl::wave() / kFewSegments, col_tiles - 1);
  const int first = rl::wave() % kFewSegments * a.segment, last = smaller(first + a.segment, a.blocks);
  const rl_i64 at = ((rl_i64)tile.expert * col_tiles + col_tile) * a.blocks;
  const W weight[kFewTiles] = {W::at({a.gate, a.gate_scales}, at), W::at({a.up, a.up_scales}, at)};
  const rl_u16* rows[rl::kFragRows];
#pragma unroll
  for (int i = 0; i < rl::kFragRows; ++i) {
    const int sorted = tile.first + smaller(rl::frag_row(i), tile.n_rows - 1);
    rows[i] = a.x + (rl_i64)(a.pairs ? a.pairs[sorted] / a.k : sorted) * a.blocks * kStep;
  }
  rl::AccF32 acc[kFewTiles];
  few_rows(acc, lds + rl::wave() * kOwnElements, weight, first, last, rows);
  float* sums = (float*)lds;
  put_sums(sums, acc);
  constexpr int kRowPieces = kUpCols / kPiece;
  const int row = rl_tid() / kRowPieces, col = rl_tid() % kRowPieces * kPiece;
  if (row >= kFewRows) return;
  Piece piece[kFewTiles];
#pragma unroll
  for (int t = 0; t < kFewTiles; ++t)
#pragma unroll
    for (int i = 0; i < kPiece; ++i) {
      const int wave = (col + i) / kTile * kFewSegments, element = row * kTile + (col + i) % kTile;
      piece[t].v[i] = rl::round_bf16(sum_segments(sums, wave, kFewSegments, t, element));
    }
  put_hidden(a, tile, row, col0 + col, piece[0], piece[1]);
}

struct Down {
  rl_u16* out;           // [n, D] by pair
  const rl_u16* hidden;  // [n, I], rows as sorted
  const rl_u8* codes;    // tiles of [E, D, I]
  const rl_u8* scales;
  const int* tiles;
  const int* pairs;
  int n_out, blocks, segment;
};

RL_DEV void down_64(rl_u16* lds, const Down& a) {
  typedef Tiled<WeightE2m1, 64> T;
  const RowTile tile = row_tile(a.tiles, 0, T::kRows);
  if (tile.n_rows <= 0) return;
  const int col0 = rl_bid_x() * kCols, col_tiles = (a.n_out + kTile - 1) / kTile;
  T t;
  t.lds = lds;
  const int col_tile = smaller((col0 + T::frag_col(0)) / kTile, col_tiles - 1);
  t.weight[0] = WeightE2m1::at({a.codes, a.scales}, ((rl_i64)tile.expert * col_tiles + col_tile) * a.blocks);
  t.n_rows = tile.n_rows;
  t.x = a.hidden + (rl_i64)tile.first * a.blocks * kStep;
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j) {
    const int row = smaller(T::row_of_piece(j), tile.n_rows - 1);
    t.piece_bytes[j] = 2u * (row * a.blocks * kStep + T::channel_of_piece());
  }
  run(t, 0, a.blocks, a.segment);
#pragma unroll
  for (int m = 0; m < T::kMFrags; ++m)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = T::frag_row(m) + rl::acc_row(i), col = col0 + T::frag_col(0) + rl::acc_col(i);
      if (row < tile.n_rows && col < a.n_out)
        a.out[(rl_i64)a.pairs[tile.first + row] * a.n_out + col] = rl::f32_to_bf16(t.total[m][0].v[i]);
    }
}

RL_DEV void down_few(rl_u16* lds, const Down& a) {
  const RowTile tile = row_tile(a.tiles, 0, kFewRows);
  if (tile.n_rows <= 0) return;
  constexpr int kTiles = kWaves / kFewSegments * kFewTiles;
  const int col0 = rl_bid_x() * (kTiles * kTile), col_tiles = (a.n_out + kTile - 1) / kTile;
  const int first = rl::wave() % kFewSegments * a.segment, last = smaller(first + a.segment, a.blocks);
  WeightE2m1 weight[kFewTiles];
#pragma unroll
  for (int t = 0; t < kFewTiles; ++t) {
    const int col_tile = smaller(col0 / kTile + rl::wave() / kFewSegments * kFewTiles + t, col_tiles - 1);
    weight[t] = WeightE2m1::at({a.codes, a.scales}, ((rl_i64)tile.expert * col_tiles + col_tile) * a.blocks);
  }
  const rl_u16* rows[rl::kFragRows];
#pragma unroll
  for (int i = 0; i < rl::kFragRows; ++i)
    rows[i] = a.hidden + (rl_i64)(tile.first + smaller(rl::frag_row(i), tile.n_rows - 1)) * a.blocks * kStep;
  rl::AccF32 acc[kFewTiles];
  few_rows(acc, lds + rl::wave() * kOwnElements, weight, first, last, rows);
  float* sums = (float*)lds;
  put_sums(sums, acc);
  for (int i = rl_tid(); i < kTiles * kTile * kTile; i += kThreads) {
    const int own = i / (kTile * kTile), row = i / kTile % kTile, col = col0 + own * kTile + i % kTile;
    if (row >= tile.n_rows || col >= a.n_out) continue;
    const int wave = own / kFewTiles * kFewSegments, element = i % (kTile * kTile);
    a.out[(rl_i64)a.pairs[tile.first + row] * a.n_out + col] =
        rl::f32_to_bf16(sum_segments(sums, wave, kFewSegments, own % kFewTiles, element));
  }
}

#define UP_ARGUMENTS                                                                                           \
  rl_u16 *hidden, const rl_u16 *x, const rl_u8 *gate, const rl_u8 *gate_scales, const rl_u8 *up,              \
      const rl_u8 *up_scales, const int *tiles, const int *pairs, const float *weights, int n_rows, int n_inner, \
      int blocks, int segment, int k, float limit
#define UP \
  {hidden, x, gate, gate_scales, up, up_scales, tiles, pairs, weights, n_rows, n_inner, blocks, segment, k, limit}
#define DOWN_ARGUMENTS                                                                                         \
  rl_u16 *out, const rl_u16 *hidden, const rl_u8 *codes, const rl_u8 *scales, const int *tiles, const int *pairs, \
      int n_out, int blocks, int segment
#define DOWN {out, hidden, codes, scales, tiles, pairs, n_out, blocks, segment}

RL_KERNEL(kThreads) routed_up_few(UP_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  up_few<WeightE2m1>(lds, UP);
}
RL_EXPORT(routed_up_few)

RL_KERNEL(kThreads) routed_up_64(UP_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  up_64<WeightE2m1>(lds, UP);
}
RL_EXPORT(routed_up_64)

RL_KERNEL(kThreads) shared_up_few(UP_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  up_few<WeightE4m3>(lds, UP);
}
RL_EXPORT(shared_up_few)

RL_KERNEL(kThreads) shared_up_64(UP_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  up_64<WeightE4m3>(lds, UP);
}
RL_EXPORT(shared_up_64)

RL_KERNEL(kThreads) routed_down_few(DOWN_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  down_few(lds, DOWN);
}
RL_EXPORT(routed_down_few)

RL_KERNEL(kThreads) routed_down_64(DOWN_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  down_64(lds, DOWN);
}
RL_EXPORT(routed_down_64)

RL_KERNEL(kThreads) expert_sum(rl_u16* out,           // [R, D]
                               const rl_u16* routed,  // [R, k, D]
                               const rl_u16* shared,  // [R, D]
                               const int* ids,        // [R, k] distinct in a row
                               int width, int k) {
  const rl_i64 row = rl_bid_y();
  const int channel = (rl_bid_x() * kThreads + rl_tid()) * kPiece;
  if (channel >= width) return;
  Piece total = {};
  for (int done = 0, last = -1; done < k; ++done) {
    int next = 0x7FFFFFFF, at = 0;
    for (int j = 0; j < k; ++j) {
      const int id = rl::uniform(ids[row * k + j]);
      if (id > last && id < next) {
        next = id;
        at = j;
      }
    }
    last = next;
    const Piece p = load_piece(routed + (row * k + at) * width + channel);
#pragma unroll
    for (int i = 0; i < kPiece; ++i) total.v[i] += p.v[i];
  }
  const Piece p = load_piece(shared + row * width + channel);
#pragma unroll
  for (int i = 0; i < kPiece; ++i) total.v[i] += p.v[i];
  store_words(out + row * width + channel, pack(total));
}
RL_EXPORT(expert_sum)

RL_KERNEL(kThreads) prepare_e2m1(rl_u8* to_codes, rl_u8* to_scales, const rl_u8* codes,  // [E, N, K/2]
                                 const rl_u8* scales,                                   // [E, N, K/32]
                                 int n_cols, int n_groups, int blocks) {
  const TileLane at = tile_lane(kThreads, n_cols, blocks);
  if (at.group >= n_groups) return;
  rl_u32 words[2] = {};
#pragma unroll
  for (int i = 0; i < kLaneCodes; ++i) {
    const int col = rl::tile_col(at.lane, i), channel = at.channel0 + rl::tile_channel(at.lane, i);
    if (at.col0 + col >= n_cols) continue;
    const rl_u32 code = codes[((at.row + col) * blocks * kStep + channel) / 2] >> (channel % 2 * 4) & 15;
    // Pairs from the top of the word's halves downwards.
    words[i / 8] |= code << (i % 2 * 16 + 12 - i / 2 % 4 * 4);
  }
  const rl::Words2 both = {{(int)words[0], (int)words[1]}};
  *(rl::Words2*)(to_codes + at.tile * WeightE2m1::kTileBytes + at.lane * 8) = both;
  if (at.lane < kTile) {
    const bool real = at.col0 + at.lane < n_cols;
    to_scales[at.tile * kTile + rl::tile_slot(at.lane)] =
        real ? scales[(at.row + at.lane) * blocks + at.channel0 / kStep] : (rl_u8)127;
  }
}
RL_EXPORT(prepare_e2m1)
