// index_slots, index_block_max_few: each row against positions of its own, exact to the bit. Of few rows index_slots
// chooses too: the workgroup that is a row's last to be done.
// 128 threads = 4 waves, each one row x 32 slots, 16 heads at a time; LDS slots_lds_bytes() of the binding, by the real
// head count. Grids: index_slots (ceil(slots/128), R); index_block_max_few (any number, ceil(R/32)), so that one grid serves
// rows that see little and rows that see much: what they see is read on the device.
//
// Budget on gfx1100: index_slots: 168 VGPRs, 24608 bytes of LDS, 5 waves per SIMD, no scratch.
// Budget on gfx1100: index_block_max_few: 160 VGPRs, 24352 bytes of LDS, 5 waves per SIMD, no scratch.
#include "index_terms.hip.h"
#include "selection_terms.hip.h"

constexpr int kThreads = 128, kSlots = kThreads / 32 * kWavePositions;
constexpr int kTermStride = kWavePositions + 1;
typedef Select<kThreads> S;

struct SlotsLds {
  QueryScales q;
  int* k_words;     // [kSlots] scales of the slots' keys
  int* far;         // [waves] a wave saw a scale or weight of the query out of reach
  rl_i8* k_codes;   // [kSlots][kStride], of which each wave has its own part; later terms
  rl_i8* q_codes;   // [H][kStride]
};

RL_DEV SlotsLds carve_slots(char* shared, int n_heads) {
  SlotsLds lds;
  const int n = padded_vectors(n_heads);
  lds.q = carve_scales(shared, n);
  lds.k_words = lds.q.differ + (n / kTileRows + 3) / 4 * 4;
  lds.far = lds.k_words + kThreads;
  lds.k_codes = (rl_i8*)(lds.far + kThreads / 32);
  lds.q_codes = lds.k_codes + kSlots * kStride;
  return lds;
}

struct Scored {  // the rows, and what they look into
  const rl_i8* queries;   // prepared [ceil(R/16), H, kTileBytes]
  const rl_u16* weights;  // [R, H]
  const rl_i8* keys;      // prepared [pages, rows_per_page/16, kTileBytes]
  int n_heads, rows_per_page;
};

// This thread, which the compiler takes for another one each time. Else the addresses of a turn, the same in the next,
// stay in registers across the loop: 22 of them.
RL_DEV int thread_anew() {
  int thread = rl_tid();
#if defined(RL_HIP)
  asm volatile("" : "+v"(thread));
#endif
  return thread;
}

// The row's query on its way to LDS. Readers wait for a barrier of the workgroup.
RL_DEV void put_query(const SlotsLds& lds, const Scored& of, int row) {
  const rl_i8* tiles = of.queries + (rl_i64)(row / kTileRows) * of.n_heads * kTileBytes;
  const int q_row = row % kTileRows, thread = thread_anew();
  bool far = false;
  if (rl::wave() * 32 < lds.q.n) {  // up to 64 heads: whole waves
    const bool real = thread < of.n_heads;
    const int word = real ? *(const int*)(tiles + thread * kTileBytes + kScalesAt + q_row * kGroups) : kNoScale;
    const rl_u16 weight = real ? of.weights[(rl_i64)row * of.n_heads + thread] : (rl_u16)0;
    put_scales(lds.q, thread, word, weight);
    far = rl::ballot(!scales_in_reach(word) || !weight_in_reach(weight)) != 0;
  }
  if (rl::lane() == 0) lds.far[rl::wave()] = far;
  for (int i = thread; i < of.n_heads * 8; i += kThreads) {  // 8 pieces of 16 bytes a head
    const int head = i / 8, piece = i % 8;
    *(rl::Words4*)(lds.q_codes + head * kStride + piece * 16) = *(const rl::Words4*)(
        tiles + head * kTileBytes + piece / 2 * kTileRows * kGroupBytes + q_row * kGroupBytes + piece % 2 * 16);
  }
}

RL_DEV bool query_is_far(const SlotsLds& lds) {
  int any = 0;
  for (int w = 0; w < kThreads / 32; ++w) any |= lds.far[w];
  return rl::uniform(any) != 0;
}

