// attention_sm90.hip.h: attention.hip's rows for 64 heads of 512 on sm_90, the test card that stands in for gfx1100.
// There matrix units reach their rate only from shared memory, 64 rows at a time, and the form for WMMA leaves them
// idle nine tenths of the time: what a whole engine takes there would say little. The product has no use for this.
//
// The bits are attention_few.hip's: products of 16 channels in the same order, then the same sums of quarters, of
// weights and of blocks. LDS has all queries and two places for whole blocks, each decoded once. Warps 8 to 15 decode;
// 0 to 3 and 4 to 7 multiply, each four for all heads: scores of half of a block's slots, then half of the channels of
// its values. They meet twice a block, over its maxima and over its weights.
//
// A tile is panels: rows of 64 channels (or slots), 128 bytes, whose 16-byte pieces change places by row, as the matrix
// units' swizzle of 128 bytes has them.
#pragma once
#include "attention_terms.hip.h"

static_assert(HEADS == 64 && WIDTH == 512, "what registers and shared memory are laid out for");
constexpr int kGroupThreads = kThreads / 4, kMultipliers = 2 * kGroupThreads;
constexpr int kDecoderRegisters = 48, kMultiplierRegisters = 208;  // 512 for one thread of each four warps
constexpr int kPanel = 64, kPanels = WIDTH / kPanel, kOwnPanels = kPanels / 2, kOwnSlots = kBlock / 2;
constexpr int kPanelBytes = kBlock * kPanel * 2, kSwizzleBytes = 8 * kPanel * 2;  // which the order of pieces repeats
constexpr int kMostSlots = 640, kRowsAhead = 132;  // as many as the card has multiprocessors

typedef rl_u16 Panel[kBlock * kPanel];  // [64 rows][64]
RL_DEV int piece_at(int row, int piece) { return row * kPanel + (piece ^ row % 8) * kPiece; }

struct Lds {
  Panel queries[kPanels], rows[2][kPanels];  // [channel / 64][head, or slot][channel % 64]
  Panel weights;                             // [head][slot]
  rl_u8 packed[kBlock][kCompressedBytes];    // the next block's rows as they are stored, or halves of window rows
  float tops[2][HEADS], sums[kQuarters][HEADS];
  int places[kMostSlots];
  char room[kSwizzleBytes];  // to start at a multiple
};
// Launches ask for what gfx1100 needs; the test double gives as much as this says.
extern "C" __device__ int attention_lds_bytes = sizeof(Lds);

// ---- barriers, copies, prefetches ----

enum Barrier { kPair = 1, kFull = 2, kEmpty = 4 };  // of the multipliers; of all, for each of two places
RL_DEV void meet(int barrier, int n_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(n_threads) : "memory");
}
RL_DEV void arrive(int barrier) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory"); }
RL_DEV void show_to_matrix_units() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

RL_DEV rl_u32 lds_address(const void* p) { return (rl_u32)__cvta_generic_to_shared(p); }
RL_DEV void copy_16(void* to, const void* from) {  // bytes
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(lds_address(to)), "l"(from) : "memory");
}
RL_DEV void finish_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
RL_DEV void prefetch(const void* p, int n_bytes) {
  const rl_u64 start = (rl_u64)p & ~(rl_u64)15;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(start), "r"(n_bytes & ~15));
}

// ---- products of four warps ----

// An operand's lower word; the upper one is the same for all.
RL_DEV rl_u32 operand(const rl_u16* tile) { return lds_address(tile) >> 4 | 1u << 16; }
RL_DEV rl_u64 operand_at(rl_u32 operand, int n_bytes) {
  return (rl_u64)(1u << 30 | kSwizzleBytes / 16) << 32 | (operand + n_bytes / 16);
}

