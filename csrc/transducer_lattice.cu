// The transducer's lattice, from both ends at once.
//
// Two blocks walk a sequence, one from the first node and one from the last, until they meet on the
// anti-diagonal in the middle (`sweep`): threads over labels, a step a diagonal. Each node keeps
// what `add` gives: the fraction in which its mass came from either side. What crosses the middle
// is the likelihood (`join`). Two blocks then walk back from there, and divide the probability of
// each node as the fractions say (`spread`). So a node is visited twice, half as many steps follow
// each other as in a pass from one end, and nothing but the two planes is kept: fractions lie in
// that of the label's occupancies until these replace them. No atomics: results are the same bits
// each time.

#include "lattice.h"
#include "transducer_walk.h"
#include "wavefront.cuh"

namespace effasr {
namespace {

// Both walks meet in these, an element for each state of the diagonal at the cut.
struct Meeting {
  double* from_blank;  // what arrives there, over a blank
  double* from_label;  // and over a label
  double* ahead;       // what leads from there to the end
};

// Doubles that a sequence has of the workspace: its meeting, and what leaves a strip either way.
__host__ __device__ inline int64_t room(const TransducerLattice& a) {
  return 3 * (static_cast<int64_t>(a.max_labels) + 1) + 2 * static_cast<int64_t>(a.max_frames);
}

__device__ __forceinline__ Meeting meeting_of(const TransducerLattice& a, int n) {
  double* own = a.workspace + n * room(a);
  const int64_t states = static_cast<int64_t>(a.max_labels) + 1;
  return {own, own + states, own + 2 * states};
}

__device__ __forceinline__ double* border_of(const TransducerLattice& a, int n, bool mirrored) {
  const int64_t states = static_cast<int64_t>(a.max_labels) + 1;
  return a.workspace + n * room(a) + 3 * states + (mirrored ? a.max_frames : 0);
}

__device__ __forceinline__ Shape shape_of(const TransducerLattice& a, int n) {
  return {a.cu_frames[n + 1] - a.cu_frames[n], a.cu_labels[n + 1] - a.cu_labels[n], a.skewed != 0};
}

__device__ __forceinline__ bool is_too_long(const TransducerLattice& a, const Shape& shape) {
  return shape.frames > a.max_frames || shape.labels > a.max_labels;
}

struct Scores {
  float blank, label;
};

template <bool kMirrored, bool kKeep>
__device__ void sweep_strip(const TransducerLattice& a, const Shape& shape, int n, int left,
                           LeftNeighbour<double>& neighbour) {
  const int64_t first = a.first_nodes[n];
  const float *blanks = a.log_blank + first, *labels = a.log_label + first;
  double* border = border_of(a, n, kMirrored);
  const int end = kMirrored ? shape.diagonals() - shape.cut() : shape.cut();
  const int column = left + threadIdx.x;
  const bool is_edge = threadIdx.x == blockDim.x - 1 && column + 1 < shape.states();
  Cursor loaded(shape, kMirrored, left, column), here = loaded;
  auto load = [&](int diagonal) {
    const bool exists = diagonal < end && loaded.exists();
    const int64_t node = loaded.node();
    const Scores scores = {exists ? blanks[node] : 0.0f,
                           exists && loaded.has_label() ? labels[node] : -HUGE_VALF};
    loaded.advance();
    return scores;
  };
  Scores ahead[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) ahead[k] = load(left + k);

  // What goes from here to the next frame, and to the next column.
  double down = column == 0 ? 0.0 : kNothing, right = kNothing;
  auto take = [&]() {
    // A strip to the right of the meeting is entered by nothing.
    const bool entered =
        threadIdx.x == 0 && left > 0 && left <= end && here.frame() < shape.frames;
    return neighbour.take(right, entered ? border[here.frame()] : kNothing);
  };
  for (int diagonal = left; diagonal < end; diagonal += kAhead) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (diagonal + k >= end) break;
      const Scores scores = ahead[k];
      ahead[k] = load(diagonal + k + kAhead);
      const double taken = take();
      const double blank = weight(scores.blank), label = weight(scores.label);
      // From the end, a node's own step comes before what lies ahead of it.
      const Sum sum = kMirrored ? add(down + blank, taken + label) : add(down, taken);
      const bool exists = here.exists();
      if (kKeep && exists) a.occ_label[first + here.node()] = sum.fraction;
      down = exists ? sum.mass + (kMirrored ? 0.0 : blank) : kNothing;
      right = exists ? sum.mass + (kMirrored ? 0.0 : label) : kNothing;
      if (is_edge && exists) border[here.frame()] = right;
      here.advance();
    }
  }
  const double taken = take();
  const Meeting meeting = meeting_of(a, n);
  if (column < shape.states()) {
    if (kMirrored) {
      meeting.ahead[shape.labels - column] = down;
    } else {
      meeting.from_blank[column] = down;
      meeting.from_label[column] = taken;
    }
  }
}

template <bool kMirrored, bool kKeep>
__device__ void sweep_from(const TransducerLattice& a, const Shape& shape, int n) {
  __shared__ double edges[2][kMostThreads / kWarp];
  LeftNeighbour<double> neighbour(edges);
  for (int left = 0; left < shape.states(); left += blockDim.x) {
    sweep_strip<kMirrored, kKeep>(a, shape, n, left, neighbour);
    // The next strip reads what this one left at its border.
    __syncthreads();
  }
}

template <bool kKeep>
__global__ void __launch_bounds__(kMostThreads, 1) sweep(const TransducerLattice a) {
  const int n = blockIdx.x;
  const Shape shape = shape_of(a, n);
  if (shape.frames == 0 || is_too_long(a, shape)) return;
  if (blockIdx.y == 0) {
    sweep_from<false, kKeep>(a, shape, n);
  } else {
    sweep_from<true, kKeep>(a, shape, n);
  }
}

