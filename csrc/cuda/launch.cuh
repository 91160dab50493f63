// The C functions that launch a kernel for a dtype and head width: kernel<T, D>(AttentionCall).
#pragma once

#include "scores.cuh"

namespace effasr {

struct Launch {
  const AttentionCall* call;
  unsigned programs;  // along the first axis; heads are along the second
  int shared_bytes;
  void* stream;

  int run(void (*kernel)(AttentionCall)) const {
    const cudaError_t error = cudaFuncSetAttribute(
        kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
    if (error != cudaSuccess) return error;
    const dim3 grid(programs, call->heads);
    kernel<<<grid, kThreads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(*call);
    return cudaGetLastError();
  }
};

}  // namespace effasr

// int effasr_NAME(call, is_bfloat16, width, programs, shared_bytes, stream): 0, or an error of CUDA.
#define EFFASR_LAUNCHER(name)                                                                             \
  extern "C" int effasr_##name(                                                                           \
      const effasr::AttentionCall* call, int is_bfloat16, int width, unsigned programs, int shared_bytes, \
      void* stream) {                                                                                     \
    using namespace effasr;                                                                               \
    const Launch launch{call, programs, shared_bytes, stream};                                            \
    if (width == 64) return launch.run(is_bfloat16 ? name<BFloat16, 64> : name<Float16, 64>);             \
    return launch.run(is_bfloat16 ? name<BFloat16, 128> : name<Float16, 128>);                            \
  }
