// attention: rows over their local window and selected compressed rows, key and value being one vector (backbone.md
// section 5.4 to 5.6). One workgroup a row: its list is gathered once for all HEADS heads.
// Grid (R, 1); 4 waves for each 16 heads; LDS as in struct Lds.
//
// Scores need both halves of a block before any value is weighed; then the second half is still there, and the first is
// decoded again. What is decoded next is on its way from memory meanwhile.
//   scores   wave (h, q): heads 16h.., channels of quarter q; it makes the weights of the q-th 16 slots
//   values   each wave all heads, its own channels: slots 32.. first, then 0..
// No step sees another row, so a row's bits are its own.
//
// attention_window: the same bits of a row of ROW_HEADS heads that has only its window, where rows are too few to fill
// a card: a workgroup has HEADS = 16 of the heads, or all of fewer, and the values of 128 channels. It scores all of the
// list by itself, so that nobody waits for others, and keeps its channels of what it decodes. WIDTH 128, 256, 512.
// Grid (R, ROW_HEADS / HEADS * WIDTH / 128); WIDTH / 16 waves, at most 16; LDS: struct Lds.
//   scores   wave 4 t + q, t < 2: channels of quarter q, the t-th 16 slots of a half; the one whose quarter is as the
//            tile's number in the block adds the quarters and makes its weights
//   values   the last 8 waves: 16 channels each
//
// Budget on gfx1100: attention: 192 VGPRs, 63488 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: attention_window: 192 VGPRs, 42752 bytes of LDS, 8 waves per SIMD, no scratch.
#include "attention_terms.hip.h"

// What follows is gfx1100's form, and the CPU shim's; the test card has one of its own at the release's shape.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) && HEADS == 64 && WIDTH == 512
#include "attention_sm90.hip.h"
#else
constexpr int kWeightStride = kBlock + 8;

struct Lds {
  rl_u16 rows[kHalf * kStride];
  union {
    Exchange exchange;
    rl_u16 weights[kHeadTiles * kTile * kWeightStride];  // [head][slot]
  };
  float tops[kQuarters][kHeadTiles * kTile];  // of 16 slots each
  float sums[kQuarters][kHeadTiles * kTile];
  float decay[kHeadTiles * kTile];
  float top[kHeadTiles * kTile], new_top[kHeadTiles * kTile], mass[kHeadTiles * kTile];  // running
  int places[1];  // of all slots
};

// ---- weights ----

#if defined(ROW_HEADS)
RL_DEV int head_tile() { return 0; }
RL_DEV bool makes_weights() { return rl::wave() < 2 * kQuarters && rl::wave() % kHalfTiles == rl::wave() / kQuarters; }
#else
RL_DEV int head_tile() { return rl::wave() / kQuarters; }
RL_DEV bool makes_weights() { return true; }
#endif

// From this wave's 16 slots x 16 heads of scores to weights in LDS, and what the maximum's move did to earlier ones.
RL_DEV void weigh(const rl::AccF32& scores, Lds& lds, const int* places, float scale) {
  const int head0 = head_tile() * kTile, quarter = rl::wave() % kQuarters;
  const bool own = makes_weights();
  float s[8], top[rl::kOwnCols], over[rl::kOwnCols];
  if (own) {
#pragma unroll
    for (int i = 0; i < 8; ++i) s[i] = scaled(scores.v[i], places[quarter * kTile + rl::acc_row(i)] >= 0, scale);
    rl::over_rows<Largest>(s, over);
#pragma unroll
    for (int j = 0; j < rl::kOwnCols; ++j)
      if (has_columns()) lds.tops[quarter][head0 + rl::own_col(j)] = over[j];
  }
  rl_sync();  // and the quarters are read: weights may take their place
  if (own) {
#pragma unroll
    for (int j = 0; j < rl::kOwnCols; ++j) {
      const int head = head0 + rl::own_col(j);
      top[j] = lds.top[head];
#pragma unroll
      for (int k = 0; k < kQuarters; ++k) top[j] = Largest::of(top[j], lds.tops[k][head]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s[i] = exp_of(s[i] - top[rl::col_of(i)]);
      lds.weights[(head0 + rl::acc_col(i)) * kWeightStride + quarter * kTile + rl::acc_row(i)] = weight_bits(s[i]);
    }
    rl::over_rows<rl::Add>(s, over);
#pragma unroll
    for (int j = 0; j < rl::kOwnCols; ++j) {
      const int head = head0 + rl::own_col(j);
      if (!has_columns()) continue;
      lds.sums[quarter][head] = over[j];
      if (quarter == 0) {
        lds.decay[head] = exp_of(lds.top[head] - top[j]);
        lds.new_top[head] = top[j];
      }
    }
  }
  rl_sync();
  if (const int head = rl_tid(); head < kHeadTiles * kTile) {  // nobody else reads these before the next block's end
    const float sum = ((lds.sums[0][head] + lds.sums[1][head]) + lds.sums[2][head]) + lds.sums[3][head];
    lds.mass[head] = lds.mass[head] * lds.decay[head] + sum;
    lds.top[head] = lds.new_top[head];
  }
}

#if !defined(ROW_HEADS)

// ---- values ----

constexpr int kOwnTiles = WIDTH / kTile / kWaves;
typedef rl::AccF32 Out[kHeadTiles][kOwnTiles];  // [head][channel]

RL_DEV void rescale(Out& out, const float* by) {
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float factor = by[h * kTile + rl::acc_row(i)];
#pragma unroll
      for (int c = 0; c < kOwnTiles; ++c) out[h][c].v[i] *= factor;
    }
    rl::no_overlap();
  }
}

