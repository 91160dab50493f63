// The instruction sets that kernels are compiled for, and the widest that the CPU supports.
//
// The source file of a kernel includes its code once for each set, under a pragma unless the set is
// that of the command line. Pragmas do not change macros such as __AVX2__.

#pragma once

#include <new>
#include <utility>

#include "interface.h"

#if defined(__AVX512F__)
#define EFFASR_BASE_LANES 16
#elif defined(__AVX2__)
#define EFFASR_BASE_LANES 8
#else
#define EFFASR_BASE_LANES 4
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define EFFASR_HAS_WIDER
#endif

namespace effasr {

inline int widest_instructions() {
#ifdef EFFASR_HAS_WIDER
  const auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const auto has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return has_avx2 && has_avx512 ? kAvx512 : has_avx2 ? kAvx2 : kBaseInstructions;
#else
  return kBaseInstructions;
#endif
}

// Calls a function, given for each instruction set from the base on, for the requested set. Returns
// its result, 1 if memory could not be allocated, and 2 if the CPU does not support the set.
template <class... Parameters, class... Arguments>
int call_for(int requested, int (*const (&functions)[3])(Parameters...), Arguments&&... arguments) {
  const int widest = widest_instructions();
  const int chosen = requested == kBestInstructions ? widest : requested;
  if (chosen < kBaseInstructions || chosen > widest) return 2;
  try {
    return functions[chosen - kBaseInstructions](std::forward<Arguments>(arguments)...);
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace effasr
