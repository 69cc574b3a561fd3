// wmma_gemm.hip.h: BF16 rows times a weight kept in codes, by 16x16x16 matrix steps with FP32 sums (design.md section
// 4, GEMM). For linear.hip and experts.hip.
//
// The order of additions is the contract, the same for every shape of tile: K in segments, K-steps of 16 ascending into
// one accumulator inside a segment, the segments' sums added ascending to 0. So a row's bits depend neither on how many
// rows there are nor on which kernel took them.
//
// A weight lies in tiles of 16 output columns x 32 channels (weight_tiles.py), a lane's 16 codes together in the order
// of the target's matrix fragments. They become BF16 in registers: code times a power of two, exact.
#pragma once
#include "weight_tiles.hip.h"

constexpr int kTile = 16, kStep = 32, kLaneCodes = 16;
constexpr int kFewRows = kTile;  // of few_product.hip.h
constexpr int kStride = kStep + 8;  // of a row in LDS, in BF16 elements: eight rows' pieces fall on different banks

// ---- weights: at() is the weight from a tile on, Part what a lane reads of a tile, its 16 codes; decode() makes them
// BF16 ----

struct WeightE4m3 {  // two scales a tile, one for each 8 columns
  static constexpr int kTileBytes = 512;
  static constexpr int kAhead = 4;  // blocks on their way where rows are few
  const rl_u8* codes;
  const rl_u8* scales;
  struct Part {
    rl::Words4 codes;
    int scales;
  };
  RL_DEV WeightE4m3 at(const WeightE4m3& w, rl_i64 tile) { return {w.codes + tile * kTileBytes, w.scales + tile * 2}; }
  RL_DEV Part load(const WeightE4m3& w, int block) {
    const rl_u32 bytes = (rl_u32)(block * kTileBytes + rl::lane() * 16);
    return {*(const rl::Words4*)(w.codes + bytes), rl::tile_bytes_of_8(w.scales + (rl_u32)block * 2)};
  }
  RL_DEV void decode(int (&out)[8], const Part& part) {
    rl::Factor factor[rl::kTileCols];
#pragma unroll
    for (int c = 0; c < rl::kTileCols; ++c) factor[c] = rl::factor_of<4>(part.scales >> (8 * c) & 255);
    rl::e4m3_decode(out, part.codes, factor);
  }
};

struct WeightBf16 {
  static constexpr int kTileBytes = 1024;
  static constexpr int kAhead = 2;  // blocks on their way where rows are few
  const rl_u8* codes;
  const rl_u8* scales;  // none
  struct Part {
    rl::Words4 piece[2];
  };
  RL_DEV WeightBf16 at(const WeightBf16& w, rl_i64 tile) { return {w.codes + tile * kTileBytes, nullptr}; }
  RL_DEV Part load(const WeightBf16& w, int block) {
    const rl::Words4* from = (const rl::Words4*)(w.codes + (rl_u32)(block * kTileBytes + rl::lane() * 32));
    return {{from[0], from[1]}};
  }
  RL_DEV void decode(int (&out)[8], const Part& part) {
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] = part.piece[i / 4].word[i % 4];
  }
};

RL_DEV int smaller(int a, int b) { return a < b ? a : b; }

// ---- many rows: kRows x 128 outputs a workgroup of 8 waves. Rows are staged in LDS, two buffers in turn; a wave
// decodes the tiles of its own columns ----

constexpr int kWaves = 8, kCols = kTile * kWaves;
constexpr int kOwnElements = kTile * kStride;  // of a wave's own LDS, for rl::tile_frags

template <class W, int kRowCount> struct Tiled {
  typedef typename W::Part Part;
  static constexpr int kThreads = 32 * kWaves, kRows = kRowCount, kTileBytes = W::kTileBytes;
  static constexpr int kMFrags = kRows / kTile, kNFrags = kCols / kTile / kWaves;
  static constexpr int kPieces = kRows * (kStep / 8) / kThreads;  // of 8 channels, a thread
  static constexpr bool kSkip = kRows < 128;  // where sixteen rows are missing, their matrix steps are left out

  rl_u16* lds;  // [2][kRows][kStride], then each wave's own
  W weight[kNFrags];  // from this wave's tiles on, at channel block 0
  const rl_u16* x;
  rl_u32 piece_bytes[kPieces];  // from x to this thread's pieces of rows at channel 0; 32 bits, which loads add
  int n_rows;                   // of the kRows, those that are there
  rl::AccF32 total[kMFrags][kNFrags];

  // Eight lanes have rows r and r + 4, whose pieces fall on different banks; sm_90's order of pieces wants neighbours.
  RL_DEV int row_of_piece(int j) {
    const int i = rl_tid() / 4, row = rl::kWeightFirst ? i : i % 2 * 4 + i / 2 % 4 + i / 8 * 8;
    return row + j * (kThreads / 4);
  }
  RL_DEV int channel_of_piece() { return rl_tid() % 4 * 8; }
  // Row and column of the first element of this wave's accumulator (m, n). No wave is beyond the eighth: what gfx1100's
  // compiler does not know leaves a base address in a scalar register, and the loop a part in a hundred shorter.
  RL_DEV int frag_row(int m) { return rl::wave() / kWaves * kRows + m * kTile; }
  RL_DEV int frag_col(int n) { return rl::wave() * (kNFrags * kTile) + n * kTile; }
  // And in it, of element i.
  RL_DEV int acc_row(int i) { return rl::kWeightFirst ? rl::acc_col(i) : rl::acc_row(i); }
  RL_DEV int acc_col(int i) { return rl::kWeightFirst ? rl::acc_row(i) : rl::acc_col(i); }
};

