// attention: rows over their local window and selected compressed rows, key and value being one vector (backbone.md
// section 5.4 and 5.5). One workgroup a row: its list is gathered once for all HEADS heads.
// Grid (R, 1); 4 waves for each 16 heads; LDS as in struct Lds.
//
// The list goes by in blocks of 64 slots, which is where the running maximum moves, and a block in halves of 32 rows
// decoded to BF16: all 64 would fill the LDS. Scores need both halves before any value is weighed; then the second is
// still there, and the first is decoded again. What is decoded next is on its way from memory meanwhile.
//   scores   wave (h, q): heads 16h.., channels of quarter q, whose queries stay in registers. The quarters of the q-th
//            16 slots are added in wave (h, q), its own first, then the others in order; it makes their weights.
//   values   each wave all heads, its own channels: slots 32.. first, then 0..
// No step sees another row, so a row's bits are its own.
//
// Budget on gfx1100: attention: 192 VGPRs, 63488 bytes of LDS, 8 waves per SIMD, no scratch.
#include "row_terms.hip.h"

constexpr int kTile = 16, kHeadTiles = (HEADS + kTile - 1) / kTile, kQuarters = 4;
constexpr int kWaves = kQuarters * kHeadTiles, kThreads = 32 * kWaves;
constexpr int kBlock = 64, kHalf = kBlock / 2, kHalfTiles = kHalf / kTile;
constexpr int kOwnSteps = WIDTH / kQuarters / kTile, kOwnTiles = WIDTH / kTile / kWaves;
static_assert(WIDTH % 64 == 0 && (WIDTH / kTile) % kWaves == 0, "quarters and own channels are whole tiles");
constexpr int kStride = WIDTH + 8, kWeightStride = kBlock + 8;  // 16 rows' pieces fall on different banks
constexpr int kWindowBytes = WIDTH + WIDTH / 32, kCompressedBytes = WIDTH / 2 + WIDTH / 16;
constexpr int kSlotThreads = kThreads / kHalf;
constexpr int kCodes = 16;  // channels of a thread's run: a compressed row's scale group
constexpr int kOwnRuns = WIDTH / kCodes / kSlotThreads, kRunStep = kSlotThreads * kCodes;
constexpr float kFirstMax = -1e30f, kLog2E = 1.44269504088896341f;

struct Lds {
  rl_u16 rows[kHalf * kStride];
  union {
    float quarters[kHeadTiles][kHalfTiles][kQuarters - 1][kTile * kTile];
    rl_u16 weights[kHeadTiles * kTile * kWeightStride];  // [head][slot]
  };
  float tops[kQuarters][kHeadTiles * kTile];  // of 16 slots each
  float sums[kQuarters][kHeadTiles * kTile];
  float decay[kHeadTiles * kTile];
  float top[kHeadTiles * kTile], new_top[kHeadTiles * kTile], mass[kHeadTiles * kTile];  // running
  int places[1];  // of all slots: row of the window's ring or of the pool, -1 where there is none
};

struct List {  // of one row
  const rl_u8* window;  // its ring
  const rl_u8* rows;    // pool of compressed rows
  int n_window, n_slots;
};

RL_DEV void find_places(int* places, const List& list, int first, int count, int ring_slots, const int* selected,
                        int n_selected, const int* page_table, int rows_per_page) {
  for (int slot = rl_tid(); slot < list.n_slots; slot += kThreads) {
    const int i = slot - list.n_window;
    int place = -1;
    if (i < 0) {
      if (slot < count) place = (first + slot) % ring_slots;
    } else if (i < n_selected && selected[i] >= 0) {
      place = page_table[selected[i] / rows_per_page] * rows_per_page + selected[i] % rows_per_page;
    }
    places[slot] = place;
  }
}

// The first block from slot0 on of which something is there; the others change no bit.
RL_DEV int next_block(const int* places, int n_slots, int slot0) {
  for (; slot0 < n_slots; slot0 += kBlock) {
    const int most = rl::Max::of(places[slot0 + rl::lane()], places[slot0 + rl::lane() + 32]);
    if (rl::ballot(most >= 0)) break;
  }
  return slot0;
}

// ---- a slot's row: fetched as it is stored, then decoded ----

struct Packed {
  int codes[kOwnRuns][kCodes / 4];
  int scales;  // a byte each
  int bits;  // of a code: 0 for none, 4 or 8
};

RL_DEV int first_channel() { return rl_tid() % kSlotThreads * kCodes; }

template <int kInts> RL_DEV void load_ints(int* to, const rl_u8* p) {
#pragma unroll
  for (int i = 0; i < kInts; ++i) {
    if constexpr (kWindowBytes % 4 == 0) to[i] = ((const int*)p)[i];
    else to[i] = (int)(((const rl_u16*)p)[2 * i] | (rl_u32)((const rl_u16*)p)[2 * i + 1] << 16);
  }
}

