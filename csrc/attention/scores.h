// Scores of a panel of queries with a tile of keys. Included once for each instruction set.

// Scores by distance; adjacent tiles of a panel share the rows at their border.
struct Distances {
  Columns queries;
  float *by_distance, *steps;  // (kKeys + kPanel, kPanel), and the workspace of take_diagonals

  void take(Memory& memory, int width) {
    queries.take(memory, width);
    by_distance = memory.take((kKeys + kPanel) * kPanel);
    steps = memory.take(kStepFloats);
  }

  // scores[j][i] += queries_i . table[reach - 1 + i - j], for the keys from `key` on.
  void add(const PackedAttention& a, const HeadSequence& s, const Panel& panel, int key, int keys,
           float* scores) {
    const HeadRows table = table_of(a, s.head);
    // Row y is distance lowest + y; key j and query i use row keys - 1 - j + i.
    const int lowest = a.reach - 1 + panel.first - (key + keys - 1);
    int rows = keys;
    if (key == 0) {
      rows += panel.count - 1;
      // Padded queries read these rows.
      std::fill(by_distance + rows * kPanel, by_distance + (keys + panel.padded) * kPanel, 0.0f);
    } else {
      std::memmove(by_distance + keys * kPanel, by_distance,
                   sizeof(float) * (panel.padded - 1) * kPanel);
    }
    product<Layout::kRows, Result::kStored>(rows, panel.padded, a.width, table[lowest],
                                            table.pitch, queries.columns, kPanel, by_distance,
                                            kPanel);
    take_diagonals<Result::kAdded>(by_distance, keys, panel.padded, steps,
                                   scores + (keys - 1) * kPanel, -kPanel);
  }

  static HeadRows table_of(const PackedAttention& a, int head) {
    const int64_t pitch = static_cast<int64_t>(a.heads) * a.width;
    return {const_cast<float*>(a.table) + static_cast<int64_t>(head) * a.width, pitch};
  }
};

// Sets the scores of the keys after each query to -inf.
inline void hide_future(const Panel& panel, int key, int keys, float* scores) {
  const Ints lanes = lane_numbers();
  for (int j = std::max(0, panel.first + 1 - key); j < keys; ++j) {
    for (int i = 0; i < panel.padded; i += kLanes) {
      const Ints hidden = lanes < key + j - panel.first - i;
      float* place = scores + j * kPanel + i;
      store(place, hidden ? splat(-HUGE_VALF) : load(place));
    }
  }
}

// Computes scores[j][i] times log2(e), by which `queries` are already scaled.
inline void score_tile(const PackedAttention& a, const HeadSequence& s, const Panel& panel,
                       const Columns& queries, Distances& distances, HeadRows k, int key, int keys,
                       float* scores) {
  product<Layout::kRows, Result::kStored>(keys, panel.padded, a.width, k[key], k.pitch,
                                          queries.columns, kPanel, scores, kPanel);
  if (a.table != nullptr) distances.add(a, s, panel, key, keys, scores);
  if (a.causal) hide_future(panel, key, keys, scores);
}

// Penalty by distance from the diagonal, in [0, 1): 1 - exp(-(i / Tq - j / Tk)^2 / 2 sigma^2).
struct Straying {
  float factor;  // factor of the square in the exponent of 2
  float queries, keys;

  Straying(const PackedAttention& a, const HeadSequence& s)
      : factor(-kLog2E / (2.0f * a.sigma * a.sigma)), queries(s.queries), keys(s.keys) {}

  Vec places(int first) const {
    return (__builtin_convertvector(lane_numbers(), Vec) + static_cast<float>(first)) / queries;
  }
  Vec operator()(Vec places, int key) const {
    const Vec distance = places - static_cast<float>(key) / keys;
    return one_minus_power_of_two(distance * distance * factor);
  }
};
