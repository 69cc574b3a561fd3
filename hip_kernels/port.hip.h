// port.hip.h: what kernels are written in. One text compiles for gfx1100 (hiprtc, hipcc, or clang with no headers
// at all), for sm_90 (NVRTC, nvcc) and for a CPU, where a header included before this one defines RL_CPU and the
// primitives marked [target]. No standard or HIP header may be included here or in any .hip file.
//
//   RL_KERNEL(threads) name(args)   an entry point of exactly that many threads a workgroup, one dimension
//   RL_KERNEL_LARGE(threads) ...    one whose accumulators take the registers of others: a card may hold one workgroup
//   RL_EXPORT(name)                 after each entry point
//   RL_DYN_SHARED(T, name)          T name[], the workgroup's LDS as sized by the launch, 16-byte aligned. The only
//                                   LDS there is: the launch then counts every byte, and tests can poison it
//   RL_DEV                          a device function
//   rl_tid() rl_bid_x() rl_bid_y()  thread in the workgroup, workgroup in the grid
//   rl_sync() rl_wave_sync()        barriers of the workgroup and of one wave, which order LDS and nothing else: loads
//                                   from device memory stay in flight across them. What one thread stores there,
//                                   others see in the next kernel, or through rl::last_of
//
// A wave is 32 lanes on every target. Wave operations (shuffles, ballots, mma, rl_wave_sync) must be reached by all
// lanes of a wave that have not returned; mma by all 32.
#pragma once

// A fused multiply-add rounds once where the references round twice. rl::fma fuses where that is wanted.
#if defined(__clang__)
#pragma clang fp contract(off)
#endif

typedef signed char rl_i8;
typedef unsigned char rl_u8;
typedef unsigned short rl_u16;
typedef unsigned int rl_u32;
typedef long long rl_i64;
typedef unsigned long long rl_u64;

#if defined(RL_CPU)  // everything marked [target] is there already
#elif defined(__CUDACC__) && !defined(__HIP__)
#define RL_CUDA 1
#define RL_DEV static __device__ __forceinline__
// At least 512 threads resident: a test card should not lose its occupancy to a register more.
#define RL_KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads, (512 + threads - 1) / threads)
#define RL_KERNEL_LARGE(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define RL_DYN_SHARED(T, name) \
  extern __shared__ __align__(16) char rl_lds[]; \
  T* const name = reinterpret_cast<T*>(rl_lds)
#define RL_EXPORT(name)

RL_DEV int rl_tid() { return (int)threadIdx.x; }
RL_DEV int rl_bid_x() { return (int)blockIdx.x; }
RL_DEV int rl_bid_y() { return (int)blockIdx.y; }
RL_DEV void rl_sync() { __syncthreads(); }
RL_DEV void rl_wave_sync() { __syncwarp(); }

namespace rl {
RL_DEV int uniform(int v) { return v; }
RL_DEV int shfl(int v, int source) { return __shfl_sync(0xffffffffu, v, source); }
template <int kMask> RL_DEV int shfl_xor(int v) { return __shfl_xor_sync(0xffffffffu, v, kMask); }
RL_DEV rl_u32 ballot(bool p) { return __ballot_sync(0xffffffffu, p); }
RL_DEV int popcount(rl_u32 v) { return __popc(v); }
RL_DEV int leading_zeros(rl_u32 v) { return __clz((int)v); }
RL_DEV int dot4(int a, int b, int c) { return __dp4a(a, b, c); }
RL_DEV int as_int(float v) { return __float_as_int(v); }
RL_DEV float as_float(int v) { return __int_as_float(v); }
RL_DEV float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
RL_DEV float max(float a, float b) { return ::fmaxf(a, b); }
RL_DEV int lds_add(int* p, int v) { return atomicAdd(p, v); }
RL_DEV int device_add(int* p, int v) { return atomicAdd(p, v); }
RL_DEV void device_fence() { __threadfence(); }
RL_DEV void no_overlap() {}
}  // namespace rl