#define RL_4(v, i) "+f"(v[i]), "+f"(v[i + 1]), "+f"(v[i + 2]), "+f"(v[i + 3])
#define RL_16(v, i) RL_4(v, i), RL_4(v, i + 4), RL_4(v, i + 8), RL_4(v, i + 12)
// Products change registers behind the compiler's back: nothing it does with them may cross their start or end.
RL_DEV void hold(float (&v)[16]) { asm volatile("" : RL_16(v, 0)::"memory"); }
RL_DEV void hold(float (&v)[32]) { asm volatile("" : RL_16(v, 0), RL_16(v, 16)::"memory"); }

// Sixteen channels: [head][channel] * [slot][channel]^T, 32 slots. Added to acc if `anew` is 0.
RL_DEV void mma_scores(float (&acc)[16], rl_u64 heads, rl_u64 slots, int anew) {
  asm volatile(
      "{.reg .pred add;\n\t"
      "setp.eq.b32 add, %18, 0;\n\t"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, 0, 0;}"
      : RL_16(acc, 0)
      : "l"(heads), "l"(slots), "r"(anew));
}
// Sixteen slots: acc += [head][slot] * [slot][channel], 64 channels.
RL_DEV void mma_values(float (&acc)[32], const rl::FragBF16& weights, rl_u64 slots) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
      : RL_16(acc, 0), RL_16(acc, 16)
      : "r"(weights.r[0]), "r"(weights.r[1]), "r"(weights.r[2]), "r"(weights.r[3]), "l"(slots));
}
#undef RL_4
#undef RL_16
RL_DEV void start_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
RL_DEV void finish_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\n\twgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// ---- decoding, in pairs of BF16 ----
// A code's bits in a BF16's place, sign, exponent and below, are 2^-120 times an E4M3 and 2^-126 times an E2M1.

RL_DEV int rounded(float low, float high) {  // to nearest even
  int pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
RL_DEV int times(int a, int b) {
  int pair;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  return pair;
}
RL_DEV int twice(int bits) { return __byte_perm(bits, 0, 0x1010); }
constexpr int k2To120 = 0x7B807B80, k2To126 = 0x7E807E80, kSigns = (int)0x80008000;

RL_DEV int e4m3_unit(int scale) {
  const int bits = (scale & 0x7F) == 0x7F ? 0x7FC0 : (scale & 0x7F) << 4 | (scale & 0x80) << 8;
  return times(twice(bits), k2To120);
}
RL_DEV int e8m0_unit(int scale) { return twice(scale == 0 ? 0x0040 : scale == kNotANumber ? 0x7FC0 : scale << 7); }

RL_DEV rl::Words4 eight_e2m1(int codes, int unit) {
  const int even = codes << 4;
  rl::Words4 words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int pair = __byte_perm(even, codes, 0x4400 + 0x1111 * i);  // each code at the upper end of two bytes
    words.word[i] = times(times((pair << 2 & 0x01C001C0) | (pair & kSigns), k2To126), unit);
  }
  return words;
}
RL_DEV rl::Words4 eight_e4m3(int low_codes, int high_codes, int unit) {
  rl::Words4 words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int pair = __byte_perm(i < 2 ? low_codes : high_codes, 0, i % 2 ? 0x3424 : 0x1404);  // in upper bytes
    words.word[i] = times(times((pair >> 4 & 0x07F007F0) | (pair & kSigns), k2To120), unit);
  }
  return words;
}

// ---- filling a place: warps 8 to 15 ----
// Four threads a slot, each with every fourth 16 channels. They copy what is stored to LDS first: loads into registers
// would have to be waited for all at once, the latest too.

constexpr int kSharers = 4, kHalfWidth = WIDTH / 2, kRunsAtOnce = 4;
static_assert(kHalfWidth + WIDTH / 32 <= kCompressedBytes, "half a window row fits where a compressed one does");

