// The CTC lattice on CPUs: a forward pass over frames that stores fractions, and a backward pass.
// Loops over places access contiguous arrays, so that compilers vectorize them.
//
// An optional blank precedes each label and follows the last: place j is label j and the blank
// before it.

#include "lattice.h"
#include "lattice_step.h"
#include "parallel.h"

namespace effasr {
namespace {

struct Transcript {
  int64_t first_frame, first_label;
  int frames, labels;

  Transcript(const CtcLattice& a, int n)
      : first_frame(a.cu_frames[n]),
        first_label(a.cu_targets[n]),
        frames(a.cu_frames[n + 1] - a.cu_frames[n]),
        labels(a.cu_targets[n + 1] - a.cu_targets[n]) {}
};

int64_t target(const CtcLattice& a, int64_t index) {
  return a.wide_targets ? static_cast<const int64_t*>(a.targets)[index]
                        : static_cast<const int32_t*>(a.targets)[index];
}

// Whether the label of a place repeats the label before; a blank must then separate them.
bool repeats(const CtcLattice& a, const Transcript& y, int place) {
  if (place <= 0 || place >= y.labels) return false;
  return target(a, y.first_label + place) == target(a, y.first_label + place - 1);
}

// Log-probability of a score, added to the masses.
EFFASR_INLINE double emission(float score, float log_normalizer) {
  return weight(static_cast<double>(score) - static_cast<double>(log_normalizer));
}

// Masses or probabilities of the alignments that are in the two states of a place.
template <class Value>
struct Place {
  Value blank, label;
};

// Fractions of the two sums of a place: blank and previous label; label and its predecessors.
struct Merged {
  float moved, stayed;
};

// Updates the masses of a place for the next frame, without the scores; returns the fractions.
EFFASR_INLINE Merged merge(Place<double>& here, double label_before, bool repeats) {
  const Sum advanced = add(label_before, here.blank);
  const Sum label = add(here.label, repeats ? here.blank : advanced.mass);
  here = {advanced.mass, label.mass};
  return {advanced.fraction, label.fraction};
}

// The backward of `merge`. Returns the probability that goes to the label before.
EFFASR_INLINE float divide(Place<float>& here, const Merged& merged, bool repeats) {
  const Parts label = split(here.label, merged.stayed);
  const Parts blank = split(repeats ? here.blank : here.blank + label.second, merged.moved);
  here = {repeats ? blank.second + label.second : blank.second, label.first};
  return blank.first;
}

struct Scratch {
  std::vector<double> blank, label, label_before;
  std::vector<float> blank_part, label_part, moves, kept;
  std::vector<int> repeated;
};

// Forward step of a frame; element j of `label_before` is label j - 1. Pointers do not overlap.
EFFASR_FOR_WIDE_VECTORS void advance(double* __restrict blank, double* __restrict label,
                                     const double* __restrict label_before,
                                     const int* __restrict repeated,
                                     const float* __restrict scores, float blank_score,
                                     float log_normalizer, float* __restrict moved,
                                     float* __restrict stayed, int labels) {
  const double of_blank = emission(blank_score, log_normalizer);
  for (int j = 0; j < labels; ++j) {
    Place<double> here = {blank[j], label[j]};
    const Merged merged = merge(here, label_before[j], repeated[j] != 0);
    blank[j] = here.blank + of_blank;
    label[j] = here.label + emission(scores[j], log_normalizer);
    moved[j] = merged.moved;
    stayed[j] = merged.stayed;
  }
  // The last place has only a blank.
  const Sum last = add(label_before[labels], blank[labels]);
  blank[labels] = last.mass + of_blank;
  moved[labels] = last.fraction;
}

// Backward step of a frame; `moves` receives the probabilities that go to the previous label.
EFFASR_FOR_WIDE_VECTORS void retreat(float* __restrict blank, float* __restrict label,
                                     const int* __restrict repeated,
                                     const float* __restrict moved,
                                     const float* __restrict stayed, float* __restrict moves,
                                     int labels) {
  for (int j = 0; j < labels; ++j) {
    Place<float> here = {blank[j], label[j]};
    moves[j] = divide(here, {moved[j], stayed[j]}, repeated[j] != 0);
    blank[j] = here.blank;
    label[j] = here.label;
  }
  const Parts last = split(blank[labels], moved[labels]);
  moves[labels] = last.first;
  blank[labels] = last.second;
}

// Returns the total mass and how it is divided between the last label and the last blank. Stores
// the fractions of the step to a frame in the rows of that frame.
Sum sweep(const CtcLattice& a, const Transcript& y, Scratch& s) {
  s.blank.assign(y.labels + 1, kNothing);
  s.label.assign(y.labels + 1, kNothing);
  s.label_before.assign(y.labels + 1, kNothing);
  for (auto* v : {&s.blank_part, &s.label_part, &s.moves}) v->resize(y.labels + 1);
  s.repeated.resize(y.labels + 1);
  for (int j = 0; j <= y.labels; ++j) s.repeated[j] = repeats(a, y, j);
  s.blank[0] = 0.0;
  for (int t = 0; t < y.frames; ++t) {
    const int64_t frame = y.first_frame + t, row = frame * a.columns;
    const float* scores = a.scores + row;
    std::copy(s.label.begin(), s.label.begin() + y.labels, s.label_before.begin() + 1);
    advance(s.blank.data(), s.label.data(), s.label_before.data(), s.repeated.data(), scores + 1,
            scores[0], a.log_normalizer ? a.log_normalizer[frame] : 0.0f,
            s.blank_part.data(), s.label_part.data(), y.labels);
    if (a.occupancies == nullptr) continue;
    std::copy(s.blank_part.begin(), s.blank_part.end(), a.shares + row);
    std::copy(s.label_part.begin(), s.label_part.begin() + y.labels, a.occupancies + row + 1);
  }
  return add(s.blank[y.labels], y.labels > 0 ? s.label[y.labels - 1] : kNothing);
}

void spread(const CtcLattice& a, const Transcript& y, float reached, float fraction, Scratch& s) {
  std::vector<float>&blank = s.blank_part, &label = s.label_part;
  std::fill(blank.begin(), blank.end(), 0.0f);
  std::fill(label.begin(), label.end(), 0.0f);
  const Parts ends = split(reached, fraction);
  blank[y.labels] = ends.first;
  if (y.labels > 0) label[y.labels - 1] = ends.second;
  for (int t = y.frames - 1; t >= 0; --t) {
    const int64_t row = (y.first_frame + t) * a.columns;
    float *moved = a.shares + row, *stayed = a.occupancies + row + 1;
    double blanks = 0.0;
    for (int j = 0; j <= y.labels; ++j) blanks += blank[j];
    s.kept.assign(label.begin(), label.begin() + y.labels);
    retreat(blank.data(), label.data(), s.repeated.data(), moved, stayed, s.moves.data(), y.labels);
    std::copy(s.kept.begin(), s.kept.end(), stayed);
    a.occupancies[row] = static_cast<float>(blanks);
    for (int j = 0; j < y.labels; ++j) label[j] += s.moves[j + 1];
  }
}

void run(const CtcLattice& a, int n, Scratch& scratch) {
  const Transcript y(a, n);
  if (y.frames == 0) {
    a.log_likelihood[n] = log_likelihood_of_no_frames(y.labels);
    return;
  }
  const Sum total = sweep(a, y, scratch);
  a.log_likelihood[n] = log_likelihood_of(total.mass);
  if (a.occupancies == nullptr) return;
  // NaN stays NaN.
  const double ll = a.log_likelihood[n];
  const float reached = ll == -HUGE_VAL ? 0.0f : std::isnan(ll) ? NAN : 1.0f;
  spread(a, y, reached, total.fraction, scratch);
}

}  // namespace
}  // namespace effasr

extern "C" int ctc_lattice_cpu(const CtcLattice* lattice, int threads) {
  using namespace effasr;
  return for_each_sequence<Scratch>(lattice->sequences, threads, [&](Scratch& scratch, int n) {
    run(*lattice, n, scratch);
  });
}
