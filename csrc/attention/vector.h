// Vectors of one instruction set. Included once for each set, inside a namespace, so without a
// guard.

constexpr int kLanes = EFFASR_LANES;
// Rows, and vectors per row, of the block of a product that stays in registers.
constexpr int kTileRows = kLanes == 16 ? 8 : 6;
#ifdef __aarch64__
constexpr int kTileColumns = 4;
#else
constexpr int kTileColumns = 2;
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
// The same in memory, at any address.
typedef float Unaligned __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Unaligned*>(from); }
inline void store(float* to, Vec x) { *reinterpret_cast<Unaligned*>(to) = x; }
inline Vec splat(float x) { return Vec{} + x; }
inline Vec larger(Vec x, Vec y) { return x > y ? x : y; }

inline int to_lanes(int n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline Ints lane_numbers() {
  Ints lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}

// 2^x = power + power * excess; the excess is accurate also for x near zero.
struct PowerOfTwo {
  Vec power, excess;
};

// For x <= 0. Below -126.5 the power is zero, and so are products with it; NaN stays NaN.
inline PowerOfTwo split_power_of_two(Vec x) {
  x = x < -127.0f ? splat(-127.0f) : x;
  // The sum's last bits are x rounded to an integer.
  const Vec shifted = x + 12582912.0f;
  const Vec r = x - (shifted - 12582912.0f);
  // (2^r - 1) / r on [-1/2, 1/2] by the minimax polynomial of degree 5, with error 1e-8.
  Vec y = 1.5403512e-4f * r + 1.3390735e-3f;
  y = y * r + 9.6182376e-3f;
  y = y * r + 5.5503573e-2f;
  y = y * r + 2.4022649e-1f;
  y = y * r + 6.9314718e-1f;
  const Ints bits = ((Ints)shifted << 23) + 0x3f800000;
  return {(Vec)bits, y * r};
}

inline Vec power_of_two(Vec x) {
  const PowerOfTwo y = split_power_of_two(x);
  return y.power * y.excess + y.power;
}

// 1 - 2^x for x <= 0, accurate also near zero.
inline Vec one_minus_power_of_two(Vec x) {
  const PowerOfTwo y = split_power_of_two(x);
  return (1.0f - y.power) - y.power * y.excess;
}

template <int... I>
inline void interleave(Vec a, Vec b, Vec* low, Vec* high, std::integer_sequence<int, I...>) {
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define EFFASR_SHUFFLES
#endif
#endif
#ifdef EFFASR_SHUFFLES
  *low = __builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes)...);
  *high = __builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes + kLanes / 2)...);
#else
  *low = Vec{(I % 2 ? b : a)[I / 2]...};
  *high = Vec{(I % 2 ? b : a)[I / 2 + kLanes / 2]...};
#endif
}

// Transposes kLanes x kLanes elements: to[c][r] = from[r][c].
inline void transpose_square(const float* from, int64_t from_pitch, float* to, int64_t to_pitch) {
  Vec x[kLanes], y[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = load(from + i * from_pitch);
  // Each round doubles the number of interleaved rows.
  for (int width = 1; width < kLanes; width *= 2) {
    for (int i = 0; i < kLanes / 2; ++i) {
      interleave(x[i], x[i + kLanes / 2], &y[2 * i], &y[2 * i + 1],
                 std::make_integer_sequence<int, kLanes>{});
    }
    for (int i = 0; i < kLanes; ++i) x[i] = y[i];
  }
  for (int i = 0; i < kLanes; ++i) store(to + i * to_pitch, x[i]);
}

// to[c][r] = from[r][c]; both counts are multiples of kLanes.
inline void transpose(int rows, int columns, const float* from, int64_t from_pitch, float* to,
                      int64_t to_pitch) {
  for (int r = 0; r < rows; r += kLanes) {
    for (int c = 0; c < columns; c += kLanes) {
      transpose_square(from + r * from_pitch + c, from_pitch, to + c * to_pitch + r, to_pitch);
    }
  }
}