struct Stored {  // a slot's row
  const rl_u8* row;
  int bits;  // of a code: 0 for no row, 4 or 8
};
RL_DEV Stored stored_at(const Lds& lds, const List& list, int slot) {
  const int place = slot < list.n_slots ? lds.places[slot] : -1;
  if (place < 0) return {nullptr, 0};
  if (slot < list.n_window) return {list.window + (rl_i64)place * kWindowBytes, 8};
  return {list.rows + (rl_i64)place * kCompressedBytes, 4};
}

// Its codes, of a window row those of a half, and behind them its scales.
RL_DEV void copy_row(rl_u8* packed, const Stored& from, int thread, int half) {
  if (from.bits == 0) return;
  const rl_u8* codes = from.row + (from.bits == 8 ? half * kHalfWidth : 0);
#pragma unroll
  for (int at = thread * 16; at < kHalfWidth; at += kSharers * 16) copy_16(packed + at, codes + at);
  const rl_u8* scales = from.row + (from.bits == 8 ? WIDTH : kHalfWidth);
  if (thread < (from.bits == 8 ? 1 : 2)) copy_16(packed + kHalfWidth + thread * 16, scales + thread * 16);
}

struct Target {  // of the thread's channels in the first panel: 16 bytes each
  rl_u16 *low, *high;
};
RL_DEV void put_run(const Target& to, int panel, const rl::Words4& low, const rl::Words4& high) {
  store_words(to.low + panel * (kBlock * kPanel), low);
  store_words(to.high + panel * (kBlock * kPanel), high);
}
RL_DEV void put_compressed(const Target& to, const rl_u8* packed, int thread) {
#pragma unroll
  for (int first = 0; first < kPanels; first += kRunsAtOnce) {
    rl::Words2 codes[kRunsAtOnce];  // all before a store, which might change them for all that the compiler knows
    int scales[kRunsAtOnce];
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      const int run = (first + i) * kSharers + thread;
      codes[i] = *(const rl::Words2*)(packed + run * 8);
      scales[i] = packed[kHalfWidth + run];
    }
#pragma unroll
    for (int i = 0; i < kRunsAtOnce; ++i) {
      const int unit = e4m3_unit(scales[i]);
      put_run(to, first + i, eight_e2m1(codes[i].word[0], unit), eight_e2m1(codes[i].word[1], unit));
    }
  }
}
RL_DEV void put_window(const Target& to, const rl_u8* packed, int thread, int half) {
#pragma unroll
  for (int i = 0; i < kOwnPanels; ++i) {
    const int run = i * kSharers + thread;
    const rl::Words4 codes = *(const rl::Words4*)(packed + run * 16);
    const int unit = e8m0_unit(packed[kHalfWidth + (half * (kHalfWidth / 16) + run) / 2]);
    put_run(to, half * kOwnPanels + i, eight_e4m3(codes.word[0], codes.word[1], unit),
            eight_e4m3(codes.word[2], codes.word[3], unit));
  }
}
RL_DEV void put_nothing(const Target& to) {
#pragma unroll
  for (int i = 0; i < kPanels; ++i) put_run(to, i, {}, {});
}

RL_DEV void fill(Lds& lds, const List& list) {
  const int row = (rl_tid() - kMultipliers) / kSharers, thread = rl_tid() % kSharers;
  rl_u8* packed = lds.packed[row];
  int slot0 = next_block(lds.places, list.n_slots, 0), n_blocks = 0;
  Stored from = stored_at(lds, list, slot0 + row);
  copy_row(packed, from, thread, 0);
  for (; slot0 < list.n_slots; ++n_blocks) {
    const int after = next_block(lds.places, list.n_slots, slot0 + kBlock), place = n_blocks % 2;
    if (n_blocks >= 2) meet(kEmpty + place, kThreads);
    rl_u16* panel = lds.rows[place][0];
    const Target to = {panel + piece_at(row, 2 * thread), panel + piece_at(row, 2 * thread + 1)};
    const int n_halves = rl::ballot(from.bits == 8) ? 2 : 1;  // of window rows
#pragma unroll 1
    for (int half = 0; half < n_halves; ++half) {
      finish_copies();
      rl_wave_sync();
      if (from.bits == 8) put_window(to, packed, thread, half);
      else if (half == 0 && from.bits == 4) put_compressed(to, packed, thread);
      else if (half == 0) put_nothing(to);
      rl_wave_sync();  // it has been read
      if (half + 1 < n_halves) {
        if (from.bits == 8) copy_row(packed, from, thread, half + 1);
      } else {
        from = stored_at(lds, list, after + row);
        copy_row(packed, from, thread, 0);  // on its way until this place is empty
      }
    }
    show_to_matrix_units();
    arrive(kFull + place);
    slot0 = after;
  }
  for (int place = 0; place < 2 && place < n_blocks; ++place) meet(kEmpty + place, kThreads);  // none is left arrived
}

