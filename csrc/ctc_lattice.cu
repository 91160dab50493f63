// The lattice of connectionist temporal classification, from both ends at once.
//
// As in transducer_lattice.cu: two blocks walk a sequence, one from the first frame and one from
// the last, until they meet before the frame in the middle (`sweep`), threads over labels, a step a
// frame; each state keeps the fractions in which its mass came together. What crosses the middle is
// the likelihood (`join`). Two blocks walk back from there and divide probabilities as the
// fractions say (`spread`); then the blanks of each frame are summed (`sum_blanks`). Fractions lie
// where the occupancies of labels and blanks will be, so no table is needed but `shares`. No
// atomics: results are the same bits each time.

#include "ctc_transcript.h"
#include "wavefront.cuh"

namespace effasr {
namespace {

constexpr int kSumThreads = 256;
constexpr int kSumBlocks = 8;

// Both walks meet in these, an element for each place at the cut.
struct Meeting {
  double *blank, *label;              // what arrives at the frame after the cut
  double *ahead_blank, *ahead_label;  // what leads from there, its scores included, to the end
};

// Doubles that a sequence has of the workspace: its meeting, and what leaves a strip either way.
__host__ __device__ inline int64_t room(const CtcLattice& a) {
  return 4 * static_cast<int64_t>(a.columns) + 2 * (static_cast<int64_t>(a.max_frames) + 1);
}

__device__ __forceinline__ Meeting meeting_of(const CtcLattice& a, int n) {
  double* own = a.workspace + n * room(a);
  return {own, own + a.columns, own + 2 * static_cast<int64_t>(a.columns),
          own + 3 * static_cast<int64_t>(a.columns)};
}

__device__ __forceinline__ double* border_of(const CtcLattice& a, int n, bool mirrored) {
  return a.workspace + n * room(a) + 4 * static_cast<int64_t>(a.columns) +
         (mirrored ? a.max_frames + 1 : 0);
}

__device__ __forceinline__ bool is_too_long(const CtcLattice& a, const Transcript& y) {
  return y.frames > a.max_frames || y.labels >= a.columns;
}

struct Scores {
  float blank, label, log_normalizer;
};

template <bool kMirrored, bool kKeep>
__device__ void sweep_strip(const CtcLattice& a, const Transcript& y, int n, int left,
                           LeftNeighbour<double>& neighbour) {
  double* border = border_of(a, n, kMirrored);
  const int end = kMirrored ? y.frames - y.cut() : y.cut();
  const int place = left + threadIdx.x;
  const bool has_blank = place <= y.labels, has_label = place < y.labels;
  const bool is_edge = threadIdx.x == blockDim.x - 1 && has_label;
  const bool repeated = repeats(a, y, kMirrored, place);
  const int blank_column = y.blank(kMirrored, place);
  const int label_column = 1 + y.label(kMirrored, place);
  auto load = [&](int frame) {
    Scores scores = {0.0f, -HUGE_VALF, 0.0f};
    if (frame < end && has_blank) {
      const int64_t row = y.row(kMirrored, frame);
      scores.blank = a.scores[row * a.columns];
      if (has_label) scores.label = a.scores[row * a.columns + label_column];
      if (a.log_normalizer != nullptr) scores.log_normalizer = a.log_normalizer[row];
    }
    return scores;
  };
  Scores ahead[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) ahead[k] = load(k);

  Place<double> here = {place == 0 ? 0.0 : kNothing, kNothing};
  auto step = [&](int frame) {
    const double outside = threadIdx.x == 0 && left > 0 ? border[frame] : kNothing;
    const double before = neighbour.take(here.label, outside);
    // After the barrier: the first thread has read what is replaced here.
    if (is_edge) border[frame] = here.label;
    const Merged merged = merge(here, before, repeated);
    // How they came to the first frame is no question.
    if (kKeep && frame > 0 && has_blank) {
      const int64_t row = y.row(kMirrored, frame - 1) * a.columns;
      a.shares[row + blank_column] = merged.moved;
      if (has_label) a.occupancies[row + label_column] = merged.stayed;
    }
  };
  for (int frame = 0; frame < end; frame += kAhead) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (frame + k >= end) break;
      const Scores scores = ahead[k];
      ahead[k] = load(frame + k + kAhead);
      step(frame + k);
      here.blank += emission(scores.blank, scores.log_normalizer);
      here.label += emission(scores.label, scores.log_normalizer);
      if (!has_blank) here.blank = kNothing;
      if (!has_label) here.label = kNothing;
    }
  }
  if (!kMirrored) step(end);
  const Meeting meeting = meeting_of(a, n);
  if (has_blank) (kMirrored ? meeting.ahead_blank : meeting.blank)[blank_column] = here.blank;
  if (has_label) (kMirrored ? meeting.ahead_label : meeting.label)[label_column - 1] = here.label;
}

