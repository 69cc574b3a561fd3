// Routed FP4 experts and the shared FP8 one (experts_hip.py; backbone.md section 10).
//
// At most 16 rows, R * (k + 1) <= 128; side by side workgroups have 64 or 128 columns, in two runs, above each other
// the shared expert, in S / 4 of them where it has S segments, and the pairs of a row and a choice:
//   mixture_up         gate and up, clamp and SiLU, the routing weight, ActQuant8. Grid (ceil(I / 64), 1 + R k)
//   mixture_down       outputs, and by the last workgroup at some columns their sum: a row's experts by ascending id,
//                      the shared one last. Grid (ceil(D / 128), S / 4 + R k)
// More rows, in tiles of one expert each (expert_sort.hip):
//   routed_up_*        Grid (ceil(I / 64), tiles)
//   shared_up_64, _128 of so many rows a workgroup, in order. Grid (ceil(I / 64), ceil(R / 64 or 128))
//   routed_down_*      Grid (ceil(D / 128), tiles)
//   expert_sum         Grid (ceil(D / 2048), R)
// At load:
//   prepare_e2m1       FP4 codes into tiles. Grid (ceil(lanes of all tiles / 256), 1)
//
// 256 threads = 8 waves; LDS as the binding says. An expert's tile has at most 16 rows (few) or 64. What is done for a row
// depends on nothing but that row, wherever it was sorted to.
//
// Budget on gfx1100: mixture_up: 168 VGPRs, 32768 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: mixture_down: 160 VGPRs, 32768 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: routed_up_few: 152 VGPRs, 32768 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: routed_down_few: 152 VGPRs, 32768 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: routed_up_64: 128 VGPRs, 20480 bytes of LDS, 10 waves per SIMD, no scratch.
// Budget on gfx1100: routed_down_64: 128 VGPRs, 20480 bytes of LDS, 10 waves per SIMD, no scratch.
// Budget on gfx1100: shared_up_64: 128 VGPRs, 20480 bytes of LDS, 10 waves per SIMD, no scratch.
// Budget on gfx1100: shared_up_128: 184 VGPRs, 30720 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: expert_sum: 40 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: prepare_e2m1: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "act_terms.hip.h"
#include "explog.hip.h"
#include "few_runs.hip.h"
#include "fp4_tiles.hip.h"

constexpr int kThreads = 256;
constexpr int kSegments = 4;  // of K, but for the shared expert's w2
constexpr int kRuns = 2;      // of a workgroup's columns where rows are few

// ---- what the matrix kernels share ----

struct RowTile {  // rows of one expert
  int expert, n_rows;
  const int* pairs;  // of the rows; or null: they are pairs first, first + 1 ..
  int first;
  RL_DEV int pair(const RowTile& t, int i) { return t.pairs ? t.pairs[i] : t.first + i; }
};
RL_DEV RowTile sorted_tile(const int* tiles, const int* pairs) {
  const int* own = tiles + 4 * rl_bid_y();
  return {rl::uniform(own[0]), rl::uniform(own[2]), pairs + rl::uniform(own[1]), 0};
}

template <class W> struct Up {
  rl_u16* hidden;        // [n, I] by pair, through ActQuant8
  const rl_u16* x;       // [n / k, D] through ActQuant8
  W gate, up;            // tiles of [E, I, D]
  const float* weights;  // [n] by pair, or null
  int n_inner, blocks, segment, k;
  float limit;
};

// One channel: gate and up already rounded to BF16.
RL_DEV float gated(float gate, float up, float limit, bool is_weighted, float weight) {
  const float g = gate > limit ? limit : gate;  // a NaN stays
  const float u = up > limit ? limit : up < -limit ? -limit : up;
  const float h = g * rl::sigmoid(g) * u;
  return rl::round_bf16(is_weighted ? h * weight : h);
}

// ---- at most 16 rows ----