// The key of this thread's slot on its way to LDS, position `position`, or none where it is not live. Only its own wave
// reads it.
RL_DEV void put_key(const SlotsLds& lds, const Scored& of, const int* pages, int position, bool live) {
  const int slot = thread_anew();
  lds.k_words[slot] = kNoScale;
  if (!live) return;
  const rl_i8* tile = key_tile(of.keys, pages, of.rows_per_page, position);
  const int k_row = position % kTileRows;
  lds.k_words[slot] = *(const int*)(tile + kScalesAt + k_row * kGroups);
#pragma unroll
  for (int piece = 0; piece < 8; ++piece)
    *(rl::Words4*)(lds.k_codes + slot * kStride + piece * 16) =
        *(const rl::Words4*)(tile + piece / 2 * kTileRows * kGroupBytes + k_row * kGroupBytes + piece % 2 * 16);
}

// The sortable key of this thread's slot, of the query and key in LDS; the wave's keys are gone afterwards.
// Heads are the accumulator's rows, so terms go through LDS to be added in head order, one lane a slot; they take the
// place of the wave's key codes, which are in registers by then.
RL_DEV int slot_key(const SlotsLds& lds, int n_heads, const rl::AccI32& bias, bool q_far, bool live) {
  const QueryScales& q_scales = lds.q;
  rl_i8* const k_codes = lds.k_codes + rl::wave() * kWavePositions * kStride;
  const int* const k_words = lds.k_words + rl::wave() * kWavePositions;
  const int k_word = k_words[rl::lane()];
  const bool exact = q_far || rl::ballot(!scales_in_reach(k_word)) != 0;
  const bool k_differ = rl::ballot(!one_scale(k_word)) != 0;
  Vectors k[kColTiles];
#pragma unroll
  for (int t = 0; t < kColTiles; ++t) k[t] = load_vectors(k_codes + t * kTileRows * kStride);
  rl_wave_sync();
  float* terms_lds = (float*)k_codes;
  float total = 0.0f;
  for (int head0 = 0; head0 < n_heads; head0 += kTileRows) {
    const Vectors q = load_vectors(lds.q_codes + head0 * kStride);
    const bool differ = k_differ || rl::uniform(q_scales.differ[head0 / kTileRows]) != 0;
#pragma unroll
    for (int t = 0; t < kColTiles; ++t) {
      const float* weights = q_scales.weights + head0;
      const float* scales = q_scales.scales + head0;
      float terms[8];
      if (exact) exact_terms(terms, bias, q, k[t], weights, scales, q_scales.n, k_words + t * kTileRows);
      else if (differ) grouped_terms(terms, bias, q, k[t], weights, scales, q_scales.n, k_words + t * kTileRows);
      else aligned_terms(terms, bias, q, k[t], q_scales.scaled_weights + head0);
#pragma unroll
      for (int i = 0; i < 8; ++i) terms_lds[rl::acc_row(i) * kTermStride + t * kTileRows + rl::acc_col(i)] = terms[i];
    }
    rl_wave_sync();
    const int n = n_heads - head0 < kTileRows ? n_heads - head0 : kTileRows;
    for (int i = 0; i < n; ++i) total += terms_lds[i * kTermStride + rl::lane()];
    rl_wave_sync();
  }
  return live ? to_key(rl::f32_to_bf16(exact ? total : total * unit_of(k_word))) : 0;
}

