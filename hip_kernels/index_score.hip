// index_score, index_block_max: rows of one sequence against all of its history, exact to the bit.
// Grid (ceil(P/256), row tiles); 256 threads = 8 waves, each 16 rows x 32 positions; LDS rows_lds_bytes() of the
// binding, by the real head count.
//
// Budget on gfx1100: index_score: 208 VGPRs, 31904 bytes of LDS, 6 waves per SIMD, no scratch.
// Budget on gfx1100: index_block_max: 208 VGPRs, 31904 bytes of LDS, 6 waves per SIMD, no scratch.
#include "index_terms.hip.h"

constexpr int kThreads = 256, kGroupPositions = kThreads / 32 * kWavePositions;
constexpr int kStageHeads = 4;  // heads whose codes move to LDS at once; there is room for twice as many

RL_DEV Vectors load_prepared(const rl_i8* tile) {
  Vectors v;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) v.group[g] = rl::load_rows(tile + g * kTileRows * kGroupBytes, kGroupBytes);
  return v;
}

// The codes of the next heads, on their way from memory to LDS while the last ones are scored. A thread moves the same
// 16 bytes of every second tile.
constexpr int kPieces = kTileRows * kChannels / 16;  // of a tile: [group][row][2]
constexpr int kTogether = kThreads / kPieces, kTurns = kStageHeads / kTogether;
struct Staged {
  rl::Words4 piece[kTurns];
};

RL_DEV Staged load_stage(const rl_i8* tiles, int n_tiles) {
  const int first = rl_tid() / kPieces;
  const rl_i8* from = tiles + first * kTileBytes + rl_tid() % kPieces * 16;
  Staged staged;
#pragma unroll
  for (int j = 0; j < kTurns; ++j)
    if (first + j * kTogether < n_tiles) staged.piece[j] = *(const rl::Words4*)(from + j * (kTogether * kTileBytes));
  return staged;
}

RL_DEV void store_stage(rl_i8* lds, const Staged& staged, int n_tiles) {
  const int first = rl_tid() / kPieces, piece = rl_tid() % kPieces;
  const int group = piece / (kPieces / kGroups), row = piece / 2 % kTileRows, half = piece % 2;
  rl_i8* to = lds + (first * kTileRows + row) * kStride + group * kGroupBytes + half * 16;
#pragma unroll
  for (int j = 0; j < kTurns; ++j)
    if (first + j * kTogether < n_tiles) *(rl::Words4*)(to + j * (kTogether * kTileRows * kStride)) = staged.piece[j];
}

struct RowTile {
  int row0, first, end;  // rows first .. end - 1 of row0 .. row0 + 15 belong to the sequence
  int most_seen;         // of its rows
};

RL_DEV RowTile row_tile(const int* tile_i32, const int* visible) {
  RowTile t = {tile_i32[0] * kTileRows, tile_i32[1], tile_i32[2], 0};
  const int row = t.row0 + (rl::lane() & 15);
  t.most_seen = rl::uniform(rl::wave_max(row >= t.first && row < t.end ? visible[row] : 0));
  return t;
}

struct RowsLds {
  QueryScales q;
  int* k_words;    // [256]; later
  float* units;    // [256] what a position's sums of terms are multiplied by
  int* far;        // [8] a wave saw a query scale or weight out of reach
  rl_i8* codes;    // [2][kStageHeads][16][kStride]; later the sums of terms, FP32 [16][kSumStride]
};
constexpr int kSumStride = kGroupPositions + 4;

// Puts the scales of the tile's queries and of 256 keys in LDS; true where this wave saw one out of reach.
RL_DEV bool stage_scales(const RowsLds& lds, const RowTile& tile, const rl_i8* tiles, const rl_u16* weights,
                         int n_heads, int k_word) {
  bool far = !scales_in_reach(k_word);
  for (int i = rl_tid(); i < padded_vectors(n_heads * kTileRows); i += kThreads) {
    const int head = i / kTileRows, row = tile.row0 + i % kTileRows;
    const bool real = head < n_heads && row >= tile.first && row < tile.end;
    const int word = real ? *(const int*)(tiles + head * kTileBytes + kScalesAt + i % kTileRows * kGroups) : kNoScale;
    const rl_u16 weight = real ? weights[(rl_i64)row * n_heads + head] : (rl_u16)0;
    put_scales(lds.q, i, word, weight);
    far = far || !scales_in_reach(word) || !weight_in_reach(weight);
  }
  lds.k_words[rl_tid()] = k_word;
  return rl::ballot(far) != 0;
}

