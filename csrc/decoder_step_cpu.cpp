// A step of a Transformer decoder on CPUs, for several instruction sets.
//
// A step of a small decoder has about 20 operations per layer, each of which takes less time than
// its dispatch in a framework; here they are one call. Products load weights in panels of columns,
// once for all rows, and sum in the order of the inner dimension for any number of rows.

#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "attention/work.h"
#include "decoder/team.h"
#include "decoder_step.h"
#include "machine.h"

#define EFFASR_FUNCTIONS "decoder/instructions.h"
#include "each_instruction_set.h"

namespace effasr {
namespace {

// Returns the active rows; sets `wrong_row`.
std::vector<int> active_rows(const DecoderWeights& w, DecoderStep& step) {
  std::vector<int> rows;
  step.wrong_row = -1;
  for (int r = 0; r < step.rows; ++r) {
    if (step.active[r] == 0) continue;
    const bool has_token = 0 <= step.tokens[r] && step.tokens[r] < w.vocabulary;
    const bool has_place = 0 <= step.positions[r] && step.positions[r] < step.self.room;
    const int64_t frames = step.frames[r / step.hypotheses];
    if (!has_token || !has_place || frames < 0 || frames > step.cross.room) step.wrong_row = r;
    rows.push_back(r);
  }
  return rows;
}

}  // namespace
}  // namespace effasr

extern "C" int decoder_step_cpu(const DecoderWeights* weights, DecoderStep* step, int threads) try {
  using namespace effasr;
  const std::vector<int> rows = active_rows(*weights, *step);
  if (step->wrong_row >= 0) return 0;
  std::memset(step->out, 0, step->rows * weights->width * sizeof(float));
  if (rows.empty()) return 0;
  return call_for(step->instructions, EFFASR_EACH(decoder_step), *weights, *step, rows, threads);
} catch (const std::bad_alloc&) {
  return 1;
}

extern "C" int largest_logit_cpu(const LargestLogit* request, int threads) {
  using namespace effasr;
  return call_for(request->instructions, EFFASR_EACH(largest_logit), *request, threads);
}
