// attention_few: attention.hip's bits where there are too few rows to fill a card with a workgroup each. Many
// workgroups share a row, in two launches, as the running maximum needs all scores before it.
//
// attention_scores: some halves of the blocks of a row's list each. What it decoded it leaves as operands, so that
// nothing is decoded, and nobody waits for others, among the values.
//   Grid (R, ceil(n_slots / 32 / n_parts)); 4 waves for each 16 heads; LDS: struct ScoreLds.
// attention_values: 16 heads and kColumns channels of a row each: weights of the whole list, then a wave adds its 16
// channels of all blocks. A list counts as kMostBlocks blocks, empty ones at the end: straight code takes less time
// than fewer slots would save, and an empty block changes no weight and no sum of weights.
//   Grid (R, kHeadTiles * WIDTH / kColumns); kValueWaves waves; LDS: struct ValueLds.
//
// Budget on gfx1100: attention_scores: 120 VGPRs, 60416 bytes of LDS, 8 waves per SIMD, no scratch.
// Budget on gfx1100: attention_values: 192 VGPRs, 32064 bytes of LDS, 8 waves per SIMD, no scratch.
#include "attention_terms.hip.h"

constexpr int kColTiles = WIDTH / kTile;

// An operand as it lies in lanes, 512 bytes of it.
constexpr int kFragPieces = sizeof(rl::FragBF16) / sizeof(rl::Words4), kFragLanes = 32 / kFragPieces;
constexpr int kFragElements = kTile * kTile;

RL_DEV void store_frag(rl_u16* to, const rl::FragBF16& f) {
  if (rl::lane() >= kFragLanes) return;  // the others have the same
  const int* words = (const int*)&f;
#pragma unroll
  for (int i = 0; i < kFragPieces; ++i)
    ((rl::Words4*)to)[rl::lane() * kFragPieces + i] = {
        {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]}};
}
RL_DEV rl::FragBF16 load_frag(const rl_u16* from) {
  rl::FragBF16 f;
  int* words = (int*)&f;
#pragma unroll
  for (int i = 0; i < kFragPieces; ++i) {
    const rl::Words4 piece = load_words(from + (rl::lane() % kFragLanes * kFragPieces + i) * kPiece);
#pragma unroll
    for (int w = 0; w < 4; ++w) words[4 * i + w] = piece.word[w];
  }
  return f;
}

constexpr int kMostBlocks = 10;

struct ScoreLds {
  rl_u16 rows[kHalf * kStride];
  Exchange exchange;
  int places[kMostBlocks * kBlock];  // of its parts
};

// What a half's rows are as operands, and which are there.
RL_DEV void keep_half(rl_u16* values, rl_u32* there, const rl_u16* rows, const int* places) {
  const rl_u32 lanes = rl::ballot(places[rl::lane()] >= 0);
  if (rl_tid() == 0) *there = lanes;
#pragma unroll
  for (int i = 0; i < kHalfTiles * kColTiles / kWaves; ++i) {
    const int tile = i * kWaves + rl::wave();
    const rl_u16* from = rows + tile / kColTiles * kTile * kStride + tile % kColTiles * kTile;
    store_frag(values + tile * kFragElements, rl::load_cols_lds(from, kStride));
  }
}

