// dense_sm90.hip.h: what wmma_gemm.hip.h does by the product's matrix steps, in the form of the card that stands in for
// it in tests and measurements (sm_90a): there mma.sync leaves 40 % of the matrix units' rate unused, wgmma does not.
// The order of additions is the same, and wgmma's sums of 16 products have the bits of mma.sync's, which few rows
// take: tests on the card compare them.
//
// Weights, decoded in registers, are the side of a step that has 64; rows, in shared memory, the other. A warpgroup of
// four waves steps together, each wave with its own 16 columns.
#pragma once

namespace rl {

// ---- wgmma: c += 64 columns of weights times 64 or 128 rows, 16 channels of each ----
// It runs on by itself: neither c nor the weights may be touched before wgmma_wait.
// weights  the lane's, as an operand of mma.sync; rows  a descriptor of them; keeps  0: c starts anew
#define RL_TILE(m)                                                                                                  \
  "+f"(c[m][0].v[0]), "+f"(c[m][0].v[1]), "+f"(c[m][0].v[2]), "+f"(c[m][0].v[3]), "+f"(c[m][0].v[4]),               \
      "+f"(c[m][0].v[5]), "+f"(c[m][0].v[6]), "+f"(c[m][0].v[7])
#define RL_WEIGHTS "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3])
RL_DEV void wgmma(AccF32 (&c)[4][1], const int* weights, rl_u64 rows, int keeps) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}"
      : RL_TILE(0), RL_TILE(1), RL_TILE(2), RL_TILE(3)
      : RL_WEIGHTS, "l"(rows), "r"(keeps));
}
RL_DEV void wgmma(AccF32 (&c)[8][1], const int* weights, rl_u64 rows, int keeps) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,"
      "%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,"
      "%57,%58,%59,%60,%61,%62,%63}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;\n}"
      : RL_TILE(0), RL_TILE(1), RL_TILE(2), RL_TILE(3), RL_TILE(4), RL_TILE(5), RL_TILE(6), RL_TILE(7)
      : RL_WEIGHTS, "l"(rows), "r"(keeps));
}
#undef RL_TILE
#undef RL_WEIGHTS
// Before the first of a group: what was written to its registers is there. They stay where they are until then.
RL_DEV void wgmma_begin(int (&weights)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(weights[i])::"memory");
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
RL_DEV void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the last kPending groups are done.
template <int kPending> RL_DEV void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- copies to shared memory, 16 bytes a lane, and barriers there: nothing waits until it is asked to ----
RL_DEV void copy_async(rl_u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// For n that arrive, again and again.
RL_DEV void barrier_init(rl_u32 barrier, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n) : "memory");
}
RL_DEV void barrier_arrive(rl_u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Once all that this lane copies is there. wgmma reads it after the barrier: the fence between proxies that PTX asks
// for besides waits for every load on its way (8 % of the time), and CUTLASS's kernels of this kind have none.
RL_DEV void barrier_arrive_copied(rl_u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Until all have arrived for the first, third .. time (parity 0), or for the second, fourth .. (1, which at the start
// is so).
RL_DEV void barrier_wait(rl_u32 barrier, int parity) {
  asm volatile(
      "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\n"
      "done:\n}" ::"r"(barrier), "r"(parity) : "memory");
}

RL_DEV void store_tile(rl_u16* to, int stride, const AccF32& c) {
  int pair[4];  // of rows, in one column; sums have but one NaN, which comes out as f32_to_bf16 has it
#pragma unroll
  for (int i = 0; i < 4; ++i)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair[i]) : "f"(c.v[2 * i + 1]), "f"(c.v[2 * i]));
  const rl_u16* row = to + ((lane() & 7) + (lane() >> 4) * 8) * stride + (lane() & 8);
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                   (rl_u32)__cvta_generic_to_shared(row)),
               "r"(pair[0]), "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
               : "memory");
}

}  // namespace rl

// ---- a ring of pairs of blocks of rows: 64 bytes a row, its sixteens in the order that wgmma calls a 64-byte swizzle.
// By barriers waves know when a pair's rows are there, and when none reads them any more: they need not keep step ----