#elif defined(__HIP__)
#define RL_HIP 1
#define RL_DEV static __attribute__((device, always_inline)) inline
#define RL_KERNEL(threads) \
  extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads))) void
#define RL_DYN_SHARED(T, name) \
  extern __attribute__((shared, aligned(16))) char rl_lds[]; \
  T* const name = reinterpret_cast<T*>(rl_lds)
#define RL_EXPORT(name)

RL_DEV int rl_tid() { return (int)__builtin_amdgcn_workitem_id_x(); }
RL_DEV int rl_bid_x() { return (int)__builtin_amdgcn_workgroup_id_x(); }
RL_DEV int rl_bid_y() { return (int)__builtin_amdgcn_workgroup_id_y(); }
RL_DEV void rl_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}
RL_DEV void rl_wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront", "local");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront", "local");
}

namespace rl {
RL_DEV int uniform(int v) { return __builtin_amdgcn_readfirstlane(v); }
RL_DEV int shfl(int v, int source) { return __builtin_amdgcn_ds_bpermute(source << 2, v); }
// Moves inside the vector unit; through shfl the same exchange would cross the LDS.
template <int kMask> RL_DEV int shfl_xor(int v) {
  static_assert(kMask > 0 && kMask <= 16, "a lane of another row of 16 only by 16 itself");
  if constexpr (kMask == 16) return __builtin_amdgcn_permlanex16(v, v, 0x76543210, 0xfedcba98, true, false);
  else return __builtin_amdgcn_update_dpp(v, v, 0x160 | kMask, 0xf, 0xf, true);  // DPP_ROW_XMASK
}
RL_DEV rl_u32 ballot(bool p) { return __builtin_amdgcn_ballot_w32(p); }
RL_DEV int popcount(rl_u32 v) { return __builtin_popcount(v); }
RL_DEV int leading_zeros(rl_u32 v) { return v ? __builtin_clz(v) : 32; }
RL_DEV int dot4(int a, int b, int c) { return __builtin_amdgcn_sudot4(true, a, true, b, c, false); }
RL_DEV int as_int(float v) { return __builtin_bit_cast(int, v); }
RL_DEV float as_float(int v) { return __builtin_bit_cast(float, v); }
RL_DEV float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
RL_DEV float max(float a, float b) { return __builtin_fmaxf(a, b); }
RL_DEV int lds_add(int* p, int v) {
  return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}
RL_DEV int device_add(int* p, int v) {
  return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
RL_DEV void device_fence() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent"); }
RL_DEV void no_overlap() { __builtin_amdgcn_sched_barrier(0); }
}  // namespace rl

#else
#error "port.hip.h: compile as HIP (-x hip), as CUDA, or with the CPU shim included first"
#endif

#if !defined(RL_CUDA)
#define RL_KERNEL_LARGE(threads) RL_KERNEL(threads)
#endif

namespace rl {

// ---- lanes ----
// uniform(v)       [target] v where all lanes of the wave hold the same; the compiler keeps it in a scalar register
// shfl(v, lane)    [target] the other lane's v
// shfl_xor<M>(v)   [target] v of lane ^ M, M = 1..16
// ballot(p)        [target] bit i: p of lane i
// lds_add(p, v)    [target] atomic in LDS, relaxed; returns the old value. Sums are exact, the old values' order is not
// device_add(p, v) [target] as lds_add, in device memory
// device_fence()   [target] this thread's stores before it are seen by whoever sees a device_add after it, and its loads
//                  after it see what was stored before a device_add that it saw
// no_overlap()     [target] the compiler moves no instruction across; for where interleaving costs registers or pairing
RL_DEV int lane() { return rl_tid() & 31; }
RL_DEV int wave() { return uniform(rl_tid() >> 5); }
RL_DEV float shfl(float v, int source) { return as_float(shfl(as_int(v), source)); }
template <int kMask> RL_DEV float shfl_xor(float v) { return as_float(shfl_xor<kMask>(as_int(v))); }
// Whether this workgroup is the last of n to get here; then it sees what the others stored before. All of its threads
// call; *counter is 0 before the first and after the last. lds: a word that is free until the next barrier.
RL_DEV bool last_of(int n, int* counter, int* lds) {
  device_fence();
  rl_sync();
  if (rl_tid() == 0) {
    *lds = device_add(counter, 1) == n - 1;
    if (*lds) *counter = 0;
  }
  rl_sync();
  const bool last = uniform(*lds) != 0;
  device_fence();
  return last;
}
// The set lanes of a ballot below this one: its place when they are written densely, in order.
RL_DEV int rank(rl_u32 lanes) { return popcount(lanes & ((1u << lane()) - 1)); }

struct Add {
  template <class T> RL_DEV T of(T a, T b) { return a + b; }
};
struct Max {
  template <class T> RL_DEV T of(T a, T b) { return a > b ? a : b; }
};
// Over the 32 lanes, by halves: one fixed order of additions. Every lane gets the result.
template <class Op, class T> RL_DEV T wave_reduce(T v) {
  v = Op::of(v, shfl_xor<16>(v));
  v = Op::of(v, shfl_xor<8>(v));
  v = Op::of(v, shfl_xor<4>(v));
  v = Op::of(v, shfl_xor<2>(v));
  return Op::of(v, shfl_xor<1>(v));
}
template <class T> RL_DEV T wave_sum(T v) { return wave_reduce<Add>(v); }
template <class T> RL_DEV T wave_max(T v) { return wave_reduce<Max>(v); }

// ---- numbers ----
// dot4(a, b, c)    [target] c + the four products of the signed bytes of a and b
// as_int, as_float [target] the same 32 bits
// fma(a, b, c)     [target] one rounding
// max(a, b)        [target] of two numbers, neither NaN
// sqrt(v)          rounded correctly
// exp2(v)          the target's own, within 2 units in the last place; 0 for -inf, and where the result is subnormal it
//                  may be 0. Where every target must give the same bits, explog.hip.h has exp
// One 16-byte load or store.
struct alignas(16) Words4 {
  int word[4];
};
struct alignas(8) Words2 {  // of 8 bytes
  int word[2];
};
// look_up(table, codes)  eight 16-bit words, of eight 4-bit codes from the lowest on: bits 0 to 2 of a code choose one
//                  of the table's eight words, lower halves first, and bit 3 is set as its sign
#if defined(RL_CUDA)
RL_DEV Words4 look_up(const int (&table)[4], int codes) {
  const int low[2] = {(int)__byte_perm(table[0], table[1], 0x6420), (int)__byte_perm(table[2], table[3], 0x6420)};
  const int high[2] = {(int)__byte_perm(table[0], table[1], 0x7531), (int)__byte_perm(table[2], table[3], 0x7531)};
  Words4 words;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const rl_u32 four = (rl_u32)codes >> (16 * half), which = four & 0x7777;
    const int l = __byte_perm(low[0], low[1], which), h = __byte_perm(high[0], high[1], which);
    words.word[2 * half] = __byte_perm(l, h, 0x5140) | (four & 8) << 12 | (four & 0x80) << 24;
    words.word[2 * half + 1] = __byte_perm(l, h, 0x7362) | (four & 0x800) << 4 | (four & 0x8000) << 16;
  }
  return words;
}
#elif defined(RL_HIP)
RL_DEV int bytes_of(int high, int low, int which) { return (int)__builtin_amdgcn_perm(high, low, which); }
RL_DEV Words4 look_up(const int (&table)[4], int codes) {
  const int low[2] = {bytes_of(table[1], table[0], 0x06040200), bytes_of(table[3], table[2], 0x06040200)};
  const int high[2] = {bytes_of(table[1], table[0], 0x07050301), bytes_of(table[3], table[2], 0x07050301)};
  int pairs[2][2];  // even codes, odd codes
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int which = (odd ? codes >> 4 : codes) & 0x07070707;
    const int l = bytes_of(low[1], low[0], which);
    const int h = bytes_of(high[1], high[0], which) | (int)(((rl_u32)codes << (odd ? 0 : 4)) & 0x80808080u);
    pairs[odd][0] = bytes_of(h, l, 0x05010400);
    pairs[odd][1] = bytes_of(h, l, 0x07030602);
  }
  return {{bytes_of(pairs[1][0], pairs[0][0], 0x05040100), bytes_of(pairs[1][0], pairs[0][0], 0x07060302),
           bytes_of(pairs[1][1], pairs[0][1], 0x05040100), bytes_of(pairs[1][1], pairs[0][1], 0x07060302)}};
}
#else
RL_DEV Words4 look_up(const int (&table)[4], int codes) {
  Words4 words = {};
  for (int i = 0; i < 8; ++i) {
    const int code = codes >> (4 * i), word = table[(code & 7) / 2] >> (16 * (code & 1));
    words.word[i / 2] |= (int)((rl_u32)((word & 0xFFFF) | (code & 8) << 12) << (16 * (i & 1)));
  }
  return words;
}
#endif

