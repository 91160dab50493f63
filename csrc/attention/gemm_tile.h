// Products of small matrices in the cache. Included once for each instruction set.
//
// A block of the result stays in registers during the loop over the inner dimension. Each element
// is summed in the order of that dimension, independent of the division into blocks. The previous
// value of the result is added last, because sums of sums lose less precision than one long sum.

enum class Layout { kRows, kColumns };  // memory order of A: by rows, or by columns (transposed)
enum class Result { kStored, kAdded };

template <int kM, int kN, Layout kLayout, Result kResult>
void product_block(int inner, const float* a, int64_t a_pitch, const float* b, int64_t b_pitch,
                   float* c, int64_t c_pitch) {
  Vec sums[kM][kN] = {};
#pragma GCC unroll 2
  for (int k = 0; k < inner; ++k) {
    Vec row[kN];
#pragma GCC unroll 16
    for (int n = 0; n < kN; ++n) row[n] = load(b + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kM; ++m) {
      const Vec x = splat(kLayout == Layout::kRows ? a[m * a_pitch] : a[m]);
#pragma GCC unroll 16
      for (int n = 0; n < kN; ++n) sums[m][n] += x * row[n];
    }
    a += kLayout == Layout::kRows ? 1 : a_pitch;
    b += b_pitch;
  }
  for (int m = 0; m < kM; ++m) {
    for (int n = 0; n < kN; ++n) {
      float* place = c + m * c_pitch + n * kLanes;
      store(place, kResult == Result::kAdded ? load(place) + sums[m][n] : sums[m][n]);
    }
  }
}

template <int kM, int kN, Layout kLayout, Result kResult>
inline void product_rows(int rows, int inner, const float* a, int64_t a_pitch, const float* b,
                         int64_t b_pitch, float* c, int64_t c_pitch) {
  if (rows == kM) {
    product_block<kM, kN, kLayout, kResult>(inner, a, a_pitch, b, b_pitch, c, c_pitch);
  } else if constexpr (kM > 1) {
    product_rows<kM - 1, kN, kLayout, kResult>(rows, inner, a, a_pitch, b, b_pitch, c, c_pitch);
  }
}

template <int kN, Layout kLayout, Result kResult>
inline void product_strip(int rows, int inner, const float* a, int64_t a_pitch, const float* b,
                          int64_t b_pitch, float* c, int64_t c_pitch) {
  // With fewer columns more rows fit in registers and are needed to hide the latency.
  constexpr int kMost = kTileRows * kTileColumns / kN < 16 ? kTileRows * kTileColumns / kN : 16;
  const int64_t a_step = kLayout == Layout::kRows ? a_pitch : 1;
  // Blocks of almost equal size, because the sums of a block of a single row would stall.
  const int blocks = (rows + kMost - 1) / kMost;
  for (int i = 0, begin = 0; i < blocks; ++i) {
    const int end = static_cast<int>(static_cast<int64_t>(rows) * (i + 1) / blocks);
    product_rows<kMost, kN, kLayout, kResult>(end - begin, inner, a + begin * a_step, a_pitch, b,
                                              b_pitch, c + begin * c_pitch, c_pitch);
    begin = end;
  }
}

// C (rows, columns) = or += A (rows, inner) B (inner, columns); columns is a multiple of kLanes.
template <Layout kLayout, Result kResult>
void product(int rows, int columns, int inner, const float* a, int64_t a_pitch, const float* b,
             int64_t b_pitch, float* c, int64_t c_pitch) {
  int n = 0;
  for (; n + kTileColumns * kLanes <= columns; n += kTileColumns * kLanes) {
    product_strip<kTileColumns, kLayout, kResult>(rows, inner, a, a_pitch, b + n, b_pitch, c + n,
                                                  c_pitch);
  }
  for (; n < columns; n += kLanes) {
    product_strip<1, kLayout, kResult>(rows, inner, a, a_pitch, b + n, b_pitch, c + n, c_pitch);
  }
}