struct FewRows {  // of one expert
  int expert, n_rows, own_pair;  // the lane's: of row lane % 16, or of the last
  // All lanes of the wave together.
  RL_DEV int pair(const FewRows& rows, int i) { return rl::shfl(rows.own_pair, i); }
};
RL_DEV FewRows few_rows_of(const RowTile& tile) {
  const int row = smaller(rl::lane() % kFewRows, tile.n_rows - 1);
  return {tile.expert, tile.n_rows, tile.n_rows > 0 ? RowTile::pair(tile, row) : 0};
}
// The rows that chose the expert of pair `own`, where that is the first of them; else none.
RL_DEV FewRows few_rows_of(const int* ids, int own, int n_pairs) {
  FewRows rows = {rl::uniform(ids[own]), 0, own};
  for (int start = 0; start < n_pairs; start += 32) {
    const int at = start + rl::lane();
    rl_u32 lanes = rl::ballot(at < n_pairs && ids[at] == rows.expert);
    for (; lanes != 0; lanes &= lanes - 1, ++rows.n_rows) {
      const int pair = start + 31 - rl::leading_zeros(lanes & (0u - lanes));
      if (pair < own) return {rows.expert, 0, own};
      if (rl::lane() % kFewRows >= rows.n_rows) rows.own_pair = pair;
    }
  }
  rows.n_rows = smaller(rows.n_rows, kFewRows);
  return rows;
}

template <class W, class R>
RL_DEV FewStream<W, 2, R> stream_from(const rl_u16* x, const FewRows& rows, int row0, int k, int blocks, int first) {
  FewStream<W, 2, R> s = {{}, x + first * kStep, {}};
#pragma unroll
  for (int i = 0; i < R::kOwn; ++i)
    s.row_bytes[i] = 2u * kStep * (rl_u32)(FewRows::pair(rows, row0 + R::own_row(i)) / k * blocks);
  return s;
}

// One channel of a group that has this scale, through ActQuant8.
RL_DEV float act_round_one(float v, int scale) {
  return scale == kNotANumber ? rl::as_float(0x7FC00000) : e4m3_value(code_of(v, scale)) * rl::as_float(scale << 23);
}

// A wave has gate and up of one tile of columns, and one of the segments; in each run 32 columns more.
constexpr int kUpCols = kWaves / kSegments * kTile;
static_assert(kUpCols == 32, "one of ActQuant8's groups");
constexpr int kUpAheadFp4 = 4, kUpAheadFp8 = 4, kDownAhead = 3;  // blocks on their way: whole rounds at the release's K
template <class R, class W, int kAhead>
RL_DEV void up_few(float* lds, const Up<W>& a, const FewRows& rows) {
  const int col0 = rl_bid_x() * kRuns * kUpCols, first = rl::wave() % kSegments * a.segment;
  const int n_runs = smaller(kRuns, (a.n_inner - col0 + kUpCols - 1) / kUpCols);
  const int col_tiles = (a.n_inner + kTile - 1) / kTile;
#pragma unroll 1
  for (int row0 = 0; row0 < rows.n_rows && n_runs > 0; row0 += R::kMost) {
    const FewStream<W, 2, R> start = stream_from<W, R>(a.x, rows, row0, a.k, a.blocks, first);
    few_runs<W, 2, R, kAhead>(lds, smaller(a.segment, a.blocks - first), n_runs, [&](int run) {
      FewStream<W, 2, R> s = start;
      const int col_tile = (col0 + run * kUpCols) / kTile + rl::wave() / kSegments;
      const rl_i64 at = ((rl_i64)rows.expert * col_tiles + col_tile) * a.blocks + first;
      s.weight[0] = W::at(a.gate, at);
      s.weight[1] = W::at(a.up, at);
      return s;
    });
    // A row a wave, a channel a lane.
    const int n_rows = smaller(rows.n_rows - row0, R::kMost), wave = rl::lane() / kTile * kSegments;
    for (int i = rl::wave(); i < n_rows * n_runs; i += kWaves) {
      const int run = i / n_rows, row = i % n_rows, element = row * kTile + rl::lane() % kTile;
      const int pair = FewRows::pair(rows, row0 + row), col = col0 + run * kUpCols + rl::lane();
      const float gate = rl::round_bf16(over_run<2>(lds, run, wave, kSegments, 0, element));
      const float up = rl::round_bf16(over_run<2>(lds, run, wave, kSegments, 1, element));
      const float h = gated(gate, up, a.limit, a.weights != nullptr, a.weights ? a.weights[pair] : 1.0f);
      const int scale = scale_of_e4m3(rl::wave_max(size_bits(h)));
      a.hidden[(rl_i64)pair * a.n_inner + col] = rl::f32_to_bf16(act_round_one(h, scale));
    }
    if (R::kMost == kFewRows) break;  // known to the compiler
    rl_sync();
  }
}