#if defined(RL_CUDA)
RL_DEV float sqrt(float v) { return __fsqrt_rn(v); }
RL_DEV float exp2(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}
#elif defined(RL_HIP)
RL_DEV float sqrt(float v) { return __builtin_sqrtf(v); }
RL_DEV float exp2(float v) { return __builtin_amdgcn_exp2f(v); }
#else
RL_DEV float sqrt(float v) { return __builtin_sqrtf(v); }
RL_DEV float exp2(float v) { return __builtin_exp2f(v); }
#endif

RL_DEV float bf16_to_f32(rl_u16 v) { return as_float((int)((rl_u32)v << 16)); }
// Nearest, ties to even; overflows to infinity; a NaN keeps its sign and upper payload and is quiet.
RL_DEV rl_u16 f32_to_bf16(float v) {
  const rl_u32 bits = (rl_u32)as_int(v);
  const rl_u32 rounded = bits + 0x7fffu + ((bits >> 16) & 1);
  return (rl_u16)(((bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x400000u : rounded) >> 16);
}
RL_DEV float round_bf16(float v) { return bf16_to_f32(f32_to_bf16(v)); }

// ---- matrix fragments: acc[16][16] += A[16][K] * B[16][K]^T, both given by rows along K ----
// FragI8: K = 32, one scale group. FragBF16: K = 16. load_rows(p, stride) takes row r at p + r * stride (in elements);
// p and the stride in bytes are multiples of 16. Element i of an accumulator lies at (acc_row(i), acc_col(i)).
// load_rows_of(rows, at) takes rows from anywhere: the lane's are frag_row(i), i < kFragRows. load_rows_lds is
// load_rows for rows in LDS; load_cols_lds takes row r's element k at p[k * stride + r] there: the transpose. mma_from
// adds to `start`, which splat() makes, once for many products.
// A lane's eight elements are of kOwnCols columns, own_col(j) the j-th, and element i is of the col_of(i)-th.
// over_rows<Op>(v, out): each of the lane's columns reduced over all 16 rows, in one fixed order.
// How INT8 sums come out is exact and the same everywhere; the order of a BF16 mma's 16 additions is the target's own.
struct AccI32 {
  int v[8];
};
struct AccF32 {
  float v[8];
};

#if defined(RL_CUDA)
struct FragI8 {
  int r[4];
};
struct FragBF16 {
  int r[4];
};
RL_DEV int acc_row(int i) { return (lane() >> 2) + ((i >> 1) & 1) * 8; }
RL_DEV int acc_col(int i) { return (lane() & 3) * 2 + (i & 1) + (i >> 2) * 8; }

// mma.sync operands: words of rows g and g + 8 at bytes 4t and 16 + 4t, g = lane / 4, t = lane % 4.
template <class Frag> RL_DEV Frag load_words(const char* p, int stride_bytes) {
  const char* low = p + (lane() >> 2) * stride_bytes + (lane() & 3) * 4;
  const char* high = low + 8 * stride_bytes;
  return {{*(const int*)low, *(const int*)high, *(const int*)(low + 16), *(const int*)(high + 16)}};
}
RL_DEV FragI8 load_rows(const rl_i8* p, int stride) { return load_words<FragI8>((const char*)p, stride); }
RL_DEV FragBF16 load_rows(const rl_u16* p, int stride) { return load_words<FragBF16>((const char*)p, stride * 2); }
constexpr int kFragRows = 2;
RL_DEV int frag_row(int i) { return (lane() >> 2) + 8 * i; }
RL_DEV FragBF16 load_rows_of(const rl_u16* const (&rows)[kFragRows], int at) {
  const int* low = (const int*)(rows[0] + at) + (lane() & 3);
  const int* high = (const int*)(rows[1] + at) + (lane() & 3);
  return {{low[0], high[0], low[4], high[4]}};
}
RL_DEV FragI8 load_rows_lds(const rl_i8* p, int stride) {
  const rl_i8* row = p + (lane() & 15) * stride + (lane() >> 4) * 16;
  FragI8 f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
               : "r"((rl_u32)__cvta_generic_to_shared(row))
               : "memory");
  return f;
}

