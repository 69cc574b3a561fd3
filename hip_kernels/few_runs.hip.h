// few_runs.hip.h: products of few rows one after the other, each of other columns, without a pause between them: as
// few_product.hip.h, the same sums in the same order. For experts.hip.
#pragma once
#include "few_product.hip.h"

// few_runs for n a multiple of kAhead, which may be 0.
template <class W, int kTiles, class R, int kAhead, class StreamOf>
RL_DEV void whole_rounds(float* lds, int n, int n_runs, const StreamOf& stream_of) {
  typedef FewStream<W, kTiles, R> Stream;
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
        add_block<W, kTiles, R>(sums, own, ahead[j]);
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
