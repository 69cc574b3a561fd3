// engram_gate: the gated addition of table values to the streams (backbone.md section 11.5), after the last sublayer's
// output is merged into them (section 4), if it is not yet.
// Grid (R, 1); 4 waves, one a stream of WIDTH channels; LDS: the merged streams, where there is something to merge.
// Sums: a lane's channels ascending, then wave_sum.
//
// engram_few: all of it for at most 8 rows, from the table's rows on: they are decoded and rounded into LDS and
// multiplied with wkv, and the last workgroup to be done merges and adds, with the bits of engram_rows.hip, linear.hip
// and engram_gate. Grid (ceil(tiles of 5 WIDTH / (16 / S)), 1), S segments of K; 256 threads = 8 waves, two tiles of
// columns each; LDS a word, then a tile of columns a wave and R rounded rows, and the waves' sums in their place.
//
// Budget on gfx1100: engram_gate: 56 VGPRs, 40960 bytes of LDS, 3 waves per SIMD, no scratch.
// Budget on gfx1100: engram_few: 168 VGPRs, 34864 bytes of LDS, 6 waves per SIMD, no scratch.
#include "act_terms.hip.h"
#include "engram_terms.hip.h"
#include "explog.hip.h"
#include "few_product.hip.h"

constexpr int kStreams = 4, kThreads = 32 * kStreams;
static_assert(WIDTH % kPiece == 0, "streams are read in pieces of 16 bytes");

typedef rl::Words4 StreamPieces[kStreams];  // eight channels of all streams
RL_DEV void load_pieces(StreamPieces& x, const rl_u16* row) {
#pragma unroll
  for (int j = 0; j < kStreams; ++j) x[j] = load_words(row + j * WIDTH);
}

// As mhc.hip merges, for one of the streams.
RL_DEV rl::Words4 merged(const StreamPieces& x, const rl::Words4& sublayer, const float* post, const float* comb,
                         int stream) {
  Piece sum;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const Piece from = unpack(x[j]);
    const float share = comb[j * kStreams + stream];
#pragma unroll
    for (int c = 0; c < kPiece; ++c) sum.v[c] = j ? sum.v[c] + share * from.v[c] : share * from.v[c];
  }
  const Piece o = unpack(sublayer);
#pragma unroll
  for (int c = 0; c < kPiece; ++c) sum.v[c] += post[stream] * o.v[c];
  return pack(sum);
}

struct GateSums {  // a lane's, of a stream
  float x_squares, k_squares, products;

  RL_DEV void add(GateSums& s, const Piece& x, const Piece& k, const Piece& wq, const Piece& wk) {
#pragma unroll
    for (int c = 0; c < kPiece; ++c) {
      s.x_squares += x.v[c] * x.v[c];
      s.k_squares += k.v[c] * k.v[c];
      s.products += (x.v[c] * (wq.v[c] * wk.v[c])) * k.v[c];
    }
  }
  RL_DEV float gate(const GateSums& s, bool lives, float eps, float root) {  // root: WIDTH^-0.5
    const float inverse = inverse_rms(rl::wave_sum(s.x_squares), WIDTH, eps) *
                          inverse_rms(rl::wave_sum(s.k_squares), WIDTH, eps);
    const float dot = rl::wave_sum(s.products) * inverse * root;
    const float size = rl::as_float(size_bits(dot)), floored = size < 1e-6f ? 1e-6f : size;  // a NaN stays one
    const int sign = rl::as_int(dot) & (int)0x80000000;
    return lives ? rl::sigmoid(rl::as_float(rl::as_int(rl::sqrt(floored)) | sign)) : 0.0f;
  }
};

RL_DEV rl::Words4 gated(const rl::Words4& x_words, const rl::Words4& value, float gate) {
  Piece x = unpack(x_words);
  const Piece v = unpack(value);
#pragma unroll
  for (int c = 0; c < kPiece; ++c) x.v[c] += gate * v.v[c];
  return pack(x);
}