RL_DEV void add_values(Out& out, const Lds& lds, int half) {
  const rl_u16* columns = lds.rows + rl::wave() * kOwnTiles * kTile;
#pragma unroll
  for (int t = 0; t < kHalfTiles; ++t) {
    rl::FragBF16 values[kOwnTiles];
#pragma unroll
    for (int c = 0; c < kOwnTiles; ++c) {
      values[c] = rl::load_cols_lds(columns + t * kTile * kStride + c * kTile, kStride);
      rl::no_overlap();
    }
#pragma unroll
    for (int h = 0; h < kHeadTiles; ++h) {
      const rl_u16* weights = lds.weights + h * kTile * kWeightStride + half * kHalf + t * kTile;
      const rl::FragBF16 p = rl::load_rows_lds(weights, kWeightStride);
#pragma unroll
      for (int c = 0; c < kOwnTiles; ++c) rl::mma(out[h][c], p, values[c]);
      rl::no_overlap();
    }
  }
}

// Through LDS, as many heads at a time as a half has rows: 16 bytes a store, and pairs that turn are together.
RL_DEV void finish(rl_u16* out_row, Out& out, Lds& lds, const Ends& ends) {
  constexpr int kPieces = WIDTH / kPiece, kHeadsAtOnce = kThreads / kPieces;
  const int own_head = rl_tid() / kPieces, channel = rl_tid() % kPieces * kPiece;
  const Turn turn = load_turn(ends.cosines, ends.sines, ends.n_pairs, ends.row, channel);  // on its way meanwhile
  if (const int head = rl_tid(); head < HEADS)
    lds.decay[head] = last_factor(lds.mass[head], lds.top[head], ends.sink[head]);
  rl_sync();
  rescale(out, lds.decay);
#pragma unroll
  for (int tile0 = 0; tile0 < kHeadTiles; tile0 += kHalfTiles) {
    if (tile0) rl_sync();
#pragma unroll
    for (int h = tile0; h < kHeadTiles && h < tile0 + kHalfTiles; ++h) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        rl_u16* row = lds.rows + ((h - tile0) * kTile + rl::acc_row(i)) * kStride + rl::acc_col(i);
#pragma unroll
        for (int c = 0; c < kOwnTiles; ++c) row[(rl::wave() * kOwnTiles + c) * kTile] = output_bits(out[h][c].v[i]);
      }
    }
    rl_sync();
    const int head0 = tile0 * kTile, n_heads = HEADS - head0 < kHalf ? HEADS - head0 : kHalf;
    if (own_head >= kHeadsAtOnce) continue;  // threads that are left over
#pragma unroll
    for (int head = own_head; head < n_heads; head += kHeadsAtOnce)
      write_piece(out_row + (head0 + head) * WIDTH, channel, lds.rows + head * kStride + channel, turn);
  }
}

