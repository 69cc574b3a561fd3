// take_rows, put_rows: whole rows of any type, by index and into pages. A thread moves one word: 16, 4 or 1 bytes,
// the most that rows and addresses are multiples of.
// Grid (rows, ceil(words of a row / 256)); 256 threads; no LDS.
//
// Budget on gfx1100: take_rows: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
// Budget on gfx1100: put_rows: 24 VGPRs, 0 bytes of LDS, 16 waves per SIMD, no scratch.
#include "port.hip.h"

constexpr int kThreads = 256;
#if WORD_BYTES == 16
typedef rl::Words4 Word;
#elif WORD_BYTES == 4
typedef int Word;
#else
typedef rl_u8 Word;
#endif

RL_KERNEL(kThreads) take_rows(Word* out,            // [n, row_words]
                              const Word* rows,     // [R, row_words]
                              const rl_i64* index,  // [n]
                              int row_words) {
  const int word = rl_bid_y() * kThreads + rl_tid();
  if (word < row_words) out[(rl_i64)rl_bid_x() * row_words + word] = rows[index[rl_bid_x()] * row_words + word];
}
RL_EXPORT(take_rows)

RL_KERNEL(kThreads) put_rows(Word* pool,              // [pages, rows_per_page, row_words]
                             const Word* rows,        // [n, row_words]
                             const int* positions,    // [n] a row's place in its sequence; negative: not stored
                             const int* sequences,    // [n]
                             const int* page_tables,  // [sequences, table_width]
                             int row_words, int rows_per_page, int table_width) {
  const int word = rl_bid_y() * kThreads + rl_tid(), row = rl_bid_x(), position = positions[row];
  if (word >= row_words || position < 0) return;
  const rl_i64 page = page_tables[(rl_i64)sequences[row] * table_width + position / rows_per_page];
  pool[(page * rows_per_page + position % rows_per_page) * row_words + word] = rows[(rl_i64)row * row_words + word];
}
RL_EXPORT(put_rows)
