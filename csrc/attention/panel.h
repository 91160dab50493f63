// Copies and transposes of rows of queries and keys. Included once for each instruction set.

// to[r][d] = (from[r][d] + bias[d]) * factor, with zeros up to `padded_rows` and to_lanes(width).
inline void copy_rows(HeadRows from, int rows, int width, const float* bias, float factor,
                      float* to, int padded_rows) {
  const int pitch = to_lanes(width);
  for (int r = 0; r < padded_rows; ++r, to += pitch) {
    int d = 0;
    if (r < rows) {
      const float* row = from[r];
      for (; d + kLanes <= width; d += kLanes) {
        store(to + d, (bias == nullptr ? load(row + d) : load(row + d) + load(bias + d)) * factor);
      }
      for (; d < width; ++d) to[d] = (bias == nullptr ? row[d] : row[d] + bias[d]) * factor;
    }
    for (; d < pitch; ++d) to[d] = 0.0f;
  }
}

// to[r][d] = from[r][d] * factor; the pitch of `from` is to_lanes(width).
inline void write_rows(const float* from, int rows, int width, float factor, HeadRows to) {
  const int pitch = to_lanes(width);
  for (int r = 0; r < rows; ++r, from += pitch) {
    float* row = to[r];
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) store(row + d, load(from + d) * factor);
    for (; d < width; ++d) row[d] = from[d] * factor;
  }
}

// Rows of queries and their transpose columns[d][i], in which queries are lanes.
struct Columns {
  float* rows;     // (kPanel, to_lanes(width)), by query
  float* columns;  // (to_lanes(width), kPanel)

  void take(Memory& memory, int width) {
    const int64_t count = static_cast<int64_t>(kPanel) * to_lanes(width);
    rows = memory.take(count);
    columns = memory.take(count);
  }
  void turn(int padded, int width) {
    transpose(padded, to_lanes(width), rows, to_lanes(width), columns, kPanel);
  }
  void turn_back(int padded, int width) {
    transpose(to_lanes(width), padded, columns, kPanel, rows, to_lanes(width));
  }
};

// A panel of queries.
struct Panel {
  int first;   // index of the first query
  int count;   // number of queries
  int padded;  // count rounded up to whole vectors
  int keys;    // number of keys that the last query attends to

  Panel(const PackedAttention& a, const HeadSequence& s, int i)
      : first(i), count(std::min(kPanel, s.queries - i)), padded(to_lanes(count)),
        keys(a.causal ? std::min(s.keys, i + count) : s.keys) {}
};

// Returns keys or values of a head, copied to contiguous rows if `copied`. Copies pay if they are
// read more than twice, because rows with a pitch of a power of two evict each other in the cache.
inline HeadRows gather(HeadRows from, int rows, int width, bool copied, Growing& buffer) {
  if (!copied) return from;
  const int64_t pitch = to_lanes(width);
  float* to = buffer.at_least(rows * pitch);
  copy_rows(from, rows, width, nullptr, 1.0f, to, rows);
  return {to, pitch};
}
