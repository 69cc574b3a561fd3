// sample_adjust, sample_choose, sample_logprobs: sampling.py's choice of a token and log-probabilities, bit for bit.
// sample_adjust: grid (ceil(L/256), R); 256 threads, one a list's entry; no LDS.
// sample_choose, sample_logprobs: grid (R, 1); 1,024 threads; LDS as in struct Lds. A row of up to 131,072 logits is
// read again, from the cache, for every question asked of it, which takes no memory but the LDS: some ten times as a
// rule, and seven times more for every 2,048 ranks that top-p has to go through.
//
// Order among tokens: higher score first, then lower id; as an element's rank (Element), all of them distinct.
//
// Budget on gfx1100: sample_adjust: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: sample_choose: 96 VGPRs, 41120 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: sample_logprobs: 96 VGPRs, 41120 bytes of LDS, 16 waves per SIMD, no scratch.
#include "explog.hip.h"

constexpr int kThreads = 1024, kWaves = kThreads / 32, kListThreads = 256;
constexpr int kBins = 2048, kRanks = 2048, kBlock = 64, kNoId = 0x7FFFFFFF;
constexpr int kNotFinite = -1, kNothingLeft = -2;
constexpr rl_u32 kLowest = 0x00800000;  // key of the lowest finite score; -inf is below
enum List { kSeen, kBias, kBanned };

struct Lds {
  int bins[kBins];
  rl_u32 keys[kRanks];
  int ids[kRanks];
  float terms[kRanks];  // weights, or sums of blocks
  float sums[kRanks];
  int waves[kWaves + 4];
  int found[4];
};

RL_DEV bool finite(float v) { return (rl::as_int(v) & 0x7F800000) != 0x7F800000; }
RL_DEV float minus_infinity() { return rl::as_float((int)0xFF800000); }

// ---- lists of a request: ids of one list are distinct ----

RL_KERNEL(kListThreads) sample_adjust(float* scores,             // [R, V]
                                      const int* ids,            // [R, L], -1 for none
                                      const int* counts,         // [R, L] of kSeen
                                      const float* bias,         // [R, L] of kBias
                                      const float* repetition,   // [R] of kSeen
                                      const float* presence,     // [R]
                                      const float* frequency,    // [R]
                                      int kind, int width, int n_vocab) {
  const int entry = rl_bid_x() * kListThreads + rl_tid(), row = rl_bid_y();
  if (entry >= width) return;
  const rl_i64 at = (rl_i64)row * width + entry;
  if (ids[at] < 0) return;
  float& score = scores[(rl_i64)row * n_vocab + ids[at]];
  if (kind == kBanned) {
    score = minus_infinity();
  } else if (kind == kBias) {
    score = score + bias[at];
  } else {
    const float seen = score < 0.0f ? score * repetition[row] : score / repetition[row];
    score = counts[at] > 0 ? (seen - presence[row]) - frequency[row] * (float)counts[at] : seen;
  }
}
RL_EXPORT(sample_adjust)

// ---- scores and their order ----

struct Row {
  const float* logits;
  float temperature;  // 0: as they are
  int n;
};

RL_DEV float score_of(const Row& row, int id) {
  return row.temperature > 0.0f ? row.logits[id] / row.temperature : row.logits[id];
}

// Larger for a larger score; -0 is +0.
RL_DEV rl_u32 key_of(float score) {
  const int bits = rl::as_int(score + 0.0f);
  return (rl_u32)(bits ^ (bits >> 31 & 0x7FFFFFFF)) ^ 0x80000000u;
}
RL_DEV float score_of_key(rl_u32 key) {
  const int bits = (int)(key ^ 0x80000000u);
  return rl::as_float(bits ^ (bits >> 31 & 0x7FFFFFFF));
}

struct Element {
  rl_u32 key;
  int id;
};
RL_DEV bool before(const Element& a, const Element& b) { return a.key > b.key || (a.key == b.key && a.id < b.id); }