RL_KERNEL(kThreads) index_slots(rl_u16* slot_keys,      // [R, 8 L]
                                    const rl_i8* queries,   // prepared [ceil(R/16), H, kTileBytes]
                                    const rl_u16* weights,  // [R, H]
                                    const rl_i8* keys,      // prepared [pages, rows_per_page/16, kTileBytes]
                                    const int* page_tables, // [sequences, table_width]
                                    const int* sequences,   // [R] sequence of a row
                                    const int* visible,     // [R]
                                    const int* blocks,      // [R, L] candidate blocks, -1 for none
                                    int* chosen,            // [R, K] best positions, or null
                                    int* counters,          // [R] zeros, for it
                                    int n_heads, int n_blocks, int rows_per_page, int table_width, int k) {
  RL_DYN_SHARED(char, shared);
  const int row = rl_bid_y(), slot = rl_bid_x() * kSlots + rl_tid();
  const int* row_blocks = blocks + (rl_i64)row * n_blocks;
  const int first = row_blocks[rl_bid_x() * (kSlots / kBlock)], n_seen = visible[row], sequence = sequences[row];
  const int block = slot / kBlock < n_blocks ? row_blocks[slot / kBlock] : -1;
  int key = 0;
  if (first >= 0) {  // else no later block is there either
    const SlotsLds lds = carve_slots(shared, n_heads);
    const Scored of = {queries, weights, keys, n_heads, rows_per_page};
    const int position = block * kBlock + slot % kBlock;
    const bool live = block >= 0 && position < n_seen;
    put_query(lds, of, row);
    put_key(lds, of, page_tables + (rl_i64)sequence * table_width, position, live);
    rl_sync();
    key = slot_key(lds, n_heads, rl::splat(kBias), query_is_far(lds), live);
  }
  rl_u16* own = slot_keys + (rl_i64)row * n_blocks * kBlock;
  if (slot < n_blocks * kBlock) own[slot] = (rl_u16)key;
  if (!chosen || !rl::last_of((n_blocks * kBlock + kSlots - 1) / kSlots, counters + row, (int*)shared)) return;
  rl_sync();  // the word in LDS has been read
  rl::Words4* keys_lds = (rl::Words4*)(shared + S::kLdsBytes);  // the row's keys, which are gone through three times
  for (int i = rl_tid(); i < n_blocks; i += kThreads) keys_lds[i] = ((const rl::Words4*)own)[i];
  rl_sync();
  const Chosen to = {chosen + (rl_i64)row * k, row_blocks, k};
  S::list(to, {(const rl_u16*)keys_lds, n_blocks * kBlock, -1}, *(S::Lds*)shared);
}
RL_EXPORT(index_slots)

// index_block_max for few rows: no row of the matrix tile is wasted, but every row reads the keys again. Workgroups take
// turns at the tiles of 128 positions that 32 rows see, all of the first row, then of the next, and so on. Only maxima of
// what is seen are written.
RL_KERNEL(kThreads) index_block_max_few(rl_u16* maxima,  // [R, stride]
                                        const rl_i8* queries, const rl_u16* weights, const rl_i8* keys,
                                        const int* page_tables, const int* sequences, const int* visible,
                                        int n_rows, int n_groups, int n_heads, int stride, int rows_per_page,
                                        int table_width) {
  RL_DYN_SHARED(char, shared);
  const SlotsLds lds = carve_slots(shared, n_heads);
  const Scored of = {queries, weights, keys, n_heads, rows_per_page};
  const int row0 = rl_bid_y() * 32, lane_row = row0 + rl::lane();
  const int lane_seen = lane_row < n_rows ? visible[lane_row] : 0;
  const int lane_sequence = lane_row < n_rows ? sequences[lane_row] : 0;
  const int upto = S::sum_to((lane_seen + kSlots - 1) / kSlots);
  const int n_tiles = rl::uniform(rl::shfl(upto, 31));
  const rl::AccI32 bias = rl::splat(kBias);  // once: a second copy would live beside it
  bool q_far = false;
  for (int tile = rl_bid_x(), row_in_lds = -1; tile < n_tiles; tile += n_groups) {
    const int n_lower = rl::popcount(rl::ballot(upto <= tile)), row = row0 + n_lower;
    const int first = n_lower ? rl::uniform(rl::shfl(upto, n_lower - 1)) : 0;
    const int position = (tile - first) * kSlots + rl_tid();
    const bool live = position < rl::shfl(lane_seen, n_lower), is_new = row != row_in_lds;
    const rl_i64 table = (rl_i64)rl::shfl(lane_sequence, n_lower) * table_width;
    if (is_new) {
      rl_sync();  // all have done with the last one
      put_query(lds, of, row);
    }
    put_key(lds, of, page_tables + table, position, live);
    if (is_new) {
      rl_sync();
      q_far = query_is_far(lds);
      row_in_lds = row;
    } else {
      rl_wave_sync();
    }
    int key = slot_key(lds, n_heads, bias, q_far, live);
    key = rl::Max::of(key, rl::shfl_xor<1>(key));
    key = rl::Max::of(key, rl::shfl_xor<2>(key));
    key = rl::Max::of(key, rl::shfl_xor<4>(key));
    if (rl_tid() % kBlock == 0 && live) maxima[(rl_i64)row * stride + position / kBlock] = (rl_u16)key;
  }
}
RL_EXPORT(index_block_max_few)
