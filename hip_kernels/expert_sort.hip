// expert_sort: pairs of a row and one of its experts, by expert, and the tiles of rows that experts.hip takes. A
// counting sort, stable, so that every run gives the same order. Grid (1, 1); 1,024 threads; LDS as the binding says.
//
// Budget on gfx1100: expert_sort: 24 VGPRs, 52488 bytes of LDS, 16 waves per SIMD, no scratch.
#include "port.hip.h"

constexpr int kSortThreads = 1024, kSortWaves = kSortThreads / 32;

struct Pair {
  int expert;       // n_experts where there is no pair
  rl_u32 same;      // lanes with the same one
  RL_DEV bool leads(const Pair& p) { return (p.same & ((1u << rl::lane()) - 1)) == 0; }
};
RL_DEV Pair read_pair(const int* ids, int at, int n_pairs, int n_experts) {
  Pair p = {at < n_pairs ? ids[at] : n_experts, ~0u};
  for (int bit = 0; (n_experts >> bit) != 0; ++bit) {
    const bool set = (p.expert >> bit & 1) != 0;
    const rl_u32 lanes = rl::ballot(set);
    p.same &= set ? lanes : ~lanes;
  }
  return p;
}

// Exclusive over the threads; sums: 32 ints.
RL_DEV int sum_before(int v, int* sums) {
  int upto = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = rl::shfl(upto, (rl::lane() - d) & 31);
    if (rl::lane() >= d) upto += other;
  }
  if (rl::lane() == 31) sums[rl::wave()] = upto;
  rl_sync();
  int lower = 0;
  for (int w = 0; w < rl::wave(); ++w) lower += sums[w];
  rl_sync();
  return lower + upto - v;
}

RL_KERNEL(kSortThreads) expert_sort(int* pairs,      // [n] sorted: pair p is choice p % k of row p / k
                                    int* tiles,      // [most_tiles, 4] expert, first in pairs, rows, 0; no rows: none
                                    const int* ids,  // [n]
                                    int n_pairs, int n_experts, int tile_rows, int most_tiles) {
  RL_DYN_SHARED(int, counts);  // [wave][n_experts + 1] of the wave's pairs; then where its next one goes
  const int row = n_experts + 1;
  int* first_pair = counts + kSortWaves * row;  // [n_experts + 1]
  int* first_tile = first_pair + row;           // [n_experts + 1]
  int* sums = first_tile + row;                 // [32]
  for (int i = rl_tid(); i < kSortWaves * row; i += kSortThreads) counts[i] = 0;
  rl_sync();

  int* own = counts + rl::wave() * row;
  const int chunk = (n_pairs + kSortThreads - 1) / kSortThreads * 32, start = rl::wave() * chunk;
  for (int i = 0; i < chunk; i += 32) {
    const Pair p = read_pair(ids, start + i + rl::lane(), n_pairs, n_experts);
    if (Pair::leads(p)) own[p.expert] += rl::popcount(p.same);
    rl_wave_sync();
  }
  rl_sync();

  const int expert = rl_tid();
  int total = 0;
  if (expert < n_experts)
    for (int w = 0; w < kSortWaves; ++w) {
      const int of_wave = counts[w * row + expert];
      counts[w * row + expert] = total;
      total += of_wave;
    }
  const int own_tiles = (total + tile_rows - 1) / tile_rows;
  const int pairs_before = sum_before(total, sums), tiles_before = sum_before(own_tiles, sums);
  if (expert <= n_experts) {
    first_pair[expert] = pairs_before;
    first_tile[expert] = tiles_before;
  }
  rl_sync();

  for (int i = 0; i < chunk; i += 32) {
    const int at = start + i + rl::lane();
    const Pair p = read_pair(ids, at, n_pairs, n_experts);
    const int before = own[p.expert];
    if (at < n_pairs) pairs[first_pair[p.expert] + before + rl::rank(p.same)] = at;
    rl_wave_sync();
    if (Pair::leads(p)) own[p.expert] = before + rl::popcount(p.same);
    rl_wave_sync();
  }
  for (int t = rl_tid(); t < most_tiles; t += kSortThreads) {
    int low = 0, high = n_experts;  // the last expert whose first tile is at most t
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first_tile[middle] <= t) low = middle;
      else high = middle;
    }
    const int first = first_pair[low] + (t - first_tile[low]) * tile_rows;
    const int left = t < first_tile[n_experts] ? first_pair[low + 1] - first : 0;
    tiles[4 * t] = low;
    tiles[4 * t + 1] = first;
    tiles[4 * t + 2] = left < tile_rows ? left : tile_rows;
    tiles[4 * t + 3] = 0;
  }
}
RL_EXPORT(expert_sort)