template <bool kMirrored, bool kKeep>
__device__ void sweep_from(const CtcLattice& a, const Transcript& y, int n) {
  __shared__ double edges[2][kMostThreads / kWarp];
  LeftNeighbour<double> neighbour(edges);
  for (int left = 0; left <= y.labels; left += blockDim.x) {
    sweep_strip<kMirrored, kKeep>(a, y, n, left, neighbour);
    // The next strip reads what this one left at its border.
    __syncthreads();
  }
}

template <bool kKeep>
__global__ void __launch_bounds__(kMostThreads, 1) sweep(const CtcLattice a) {
  const int n = blockIdx.x;
  const Transcript y(a, n);
  if (y.frames == 0 || is_too_long(a, y)) return;
  if (blockIdx.y == 0) {
    sweep_from<false, kKeep>(a, y, n);
  } else {
    sweep_from<true, kKeep>(a, y, n);
  }
}

// A warp for each sequence.
__global__ void __launch_bounds__(kWarp) join(const CtcLattice a) {
  const int n = blockIdx.x, lane = threadIdx.x;
  const Transcript y(a, n);
  double result;
  if (is_too_long(a, y)) {
    result = nan("");
  } else if (y.frames == 0) {
    result = log_likelihood_of_no_frames(y.labels);
  } else {
    const Meeting m = meeting_of(a, n);
    double most = 2 * kNothing;
    for (int j = lane; j <= y.labels; j += kWarp) {
      most = fmax(most, m.blank[j] + m.ahead_blank[j]);
      if (j < y.labels) most = fmax(most, m.label[j] + m.ahead_label[j]);
    }
    most = warp_max(most);
    double sum = 0.0;
    for (int j = lane; j <= y.labels; j += kWarp) {
      sum += exp2f(static_cast<float>(m.blank[j] + m.ahead_blank[j] - most));
      if (j < y.labels) sum += exp2f(static_cast<float>(m.label[j] + m.ahead_label[j] - most));
    }
    result = log_likelihood_of(most + log2(warp_sum(sum)));
  }
  if (lane == 0) a.log_likelihood[n] = result;
}