RL_KERNEL(kThreads) engram_gate(rl_u16* out,             // [R, 4, WIDTH], may be streams
                                float* gates,            // [R, 4]
                                const rl_u16* streams,   // [R, 4, WIDTH]
                                const rl_u16* sublayer,  // [R, WIDTH], or null: nothing is merged
                                const float* post,       // [R, 4]
                                const float* comb,       // [R, 4, 4]
                                const rl_u16* kv,        // [R, 5, WIDTH]: four keys, then the value
                                const rl_u16* q_weight,  // [4, WIDTH]
                                const rl_u16* k_weight,  // [4, WIDTH]
                                const int* ids,          // [R, n_ids]: a negative first one forces gate 0; or null
                                const rl_u8* alive,      // [R]: so does 0; or null
                                int n_ids, float eps, float root) {  // WIDTH^-0.5
  RL_DYN_SHARED(rl_u16, lds);
  const rl_i64 row = rl_bid_x();
  const int stream = rl::wave(), first = rl::lane() * kPiece;
  const rl_u16* all = streams + row * kStreams * WIDTH;
  const rl_u16* xs = sublayer ? lds + stream * WIDTH : all + stream * WIDTH;  // what the lane itself has put there
  const rl_u16* keys = kv + (row * (kStreams + 1) + stream) * WIDTH;
  const rl_u16* value = kv + (row * (kStreams + 1) + kStreams) * WIDTH;
  GateSums sums = {};
  for (int channel = first; channel < WIDTH; channel += 32 * kPiece) {
    if (sublayer) {
      StreamPieces of_all;
      load_pieces(of_all, all + channel);
      store_words(lds + stream * WIDTH + channel,
                  merged(of_all, load_words(sublayer + row * WIDTH + channel), post + row * kStreams,
                         comb + row * kStreams * kStreams, stream));
    }
    GateSums::add(sums, load_piece(xs + channel), load_piece(keys + channel),
                  load_piece(q_weight + stream * WIDTH + channel), load_piece(k_weight + stream * WIDTH + channel));
  }
  const bool lives = (!ids || ids[row * n_ids] >= 0) && (!alive || alive[row]);
  const float gate = GateSums::gate(sums, lives, eps, root);
  if (rl::lane() == 0) gates[row * kStreams + stream] = gate;
  rl_sync();  // every wave has read all the streams that it merges
  for (int channel = first; channel < WIDTH; channel += 32 * kPiece)
    store_words(out + (row * kStreams + stream) * WIDTH + channel,
                gated(load_words(xs + channel), load_words(value + channel), gate));
}
RL_EXPORT(engram_gate)

constexpr int kFewThreads = 32 * kWaves, kFewTiles = 2;  // of columns, a wave
constexpr int kColumns = (kStreams + 1) * WIDTH;
typedef rl::EightRows FewRows;

// The table's rows through ActQuant8 into LDS: once for all columns of the workgroup.
RL_DEV void stage_values(rl_u16* staged, const rl_u8* codes, const rl_u8* scales, int n_rows, int blocks) {
  constexpr int kBatch = 4;  // on their way together
  const int row_pieces = blocks * (kStep / kPiece), n = n_rows * row_pieces;
  for (int start = 0; start < n; start += kBatch * kFewThreads) {  // all of a wave go round as often
    TablePiece pieces[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j)
      pieces[j] = load_table_piece(codes, scales, smaller(start + j * kFewThreads + rl_tid(), n - 1));
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = start + j * kFewThreads + rl_tid();
      const rl::Words4 rounded = round_words(table_values(pieces[j]));
      if (i < n) store_words(staged + i / row_pieces * (row_pieces + 1) * kPiece + i % row_pieces * kPiece, rounded);
    }
  }
  rl_sync();
}

// The workgroup's columns of kv; as linear.hip's *_few.
RL_DEV void multiply(rl_u16* lds, rl_u16* kv, const WeightE4m3& weight, int n_rows, int blocks, int segment,
                     int n_segments) {
  constexpr int kTiles = (kColumns + kTile - 1) / kTile, kOwnCols = kFewTiles * kTile;
  const rl_u16* staged = lds + kWaves * kOwnElements;
  const int own_waves = kWaves / n_segments, tile0 = rl_bid_x() * own_waves * kFewTiles;
  const int first = rl::wave() % n_segments * segment, row_bytes = 2 * (blocks * kStep + kPiece);
  FewStream<WeightE4m3, kFewTiles, FewRows> stream = {};
#pragma unroll
  for (int t = 0; t < kFewTiles; ++t) {
    const int tile = smaller(tile0 + rl::wave() / n_segments * kFewTiles + t, kTiles - 1);
    stream.weight[t] = WeightE4m3::at(weight, (rl_i64)tile * blocks + first);
  }
  stream.x = staged + first * kStep;
#pragma unroll
  for (int i = 0; i < FewRows::kOwn; ++i)
    stream.row_bytes[i] = (rl_u32)(row_bytes * smaller(FewRows::own_row(i), n_rows - 1));
  FewRows::Sums acc[kFewTiles];
  few_product<WeightE4m3, kFewTiles>(acc, lds + rl::wave() * kOwnElements, stream, smaller(segment, blocks - first));
  float* sums = (float*)lds;
  leave_sums<FewRows>(sums, acc);
  for (int i = rl_tid(); i < own_waves * kOwnCols * n_rows; i += kFewThreads) {
    const int own = i / kOwnCols % own_waves, row = i / (kOwnCols * own_waves), at = i % kOwnCols;
    const int col = tile0 * kTile + own * kOwnCols + at;
    if (col < kColumns)
      kv[(rl_i64)row * kColumns + col] = rl::f32_to_bf16(over_segments<kFewTiles>(
          sums, own * n_segments, n_segments, at / kTile, row * kTile + at % kTile));
  }
}