template <int kM, int kN> RL_DEV void clear(rl::AccF32 (&acc)[kM][kN]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n) acc[m][n] = rl::AccF32{};
}
template <int kM, int kN> RL_DEV void add(rl::AccF32 (&total)[kM][kN], const rl::AccF32 (&acc)[kM][kN]) {
#pragma unroll
  for (int m = 0; m < kM; ++m)
#pragma unroll
    for (int n = 0; n < kN; ++n)
#pragma unroll
      for (int i = 0; i < 8; ++i) total[m][n].v[i] += acc[m][n].v[i];
}

// rl::store_tile(to, stride, acc)    an accumulator as BF16 into LDS, its rows `stride` elements apart
// run(t, first, last, segment)       t.total = the sums of channel blocks first .. last - 1, in segments of so many
#if defined(RL_CUDA)
#include "dense_sm90.hip.h"
#else
namespace rl {
RL_DEV void store_tile(rl_u16* to, int stride, const AccF32& c) {
#pragma unroll
  for (int i = 0; i < 8; ++i) to[acc_row(i) * stride + acc_col(i)] = f32_to_bf16(c.v[i]);
}
}  // namespace rl

template <class T> struct Staged {  // a block on its way
  typename T::Part part[T::kNFrags];
  rl::Words4 piece[T::kPieces];
};

template <class T> RL_DEV Staged<T> stage_load(const T& t, int block) {
  Staged<T> s;
#pragma unroll
  for (int n = 0; n < T::kNFrags; ++n) s.part[n] = t.weight[n].load(t.weight[n], block);
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j)
    s.piece[j] = *(const rl::Words4*)((const char*)t.x + (t.piece_bytes[j] + (rl_u32)block * (2 * kStep)));
  return s;
}

template <class T> RL_DEV void stage_rows(const T& t, int buffer, const Staged<T>& s) {
  rl_u16* rows = t.lds + buffer * (T::kRows * kStride);
#pragma unroll
  for (int j = 0; j < T::kPieces; ++j)
    *(rl::Words4*)(rows + T::row_of_piece(j) * kStride + T::channel_of_piece()) = s.piece[j];
}

template <class T>
RL_DEV void multiply(rl::AccF32 (&acc)[T::kMFrags][T::kNFrags], const T& t, int buffer, const Staged<T>& s) {
  const rl_u16* rows = t.lds + buffer * (T::kRows * kStride) + T::frag_row(0) * kStride;
  rl_u16* own = t.lds + 2 * T::kRows * kStride + rl::wave() * kOwnElements;
  rl::FragBF16 b[T::kNFrags][2];
#pragma unroll
  for (int n = 0; n < T::kNFrags; ++n) {
    int words[8];
    t.weight[n].decode(words, s.part[n]);
    rl::tile_frags(b[n], words, own);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int m = 0; m < T::kMFrags; ++m) {
      if (T::kSkip && m * kTile >= t.n_rows) continue;
      const rl::FragBF16 a = rl::load_rows_lds(rows + m * (kTile * kStride) + half * 16, kStride);
#pragma unroll
      for (int n = 0; n < T::kNFrags; ++n) rl::mma(acc[m][n], a, b[n][half]);
    }
    rl::no_overlap();  // the other half's fragments would take registers that are not there
  }
}

template <class T> RL_DEV void run(T& t, int first, int last, int segment) {
  clear(t.total);
  Staged<T> now = stage_load(t, first);
  stage_rows(t, 0, now);
  rl_sync();
  for (int block = first, buffer = 0; block < last;) {
    const int stop = smaller(block + segment, last);
    rl::AccF32 acc[T::kMFrags][T::kNFrags];
    clear(acc);
    for (; block < stop; ++block, buffer ^= 1) {
      // The last block is staged once more: a branch would let the compiler move matrix steps behind it, with all
      // their fragments in registers meanwhile.
      const Staged<T> next = stage_load(t, smaller(block + 1, last - 1));
      multiply(acc, t, buffer, now);
      stage_rows(t, buffer ^ 1, next);
      rl_sync();
      now = next;
    }
    add(t.total, acc);
  }
}
#endif

// ---- weights into tiles: a lane's 16 codes a thread ----

struct TileLane {
  rl_i64 tile, row;  // tile: of all groups and blocks; row: of the whole weight, of column 0 of the tile
  int lane, group, col0, channel0;
};
RL_DEV TileLane tile_lane(int threads, int n_cols, int blocks) {
  const rl_i64 i = (rl_i64)rl_bid_x() * threads + rl_tid(), tile = i / 32;
  const int tiles = (n_cols + kTile - 1) / kTile, group = (int)(tile / blocks / tiles);
  const int col0 = (int)(tile / blocks % tiles) * kTile;
  return {tile, (rl_i64)group * n_cols + col0, (int)(i % 32), group, col0, (int)(tile % blocks) * kStep};
}
