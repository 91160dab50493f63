// Attention on CPUs, for several instruction sets.
//
// Queries are processed in panels, transposed so that each query is a lane, and keys in tiles.
// Scores, weights and their gradients are blocks [key][query]. The softmax therefore needs no sums
// across lanes, keys and values are read in place, and only panels are transposed.

#include <math.h>

#include <cstring>
#include <new>
#include <utility>

#include "attention.h"
#include "attention/tasks.h"
#include "attention/work.h"
#include "machine.h"

#define EFFASR_FUNCTIONS "attention/instructions.h"
#include "each_instruction_set.h"

extern "C" int attention_forward_cpu(const PackedAttention* attention, int threads) try {
  using namespace effasr;
  switch (choose_instructions(attention->instructions)) {
    case kBaseInstructions: return base::forward(*attention, threads);
#ifdef EFFASR_HAS_WIDER
    case kAvx2: return avx2::forward(*attention, threads);
    case kAvx512: return avx512::forward(*attention, threads);
#endif
    default: return 2;
  }
} catch (const std::bad_alloc&) {
  return 1;
}

extern "C" int attention_backward_cpu(const PackedAttention* attention,
                                      const AttentionGradients* gradients, int threads) try {
  using namespace effasr;
  switch (choose_instructions(attention->instructions)) {
    case kBaseInstructions: return base::backward(*attention, *gradients, threads);
#ifdef EFFASR_HAS_WIDER
    case kAvx2: return avx2::backward(*attention, *gradients, threads);
    case kAvx512: return avx512::backward(*attention, *gradients, threads);
#endif
    default: return 2;
  }
} catch (const std::bad_alloc&) {
  return 1;
}
