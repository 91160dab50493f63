// Conversion between scores by distance and scores by key. Included once for each instruction set.
//
// Scores of a panel by distance have a row for each distance. The scores of one key are on a
// diagonal: lane i in row y + i. Lanes are therefore shifted up by blends of rows: first the lanes
// whose index has bit 0 by one row, then those with bit 1 by two rows, and so on.

// Lane l of the result comes from row (l / kStep) % 4 * kStep, or % 2 if kLanes is 2 * kStep.
template <int kStep>
inline Vec pick(const float* x, int64_t pitch) {
  const Ints lanes = lane_numbers();
  const Ints odd = (lanes & kStep) != 0;
  const Vec low = odd ? load(x + kStep * pitch) : load(x);
  if constexpr (2 * kStep < kLanes) {
    const Vec high = odd ? load(x + 3 * kStep * pitch) : load(x + 2 * kStep * pitch);
    return (lanes & (2 * kStep)) != 0 ? high : low;
  }
  return low;
}

// to[y][i] = or += from[y + i][i] for `rows` rows y and `columns` lanes i. The pitch of `from` is
// kPanel, that of `to` is `to_pitch`, which may be negative.
template <Result kResult>
void take_diagonals(const float* from, int rows, int columns, float* steps, float* to,
                    int64_t to_pitch) {
  for (int first = 0; first < columns; first += kLanes) {
    const float* x = from + static_cast<int64_t>(first) * kPanel + first;
    for (int y = 0; kLanes > 4 && y < rows + kLanes - 4; ++y) {
      store(steps + y * kLanes, pick<1>(x + static_cast<int64_t>(y) * kPanel, kPanel));
    }
    for (int y = 0; y < rows; ++y) {
      Vec row;
      if constexpr (kLanes > 4) {
        row = pick<4>(steps + y * kLanes, kLanes);
      } else {
        row = pick<1>(x + static_cast<int64_t>(y) * kPanel, kPanel);
      }
      float* place = to + y * to_pitch + first;
      store(place, kResult == Result::kAdded ? load(place) + row : row);
    }
  }
}
constexpr int kStepFloats = (kKeys + kPanel + kLanes) * kLanes;
