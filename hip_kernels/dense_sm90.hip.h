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
RL_DEV void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }

// ---- copies to shared memory, 16 bytes a lane, that run on by themselves ----
RL_DEV void copy_async(rl_u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
RL_DEV void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but this lane's last kPending groups are there. wgmma reads them after a barrier: the fence between proxies that
// PTX asks for besides waits for every load on its way (8 % of the time), and CUTLASS's kernels of this kind have none.
template <int kPending> RL_DEV void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
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

// ---- a ring of blocks of rows: 64 bytes a row, its sixteens in the order that wgmma calls a 64-byte swizzle ----

template <class T> struct Ring {
  static constexpr int kSlots = 6, kAhead = kSlots - 1;  // blocks on their way
  static constexpr int kRowBytes = 2 * kStep, kSlotBytes = T::kRows * kRowBytes;
  rl_u32 to[T::kPieces];  // of the thread's pieces in slot 0
  const char* from[T::kPieces];
  rl_u64 rows;  // descriptor of slot 0: its address, eight rows' distance and the swizzle

  RL_DEV Ring of(const T& t) {
    // Not of the launch's LDS, which is as much as the product's form takes.
    __shared__ __align__(1024) char slots[kSlots * kSlotBytes];
    const rl_u32 start = (rl_u32)__cvta_generic_to_shared(slots);
    Ring ring;
#pragma unroll
    for (int j = 0; j < T::kPieces; ++j) {
      const int row = T::row_of_piece(j), sixteen = T::channel_of_piece() / 8;
      ring.to[j] = start + row * kRowBytes + (sixteen ^ (row >> 1 & 3)) * 16;
      ring.from[j] = (const char*)t.x + t.piece_bytes[j];
    }
    ring.rows = start >> 4 | 1ull << 16 | (rl_u64)(8 * kRowBytes >> 4) << 32 | 2ull << 62;
    return ring;
  }
  RL_DEV void load(const Ring& ring, int block, int slot) {
#pragma unroll
    for (int j = 0; j < T::kPieces; ++j)
      rl::copy_async(ring.to[j] + slot * kSlotBytes, ring.from[j] + (rl_i64)block * kRowBytes);
    rl::copies_commit();
  }
  RL_DEV rl_u64 slot(const Ring& ring, int slot) { return ring.rows + (slot * kSlotBytes >> 4); }
};

// Of 128 rows the sums of the segments that are done lie in LDS, which a lane touches only where segments end: so two
// workgroups fit a multiprocessor, and one works while the other waits. BF16 weights leave no registers for two.
template <class T> constexpr bool kTotalsInLds = T::kMFrags == 8 && T::kTileBytes < 1024;
template <class T> constexpr int kTotalBytes = T::kThreads * T::kMFrags * 32;

// acc += what the segments before left at `at`, the lane's, kThreads apart; or 0 where none did.
template <class T> RL_DEV void add_left(rl::AccF32 (&acc)[T::kMFrags][1], const rl::Words4* at, bool any) {
#pragma unroll
  for (int i = 0; i < 2 * T::kMFrags; ++i) {
    rl::Words4 words = {};
    if (any) words = at[i * T::kThreads];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& v = acc[i / 2][0].v[i % 2 * 4 + j];
      v = rl::as_float(words.word[j]) + v;
    }
  }
}
template <class T> RL_DEV void leave(rl::Words4* at, const rl::AccF32 (&acc)[T::kMFrags][1]) {
#pragma unroll
  for (int i = 0; i < 2 * T::kMFrags; ++i) {
    rl::Words4 words;
#pragma unroll
    for (int j = 0; j < 4; ++j) words.word[j] = rl::as_int(acc[i / 2][0].v[i % 2 * 4 + j]);
    at[i * T::kThreads] = words;
  }
}

// As the other form's. While a block's steps run, the next one is decoded; only then are they waited for, since ptxas
// lets none run whose weights are written while others do. The other warpgroup's steps fill the gap.
template <class T> RL_DEV void run(T& t, int first, int last, int segment) {
  typedef Ring<T> R;
  // Blocks whose codes are asked for together, once the ones before are there: a wave waits for all its loads at once.
  constexpr int kBatch = T::kTileBytes < 1024 ? 3 : 1, kParts = 2 * kBatch;
  static_assert(R::kSlots % kParts == 0 && R::kSlots % 2 == 0, "places are constants of a round through the ring");
  const auto there = [&](int block) { return smaller(block, last - 1); };  // the last block once more, at the end
  const R ring = R::of(t);
  typename T::Part part[kParts];
  const auto load_batch = [&](int block, int at) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) part[at + j] = t.weight[0].load(t.weight[0], there(block + j));
  };
  load_batch(first, 0);
#pragma unroll
  for (int j = 0; j < R::kAhead; ++j) R::load(ring, there(first + j), j);
  int words[2][8];
  t.weight[0].decode(words[0], part[0]);
  rl::copies_wait<R::kAhead - 1>();
  rl_sync();
  load_batch(first + kBatch, kBatch);
  if (!kTotalsInLds<T>) clear(t.total);
  rl::AccF32 acc[T::kMFrags][1];
  clear(acc);
  rl::Words4* at = (rl::Words4*)t.lds + rl_tid();
  bool any = false;
  int left = segment, keeps = 0;
  for (int start = first; start < last; start += R::kSlots) {
#pragma unroll
    for (int j = 0; j < R::kSlots; ++j) {
      const int block = start + j, next = (j + 1) % kParts;
      if (block >= last) break;
      rl::wgmma_begin(words[j % 2]);
#pragma unroll
      for (int half = 0; half < 2; ++half)
        rl::wgmma(acc, words[j % 2] + 4 * half, R::slot(ring, j) + half * (2 * kTile >> 4), half ? 1 : keeps);
      rl::wgmma_commit();
      rl::copies_wait<R::kAhead - 2>();
      rl_sync();  // the next block's rows are there, and nobody reads the last one's any more
      t.weight[0].decode(words[(j + 1) % 2], part[next]);
      R::load(ring, there(block + R::kAhead), (j + R::kAhead) % R::kSlots);
      if (next % kBatch == 0) load_batch(block + 1 + kBatch, kBatch - next);
      rl::wgmma_wait();
      keeps = 1;
      if (--left == 0 && block != last - 1) {
        if (kTotalsInLds<T>) add_left<T>(acc, at, any), leave<T>(at, acc);
        else add(t.total, acc);
        any = true;
        left = segment;
        keeps = 0;
      }
    }
  }
  rl::copies_wait<0>();
  if (kTotalsInLds<T>) {
    add_left<T>(acc, at, any);
#pragma unroll
    for (int m = 0; m < T::kMFrags; ++m) t.total[m][0] = acc[m][0];
  } else {
    add(t.total, acc);
  }
}
