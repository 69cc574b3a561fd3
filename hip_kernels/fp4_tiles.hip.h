// fp4_tiles.hip.h: weights of FP4 (E2M1) in tiles, for experts.hip: where a lane's codes lie, and how they become BF16.
#pragma once
#include "wmma_gemm.hip.h"

namespace rl {

// ---- a lane's 16 codes in two words; codes 2 q and 2 q + 1 are neighbours in channel and come out together ----
// e2m1_put(words, i, code)         puts code i in its place among zeros
// e2m1_decode(out, words, factor)  the pairs in order as BF16, times the factor of their column
#if defined(RL_CUDA)
// A code's bits in a BF16 with that number's bias, which is far smaller: as 0x81C0 has them. Six pairs lie so that one
// rotation and one mask bring them there; the others fill what these leave free, and take two shifts and two masks.
RL_DEV void e2m1_put(rl_u32 (&words)[2], int i, rl_u32 code) {
  const int q = i / 2;
  const auto put = [&](rl_u32& word, int bit, int at) { word |= (code >> bit & 1) << (at + i % 2 * 16) % 32; };
#pragma unroll
  for (int bit = 0; bit < 4; ++bit)
    if (q < 6) put(words[q / 3], bit, (bit == 3 ? 15 : 6 + bit) + q % 3 * (q < 3 ? 3 : 5));
  if (q >= 6) {
    put(words[q == 6 ? 0 : 1], 0, q == 6 ? 0 : 5);
    put(words[0], 1, q == 6 ? 1 : 3);
    put(words[q == 6 ? 1 : 0], 2, q == 6 ? 3 : 4);
    put(words[1], 3, q == 6 ? 10 : 14);
  }
}
RL_DEV void e2m1_decode(int (&out)[8], const Words2& words, const Factor (&factor)[kTileCols]) {
  const rl_u32 a = (rl_u32)words.word[0], b = (rl_u32)words.word[1];
  const rl_u32 tiny[8] = {a & 0x81C081C0u,
                          __funnelshift_r(a, a, 3) & 0x81C081C0u,
                          __funnelshift_r(a, a, 6) & 0x81C081C0u,
                          b & 0x81C081C0u,
                          __funnelshift_r(b, b, 5) & 0x81C081C0u,
                          __funnelshift_r(b, b, 10) & 0x81C081C0u,
                          (a << 6 & 0x00C000C0u) | (b << 5 & 0x81008100u),
                          (a << 4 & 0x01800180u) | (b << 1 & 0x80408040u)};
#pragma unroll
  for (int q = 0; q < 8; ++q) out[q] = times(tiny[q], factor[q % kTileCols]);
}
#else
// From the top of the words' halves downwards.
RL_DEV void e2m1_put(rl_u32 (&words)[2], int i, rl_u32 code) {
  words[i / 8] |= code << (i % 2 * 16 + 12 - i / 2 % 4 * 4);
}
RL_DEV void e2m1_decode(int (&out)[8], const Words2& words, const Factor (&factor)[kTileCols]) {
#pragma unroll
  for (int q = 0; q < 8; ++q)
    out[q] = to_bf16x2<2, 1>((rl_u32)words.word[q / 4] << (4 * (q % 4)), factor[q % kTileCols]);
}
#endif

}  // namespace rl

// As the weights of wmma_gemm.hip.h; sixteen scales a tile, one for each column.
struct WeightFp4 {
  static constexpr int kTileBytes = 256;
  const rl_u8* codes;
  const rl_u8* scales;
  struct Part {
    rl::Words2 codes;
    int scales;
  };
  RL_DEV WeightFp4 at(const WeightFp4& w, rl_i64 tile) { return {w.codes + tile * kTileBytes, w.scales + tile * 16}; }
  RL_DEV Part load(const WeightFp4& w, int block) {
    const rl_u32 bytes = (rl_u32)(block * kTileBytes + rl::lane() * 8);
    return {*(const rl::Words2*)(w.codes + bytes), rl::tile_bytes(w.scales + (rl_u32)block * 16)};
  }
  RL_DEV void decode(int (&out)[8], const Part& part) {
    rl::Factor factor[rl::kTileCols];
#pragma unroll
    for (int c = 0; c < rl::kTileCols; ++c) factor[c] = rl::factor_of<2>(part.scales >> (8 * c) & 255);
    rl::e2m1_decode(out, part.codes, factor);
  }
};