// Adds a head's terms, its queries being 16 from v0 of the scales in LDS.
RL_DEV void add_head(float (&total)[kColTiles][8], const RowsLds& lds, int v0, const rl::AccI32& bias, const Vectors& q,
                     const Vectors (&k)[kColTiles], bool aligned, bool exact) {
  if (aligned) {
#pragma unroll
    for (int t = 0; t < kColTiles; ++t) {
      float terms[8];
      aligned_terms(terms, bias, q, k[t], lds.q.scaled_weights + v0);
      add(total[t], terms);
      rl::no_overlap();  // the next tile's: all but one of 57 vector instructions then go in pairs, not 46 of 67
    }
    return;
  }
#pragma unroll
  for (int t = 0; t < kColTiles; ++t) {
    const int* k_words = lds.k_words + rl::wave() * kWavePositions + t * kTileRows;
    float terms[8];
    if (exact) exact_terms(terms, bias, q, k[t], lds.q.weights + v0, lds.q.scales + v0, lds.q.n, k_words);
    else grouped_terms(terms, bias, q, k[t], lds.q.weights + v0, lds.q.scales + v0, lds.q.n, k_words);
    add(total[t], terms);
  }
}

// Leaves in LDS the sums of terms of the tile's rows and 256 positions from position0, and the positions' units.
RL_DEV void score_tile(const RowsLds& lds, const RowTile& tile, int position0, const rl_i8* queries,
                       const rl_u16* weights, const rl_i8* keys, const int* pages, int n_heads, int rows_per_page) {
  const rl_i8* tiles = queries + (rl_i64)(tile.row0 / kTileRows) * n_heads * kTileBytes;
  const int position = position0 + rl_tid();
  const int k_word = position < tile.most_seen
      ? *(const int*)(key_tile(keys, pages, rows_per_page, position) + kScalesAt + position % kTileRows * kGroups)
      : kNoScale;
  const bool far = stage_scales(lds, tile, tiles, weights, n_heads, k_word);
  if (rl::lane() == 0) lds.far[rl::wave()] = far;
  const bool k_differ = rl::ballot(!one_scale(k_word)) != 0;

  const int wave_position = position0 + rl::wave() * kWavePositions;
  const bool active = wave_position < tile.most_seen;
  Vectors k[kColTiles];
#pragma unroll
  for (int t = 0; t < kColTiles; ++t) {
    const int start = wave_position + t * kTileRows;
    if (start < tile.most_seen) k[t] = load_prepared(key_tile(keys, pages, rows_per_page, start));
    else k[t] = Vectors{};
  }
  const rl::AccI32 bias = rl::splat(kBias);
  float total[kColTiles][8] = {};
  constexpr int kStageBytes = kStageHeads * kTileRows * kStride;
  store_stage(lds.codes, load_stage(tiles, n_heads), n_heads);
  rl_sync();
  int any = 0;
  for (int w = 0; w < kThreads / 32; ++w) any |= lds.far[w];
  const bool exact = rl::uniform(any) != 0;
  for (int head0 = 0, buffer = 0; head0 < n_heads; head0 += kStageHeads, buffer ^= 1) {
    const int n_next = n_heads - head0 - kStageHeads;
    const Staged next = load_stage(tiles + (rl_i64)(head0 + kStageHeads) * kTileBytes, n_next);
    const int n_staged = active ? (n_next < 0 ? n_next + kStageHeads : kStageHeads) : 0;
    const rl_i8* codes = lds.codes + buffer * kStageBytes;
    for (int staged = 0; staged < n_staged; ++staged) {
      const int head = head0 + staged;
      const Vectors q = load_vectors(codes + staged * kTileRows * kStride);
      const bool aligned = !exact && !k_differ && rl::uniform(lds.q.differ[head]) == 0;
      add_head(total, lds, head * kTileRows, bias, q, k, aligned, exact);
    }
    store_stage(lds.codes + (buffer ^ 1) * kStageBytes, next, n_next);
    rl_sync();
  }
  lds.units[rl_tid()] = exact ? 1.0f : unit_of(k_word);
  float* sums = (float*)lds.codes;
#pragma unroll
  for (int t = 0; t < kColTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sums[rl::acc_row(i) * kSumStride + rl::wave() * kWavePositions + t * kTileRows + rl::acc_col(i)] = total[t][i];
  }
  rl_sync();
}

