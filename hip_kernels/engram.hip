// engram_gate: the gated addition of table values to the streams (backbone.md section 11.5), after the last sublayer's
// output is merged into them (section 4), if it is not yet.
// Grid (R, 1); 4 waves, one a stream of WIDTH channels; LDS: the merged streams, where there is something to merge.
// Sums: a lane's channels ascending, then wave_sum.
//
// Budget on gfx1100: engram_gate: 56 VGPRs, 40960 bytes of LDS, 3 waves per SIMD, no scratch.
#include "explog.hip.h"
#include "row_terms.hip.h"

constexpr int kStreams = 4, kThreads = 32 * kStreams;
static_assert(WIDTH % kPiece == 0, "streams are read in pieces of 16 bytes");

// As mhc.hip merges, for one of the streams.
RL_DEV rl::Words4 merged(const rl_u16* row, const rl_u16* sublayer, const float* post, const float* comb, int stream) {
  Piece sum;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const Piece from = load_piece(row + j * WIDTH);
    const float share = comb[j * kStreams + stream];
#pragma unroll
    for (int c = 0; c < kPiece; ++c) sum.v[c] = j ? sum.v[c] + share * from.v[c] : share * from.v[c];
  }
  const Piece o = load_piece(sublayer);
#pragma unroll
  for (int c = 0; c < kPiece; ++c) sum.v[c] += post[stream] * o.v[c];
  return pack(sum);
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
  float x_squares = 0.0f, k_squares = 0.0f, products = 0.0f;
  for (int channel = first; channel < WIDTH; channel += 32 * kPiece) {
    if (sublayer)
      store_words(lds + stream * WIDTH + channel,
                  merged(all + channel, sublayer + row * WIDTH + channel, post + row * kStreams,
                         comb + row * kStreams * kStreams, stream));
    const Piece x = load_piece(xs + channel), k = load_piece(keys + channel);
    const Piece wq = load_piece(q_weight + stream * WIDTH + channel);
    const Piece wk = load_piece(k_weight + stream * WIDTH + channel);
#pragma unroll
    for (int c = 0; c < kPiece; ++c) {
      x_squares += x.v[c] * x.v[c];
      k_squares += k.v[c] * k.v[c];
      products += (x.v[c] * (wq.v[c] * wk.v[c])) * k.v[c];
    }
  }
  const float inverse = inverse_rms(rl::wave_sum(x_squares), WIDTH, eps) *
                        inverse_rms(rl::wave_sum(k_squares), WIDTH, eps);
  const float dot = rl::wave_sum(products) * inverse * root;
  const float size = rl::as_float(size_bits(dot)), floored = size < 1e-6f ? 1e-6f : size;  // a NaN stays one
  const int sign = rl::as_int(dot) & (int)0x80000000;
  const bool lives = (!ids || ids[row * n_ids] >= 0) && (!alive || alive[row]);
  const float gate = lives ? rl::sigmoid(rl::as_float(rl::as_int(rl::sqrt(floored)) | sign)) : 0.0f;
  if (rl::lane() == 0) gates[row * kStreams + stream] = gate;
  rl_sync();  // every wave has read all the streams that it merges
  for (int channel = first; channel < WIDTH; channel += 32 * kPiece) {
    Piece x = load_piece(xs + channel);
    const Piece v = load_piece(value + channel);
#pragma unroll
    for (int c = 0; c < kPiece; ++c) x.v[c] += gate * v.v[c];
    store_words(out + (row * kStreams + stream) * WIDTH + channel, pack(x));
  }
}
RL_EXPORT(engram_gate)
