// compress: latents of a key/value source and their compressed rows (backbone.md section 6), one wave a row.
// Grid (ceil(J/4), 1); 128 threads = 4 waves; no LDS. Each part has its null: where the latents come from (token pairs,
// a projection to norm, or latents as they are), whether they are written, whether rows are.
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

RL_DEV Own pool(const Token& a, const Token& b) {
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

RL_DEV void write_row(rl_u8* out, const Own& x) {
  int most = group_size_bits<16>(x);
  most = rl::Max::of(most, rl::as_int(kLeastAmax));
  const int scale = e4m3(rl::as_float(most) / 6.0f);
  const bool broken = scale == 0x7F;
  const float unit = e4m3_value(scale);
  int bytes[(kOwn + 7) / 8] = {};
#pragma unroll
  for (int c = 0; c < kOwn; ++c) {
    const int code = broken ? 0 : e2m1(x.v[c] / unit);
    bytes[c / 8] |= code << (4 * (c % 8));
  }
  rl_u8* codes = out + first_own() / 2;
#pragma unroll
  for (int i = 0; i < kOwn / 2; ++i) codes[i] = (rl_u8)(bytes[i / 4] >> (8 * (i % 4)));
  if (first_own() % 16 == 0) out[WIDTH / 2 + first_own() / 16] = (rl_u8)scale;
}

RL_KERNEL(kThreads) compress(rl_u8* rows,              // [J, kRowBytes], or pool pages of as many; or null
                             rl_u16* latents,          // [J, WIDTH] normed, not rotated; or null
                             const rl_u16* projected,  // [J, WIDTH], or null: pairs of tokens
                             const float* values,      // [T, WIDTH]
                             const float* gates,       // [T, WIDTH]
                             const float* held,        // [N, 2, WIDTH] values and gates
                             const int* pairs,         // [J, 2] tokens, or -1 - i: held i; null: 2j and 2j + 1
                             const rl_u16* weight,     // [WIDTH], or null: not normed
                             const float* cosines,     // [J, n_pairs]
                             const float* sines,       // [J, n_pairs]
                             const int* positions,     // [J] place in the sequence, negative: no row; or null: row j
                             const int* sequences,     // [J]
                             const int* page_tables,   // [sequences, table_width]
                             int n_rows, int n_pairs, int rows_per_page, int table_width, float eps) {
  constexpr int kRowBytes = WIDTH / 2 + WIDTH / 16;
  const int row = rl_bid_x() * kRowsAGroup + rl::wave();
  if (row >= n_rows) return;
  Own x;
  if (projected) {
    x = load_own(projected + (rl_i64)row * WIDTH);
  } else {
    const int first = pairs ? pairs[2 * row] : 2 * row, second = pairs ? pairs[2 * row + 1] : 2 * row + 1;
    x = pool(token(values, gates, held, first), token(values, gates, held, second));
  }
  if (weight) norm_own(x, weight, eps);
  if (latents) {
    rl_u16* out = latents + (rl_i64)row * WIDTH + first_own();
#pragma unroll
    for (int c = 0; c < kOwn; c += 2)
      *(rl_u32*)(out + c) = rl::f32_to_bf16(x.v[c]) | (rl_u32)rl::f32_to_bf16(x.v[c + 1]) << 16;
  }
  if (!rows) return;
  rl_i64 slot = row;
  if (positions) {
    if (positions[row] < 0) return;
    const int* pages = page_tables + (rl_i64)sequences[row] * table_width;
    slot = (rl_i64)pages[positions[row] / rows_per_page] * rows_per_page + positions[row] % rows_per_page;
  }
  rotate_own(x, cosines + (rl_i64)row * n_pairs, sines + (rl_i64)row * n_pairs, n_pairs);
  write_row(rows + slot * kRowBytes, x);
}
RL_EXPORT(compress)
