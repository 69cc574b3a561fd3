// index_slots, index_block_max_few: each row against positions of its own, exact to the bit. Of few rows index_slots
// chooses too: the workgroup that is a row's last to be done.
// Grid (ceil(slots/128), R); 128 threads = 4 waves, each one row x 32 slots, 16 heads at a time; LDS slots_lds_bytes()
// of the binding, by the real head count.
//
// Budget on gfx1100: index_slots: 168 VGPRs, 24608 bytes of LDS, 5 waves per SIMD, no scratch.
// Budget on gfx1100: index_block_max_few: 160 VGPRs, 24352 bytes of LDS, 5 waves per SIMD, no scratch.
#include "index_terms.hip.h"
#include "selection_terms.hip.h"

constexpr int kThreads = 128, kSlots = kThreads / 32 * kWavePositions;
constexpr int kTermStride = kWavePositions + 1;

// Heads are the accumulator's rows, so terms go through LDS to be added in head order, one lane a slot; they take the
// place of the wave's key codes, which are in registers by then.
RL_DEV float score_slot(const QueryScales& q_scales, const rl_i8* q_codes, rl_i8* k_codes, const int* k_words,
                        int n_heads, bool q_far) {
  const int k_word = k_words[rl::lane()];
  const bool exact = q_far || rl::ballot(!scales_in_reach(k_word)) != 0;
  const bool k_differ = rl::ballot(!one_scale(k_word)) != 0;
  Vectors k[kColTiles];
#pragma unroll
  for (int t = 0; t < kColTiles; ++t) k[t] = load_vectors(k_codes + t * kTileRows * kStride);
  rl_wave_sync();
  float* terms_lds = (float*)k_codes;
  const rl::AccI32 bias = rl::splat(kBias);
  float total = 0.0f;
  for (int head0 = 0; head0 < n_heads; head0 += kTileRows) {
    const Vectors q = load_vectors(q_codes + head0 * kStride);
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
  return exact ? total : total * unit_of(k_word);
}

// The key of this thread's slot: position `position` of the row, or none where it is not live.
RL_DEV int slot_key(char* shared, int row, int position, bool live, const rl_i8* queries, const rl_u16* weights,
                    const rl_i8* keys, const int* pages, int n_heads, int rows_per_page) {
  const int n = padded_vectors(n_heads);
  const QueryScales q = carve_scales(shared, n);
  int* k_words = q.differ + (n / kTileRows + 3) / 4 * 4;
  int* far = k_words + kThreads;
  rl_i8* k_codes = (rl_i8*)(far + kThreads / 32);
  rl_i8* q_codes = k_codes + kSlots * kStride;
  const rl_i8* tiles = queries + (rl_i64)(row / kTileRows) * n_heads * kTileBytes;
  const int q_row = row % kTileRows, slot = rl_tid();

  bool q_far = false;
  if (rl::wave() * 32 < n) {  // up to 64 heads: whole waves
    const bool real = slot < n_heads;
    const int word = real ? *(const int*)(tiles + slot * kTileBytes + kScalesAt + q_row * kGroups) : kNoScale;
    const rl_u16 weight = real ? weights[(rl_i64)row * n_heads + slot] : (rl_u16)0;
    put_scales(q, slot, word, weight);
    q_far = rl::ballot(!scales_in_reach(word) || !weight_in_reach(weight)) != 0;
  }
  if (rl::lane() == 0) far[rl::wave()] = q_far;
  for (int i = slot; i < n_heads * 8; i += kThreads) {  // 8 pieces of 16 bytes a head
    const int head = i / 8, piece = i % 8;
    *(rl::Words4*)(q_codes + head * kStride + piece * 16) = *(const rl::Words4*)(
        tiles + head * kTileBytes + piece / 2 * kTileRows * kGroupBytes + q_row * kGroupBytes + piece % 2 * 16);
  }
  k_words[slot] = kNoScale;
  if (live) {
    const rl_i8* tile = key_tile(keys, pages, rows_per_page, position);
    const int k_row = position % kTileRows;
    k_words[slot] = *(const int*)(tile + kScalesAt + k_row * kGroups);
#pragma unroll
    for (int piece = 0; piece < 8; ++piece)
      *(rl::Words4*)(k_codes + slot * kStride + piece * 16) =
          *(const rl::Words4*)(tile + piece / 2 * kTileRows * kGroupBytes + k_row * kGroupBytes + piece % 2 * 16);
  }
  rl_sync();
  int any = 0;
  for (int w = 0; w < kThreads / 32; ++w) any |= far[w];
  const int wave = rl::wave();
  const float score = score_slot(q, q_codes, k_codes + wave * kWavePositions * kStride, k_words + wave * kWavePositions,
                                 n_heads, rl::uniform(any) != 0);
  return live ? to_key(rl::f32_to_bf16(score)) : 0;
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
  const int block = slot / kBlock < n_blocks ? blocks[(rl_i64)row * n_blocks + slot / kBlock] : -1;
  const int position = block * kBlock + slot % kBlock;
  const int key = slot_key(shared, row, position, block >= 0 && position < visible[row], queries, weights, keys,
                           page_tables + (rl_i64)sequences[row] * table_width, n_heads, rows_per_page);
  rl_u16* own = slot_keys + (rl_i64)row * n_blocks * kBlock;
  if (slot < n_blocks * kBlock) own[slot] = (rl_u16)key;
  if (!chosen || !rl::last_of((n_blocks * kBlock + kSlots - 1) / kSlots, counters + row, (int*)shared)) return;
  rl_sync();  // the word in LDS has been read
  typedef Select<kThreads> S;
  rl::Words4* keys_lds = (rl::Words4*)(shared + S::kLdsBytes);  // the row's keys, which are gone through three times
  for (int i = rl_tid(); i < n_blocks; i += kThreads) keys_lds[i] = ((const rl::Words4*)own)[i];
  rl_sync();
  const Chosen to = {chosen + (rl_i64)row * k, blocks + (rl_i64)row * n_blocks, k};
  S::list(to, {(const rl_u16*)keys_lds, n_blocks * kBlock, -1}, *(S::Lds*)shared);
}
RL_EXPORT(index_slots)

// index_block_max for few rows: no row of the matrix tile is wasted, but every row reads the keys again.
RL_KERNEL(kThreads) index_block_max_few(rl_u16* maxima,  // [R, stride]
                                            const rl_i8* queries, const rl_u16* weights, const rl_i8* keys,
                                            const int* page_tables, const int* sequences, const int* visible,
                                            int n_heads, int n_blocks, int stride, int rows_per_page, int table_width) {
  RL_DYN_SHARED(char, shared);
  const int row = rl_bid_y(), position = rl_bid_x() * kSlots + rl_tid();
  int key = 0;
  if (rl_bid_x() * kSlots < visible[row])
    key = slot_key(shared, row, position, position < visible[row], queries, weights, keys,
                   page_tables + (rl_i64)sequences[row] * table_width, n_heads, rows_per_page);
  key = rl::Max::of(key, rl::shfl_xor<1>(key));
  key = rl::Max::of(key, rl::shfl_xor<2>(key));
  key = rl::Max::of(key, rl::shfl_xor<4>(key));
  const int block = position / kBlock;
  if (rl_tid() % kBlock == 0 && block < n_blocks) maxima[(rl_i64)row * stride + block] = (rl_u16)key;
}
RL_EXPORT(index_block_max_few)