struct Range {  // elements past `after`, up to and with `last`
  Element after, last;
};
RL_DEV bool in(const Range& range, const Element& e) { return before(range.after, e) && !before(range.last, e); }
RL_DEV Range all_finite() { return {{0xFFFFFFFFu, -1}, {kLowest, kNoId}}; }

// ---- the workgroup ----

// The sum over lower threads; `all` becomes the sum over all of them.
RL_DEV int sum_before(int v, int* waves, int& all) {
  int upto = v;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = rl::shfl(upto, (rl::lane() - d) & 31);
    if (rl::lane() >= d) upto += other;
  }
  if (rl::lane() == 31) waves[rl::wave()] = upto;
  rl_sync();
  int lower = 0;
  all = 0;
  for (int w = 0; w < kWaves; ++w) {
    if (w == rl::wave()) lower = all;
    all += waves[w];
  }
  rl_sync();
  return lower + upto - v;
}

// The first of all threads' elements.
RL_DEV Element first_of(Element e, Lds& lds) {
#pragma unroll
  for (int d = 16; d; d /= 2) {
    const Element other = {(rl_u32)rl::shfl((int)e.key, rl::lane() ^ d), rl::shfl(e.id, rl::lane() ^ d)};
    if (before(other, e)) e = other;
  }
  if (rl::lane() == 0) {
    lds.keys[rl::wave()] = e.key;
    lds.ids[rl::wave()] = e.id;
  }
  rl_sync();
  for (int w = 0; w < kWaves; ++w) {
    const Element other = {lds.keys[w], lds.ids[w]};
    if (before(other, e)) e = other;
  }
  rl_sync();
  return e;
}

RL_DEV bool any(bool p, Lds& lds) {
  int all;
  sum_before(p, lds.waves, all);
  return all > 0;
}

// ---- the n-th element ----

// One digit of the n-th key among those that agree above the digit; n becomes its place among those of that digit.
RL_DEV int find_digit(const Row& row, const Range& range, rl_u32 upper, int shift, int bits, int& n, Lds& lds) {
  for (int i = rl_tid(); i < kBins; i += kThreads) lds.bins[i] = 0;
  rl_sync();
  for (int id = rl_tid(); id < row.n; id += kThreads) {
    const rl_u32 key = key_of(score_of(row, id));
    const bool agrees = shift + bits == 32 || key >> (shift + bits) == upper >> (shift + bits);
    if (agrees && in(range, {key, id})) rl::lds_add(&lds.bins[key >> shift & ((1u << bits) - 1)], 1);
  }
  rl_sync();
  const int top = kBins - 1 - 2 * rl_tid();  // lower threads have higher digits
  int all;
  const int high = lds.bins[top], own = high + lds.bins[top - 1];
  const int above = sum_before(own, lds.waves, all);
  if (rl_tid() == 0) lds.found[0] = -1;
  rl_sync();
  if (above < n && above + own >= n) {
    lds.found[0] = above + high >= n ? top : top - 1;
    lds.found[1] = above + high >= n ? n - above : n - above - high;
  }
  rl_sync();
  const int digit = lds.found[0];
  n = lds.found[1];
  rl_sync();
  return digit;
}

// The n-th id in ascending order whose key this is.
RL_DEV int nth_tie(const Row& row, const Range& range, rl_u32 key, int n, Lds& lds) {
  const int own = (row.n + kThreads - 1) / kThreads, first = rl_tid() * own;
  const int end = first + own < row.n ? first + own : row.n;
  int count = 0, all;
  for (int id = first; id < end; ++id) count += key_of(score_of(row, id)) == key && in(range, {key, id});
  int before_own = sum_before(count, lds.waves, all);
  if (before_own < n && before_own + count >= n)
    for (int id = first; id < end; ++id)
      if (key_of(score_of(row, id)) == key && in(range, {key, id}) && ++before_own == n) lds.found[2] = id;
  rl_sync();
  const int id = lds.found[2];
  rl_sync();
  return id;
}