// ---- scores ----
// A thread's elements are of two heads, 8 apart, and of two adjacent ones of each eight slots, or channels: element
// 4j + 2h + b is of head + 8h and of 8j + column + b.

// Anew for each use: what follows from it would take registers that sums need.
RL_DEV int own_thread() {
  int thread = rl_tid() % kGroupThreads;
  asm volatile("" : "+r"(thread));
  return thread;
}
struct Own {
  int head, column;  // the first of each
};
RL_DEV Own own() {
  const int thread = own_thread();
  return {thread / 32 * kTile + thread % 32 / 4, thread % 4 * 2};
}

RL_DEV void start_quarter(float (&acc)[16], const Panel* queries, const Panel* rows, int group, int quarter, int anew) {
  const int panel = quarter * kPanels / kQuarters;
  const rl_u32 heads = operand(queries[panel]), slots = operand(rows[panel] + group * kOwnSlots * kPanel);
#pragma unroll
  for (int step = 0; step < kOwnSteps; ++step) {
    const int at = step / 4 * kPanelBytes + step % 4 * kTile * 2;
    mma_scores(acc, operand_at(heads, at), operand_at(slots, at), step == 0 ? anew : 0);
  }
}

// Quarters are added as for the wave of attention.hip that has the slots: its own first, then the others in order.
RL_DEV void score(float (&s)[16], const Panel* queries, const Panel* rows, int group) {
  const int mine = 2 * group, other = 2 - mine;
  float acc[3][16] = {}, rest[16];
#pragma unroll
  for (int q = 0; q < 3; ++q) hold(acc[q]);
  start_products();
  start_quarter(acc[0], queries, rows, group, mine, 0);
  start_quarter(acc[1], queries, rows, group, mine + 1, 0);
  start_quarter(acc[2], queries, rows, group, other, 0);
  finish_products();
#pragma unroll
  for (int q = 0; q < 3; ++q) hold(acc[q]);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int tile = i / 8;
    rest[i] = acc[1 - tile][i];
    s[i] = (group == 0 ? acc[tile][i] + rest[i] : acc[tile][i]) + acc[2][i];
  }
  // The last in the third's registers, as there are none left: told by 1 + 0 that the compiler cannot see through, or
  // it would take others, and wait after each product.
  hold(acc[2]);
  start_products();
  start_quarter(acc[2], queries, rows, group, other + 1, 1 + rl_bid_y());
  finish_products();
  hold(acc[2]);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    s[i] += acc[2][i];
    if (group) s[i] += rest[i];
  }
}

// ---- weights ----

struct Running {
  float top[2], mass[2], decay[2];
};

