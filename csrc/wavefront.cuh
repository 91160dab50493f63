// How the threads of a block hand a value to the right, from column to column of a lattice.
//
// A lattice wider than a block is cut into strips of columns, walked from left to right; what
// leaves a strip lies in global memory, an element for each step, until the next strip takes it.

#pragma once

#include <cuda_runtime.h>

namespace effasr {

constexpr int kWarp = 32;
// Of a block: with more, a thread would have too few registers.
constexpr int kMostThreads = 512;
// Steps of which loads are under way at a time.
constexpr int kAhead = 4;

// `edges` is shared memory: the last values of all warps, twice, so that one barrier a step is
// enough.
template <class Value>
class LeftNeighbour {
 public:
  __device__ explicit LeftNeighbour(Value (*edges)[kMostThreads / kWarp]) : edges_(edges) {}

  // The value of the thread to the left; of the first thread, `outside`. A barrier of the block.
  __device__ Value take(Value value, Value outside) {
    const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    Value taken = __shfl_up_sync(0xffffffffu, value, 1);
    if (lane == kWarp - 1) edges_[parity_][warp] = value;
    __syncthreads();
    if (lane == 0) taken = warp == 0 ? outside : edges_[parity_][warp - 1];
    parity_ ^= 1;
    return taken;
  }

 private:
  Value (*edges_)[kMostThreads / kWarp];
  int parity_ = 0;
};

// Over a warp; every lane gets the same bits.
__device__ __forceinline__ double warp_max(double value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmax(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

template <class Value>
__device__ __forceinline__ Value warp_sum(Value value) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value += __shfl_xor_sync(0xffffffffu, value, step);
  }
  return value;
}

// Threads for `columns`: whole warps.
inline int block_size(int columns, int most_threads) {
  const int most = most_threads > 0 && most_threads < kMostThreads ? most_threads : kMostThreads;
  const int wanted = columns < most ? columns : most;
  return (wanted + kWarp - 1) / kWarp * kWarp;
}

template <class... Parameters, class... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, void* stream,
            Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace effasr
