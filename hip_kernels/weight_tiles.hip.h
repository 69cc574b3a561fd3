// weight_tiles.hip.h: from a weight's codes to matrix operands, as each target does it best.
#pragma once
#include "port.hip.h"

namespace rl {

// ---- small floats on their way into BF16, two at a time: of one sign bit, E exponent bits and M of mantissa ----
// factor_of<E>(scale)     the factor 2^(scale - 127), scale from 0 to 126 + 2^(E - 1)
// sm_90: times(pair, f)   two of them as the same bits of a BF16, where they are far smaller: both times the factor
// to_bf16x2<E, M>(w, f)   elsewhere: each half of w begins with such a float, whatever follows: both times the factor,
//                         as BF16. Subnormal ones too; what BF16 has no room for is cut off
#if defined(RL_CUDA)
typedef int Factor;  // a pair of BF16
template <int E> RL_DEV Factor factor_of(int scale) { return (scale + 128 - (1 << (E - 1))) * 0x00800080; }
RL_DEV int times(rl_u32 pair, Factor factor) {
  int r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(pair), "r"(factor), "r"(0x80008000));  // adding -0: no change
  return r;
}
#else
typedef float Factor;
template <int E> RL_DEV Factor factor_of(int scale) { return as_float((scale + 16 - (1 << (E - 1))) << 23); }
template <int E, int M> struct SmallFloat {
  static constexpr rl_u32 kBits = ((1u << (E + M)) - 1) << (15 - E - M);  // below the sign, in place in a half
};
#if defined(RL_HIP)
typedef short v2s __attribute__((ext_vector_type(2)));
typedef _Float16 v2h __attribute__((ext_vector_type(2)));
template <int E, int M> RL_DEV int to_bf16x2(rl_u32 w, Factor factor) {
  constexpr int kDown = 5 - E;
  const rl_u32 moved = __builtin_bit_cast(rl_u32, __builtin_bit_cast(v2s, w) >> (short)kDown);
  // With FP16's bias in place of its own.
  const v2h halves = __builtin_bit_cast(v2h, moved & (0x8000u | SmallFloat<E, M>::kBits >> kDown) * 0x10001u);
  // One v_fma_mix_f32 each, which widens too. With a zero that the compiler knows it multiplies and widens apart.
  float zero = 0.0f;
  asm("" : "+v"(zero));
  const float low = __builtin_fmaf((float)halves[0], factor, zero);
  const float high = __builtin_fmaf((float)halves[1], factor, zero);
  return (int)__builtin_amdgcn_perm((rl_u32)as_int(high), (rl_u32)as_int(low), 0x07060302u);
}
#else
template <int E, int M> RL_DEV int to_bf16x2(rl_u32 w, Factor factor) {
  const float kToF32 = 5192296858534827628530496329220096.0f;  // 2^112: FP16's bias for FP32's
  const auto upper = [&](rl_u32 half) {
    const rl_u32 size = (half & SmallFloat<E, M>::kBits) >> (5 - E);
    return (rl_u32)as_int(as_float((int)((half & 0x8000u) << 16 | size << 13)) * kToF32 * factor) >> 16;
  };
  return (int)(upper(w & 0xFFFFu) | upper(w >> 16) << 16);
}
#endif
#endif