RL_KERNEL(kThreads) attention_scores(
    Scores4* scores,        // [R, n_slots / 16, kHeadTiles, 2, 32] a lane's of an accumulator, by halves
    rl_u16* values,         // [R, n_slots / 16, kColTiles, 256] as operands lie
    rl_u32* there,          // [R, n_slots / 32] a bit a slot
    const rl_u16* queries,  // the others as in attention.hip
    const rl_u8* window, const int* rings, const int* firsts, const int* counts, const rl_u8* rows,
    const int* page_tables, const int* sequences, const int* selected, int ring_slots, int n_window, int n_selected,
    int rows_per_page, int table_width,
    int n_parts) {  // halves of a workgroup
  RL_DYN_SHARED(ScoreLds, lds);
  const int row = rl_bid_x(), first = rl_bid_y() * n_parts;
  const List list = {window + (rl_i64)rings[row] * ring_slots * kWindowBytes, rows, n_window,
                     (n_window + n_selected + kBlock - 1) / kBlock * kBlock};
  const Chosen chosen = {firsts[row], counts[row], ring_slots, selected + (rl_i64)row * n_selected, n_selected,
                         n_selected ? page_tables + (rl_i64)sequences[row] * table_width : nullptr, rows_per_page};
  const int n_halves = list.n_slots / kHalf, end = first + n_parts < n_halves ? first + n_parts : n_halves;
  const QueryRows heads = fetch_queries(queries + (rl_i64)row * HEADS * WIDTH);
  for (int i = rl_tid(); i < (end - first) * kHalf; i += kThreads)
    lds->places[i] = place_of(list, chosen, first * kHalf + i);
  Queries q;
  spread_queries(q, heads, lds->rows);
  const int own = half_slot(), tile = rl::wave() / kQuarters, quarter = rl::wave() % kQuarters;
  Share next = fetch_half(list, first * kHalf + own, lds->places[own]);
  rl_sync();
#pragma unroll 1
  for (int part = first; part < end; ++part) {
    put_half(lds->rows, next);
    const int* places = lds->places + (part - first) * kHalf;
    if (part + 1 < end) next = fetch_half(list, (part + 1) * kHalf + own, places[kHalf + own]);
    rl_sync();
    const rl_i64 half = (rl_i64)row * n_halves + part;
    keep_half(values + half * (kHalfTiles * kColTiles * kFragElements), there + half, lds->rows, places);
    rl::AccF32 mine = {};
    score_half(mine, lds->rows, lds->exchange, q, part % 2);
    if (quarter / kHalfTiles != part % 2) continue;
    const rl_i64 at = (half * kHalfTiles + quarter % kHalfTiles) * kHeadTiles + tile;
    Scores4* out = scores + at * 64 + rl::lane();
    out[0] = {{mine.v[0], mine.v[1], mine.v[2], mine.v[3]}};
    out[32] = {{mine.v[4], mine.v[5], mine.v[6], mine.v[7]}};
  }
}
RL_EXPORT(attention_scores)

constexpr int kBlockTiles = kBlock / kTile, kMostTiles = kMostBlocks * kBlockTiles, kTileRoom = kMostTiles + 4;
constexpr int kValueWaves = WIDTH % 128 ? 4 : 8, kValueThreads = 32 * kValueWaves, kColumns = kTile * kValueWaves;
constexpr int kOwnTiles = kMostTiles / kValueWaves;
constexpr int kWeightStride = kMostTiles * kTile + 8, kOutStride = kColumns + 8;
static_assert(kMostTiles % kValueWaves == 0 && kMostBlocks <= 16, "waves have as many tiles each, blocks a lane each");

struct ValueLds {
  rl_u16 weights[kTile * kWeightStride];  // [head][slot]
  float tops[kTile][kTileRoom], sums[kTile][kTileRoom];
  float top[kMostBlocks][kTile], decay[kMostBlocks][kTile];
  float factor[kTile];
  rl_u16 outputs[kTile * kOutStride];
};

struct alignas(16) BlockTiles {  // a float each
  float v[kBlockTiles];
};
RL_DEV BlockTiles load_tiles(const float* of_head, int block) {
  return *(const BlockTiles*)(of_head + block * kBlockTiles);
}

