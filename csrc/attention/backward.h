// Backward of one head of one sequence. Included once for each instruction set.

// Gradients by distance. A row of distances is complete after the tiles of all its keys, so the
// last rows of a tile are kept until the next.
struct DistanceGradients {
  float *by_distance, *steps;
  Columns queries;  // gradient of the queries through the table

  void take(Memory& memory, int width) {
    by_distance = memory.take((kKeys + kPanel) * kPanel);
    steps = memory.take(kStepFloats);
    queries.take(memory, width);
  }
};

struct Backward {
  Memory memory;
  Columns queries, d_out, d_queries;
  Distances distances;
  DistanceGradients d_distances;
  float *weights, *slopes, *waiting, *factors;
  Growing k_rows, v_rows, d_keys, d_values;
  // For each query, the largest score, the mean of the slopes, and the gradient of the penalty.
  float largest[kPanel], mean[kPanel], d_penalty[kPanel];

  explicit Backward(const PackedAttention& a) {
    queries.take(memory, a.width);
    d_out.take(memory, a.width);
    d_queries.take(memory, a.width);
    weights = memory.take(kKeys * kPanel);
    // Incomplete rows of the previous tile precede the rows of this tile; zeros follow.
    waiting = memory.take((kKeys + 2 * kPanel) * kPanel);
    slopes = waiting + kPanel * kPanel;
    if (a.dropout > 0.0f) factors = memory.take(kKeys * kPanel);
    if (a.table == nullptr) return;
    distances.take(memory, a.width);
    d_distances.take(memory, a.width);
  }

  // Computes the gradients of the queries of a part, and their contributions to those of all keys
  // and values, which are written to `sums` if it has memory for them, else to `g`.
  void run(const PackedAttention& a, const AttentionGradients& g, const HeadSequence& s, Part part,
           Sums sums) {
    const int pitch = to_lanes(a.width);
    const int64_t size = static_cast<int64_t>(s.keys) * pitch;
    const bool whole = sums.keys == nullptr;
    if (whole) {
      sums.keys = d_keys.at_least(size);
      sums.values = d_values.at_least(size);
    }
    std::fill(sums.keys, sums.keys + size, 0.0f);
    std::fill(sums.values, sums.values + size, 0.0f);
    if (a.table != nullptr) {
      std::fill(sums.table, sums.table + static_cast<int64_t>(part.rows_of_table(s)) * pitch, 0.0f);
    }
    const bool copied = part.end - part.begin > 2 * kPanel;
    const int head = s.key_head(a);
    const HeadRows k = gather(rows_of(a.k, s.first_key, head), s.keys, a.width, copied, k_rows);
    const HeadRows v = gather(rows_of(a.v, s.first_key, head), s.keys, a.width, copied, v_rows);
    for (int i = part.begin; i < part.end; i += kPanel) {
      const HeadRows dq = rows_of(g.q, s.first_query + i, s.head);
      if (s.keys > 0) {
        add_panel(a, g, s, Panel(a, s, i), part, k, v, dq, sums);
      } else {
        for (int r = 0; r < std::min(kPanel, part.end - i); ++r) {
          std::fill(dq[r], dq[r] + a.width, 0.0f);
        }
      }
    }
    if (!whole) return;
    write_rows(sums.keys, s.keys, a.width, kLn2, rows_of(g.k, s.first_key, head));
    write_rows(sums.values, s.keys, a.width, 1.0f, rows_of(g.v, s.first_key, head));
  }

  void add_panel(const PackedAttention& a, const AttentionGradients& g, const HeadSequence& s,
                 const Panel& panel, Part part, HeadRows k, HeadRows v, HeadRows dq, Sums sums) {
    load_panel(a, g, s, panel);
    for (int key = 0; key < panel.keys; key += kKeys) {
      const int keys = std::min(kKeys, panel.keys - key);
      differentiate(a, s, panel, k, v, key, keys);
      add_tile(a, panel, k, key, keys, sums);
      if (a.table != nullptr) add_distances(a, s, panel, part, key, keys, sums);
    }
    write_queries(a, panel, dq, sums);
  }

  // Loads a panel. The gradient of the output is divided by the sum of the softmax here, once for
  // each query.
  void load_panel(const PackedAttention& a, const AttentionGradients& g, const HeadSequence& s,
                  const Panel& panel) {
    Forward::load_queries(a, s, panel, queries, distances);
    const int64_t first = s.first_query + panel.first;
    copy_rows(rows_of(g.out, first, s.head), panel.count, a.width, nullptr, 1.0f, d_out.rows,
              panel.padded);
    const int pitch = to_lanes(a.width);
    for (int i = 0; i < kPanel; ++i) largest[i] = mean[i] = d_penalty[i] = 0.0f;
    for (int i = 0; i < panel.count; ++i) {
      const int64_t place = s.place(a, panel.first + i);
      const float reciprocal = a.softmax[2 * place + 1];
      largest[i] = a.softmax[2 * place];
      if (a.penalty != nullptr && g.penalty != nullptr) {
        d_penalty[i] = g.penalty[place] * reciprocal;
        mean[i] = d_penalty[i] * a.penalty[place];
      }
      float* row = d_out.rows + i * pitch;
      for (int d = 0; d < pitch; d += kLanes) store(row + d, load(row + d) * reciprocal);
    }
    d_out.turn(panel.padded, a.width);
    // Summed in the order of `differentiate`, so that the slope of a single weight of 1 is exactly
    // 0.
    Columns& out = d_queries;
    copy_rows(rows_of(a.out, first, s.head), panel.count, a.width, nullptr, 1.0f, out.rows,
              panel.padded);
    out.turn(panel.padded, a.width);
    for (int i = 0; i < panel.padded; i += kLanes) {
      Vec sum = {};
      for (int d = 0; d < a.width; ++d) {
        sum += load(out.columns + d * kPanel + i) * load(d_out.columns + d * kPanel + i);
      }
      store(mean + i, load(mean + i) + sum);
    }
    if (a.table != nullptr) std::fill(waiting, slopes, 0.0f);
  }