// ---- a tile of 16 columns x 32 channels held by a wave, 16 codes a lane, in the order that fragments want ----
// tile_col, tile_channel(lane, i)  which code is the lane's i-th; codes 2 i and 2 i + 1 are neighbours in channel
// kTileCols                        columns a lane has codes of; code i is of column (i / 2) % kTileCols among them
// tile_slot(col)                   place of the column's byte among 16; tile_bytes() reads those of the lane's columns
// tile_bytes_of_8(p)               the lane's columns' bytes where p has one for each 8 columns
// tile_frags(f, words, lds)        from all 16 codes as BF16 the operands for channels 0 to 15 and 16 to 31; lds: 1,280
//                                  bytes of the wave's own
// kWeightFirst                     whether the weight is the first side of a step where rows are many (Tiled)
#if defined(RL_CUDA)
constexpr int kTileCols = 2;
RL_DEV int tile_col(int lane, int i) { return (lane >> 2) + (i >> 1 & 1) * 8; }
RL_DEV int tile_channel(int lane, int i) { return (i >> 3) * 16 + (i >> 2 & 1) * 8 + (lane & 3) * 2 + (i & 1); }
RL_DEV int tile_slot(int col) { return col % 8 * 2 + col / 8; }
RL_DEV int tile_bytes(const rl_u8* p) { return *(const rl_u16*)(p + (lane() >> 2) * 2); }
RL_DEV int tile_bytes_of_8(const rl_u8* p) { return *(const rl_u16*)p; }
constexpr bool kWeightFirst = true;
RL_DEV void tile_frags(FragBF16 (&f)[2], const int (&words)[8], rl_u16*) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    f[half] = {{words[4 * half], words[4 * half + 1], words[4 * half + 2], words[4 * half + 3]}};
}
#else
constexpr int kTileCols = 1;
RL_DEV int tile_col(int lane, int) { return lane & 15; }
RL_DEV int tile_channel(int lane, int i) { return (lane >> 4) * 16 + i; }
RL_DEV int tile_slot(int col) { return col; }
RL_DEV int tile_bytes(const rl_u8* p) { return p[lane() & 15]; }
RL_DEV int tile_bytes_of_8(const rl_u8* p) { return p[lane() >> 3 & 1]; }
constexpr bool kWeightFirst = false;
RL_DEV void tile_frags(FragBF16 (&f)[2], const int (&words)[8], rl_u16* lds) {
  constexpr int kApart = 40;  // columns, in elements: sixteen bytes of eight of them fall on different banks
  rl_u16* column = lds + (lane() & 15) * kApart;
  Words4* own = (Words4*)(column + (lane() >> 4) * 16);
  rl_wave_sync();  // the last tile's have been read
  own[0] = Words4{{words[0], words[1], words[2], words[3]}};
  own[1] = Words4{{words[4], words[5], words[6], words[7]}};
  rl_wave_sync();
  f[0] = load_rows(lds, kApart);
  f[1] = load_rows(lds + 16, kApart);
}
#endif

// ---- a lane's 16 codes of E4M3 in four words; codes 2 q and 2 q + 1, neighbours in channel, come out together ----
// e4m3_put(words, i, code)         puts code i in its place among zeros
// e4m3_decode(out, words, factor)  the pairs in order as BF16, times the factor of their column
#if defined(RL_CUDA)
// Of two pairs in a word one lies as BF16 has its bits, as 0x87F0, the other in what that leaves free.
RL_DEV void e4m3_put(rl_u32 (&words)[4], int i, rl_u32 code) {
  const rl_u32 even = (code & 0x80) << 8 | (code & 0x7F) << 4;
  const rl_u32 odd = (code & 0x80) << 4 | (code & 0x70) << 8 | (code & 15);
  words[i / 4] |= (i / 2 % 2 ? odd : even) << (i % 2 * 16);
}
RL_DEV void e4m3_decode(int (&out)[8], const Words4& words, const Factor (&factor)[kTileCols]) {
#pragma unroll
  for (int q = 0; q < 8; ++q) {
    const rl_u32 w = (rl_u32)words.word[q / 2];
    out[q] = times(q % 2 ? (w << 4 & 0x80F080F0u) | (w >> 4 & 0x07000700u) : w & 0x87F087F0u, factor[q % kTileCols]);
  }
}
#else
// The first pair of a word in the upper bytes of its halves.
RL_DEV void e4m3_put(rl_u32 (&words)[4], int i, rl_u32 code) {
  words[i / 4] |= code << (i % 2 * 16 + (i / 2 % 2 ? 0 : 8));
}
RL_DEV void e4m3_decode(int (&out)[8], const Words4& words, const Factor (&factor)[kTileCols]) {
#pragma unroll
  for (int q = 0; q < 8; ++q)
    out[q] = to_bf16x2<4, 3>((rl_u32)words.word[q / 2] << (8 * (q % 2)), factor[q % kTileCols]);
}
#endif

}  // namespace rl
