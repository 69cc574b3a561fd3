// compress: latents of a key/value source and their compressed rows (backbone.md section 6), one wave a row.
// Grid (ceil((J + T) / 4), 1), T = 0 where no token is to be held; 128 threads = 4 waves; no LDS. Each part has its
// null: where the latents come from (token pairs, a projection to norm, or latents as they are), whether they are
// written, whether rows are, by themselves and into pages. Then come the tokens, into slots that no pair here reads.
// A lane has WIDTH / 32 adjacent channels; the norm's sum is packed_row.hip.h's.
//
// Budget on gfx1100: compress: 96 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "explog.hip.h"
#include "packed_row.hip.h"

struct Token {
  const float *value, *gate;
};

// Negative: a token of an earlier call, kept as value and gate.
RL_DEV Token token(const float* values, const float* gates, const float* held, int index) {
  if (index >= 0) return {values + (rl_i64)index * WIDTH, gates + (rl_i64)index * WIDTH};
  const float* at = held + (rl_i64)(-1 - index) * 2 * WIDTH;
  return {at, at + WIDTH};
}

RL_DEV void hold(float* to, const float* values, const float* gates, int index) {
  const Token from = token(values, gates, nullptr, index);
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    to[first_own() + c] = from.value[first_own() + c];
    to[WIDTH + first_own() + c] = from.gate[first_own() + c];
  }
}

RL_DEV Own pool_pair(const Token& a, const Token& b) {
  Own x;
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const int at = first_own() + c;
    const float top = rl::Max::of(a.gate[at], b.gate[at]);
    const float wa = rl::exp(a.gate[at] - top), wb = rl::exp(b.gate[at] - top), sum = wa + wb;
    x.v[c] = rl::round_bf16(a.value[at] * (wa / sum) + b.value[at] * (wb / sum));
  }
  return x;
}

constexpr float kLeastAmax = 0.01171875f;  // 6 * 2^-9

struct PackedRow {  // a lane's part
  int codes[(kOwn + 7) / 8];
  int scale;
};

RL_DEV PackedRow pack_row(const Own& x) {
  int most = group_size_bits<16>(x);
  most = rl::Max::of(most, rl::as_int(kLeastAmax));
  PackedRow packed = {};
  packed.scale = e4m3(rl::as_float(most) / 6.0f);
  const bool broken = packed.scale == 0x7F;
  const float unit = e4m3_value(packed.scale);
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const int code = broken ? 0 : e2m1(x.v[c] / unit);
    packed.codes[c / 8] |= code << (4 * (c % 8));
  }
  return packed;
}

RL_DEV void write_row(rl_u8* out, const PackedRow& packed) {
  rl_u8* codes = out + first_own() / 2;
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) codes[i] = (rl_u8)(packed.codes[i / 4] >> (8 * (i % 4)));
  if (first_own() % 16 == 0) out[WIDTH / 2 + first_own() / 16] = (rl_u8)packed.scale;
}

RL_KERNEL(kRowThreads) compress(rl_u8* rows,              // [J, kRowBytes], or null
                             rl_u8* pool,              // [pages, rows_per_page, kRowBytes], or null
                             rl_u16* latents,          // [J, WIDTH] normed, not rotated; or null
                             const rl_u16* projected,  // [J, WIDTH], or null: pairs of tokens
                             const float* values,      // [T, WIDTH]
                             const float* gates,       // [T, WIDTH]
                             float* held,              // [N, 2, WIDTH] values and gates
                             const int* pairs,         // [J, 2] tokens, or -1 - i: held i; null: 2j and 2j + 1
                             const int* token_slots,   // [T] where tokens are held from now on, negative: nowhere
                             const rl_u16* weight,     // [WIDTH], or null: not normed
                             const float* cosines,     // [J, n_pairs]
                             const float* sines,       // [J, n_pairs]
                             const int* positions,     // [J] place in the sequence, negative: not in the pool
                             const int* sequences,     // [J]
                             const int* page_tables,   // [sequences, table_width]
                             int n_rows, int n_tokens, int n_pairs, int rows_per_page, int table_width, float eps) {
  constexpr int kRowBytes = WIDTH / 2 + WIDTH / 16;
  const int row = rl_bid_x() * kRowsAGroup + rl::wave();
  if (row >= n_rows) {
    const int index = row - n_rows;
    if (index < n_tokens && token_slots[index] >= 0)
      hold(held + (rl_i64)token_slots[index] * 2 * WIDTH, values, gates, index);
    return;
  }
  Own x;
  if (projected) {
    x = load_own(projected + (rl_i64)row * WIDTH);
  } else {
    const int first = pairs ? pairs[2 * row] : 2 * row, second = pairs ? pairs[2 * row + 1] : 2 * row + 1;
    x = pool_pair(token(values, gates, held, first), token(values, gates, held, second));
  }
  if (weight) norm_own(x, weight, eps);
  if (latents) {
    rl_u16* out = latents + (rl_i64)row * WIDTH + first_own();
#pragma unroll
    for (int c = 0; c < kOwn; c += 2)
      *(rl_u32*)(out + c) = rl::f32_to_bf16(x.v[c]) | (rl_u32)rl::f32_to_bf16(x.v[c + 1]) << 16;
  }
  if (!rows && !pool) return;
  rotate_own(x, cosines + (rl_i64)row * n_pairs, sines + (rl_i64)row * n_pairs, n_pairs);
  const PackedRow packed = pack_row(x);
  if (rows) write_row(rows + (rl_i64)row * kRowBytes, packed);
  if (!pool || positions[row] < 0) return;
  const int* pages = page_tables + (rl_i64)sequences[row] * table_width;
  const rl_i64 slot = (rl_i64)pages[positions[row] / rows_per_page] * rows_per_page + positions[row] % rows_per_page;
  write_row(pool + slot * kRowBytes, packed);
}
RL_EXPORT(compress)
