// few_product.hip.h: at most 16 rows times tiles of a weight, straight from memory: a wave has some tiles of columns
// and one segment of K, whose sums then meet those of the other segments in LDS. For linear.hip, experts.hip and
// router.hip; the order of additions is that of wmma_gemm.hip.h.
#pragma once
#include "wmma_gemm.hip.h"

// What a wave reads. All of it but the offsets is the same in every lane: gfx1100 moves it on in scalar registers, and
// inside a round of kAhead blocks offsets are constants of the instructions.
template <class W, int kTiles> struct FewStream {
  W weight[kTiles];
  const rl_u16* x;
  rl_u32 row_bytes[rl::kFragRows];  // from x to the lane's rows

  struct Block {  // of 32 channels, on its way
    typename W::Part part[kTiles];
    rl::FragBF16 a[2];
  };
  RL_DEV Block load(const FewStream& s, int block) {
    Block b;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) b.part[t] = W::load(s.weight[t], block);
    const rl_u16* rows[rl::kFragRows];
#pragma unroll
    for (int i = 0; i < rl::kFragRows; ++i) rows[i] = (const rl_u16*)((const char*)s.x + s.row_bytes[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) b.a[half] = rl::load_rows_of(rows, block * kStep + half * 16);
    return b;
  }
  RL_DEV void advance(FewStream& s, int blocks) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) s.weight[t] = W::at(s.weight[t], blocks);
    s.x += blocks * kStep;
  }
};

template <class W, int kTiles>
RL_DEV void add_block(rl::AccF32 (&acc)[kTiles], rl_u16* own, const typename FewStream<W, kTiles>::Block& block) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    int words[8];
    W::decode(words, block.part[t]);
    rl::FragBF16 b[2];
    rl::tile_frags(b, words, own);
#pragma unroll
    for (int half = 0; half < 2; ++half) rl::mma(acc[t], block.a[half], b[half]);
  }
}

// Rounds in which nothing is clamped cost gfx1100 registers and save it nothing; elsewhere each load forms its address
// anew.
#if defined(RL_CUDA)
constexpr bool kWholeRounds = true;
#else
constexpr bool kWholeRounds = false;
#endif

// acc = the sums of the stream's first n blocks, which may be none. own: kOwnElements of the wave's own LDS. Rows are
// read as far ahead as weights though they lie nearer: gfx1100 waits for loads in the order of their issue.
template <class W, int kTiles, int kAhead = W::kAhead>
RL_DEV void few_product(rl::AccF32 (&acc)[kTiles], rl_u16* own, FewStream<W, kTiles> s, int n) {
  typedef FewStream<W, kTiles> Stream;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) acc[t] = rl::AccF32{};
  if (n <= 0) return;
  typename Stream::Block ahead[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) ahead[j] = Stream::load(s, smaller(j, n - 1));
  for (; kWholeRounds && n >= 2 * kAhead; n -= kAhead) {
    Stream::advance(s, kAhead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      add_block<W, kTiles>(acc, own, ahead[j]);
      ahead[j] = Stream::load(s, j);
    }
  }
  for (int block = 0; block < n; block += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (block + j >= n) break;
      add_block<W, kTiles>(acc, own, ahead[j]);
      ahead[j] = Stream::load(s, smaller(block + kAhead + j, n - 1));
    }
  }
}

// Leaves a wave's sums in LDS, [wave][tile][16][16], and waits for the other waves'. Nothing else is there then.
template <int kTiles> RL_DEV void leave_sums(float* sums, const rl::AccF32 (&acc)[kTiles]) {
  rl_sync();
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sums[(rl::wave() * kTiles + t) * (kTile * kTile) + rl::acc_row(i) * kTile + rl::acc_col(i)] = acc[t].v[i];
  rl_sync();
}
// An element of such a tile, over the segments of waves first .. first + n - 1 ascending.
template <int kTiles> RL_DEV float over_segments(const float* sums, int first, int n, int t, int element) {
  float total = 0.0f;
  for (int s = 0; s < n; ++s) total += sums[((first + s) * kTiles + t) * (kTile * kTile) + element];
  return total;
}
