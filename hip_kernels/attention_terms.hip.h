// attention_terms.hip.h: what attention's kernels share: a row's list, its slots decoded, scores of half a block,
// weights, and head outputs on their way out (backbone.md section 5.4 to 5.6). For attention.hip, where a workgroup
// does a row or, with ROW_HEADS, many do a row that has only its window, and attention_few.hip, where many do any row:
// by the same steps, so that a row's bits are the same.
//
// The list goes by in blocks of 64 slots, which is where the running maximum moves, and a block in halves of 32 rows
// decoded to BF16: all 64 would fill the LDS.
#pragma once
#include "row_terms.hip.h"

constexpr int kTile = 16, kHeadTiles = (HEADS + kTile - 1) / kTile, kQuarters = 4;
constexpr int kBlock = 64, kHalf = kBlock / 2, kHalfTiles = kHalf / kTile;
constexpr int kOwnSteps = WIDTH / kQuarters / kTile;
#if defined(ROW_HEADS)
constexpr bool kWindowOnly = true;
constexpr int kWaves = WIDTH / kTile < 16 ? WIDTH / kTile : 16;  // as many as have a run of a row each
#else
constexpr bool kWindowOnly = false;
constexpr int kWaves = kQuarters * kHeadTiles;  // of a workgroup that has all heads
#endif
constexpr int kThreads = 32 * kWaves;
static_assert(WIDTH % (kQuarters * kTile * kHeadTiles) == 0, "what waves share is whole tiles");
constexpr int kStride = WIDTH + 8;  // 16 rows' pieces fall on different banks
constexpr int kWindowBytes = WIDTH + WIDTH / 32, kCompressedBytes = WIDTH / 2 + WIDTH / 16;
constexpr int kRun = 16;  // channels of a compressed row's scale group
constexpr float kFirstMax = -1e30f, kLog2E = 1.44269504088896341f;

// ---- a row's list ----

struct List {
  const rl_u8* window;  // its ring
  const rl_u8* rows;    // pool of compressed rows
  int n_window, n_slots;
};

struct Chosen {  // what is in it
  int first, count, ring_slots;  // of the window
  const int* selected;
  int n_selected;
  const int* page_table;
  int rows_per_page;
};

// Row of the window's ring or of the pool; -1 where there is none.
RL_DEV int place_of(const List& list, const Chosen& chosen, int slot) {
  const int i = slot - list.n_window;
  if (i < 0) return slot < chosen.count ? (chosen.first + slot) % chosen.ring_slots : -1;
  if (i >= chosen.n_selected || chosen.selected[i] < 0) return -1;
  const int row = chosen.selected[i];
  return chosen.page_table[row / chosen.rows_per_page] * chosen.rows_per_page + row % chosen.rows_per_page;
}

RL_DEV bool block_is_there(const int* places) {
  return rl::ballot(rl::Max::of(places[rl::lane()], places[rl::lane() + 32]) >= 0) != 0;
}

// The first block from slot0 on of which something is there; the others change no bit.
RL_DEV int next_block(const int* places, int n_slots, int slot0) {
  while (slot0 < n_slots && !block_is_there(places + slot0)) slot0 += kBlock;
  return slot0;
}

// ---- a slot's row: fetched as it is stored, then decoded ----

template <int kRuns> struct Packed {
  int codes[kRuns][kRun / 4];
  int scales[(kRuns + 3) / 4];  // a byte each
  int bits;    // of a code: 0 for none, 4 or 8
};

template <int kInts, int kRowBytes> RL_DEV void load_ints(int* to, const rl_u8* p) {
  if constexpr (kRowBytes % (4 * kInts) == 0) {  // as one load
    struct alignas(4 * kInts) Words {
      int word[kInts];
    };
    const Words words = *(const Words*)p;
#pragma unroll
    for (int i = 0; i < kInts; ++i) to[i] = words.word[i];
  } else {
#pragma unroll
    for (int i = 0; i < kInts; ++i) {
      if constexpr (kRowBytes % 4 == 0) to[i] = ((const int*)p)[i];
      else to[i] = (int)(((const rl_u16*)p)[2 * i] | (rl_u32)((const rl_u16*)p)[2 * i + 1] << 16);
    }
  }
}

