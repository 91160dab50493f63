// All code that is compiled once for each instruction set, in separate namespaces. It has no
// include guard, because attention_cpu.cpp includes it several times.

namespace effasr {
namespace EFFASR_INSTRUCTIONS {
namespace {

#include "vector.h"
#include "gemm_tile.h"
#include "panel.h"
#include "diagonals.h"
#include "scores.h"
#include "dropout.h"
#include "forward.h"
#include "backward.h"

}  // namespace

int forward(const PackedAttention& a, int threads) { return run_forward<Forward>(a, threads); }

int backward(const PackedAttention& a, const AttentionGradients& g, int threads) {
  return run_backward<Backward>(a, g, to_lanes(a.width), threads);
}

}  // namespace EFFASR_INSTRUCTIONS
}  // namespace effasr