template <class W> struct Down {
  rl_u16* out;           // [n, D] by pair
  const rl_u16* hidden;  // [n, I] by pair
  W weight;              // tiles of [E, D, I]
  int n_out, blocks, segment;
};

// A wave has two tiles of columns and one of n_segments segments. The workgroup has own_cols columns from col0 on, and
// in each run as many kDownCols further on.
constexpr int kDownCols = kWaves / kSegments * 2 * kTile;
template <class R, class W>
RL_DEV void down_few(float* lds, const Down<W>& a, const FewRows& rows, int col0, int n_segments) {
  const int first = rl::wave() % n_segments * a.segment, own_cols = kWaves / n_segments * 2 * kTile;
  const int n_runs = smaller(kRuns, (a.n_out - col0 + kDownCols - 1) / kDownCols);
  const int col_tiles = (a.n_out + kTile - 1) / kTile;
#pragma unroll 1
  for (int row0 = 0; row0 < rows.n_rows && n_runs > 0; row0 += R::kMost) {
    const FewStream<W, 2, R> start = stream_from<W, R>(a.hidden, rows, row0, 1, a.blocks, first);
    few_runs<W, 2, R, kDownAhead>(lds, smaller(a.segment, a.blocks - first), n_runs, [&](int run) {
      FewStream<W, 2, R> s = start;
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const int col_tile = (col0 + run * kDownCols) / kTile + rl::wave() / n_segments * 2 + t;
        const rl_i64 at = (rl_i64)rows.expert * col_tiles + smaller(col_tile, col_tiles - 1);
        s.weight[t] = W::at(a.weight, at * a.blocks + first);
      }
      return s;
    });
    const int n_rows = smaller(rows.n_rows - row0, R::kMost);
    for (int i = rl::wave(); i < n_rows * n_runs; i += kWaves) {
      const int run = i / n_rows, row = i % n_rows, pair = FewRows::pair(rows, row0 + row);
      for (int j = rl::lane(); j < own_cols; j += 32) {
        const int col = col0 + run * kDownCols + j, own = j / kTile;
        if (col >= a.n_out) break;
        const int element = row * kTile + j % kTile;
        a.out[(rl_i64)pair * a.n_out + col] =
            rl::f32_to_bf16(over_run<2>(lds, run, own / 2 * n_segments, n_segments, own % 2, element));
      }
    }
    if (R::kMost == kFewRows) break;  // known to the compiler
    rl_sync();
  }
}

// ---- at most 64 rows ----

// Eight channels of one row: gate and up already rounded to BF16.
template <class W>
RL_DEV void put_hidden(const Up<W>& a, const RowTile& tile, int row, int col, const Piece& gate, const Piece& up) {
  const bool is_real = row < tile.n_rows && col < a.n_inner;
  const int pair = RowTile::pair(tile, is_real ? row : 0);
  const float weight = a.weights ? a.weights[pair] : 1.0f;
  Piece hidden;
#pragma unroll
  for (int i = 0; i < kPiece; ++i) hidden.v[i] = gated(gate.v[i], up.v[i], a.limit, a.weights != nullptr, weight);
  const rl::Words4 words = round_words(pack(hidden));  // the wave's lanes together
  if (is_real) store_words(a.hidden + (rl_i64)pair * a.n_inner + col, words);
}