// From a group's scores to the block's weights in LDS.
RL_DEV void weigh(float (&s)[16], Lds& lds, Running& now, const int* places, int group, float scale) {
  const Own o = own();
  places += group * kOwnSlots;
#pragma unroll
  for (int i = 0; i < 16; ++i) s[i] *= scale;
  if (rl::ballot(places[rl::lane()] < 0)) {
#pragma unroll
    for (int i = 0; i < 16; ++i) s[i] = scaled(s[i], places[i / 4 * 8 + o.column + i % 2] >= 0, 1.0f);
  }
  float over[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    over[h] = s[2 * h];
#pragma unroll
    for (int i = 1; i < 8; ++i) over[h] = Largest::of(over[h], s[i / 2 * 4 + 2 * h + i % 2]);
    over[h] = Largest::of(over[h], rl::shfl_xor<1>(over[h]));
    over[h] = Largest::of(over[h], rl::shfl_xor<2>(over[h]));
    if (o.column == 0) lds.tops[group][o.head + 8 * h] = over[h];
  }
  meet(kPair, kMultipliers);  // and the last block's weights have been read
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = o.head + 8 * h;
    const float top = Largest::of(Largest::of(now.top[h], over[h]), lds.tops[1 - group][head]);
    now.decay[h] = exp_of(now.top[h] - top);
    now.top[h] = top;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float* v = s + 4 * j + 2 * h;
      v[0] = exp_of(v[0] - top), v[1] = exp_of(v[1] - top);
      *(int*)(lds.weights + piece_at(head, group * 4 + j) + o.column) = rounded(v[0], v[1]);
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {  // in the order of rl::over_rows
      const float *low = s + 8 * tile + 2 * h, *high = low + 4;
      float sum = (low[0] + high[0]) + (low[1] + high[1]);
      sum += rl::shfl_xor<1>(sum);
      sum += rl::shfl_xor<2>(sum);
      if (o.column == 0) lds.sums[2 * group + tile][head] = sum;
    }
  }
  meet(kPair, kMultipliers);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = o.head + 8 * h;
    const float sum = ((lds.sums[0][head] + lds.sums[1][head]) + lds.sums[2][head]) + lds.sums[3][head];
    now.mass[h] = now.mass[h] * now.decay[h] + sum;
  }
}

// ---- values ----

typedef float Out[kOwnPanels][32];

RL_DEV void rescale(Out& out, const float (&by)[2]) {
#pragma unroll
  for (int p = 0; p < kOwnPanels; ++p)
#pragma unroll
    for (int i = 0; i < 32; ++i) out[p][i] *= by[i / 2 % 2];
}

RL_DEV rl::FragBF16 load_weights(const Panel& weights, int tile) {
  const int thread = own_thread(), head = thread / 32 * kTile + thread % 16;
  const rl_u16* piece = weights + piece_at(head, 2 * tile + thread % 32 / 16);
  rl::FragBF16 f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
               : "r"(lds_address(piece))
               : "memory");
  return f;
}

RL_DEV void add_values(Out& out, const Panel* rows, const Panel& weights, int group) {
  rl::FragBF16 w[kQuarters];
#pragma unroll
  for (int t = 0; t < kQuarters; ++t) w[t] = load_weights(weights, t);
  const rl_u32 slots = operand(rows[group * kOwnPanels]);
#pragma unroll
  for (int p = 0; p < kOwnPanels; ++p) hold(out[p]);
  start_products();
#pragma unroll
  for (int i = 0; i < kQuarters; ++i) {
    const int t = (i + 2) % kQuarters;  // the second half first
#pragma unroll
    for (int p = 0; p < kOwnPanels; ++p)
      mma_values(out[p], w[t], operand_at(slots, p * kPanelBytes + t * 2 * kSwizzleBytes));
  }
  finish_products();
#pragma unroll
  for (int p = 0; p < kOwnPanels; ++p) hold(out[p]);
}