// Runs of 16 channels from `channel` on, kStep apart.
template <int kRuns, int kStep> RL_DEV Packed<kRuns> fetch(const List& list, int slot, int place, int channel) {
  Packed<kRuns> p = {};
  if (place < 0) return p;
  if (kWindowOnly || slot < list.n_window) {
    p.bits = 8;
    const rl_u8* row = list.window + (rl_i64)place * kWindowBytes;
    const rl_u8* codes = row + channel;
    const rl_u8* scales = row + WIDTH + channel / 32;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      load_ints<4, kWindowBytes>(p.codes[i], codes + i * kStep);
      p.scales[i / 4] |= scales[i * kStep / 32] << (8 * (i % 4));
    }
  } else {
    p.bits = 4;
    const rl_u8* row = list.rows + (rl_i64)place * kCompressedBytes;
    const rl_u8* codes = row + channel / 2;
    const rl_u8* scales = row + WIDTH / 2 + channel / 16;
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      load_ints<2, kCompressedBytes>(p.codes[i], codes + i * kStep / 2);
      p.scales[i / 4] |= scales[i * kStep / 16] << (8 * (i % 4));
    }
  }
  return p;
}

template <int kRuns, int kStep> RL_DEV void put(rl_u16* at, const Packed<kRuns>& p) {
#pragma unroll
  for (int i = 0; i < kRuns; ++i) {
    const int scale = p.scales[i / 4] >> (8 * (i % 4)) & 255;
    rl::Words4 low = {}, high = {};
    if (p.bits == 8) {
      low = e4m3_values(p.codes[i][0], p.codes[i][1], scale);
      high = e4m3_values(p.codes[i][2], p.codes[i][3], scale);
    } else if (!kWindowOnly && p.bits == 4) {
      const E2m1Table table = e2m1_table(scale);
      low = rl::look_up(table.pairs, p.codes[i][0]);
      high = rl::look_up(table.pairs, p.codes[i][1]);
    }
    store_words(at + i * kStep, low);
    store_words(at + i * kStep + kPiece, high);
  }
}

// Of a half, shared by all threads of a workgroup.
constexpr int kSlotThreads = kThreads / kHalf, kRuns = WIDTH / kRun / kSlotThreads, kStep = kSlotThreads * kRun;
typedef Packed<kRuns> Share;
RL_DEV int half_slot() { return rl_tid() / kSlotThreads; }
RL_DEV int half_channel() { return rl_tid() % kSlotThreads * kRun; }
RL_DEV Share fetch_half(const List& list, int slot, int place) {
  return fetch<kRuns, kStep>(list, slot, place, half_channel());
}
RL_DEV void put_half(rl_u16* rows, const Share& p) {
  put<kRuns, kStep>(rows + half_slot() * kStride + half_channel(), p);
}

// ---- scores ----
// Wave (h, q) has heads 16h.. and the channels of quarter q, whose queries stay in registers. The quarters of a block's
// q-th 16 slots are added in wave (h, q), its own first, then the others in order.

typedef rl::FragBF16 Queries[kOwnSteps];
struct alignas(16) Scores4 {
  float v[4];
};
typedef Scores4 Exchange[kHeadTiles][kHalfTiles][kQuarters - 1][2 * 32];  // a lane's, by halves

// Two ways: straight, or as whole heads through LDS, as many at a time as fit in the place of a half. That way heads
// that are not there are zeros.
RL_DEV void load_queries(Queries& q, const rl_u16* row) {
  const int tile = rl::wave() / kQuarters, channel0 = rl::wave() % kQuarters * kOwnSteps * kTile;
#pragma unroll
  for (int s = 0; s < kOwnSteps; ++s) q[s] = rl::load_rows(row + tile * kTile * WIDTH + channel0 + s * kTile, WIDTH);
}

constexpr int kRowPieces = WIDTH / kPiece, kSpreadHeads = kHeadTiles == 1 ? kTile : kHalf;
constexpr int kSpreadTimes = (kHeadTiles * kTile + kSpreadHeads - 1) / kSpreadHeads;
constexpr int kSpreadPieces = kSpreadHeads * kRowPieces / kThreads;
static_assert(kSpreadPieces * kThreads == kSpreadHeads * kRowPieces, "threads have as many pieces each");
struct QueryRows {
  rl::Words4 words[kSpreadTimes][kSpreadPieces];
};
RL_DEV QueryRows fetch_queries(const rl_u16* row) {
  QueryRows r = {};
#pragma unroll
  for (int k = 0; k < kSpreadTimes * kSpreadPieces; ++k) {
    const int i = k * kThreads + rl_tid();
    if (HEADS == kSpreadTimes * kSpreadHeads || i < HEADS * kRowPieces)
      r.words[k / kSpreadPieces][k % kSpreadPieces] = load_words(row + i * kPiece);
  }
  return r;
}
// Passes barriers; another is wanted before `rows` is written again.
RL_DEV void spread_queries(Queries& q, const QueryRows& r, rl_u16* rows) {
  const int tile = kHeadTiles == 1 ? 0 : rl::wave() / kQuarters, channel0 = rl::wave() % kQuarters * kOwnSteps * kTile;
#pragma unroll
  for (int time = 0; time < kSpreadTimes; ++time) {
    if (time) rl_sync();
#pragma unroll
    for (int k = 0; k < kSpreadPieces; ++k) {
      const int i = k * kThreads + rl_tid();
      store_words(rows + i / kRowPieces * kStride + i % kRowPieces * kPiece, r.words[time][k]);
    }
    rl_sync();
    if (tile / kHalfTiles != time) continue;
#pragma unroll
    for (int s = 0; s < kOwnSteps; ++s)
      q[s] = rl::load_rows_lds(rows + tile % kHalfTiles * kTile * kStride + channel0 + s * kTile, kStride);
  }
}