// The n-th of a range, n >= 1; its last where it has fewer.
RL_DEV Element nth(const Row& row, const Range& range, int n, Lds& lds) {
  int digit = find_digit(row, range, 0, 21, 11, n, lds);
  if (digit < 0) return range.last;
  rl_u32 key = (rl_u32)digit << 21;
  key |= (rl_u32)find_digit(row, range, key, 10, 11, n, lds) << 10;
  key |= (rl_u32)find_digit(row, range, key, 0, 10, n, lds);
  return {key, nth_tie(row, range, key, n, lds)};
}

// Elements of a range of at most kRanks, in order, in lds.keys and lds.ids; returns how many.
RL_DEV int list(const Row& row, const Range& range, Lds& lds) {
  if (rl_tid() == 0) lds.found[3] = 0;
  for (int i = rl_tid(); i < kRanks; i += kThreads) {
    lds.keys[i] = 0;
    lds.ids[i] = kNoId;
  }
  rl_sync();
  for (int id = rl_tid(); id < row.n; id += kThreads) {
    const Element e = {key_of(score_of(row, id)), id};
    if (!in(range, e)) continue;
    const int place = rl::lds_add(&lds.found[3], 1);
    lds.keys[place] = e.key;
    lds.ids[place] = id;
  }
  rl_sync();
  const int n = lds.found[3];
  int padded = 2;
  while (padded < n) padded *= 2;
  for (int size = 2; size <= padded; size *= 2) {  // bitonic
    for (int step = size / 2; step; step /= 2) {
      if (2 * rl_tid() < padded) {
        const int low = rl_tid() / step * 2 * step + rl_tid() % step, high = low + step;
        const Element a = {lds.keys[low], lds.ids[low]}, b = {lds.keys[high], lds.ids[high]};
        if (before(b, a) == ((low & size) == 0)) {
          lds.keys[low] = b.key, lds.ids[low] = b.id;
          lds.keys[high] = a.key, lds.ids[high] = a.id;
        }
      }
      rl_sync();
    }
  }
  return n;
}

// ---- sums in sampling.py's order: blocks of 64 ascending, then their sums in the same way ----

RL_DEV float sum_weights(const Row& row, const Range& kept, float best, Lds& lds) {
  int n = (row.n + kBlock - 1) / kBlock;
  for (int block = rl_tid(); block < n; block += kThreads) {
    float sum = 0.0f;
    for (int id = block * kBlock; id < (block + 1) * kBlock && id < row.n; ++id) {
      const float score = score_of(row, id);
      sum += in(kept, {key_of(score), id}) ? rl::exp(score - best) : 0.0f;
    }
    lds.terms[block] = sum;
  }
  rl_sync();
  float *from = lds.terms, *to = lds.sums;
  while (n > 1) {
    const int n_sums = (n + kBlock - 1) / kBlock;
    if (rl_tid() < n_sums) {
      float sum = 0.0f;
      for (int i = rl_tid() * kBlock; i < (rl_tid() + 1) * kBlock && i < n; ++i) sum += from[i];
      to[rl_tid()] = sum;
    }
    rl_sync();
    float* swap = from;
    from = to;
    to = swap;
    n = n_sums;
  }
  const float total = from[0];
  rl_sync();
  return total;
}

