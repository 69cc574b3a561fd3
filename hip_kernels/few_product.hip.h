// few_product.hip.h: at most 16 rows times tiles of a weight, straight from memory: a wave has some tiles of columns
// and one segment of K, whose sums then meet those of the other segments in LDS. For linear.hip, experts.hip and
// router.hip; the order of additions is that of wmma_gemm.hip.h.
#pragma once
#include "wmma_gemm.hip.h"

namespace rl {
// Rows as one side of a matrix step, a tile of a weight as the other: at most kMost of them.
// kOwn, own_row(i)         the lane's rows, which load() reads
// kSums, row(i), col(i)    of a lane's sums
// serve(n)                 whether so many rows are better served by EightRows than by SixteenRows
struct SixteenRows {
  static constexpr int kMost = 16, kOwn = kFragRows, kSums = 8;
  typedef FragBF16 Frag;
  typedef AccF32 Sums;
  RL_DEV int own_row(int i) { return frag_row(i); }
  RL_DEV int row(int i) { return acc_row(i); }
  RL_DEV int col(int i) { return acc_col(i); }
  RL_DEV Frag load(const rl_u16* const (&rows)[kOwn], int at) { return load_rows_of(rows, at); }
  RL_DEV void multiply(Sums& c, const Frag& a, const FragBF16& b) { mma(c, a, b); }
};
#if defined(RL_CUDA)
// The weight takes the side that has sixteen, they the one that has eight: half the steps and sums, the same bits.
struct EightRows {
  static constexpr int kMost = 8, kOwn = 1, kSums = 4;
  RL_DEV bool serve(int n_rows) { return n_rows <= kMost; }
  struct Frag {
    int r[2];
  };
  struct Sums {
    float v[4];
  };
  RL_DEV int own_row(int) { return lane() >> 2; }
  RL_DEV int row(int i) { return (lane() & 3) * 2 + (i & 1); }
  RL_DEV int col(int i) { return (lane() >> 2) + (i >> 1) * 8; }
  RL_DEV Frag load(const rl_u16* const (&rows)[kOwn], int at) {
    const int* low = (const int*)(rows[0] + at) + (lane() & 3);
    return {{low[0], low[4]}};
  }
  RL_DEV void multiply(Sums& c, const Frag& a, const FragBF16& b) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
        : "r"(b.r[0]), "r"(b.r[1]), "r"(b.r[2]), "r"(b.r[3]), "r"(a.r[0]), "r"(a.r[1]));
  }
};
#else
struct EightRows : SixteenRows {  // a step has but one shape
  RL_DEV bool serve(int) { return false; }
};
#endif
}  // namespace rl

// What a wave reads. All of it but the offsets is the same in every lane: gfx1100 moves it on in scalar registers, and
// inside a round of kAhead blocks offsets are constants of the instructions.
template <class W, int kTiles, class R = rl::SixteenRows> struct FewStream {
  W weight[kTiles];
  const rl_u16* x;
  rl_u32 row_bytes[R::kOwn];  // from x to the lane's rows

  struct Block {  // of 32 channels, on its way
    typename W::Part part[kTiles];
    typename R::Frag a[2];
  };
  RL_DEV Block load(const FewStream& s, int block) {
    Block b;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) b.part[t] = W::load(s.weight[t], block);
    const rl_u16* rows[R::kOwn];
#pragma unroll
    for (int i = 0; i < R::kOwn; ++i) rows[i] = (const rl_u16*)((const char*)s.x + s.row_bytes[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) b.a[half] = R::load(rows, block * kStep + half * 16);
    return b;
  }
  RL_DEV void advance(FewStream& s, int blocks) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) s.weight[t] = W::at(s.weight[t], blocks);
    s.x += blocks * kStep;
  }
};

template <class W, int kTiles, class R>
RL_DEV void add_block(typename R::Sums (&acc)[kTiles], rl_u16* own,
                      const typename FewStream<W, kTiles, R>::Block& block) {
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    int words[8];
    W::decode(words, block.part[t]);
    rl::FragBF16 b[2];
    rl::tile_frags(b, words, own);
#pragma unroll
    for (int half = 0; half < 2; ++half) R::multiply(acc[t], block.a[half], b[half]);
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
template <class W, int kTiles, int kAhead = W::kAhead, class R>
RL_DEV void few_product(typename R::Sums (&acc)[kTiles], rl_u16* own, FewStream<W, kTiles, R> s, int n) {
  typedef FewStream<W, kTiles, R> Stream;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) acc[t] = typename R::Sums{};
  if (n <= 0) return;
  typename Stream::Block ahead[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j) ahead[j] = Stream::load(s, smaller(j, n - 1));
  for (; kWholeRounds && n >= 2 * kAhead; n -= kAhead) {
    Stream::advance(s, kAhead);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      add_block<W, kTiles, R>(acc, own, ahead[j]);
      ahead[j] = Stream::load(s, j);
    }
  }
  for (int block = 0; block < n; block += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (block + j >= n) break;
      add_block<W, kTiles, R>(acc, own, ahead[j]);
      ahead[j] = Stream::load(s, smaller(block + kAhead + j, n - 1));
    }
  }
}

// Leaves a wave's sums in LDS, [wave][tile][16][16], and waits for the other waves'. Nothing else is there then.
template <class R = rl::SixteenRows, int kTiles>
RL_DEV void leave_sums(float* sums, const typename R::Sums (&acc)[kTiles]) {
  rl_sync();
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int i = 0; i < R::kSums; ++i)
      sums[(rl::wave() * kTiles + t) * (kTile * kTile) + R::row(i) * kTile + R::col(i)] = acc[t].v[i];
  rl_sync();
}
// An element of such a tile, over the segments of waves first .. first + n - 1 ascending.
template <int kTiles> RL_DEV float over_segments(const float* sums, int first, int n, int t, int element) {
  float total = 0.0f;
  for (int s = 0; s < n; ++s) total += sums[((first + s) * kTiles + t) * (kTile * kTile) + element];
  return total;
}
