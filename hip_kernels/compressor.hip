// compress: latents of a key/value source and their compressed rows (backbone.md section 6), one wave a row.
// Grid (ceil((J + T) / 4), 1), T = 0 where no token is to be held; 128 threads = 4 waves; no LDS. Each part has its
// null: where the latents come from (token pairs, a projection to norm, or latents as they are), whether they are
// written, whether rows are, by themselves and into pages. Then come the tokens, into slots that no pair here reads.
// A lane has WIDTH / 32 adjacent channels; the norm's sum is packed_row.hip.h's.
//
// compress_keys: the same of 1 to 16 groups, and their index keys, with the bits of linear.hip and index_vectors.hip.
// Each of the first 8 workgroups makes all latents, which takes less time than to wait for another one's, and
// multiplies them to 16 channels of keys; the last of them to be done norms, rotates, quantises and stores the keys. The
// others are compress. Grid (8 + ceil((J + T) / 8), 1); 256 threads = 8 waves; LDS a tile of columns a wave, a word,
// latents.
//
// Budget on gfx1100: compress: 96 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: compress_keys: 96 VGPRs, 14416 bytes of LDS, 16 waves per SIMD, no scratch.
#include "explog.hip.h"
#include "few_product.hip.h"
#include "index_vector.hip.h"
#include "packed_row.hip.h"

struct Token {
  const float *value, *gate;
};