RL_DEV void attend(rl_u16* out_row, const rl_u16* queries, Lds& lds, const List& list, const Chosen& chosen,
                   const Ends& ends) {
  for (int slot = rl_tid(); slot < list.n_slots; slot += kThreads) lds.places[slot] = place_of(list, chosen, slot);
  if (const int head = rl_tid(); head < kHeadTiles * kTile) {
    lds.top[head] = kFirstMax;
    lds.mass[head] = 0.0f;
  }
  Queries q;
  if constexpr (kHeadTiles == 1) spread_queries(q, fetch_queries(queries), lds.rows);
  else load_queries(q, queries);
  rl_sync();

  Out acc = {};
  const int own = half_slot();
  int slot0 = next_block(lds.places, list.n_slots, 0);
  Share next = {};
  if (slot0 < list.n_slots) next = fetch_half(list, slot0 + own, lds.places[slot0 + own]);
  while (slot0 < list.n_slots) {
    rl::AccF32 scores = {};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      put_half(lds.rows, next);
      const int other = slot0 + (1 - half) * kHalf + own;
      next = fetch_half(list, other, lds.places[other]);  // on its way meanwhile
      rl_sync();
      score_half(scores, lds.rows, lds.exchange, q, half);
    }
    weigh(scores, lds, lds.places + slot0, ends.scale);
    rescale(acc, lds.decay);
    const int after = next_block(lds.places, list.n_slots, slot0 + kBlock);
#pragma unroll 1
    for (int half = 1; half >= 0; --half) {
      if (half == 0) {
        put_half(lds.rows, next);
        next = {};
        if (after < list.n_slots) next = fetch_half(list, after + own, lds.places[after + own]);
        rl_sync();
      }
      add_values(acc, lds, half);
      rl_sync();
    }
    slot0 = after;
  }
  finish(out_row, acc, lds, ends);
}
#endif
#endif

#if !defined(ROW_HEADS)
RL_KERNEL(kThreads) attention(rl_u16* out,               // [R, HEADS, WIDTH], may be queries
                              const rl_u16* queries,     // [R, HEADS, WIDTH] rotated
                              const rl_u8* window,       // [rings, ring_slots, kWindowBytes]
                              const int* rings,          // [R] ring of a row
                              const int* firsts,         // [R] slot of the first of its window
                              const int* counts,         // [R] how many there are, 1..n_window
                              const rl_u8* rows,         // [pages, rows_per_page, kCompressedBytes]
                              const int* page_tables,    // [sequences, table_width]
                              const int* sequences,      // [R]
                              const int* selected,       // [R, n_selected] ascending, -1 at the end
                              const float* sink,         // [HEADS]
                              const float* cosines,      // [R, n_pairs]
                              const float* sines,        // [R, n_pairs]
                              int ring_slots, int n_window, int n_selected, int rows_per_page, int table_width,
                              int n_pairs,  // of channels at the end of a head that turn back: 0 for none
                              float scale) {
  RL_DYN_SHARED(Lds, shared);
  const int row = rl_bid_x();
  const List list = {window + (rl_i64)rings[row] * ring_slots * kWindowBytes, rows, n_window,
                     (n_window + n_selected + kBlock - 1) / kBlock * kBlock};
  const Chosen chosen = {firsts[row], counts[row], ring_slots, selected + (rl_i64)row * n_selected, n_selected,
                         n_selected ? page_tables + (rl_i64)sequences[row] * table_width : nullptr, rows_per_page};
  attend(out + (rl_i64)row * HEADS * WIDTH, queries + (rl_i64)row * HEADS * WIDTH, *shared, list, chosen,
         {sink, cosines, sines, row, n_pairs, scale});
}
RL_EXPORT(attention)

#else
constexpr int kValueWaves = 8, kColumns = kValueWaves * kTile;  // of a workgroup, a tile a wave
static_assert(kWaves >= 2 * kQuarters && WIDTH % kColumns == 0, "a wave for each quarter of a half's tiles");
typedef rl::FragBF16 BlockValues[2][kHalfTiles];  // of a wave's channels
RL_DEV int value_tile() { return rl::wave() - (kWaves - kValueWaves); }  // negative: none

// As score_half, a tile of 16 slots a wave.
RL_DEV void score_tile(rl::AccF32& mine, const rl_u16* rows, Exchange& exchange, const Queries& q, int half) {
  const int t = rl::wave() / kQuarters, quarter = rl::wave() % kQuarters, to = half * kHalfTiles + t;
  rl::AccF32 acc = {};
  if (t < kHalfTiles) {
    rows += t * kTile * kStride + quarter * kOwnSteps * kTile;
#pragma unroll
    for (int s = 0; s < kOwnSteps; ++s) {
      rl::mma(acc, rl::load_rows_lds(rows + s * kTile, kStride), q[s]);
      rl::no_overlap();
    }
    if (to != quarter) {
      Scores4* out = exchange[0][t][quarter < to ? quarter : quarter - 1] + rl::lane();
      out[0] = {{acc.v[0], acc.v[1], acc.v[2], acc.v[3]}};
      out[32] = {{acc.v[4], acc.v[5], acc.v[6], acc.v[7]}};
    }
  }
  rl_sync();
  if (t >= kHalfTiles || to != quarter) return;
  mine = acc;
#pragma unroll
  for (int from = 0; from < kQuarters - 1; ++from) {
    const Scores4* other = exchange[0][t][from] + rl::lane();
    const Scores4 low = other[0], high = other[32];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mine.v[i] += low.v[i];
      mine.v[4 + i] += high.v[i];
    }
  }
}