// A warp's heads and channels through LDS, 16 bytes a store.
RL_DEV void write_heads(rl_u16* out_row, const Out& out, Panel* panels, int group, const Turn& turn) {
  const Own o = own();
  panels += group * kOwnPanels;
  float odd = 0.0f;
#pragma unroll
  for (int p = 0; p < kOwnPanels; ++p)
#pragma unroll
    for (int i = 0; i < 32; ++i) odd = rl::fma(out[p][i], 0.0f, odd);
  const bool finite = odd == 0.0f;  // all of them
#pragma unroll
  for (int p = 0; p < kOwnPanels; ++p)
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      int pair = rounded(out[p][i], out[p][i + 1]);
      if (!finite) pair = (int)(output_bits(out[p][i]) | (rl_u32)output_bits(out[p][i + 1]) << 16);
      *(int*)(panels[p] + piece_at(o.head + i / 2 % 2 * 8, i / 4) + o.column) = pair;
    }
  rl_wave_sync();
  const int piece = rl::lane(), channel = group * kOwnPanels * kPanel + piece * kPiece;
#pragma unroll 4
  for (int i = 0; i < kTile; ++i) {
    const int head = o.head / kTile * kTile + i;
    write_piece(out_row + head * WIDTH, channel, panels[piece / 8] + piece_at(head, piece % 8), turn);
  }
}

// Warps 0 to 7: a group of four each.
RL_DEV void multiply(rl_u16* out_row, Lds& lds, const List& list, const Ends& ends) {
  const int group = rl::shfl(rl_tid() / kGroupThreads, 0);  // so that the compiler knows it to be uniform
  Running now = {{kFirstMax, kFirstMax}, {}, {}};
  Out out = {};
  int n_blocks = 0;
  for (int slot0 = next_block(lds.places, list.n_slots, 0); slot0 < list.n_slots;
       slot0 = next_block(lds.places, list.n_slots, slot0 + kBlock)) {
    const int place = n_blocks++ % 2;
    meet(kFull + place, kThreads);
    float s[16];
    score(s, lds.queries, lds.rows[place], group);
    weigh(s, lds, now, lds.places + slot0, group, ends.scale);
    rescale(out, now.decay);
    add_values(out, lds.rows[place], lds.weights, group);
    arrive(kEmpty + place);
  }
  const int channel = group * kOwnPanels * kPanel + rl::lane() * kPiece;
  const Turn turn = load_turn(ends.cosines, ends.sines, ends.n_pairs, ends.row, channel);
  const Own o = own();
  const float factors[2] = {last_factor(now.mass[0], now.top[0], ends.sink[o.head]),
                            last_factor(now.mass[1], now.top[1], ends.sink[o.head + 8])};
  rescale(out, factors);
  meet(kPair, kMultipliers);  // queries have been read
  write_heads(out_row, out, lds.queries, group, turn);
}

// ---- a row ----

RL_DEV void attend(rl_u16* out_row, const rl_u16* queries, Lds& unaligned, const List& list, const Chosen& chosen,
                   const Ends& ends) {
  const int past = lds_address(&unaligned) % kSwizzleBytes;
  Lds& lds = *(Lds*)((char*)&unaligned + (kSwizzleBytes - past) % kSwizzleBytes);
#pragma unroll
  for (int i = rl_tid(); i < HEADS * WIDTH / kPiece; i += kThreads) {
    const int head = i / (WIDTH / kPiece), piece = i % (WIDTH / kPiece);
    copy_16(lds.queries[piece / 8] + piece_at(head, piece % 8), queries + i * kPiece);
  }
  for (int slot = rl_tid(); slot < list.n_slots; slot += kThreads) lds.places[slot] = place_of(list, chosen, slot);
  if (rl_tid() == 0 && ends.row + kRowsAhead < (int)gridDim.x) {  // what this multiprocessor wants next, or another
    prefetch(queries + (rl_i64)kRowsAhead * HEADS * WIDTH, HEADS * WIDTH * 2);
    if (chosen.n_selected >= 4)
      prefetch(chosen.selected + (rl_i64)kRowsAhead * chosen.n_selected, chosen.n_selected * 4);
  }
  finish_copies();
  show_to_matrix_units();
  rl_sync();
  if (rl_tid() < kMultipliers) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kMultiplierRegisters));
    multiply(out_row, lds, list, ends);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kDecoderRegisters));
    fill(lds, list);
  }
}
