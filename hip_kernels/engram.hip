// engram_gate: the gated addition of table values to the streams (backbone.md section 11.5).
// Grid (R, 1); 4 waves, one a stream of WIDTH channels; no LDS. Sums: a lane's channels ascending, then wave_sum.
//
// Budget on gfx1100: engram_gate: 48 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "explog.hip.h"
#include "row_terms.hip.h"

constexpr int kStreams = 4, kThreads = 32 * kStreams;
static_assert(WIDTH % kPiece == 0, "streams are read in pieces of 16 bytes");

RL_KERNEL(kThreads) engram_gate(rl_u16* out,             // [R, 4, WIDTH], may be streams
                                    float* gates,            // [R, 4]
                                    const rl_u16* streams,   // [R, 4, WIDTH]
                                    const rl_u16* kv,        // [R, 5, WIDTH]: four keys, then the value
                                    const rl_u16* q_weight,  // [4, WIDTH]
                                    const rl_u16* k_weight,  // [4, WIDTH]
                                    const rl_u8* alive,      // [R]: 0 forces gate 0
                                    float eps, float root) {  // WIDTH^-0.5
  const rl_i64 row = rl_bid_x();
  const int stream = rl::wave(), first = rl::lane() * kPiece;
  const rl_u16* xs = streams + (row * kStreams + stream) * WIDTH;
  const rl_u16* keys = kv + (row * (kStreams + 1) + stream) * WIDTH;
  const rl_u16* value = kv + (row * (kStreams + 1) + kStreams) * WIDTH;
  float x_squares = 0.0f, k_squares = 0.0f, products = 0.0f;
  for (int channel = first; channel < WIDTH; channel += 32 * kPiece) {
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
  const float gate = alive[row] ? rl::sigmoid(rl::as_float(rl::as_int(rl::sqrt(floored)) | sign)) : 0.0f;
  if (rl::lane() == 0) gates[row * kStreams + stream] = gate;
  for (int channel = first; channel < WIDTH; channel += 32 * kPiece) {
    Piece x = load_piece(xs + channel);
    const Piece v = load_piece(value + channel);
#pragma unroll
    for (int c = 0; c < kPiece; ++c) x.v[c] += gate * v.v[c];
    store_words(out + (row * kStreams + stream) * WIDTH + channel, pack(x));
  }
}
RL_EXPORT(engram_gate)