// Products of this wave's channels with a half's slots, [slot][head]; `mine` changes in waves whose 16 slots these are.
RL_DEV void score_half(rl::AccF32& mine, const rl_u16* rows, Exchange& exchange, const Queries& q, int half) {
  const int tile = rl::wave() / kQuarters, quarter = rl::wave() % kQuarters;
  rows += quarter * kOwnSteps * kTile;
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
      Scores4* out = exchange[tile][t][quarter < to ? quarter : quarter - 1] + rl::lane();
      out[0] = {{acc.v[0], acc.v[1], acc.v[2], acc.v[3]}};
      out[32] = {{acc.v[4], acc.v[5], acc.v[6], acc.v[7]}};
    }
  }
  rl_sync();
  if (quarter / kHalfTiles != half) return;
#pragma unroll
  for (int from = 0; from < kQuarters - 1; ++from) {
    const Scores4* other = exchange[tile][quarter % kHalfTiles][from] + rl::lane();
    const Scores4 low = other[0], high = other[32];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mine.v[i] += low.v[i];
      mine.v[4 + i] += high.v[i];
    }
    rl::no_overlap();
  }
}

// ---- weights ----

// A NaN need not pass through a maximum: its own weight is one, and so is the sum of weights then.
struct Largest {
  RL_DEV float of(float a, float b) { return rl::max(a, b); }
};
RL_DEV float scaled(float score, bool there, float scale) {
  return there ? score * scale : rl::as_float((int)0xFF800000);
}
RL_DEV float exp_of(float difference) { return rl::exp2(difference * kLog2E); }
// Of 0..1. What becomes of a NaN does not matter: the sum of weights keeps it.
RL_DEV rl_u16 weight_bits(float weight) {
  const rl_u32 bits = (rl_u32)rl::as_int(weight);
  return (rl_u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
RL_DEV bool has_columns() { return rl::acc_row(0) == 0; }  // lanes that have every column between them

// What a head's output is multiplied by at the end; the sink is in the denominator only.
RL_DEV float last_factor(float mass, float top, float sink) { return 1.0f / (mass + exp_of(sink - top)); }

// ---- head outputs on their way out ----

struct Ends {  // what a row wants beside its list
  const float *sink, *cosines, *sines;
  int row, n_pairs;
  float scale;  // of scores
};

// Which of two NaNs a sum keeps is the target's and the compiler's choice: a row's bits have one NaN.
RL_DEV rl_u16 output_bits(float v) { return v == v ? rl::f32_to_bf16(v) : (rl_u16)0x7FC0; }

// Of the eight channels of a head that a thread writes, for every head: back by the row's position, if they turn.
struct Turn {
  bool turns;
  float cosines[kPiece / 2], sines[kPiece / 2];
};
RL_DEV Turn load_turn(const float* cosines, const float* sines, int n_pairs, int row, int channel) {
  Turn t = {};
  const int pair = (channel - (WIDTH - 2 * n_pairs)) / 2;
  t.turns = n_pairs > 0 && pair >= 0;
  if (!t.turns) return t;
  const rl_i64 at = (rl_i64)row * n_pairs + pair;
#pragma unroll
  for (int c = 0; c < kPiece / 2; ++c) {
    t.cosines[c] = cosines[at + c];
    t.sines[c] = -sines[at + c];
  }
  return t;
}

// Outputs are rounded to BF16 before they turn and again after.
RL_DEV void write_piece(rl_u16* head, int channel, const rl_u16* lds, const Turn& turn) {
  rl::Words4 words = load_words(lds);
  if (turn.turns) {
    Piece p = unpack(words);
#pragma unroll
    for (int c = 0; c < kPiece / 2; ++c) rotate(p.v[2 * c], p.v[2 * c + 1], turn.cosines[c], turn.sines[c]);
    words = pack(p);
  }
  ((rl::Words4*)head)[channel / kPiece] = words;
}