// A warp for each sequence.
__global__ void __launch_bounds__(kWarp) join(const TransducerLattice a) {
  const int n = blockIdx.x, lane = threadIdx.x;
  const Shape shape = shape_of(a, n);
  double result;
  if (is_too_long(a, shape)) {
    result = nan("");
  } else if (shape.frames == 0) {
    result = log_likelihood_of_no_frames(shape.labels);
  } else {
    const Meeting m = meeting_of(a, n);
    double most = 2 * kNothing;
    for (int u = lane; u < shape.states(); u += kWarp) {
      most = fmax(most, fmax(m.from_blank[u], m.from_label[u]) + m.ahead[u]);
    }
    most = warp_max(most);
    double sum = 0.0;
    for (int u = lane; u < shape.states(); u += kWarp) {
      const double lead = m.ahead[u] - most;
      sum += exp2f(static_cast<float>(m.from_blank[u] + lead));
      sum += exp2f(static_cast<float>(m.from_label[u] + lead));
    }
    result = log_likelihood_of(most + log2(warp_sum(sum)));
  }
  if (lane == 0) a.log_likelihood[n] = result;
}

// From the middle to the first node, which is a mirrored walk, or to the last.
template <bool kMirrored>
__device__ void spread_strip(const TransducerLattice& a, const Shape& shape, int n, int left,
                            LeftNeighbour<float>& neighbour) {
  const int64_t first = a.first_nodes[n];
  double* border = border_of(a, n, kMirrored);
  const Meeting meeting = meeting_of(a, n);
  const double total = a.log_likelihood[n] * kLog2E;
  const int begin = kMirrored ? shape.diagonals() - shape.cut() : shape.cut();
  const int column = left + threadIdx.x;
  const bool is_edge = threadIdx.x == blockDim.x - 1 && column + 1 < shape.states();
  const int start = begin > left ? begin : left;
  Cursor loaded(shape, kMirrored, start, column), here = loaded;
  auto load = [&]() {
    const float fraction = loaded.exists() ? a.occ_label[first + loaded.node()] : 0.0f;
    loaded.advance();
    return fraction;
  };
  float ahead[kAhead];
#pragma unroll
  for (int k = 0; k < kAhead; ++k) ahead[k] = load();

  float down = 0.0f, right = 0.0f;
  if (column < shape.states() && total != -HUGE_VAL) {
    const int u = kMirrored ? shape.labels - column : column;
    const double lead = meeting.ahead[u] - total;
    down = exp2f(static_cast<float>(meeting.from_blank[u] + lead));
    right = exp2f(static_cast<float>(meeting.from_label[u] + lead));
    if (!kMirrored) {
      down += right;  // both have arrived at this column
      right = 0.0f;
    }
  }
  const int before = start - 1 - column;
  if (is_edge && before >= 0 && before < shape.frames) border[before] = right;
  for (int diagonal = start; diagonal < shape.diagonals(); diagonal += kAhead) {
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      if (diagonal + k >= shape.diagonals()) break;
      const float fraction = ahead[k];
      ahead[k] = load();
      const int frame = here.frame();
      const bool entered = threadIdx.x == 0 && left > 0 && frame < shape.frames;
      const float taken =
          neighbour.take(right, entered ? static_cast<float>(border[frame]) : 0.0f);
      const bool exists = here.exists();
      const Parts parts = split(down + taken, fraction);
      if (exists) {
        const int64_t node = first + here.node();
        a.occ_blank[node] = kMirrored ? down : parts.first;
        a.occ_label[node] = kMirrored ? taken : parts.second;
      }
      down = exists ? parts.first : 0.0f;
      right = exists ? parts.second : 0.0f;
      if (is_edge && exists) border[frame] = right;
      here.advance();
    }
  }
}

template <bool kMirrored>
__device__ void spread_to(const TransducerLattice& a, const Shape& shape, int n) {
  __shared__ float edges[2][kMostThreads / kWarp];
  LeftNeighbour<float> neighbour(edges);
  for (int left = 0; left < shape.states(); left += blockDim.x) {
    spread_strip<kMirrored>(a, shape, n, left, neighbour);
    __syncthreads();
  }
}

__global__ void __launch_bounds__(kMostThreads, 1) spread(const TransducerLattice a) {
  const int n = blockIdx.x;
  const Shape shape = shape_of(a, n);
  if (shape.frames == 0 || is_too_long(a, shape)) return;
  if (blockIdx.y == 0) {
    spread_to<true>(a, shape, n);
  } else {
    spread_to<false>(a, shape, n);
  }
}

}  // namespace
}  // namespace effasr

extern "C" int64_t transducer_lattice_workspace(const TransducerLattice* lattice) {
  return lattice->sequences * effasr::room(*lattice) * static_cast<int64_t>(sizeof(double));
}

extern "C" int transducer_lattice_cuda(const TransducerLattice* lattice, void* stream) {
  using namespace effasr;
  if (lattice->sequences == 0) return cudaSuccess;
  const unsigned sequences = lattice->sequences;
  const int threads = block_size(lattice->max_labels + 1, lattice->most_threads);
  const bool keeps = lattice->occ_blank != nullptr;
  launch(keeps ? sweep<true> : sweep<false>, dim3(sequences, 2), threads, stream, *lattice);
  launch(join, dim3(sequences), kWarp, stream, *lattice);
  if (keeps) launch(spread, dim3(sequences, 2), threads, stream, *lattice);
  return cudaGetLastError();
}
