// All code that is compiled once for each instruction set, in separate namespaces. It has no
// include guard, because decoder_step_cpu.cpp includes it several times.

namespace effasr {
namespace EFFASR_INSTRUCTIONS {
namespace {

#include "../attention/vector.h"
#include "../attention/gemm_tile.h"
#include "rows.h"
#include "attend.h"
#include "step.h"

}  // namespace

int decoder_step(const DecoderWeights& w, DecoderStep& step, const std::vector<int>& rows,
                 int threads) {
  return run_step(w, step, rows, threads);
}

int largest_logit(const LargestLogit& request, int threads) { return run_largest(request, threads); }

}  // namespace EFFASR_INSTRUCTIONS
}  // namespace effasr