  // Computes the weights of a tile, with dropout, and the gradients of its scores. Weights are not
  // divided by the sum of the softmax, but d_out and its results are, so products are correct.
  void differentiate(const PackedAttention& a, const HeadSequence& s, const Panel& panel,
                     HeadRows k, HeadRows v, int key, int keys) {
    score_tile(a, s, panel, queries, distances, k, key, keys, weights);
    product<Layout::kRows, Result::kStored>(keys, panel.padded, a.width, v[key], v.pitch,
                                            d_out.columns, kPanel, slopes, kPanel);
    const bool drops = a.dropout > 0.0f;
    if (drops) keep_factors(a, s, panel.first, panel.padded, key, keys, factors);
    const Straying straying(a, s);
    for (int i = 0; i < panel.padded; i += kLanes) {
      const Vec most = load(largest + i), center = load(mean + i), strayed = load(d_penalty + i);
      const Vec places = straying.places(panel.first + i);
      for (int j = 0; j < keys; ++j) {
        const int place = j * kPanel + i;
        const Vec weight = power_of_two(load(weights + place) - most);
        const Vec factor = drops ? load(factors + place) : splat(1.0f);
        Vec slope = load(slopes + place) * factor - center;
        if (a.penalty != nullptr) slope += strayed * straying(places, key + j);
        store(weights + place, weight * factor);
        store(slopes + place, weight * slope);
      }
    }
  }

  void add_tile(const PackedAttention& a, const Panel& panel, HeadRows k, int key, int keys,
                Sums sums) {
    const int pitch = to_lanes(a.width);
    const int64_t first = static_cast<int64_t>(key) * pitch;
    product<Layout::kRows, Result::kAdded>(keys, pitch, panel.count, weights, kPanel, d_out.rows,
                                           pitch, sums.values + first, pitch);
    product<Layout::kRows, Result::kAdded>(keys, pitch, panel.count, slopes, kPanel, queries.rows,
                                           pitch, sums.keys + first, pitch);
    auto* add = key == 0 ? product<Layout::kColumns, Result::kStored>
                         : product<Layout::kColumns, Result::kAdded>;
    add(a.width, panel.padded, keys, k[key], k.pitch, slopes, kPanel, d_queries.columns, kPanel);
  }

  // Adds the gradients of the rows of distances that this tile completes, in descending distance.
  void add_distances(const PackedAttention& a, const HeadSequence& s, const Panel& panel, Part part,
                     int key, int keys, Sums sums) {
    const int pitch = to_lanes(a.width), before = panel.padded - 1;
    float* begin = slopes - before * kPanel;
    const bool last = key + keys == panel.keys;
    if (last) std::fill(slopes + keys * kPanel, slopes + (keys + before) * kPanel, 0.0f);
    // Padded queries would need distances that the table may not contain.
    const int skipped = key == 0 ? panel.padded - panel.count : 0;
    const int rows = keys + (last ? before : 0) - skipped;
    take_diagonals<Result::kStored>(begin + skipped * kPanel, rows, panel.padded,
                                    d_distances.steps, d_distances.by_distance, kPanel);
    const int largest_distance = panel.first - key + before - skipped;
    const HeadRows table = Distances::table_of(a, s.head);
    auto* add = key == 0 ? product<Layout::kColumns, Result::kStored>
                         : product<Layout::kColumns, Result::kAdded>;
    add(a.width, panel.padded, rows, table[a.reach - 1 + largest_distance], -table.pitch,
        d_distances.by_distance, kPanel, d_distances.queries.columns, kPanel);
    const int64_t first = s.keys - 1 + largest_distance - part.begin;
    product<Layout::kRows, Result::kAdded>(rows, pitch, panel.count, d_distances.by_distance,
                                           kPanel, distances.queries.rows, pitch,
                                           sums.table + first * pitch, -pitch);
    if (!last) std::memmove(begin, begin + keys * kPanel, sizeof(float) * before * kPanel);
  }

  void write_queries(const PackedAttention& a, const Panel& panel, HeadRows dq, Sums sums) {
    turn_back(a, panel, d_queries);
    if (a.table != nullptr) {
      turn_back(a, panel, d_distances.queries);
      add_rows(a, panel, d_queries.rows, sums.content);
      add_rows(a, panel, d_distances.queries.rows, sums.position);
      for (int i = 0; i < panel.count * to_lanes(a.width); i += kLanes) {
        store(d_queries.rows + i, load(d_queries.rows + i) + load(d_distances.queries.rows + i));
      }
    }
    write_rows(d_queries.rows, panel.count, a.width, a.scale, dq);
  }

  static void turn_back(const PackedAttention& a, const Panel& panel, Columns& x) {
    const int64_t used = static_cast<int64_t>(a.width) * kPanel;
    std::fill(x.columns + used, x.columns + to_lanes(a.width) * kPanel, 0.0f);
    x.turn_back(panel.padded, a.width);
  }

  static void add_rows(const PackedAttention& a, const Panel& panel, const float* rows,
                       double* sums) {
    const int pitch = to_lanes(a.width);
    for (int d = 0; d < a.width; ++d) {
      float sum = 0.0f;
      for (int i = 0; i < panel.count; ++i) sum += rows[i * pitch + d];
      sums[d] += static_cast<double>(sum) * a.scale;
    }
  }
};
