// One small kernel for each thing of port.hip.h and row_terms.hip.h that row operators and attention build on.
// test_row_terms.py holds what must come out.
#include "explog.hip.h"
#include "row_terms.hip.h"

// Elementwise over n.
RL_KERNEL(64) functions(const float* x, float* roots, float* powers, float* logs, float* exps, float* sigmoids,
                        int* codes8, int* codes4, int n) {
  const int i = rl_bid_x() * 64 + rl_tid();
  if (i >= n) return;
  const float size = rl::as_float(size_bits(x[i]));
  roots[i] = rl::sqrt(size);
  powers[i] = rl::exp2(x[i]);
  logs[i] = rl::log(size);
  exps[i] = rl::exp(-size);
  sigmoids[i] = rl::sigmoid(x[i]);
  codes8[i] = e4m3(x[i]);
  codes4[i] = e2m1(x[i]);
}
RL_EXPORT(functions)

// Elementwise over n words of eight 4-bit codes; and over n pairs of words of four E4M3 codes.
RL_KERNEL(64) values(const int* codes, const int* scales, rl::Words4* of_e2m1, rl::Words4* of_e4m3, int n) {
  const int i = rl_bid_x() * 64 + rl_tid();
  if (i >= n) return;
  of_e2m1[i] = rl::look_up(e2m1_table(scales[i]).pairs, codes[i]);
  of_e4m3[i] = e4m3_values(codes[i], codes[(i + 1) % n], scales[i]);
}
RL_EXPORT(values)

// One wave: out = a [16, 16] times b [16, 16] not transposed, both BF16, through LDS; its columns' maxima and sums.
RL_KERNEL(32) columns(const rl_u16* a, const rl_u16* b, float* out, float* maxima, float* sums) {
  RL_DYN_SHARED(rl_u16, lds);  // [2, 16, 24]
  for (int i = rl_tid(); i < 256; i += 32) {
    lds[i / 16 * 24 + i % 16] = a[i];
    lds[16 * 24 + i / 16 * 24 + i % 16] = b[i];
  }
  rl_sync();
  rl::AccF32 acc = {};
  rl::mma(acc, rl::load_rows_lds(lds, 24), rl::load_cols_lds(lds + 16 * 24, 24));
  float most[rl::kOwnCols], total[rl::kOwnCols];
  rl::over_rows<rl::Max>(acc.v, most);
  rl::over_rows<rl::Add>(acc.v, total);
  for (int i = 0; i < 8; ++i) {
    const int at = rl::acc_row(i) * 16 + rl::acc_col(i);
    out[at] = acc.v[i];
    maxima[at] = most[rl::col_of(i)];
    sums[at] = total[rl::col_of(i)];
  }
  for (int j = 0; j < rl::kOwnCols; ++j) out[256 + rl_tid() * rl::kOwnCols + j] = (float)rl::own_col(j);
}
RL_EXPORT(columns)
