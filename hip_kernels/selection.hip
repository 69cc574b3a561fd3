// select_keys: the K best of each row's 16-bit keys, listed in ascending order (backbone.md section 7 step 5 and 8).
// Grid (1, R); 1,024 threads = 32 waves; LDS 4,096 counts and 34 words.
//
// A key is a BF16 score made sortable, 0 for what is never chosen. There are only 65,536 keys, so two counts, of the
// upper 12 bits and then of the lower 4 at the cut, give the K-th best exactly. Ties there go to the lower indices.
//
// Budget on gfx1100: select_keys: 48 VGPRs, 16520 bytes of LDS, 16 waves per SIMD, no scratch.
#include "port.hip.h"

constexpr int kThreads = 1024, kWaves = kThreads / 32, kBins = 4096, kLowBins = 16, kRead = 8, kBlock = 8;
constexpr int kForced = 0xFFFF;  // above every score

struct Row {
  const rl_u16* keys;  // 16-byte aligned, readable up to a multiple of kRead
  int n, forced;       // the forced index counts as the largest; -1 for none
};

RL_DEV void read_keys(int (&keys)[kRead], const Row& row, int start) {
  const rl::Words4 words = *(const rl::Words4*)(row.keys + start);
#pragma unroll
  for (int i = 0; i < kRead; ++i) {
    const int key = (int)((rl_u32)words.word[i / 2] >> (16 * (i % 2))) & 0xFFFF;
    keys[i] = start + i >= row.n ? 0 : start + i == row.forced ? kForced : key;
  }
}

RL_DEV int sum_to(int v) {  // over this lane and the lower ones
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = rl::shfl(v, (rl::lane() - d) & 31);
    if (rl::lane() >= d) v += other;
  }
  return v;
}

// The sum over lower threads; `all` becomes the sum over all of them.
RL_DEV int sum_before(int v, int* sums, int& all) {
  static_assert(kWaves == 32, "one lane a wave");
  const int upto = sum_to(v);
  if (rl::lane() == 31) sums[rl::wave()] = upto;
  rl_sync();
  const int waves = sum_to(sums[rl::lane()]);
  all = rl::shfl(waves, 31);
  const int lower = rl::shfl(waves, (rl::wave() - 1) & 31);
  rl_sync();  // sums may be written again
  return upto - v + (rl::wave() ? lower : 0);
}

struct Cut {
  int key;   // better ones are chosen,
  int room;  // and this many of those equal to it
};

RL_DEV Cut find_cut(const Row& row, int k, int* counts, int* sums, int* found) {
  int keys[kRead];
  for (int i = rl_tid(); i < kBins; i += kThreads) counts[i] = 0;
  if (rl_tid() == 0) found[0] = -1;
  rl_sync();
  for (int start = rl_tid() * kRead; start < row.n; start += kThreads * kRead) {
    read_keys(keys, row, start);
#pragma unroll
    for (int i = 0; i < kRead; ++i)
      if (keys[i]) rl::lds_add(&counts[keys[i] / kLowBins], 1);
  }
  rl_sync();
  constexpr int kOwn = kBins / kThreads;
  const int top = kBins - 1 - rl_tid() * kOwn;  // lower threads have higher bins
  int own = 0, all;
  for (int i = 0; i < kOwn; ++i) own += counts[top - i];
  int above = sum_before(own, sums, all);
  if (all <= k) return {0, 0};
  if (above < k && above + own >= k) {
    int bin = top;
    while (above + counts[bin] < k) above += counts[bin--];
    found[0] = bin;
    found[1] = k - above;
  }
  rl_sync();
  const int bin = found[0];
  int wanted = found[1];
  if (rl_tid() < kLowBins) counts[rl_tid()] = 0;
  rl_sync();
  for (int start = rl_tid() * kRead; start < row.n; start += kThreads * kRead) {
    read_keys(keys, row, start);
#pragma unroll
    for (int i = 0; i < kRead; ++i)
      if (keys[i] && keys[i] / kLowBins == bin) rl::lds_add(&counts[keys[i] % kLowBins], 1);
  }
  rl_sync();
  int low = kLowBins - 1;
  while (counts[low] < wanted) wanted -= counts[low--];
  return {bin * kLowBins + low, wanted};
}

RL_KERNEL(kThreads) select_keys(int* chosen,            // [R, K] ascending, -1 at the end
                                const rl_u16* keys,     // [R, stride]
                                const int* visible,     // [R]: the row's newest block is kept; or null
                                const int* blocks,      // [R, n_blocks]: or null; key i is of block i / 8
                                int n, int stride, int k, int n_blocks) {
  RL_DYN_SHARED(int, counts);
  int* sums = counts + kBins;
  int* found = sums + kWaves;
  const rl_i64 r = rl_bid_y();
  const Row row = {keys + r * stride, n, visible && visible[r] > 0 ? (visible[r] - 1) / kBlock : -1};
  const Cut cut = find_cut(row, k, counts, sums, found);

  int better = 0, tied = 0;  // so far; at most 2^17 each
  for (int start0 = 0; start0 < n && better + tied < k; start0 += kThreads * kRead) {
    const int start = start0 + rl_tid() * kRead;
    int key[kRead], mine = 0, all;  // counts of 8,192 keys at most: two in a word
    for (int i = 0; i < kRead; ++i) key[i] = 0;
    if (start < n) read_keys(key, row, start);
#pragma unroll
    for (int i = 0; i < kRead; ++i) mine += key[i] > cut.key ? 1 << 16 : cut.key && key[i] == cut.key ? 1 : 0;
    const int before = sum_before(mine, sums, all);
    int my_better = better + (before >> 16), my_tied = tied + (before & 0xFFFF);
#pragma unroll
    for (int i = 0; i < kRead; ++i) {
      const bool is_better = key[i] > cut.key, is_tied = cut.key && key[i] == cut.key;
      const int place = my_better + (my_tied < cut.room ? my_tied : cut.room);
      if (is_better || (is_tied && my_tied < cut.room)) {
        const int index = start + i;
        chosen[r * k + place] = blocks ? blocks[r * n_blocks + index / kBlock] * kBlock + index % kBlock : index;
      }
      my_better += is_better;
      my_tied += is_tied;
    }
    better += all >> 16;
    tied += all & 0xFFFF;
    if (tied > cut.room) tied = cut.room;
  }
  for (int place = better + tied + rl_tid(); place < k; place += kThreads) chosen[r * k + place] = -1;
}
RL_EXPORT(select_keys)
