// index_query: rotation and ActQuant4 (E8M0) of index queries, and their heads' weights; index_key: the same of keys,
// after a norm; index_prepare: stored rows in the form that scoring reads, which the others may write at once.
// All: grid (ceil(vectors/8), 1); 256 threads = 8 waves of 32, one vector of 128 channels a wave; no LDS.
//
// Budget on gfx1100: index_query: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: index_key: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: index_prepare: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "index_vector.hip.h"

constexpr int kThreads = 256;

RL_KERNEL(kThreads) index_query(rl_u8* rows,          // [N, H, 68] codes, then scales; or null
                                rl_u8* prepared,      // [ceil(N/16), H, kTileBytes], or null
                                rl_u16* weights,      // [N, H] BF16, to be scaled; or null
                                const rl_u16* x,      // [N, H, 128] BF16
                                const float* cosines, // [N, 32]
                                const float* sines,   // [N, 32]
                                int n_rows, int n_heads, float weight_scale) {
  const rl_i64 vector = (rl_i64)rl_bid_x() * (kThreads / 32) + rl::wave();
  if (vector >= (rl_i64)n_rows * n_heads) return;
  const int row = (int)(vector / n_heads), head = (int)(vector % n_heads);
  Vector own = load_vector(x + vector * kChannels);
  rotate(own, cosines + (rl_i64)row * kRopePairs, sines + (rl_i64)row * kRopePairs);
  const Quantised q = quantise(own);
  if (rows) store_row(rows + vector * kKeyBytes, q);
  if (prepared) store_prepared(prepared, row, head, n_heads, q);
  if (weights && rl::lane() == 0) weights[vector] = rl::f32_to_bf16(rl::bf16_to_f32(weights[vector]) * weight_scale);
}
RL_EXPORT(index_query)

RL_KERNEL(kThreads) index_key(rl_u8* rows, rl_u8* pool, rl_u8* prepared, const rl_u16* x, const rl_u16* weight,
                              const float* cosines, const float* sines, const int* positions, const int* sequences,
                              const int* page_tables, int n_rows, int rows_per_page, int table_width, float eps) {
  const Keys keys = {rows, pool, prepared, x, weight, cosines, sines, positions, sequences, page_tables,
                     n_rows, rows_per_page, table_width, eps};
  Keys::write(keys, rl_bid_x() * (kThreads / 32) + rl::wave());
}
RL_EXPORT(index_key)

// Slot of row n: itself, or of its position in its sequence's pages, where that is not negative.
RL_KERNEL(kThreads) index_prepare(rl_u8* prepared,         // [slots/16, H, kTileBytes]
                                  const rl_u8* rows,       // [N, H, 68]
                                  const int* positions,    // [N], or null
                                  const int* sequences,    // [N]
                                  const int* page_tables,  // [Q, table_width]
                                  int n_rows, int n_heads, int rows_per_page, int table_width) {
  const rl_i64 vector = (rl_i64)rl_bid_x() * (kThreads / 32) + rl::wave();
  if (vector >= (rl_i64)n_rows * n_heads) return;
  const int head = (int)(vector % n_heads), row = (int)(vector / n_heads);
  rl_i64 slot = row;
  if (positions) {
    const int position = rl::uniform(positions[row]), sequence = rl::uniform(sequences[row]);
    if (position < 0) return;
    slot = page_slot(page_tables + (rl_i64)sequence * table_width, position, rows_per_page);
  }
  const rl_u8* stored = rows + vector * kKeyBytes;
  const Quantised q = {((const rl_u16*)stored)[rl::lane()], *(const int*)(stored + kChannels / 2)};
  store_prepared(prepared, slot, head, n_heads, q);
}
RL_EXPORT(index_prepare)
