// weight_tiles.hip.h: from a weight's codes to matrix operands, as each target does it best.
#pragma once
#include "port.hip.h"

namespace rl {

// ---- small floats on their way into BF16, two at a time: of one sign bit, E exponent bits and M of mantissa ----
// to_bf16x2<E, M>(w, f)   each half of w begins with such a float, whatever follows: both times the factor, as BF16.
//                         Subnormal ones too; what BF16 has no room for is cut off
// factor_of<E>(scale)     the factor 2^(scale - 127), scale from 0 to 126 + 2^(E - 1)
template <int E, int M> struct SmallFloat {
  static constexpr rl_u32 kBits = ((1u << (E + M)) - 1) << (15 - E - M);  // below the sign, in place in a half
};
#if defined(RL_CUDA)
typedef int Factor;  // a pair of BF16
template <int E> RL_DEV Factor factor_of(int scale) { return (scale + 128 - (1 << (E - 1))) * 0x00800080; }
template <int E, int M> RL_DEV int to_bf16x2(rl_u32 w, Factor factor) {
  constexpr int kDown = 8 - E;
  // With BF16's bias in place of its own, a tiny number.
  const rl_u32 tiny = (w >> kDown & (SmallFloat<E, M>::kBits >> kDown) * 0x10001u) | (w & 0x80008000u);
  int r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(tiny), "r"(factor), "r"(0x80008000));  // adding -0: no change
  return r;
}
#else
typedef float Factor;
template <int E> RL_DEV Factor factor_of(int scale) { return as_float((scale + 16 - (1 << (E - 1))) << 23); }
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
// kSharesDecoding                  whether rows are divided among waves rather than columns, so that two waves decode
//                                  the same tiles: where LDS is scarcer than vector instructions
#if defined(RL_CUDA)
constexpr int kTileCols = 2;
RL_DEV int tile_col(int lane, int i) { return (lane >> 2) + (i >> 1 & 1) * 8; }
RL_DEV int tile_channel(int lane, int i) { return (i >> 3) * 16 + (i >> 2 & 1) * 8 + (lane & 3) * 2 + (i & 1); }
RL_DEV int tile_slot(int col) { return col % 8 * 2 + col / 8; }
RL_DEV int tile_bytes(const rl_u8* p) { return *(const rl_u16*)(p + (lane() >> 2) * 2); }
RL_DEV int tile_bytes_of_8(const rl_u8* p) { return *(const rl_u16*)p; }
constexpr bool kSharesDecoding = true;
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
constexpr bool kSharesDecoding = false;
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

}  // namespace rl
