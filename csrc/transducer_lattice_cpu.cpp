// The transducer lattice on CPUs: a forward pass over anti-diagonals that stores fractions, and a
// backward pass.
//
// Loops over a diagonal access contiguous arrays, so that compilers vectorize them; a diagonal of
// the planes is gathered before and scattered after. The fractions of a sequence are stored in the
// plane that later holds the occupancies of its labels.

#include "lattice.h"
#include "lattice_step.h"
#include "parallel.h"

namespace effasr {
namespace {

struct Shape {
  int frames, labels;

  int states() const { return labels + 1; }
  int diagonals() const { return frames + labels; }
};

struct Diagonal {
  std::vector<double> down, right;  // masses that arrive over a blank, and over a label
  void resize(int states) {
    down.assign(states + 1, kNothing);
    right.assign(states + 1, kNothing);
  }
};

struct Scratch {
  Diagonal here, next;
  std::vector<float> blank, label, fraction, from_blank, from_label;
};

// Nodes of an anti-diagonal, from column `low` to `high`; column u is frame `diagonal - u`.
struct Nodes {
  int low, high;
  int64_t first, stride;

  Nodes(const Shape& shape, int diagonal)
      : low(std::max(0, diagonal - shape.frames + 1)), high(std::min(shape.labels, diagonal)) {
    first = static_cast<int64_t>(diagonal) * shape.states();
    stride = 1 - static_cast<int64_t>(shape.states());
  }

  int64_t operator[](int u) const { return first + u * stride; }
};

// Forward step from the masses that arrive at a diagonal to those that arrive at the next. Pointers
// do not overlap.
EFFASR_FOR_WIDE_VECTORS void advance(const float* __restrict blank, const float* __restrict label,
                                     const double* __restrict down,
                                     const double* __restrict right,
                                     double* __restrict next_down, double* __restrict next_right,
                                     float* __restrict fraction, int low, int high) {
  for (int u = low; u <= high; ++u) {
    const Sum sum = add(down[u], right[u]);
    fraction[u] = sum.fraction;
    next_down[u] = sum.mass + weight(blank[u]);
    next_right[u + 1] = sum.mass + weight(label[u]);
  }
}

// Backward step of a diagonal; divides the occupancy of a node among its predecessors.
EFFASR_FOR_WIDE_VECTORS void retreat(const float* __restrict from_blank,
                                     const float* __restrict from_label,
                                     const float* __restrict fraction, float* __restrict blank,
                                     float* __restrict label, int low, int high) {
  for (int u = low; u <= high; ++u) {
    const Parts parts = split(from_blank[u] + from_label[u], fraction[u]);
    blank[u] = parts.first;
    label[u] = parts.second;
  }
}

// Returns the log-likelihood to base 2 and stores the fractions.
double sweep(const TransducerLattice& a, const Shape& shape, int64_t first, Scratch& s) {
  s.here.resize(shape.states());
  s.next.resize(shape.states());
  for (auto* v : {&s.blank, &s.label, &s.fraction}) v->resize(shape.states());
  s.here.down[0] = 0.0;
  for (int d = 0; d < shape.diagonals(); ++d) {
    const Nodes nodes(shape, d);
    for (int u = nodes.low; u <= nodes.high; ++u) {
      s.blank[u] = a.log_blank[first + nodes[u]];
      s.label[u] = u < shape.labels ? a.log_label[first + nodes[u]] : -HUGE_VALF;
    }
    advance(s.blank.data(), s.label.data(), s.here.down.data(), s.here.right.data(),
            s.next.down.data(), s.next.right.data(), s.fraction.data(), nodes.low, nodes.high);
    // The next diagonal has one more column, at which no blank arrives.
    s.next.down[nodes.high + 1] = kNothing;
    if (a.occ_label != nullptr) {
      for (int u = nodes.low; u <= nodes.high; ++u) {
        a.occ_label[first + nodes[u]] = s.fraction[u];
      }
    }
    std::swap(s.here, s.next);
  }
  return s.here.down[shape.labels];
}

void spread(const TransducerLattice& a, const Shape& shape, int64_t first, float reached,
            Scratch& s) {
  // Labels go to the column on the left, so `left` is read with an offset of one.
  std::vector<float>&down = s.from_blank, &left = s.from_label;
  down.assign(shape.states() + 1, 0.0f);
  left.assign(shape.states() + 1, 0.0f);
  down[shape.labels] = reached;
  for (int d = shape.diagonals() - 1; d >= 0; --d) {
    const Nodes nodes(shape, d);
    for (int u = nodes.low; u <= nodes.high; ++u) {
      const int64_t node = first + nodes[u];
      s.fraction[u] = a.occ_label[node];
      a.occ_blank[node] = down[u];
      a.occ_label[node] = left[u + 1];
    }
    retreat(down.data(), left.data() + 1, s.fraction.data(), s.blank.data(), s.label.data(),
            nodes.low, nodes.high);
    std::copy(s.blank.begin() + nodes.low, s.blank.begin() + nodes.high + 1,
              down.begin() + nodes.low);
    std::copy(s.label.begin() + nodes.low, s.label.begin() + nodes.high + 1,
              left.begin() + nodes.low);
  }
}

void run(const TransducerLattice& a, int n, Scratch& scratch) {
  const Shape shape = {a.cu_frames[n + 1] - a.cu_frames[n], a.cu_labels[n + 1] - a.cu_labels[n]};
  if (shape.frames == 0) {
    a.log_likelihood[n] = log_likelihood_of_no_frames(shape.labels);
    return;
  }
  const int64_t first = a.first_nodes[n];
  a.log_likelihood[n] = log_likelihood_of(sweep(a, shape, first, scratch));
  if (a.occ_blank == nullptr) return;
  const double total = a.log_likelihood[n];
  // NaN stays NaN.
  const float reached = total == -HUGE_VAL ? 0.0f : std::isnan(total) ? NAN : 1.0f;
  spread(a, shape, first, reached, scratch);
}

}  // namespace
}  // namespace effasr

extern "C" int transducer_lattice_cpu(const TransducerLattice* lattice, int threads) {
  using namespace effasr;
  return for_each_sequence<Scratch>(lattice->sequences, threads, [&](Scratch& scratch, int n) {
    run(*lattice, n, scratch);
  });
}