RL_DEV Packed fetch(const List& list, int slot, int place) {
  Packed p = {};
  if (place < 0) return p;
  if (slot < list.n_window) {
    p.bits = 8;
    const rl_u8* row = list.window + (rl_i64)place * kWindowBytes;
    const rl_u8* codes = row + first_channel();
    const rl_u8* scales = row + WIDTH + first_channel() / 32;
#pragma unroll
    for (int i = 0; i < kOwnRuns; ++i) {
      load_ints<4>(p.codes[i], codes + i * kRunStep);
      p.scales |= scales[i * kRunStep / 32] << (8 * i);
    }
  } else {
    p.bits = 4;
    const rl_u8* row = list.rows + (rl_i64)place * kCompressedBytes;
    const rl_u8* codes = row + first_channel() / 2;
    const rl_u8* scales = row + WIDTH / 2 + first_channel() / 16;
#pragma unroll
    for (int i = 0; i < kOwnRuns; ++i) {
      load_ints<2>(p.codes[i], codes + i * kRunStep / 2);
      p.scales |= scales[i * kRunStep / 16] << (8 * i);
    }
  }
  return p;
}

RL_DEV void put(rl_u16* rows, const Packed& p) {
  rl_u16* own = rows + rl_tid() / kSlotThreads * kStride + first_channel();
#pragma unroll
  for (int i = 0; i < kOwnRuns; ++i) {
    const int scale = p.scales >> (8 * i) & 255;
    rl::Words4 low = {}, high = {};
    if (p.bits == 8) {
      low = e4m3_values(p.codes[i][0], p.codes[i][1], scale);
      high = e4m3_values(p.codes[i][2], p.codes[i][3], scale);
    } else if (p.bits == 4) {
      const E2m1Table table = e2m1_table(scale);
      low = rl::look_up(table.pairs, p.codes[i][0]);
      high = rl::look_up(table.pairs, p.codes[i][1]);
    }
    store_words(own + i * kRunStep, low);
    store_words(own + i * kRunStep + kPiece, high);
  }
}

// ---- scores ----

typedef rl::FragBF16 Queries[kOwnSteps];

RL_DEV void load_queries(Queries& q, const rl_u16* row, rl_u16* lds) {
  const int tile = rl::wave() / kQuarters, channel0 = rl::wave() % kQuarters * kOwnSteps * kTile;
  if constexpr (HEADS % kTile == 0) {
#pragma unroll
    for (int s = 0; s < kOwnSteps; ++s)
      q[s] = rl::load_rows(row + tile * kTile * WIDTH + channel0 + s * kTile, WIDTH);
  } else {  // heads that are not there are zeros, through LDS
    static_assert(HEADS % kTile == 0 || kHeadTiles * kTile <= kHalf, "all heads' queries fit where a half's rows do");
    for (int i = rl_tid(); i < kHeadTiles * kTile * WIDTH / kPiece; i += kThreads) {
      const int head = i / (WIDTH / kPiece), channel = i % (WIDTH / kPiece) * kPiece;
      rl::Words4 words = {};
      if (head < HEADS) words = load_words(row + head * WIDTH + channel);
      store_words(lds + head * kStride + channel, words);
    }
    rl_sync();
#pragma unroll
    for (int s = 0; s < kOwnSteps; ++s)
      q[s] = rl::load_rows_lds(lds + tile * kTile * kStride + channel0 + s * kTile, kStride);
    rl_sync();
  }
}

// Products of this wave's channels with a half's slots, [slot][head]; the quarters of each 16 slots are added in one wave.
RL_DEV void score_half(rl::AccF32& mine, Lds& lds, const Queries& q, int half) {
  const int tile = rl::wave() / kQuarters, quarter = rl::wave() % kQuarters;
  const rl_u16* rows = lds.rows + quarter * kOwnSteps * kTile;
#pragma unroll
  for (int t = 0; t < kHalfTiles; ++t) {
    rl::AccF32 acc = {};
#pragma unroll
    for (int s = 0; s < kOwnSteps; ++s) {
      rl::mma(acc, rl::load_rows_lds(rows + t * kTile * kStride + s * kTile, kStride), q[s]);
      rl::no_overlap();  // loads further ahead would take the registers of a resident workgroup
    }
    const int to = half * kHalfTiles + t;  // the quarter that adds this tile
    if (to == quarter) {
      mine = acc;
    } else {
      float* out = lds.quarters[tile][t][quarter < to ? quarter : quarter - 1] + rl::lane();
#pragma unroll
      for (int i = 0; i < 8; ++i) out[i * 32] = acc.v[i];
    }
  }
  rl_sync();
  if (quarter / kHalfTiles != half) return;
#pragma unroll
  for (int from = 0; from < kQuarters - 1; ++from) {
    const float* other = lds.quarters[tile][quarter % kHalfTiles][from] + rl::lane();
#pragma unroll
    for (int i = 0; i < 8; ++i) mine.v[i] += other[i * 32];
  }
}

// ---- weights ----

// From this wave's 16 slots x 16 heads of scores to weights in LDS, and what the maximum's move did to earlier ones.
RL_DEV void weigh(const rl::AccF32& scores, Lds& lds, const int* places, float scale) {
  const int head0 = rl::wave() / kQuarters * kTile, quarter = rl::wave() % kQuarters;
  const bool first_lanes = rl::acc_row(0) == 0;  // between them they have every column
  float s[8], top[rl::kOwnCols], over[rl::kOwnCols];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const bool there = places[quarter * kTile + rl::acc_row(i)] >= 0;
    s[i] = there ? scores.v[i] * scale : rl::as_float((int)0xFF800000);
  }
  rl::over_rows<rl::Max>(s, over);
