// Attention on CPUs, for several instruction sets.
//
// Queries are processed in panels, transposed so that each query is a lane, and keys in tiles.
// Scores, weights and their gradients are blocks [key][query]. The softmax therefore needs no sums
// across lanes, keys and values are read in place, and only panels are transposed.

#include <math.h>

#include <cstring>
#include <utility>

#include "attention.h"
#include "attention/tasks.h"
#include "attention/work.h"
#include "machine.h"

#define EFFASR_FUNCTIONS "attention/instructions.h"
#include "each_instruction_set.h"

extern "C" int attention_forward_cpu(const PackedAttention* attention, int threads) {
  using namespace effasr;
  return call_for(attention->instructions, EFFASR_EACH(forward), *attention, threads);
}

extern "C" int attention_backward_cpu(const PackedAttention* attention,
                                      const AttentionGradients* gradients, int threads) {
  using namespace effasr;
  return call_for(attention->instructions, EFFASR_EACH(backward), *attention, *gradients, threads);
}
