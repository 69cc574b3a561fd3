// few_runs.hip.h: products of few rows one after the other, each of other columns, without a pause between them: as
// few_product.hip.h, the same sums in the same order. For experts.hip.
#pragma once
#include "few_product.hip.h"

namespace rl {
// Rows as one side of a matrix step, a tile of a weight as the other: at most kMost of them.
// kOwn, own_row(i)         the lane's rows, which load() reads
// kSums, row(i), col(i)    of a lane's sums
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
// The weight takes the side that has sixteen, they the one that has eight: half the steps, rows and sums, the same bits.
struct EightRows {
  static constexpr int kMost = 8, kOwn = 1, kSums = 4;
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
typedef SixteenRows EightRows;  // a step has but one shape
#endif
}  // namespace rl

// What a wave reads, as FewStream.
template <class W, int kTiles, class R> struct RunStream {
  W weight[kTiles];
  const rl_u16* x;
  rl_u32 row_bytes[R::kOwn];

  struct Block {
    typename W::Part part[kTiles];
    typename R::Frag a[2];
  };
  RL_DEV Block load(const RunStream& s, int block) {
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
  RL_DEV void advance(RunStream& s, int blocks) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) s.weight[t] = W::at(s.weight[t], blocks);
    s.x += blocks * kStep;
  }
  RL_DEV void add(typename R::Sums (&sums)[kTiles], rl_u16* own, const Block& block) {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      int words[8];
      W::decode(words, block.part[t]);
      rl::FragBF16 b[2];
      rl::tile_frags(b, words, own);
#pragma unroll
      for (int half = 0; half < 2; ++half) R::multiply(sums[t], block.a[half], b[half]);
    }
  }
};

// few_runs for n a multiple of kAhead, which may be 0.
template <class W, int kTiles, class R, int kAhead, class StreamOf>
RL_DEV void whole_rounds(float* lds, int n, int n_runs, const StreamOf& stream_of) {
  typedef RunStream<W, kTiles, R> Stream;
  constexpr int kOwnFloats = kTiles * kTile * kTile, kRunFloats = kWaves * kOwnFloats;
  float* own_lds = lds + rl::wave() * kOwnFloats;
  rl_u16* own = (rl_u16*)(own_lds + (n_runs - 1) * kRunFloats);
  Stream s = stream_of(0);
  typename Stream::Block ahead[kAhead];
  if (n > 0) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) ahead[j] = Stream::load(s, j);
  }
  for (int run = 1; run <= n_runs; ++run, own_lds += kRunFloats) {
    typename R::Sums sums[kTiles];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) sums[t] = typename R::Sums{};
#pragma unroll 1
    for (int left = n - kAhead; left >= 0; left -= kAhead) {
      if (left > 0) Stream::advance(s, kAhead);
      else if (run < n_runs) s = stream_of(run);  // at the very end the last blocks again
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        Stream::add(sums, own, ahead[j]);
        ahead[j] = Stream::load(s, j);
      }
    }
    rl_wave_sync();
#pragma unroll
    for (int t = 0; t < kTiles; ++t)
#pragma unroll
      for (int i = 0; i < R::kSums; ++i)
        own_lds[t * (kTile * kTile) + R::row(i) * kTile + R::col(i)] = sums[t].v[i];
  }
}

// In each of n_runs runs the sums of the first n blocks, which may be none, of stream_of(run); left in LDS, where all
// waves may read them with over_run. While a run ends the next one is read already. Rows are read as far ahead as
// weights though they lie nearer: gfx1100 waits for loads in the order of their issue.
template <class W, int kTiles, class R, int kAhead, class StreamOf>
RL_DEV void few_runs(float* lds, int n, int n_runs, const StreamOf& stream_of) {
  if (n % kAhead == 0) whole_rounds<W, kTiles, R, kAhead>(lds, n, n_runs, stream_of);
  else whole_rounds<W, kTiles, R, 1>(lds, n, n_runs, stream_of);
  rl_sync();
}
// An element of tile t in a run, over the segments of waves first .. first + n - 1 ascending.
template <int kTiles> RL_DEV float over_run(const float* lds, int run, int first, int n, int t, int element) {
  float total = 0.0f;
  for (int s = 0; s < n; ++s)
    total += lds[((run * kWaves + first + s) * kTiles + t) * (kTile * kTile) + element];
  return total;
}