template <class T> struct Ring {
  // Experts' rows are gathered from all over, and there is room; of other rows more only begin later.
  static constexpr int kPairs = T::kTileBytes < 512 ? 6 : 3, kSlots = 2 * kPairs;  // of a block each
  static constexpr int kRowBytes = 2 * kStep, kSlotBytes = T::kRows * kRowBytes;
  rl_u32 to;           // of the thread's first piece in slot 0
  rl_u32 there, free;  // barriers of pair 0
  const char* x;
  rl_u32 from[T::kPieces];  // bytes from x to the thread's pieces of the next pair
  rl_u64 rows;              // descriptor of slot 0: its address, eight rows' distance and the swizzle

  RL_DEV Ring of(const T& t, int first) {
    // Not of the launch's LDS, which is as much as the product's form takes.
    __shared__ __align__(1024) char slots[kSlots * kSlotBytes];
    __shared__ rl_u64 barriers[2 * kPairs];
    const rl_u32 start = (rl_u32)__cvta_generic_to_shared(slots);
    Ring ring;
    ring.there = (rl_u32)__cvta_generic_to_shared(barriers);
    ring.free = ring.there + 8 * kPairs;
    if (rl_tid() < kPairs) {
      rl::barrier_init(ring.there + 8 * rl_tid(), T::kThreads);
      rl::barrier_init(ring.free + 8 * rl_tid(), kWaves);
    }
    const int row = T::row_of_piece(0), sixteen = T::channel_of_piece() / 8;
    ring.to = start + row * kRowBytes + (sixteen ^ (row >> 1 & 3)) * 16;
    ring.x = (const char*)t.x;
#pragma unroll
    for (int j = 0; j < T::kPieces; ++j) ring.from[j] = t.piece_bytes[j] + (rl_u32)first * kRowBytes;
    ring.rows = start >> 4 | 1ull << 16 | (rl_u64)(8 * kRowBytes >> 4) << 32 | 2ull << 62;
    rl_sync();
    return ring;
  }
  // The next pair, or its first block alone where but one is left.
  RL_DEV void load(Ring& ring, int pair, int blocks_left) {
    constexpr int kPieceBytes = T::kThreads / 4 * kRowBytes;  // to the next piece, at the same place of eight rows
#pragma unroll
    for (int j = 0; j < T::kPieces; ++j) {
      const char* from = ring.x + ring.from[j];
#pragma unroll
      for (int block = 0; block < 2; ++block)
        if (block < blocks_left)
          rl::copy_async(ring.to + (2 * pair + block) * kSlotBytes + j * kPieceBytes, from + block * kRowBytes);
      ring.from[j] += 2 * kRowBytes;
    }
    rl::barrier_arrive_copied(ring.there + 8 * pair);
  }
  RL_DEV rl_u64 slot(const Ring& ring, int slot) { return ring.rows + (slot * kSlotBytes >> 4); }
};

// ---- a wave's tile of columns, block by block ----

template <class W> struct Columns {
  typedef typename W::Part Part;  // what a lane reads of a block
  W weight;
  RL_DEV Columns of(const W& weight, int, int) { return {weight}; }
  RL_DEV Part load(const Columns& c, int block) { return W::load(c.weight, block); }
  // begin_round(c, after)    of the ring; its next one begins with block `after`
  // decode(out, c, part, i)  a round's i-th block
  RL_DEV void begin_round(Columns&, int) {}
  RL_DEV void decode(int (&out)[8], const Columns&, const Part& part, int) { W::decode(out, part); }
};
// A tile has but two scales, the same for all lanes. A lane has those of its own block of a round through the ring and
// hands them to the others: with all of them on their way in each lane, registers did not suffice, and what was loaded
// was waited for at once, to be put elsewhere.
template <> struct Columns<WeightE4m3> {
  typedef rl::Words4 Part;
  const rl::Words4* codes;
  const rl_u8* scales;
  int last, now, next;
  RL_DEV Columns of(const WeightE4m3& weight, int first, int last) {
    Columns c = {(const rl::Words4*)weight.codes + rl::lane(), weight.scales, last, 0, 0};
    c.next = load_scales(c, first);
    return c;
  }
  RL_DEV int load_scales(const Columns& c, int first) {
    return rl::tile_bytes_of_8(c.scales + 2 * smaller(first + rl::lane(), c.last - 1));
  }
  RL_DEV Part load(const Columns& c, int block) { return c.codes[block * (WeightE4m3::kTileBytes / 16)]; }
  RL_DEV void begin_round(Columns& c, int after) {
    c.now = c.next;
    c.next = load_scales(c, after);
  }
  RL_DEV void decode(int (&out)[8], const Columns& c, const Part& part, int i) {
    WeightE4m3::decode(out, {part, rl::shfl(c.now, i)});
  }
};

// ---- sums ----

// Of 128 rows the sums of the segments that are done lie in LDS, which a lane touches only where segments end: so two
// workgroups fit a multiprocessor, and one works while the other waits. BF16 weights leave no registers for two.
template <class T> constexpr bool kTotalsInLds = T::kMFrags == 8 && T::kTileBytes < 1024;
template <class T> constexpr int kTotalBytes = T::kThreads * T::kMFrags * 32;

