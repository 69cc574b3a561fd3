// mhc_terms.hip.h: the residual streams round a sublayer, as mhc.hip and project_enter.hip see them (backbone.md
// section 4): a pass over a segment of 128 channels of each stream of n = 4, and what is done once all are through.
#pragma once
#include "explog.hip.h"
#include "rms.hip.h"

constexpr int kStreams = 4, kSums = 24, kTileRows = 16;
constexpr int kColTiles = 5;  // 3 components of 24 sums, and 8 columns of zeros
constexpr int kColJobs = kColTiles + 1, kRowTiles = 2, kPassRows = kRowTiles * kTileRows;
constexpr int kSegment = 128, kSegments = (WIDTH + kSegment - 1) / kSegment, kSteps = kSegment / 16;
constexpr int kFragment = 16 * 16, kRowStride = kStreams * kSegment + 8, kSumStride = kColTiles * 16 + 1;
constexpr int kSegmentWeights = kStreams * kSteps * kColTiles * kFragment;
constexpr int kPartials = kSums + 1;  // the last: the sum of squares
static_assert(WIDTH % 16 == 0, "a step of the projection takes 16 channels of one stream");

struct Merge {  // of one row
  const float* comb;  // [source][destination]
  const float* post;
};

// Eight channels of all streams.
RL_DEV void merge_piece(rl::Words4 (&x)[kStreams], const rl::Words4& sublayer, const Merge& by) {
  Piece merged[kStreams];
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const Piece from = unpack(x[j]);
#pragma unroll
    for (int k = 0; k < kStreams; ++k) {
      const float share = by.comb[j * kStreams + k];
#pragma unroll
      for (int c = 0; c < kPiece; ++c) merged[k].v[c] = j ? merged[k].v[c] + share * from.v[c] : share * from.v[c];
    }
  }
  const Piece o = unpack(sublayer);
#pragma unroll
  for (int k = 0; k < kStreams; ++k) {
#pragma unroll
    for (int c = 0; c < kPiece; ++c) merged[k].v[c] += by.post[k] * o.v[c];
    x[k] = pack(merged[k]);
  }
}

RL_DEV rl::Words4 collapse_piece(const rl::Words4 (&x)[kStreams], const float* pre) {
  Piece u;
#pragma unroll
  for (int j = 0; j < kStreams; ++j) {
    const Piece from = unpack(x[j]);
#pragma unroll
    for (int c = 0; c < kPiece; ++c) u.v[c] = j ? u.v[c] + from.v[c] * pre[j] : from.v[c] * pre[0];
  }
  return pack(u);
}

struct Pass {
  float* partials;         // [R, segments, 25]
  rl_u16* merged;          // [R, 4, WIDTH], may be streams
  rl_u16* collapsed;       // [R, WIDTH], not normed
  const rl_u16* streams;   // [R, 4, WIDTH]
  const rl_u16* sublayer;  // [R, WIDTH], or null: nothing is merged
  const float* post;       // [R, 4]
  const float* comb;       // [R, 4, 4]
  const float* pre;        // [R, 4], or null: nothing is collapsed
  const rl_u16* weights;   // [segments, 4, 8, 5, 16, 16], or null: nothing is projected
  int n_rows;
};

// A segment's channels of kRows rows: merged, collapsed, and left in LDS; zeros where there is no row or channel.
template <int kRows, int kThreads>
RL_DEV void stage_rows(rl_u16* lds, const Pass& a, int segment, int row0) {
  constexpr int kRowPieces = kSegment / kPiece;
  for (int i = rl_tid(); i < kRows * kRowPieces; i += kThreads) {
    const int tile_row = i / kRowPieces, row = row0 + tile_row;
    const int in_segment = i % kRowPieces * kPiece, channel = segment * kSegment + in_segment;
    const bool real = row < a.n_rows && channel < WIDTH;
    const rl_i64 at = (rl_i64)row * kStreams * WIDTH + channel, own = (rl_i64)row * WIDTH + channel;
    rl::Words4 x[kStreams] = {};
    if (real) {
#pragma unroll
      for (int j = 0; j < kStreams; ++j) x[j] = load_words(a.streams + at + j * WIDTH);
      if (a.sublayer) {
        merge_piece(x, load_words(a.sublayer + own), {a.comb + row * kStreams * kStreams, a.post + row * kStreams});
#pragma unroll
        for (int j = 0; j < kStreams; ++j) store_words(a.merged + at + j * WIDTH, x[j]);
      }
      if (a.pre) store_words(a.collapsed + own, collapse_piece(x, a.pre + row * kStreams));
    }
#pragma unroll
    for (int j = 0; j < kStreams; ++j) store_words(lds + tile_row * kRowStride + j * kSegment + in_segment, x[j]);
  }
}