// Of n elements listed in order: the first whose predecessors' weights are no less than the limit, or n. `whole` is the
// sum of the blocks before them, and becomes that of theirs too.
RL_DEV int first_at_limit(int n, float best, float limit, float& whole, Lds& lds) {
  constexpr int kBlocks = kRanks / kBlock;
  for (int i = rl_tid(); i < kRanks; i += kThreads)
    lds.terms[i] = i < n ? rl::exp(score_of_key(lds.keys[i]) - best) : 0.0f;
  rl_sync();
  if (rl_tid() < kBlocks) {
    float sum = 0.0f;
    for (int i = 0; i < kBlock; ++i) sum += lds.terms[rl_tid() * kBlock + i];
    lds.sums[rl_tid()] = sum;
  }
  rl_sync();
  float blocks_before = whole;
  for (int block = 0; block < kBlocks; ++block) {
    if (block == rl_tid()) blocks_before = whole;
    whole = whole + lds.sums[block];
  }
  if (rl_tid() < kBlocks) {
    int place = 0;
    float inside = 0.0f;
    while (place < kBlock && blocks_before + inside < limit) inside += lds.terms[rl_tid() * kBlock + place++];
    lds.waves[rl_tid()] = place;
  }
  rl_sync();
  int first = 0;  // sums never decrease, so only one block is partly below the limit
  for (int block = 0; block < kBlocks; ++block) first += lds.waves[block];
  rl_sync();
  return first < n ? first : n;
}

// The last element that top-p keeps of a range, which is best first.
RL_DEV Element top_p_last(const Row& row, const Range& kept, float best, float limit, Lds& lds) {
  Range part = kept;
  float whole = 0.0f;
  while (true) {
    part.last = nth(row, {part.after, kept.last}, kRanks, lds);
    const int n = list(row, part, lds);
    const int first = first_at_limit(n, best, limit, whole, lds);
    const int last = first > 0 ? first - 1 : 0;
    const Element e = {lds.keys[last], lds.ids[last]};
    rl_sync();
    if (first < n) return first == 0 && part.after.key != kept.after.key ? part.after : e;
    if (n < kRanks) return kept.last;
    part.after = part.last;
  }
}

// ---- noise (philox.py) ----

RL_DEV float gumbel(rl_u32 word) {
  float u = ((float)(word >> 8) + 0.5f) * 5.9604644775390625e-8f;
  const float below_one = 0.999999940395355224609375f;
  u = u > below_one ? below_one : u;
  return -rl::log(-rl::log(u));
}