template <class W, int kRows> RL_DEV void up_tiled(rl_u16* lds, const Up<W>& a, const RowTile& tile) {
  typedef Tiled<W, kRows> T;
  if (tile.n_rows <= 0) return;
  const int cols = kCols / 2, col0 = rl_bid_x() * cols, col_tiles = (a.n_inner + kTile - 1) / kTile;
  static_assert(T::kNFrags == 1, "a wave has gate or up");
  const bool is_up = T::frag_col(0) >= cols;
  T t;
  t.lds = lds;
  const W weight = {is_up ? a.up.codes : a.gate.codes, is_up ? a.up.scales : a.gate.scales};
  const int col_tile = smaller((col0 + T::frag_col(0) % cols) / kTile, col_tiles - 1);
  t.weight[0] = W::at(weight, ((rl_i64)tile.expert * col_tiles + col_tile) * a.blocks);
  t.n_rows = tile.n_rows;
  t.x = a.x;
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j) {
    const int row = RowTile::pair(tile, smaller(T::row_of_piece(j), tile.n_rows - 1)) / a.k;
    t.piece_bytes[j] = 2u * ((rl_u32)row * a.blocks * kStep + T::channel_of_piece());
  }
  run(t, 0, a.blocks, a.segment);

  constexpr int kPassRows = 64, kWidth = kCols + 8;
  static_assert(kPassRows * kWidth <= 2 * T::kRows * kStride + kWaves * kOwnElements, "outputs replace what was staged");
#pragma unroll
  for (int pass = 0; pass < kRows / kPassRows; ++pass) {
    rl_sync();  // nobody reads what was staged, or sums that lie there, any more
#pragma unroll
    for (int m = 0; m < T::kMFrags; ++m)
      if (T::frag_row(m) / kPassRows == pass)
        rl::store_tile(lds + T::frag_row(m) % kPassRows * kWidth + T::frag_col(0), kWidth, t.total[m][0]);
    rl_sync();
    for (int i = rl_tid(); i < kPassRows * cols / kPiece; i += T::kThreads) {
      const int row = i / (cols / kPiece), col = i % (cols / kPiece) * kPiece;
      const rl_u16* from = lds + row * kWidth + col;
      put_hidden(a, tile, pass * kPassRows + row, col0 + col, load_piece(from), load_piece(from + cols));
    }
  }
}

RL_DEV void down_64(rl_u16* lds, const Down<WeightFp4>& a, const RowTile& tile) {
  typedef Tiled<WeightFp4, 64> T;
  if (tile.n_rows <= 0) return;
  const int col0 = rl_bid_x() * kCols, col_tiles = (a.n_out + kTile - 1) / kTile;
  T t;
  t.lds = lds;
  const int col_tile = smaller((col0 + T::frag_col(0)) / kTile, col_tiles - 1);
  t.weight[0] = WeightFp4::at(a.weight, ((rl_i64)tile.expert * col_tiles + col_tile) * a.blocks);
  t.n_rows = tile.n_rows;
  t.x = a.hidden;
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j) {
    const int pair = RowTile::pair(tile, smaller(T::row_of_piece(j), tile.n_rows - 1));
    t.piece_bytes[j] = 2u * ((rl_u32)pair * a.blocks * kStep + T::channel_of_piece());
  }
  run(t, 0, a.blocks, a.segment);
#pragma unroll
  for (int m = 0; m < T::kMFrags; ++m)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = T::frag_row(m) + T::acc_row(i), col = col0 + T::frag_col(0) + T::acc_col(i);
      if (row < tile.n_rows && col < a.n_out)
        a.out[(rl_i64)RowTile::pair(tile, row) * a.n_out + col] = rl::f32_to_bf16(t.total[m][0].v[i]);
    }
}

// ---- kernels for more rows ----

#define UP_ARGUMENTS                                                                                         \
  rl_u16 *hidden, const rl_u16 *x, const rl_u8 *gate, const rl_u8 *gate_scales, const rl_u8 *up,            \
      const rl_u8 *up_scales, const int *tiles, const int *pairs, const float *weights, int n_rows,          \
      int n_inner, int blocks, int segment, int k, float limit
#define UP {hidden, x, {gate, gate_scales}, {up, up_scales}, weights, n_inner, blocks, segment, k, limit}
#define DOWN_ARGUMENTS                                                                                         \
  rl_u16 *out, const rl_u16 *hidden, const rl_u8 *codes, const rl_u8 *scales, const int *tiles, const int *pairs, \
      int n_out, int blocks, int segment
#define DOWN {out, hidden, {codes, scales}, n_out, blocks, segment}