RL_DEV FragBF16 load_rows_lds(const rl_u16* p, int stride) {
  const rl_u16* row = p + (lane() & 15) * stride + (lane() >> 4) * 8;
  FragBF16 f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
               : "r"((rl_u32)__cvta_generic_to_shared(row))
               : "memory");
  return f;
}
RL_DEV FragBF16 load_cols_lds(const rl_u16* p, int stride) {
  const rl_u16* row = p + ((lane() & 7) + (lane() >> 4) * 8) * stride + (lane() & 8);
  FragBF16 f;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
               : "r"((rl_u32)__cvta_generic_to_shared(row))
               : "memory");
  return f;
}
constexpr int kOwnCols = 4;
RL_DEV constexpr int col_of(int i) { return (i & 1) + (i >> 2) * 2; }
RL_DEV int own_col(int j) { return (lane() & 3) * 2 + (j & 1) + (j >> 1) * 8; }
template <class Op> RL_DEV void over_rows(const float (&v)[8], float (&out)[kOwnCols]) {
#pragma unroll
  for (int j = 0; j < kOwnCols; ++j) {
    const int i = (j & 1) + (j >> 1) * 4;
    float r = Op::of(v[i], v[i + 2]);  // rows g and g + 8, then the eight g
    r = Op::of(r, shfl_xor<4>(r));
    r = Op::of(r, shfl_xor<8>(r));
    out[j] = Op::of(r, shfl_xor<16>(r));
  }
}

