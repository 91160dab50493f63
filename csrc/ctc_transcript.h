// The states of a CTC lattice, as a walk over its frames meets them.
//
// Before each label, and after the last, lies an optional blank: place j has the blank before label
// j, and label j. A walk goes from the first frame and place to the last or, mirrored, the other
// way; frames, blanks and labels then count from the end, and all else is the same.

#pragma once

#include "lattice.h"
#include "lattice_step.h"

namespace effasr {

struct Transcript {
  int64_t first_frame, first_label;
  int frames, labels;

  EFFASR_BOTH Transcript(const CtcLattice& a, int n)
      : first_frame(a.cu_frames[n]),
        first_label(a.cu_targets[n]),
        frames(a.cu_frames[n + 1] - a.cu_frames[n]),
        labels(a.cu_targets[n + 1] - a.cu_targets[n]) {}

  // Walks from both ends meet before this frame.
  EFFASR_BOTH int cut() const { return frames / 2; }
  EFFASR_BOTH int64_t row(bool mirrored, int frame) const {
    return first_frame + (mirrored ? frames - 1 - frame : frame);
  }
  EFFASR_BOTH int blank(bool mirrored, int place) const {
    return mirrored ? labels - place : place;
  }
  EFFASR_BOTH int label(bool mirrored, int place) const {
    return mirrored ? labels - 1 - place : place;
  }
};

EFFASR_BOTH int64_t target(const CtcLattice& a, int64_t index) {
  return a.wide_targets ? static_cast<const int64_t*>(a.targets)[index]
                        : static_cast<const int32_t*>(a.targets)[index];
}

// Whether label j of a walk repeats the one before it, from which a blank must then part it.
EFFASR_BOTH bool repeats(const CtcLattice& a, const Transcript& y, bool mirrored, int place) {
  if (place <= 0 || place >= y.labels) return false;
  return target(a, y.first_label + y.label(mirrored, place)) ==
         target(a, y.first_label + y.label(mirrored, place - 1));
}

// What a frame's score adds to a mass.
EFFASR_BOTH double emission(float score, float log_normalizer) {
  return weight(static_cast<double>(score) - static_cast<double>(log_normalizer));
}

// The masses, or probabilities, of the alignments that are in a place.
template <class Value>
struct Place {
  Value blank, label;
};

// The fractions in which a blank and the label before it, and a label and what came to it, merged.
struct Merged {
  float moved, stayed;
};

// From one frame to the next, but for the scores: masses, and how they came together.
EFFASR_BOTH Merged merge(Place<double>& here, double label_before, bool repeats) {
  const Sum advanced = add(label_before, here.blank);
  const Sum label = add(here.label, repeats ? here.blank : advanced.mass);
  here = {advanced.mass, label.mass};
  return {advanced.fraction, label.fraction};
}

// The same frame backwards. Returns the probability that goes to the label before.
EFFASR_BOTH float divide(Place<float>& here, const Merged& merged, bool repeats) {
  const Parts label = split(here.label, merged.stayed);
  const Parts blank = split(repeats ? here.blank : here.blank + label.second, merged.moved);
  here = {repeats ? blank.second + label.second : blank.second, label.first};
  return blank.first;
}

}  // namespace effasr