RL_KERNEL(kThreads) routed_up_few(UP_ARGUMENTS) {
  RL_DYN_SHARED(float, sums);
  const FewRows rows = few_rows_of(sorted_tile(tiles, pairs));
  if (rl::EightRows::serve(rows.n_rows)) up_few<rl::EightRows, WeightFp4, kUpAheadFp4>(sums, UP, rows);
  else up_few<rl::SixteenRows, WeightFp4, kUpAheadFp4>(sums, UP, rows);
}
RL_EXPORT(routed_up_few)

RL_KERNEL(kThreads) routed_up_64(UP_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  up_tiled<WeightFp4, 64>(lds, UP, sorted_tile(tiles, pairs));
}
RL_EXPORT(routed_up_64)

// Of the shared expert, rows in order.
template <int kRows> RL_DEV void shared_up(rl_u16* lds, const Up<WeightE4m3>& a, int n_rows) {
  const int first = rl_bid_y() * kRows;
  up_tiled<WeightE4m3, kRows>(lds, a, {0, smaller(n_rows - first, kRows), nullptr, first});
}
RL_KERNEL(kThreads) shared_up_64(UP_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  const Up<WeightE4m3> a = UP;
  shared_up<64>(lds, a, n_rows);
}
RL_EXPORT(shared_up_64)

#if defined(RL_CUDA)
extern "C" __device__ int shared_up_128_lds_bytes = kTotalBytes<Tiled<WeightE4m3, 128>> + 512;  // as in linear.hip
#endif
RL_KERNEL(kThreads) shared_up_128(UP_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  const Up<WeightE4m3> a = UP;
  shared_up<128>(lds, a, n_rows);
}
RL_EXPORT(shared_up_128)

RL_KERNEL(kThreads) routed_down_few(DOWN_ARGUMENTS) {
  RL_DYN_SHARED(float, sums);
  const FewRows rows = few_rows_of(sorted_tile(tiles, pairs));
  const int col0 = rl_bid_x() * kRuns * kDownCols;
  if (rl::EightRows::serve(rows.n_rows))
    down_few<rl::EightRows, WeightFp4>(sums, DOWN, rows, col0, kSegments);
  else
    down_few<rl::SixteenRows, WeightFp4>(sums, DOWN, rows, col0, kSegments);
}
RL_EXPORT(routed_down_few)

RL_KERNEL(kThreads) routed_down_64(DOWN_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  down_64(lds, DOWN, sorted_tile(tiles, pairs));
}
RL_EXPORT(routed_down_64)

// ---- kernels for at most 16 rows: routed and shared experts in one grid, nothing sorted ----

RL_KERNEL(kThreads) mixture_up(rl_u16* hidden,         // [R k, I] by pair, through ActQuant8
                               rl_u16* shared_hidden,  // [R, I of the shared expert]
                               int* arrived,           // [n_arrived], which mixture_down finds 0
                               const rl_u16* x,        // [R, D] through ActQuant8
                               const rl_u8* gate, const rl_u8* gate_scales, const rl_u8* up, const rl_u8* up_scales,
                               const rl_u8* shared_gate, const rl_u8* shared_gate_scales, const rl_u8* shared_up,
                               const rl_u8* shared_up_scales,
                               const int* ids,        // [R, k] distinct in a row
                               const float* weights,  // [R, k]
                               int n_rows, int n_inner, int shared_inner, int blocks, int segment, int k, float limit,
                               int n_arrived) {
  RL_DYN_SHARED(float, sums);
  if (rl_bid_y() == 0) {
    if (rl_bid_x() == 0)
      for (int i = rl_tid(); i < n_arrived; i += kThreads) arrived[i] = 0;
    const Up<WeightE4m3> a = {shared_hidden, x, {shared_gate, shared_gate_scales}, {shared_up, shared_up_scales},
                              nullptr, shared_inner, blocks, segment, 1, limit};
    up_few<rl::EightRows, WeightE4m3, kUpAheadFp8>(sums, a, few_rows_of({0, n_rows, nullptr, 0}));
    return;
  }
  up_few<rl::EightRows, WeightFp4, kUpAheadFp4>(sums, UP, few_rows_of(ids, rl_bid_y() - 1, n_rows * k));
}
RL_EXPORT(mixture_up)

