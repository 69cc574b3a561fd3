// selection_terms.hip.h: the K best of a row's 16-bit keys, by one workgroup, listed in ascending order (backbone.md
// section 7 step 5 and 8).
//
// A key is a BF16 score made sortable, 0 for what is never chosen. There are only 65,536 keys, so two counts, of the
// upper 12 bits and then of the lower 4 at the cut, give the K-th best exactly. Ties there go to the lower indices.
#pragma once
#include "port.hip.h"

constexpr int kBins = 4096, kLowBins = 16, kRead = 8, kKeysABlock = 8;
constexpr int kForced = 0xFFFF;  // above every score

struct Keys {  // of a row
  const rl_u16* keys;  // 16-byte aligned, readable up to a multiple of kRead
  int n, forced;       // the forced index counts as the largest; -1 for none
};

struct Chosen {  // of a row
  int* list;          // [k] ascending, -1 at the end
  const int* blocks;  // or null; key i is of block i / 8
  int k;
};

template <int kThreads> struct Select {
  static constexpr int kWaves = kThreads / 32;
  static_assert(kWaves <= 32 && kBins % kThreads == 0, "one lane a wave, whole bins a thread");

  struct Lds {
    int counts[kBins];
    int sums[kWaves];
    int found[2];
  };
  static constexpr int kLdsBytes = (sizeof(Lds) + 15) / 16 * 16;

  RL_DEV void read_keys(int (&keys)[kRead], const Keys& row, int start) {
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
    const int upto = sum_to(v);
    if (rl::lane() == 31) sums[rl::wave()] = upto;
    rl_sync();
    const int waves = sum_to(rl::lane() < kWaves ? sums[rl::lane()] : 0);
    all = rl::shfl(waves, 31);
    const int lower = rl::shfl(waves, (rl::wave() - 1) & 31);
    rl_sync();  // sums may be written again
    return upto - v + (rl::wave() ? lower : 0);
  }

  struct Cut {
    int key;   // better ones are chosen,
    int room;  // and this many of those equal to it
  };

  RL_DEV Cut find_cut(const Keys& row, int k, int* counts, int* sums, int* found) {
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

  // All threads together; lds is free before and afterwards.
  RL_DEV void list(const Chosen& to, const Keys& row, Lds& lds) {
    const Cut cut = find_cut(row, to.k, lds.counts, lds.sums, lds.found);
    int better = 0, tied = 0;  // so far; at most 2^17 each
    for (int start0 = 0; start0 < row.n && better + tied < to.k; start0 += kThreads * kRead) {
      const int start = start0 + rl_tid() * kRead;
      int key[kRead], mine = 0, all;  // counts of 8,192 keys at most: two in a word
      for (int i = 0; i < kRead; ++i) key[i] = 0;
      if (start < row.n) read_keys(key, row, start);
#pragma unroll
      for (int i = 0; i < kRead; ++i) mine += key[i] > cut.key ? 1 << 16 : cut.key && key[i] == cut.key ? 1 : 0;
      const int before = sum_before(mine, lds.sums, all);
      int my_better = better + (before >> 16), my_tied = tied + (before & 0xFFFF);
#pragma unroll
      for (int i = 0; i < kRead; ++i) {
        const bool is_better = key[i] > cut.key, is_tied = cut.key && key[i] == cut.key;
        const int place = my_better + (my_tied < cut.room ? my_tied : cut.room);
        if (is_better || (is_tied && my_tied < cut.room)) {
          const int index = start + i;
          to.list[place] = to.blocks ? to.blocks[index / kKeysABlock] * kKeysABlock + index % kKeysABlock : index;
        }
        my_better += is_better;
        my_tied += is_tied;
      }
      better += all >> 16;
      tied += all & 0xFFFF;
      if (tied > cut.room) tied = cut.room;
    }
    for (int place = better + tied + rl_tid(); place < to.k; place += kThreads) to.list[place] = -1;
    rl_sync();
  }
};