template <class T> struct Sums {
  typedef rl::AccF32 Acc[T::kMFrags][1];
  Acc acc;         // of the segment
  int keeps;       // 0: it begins
  bool any;        // segments are done
  rl::Words4* at;  // where their sums lie, the lane's, kThreads apart

  RL_DEV Sums of(T& t) {
    Sums s;
    clear(s.acc);
    if (!kTotalsInLds<T>) clear(t.total);
    s.keeps = 0;
    s.any = false;
    s.at = (rl::Words4*)t.lds + rl_tid();
    return s;
  }
  RL_DEV void end_segment(Sums& s, T& t) {
    if (kTotalsInLds<T>) add_left(s), leave(s);
    else add(t.total, s.acc);
    s.any = true;
    s.keeps = 0;
  }
  RL_DEV void finish(Sums& s, T& t) {
    if (!kTotalsInLds<T>) return add(t.total, s.acc);
    add_left(s);
#pragma unroll
    for (int m = 0; m < T::kMFrags; ++m) t.total[m][0] = s.acc[m][0];
  }
  RL_DEV void add_left(Sums& s) {  // or 0 where none is done
#pragma unroll
    for (int i = 0; i < 2 * T::kMFrags; ++i) {
      rl::Words4 words = {};
      if (s.any) words = s.at[i * T::kThreads];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& v = s.acc[i / 2][0].v[i % 2 * 4 + j];
        v = rl::as_float(words.word[j]) + v;
      }
    }
  }
  RL_DEV void leave(const Sums& s) {
#pragma unroll
    for (int i = 0; i < 2 * T::kMFrags; ++i) {
      rl::Words4 words;
#pragma unroll
      for (int j = 0; j < 4; ++j) words.word[j] = rl::as_int(s.acc[i / 2][0].v[i % 2 * 4 + j]);
      s.at[i * T::kThreads] = words;
    }
  }
};

// As the other form's. While a block's steps run, the next one is decoded, its weights taking the place of those of the
// block before; only that one's steps are waited for. (Had the loop another end than the last segment's, ptxas would
// wait for all.)
template <class W, int kRowCount> RL_DEV void run(Tiled<W, kRowCount>& t, int first, int last, int segment) {
  typedef Tiled<W, kRowCount> T;
  typedef Ring<T> R;
  typedef Columns<W> C;
  // Blocks whose codes are asked for together, once the ones before are there: a wave waits for all its loads at once.
  constexpr int kBatch = T::kTileBytes < 1024 ? 3 : 1, kParts = 2 * kBatch, kPairs = R::kPairs, kSlots = R::kSlots;
  static_assert(kSlots % kParts == 0, "places are constants of a round through the ring");
  R ring = R::of(t, first);
#pragma unroll
  for (int pair = 0; pair < kPairs - 1; ++pair)
    if (first + 2 * pair < last) R::load(ring, pair, last - first - 2 * pair);
  C columns = C::of(t.weight[0], first, last);
  typename C::Part part[kParts];
  const auto load_batch = [&](int block, int at) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      // BF16 weights go to steps as they are; ptxas lets a conditional load have the registers of steps that still run.
      if (kBatch == 1) part[at + j] = C::load(columns, smaller(block + j, last - 1));
      else if (block + j < last) part[at + j] = C::load(columns, block + j);
    }
  };
  int words[2][8];
  load_batch(first, 0);
  C::begin_round(columns, first + kSlots);
  C::decode(words[0], columns, part[0], 0);
  load_batch(first + kBatch, kBatch);
  Sums<T> sums = Sums<T>::of(t);
  int stop = smaller(first + segment, last);
  rl::barrier_wait(ring.there, 0);
  for (int start = first, parity = 0;; start += kSlots, parity ^= 1) {
#pragma unroll
    for (int j = 0; j < kSlots; ++j) {
      const int block = start + j, next = (j + 1) % kParts, pair = j / 2, after = pair + 1, ahead = pair + kPairs - 1;
      rl::wgmma_begin(words[j % 2]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rl::wgmma(sums.acc, words[j % 2] + 4 * half, R::slot(ring, j) + half * (2 * kTile >> 4), half ? 1 : sums.keeps);
      rl::wgmma_commit();
      rl::wgmma_wait<1>();
      if (j % 2 == 0 && block > first && rl::lane() == 0) rl::barrier_arrive(ring.free + 8 * (ahead % kPairs));
      if (j == kSlots - 1) C::begin_round(columns, block + 1 + kSlots);
      C::decode(words[(j + 1) % 2], columns, part[next], (j + 1) % kSlots);
      if (next % kBatch == 0) load_batch(block + 1 + kBatch, kBatch - next);
      if (j % 2 == 1 && start + 2 * ahead < last) {
        rl::barrier_wait(ring.free + 8 * (ahead % kPairs), ahead < kPairs ? parity ^ 1 : parity);
        R::load(ring, ahead % kPairs, last - start - 2 * ahead);
      }
      if (j % 2 == 1 && block + 1 < last)
        rl::barrier_wait(ring.there + 8 * (after % kPairs), after < kPairs ? parity : parity ^ 1);
      sums.keeps = 1;
      if (block + 1 != stop) continue;
      rl::wgmma_wait<0>();
      if (stop == last) return Sums<T>::finish(sums, t);
      Sums<T>::end_segment(sums, t);
      stop = smaller(stop + segment, last);
    }
  }
}
