// The best monotone alignment of frames to tokens on CPUs, see effasr_kernels/best_alignment_loss.
// One bit of each pair of a frame and a token says where its best alignment comes from.

#include <cmath>
#include <vector>

#include "lattice.h"
#include "parallel.h"

namespace effasr {
namespace {

struct Scratch {
  std::vector<float> tokens, norms, scores;  // tokens by channel, (C, U)
  std::vector<double> reached, best;
  std::vector<bool> moves;
};

// Adds a channel of a frame to the scores of all tokens. Pointers do not overlap.
EFFASR_FOR_WIDE_VECTORS void add_products(float factor, const float* __restrict tokens,
                                          float* __restrict scores, int count) {
  for (int u = 0; u < count; ++u) scores[u] += factor * tokens[u];
}

void transpose(const float* text, int width, int count, Scratch& s) {
  s.tokens.resize(static_cast<size_t>(count) * width);
  s.norms.assign(count, 0.0f);
  for (int u = 0; u < count; ++u)
    for (int c = 0; c < width; ++c) {
      const float y = text[static_cast<size_t>(u) * width + c];
      s.tokens[static_cast<size_t>(c) * count + u] = y;
      s.norms[u] += y * y;
    }
}

void align(const BestAlignment& a, int n, Scratch& s) {
  const int64_t frame = a.cu_frames[n], token = a.cu_tokens[n];
  const int frames = a.cu_frames[n + 1] - a.cu_frames[n];
  const int tokens = a.cu_tokens[n + 1] - a.cu_tokens[n];
  if (tokens == 0) {
    std::fill(a.chosen + frame, a.chosen + frame + frames, int64_t{-1});
    return;
  }
  transpose(a.text + token * a.width, a.width, tokens, s);
  s.best.assign(tokens, 0.0);
  s.moves.assign(static_cast<size_t>(frames) * tokens, false);
  for (int t = 0; t < frames; ++t) {
    // The square of the frame is left out, as all alignments have it in common.
    const float* x = a.speech + (frame + t) * a.width;
    s.scores = s.norms;
    for (int c = 0; c < a.width; ++c)
      add_products(-2.0f * x[c], s.tokens.data() + static_cast<size_t>(c) * tokens,
                   s.scores.data(), tokens);
    double least = HUGE_VAL;
    for (int u = 0; u < tokens; ++u) {
      const double reached = s.best[u] + static_cast<double>(s.scores[u]);
      s.moves[static_cast<size_t>(t) * tokens + u] = least < reached;
      least = least < reached ? least : reached;
      s.best[u] = least;
    }
  }
  int last = tokens - 1;
  for (int t = frames - 1; t >= 0; --t) {
    while (s.moves[static_cast<size_t>(t) * tokens + last]) --last;
    a.chosen[frame + t] = token + last;
  }
}

}  // namespace
}  // namespace effasr

extern "C" int best_alignment_cpu(const BestAlignment* alignment, int threads) {
  using namespace effasr;
  return for_each_sequence<Scratch>(
      alignment->sequences, threads,
      [&](Scratch& scratch, int n) { align(*alignment, n, scratch); });
}