RL_DEV RowsLds carve_rows(char* lds, int n_heads) {
  RowsLds r;
  const int n = padded_vectors(n_heads * kTileRows);
  r.q = carve_scales(lds, n);
  r.k_words = r.q.differ + (n / kTileRows + 3) / 4 * 4;
  r.units = (float*)r.k_words;
  r.far = r.k_words + kThreads;
  r.codes = (rl_i8*)(r.far + kThreads / 32);
  return r;
}

RL_KERNEL(kThreads) index_score(float* scores_f32,        // [R, P]
                                const rl_i8* queries,     // prepared [ceil(R/16), H, kTileBytes]
                                const rl_u16* weights,    // [R, H]
                                const rl_i8* keys,        // prepared [pages, rows_per_page/16, kTileBytes]
                                const int* page_tables,   // [sequences, table_width]
                                const int* tiles,         // [T, 4] tile of rows, first row, end row, sequence
                                const int* visible,       // [R]
                                int n_heads, int n_positions, int rows_per_page, int table_width) {
  RL_DYN_SHARED(char, shared);
  const RowsLds lds = carve_rows(shared, n_heads);
  const int* tile_i32 = tiles + 4 * rl_bid_y();
  const RowTile tile = row_tile(tile_i32, visible);
  const int position0 = rl_bid_x() * kGroupPositions, position = position0 + rl_tid();
  const int* pages = page_tables + (rl_i64)tile_i32[3] * table_width;
  if (position0 < tile.most_seen)
    score_tile(lds, tile, position0, queries, weights, keys, pages, n_heads, rows_per_page);
  if (position >= n_positions) return;
  const float* sums = (const float*)lds.codes + rl_tid();
  const float unit = lds.units[rl_tid()];
  for (int row = tile.first; row < tile.end; ++row)
    scores_f32[(rl_i64)row * n_positions + position] =
        position < visible[row] ? rl::round_bf16(sums[(row - tile.row0) * kSumStride] * unit) : unseen();
}
RL_EXPORT(index_score)

RL_KERNEL(kThreads) index_block_max(rl_u16* maxima,          // [rows from row0, stride] keys of candidate blocks
                                    const rl_i8* queries, const rl_u16* weights, const rl_i8* keys,
                                    const int* page_tables, const int* tiles, const int* visible,
                                    int row0, int n_heads, int n_blocks, int stride, int rows_per_page,
                                    int table_width) {
  RL_DYN_SHARED(char, shared);
  const RowsLds lds = carve_rows(shared, n_heads);
  const int* tile_i32 = tiles + 4 * rl_bid_y();
  const RowTile tile = row_tile(tile_i32, visible);
  const int position0 = rl_bid_x() * kGroupPositions;
  const int* pages = page_tables + (rl_i64)tile_i32[3] * table_width;
  const bool seen = position0 < tile.most_seen;
  if (seen) score_tile(lds, tile, position0, queries, weights, keys, pages, n_heads, rows_per_page);
  constexpr int kBlocks = kGroupPositions / kBlock;
  for (int i = rl_tid(); i < kTileRows * kBlocks; i += kThreads) {
    const int tile_row = i / kBlocks, row = tile.row0 + tile_row, column = i % kBlocks * kBlock;
    const int block = (position0 + column) / kBlock;
    if (row < tile.first || row >= tile.end || block >= n_blocks) continue;
    const float* sums = (const float*)lds.codes + tile_row * kSumStride + column;
    float best = unseen();  // rounding keeps order: the best sum is the best score
    const int n_seen = seen ? visible[row] - position0 - column : 0;
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      const float score = sums[j] * lds.units[column + j];
      best = j < n_seen && score > best ? score : best;  // a NaN is not larger
    }
    maxima[(rl_i64)(row - row0) * stride + block] = (rl_u16)to_key(rl::f32_to_bf16(best));
  }
}
RL_EXPORT(index_block_max)