// One wave's 16 rows times a stream's steps of its 16 columns, or its rows' squares, on the diagonal.
RL_DEV rl::AccF32 project_stream(const rl_u16* rows, const rl_u16* weights, int stream, int job) {
  rl::AccF32 sum = {};
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int step = stream * kSteps + i;
    const rl::FragBF16 a = rl::load_rows_lds(rows + step * 16, kRowStride);
    if (job == kColTiles) rl::mma(sum, a, a);
    else rl::mma(sum, a, rl::load_rows(weights + (step * kColTiles + job) * kFragment, 16));
  }
  return sum;
}
RL_DEV float over_streams(float s0, float s1, float s2, float s3) { return (s0 + s1) + (s2 + s3); }
RL_DEV rl::AccF32 project(const rl_u16* rows, const rl_u16* weights, int job) {
  rl::AccF32 sums[kStreams];
#pragma unroll
  for (int stream = 0; stream < kStreams; ++stream) sums[stream] = project_stream(rows, weights, stream, job);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    sums[0].v[i] = over_streams(sums[0].v[i], sums[1].v[i], sums[2].v[i], sums[3].v[i]);
  return sums[0];
}

// A wave's sums into LDS: columns, and the squares behind them.
RL_DEV void leave(float* sums, const rl::AccF32& acc, int job) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float* row = sums + rl::acc_row(i) * kSumStride;
    if (job < kColTiles) row[job * 16 + rl::acc_col(i)] = acc.v[i];
    else if (rl::acc_row(i) == rl::acc_col(i)) row[kColTiles * 16] = acc.v[i];
  }
}

// Every wave's sums of a segment, from LDS, in kParts of which each has a stream, or in one: components added, least
// first.
template <int kParts, int kThreads>
RL_DEV void write_partials(const Pass& a, const float* sums, int segment, int row0) {
  for (int i = rl_tid(); i < (kParts > 1 ? kTileRows : kPassRows) * kPartials; i += kThreads) {
    const int row = row0 + i / kPartials, z = i % kPartials;
    if (row >= a.n_rows) continue;
    const auto sum = [&](int column) {
      constexpr int kPart = kTileRows * kSumStride;
      const float* at = sums + i / kPartials * kSumStride + column;
      return kParts > 1 ? over_streams(at[0], at[kPart], at[2 * kPart], at[3 * kPart]) : at[0];
    };
    a.partials[((rl_i64)row * kSegments + segment) * kPartials + z] =
        z < kSums ? (sum(2 * kSums + z) + sum(kSums + z)) + sum(z) : sum(kColTiles * 16);
  }
}

// A segment of at most 16 rows. LDS: kFewBytes.
constexpr int kFewStaged = kTileRows * kRowStride * (int)sizeof(rl_u16);
constexpr int kFewSums = kStreams * kTileRows * kSumStride * (int)sizeof(float);
constexpr int kFewBytes = kFewSums > kFewStaged ? kFewSums : kFewStaged;
template <int kThreads> RL_DEV void pass_few(rl_u16* lds, const Pass& a, int segment) {
  stage_rows<kTileRows, kThreads>(lds, a, segment, 0);
  if (!a.weights) return;
  rl_sync();
  const rl_u16* weights = a.weights + (rl_i64)segment * kSegmentWeights;
  float* sums = (float*)lds;
  constexpr int kWaves = kThreads / 32, kOwnJobs = kStreams * kColJobs / kWaves;
  static_assert(kOwnJobs * kWaves == kStreams * kColJobs, "as many jobs for each wave");
  rl::AccF32 acc[kOwnJobs];
#pragma unroll
  for (int k = 0; k < kOwnJobs; ++k) {
    const int job = rl::wave() + k * kWaves;
    acc[k] = project_stream(lds, weights, job / kColJobs, job % kColJobs);
  }
  rl_sync();
#pragma unroll
  for (int k = 0; k < kOwnJobs; ++k) {
    const int job = rl::wave() + k * kWaves;
    leave(sums + job / kColJobs * kTileRows * kSumStride, acc[k], job % kColJobs);
  }
  rl_sync();
  write_partials<kStreams, kThreads>(a, sums, segment, 0);
}

#define PASS_ARGUMENTS                                                                                            \
  float *partials, rl_u16 *merged, rl_u16 *collapsed, const rl_u16 *streams, const rl_u16 *sublayer,             \
      const float *post, const float *comb, const float *pre, const rl_u16 *weights, int n_rows
#define PASS {partials, merged, collapsed, streams, sublayer, post, comb, pre, weights, n_rows}

// Lane 4j + k < 16 has A[j][k].
RL_DEV float over_row(float v) {
  v += rl::shfl_xor<1>(v);
  return v + rl::shfl_xor<2>(v);
}
RL_DEV float over_column(float v) {
  v += rl::shfl_xor<4>(v);
  return v + rl::shfl_xor<8>(v);
}