// A wave's 16 channels of 16 heads; rows, after the last block, are free.
RL_DEV void finish_columns(rl_u16* out_heads, const rl::AccF32& acc, Lds& lds, const Ends& ends, int channel0) {
  constexpr int kPieces = kColumns / kPiece, kOutStride = kColumns + 8;
  const int head = rl_tid() / kPieces, at = rl_tid() % kPieces * kPiece;
  const Turn turn = load_turn(ends.cosines, ends.sines, ends.n_pairs, ends.row, channel0 + at);
  if (const int own = rl_tid(); own < HEADS) lds.decay[own] = last_factor(lds.mass[own], lds.top[own], ends.sink[own]);
  rl_sync();
  if (value_tile() >= 0) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      lds.rows[rl::acc_row(i) * kOutStride + value_tile() * kTile + rl::acc_col(i)] =
          output_bits(acc.v[i] * lds.decay[rl::acc_row(i)]);
  }
  rl_sync();
  if (head < HEADS) write_piece(out_heads + head * WIDTH, channel0 + at, lds.rows + head * kOutStride + at, turn);
}

RL_DEV void attend_window(rl_u16* out_heads, const rl_u16* queries, Lds& lds, const List& list, const Chosen& chosen,
                          const Ends& ends, int channel0) {
  const QueryRows heads = fetch_queries(queries);
  for (int slot = rl_tid(); slot < list.n_slots; slot += kThreads) lds.places[slot] = place_of(list, chosen, slot);
  if (const int head = rl_tid(); head < kTile) {
    lds.top[head] = kFirstMax;
    lds.mass[head] = 0.0f;
  }
  Queries q;
  spread_queries(q, heads, lds.rows);
  const int own = half_slot();
  int slot0 = next_block(lds.places, list.n_slots, 0);
  Share next = {};
  if (slot0 < list.n_slots) next = fetch_half(list, slot0 + own, lds.places[slot0 + own]);
  rl_sync();
  const rl_u16* columns = lds.rows + channel0 + value_tile() * kTile;
  rl::AccF32 acc = {};
#pragma unroll 1
  while (slot0 < list.n_slots) {
    rl::AccF32 scores = {};
    BlockValues values;
    const int after = next_block(lds.places, list.n_slots, slot0 + kBlock);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      put_half(lds.rows, next);
      const int coming = half ? after + own : slot0 + kHalf + own;
      next = Share{};
      if (coming < list.n_slots) next = fetch_half(list, coming, lds.places[coming]);  // on its way meanwhile
      rl_sync();
      if (value_tile() >= 0) {
#pragma unroll
        for (int t = 0; t < kHalfTiles; ++t)
          values[half][t] = rl::load_cols_lds(columns + t * kTile * kStride, kStride);
      }
      score_tile(scores, lds.rows, lds.exchange, q, half);
    }
    weigh(scores, lds, lds.places + slot0, ends.scale);
    if (value_tile() >= 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) acc.v[i] *= lds.decay[rl::acc_row(i)];
#pragma unroll
      for (int half = 1; half >= 0; --half)
#pragma unroll
        for (int t = 0; t < kHalfTiles; ++t)
          rl::mma(acc, rl::load_rows_lds(lds.weights + half * kHalf + t * kTile, kWeightStride), values[half][t]);
    }
    rl_sync();
    slot0 = after;
  }
  finish_columns(out_heads, acc, lds, ends, channel0);
}

RL_KERNEL(kThreads) attention_window(rl_u16* out,  // may not be queries; the others as in attention
                                     const rl_u16* queries, const rl_u8* window, const int* rings, const int* firsts,
                                     const int* counts, const float* sink, const float* cosines, const float* sines,
                                     int ring_slots, int n_window, int n_pairs, float scale) {
  RL_DYN_SHARED(Lds, shared);
  constexpr int kColumnGroups = WIDTH / kColumns;
  const int row = rl_bid_x(), head0 = rl_bid_y() / kColumnGroups * HEADS;
  const List list = {window + (rl_i64)rings[row] * ring_slots * kWindowBytes, nullptr, n_window,
                     (n_window + kBlock - 1) / kBlock * kBlock};
  const Chosen chosen = {firsts[row], counts[row], ring_slots, nullptr, 0, nullptr, 1};
  const rl_i64 at = ((rl_i64)row * ROW_HEADS + head0) * WIDTH;
  attend_window(out + at, queries + at, *shared, list, chosen, {sink + head0, cosines, sines, row, n_pairs, scale},
                rl_bid_y() % kColumnGroups * kColumns);
}
RL_EXPORT(attention_window)
#endif
