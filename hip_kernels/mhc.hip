// mhc_pass, mhc_finish: the residual streams round a sublayer (backbone.md section 4), n = 4 streams of WIDTH channels.
//
// mhc_pass reads the streams once for all there is to do with them: merge the last sublayer's output in, collapse them
// for the next one, and project them on 24 coefficients. FP32 weights are three BF16 components, 8 bits each, whose
// products with BF16 activations are exact; one read of the activations serves all three, and their squares.
// Grid (ceil(WIDTH/128), ceil(R/32)); 384 threads = 12 waves: a segment of 128 channels of each stream, 32 rows. A wave
// has 16 rows and 16 of the 80 columns, or the squares; of at most 16 rows two such jobs, each of one stream. The 8
// steps of 16 channels of a stream are one sum; the streams' sums are added by halves, components least first, segments
// by mhc_finish.
// LDS: activations [32][kRowStride], then sums [32][kSumStride], or a stream's [4][16][kSumStride].
//
// mhc_finish: grid (R, 1); 160 threads = 5 waves, the last of which mixes while the others norm; LDS a float a wave.
//
// mhc_few: both for at most 16 rows, in mhc_pass's workgroups: the last of them to be done finishes, with mhc_finish's
// sums in its order. Grid (ceil(WIDTH/128), 1).
//
// Budget on gfx1100: mhc_pass: 144 VGPRs, 33280 bytes of LDS, 9 waves per SIMD, no scratch.
// Budget on gfx1100: mhc_few: 144 VGPRs, 33280 bytes of LDS, 9 waves per SIMD, no scratch.
// Budget on gfx1100: mhc_finish: 64 VGPRs, 16 bytes of LDS, 15 waves per SIMD, no scratch.
#include "mhc_terms.hip.h"

constexpr int kPassThreads = 32 * kColJobs * kRowTiles;

RL_KERNEL(kPassThreads) mhc_pass(PASS_ARGUMENTS) {
  RL_DYN_SHARED(rl_u16, lds);
  const Pass a = PASS;
  const int segment = rl_bid_x(), row0 = rl_bid_y() * kPassRows;
  if (n_rows <= kTileRows) {
    pass_few<kPassThreads>(lds, a, segment);
    return;
  }
  stage_rows<kPassRows, kPassThreads>(lds, a, segment, row0);
  if (!weights) return;
  rl_sync();
  float* sums = (float*)lds;
  const int job = rl::wave() % kColJobs, tile_row = rl::wave() / kColJobs * kTileRows;
  rl::AccF32 acc = {};
  if (row0 + tile_row < n_rows)
    acc = project(lds + tile_row * kRowStride, weights + (rl_i64)segment * kSegmentWeights, job);
  rl_sync();
  leave(sums + tile_row * kSumStride, acc, job);
  rl_sync();
  write_partials<1, kPassThreads>(a, sums, segment, row0);
}
RL_EXPORT(mhc_pass)

constexpr int kFinishThreads = kNormThreads + 32;
RL_KERNEL(kFinishThreads) mhc_finish(FINISH_ARGUMENTS) {
  typedef Norm<WIDTH> N;
  RL_DYN_SHARED(float, squares);  // [4]
  const rl_i64 row = rl_bid_x();
  if (rl::wave() == N::kWaves) {
    const float total = sums ? over_row_segments(sums, row) : 0.0f;
    rl_sync();
    if (sums) mix_row(MIX, total, row);
    return;
  }
  const typename N::Own own = N::load(normed + row * WIDTH, rl_tid());
  const float sum = rl::wave_sum(N::squares(own, rl_tid()));
  if (rl::lane() == 0) squares[rl::wave()] = sum;
  rl_sync();
  N::store(Normed::at(normed, rounded, row * WIDTH), own, weight, N::inverse_of(squares, norm_eps), rl_tid());
}
RL_EXPORT(mhc_finish)

RL_KERNEL(kPassThreads) mhc_few(PASS_ARGUMENTS, FINISH_ARGUMENTS, int* counter) {
  RL_DYN_SHARED(rl_u16, lds);
  pass_few<kPassThreads>(lds, PASS, rl_bid_x());
  if (!rl::last_of(kSegments, counter, (int*)lds)) return;
  finish_few<kPassThreads>(lds, {normed, rounded, weight, MIX, n_rows});
}
RL_EXPORT(mhc_few)