// The running maxima, and what the move to each does to earlier sums: a head's blocks in 16 lanes.
RL_DEV void find_tops(ValueLds& lds) {
  const int block = rl::lane() % 16;
#pragma unroll
  for (int i = 0; i < kTile / 2 / kValueWaves; ++i) {
    const int head = 2 * (i * kValueWaves + rl::wave()) + rl::lane() / 16;
    float top = kFirstMax;
    if (block < kMostBlocks) {
      const BlockTiles tops = load_tiles(lds.tops[head], block);
#pragma unroll
      for (int k = 0; k < kBlockTiles; ++k) top = Largest::of(top, tops.v[k]);
    }
#pragma unroll
    for (int apart = 1; apart < kMostBlocks; apart *= 2)
      top = Largest::of(top, rl::shfl(top, rl::lane() - (block < apart ? 0 : apart)));
    const float before = rl::shfl(top, rl::lane() - (block ? 1 : 0));
    if (block >= kMostBlocks) continue;
    lds.top[block][head] = top;
    lds.decay[block][head] = exp_of((block ? before : kFirstMax) - top);
  }
}

// What each head's output is multiplied by at the end; by one wave, each lane with its head's sink.
RL_DEV void find_factors(ValueLds& lds, float sink) {
  const int head = rl::lane() % kTile;
  float mass = 0.0f;
#pragma unroll
  for (int b = 0; b < kMostBlocks; ++b) {
    const BlockTiles sums = load_tiles(lds.sums[head], b);
    mass = mass * lds.decay[b][head] + (((sums.v[0] + sums.v[1]) + sums.v[2]) + sums.v[3]);
  }
  if (rl::lane() < kTile) lds.factor[head] = last_factor(mass, lds.top[kMostBlocks - 1][head], sink);
}

typedef float Scores[kOwnTiles][8];  // of this wave's tiles of slots: every kValueWaves-th

// From scores to weights of the whole list in LDS, as attention.hip's weigh makes them block by block.
// halves: a half's bits in each lane.
RL_DEV void weigh_list(ValueLds& lds, Scores& s, rl_u32 halves, float scale) {
  float over[rl::kOwnCols];
#pragma unroll
  for (int own = 0; own < kOwnTiles; ++own) {
    const int tile = own * kValueWaves + rl::wave();
    const rl_u32 there = (rl_u32)rl::shfl((int)halves, tile / kHalfTiles) >> (tile % kHalfTiles * kTile);
#pragma unroll
    for (int i = 0; i < 8; ++i) s[own][i] = scaled(s[own][i], there >> rl::acc_row(i) & 1, scale);
    rl::over_rows<Largest>(s[own], over);
#pragma unroll
    for (int j = 0; j < rl::kOwnCols; ++j)
      if (has_columns()) lds.tops[rl::own_col(j)][tile] = over[j];
  }
  rl_sync();
  find_tops(lds);
  rl_sync();
#pragma unroll
  for (int own = 0; own < kOwnTiles; ++own) {
    const int tile = own * kValueWaves + rl::wave();
    float top[rl::kOwnCols];
#pragma unroll
    for (int j = 0; j < rl::kOwnCols; ++j) top[j] = lds.top[tile / kBlockTiles][rl::own_col(j)];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      s[own][i] = exp_of(s[own][i] - top[rl::col_of(i)]);
      lds.weights[rl::acc_col(i) * kWeightStride + tile * kTile + rl::acc_row(i)] = weight_bits(s[own][i]);
    }
    rl::over_rows<rl::Add>(s[own], over);
#pragma unroll
    for (int j = 0; j < rl::kOwnCols; ++j)
      if (has_columns()) lds.sums[rl::own_col(j)][tile] = over[j];
  }
  rl_sync();
}

constexpr int kAhead = 3;  // blocks whose values are on their way
struct Values {            // of a block, 16 channels
  int block;     // -1 behind the last
  rl::FragBF16 tiles[kBlockTiles];
};
// Of the first block of `left`, taken from it: a block is there in every other bit.
RL_DEV Values load_next(const rl_u16* values, rl_u32& left) {
  Values v = {};
  const rl_u32 first = left & (0u - left);
  v.block = first ? rl::popcount(first - 1) / 2 : -1;
  left ^= first;
  if (!first) return v;
#pragma unroll
  for (int t = 0; t < kBlockTiles; ++t)
    v.tiles[t] = load_frag(values + (v.block * kBlockTiles + t) * (kColTiles * kFragElements));
  return v;
}