RL_DEV float pooled(const Token& a, const Token& b, int channel) {  // rounded to BF16
  const float top = rl::Max::of(a.gate[channel], b.gate[channel]);
  const float wa = rl::exp(a.gate[channel] - top), wb = rl::exp(b.gate[channel] - top), sum = wa + wb;
  return rl::round_bf16(a.value[channel] * (wa / sum) + b.value[channel] * (wb / sum));
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

RL_DEV void store_own(rl_u16* row, const Own& x) {
#pragma unroll
  for (int c = 0; c < kOwn; c += 2)
    *(rl_u32*)(row + first_own() + c) = rl::f32_to_bf16(x.v[c]) | (rl_u32)rl::f32_to_bf16(x.v[c + 1]) << 16;
}

struct Groups {
  static constexpr int kRowBytes = WIDTH / 2 + WIDTH / 16;
  rl_u8* rows;              // [J, kRowBytes], or null
  rl_u8* pool;              // [pages, rows_per_page, kRowBytes], or null
  rl_u16* latents;          // [J, WIDTH] normed, not rotated; or null
  const rl_u16* projected;  // [J, WIDTH], or null: pairs of tokens
  const float* values;      // [T, WIDTH], token_stride apart
  const float* gates;       // [T, WIDTH], as far apart
  float* held;              // [N, 2, WIDTH] values and gates
  const int* pairs;         // [J, 2] tokens, or -1 - i: held i; null: 2j and 2j + 1
  const int* token_slots;   // [T] where tokens are held from now on, negative: nowhere
  const rl_u16* weight;     // [WIDTH], or null: not normed
  const float* cosines;     // [J, n_pairs]
  const float* sines;       // [J, n_pairs]
  const int* positions;     // [J] place in the sequence, negative: not in the pool
  const int* sequences;     // [J]
  const int* page_tables;   // [sequences, table_width]
  int n_rows, n_tokens, token_stride, n_pairs, rows_per_page, table_width;
  float eps;

  // Negative: a token of an earlier call, kept as value and gate.
  RL_DEV Token token(const Groups& a, int index) {
    if (index >= 0) return {a.values + (rl_i64)index * a.token_stride, a.gates + (rl_i64)index * a.token_stride};
    const float* at = a.held + (rl_i64)(-1 - index) * 2 * WIDTH;
    return {at, at + WIDTH};
  }

  RL_DEV void hold(const Groups& a, int index) {
    if (index >= a.n_tokens || a.token_slots[index] < 0) return;
    float* to = a.held + (rl_i64)a.token_slots[index] * 2 * WIDTH;
    const Token from = token(a, index);
#pragma unroll
    for (int c = 0; c < kOwn; ++c) {
      to[first_own() + c] = from.value[first_own() + c];
      to[WIDTH + first_own() + c] = from.gate[first_own() + c];
    }
  }

  RL_DEV Token first_of(const Groups& a, int row) { return token(a, a.pairs ? a.pairs[2 * row] : 2 * row); }
  RL_DEV Token second_of(const Groups& a, int row) { return token(a, a.pairs ? a.pairs[2 * row + 1] : 2 * row + 1); }

  RL_DEV Own latent(const Groups& a, int row) {
    Own x;
    if (a.projected) {
      x = load_own(a.projected + (rl_i64)row * WIDTH);
    } else {
      const Token first = first_of(a, row), second = second_of(a, row);
#pragma unroll
      for (int c = 0; c < kOwn; ++c) x.v[c] = pooled(first, second, first_own() + c);
    }
    if (a.weight) norm_own(x, a.weight, a.eps);
    return x;
  }

  RL_DEV void store(const Groups& a, Own x, int row) {
    if (a.latents) store_own(a.latents + (rl_i64)row * WIDTH, x);
    if (!a.rows && !a.pool) return;
    rotate_own(x, a.cosines + (rl_i64)row * a.n_pairs, a.sines + (rl_i64)row * a.n_pairs, a.n_pairs);
    const PackedRow packed = pack_row(x);
    if (a.rows) write_row(a.rows + (rl_i64)row * kRowBytes, packed);
    if (!a.pool || a.positions[row] < 0) return;
    const int* pages = a.page_tables + (rl_i64)a.sequences[row] * a.table_width;
    write_row(a.pool + page_slot(pages, a.positions[row], a.rows_per_page) * kRowBytes, packed);
  }
};

#define GROUP_ARGUMENTS                                                                                            \
  rl_u8 *rows, rl_u8 *pool, rl_u16 *latents, const rl_u16 *projected, const float *values, const float *gates,     \
      float *held, const int *pairs, const int *token_slots, const rl_u16 *weight, const float *cosines,           \
      const float *sines, const int *positions, const int *sequences, const int *page_tables, int n_rows,          \
      int n_tokens, int token_stride, int n_pairs, int rows_per_page, int table_width, float eps
#define GROUPS                                                                                                     \
  {rows, pool, latents, projected, values, gates, held, pairs, token_slots, weight, cosines, sines, positions,     \
   sequences, page_tables, n_rows, n_tokens, token_stride, n_pairs, rows_per_page, table_width, eps}

// By one wave.
RL_DEV void store_or_hold(const Groups& a, int job) {
  if (job < a.n_rows) Groups::store(a, Groups::latent(a, job), job);
  else Groups::hold(a, job - a.n_rows);
}

RL_KERNEL(kRowThreads) compress(GROUP_ARGUMENTS) {
  const Groups a = GROUPS;
  store_or_hold(a, rl_bid_x() * kRowsAGroup + rl::wave());
}
RL_EXPORT(compress)

constexpr int kKeyThreads = 32 * kWaves, kKeyTiles = kChannels / kTile;
constexpr int kLatentStride = WIDTH + 8;  // 16 rows' pieces fall on different banks
constexpr int kKeyBlocks = WIDTH / kStep, kKeySegment = (kKeyBlocks + kWaves - 1) / kWaves;

// All latents into LDS: pairs are pooled by all threads, rows normed by a wave each.
RL_DEV void stage_latents(rl_u16* staged, const Groups& a) {
  if (!a.projected) {
    for (int i = rl_tid(); i < a.n_rows * WIDTH; i += kKeyThreads) {
      const int row = i / WIDTH, channel = i % WIDTH;
      staged[row * kLatentStride + channel] =
          rl::f32_to_bf16(pooled(Groups::first_of(a, row), Groups::second_of(a, row), channel));
    }
    rl_sync();
  }
  for (int row = rl::wave(); row < a.n_rows; row += kWaves) {
    rl_u16* own = staged + row * kLatentStride;
    Own x = load_own(a.projected ? a.projected + (rl_i64)row * WIDTH : own);
    if (a.weight) norm_own(x, a.weight, a.eps);
    store_own(own, x);
  }
  rl_sync();
}

// Latents, in LDS, to the 16 channels of this workgroup: a segment a wave, as linear.hip cuts K.
RL_DEV void project_keys(rl_u16* lds, rl_u16* keys, const rl_u8* codes, const rl_u16* staged, int n_rows) {
  const int first = rl::wave() * kKeySegment;
  const WeightBf16 weight = WeightBf16::at({codes, nullptr}, (rl_i64)rl_bid_x() * kKeyBlocks + first);
  FewStream<WeightBf16, 1> stream = {{weight}, staged + first * kStep, {}};
#pragma unroll
  for (int i = 0; i < rl::kFragRows; ++i)
    stream.row_bytes[i] = 2u * kLatentStride * (rl_u32)smaller(rl::frag_row(i), n_rows - 1);
  rl::AccF32 acc[1];
  few_product<WeightBf16, 1>(acc, lds + rl::wave() * kOwnElements, stream, smaller(kKeySegment, kKeyBlocks - first));
  float* sums = (float*)lds;
  leave_sums(sums, acc);
  static_assert(kKeyThreads == kTile * kTile, "a thread has an element");
  const int row = rl_tid() / kTile, col = rl_bid_x() * kTile + rl_tid() % kTile;
  if (row < n_rows) keys[row * kChannels + col] = rl::f32_to_bf16(over_segments<1>(sums, 0, kWaves, 0, rl_tid()));
}

RL_KERNEL(kKeyThreads) compress_keys(GROUP_ARGUMENTS,
                                  rl_u8* key_rows,         // as in Keys
                                  rl_u8* key_pool, rl_u8* prepared,
                                  rl_u16* projected_keys,  // [J, 128]
                                  const rl_u8* key_codes,  // the projection's weight [128, WIDTH] in tiles
                                  const rl_u16* key_weight,
                                  int* counter) {  // 0, before and after
  RL_DYN_SHARED(rl_u16, lds);
  rl_u16* word = lds + kWaves * kOwnElements;
  rl_u16* staged = word + kPiece;
  const Groups a = GROUPS;
  if (rl_bid_x() >= kKeyTiles) {
    store_or_hold(a, (rl_bid_x() - kKeyTiles) * kWaves + rl::wave());
    return;
  }
  stage_latents(staged, a);
  project_keys(lds, projected_keys, key_codes, staged, n_rows);
  if (!rl::last_of(kKeyTiles, counter, (int*)word)) return;
  const Keys keys = {key_rows, key_pool, prepared, projected_keys, key_weight, cosines, sines, positions, sequences,
                     page_tables, n_rows, rows_per_page, table_width, eps};
  for (int row = rl::wave(); row < n_rows; row += kWaves) Keys::write(keys, row);
}
RL_EXPORT(compress_keys)
