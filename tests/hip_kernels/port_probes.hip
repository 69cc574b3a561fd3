// One small kernel for each thing that port.hip.h promises. test_port.py holds what must come out.
#include "port.hip.h"

// 64 threads: two waves. Each output is [64].
RL_KERNEL(64) lanes(const int* v, const float* x, const int* source, int* shuffled, float* shuffled_f32, int* xors,
                    int* ballots, int* ranks, int* waves, int* sums, float* sums_f32, int* maxima) {
  const int t = rl_tid();
  shuffled[t] = rl::shfl(v[t], source[t]);
  shuffled_f32[t] = rl::shfl(x[t], source[t]);
  xors[0 * 64 + t] = rl::shfl_xor<1>(v[t]);
  xors[1 * 64 + t] = rl::shfl_xor<7>(v[t]);
  xors[2 * 64 + t] = rl::shfl_xor<8>(v[t]);
  xors[3 * 64 + t] = rl::as_int(rl::shfl_xor<16>(rl::as_float(v[t])));
  const rl_u32 odd = rl::ballot(v[t] & 1);
  ballots[t] = (int)odd;
  ranks[t] = rl::rank(odd);
  waves[t] = rl::wave() * 32 + rl::lane();
  sums[t] = rl::wave_sum(v[t]);
  sums_f32[t] = rl::wave_sum(x[t]);
  maxima[t] = rl::wave_max(v[t]);
}
RL_EXPORT(lanes)

// Elementwise over n.
RL_KERNEL(64) numbers(const int* a, const int* b, const float* x, const float* y, const float* z, int* dots, int* ones,
                      int* zeros, rl_u16* bf16, float* rounded, float* two_roundings, float* one_rounding,
                      float* larger, int n) {
  const int i = rl_bid_x() * 64 + rl_tid();
  if (i >= n) return;
  dots[i] = rl::dot4(a[i], b[i], i);
  ones[i] = rl::popcount((rl_u32)a[i]);
  zeros[i] = rl::leading_zeros((rl_u32)a[i]);
  bf16[i] = rl::f32_to_bf16(x[i]);
  rounded[i] = rl::round_bf16(x[i]);
  two_roundings[i] = x[i] * y[i] + z[i];  // what a compiler would fuse
  one_rounding[i] = rl::fma(x[i], y[i], z[i]);
  larger[i] = rl::max(x[i], y[i]);
}
RL_EXPORT(numbers)

// One wave. a, b [16, stride], depth a multiple of 32; c, out [16, 16].
RL_KERNEL(32) product_i8(const rl_i8* a, const rl_i8* b, const int* c, int* out, int stride, int depth) {
  rl::AccI32 acc;
  for (int i = 0; i < 8; ++i) acc.v[i] = c[rl::acc_row(i) * 16 + rl::acc_col(i)];
  for (int k = 0; k < depth; k += 32) rl::mma(acc, rl::load_rows(a + k, stride), rl::load_rows(b + k, stride));
  for (int i = 0; i < 8; ++i) out[rl::acc_row(i) * 16 + rl::acc_col(i)] = acc.v[i];
}
RL_EXPORT(product_i8)

// One wave. a, b [16, 48] through LDS, of which the middle 32 bytes of each row count; out [16, 16].
RL_KERNEL(32) product_from(const rl_i8* a, const rl_i8* b, int start, int* out) {
  RL_DYN_SHARED(rl_i8, lds);  // [2, 16, 64]
  for (int i = rl_tid(); i < 16 * 48; i += 32) {
    lds[i / 48 * 64 + i % 48 + 8] = a[i];
    lds[16 * 64 + i / 48 * 64 + i % 48 + 8] = b[i];
  }
  rl_sync();
  const rl::AccI32 from = rl::splat(start);
  const rl::AccI32 acc = rl::mma_from(from, rl::load_rows_lds(lds + 16, 64), rl::load_rows_lds(lds + 16 * 64 + 16, 64));
  for (int i = 0; i < 8; ++i) out[rl::acc_row(i) * 16 + rl::acc_col(i)] = acc.v[i] + from.v[i] - start;
}
RL_EXPORT(product_from)

// One wave. a, b [16, stride] through LDS, depth a multiple of 16; c, out [16, 16].
RL_KERNEL(32) product_bf16(const rl_u16* a, const rl_u16* b, const float* c, float* out, int stride, int depth) {
  RL_DYN_SHARED(rl_u16, lds);  // [2, 16, stride]
  for (int i = rl_tid(); i < 16 * stride; i += 32) {
    lds[i] = a[i];
    lds[16 * stride + i] = b[i];
  }
  rl_sync();
  rl::AccF32 acc;
  for (int i = 0; i < 8; ++i) acc.v[i] = c[rl::acc_row(i) * 16 + rl::acc_col(i)];
  for (int k = 0; k < depth; k += 16)
    rl::mma(acc, rl::load_rows(lds + k, stride), rl::load_rows(lds + 16 * stride + k, stride));
  for (int i = 0; i < 8; ++i) out[rl::acc_row(i) * 16 + rl::acc_col(i)] = acc.v[i];
}
RL_EXPORT(product_bf16)

// Workgroups of 128 over rows of 128: reversed through LDS, then counted by value modulo 8; counts [grid x, 8].
RL_KERNEL(128) exchange(const int* in, int* reversed, int* counts) {
  RL_DYN_SHARED(int, lds);  // 128 values, 8 counters
  int* counters = lds + 128;
  const int t = rl_tid(), row = rl_bid_y() * 3 + rl_bid_x();  // grid x is 3
  lds[t] = in[row * 128 + t];
  if (t < 8) counters[t] = 0;
  rl_sync();
  reversed[row * 128 + t] = lds[127 - t];
  rl::lds_add(&counters[lds[t] & 7], 1);
  rl_sync();
  if (t < 8) counts[row * 8 + t] = counters[t];
}
RL_EXPORT(exchange)

// The last workgroup of a row of them adds up what all of them doubled; grid (n, rows).
RL_KERNEL(128) add_up(const int* in, int* doubled, int* sums, int* counters, int n) {
  RL_DYN_SHARED(int, lds);  // a word
  const int row = rl_bid_y(), own = (row * n + rl_bid_x()) * 128 + rl_tid();
  doubled[own] = 2 * in[own];
  if (!rl::last_of(n, counters + row, lds)) return;
  int sum = 0;
  for (int i = 0; i < n; ++i) sum += doubled[(row * n + i) * 128 + rl_tid()];
  sums[row * 128 + rl_tid()] = sum;
}
RL_EXPORT(add_up)

// One wave hands values round through LDS, twice over the same words.
RL_KERNEL(32) rotate(const int* in, int* out) {
  RL_DYN_SHARED(int, lds);  // 32
  int v = in[rl_tid()];
  for (int step = 0; step < 2; ++step) {
    lds[rl_tid()] = v;
    rl_wave_sync();
    v = lds[(rl_tid() + 1) & 31];
    rl_wave_sync();
  }
  out[rl_tid()] = v;
}
RL_EXPORT(rotate)

// 16-byte loads and stores; 64-bit and float arguments between pointers and 32-bit ones.
RL_KERNEL(32) arguments(const rl::Words4* in, int first, rl_i64 big, float x, rl::Words4* out, int last) {
  rl::Words4 v = in[rl_tid()];
  v.word[0] += first + last;
  v.word[1] += (int)(big >> 32);
  v.word[2] += (int)big;
  v.word[3] = rl::as_int(x);
  out[rl_tid()] = v;
}
RL_EXPORT(arguments)
