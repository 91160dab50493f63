// Compiles the functions of the file EFFASR_FUNCTIONS once for each set of instructions, each in a
// namespace of its own (`base`, `avx2`, `avx512`); machine.h chooses between them at run time. No
// guard: each source includes it once, after EFFASR_FUNCTIONS is defined.

#include "machine.h"

#define EFFASR_INSTRUCTIONS base
#define EFFASR_LANES EFFASR_BASE_LANES
#include EFFASR_FUNCTIONS
#undef EFFASR_INSTRUCTIONS
#undef EFFASR_LANES

#ifdef EFFASR_HAS_WIDER
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define EFFASR_INSTRUCTIONS avx2
#define EFFASR_LANES 8
#include EFFASR_FUNCTIONS
#undef EFFASR_INSTRUCTIONS
#undef EFFASR_LANES
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma")
#define EFFASR_INSTRUCTIONS avx512
#define EFFASR_LANES 16
#include EFFASR_FUNCTIONS
#undef EFFASR_INSTRUCTIONS
#undef EFFASR_LANES
#pragma GCC pop_options

#define EFFASR_EACH(function) {base::function, avx2::function, avx512::function}
#else
#define EFFASR_EACH(function) {base::function, base::function, base::function}
#endif
