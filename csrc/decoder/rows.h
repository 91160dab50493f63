// Products of a few rows with weights in panels, and operations on single rows. Included once for each
// instruction set.

constexpr int kPanelColumns = 32;

inline int panels_of(int64_t outputs) {
  return static_cast<int>((outputs + kPanelColumns - 1) / kPanelColumns);
}

inline float sum_of_lanes(Vec x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

inline void normalize(const LayerNorm& norm, int width, const float* x, float* y) {
  Vec sum = {};
  int i = 0;
  for (; i + kLanes <= width; i += kLanes) sum += load(x + i);
  float mean = sum_of_lanes(sum);
  for (; i < width; ++i) mean += x[i];
  mean /= width;
  Vec squares = {};
  for (i = 0; i + kLanes <= width; i += kLanes) {
    const Vec d = load(x + i) - mean;
    squares += d * d;
  }
  float variance = sum_of_lanes(squares);
  for (; i < width; ++i) variance += (x[i] - mean) * (x[i] - mean);
  const float factor =
      1.0f / std::sqrt(variance / width + static_cast<float>(norm.epsilon));
  for (i = 0; i + kLanes <= width; i += kLanes) {
    store(y + i, (load(x + i) - mean) * factor * load(norm.weight + i) + load(norm.bias + i));
  }
  for (; i < width; ++i) y[i] = (x[i] - mean) * factor * norm.weight[i] + norm.bias[i];
}

// GELU with the complementary error function by Abramowitz and Stegun, 7.1.26, with error 1.5e-7.
inline Vec gelu(Vec x) {
  const Vec size = (x < 0.0f ? -x : x) * 0.70710678118654752440f;
  const Vec t = 1.0f / (1.0f + 0.3275911f * size);
  Vec y = 1.061405429f * t - 1.453152027f;
  y = y * t + 1.421413741f;
  y = y * t - 0.284496736f;
  y = (y * t + 0.254829592f) * t;
  const Vec rest = 0.5f * y * power_of_two(size * size * -kLog2E);
  return x * (x < 0.0f ? rest : 1.0f - rest);
}

// Multiplies one row by several panels, so that enough independent sums hide the latency. Each sum
// has the order of `product`.
template <int kPanels>
inline void one_row(int inner, const float* a, const float* b, float* c) {
  constexpr int kVectors = kPanelColumns / kLanes;
  Vec sums[kPanels][kVectors] = {};
  for (int k = 0; k < inner; ++k) {
    const Vec x = splat(a[k]);
#pragma GCC unroll 16
    for (int p = 0; p < kPanels; ++p) {
      const float* row = b + (static_cast<int64_t>(p) * inner + k) * kPanelColumns;
#pragma GCC unroll 16
      for (int n = 0; n < kVectors; ++n) sums[p][n] += x * load(row + n * kLanes);
    }
  }
  for (int p = 0; p < kPanels; ++p) {
    for (int n = 0; n < kVectors; ++n) store(c + p * kPanelColumns + n * kLanes, sums[p][n]);
  }
}

// Columns of a block of the result that a thread computes; the pitch of its rows is kBlockColumns.
constexpr int kBlockPanels = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;
constexpr int kBlockColumns = kBlockPanels * kPanelColumns;

// Multiplies rows by at most kBlockPanels panels.
inline void multiply(int rows, const float* a, int64_t a_pitch, const PanelMatrix& m, int panel,
                     int panels, float* c) {
  const int inner = static_cast<int>(m.inputs);
  const float* b = m.weight + static_cast<int64_t>(panel) * inner * kPanelColumns;
  if (rows == 1 && panels == kBlockPanels) {
    one_row<kBlockPanels>(inner, a, b, c);
    return;
  }
  for (int p = 0; p < panels; ++p) {
    product<Layout::kRows, Result::kStored>(
        rows, kPanelColumns, inner, a, a_pitch, b + static_cast<int64_t>(p) * inner * kPanelColumns,
        kPanelColumns, c + p * kPanelColumns, kBlockColumns);
  }
}

// Computes some outputs of a linear layer. `use(row, column, sum)` receives vectors of kLanes
// outputs including the bias; the last may extend past the outputs.
template <class Use>
void linear(Range panels, int rows, const float* a, int64_t a_pitch, const PanelMatrix& m,
            float* block, Use use) {
  for (int p = panels.begin; p < panels.end; p += kBlockPanels) {
    const int count = std::min(kBlockPanels, panels.end - p);
    multiply(rows, a, a_pitch, m, p, count, block);
    const int first = p * kPanelColumns;
    const int columns = std::min<int>(count * kPanelColumns, static_cast<int>(m.outputs) - first);
    for (int n = 0; n < columns; n += kLanes) {
      Vec bias = {};
      if (m.bias != nullptr) {
        if (n + kLanes <= columns) {
          bias = load(m.bias + first + n);
        } else {
          for (int i = 0; n + i < columns; ++i) bias[i] = m.bias[first + n + i];
        }
      }
      for (int r = 0; r < rows; ++r) {
        use(r, first + n, load(block + r * kBlockColumns + n) + bias);
      }
    }
  }
}
