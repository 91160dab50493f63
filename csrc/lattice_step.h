// The arithmetic of one step of a lattice.
//
// Masses are logarithms to base 2 in double; exponentials and logarithms are computed in float, and
// only of differences. The error of a step, about 1e-7, therefore does not grow with the mass,
// which falls by a few bits per step and differs greatly between the nodes of a diagonal.
//
// Each sum also returns the fraction of its smaller term: the probability of a predecessor, given
// the node of a path. The backward pass needs only these fractions: it multiplies numbers in
// [0, 1/2], without exponentials, infinities or differences of large numbers.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#define EFFASR_INLINE inline __attribute__((always_inline))

namespace effasr {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kLn2 = 0.6931471805599453;
// Logarithm of zero mass; finite, because the difference of two infinities is NaN.
constexpr double kNothing = -1e30;

// 2^x for x <= 0.
EFFASR_INLINE float exp2_of(float x) {
  // Plain arithmetic, because compilers do not vectorize calls of the math library.
  const float bounded = x < -126.0f ? -126.0f : x;
  const float whole = (bounded + 12582912.0f) - 12582912.0f;  // rounds: 1.5 * 2^23
  const float f = bounded - whole;
  float p = 1.5478022e-4f;
  p = p * f + 1.34004315e-3f;
  p = p * f + 9.61799454e-3f;
  p = p * f + 5.55032715e-2f;
  p = p * f + 2.40226522e-1f;
  p = p * f + 6.93147182e-1f;
  p = p * f + 1.0f;
  const int32_t bits = (static_cast<int32_t>(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -126.0f ? 0.0f : p * scale;
}

// log2(1 + x) for x in [0, 1] with error 2e-7, by a polynomial, which needs no special cases.
EFFASR_INLINE float log2_of_one_and(float x) {
  const float x2 = x * x, x4 = x2 * x2;
  const float low = (1.44268990f + -0.721165776f * x) + (0.478683680f + -0.347301066f * x) * x2;
  const float high =
      (0.241864711f + -0.137521267f * x) + (0.0520589463f + -0.00930914842f * x) * x2;
  return x * (low + high * x4);
}

// Converts a log-probability to a mass.
EFFASR_INLINE double weight(double log_probability) {
  const double mass = log_probability * kLog2E;
  return mass < kNothing ? kNothing : mass;  // NaN stays
}

struct Sum {
  double mass;
  float fraction;  // fraction of the smaller term; negative if that is the first
};

EFFASR_INLINE Sum add(double first, double second) {
  const float lead = static_cast<float>(first - second);
  const float ratio = exp2_of(lead < 0.0f ? lead : -lead);
  const float fraction = ratio / (1.0f + ratio);
  const double greater = first < second ? second : first;
  return {greater + static_cast<double>(log2_of_one_and(ratio)),
          lead < 0.0f ? -fraction : fraction};
}

struct Parts {
  float first, second;
};

// Divides a probability by the fractions of a sum. The parts add up to the probability.
EFFASR_INLINE Parts split(float probability, float fraction) {
  int32_t bits;
  std::memcpy(&bits, &fraction, sizeof bits);
  const float lesser = probability * (bits < 0 ? -fraction : fraction);
  const float greater = probability - lesser;
  return bits < 0 ? Parts{lesser, greater} : Parts{greater, lesser};
}

// Converts a total mass to a natural logarithm; -inf if no path exists.
EFFASR_INLINE double log_likelihood_of(double mass) {
  return mass < 0.5 * kNothing ? -HUGE_VAL : mass * kLn2;
}

// Log-likelihood of a sequence without frames, which cannot emit labels.
EFFASR_INLINE double log_likelihood_of_no_frames(int labels) {
  return labels == 0 ? 0.0 : -HUGE_VAL;
}

}  // namespace effasr