struct Added {  // to rows, in place
  rl_u16* streams;         // the others as in engram_gate
  float* gates;
  const rl_u16* sublayer;
  const float *post, *comb;
  const rl_u16 *kv, *q_weight, *k_weight;
  const int* ids;
  int n_rows, n_ids;
  float eps, root;
};

constexpr int kPieces = WIDTH / kPiece;

// Here and below a thread has several loads on their way: one workgroup waits for memory, it does not fill it.
RL_DEV void merge_rows(const Added& a) {
  constexpr int kBatch = 3;
  const int n = a.n_rows * kPieces;
  const auto at = [&](int i) { return a.streams + (rl_i64)(i / kPieces) * kStreams * WIDTH + i % kPieces * kPiece; };
  for (int start = rl_tid(); start < n; start += kBatch * kFewThreads) {
    StreamPieces x[kBatch];
    rl::Words4 sublayer[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = smaller(start + b * kFewThreads, n - 1);
      sublayer[b] = load_words(a.sublayer + (rl_i64)i * kPiece);
      load_pieces(x[b], at(i));
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = start + b * kFewThreads;
      if (i >= n) break;
      const float *post = a.post + i / kPieces * kStreams, *comb = a.comb + i / kPieces * kStreams * kStreams;
#pragma unroll
      for (int j = 0; j < kStreams; ++j) store_words(at(i) + j * WIDTH, merged(x[b], sublayer[b], post, comb, j));
    }
  }
}

RL_DEV void add_gated(const Added& a, const float* gates) {
  constexpr int kBatch = 5;
  const int n = a.n_rows * kStreams * kPieces;
  for (int start = rl_tid(); start < n; start += kBatch * kFewThreads) {
    rl::Words4 x[kBatch], value[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = smaller(start + b * kFewThreads, n - 1), row = i / (kStreams * kPieces);
      x[b] = load_words(a.streams + (rl_i64)i * kPiece);
      value[b] = load_words(a.kv + ((rl_i64)row * (kStreams + 1) + kStreams) * WIDTH + i % kPieces * kPiece);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int i = start + b * kFewThreads;
      if (i < n) store_words(a.streams + (rl_i64)i * kPiece, gated(x[b], value[b], gates[i / kPieces]));
    }
  }
}

// By one workgroup; the sums are engram_gate's. lds: a float for each stream of a row.
RL_DEV void add_values(float* lds, const Added& a) {
  if (a.sublayer) {
    merge_rows(a);
    rl::device_fence();
    rl_sync();
    rl::device_fence();
  }
  for (int job = rl::wave(); job < a.n_rows * kStreams; job += kWaves) {
    const int row = job / kStreams, stream = job % kStreams;
    const rl_u16* keys = a.kv + ((rl_i64)row * (kStreams + 1) + stream) * WIDTH;
    GateSums sums = {};
#pragma unroll 4
    for (int channel = rl::lane() * kPiece; channel < WIDTH; channel += 32 * kPiece)
      GateSums::add(sums, load_piece(a.streams + (rl_i64)job * WIDTH + channel), load_piece(keys + channel),
                    load_piece(a.q_weight + stream * WIDTH + channel),
                    load_piece(a.k_weight + stream * WIDTH + channel));
    const float gate = GateSums::gate(sums, a.ids[(rl_i64)row * a.n_ids] >= 0, a.eps, a.root);
    if (rl::lane() == 0) lds[job] = a.gates[job] = gate;
  }
  rl_sync();
  add_gated(a, lds);
}

RL_KERNEL(kFewThreads) engram_few(rl_u16* streams,         // [R, 4, WIDTH], in place; the others as in engram_gate
                                  float* gates, const rl_u16* sublayer, const float* post, const float* comb,
                                  rl_u16* kv, const rl_u16* q_weight, const rl_u16* k_weight, const int* ids,
                                  const rl_u8* codes,         // [R, K] E4M3 of the table
                                  const rl_u8* scales,        // [R, K / 32] E8M0
                                  const rl_u8* weight_codes,  // wkv [5 WIDTH, K] in tiles
                                  const rl_u8* weight_scales,
                                  int* counter,  // 0, before and after
                                  int n_rows, int n_ids, int n_groups, int blocks, int segment, int n_segments,
                                  float eps, float root) {
  RL_DYN_SHARED(rl_u16, word);
  rl_u16* lds = word + kPiece;
  stage_values(lds + kWaves * kOwnElements, codes, scales, n_rows, blocks);
  multiply(lds, kv, {weight_codes, weight_scales}, n_rows, blocks, segment, n_segments);
  if (!rl::last_of(n_groups, counter, (int*)word)) return;
  const Added added = {streams, gates, sublayer, post, comb, kv, q_weight, k_weight, ids, n_rows, n_ids, eps, root};
  add_values((float*)lds, added);
}
RL_EXPORT(engram_few)