// The sum of a row's experts by ascending id, the shared one last, for 64 columns.
struct Sum {
  rl_u16* out;           // [R, D]
  const rl_u16* routed;  // [R, k, D]
  const rl_u16* shared;  // [R, D]
  const int* ids;
  int n_rows, width, k;
};
constexpr int kMostTerms = 128;  // of all rows
RL_DEV void add_experts(rl_u16* lds, const Sum& a, int col0) {
  constexpr int kPieces = kDownCols / kPiece;
  const int terms = a.k + 1;
  for (int i = rl_tid(); i < a.n_rows * terms * kPieces; i += kThreads) {
    const int row = i / kPieces / terms, j = i / kPieces % terms, col = col0 + i % kPieces * kPiece;
    if (col >= a.width) continue;
    const bool is_shared = j == a.k;
    const rl_u16* from = is_shared ? a.shared + (rl_i64)row * a.width : a.routed + (rl_i64)(row * a.k + j) * a.width;
    const rl::Words4 words = load_words(from + col);
    int place = is_shared ? a.k : 0;
    for (int other = 0; !is_shared && other < a.k; ++other) place += a.ids[row * a.k + other] < a.ids[row * a.k + j];
    store_words(lds + ((row * terms + place) * kPieces + i % kPieces) * kPiece, words);
  }
  rl_sync();
  for (int i = rl_tid(); i < a.n_rows * kPieces; i += kThreads) {
    const int row = i / kPieces, col = col0 + i % kPieces * kPiece;
    if (col >= a.width) continue;
    Piece total = {};
    for (int term = 0; term < terms; ++term) {
      const Piece p = load_piece(lds + ((row * terms + term) * kPieces + i % kPieces) * kPiece);
#pragma unroll
      for (int c = 0; c < kPiece; ++c) total.v[c] += p.v[c];
    }
    store_words(a.out + (rl_i64)row * a.width + col, pack(total));
  }
  rl_sync();
}

RL_KERNEL(kThreads) mixture_down(rl_u16* sum,     // [R, D]
                                 rl_u16* out,     // [R k, D] by pair
                                 rl_u16* shared,  // [R, D]
                                 int* arrived,    // [gridDim.x] all 0, before and after
                                 const rl_u16* hidden, const rl_u16* shared_hidden, const rl_u8* codes,
                                 const rl_u8* scales, const rl_u8* shared_codes, const rl_u8* shared_scales,
                                 const int* ids, int n_rows, int n_out, int blocks, int segment, int shared_blocks,
                                 int shared_segment, int shared_segments, int k) {
  RL_DYN_SHARED(float, sums);
  const int n_shared = shared_segments / kSegments, own = rl_bid_y() - n_shared;
  const int col0 = rl_bid_x() * kRuns * kDownCols;
  if (own < 0) {
    const Down<WeightE4m3> a = {shared, shared_hidden, {shared_codes, shared_scales}, n_out, shared_blocks,
                                shared_segment};
    const int own_col0 = col0 + rl_bid_y() * (kDownCols / n_shared);
    down_few<rl::EightRows>(sums, a, few_rows_of({0, n_rows, nullptr, 0}), own_col0, shared_segments);
  } else {
    down_few<rl::EightRows, WeightFp4>(sums, DOWN, few_rows_of(ids, own, n_rows * k), col0, kSegments);
  }
  if (!rl::last_of(n_shared + n_rows * k, arrived + rl_bid_x(), (int*)sums + kMostTerms * kDownCols / 2)) return;
  for (int run = 0; run < kRuns; ++run)
    add_experts((rl_u16*)sums, {sum, out, shared, ids, n_rows, n_out, k}, col0 + run * kDownCols);
}
RL_EXPORT(mixture_down)

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
    rl::e2m1_put(words, i, code);
  }
  const rl::Words2 both = {{(int)words[0], (int)words[1]}};
  *(rl::Words2*)(to_codes + at.tile * WeightFp4::kTileBytes + at.lane * 8) = both;
  if (at.lane < kTile) {
    const bool real = at.col0 + at.lane < n_cols;
    to_scales[at.tile * kTile + rl::tile_slot(at.lane)] =
        real ? scales[(at.row + at.lane) * blocks + at.channel0 / kStep] : (rl_u8)127;
  }
}
RL_EXPORT(prepare_e2m1)