struct Quad {
  rl_u32 word[4];
};
RL_DEV Quad philox(Quad c, rl_u32 k0, rl_u32 k1) {
  for (int round = 0; round < 10; ++round) {
    const rl_u64 low = (rl_u64)c.word[0] * 0xD2511F53u, high = (rl_u64)c.word[2] * 0xCD9E8D57u;
    c = {{(rl_u32)(high >> 32) ^ c.word[1] ^ k0, (rl_u32)high, (rl_u32)(low >> 32) ^ c.word[3] ^ k1, (rl_u32)low}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The best of a range's elements with noise added, those below min_p of the best one's weight left out.
RL_DEV int choose_noisy(const Row& row, const Range& kept, float best, float min_p, rl_u64 seed, rl_u64 position,
                        Lds& lds) {
  Element choice = {0, kNoId};
  for (int quad = rl_tid(); quad < (row.n + 3) / 4; quad += kThreads) {
    float scores[4];
    bool some = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int id = 4 * quad + i;
      scores[i] = id < row.n ? score_of(row, id) : minus_infinity();
      bool real = in(kept, {key_of(scores[i]), id});
      if (real && min_p > 0.0f) real = rl::exp(scores[i] - best) >= min_p;
      if (!real) scores[i] = minus_infinity();
      some = some || real;
    }
    if (!some) continue;
    constexpr rl_u32 kToken = 0;  // what the noise is for
    const Quad words = philox({{(rl_u32)position, (rl_u32)quad, kToken, (rl_u32)(position >> 32)}}, (rl_u32)seed,
                              (rl_u32)(seed >> 32));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const Element e = {key_of(scores[i] + gumbel(words.word[i])), 4 * quad + i};
      if (before(e, choice)) choice = e;
    }
  }
  return first_of(choice, lds).id;
}

// ---- rows ----

RL_DEV bool all_logits_finite(const float* logits, int n, Lds& lds) {
  bool broken = false;
#pragma unroll 8  // with so many loads on their way: nothing here branches
  for (int id = rl_tid(); id < n; id += kThreads) broken |= !finite(logits[id]);
  return !any(broken, lds);
}

RL_DEV Element best_of(const Row& row, Lds& lds) {
  Element best = {0, kNoId};
#pragma unroll 8
  for (int id = rl_tid(); id < row.n; id += kThreads) {
    const Element e = {key_of(score_of(row, id)), id};
    if (before(e, best)) best = e;
  }
  return first_of(best, lds);
}

RL_KERNEL(kThreads) sample_choose(int* chosen,                 // [R]
                                  const float* logits,         // [R, V]
                                  const float* scores,         // [R, V] adjusted; may be logits
                                  const rl_i64* seeds,         // [R]
                                  const rl_i64* positions,     // [R]
                                  const float* temperatures,   // [R]
                                  const int* top_k,            // [R]
                                  const float* top_p,          // [R]
                                  const float* min_p,          // [R]
                                  int n_vocab) {
  RL_DYN_SHARED(Lds, shared);
  Lds& lds = *shared;
  const int r = rl_bid_x();
  const Row row = {scores + (rl_i64)r * n_vocab, temperatures[r], n_vocab};
  int answer = kNotFinite;
  if (all_logits_finite(logits + (rl_i64)r * n_vocab, n_vocab, lds)) {
    const Element first = best_of(row, lds);
    const float best = score_of_key(first.key);
    if (first.key < kLowest) {
      answer = kNothingLeft;
    } else if (finite(best)) {
      answer = first.id;
      if (row.temperature > 0.0f) {
        Range kept = all_finite();
        if (top_k[r] > 0) kept.last = nth(row, kept, top_k[r], lds);
        if (top_p[r] < 1.0f) {
          const float limit = top_p[r] * sum_weights(row, kept, best, lds);
          kept.last = top_p_last(row, kept, best, limit, lds);
        }
        answer = choose_noisy(row, kept, best, min_p[r], (rl_u64)seeds[r], (rl_u64)positions[r], lds);
      }
    }
  }
  if (rl_tid() == 0) chosen[r] = answer;
}
RL_EXPORT(sample_choose)

RL_KERNEL(kThreads) sample_logprobs(float* chosen_logprobs,  // [R]
                                    int* top_ids,            // [R, n_top]
                                    float* top_logprobs,     // [R, n_top]
                                    const float* logits,     // [R, V]
                                    const int* chosen,       // [R], negative: none
                                    int n_vocab, int n_top) {
  RL_DYN_SHARED(Lds, shared);
  Lds& lds = *shared;
  const int r = rl_bid_x();
  const Row row = {logits + (rl_i64)r * n_vocab, 0.0f, n_vocab};
  const float nan = rl::as_float(0x7FC00000);
  float chosen_logprob = nan, best = 0.0f, log_sum = 0.0f;
  int n = 0;
  if (all_logits_finite(row.logits, n_vocab, lds)) {
    best = score_of_key(best_of(row, lds).key);
    log_sum = rl::log(sum_weights(row, all_finite(), best, lds));
    if (chosen[r] >= 0) chosen_logprob = (row.logits[chosen[r]] - best) - log_sum;
    if (n_top > 0) {
      Range top = all_finite();
      top.last = nth(row, top, n_top, lds);
      n = list(row, top, lds);
    }
  }
  if (rl_tid() == 0) chosen_logprobs[r] = chosen_logprob;
  for (int i = rl_tid(); i < n_top; i += kThreads) {
    const rl_i64 at = (rl_i64)r * n_top + i;
    top_ids[at] = i < n ? lds.ids[i] : -1;
    top_logprobs[at] = i < n ? (row.logits[lds.ids[i]] - best) - log_sum : nan;
  }
}
RL_EXPORT(sample_logprobs)
