// As much of CUDA as csrc/*.cu need, on one thread of a CPU: kernels run as they are written.
//
// Each thread of a block is a fibre that runs until it waits: for its block at a barrier, or for
// its warp at a shuffle. Warps run one by one, each as far as it can, and which is next is drawn
// from EMULATOR_SEED, as are the orders of lanes and blocks: a barrier too few shows as a wrong
// result, or one that depends on the seed. A barrier that some never reach ends the process with a
// message.

#pragma once

#define EFFASR_EMULATED

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

using cudaError_t = int;
using cudaStream_t = struct Stream*;
constexpr cudaError_t cudaSuccess = 0;
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr unsigned kWarp = 32;
constexpr size_t kStack = 1 << 16;

// Threads that wait for each other.
struct Group {
  unsigned members = 0, arrived = 0;
  unsigned long round = 0;
};

struct Fibre {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[kStack]};
  Group* waits_for = nullptr;
  unsigned long round = 0;
  bool done = false;
};

struct Warp : Group {
  alignas(8) char values[kWarp][8];
};

inline std::mt19937 random_order{0};
inline ucontext_t scheduler;
inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline Group block;
inline const std::function<void()>* body;

inline void wait(Group& group) {
  Fibre& self = fibres[threadIdx.x];
  if (++group.arrived == group.members) {
    group.arrived = 0;
    ++group.round;
    return;
  }
  self.waits_for = &group;
  self.round = group.round;
  swapcontext(&self.context, &scheduler);
}

inline void leave(Group& group) {
  if (--group.members > 0 && group.arrived == group.members) {
    group.arrived = 0;
    ++group.round;
  }
}

inline void begin() {
  (*body)();
  fibres[threadIdx.x].done = true;
  leave(block);
  leave(warps[threadIdx.x / kWarp]);
}

// Each thread of a warp that waits for nothing, until it does. Returns how many ran.
inline unsigned run_warp(unsigned warp, unsigned& ended) {
  unsigned lanes[kWarp], ran = 0;
  for (unsigned i = 0; i < kWarp; ++i) lanes[i] = warp * kWarp + i;
  std::shuffle(lanes, lanes + kWarp, random_order);
  for (unsigned i : lanes) {
    if (i >= fibres.size()) continue;
    Fibre& fibre = fibres[i];
    if (fibre.done || (fibre.waits_for && fibre.waits_for->round == fibre.round)) continue;
    fibre.waits_for = nullptr;
    threadIdx = dim3(i, 0, 0);
    swapcontext(&scheduler, &fibre.context);
    ++ran;
    ended += fibre.done;
  }
  return ran;
}

inline void run_block(const std::function<void()>& kernel) {
  const unsigned threads = blockDim.x;
  body = &kernel;
  fibres = std::vector<Fibre>(threads);
  warps = std::vector<Warp>((threads + kWarp - 1) / kWarp);
  block = Group{threads};
  for (unsigned i = 0; i < threads; ++i) {
    ++warps[i / kWarp].members;
    Fibre& fibre = fibres[i];
    getcontext(&fibre.context);
    fibre.context.uc_stack.ss_sp = fibre.stack.get();
    fibre.context.uc_stack.ss_size = kStack;
    fibre.context.uc_link = &scheduler;
    makecontext(&fibre.context, begin, 0);
  }
  std::vector<unsigned> order(warps.size());
  for (unsigned w = 0; w < order.size(); ++w) order[w] = w;
  for (unsigned left = threads; left > 0;) {
    // One warp runs as far ahead of the others as it can, then the next.
    std::shuffle(order.begin(), order.end(), random_order);
    bool moved = false;
    for (unsigned w : order) {
      unsigned ended = 0;
      while (run_warp(w, ended) > 0) moved = true;
      left -= ended;
      if (moved) break;
    }
    if (!moved && left > 0) {
      std::fprintf(stderr, "emulator: %u threads wait for others that never come\n", left);
      std::abort();
    }
  }
}

template <class Value>
Value exchange(Value value, int from) {
  static_assert(sizeof(Value) <= 8);
  Warp& warp = warps[threadIdx.x / kWarp];
  if (warp.members != kWarp) {
    std::fprintf(stderr, "emulator: a shuffle with threads of the warp missing\n");
    std::abort();
  }
  std::memcpy(warp.values[threadIdx.x % kWarp], &value, sizeof value);
  wait(warp);
  std::memcpy(&value, warp.values[from], sizeof value);
  wait(warp);
  return value;
}

}  // namespace emulator

inline void __syncthreads() { emulator::wait(emulator::block); }

template <class Value>
Value __shfl_up_sync(unsigned, Value value, unsigned delta) {
  const int lane = threadIdx.x % emulator::kWarp, from = lane - static_cast<int>(delta);
  return emulator::exchange(value, from < 0 ? lane : from);
}

template <class Value>
Value __shfl_xor_sync(unsigned, Value value, int mask) {
  return emulator::exchange(value, static_cast<int>(threadIdx.x % emulator::kWarp) ^ mask);
}

inline float __fdividef(float a, float b) { return a / b; }

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  const char* seed = std::getenv("EMULATOR_SEED");
  emulator::random_order.seed(seed ? std::atoi(seed) : 0);
  gridDim = config->gridDim;
  blockDim = config->blockDim;
  std::vector<dim3> blocks;
  for (unsigned y = 0; y < gridDim.y; ++y)
    for (unsigned x = 0; x < gridDim.x; ++x) blocks.emplace_back(x, y);
  std::shuffle(blocks.begin(), blocks.end(), emulator::random_order);
  for (const dim3& each : blocks) {
    blockIdx = each;
    emulator::run_block([&] { kernel(arguments...); });
  }
  return cudaSuccess;
}