RL_DEV void add_block(rl::AccF32& acc, const ValueLds& lds, const Values& v) {
#pragma unroll
  for (int i = 0; i < 8; ++i) acc.v[i] *= lds.decay[v.block][rl::acc_row(i)];
#pragma unroll
  for (int half = 1; half >= 0; --half)
#pragma unroll
    for (int t = half * kHalfTiles; t < (half + 1) * kHalfTiles; ++t)
      rl::mma(acc, rl::load_rows_lds(lds.weights + v.block * kBlock + t * kTile, kWeightStride), v.tiles[t]);
}

RL_KERNEL(kValueThreads) attention_values(rl_u16* out,          // [R, HEADS, WIDTH]
                                          const Scores4* scores,  // as attention_scores left them
                                          const rl_u16* values, const rl_u32* there,
                                          const float* sink,    // the others as in attention.hip
                                          const float* cosines, const float* sines, int n_slots, int n_pairs,
                                          float scale) {
  RL_DYN_SHARED(ValueLds, shared);
  ValueLds& lds = *shared;
  const int row = rl_bid_x(), head0 = rl_bid_y() / (WIDTH / kColumns) * kTile;
  const int channel0 = rl_bid_y() % (WIDTH / kColumns) * kColumns;
  const rl_i64 tile0 = (rl_i64)row * (n_slots / kTile);
  const int half = rl::lane();
  const rl_u32 halves = half * kHalf < n_slots ? there[(rl_i64)row * (n_slots / kHalf) + half] : 0;
  scores += (tile0 * kHeadTiles + head0 / kTile) * 64 + rl::lane();
  Scores s;
#pragma unroll
  for (int own = 0; own < kOwnTiles; ++own) {
    const int tile = own * kValueWaves + rl::wave();
    Scores4 low = {}, high = {};
    if (tile * kTile < n_slots) low = scores[tile * kHeadTiles * 64], high = scores[tile * kHeadTiles * 64 + 32];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[own][i] = low.v[i], s[own][4 + i] = high.v[i];
  }
  const int head = head0 + rl::lane() % kTile;
  const float own_sink = head < HEADS ? sink[head] : 0.0f;
  values += (tile0 * kColTiles + channel0 / kTile + rl::wave()) * kFragElements;
  rl_u32 left = rl::ballot(halves != 0);
  left = (left | left >> 1) & 0x55555555u;
  Values v[kAhead + 1];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) v[i] = load_next(values, left);  // on their way meanwhile
  weigh_list(lds, s, halves, scale);
  if (rl::wave() == 0) find_factors(lds, own_sink);

  constexpr int kPieces = kColumns / kPiece;  // of a head: a thread has one of one head
  const int own_head = rl_tid() / kPieces, own_channel = rl_tid() % kPieces * kPiece;
  rl::AccF32 acc = {};
  for (bool more = true; more;) {
#pragma unroll
    for (int i = 0; i <= kAhead; ++i) {  // nothing moves between registers
      more = v[i].block >= 0;
      if (!more) break;
      v[(i + kAhead) % (kAhead + 1)] = load_next(values, left);
      add_block(acc, lds, v[i]);
    }
  }
  const Turn turn = load_turn(cosines, sines, n_pairs, row, channel0 + own_channel);
  rl_sync();  // factors are there
#pragma unroll
  for (int i = 0; i < 8; ++i)
    lds.outputs[rl::acc_row(i) * kOutStride + rl::wave() * kTile + rl::acc_col(i)] =
        output_bits(acc.v[i] * lds.factor[rl::acc_row(i)]);
  rl_sync();
  if (head0 + own_head < HEADS)
    write_piece(out + ((rl_i64)row * HEADS + head0 + own_head) * WIDTH, channel0 + own_channel,
                lds.outputs + own_head * kOutStride + own_channel, turn);
}
RL_EXPORT(attention_values)