#pragma unroll
  for (int j = 0; j < rl::kOwnCols; ++j)
    if (first_lanes) lds.tops[quarter][head0 + rl::own_col(j)] = over[j];
  rl_sync();  // and the quarters are read: weights may take their place
#pragma unroll
  for (int j = 0; j < rl::kOwnCols; ++j) {
    const int head = head0 + rl::own_col(j);
    top[j] = lds.top[head];
#pragma unroll
    for (int k = 0; k < kQuarters; ++k) top[j] = rl::Max::of(top[j], lds.tops[k][head]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    s[i] = rl::exp2((s[i] - top[rl::col_of(i)]) * kLog2E);
    lds.weights[(head0 + rl::acc_col(i)) * kWeightStride + quarter * kTile + rl::acc_row(i)] = rl::f32_to_bf16(s[i]);
  }
  rl::over_rows<rl::Add>(s, over);
#pragma unroll
  for (int j = 0; j < rl::kOwnCols; ++j) {
    const int head = head0 + rl::own_col(j);
    if (!first_lanes) continue;
    lds.sums[quarter][head] = over[j];
    if (quarter == 0) {
      lds.decay[head] = rl::exp2((lds.top[head] - top[j]) * kLog2E);
      lds.new_top[head] = top[j];
    }
  }
  rl_sync();
  if (const int head = rl_tid(); head < kHeadTiles * kTile) {  // nobody else reads these before the next block's end
    const float sum = ((lds.sums[0][head] + lds.sums[1][head]) + lds.sums[2][head]) + lds.sums[3][head];
    lds.mass[head] = lds.mass[head] * lds.decay[head] + sum;
    lds.top[head] = lds.new_top[head];
  }
}

// ---- values ----

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

RL_DEV void finish(rl_u16* out_row, Out& out, Lds& lds, const float* sink) {
  if (const int head = rl_tid(); head < HEADS)
    lds.decay[head] = 1.0f / (lds.mass[head] + rl::exp2((sink[head] - lds.top[head]) * kLog2E));
  rl_sync();
  rescale(out, lds.decay);
#pragma unroll
  for (int h = 0; h < kHeadTiles; ++h) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int head = h * kTile + rl::acc_row(i);
      if (head >= HEADS) continue;
#pragma unroll
      for (int c = 0; c < kOwnTiles; ++c)
        out_row[head * WIDTH + (rl::wave() * kOwnTiles + c) * kTile + rl::acc_col(i)] = rl::f32_to_bf16(out[h][c].v[i]);
    }
  }
}

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
                              int ring_slots, int n_window, int n_selected, int rows_per_page, int table_width,
                              float scale) {
  RL_DYN_SHARED(Lds, shared);
  Lds& lds = *shared;
  const int row = rl_bid_x();
  const List list = {window + (rl_i64)rings[row] * ring_slots * kWindowBytes, rows, n_window,
                     (n_window + n_selected + kBlock - 1) / kBlock * kBlock};
  const int* page_table = n_selected ? page_tables + (rl_i64)sequences[row] * table_width : nullptr;
  find_places(lds.places, list, firsts[row], counts[row], ring_slots, selected + (rl_i64)row * n_selected, n_selected,
              page_table, rows_per_page);
  if (const int head = rl_tid(); head < kHeadTiles * kTile) {
    lds.top[head] = kFirstMax;
    lds.mass[head] = 0.0f;
  }
  Queries q;
  load_queries(q, queries + (rl_i64)row * HEADS * WIDTH, lds.rows);
  rl_sync();

  Out acc = {};
  const int own = rl_tid() / kSlotThreads;  // of a half
  int slot0 = next_block(lds.places, list.n_slots, 0);
  Packed next = {};
  if (slot0 < list.n_slots) next = fetch(list, slot0 + own, lds.places[slot0 + own]);
  while (slot0 < list.n_slots) {
    rl::AccF32 scores = {};
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      put(lds.rows, next);
      const int other = slot0 + (1 - half) * kHalf + own;
      next = fetch(list, other, lds.places[other]);  // on its way meanwhile
      rl_sync();
      score_half(scores, lds, q, half);
    }
    weigh(scores, lds, lds.places + slot0, scale);
    rescale(acc, lds.decay);
    const int after = next_block(lds.places, list.n_slots, slot0 + kBlock);
#pragma unroll 1
    for (int half = 1; half >= 0; --half) {
      if (half == 0) {
        put(lds.rows, next);
        next = {};
        if (after < list.n_slots) next = fetch(list, after + own, lds.places[after + own]);
        rl_sync();
      }
      add_values(acc, lds, half);
      rl_sync();
    }
    slot0 = after;
  }
  finish(out + (rl_i64)row * HEADS * WIDTH, acc, lds, sink);
}
RL_EXPORT(attention)