// One wave: lane z has the projection's z, of which 4 are pre, 4 post and 16 comb.
RL_DEV void coefficients(float z, const float* scale, const float* base, float eps, int n_iters, float* pre,
                         float* post, float* comb) {
  const int lane = rl::lane();
  const int kind = lane < kStreams ? 0 : lane < 2 * kStreams ? 1 : 2;
  const float y = lane < kSums ? z * scale[kind] + base[lane] : 0.0f;
  const float s = rl::sigmoid(y);
  if (kind == 0) pre[lane] = s + eps;
  if (kind == 1) post[lane - kStreams] = 2.0f * s;
  float a = rl::shfl(y, (lane & 15) + 2 * kStreams);
  float most = rl::max(a, rl::shfl_xor<1>(a));
  most = rl::max(most, rl::shfl_xor<2>(most));
  a = rl::exp(a - most);
  a = a / over_row(a) + eps;
  a = a / (over_column(a) + eps);
  for (int i = 1; i < n_iters; ++i) {
    a = a / (over_row(a) + eps);
    a = a / (over_column(a) + eps);
  }
  if (lane < kStreams * kStreams) comb[lane] = a;
}

struct Mix {
  float* pre;             // [R, 4]
  float* post;            // [R, 4]
  float* comb;            // [R, 4, 4]
  const float* partials;  // [R, segments, 25], or null: no coefficients
  const float* scale;     // [3]
  const float* base;      // [24]
  float norm_eps, eps;
  int n_iters;
};

// By one wave: the row's sums over the segments, lane z the projection's z; then the coefficients.
RL_DEV float over_row_segments(const float* partials, rl_i64 row) {
  const float* own = partials + row * kSegments * kPartials + (rl::lane() < kPartials ? rl::lane() : kPartials - 1);
  float total = 0.0f;
#pragma unroll
  for (int s = 0; s < kSegments; ++s) total += own[s * kPartials];
  return total;
}
RL_DEV void mix_row(const Mix& a, float total, rl_i64 row) {
  const float inverse = inverse_rms(rl::shfl(total, kSums), kStreams * WIDTH, a.norm_eps);
  coefficients(total * inverse, a.scale, a.base, a.eps, a.n_iters, a.pre + row * kStreams, a.post + row * kStreams,
               a.comb + row * kStreams * kStreams);
}

struct FinishFew {
  rl_u16* normed;         // [R, WIDTH], in place
  rl_u16* rounded;        // [R, WIDTH] the same through ActQuant8, or null
  const rl_u16* weight;   // [WIDTH] of the norm
  Mix mix;
  int n_rows;
};
#define FINISH_ARGUMENTS                                                                                           \
  rl_u16 *normed, rl_u16 *rounded, float *new_pre, float *new_post, float *new_comb, const float *sums,           \
      const rl_u16 *weight, const float *scale, const float *base, float norm_eps, float eps, int n_iters
#define MIX {new_pre, new_post, new_comb, sums, scale, base, norm_eps, eps, n_iters}

// Norms and coefficients of at most 16 rows by one workgroup, with mhc_finish's sums in its order.
template <int kThreads> RL_DEV void finish_few(rl_u16* lds, const FinishFew& a) {
  // In two steps, each of which waits for memory once: what is added up of every row, and what comes of it.
  typedef Norm<WIDTH> N;
  constexpr int kWaves = kThreads / 32, kRowPieces = WIDTH / kPiece, kAtOnce = 2;
  const int n_rows = a.n_rows, n_mixing = a.mix.partials ? n_rows < kWaves / 2 ? n_rows : kWaves / 2 : 0;  // the last waves, which do nothing else
  const int n_pieces = n_rows * kRowPieces, stride = (kWaves - n_mixing) * 32;
  rl::Words4 own[kAtOnce], by[kAtOnce];
  const auto read = [&](int start) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = start + j * stride + rl_tid(), piece = at < n_pieces ? at : n_pieces - 1;
      own[j] = load_words(a.normed + (rl_i64)piece * kPiece);
      by[j] = load_words(a.weight + piece % kRowPieces * kPiece);
    }
  };
  read(0);
  float* squares = (float*)lds + 4;  // [R, 4], behind last_of's word
  float* totals = squares + kTileRows * N::kWaves;  // [R, 32]
  const int n_quarters = n_rows * N::kWaves, n_jobs = n_quarters + (a.mix.partials ? n_rows : 0);
  for (int job = rl::wave(); job < n_jobs; job += kWaves) {
    if (job < n_quarters) {
      const float sum = N::sum_of_wave(a.normed + (rl_i64)(job / N::kWaves) * WIDTH, job % N::kWaves);
      if (rl::lane() == 0) squares[job] = sum;
    } else {
      totals[(job - n_quarters) * 32 + rl::lane()] = over_row_segments(a.mix.partials, job - n_quarters);
    }
  }
  rl_sync();
  const int mixing = rl::wave() - (kWaves - n_mixing);
  if (mixing >= 0) {
    for (int row = mixing; row < n_rows; row += n_mixing) mix_row(a.mix, totals[row * 32 + rl::lane()], row);
    return;
  }
  for (int start = 0; start < n_pieces; start += kAtOnce * stride) {  // all of a wave go round as often
    if (start) read(start);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int at = start + j * stride + rl_tid(), row = (at < n_pieces ? at : n_pieces - 1) / kRowPieces;
      const float inverse = N::inverse_of(squares + row * N::kWaves, a.mix.norm_eps);
      N::store_piece({a.normed, a.rounded}, (rl_i64)at * kPiece, own[j], by[j], inverse, at < n_pieces);
    }
  }
}