RL_DEV void mma(AccI32& c, const FragI8& a, const FragI8& b) {
#pragma unroll
  for (int half = 0; half < 2; ++half)  // eight columns each
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+r"(c.v[4 * half]), "+r"(c.v[4 * half + 1]), "+r"(c.v[4 * half + 2]), "+r"(c.v[4 * half + 3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[half]), "r"(b.r[half + 2]));
}
RL_DEV AccI32 splat(int start) { return {{start, start, start, start, start, start, start, start}}; }
RL_DEV AccI32 mma_from(const AccI32& start, const FragI8& a, const FragI8& b) {
  AccI32 c;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=r"(c.v[4 * half]), "=r"(c.v[4 * half + 1]), "=r"(c.v[4 * half + 2]), "=r"(c.v[4 * half + 3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[half]), "r"(b.r[half + 2]), "r"(start.v[0]));
  return c;
}
RL_DEV void mma(AccF32& c, const FragBF16& a, const FragBF16& b) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c.v[4 * half]), "+f"(c.v[4 * half + 1]), "+f"(c.v[4 * half + 2]), "+f"(c.v[4 * half + 3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[half]), "r"(b.r[half + 2]));
}

#else  // gfx1100's layout, which the CPU shim keeps: lane L holds 32 bytes of row L % 16
struct FragI8 {
  Words4 r[2];
};
struct FragBF16 {
  Words4 r[2];
};
RL_DEV int acc_row(int i) { return 2 * i + (lane() >> 4); }
RL_DEV int acc_col(int) { return lane() & 15; }
RL_DEV FragI8 load_rows(const rl_i8* p, int stride) {
  const Words4* row = (const Words4*)(p + (lane() & 15) * stride);
  return {{row[0], row[1]}};
}
RL_DEV FragBF16 load_rows(const rl_u16* p, int stride) {
  const Words4* row = (const Words4*)(p + (lane() & 15) * stride);
  return {{row[0], row[1]}};
}
constexpr int kFragRows = 1;
RL_DEV int frag_row(int) { return lane() & 15; }
RL_DEV FragBF16 load_rows_of(const rl_u16* const (&rows)[kFragRows], int at) {
  const Words4* row = (const Words4*)(rows[0] + at);
  return {{row[0], row[1]}};
}