// From the middle to the first frame or, where the walk was mirrored, the last. Probabilities go to
// the place before, so threads count places from the end.
template <bool kMirrored>
__device__ void spread_strip(const CtcLattice& a, const Transcript& y, int n, int left,
                            LeftNeighbour<float>& neighbour) {
  double* border = border_of(a, n, kMirrored);
  const Meeting m = meeting_of(a, n);
  const double total = a.log_likelihood[n] * kLog2E;
  // The frame of the walk that is divided first; a mirrored walk has met it already.
  const int begin = kMirrored ? y.frames - y.cut() - 1 : y.cut();
  const int place = y.labels - left - static_cast<int>(threadIdx.x);
  const bool has_blank = place >= 0, has_label = has_blank && place < y.labels;
  const bool is_edge = threadIdx.x == blockDim.x - 1 && place > 0;
  const bool repeated = repeats(a, y, kMirrored, place);
  const int blank_column = y.blank(kMirrored, place);
  const int label_column = 1 + y.label(kMirrored, place);
  auto load = [&](int frame) {
    Merged merged = {0.0f, 0.0f};
    if (frame > 0 && has_blank) {
      const int64_t row = y.row(kMirrored, frame - 1) * a.columns;
      merged.moved = a.shares[row + blank_column];
      if (has_label) merged.stayed = a.occupancies[row + label_column];
    }
    return merged;
  };
  Merged ahead[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) ahead[k] = load(begin - k);

  Place<float> here = {0.0f, 0.0f};
  auto store = [&](int frame) {
    if (!has_blank) return;
    const int64_t row = y.row(kMirrored, frame) * a.columns;
    a.shares[row + blank_column] = here.blank;
    if (has_label) a.occupancies[row + label_column] = here.label;
  };
  if (total != -HUGE_VAL) {
    if (has_blank) {
      here.blank = exp2f(
          static_cast<float>(m.blank[blank_column] + m.ahead_blank[blank_column] - total));
    }
    if (has_label) {
      const int j = label_column - 1;
      here.label = exp2f(static_cast<float>(m.label[j] + m.ahead_label[j] - total));
    }
  }
  if (kMirrored) store(begin);
  for (int frame = begin; frame > 0; frame -= kAhead) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (frame - k <= 0) break;
      const Merged merged = ahead[k];
      ahead[k] = load(frame - k - kAhead);
      const float moves = divide(here, merged, repeated);
      const bool entered = threadIdx.x == 0 && left > 0;
      const float taken =
          neighbour.take(moves, entered ? static_cast<float>(border[frame - k]) : 0.0f);
      if (is_edge) border[frame - k] = moves;
      here.label += taken;
      store(frame - k - 1);
    }
  }
}

template <bool kMirrored>
__device__ void spread_to(const CtcLattice& a, const Transcript& y, int n) {
  __shared__ float edges[2][kMostThreads / kWarp];
  LeftNeighbour<float> neighbour(edges);
  for (int left = 0; left <= y.labels; left += blockDim.x) {
    spread_strip<kMirrored>(a, y, n, left, neighbour);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kMostThreads, 1) spread(const CtcLattice a) {
  const int n = blockIdx.x;
  const Transcript y(a, n);
  if (y.frames == 0 || is_too_long(a, y)) return;
  if (blockIdx.y == 0) {
    spread_to<false>(a, y, n);
  } else {
    spread_to<true>(a, y, n);
  }
}

// Of every frame: a warp each.
__global__ void __launch_bounds__(kSumThreads) sum_blanks(const CtcLattice a) {
  const Transcript y(a, blockIdx.x);
  if (is_too_long(a, y)) return;
  const int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  for (int frame = blockIdx.y * warps + threadIdx.x / kWarp; frame < y.frames;
       frame += gridDim.y * warps) {
    const int64_t row = (y.first_frame + frame) * a.columns;
    float sum = 0.0f;
    for (int j = lane; j <= y.labels; j += kWarp) sum += a.shares[row + j];
    sum = warp_sum(sum);
    if (lane == 0) a.occupancies[row] = sum;
  }
}

}  // namespace
}  // namespace effasr

extern "C" int64_t ctc_lattice_workspace(const CtcLattice* lattice) {
  return lattice->sequences * effasr::room(*lattice) * static_cast<int64_t>(sizeof(double));
}

extern "C" int ctc_lattice_cuda(const CtcLattice* lattice, void* stream) {
  using namespace effasr;
  if (lattice->sequences == 0) return cudaSuccess;
  const unsigned sequences = lattice->sequences;
  const int threads = block_size(lattice->columns, lattice->most_threads);
  const bool keeps = lattice->occupancies != nullptr;
  launch(keeps ? sweep<true> : sweep<false>, dim3(sequences, 2), threads, stream, *lattice);
  launch(join, dim3(sequences), kWarp, stream, *lattice);
  if (keeps) {
    launch(spread, dim3(sequences, 2), threads, stream, *lattice);
    launch(sum_blanks, dim3(sequences, kSumBlocks), kSumThreads, stream, *lattice);
  }
  return cudaGetLastError();
}
