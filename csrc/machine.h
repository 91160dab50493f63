// The instruction sets that kernels are compiled for, and the widest of them that the machine has.
//
// A kernel's file includes its code once for each set, under a pragma where the set is not that of
// the command line. Macros such as __AVX2__ are those of the command line, whatever a pragma says.

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

// As in the structures' `instructions`, where 0 takes the widest.
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

// The instructions to use, or 0 where the machine lacks what is asked for.
inline int choose_instructions(int asked) {
  const int best = widest_instructions();
  if (asked == kBest) return best;
  return asked <= best ? asked : 0;
}

}  // namespace effasr