#if defined(RL_HIP)
typedef int v4i __attribute__((ext_vector_type(4)));
typedef int v8i __attribute__((ext_vector_type(8)));
typedef float v8f __attribute__((ext_vector_type(8)));
typedef short v16s __attribute__((ext_vector_type(16)));

RL_DEV void mma(AccI32& c, const FragI8& a, const FragI8& b) {
  v8i acc = __builtin_bit_cast(v8i, c);
#pragma unroll
  for (int half = 0; half < 2; ++half)  // sixteen of K each
    acc = __builtin_amdgcn_wmma_i32_16x16x16_iu8_w32(true, __builtin_bit_cast(v4i, a.r[half]), true,
                                                     __builtin_bit_cast(v4i, b.r[half]), acc, false);
  c = __builtin_bit_cast(AccI32, acc);
}
RL_DEV void mma(AccF32& c, const FragBF16& a, const FragBF16& b) {
  c = __builtin_bit_cast(AccF32, __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(
                                     __builtin_bit_cast(v16s, a), __builtin_bit_cast(v16s, b),
                                     __builtin_bit_cast(v8f, c)));
}
#else  // the shim's, over plain arrays
RL_DEV void mma(AccI32& c, const FragI8& a, const FragI8& b) {
  rl_cpu::mma_i8(c.v, (const rl_i8*)a.r, (const rl_i8*)b.r);
}
RL_DEV void mma(AccF32& c, const FragBF16& a, const FragBF16& b) {
  rl_cpu::mma_bf16(c.v, (const rl_u16*)a.r, (const rl_u16*)b.r);
}
#endif
RL_DEV FragI8 load_rows_lds(const rl_i8* p, int stride) { return load_rows(p, stride); }
RL_DEV FragBF16 load_rows_lds(const rl_u16* p, int stride) { return load_rows(p, stride); }
RL_DEV FragBF16 load_cols_lds(const rl_u16* p, int stride) {
  const rl_u16* column = p + (lane() & 15);
  FragBF16 f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    int pair = (int)(column[2 * i * stride] | (rl_u32)column[(2 * i + 1) * stride] << 16);
#if defined(RL_HIP)
    asm volatile("" : "+v"(pair));  // else all sixteen are loaded far ahead, each into a register of its own
#endif
    f.r[i / 4].word[i % 4] = pair;
  }
  return f;
}
constexpr int kOwnCols = 1;
RL_DEV constexpr int col_of(int) { return 0; }
RL_DEV int own_col(int) { return lane() & 15; }
template <class Op> RL_DEV void over_rows(const float (&v)[8], float (&out)[kOwnCols]) {
  float r = v[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) r = Op::of(r, v[i]);
  out[0] = Op::of(r, shfl_xor<16>(r));
}
RL_DEV AccI32 splat(int start) {
  AccI32 c = {{start, start, start, start, start, start, start, start}};
#if defined(RL_HIP)
  // Not to be made anew for every product: eight registers held cost nothing, eight moves do.
  v8i held = __builtin_bit_cast(v8i, c);
  asm volatile("" : "+v"(held));
  c = __builtin_bit_cast(AccI32, held);
#endif
  return c;
}
RL_DEV AccI32 mma_from(const AccI32& start, const FragI8& a, const FragI8& b) {
  AccI32 c = start;
  mma(c, a, b);
  return c;
}
#endif

}  // namespace rl
