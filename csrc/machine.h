// The instruction sets that kernels are compiled for, and the widest that the CPU supports.
//
// The source file of a kernel includes its code once for each set, under a pragma unless the set is
// that of the command line. Pragmas do not change macros such as __AVX2__.

#pragma once

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

// Values of `instructions` in the structures; 0 selects the widest.
enum Instructions { kBest = 0, kBase = 1, kWithAvx2 = 2, kWithAvx512 = 3 };

inline int widest_instructions() {
#ifdef EFFASR_HAS_WIDER
  const auto has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const auto has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return has_avx2 && has_avx512 ? kWithAvx512 : has_avx2 ? kWithAvx2 : kBase;
#else
  return kBase;
#endif
}

// Returns the instruction set to use, or 0 if the CPU does not support the requested one.
inline int choose_instructions(int asked) {
  const int best = widest_instructions();
  if (asked == kBest) return best;
  return asked <= best ? asked : 0;
}

}  // namespace effasr
