// Forward of some queries of one head of one sequence. Included for each instruction set.

// State of the online softmax of a panel after the keys so far, by query.
struct Softmax {
  float largest[kPanel], sum[kPanel], penalty[kPanel], rescale[kPanel];

  void begin() {
    std::fill(largest, largest + kPanel, -HUGE_VALF);
    std::fill(sum, sum + kPanel, 0.0f);
    std::fill(penalty, penalty + kPanel, 0.0f);
  }

  // Replaces scores by weights that are not yet divided by the sum of the softmax.
  void add(const PackedAttention& a, const HeadSequence& s, const Panel& panel, int key, int keys,
           float* scores) {
    const Straying straying(a, s);
    for (int i = 0; i < panel.padded; i += kLanes) {
      const Vec before = load(largest + i);
      const Vec now = largest_of(scores + i, keys, before);
      const Vec ratio = power_of_two(before - now);
      Vec total = {}, strayed = {};
      const Vec places = straying.places(panel.first + i);
      for (int j = 0; j < keys; ++j) {
        float* place = scores + j * kPanel + i;
        const Vec weight = power_of_two(load(place) - now);
        store(place, weight);
        total += weight;
        if (a.penalty != nullptr) strayed += weight * straying(places, key + j);
      }
      store(largest + i, now);
      store(sum + i, load(sum + i) * ratio + total);
      store(penalty + i, load(penalty + i) * ratio + strayed);
      store(rescale + i, ratio);
    }
  }

  static Vec largest_of(const float* scores, int keys, Vec x) {
    Vec y = x;
    int j = 0;
    for (; j + 2 <= keys; j += 2) {
      x = larger(load(scores + j * kPanel), x);
      y = larger(load(scores + (j + 1) * kPanel), y);
    }
    if (j < keys) x = larger(load(scores + j * kPanel), x);
    return larger(x, y);
  }
};

struct Forward {
  Memory memory;
  Columns queries, out;
  Distances distances;
  float *scores, *factors;
  Growing k_rows, v_rows;
  Softmax softmax;

  explicit Forward(const PackedAttention& a) {
    queries.take(memory, a.width);
    out.take(memory, a.width);
    scores = memory.take(kKeys * kPanel);
    if (a.dropout > 0.0f) factors = memory.take(kKeys * kPanel);
    if (a.table != nullptr) distances.take(memory, a.width);
  }

  void run(const PackedAttention& a, const HeadSequence& s, int begin) {
    const int end = std::min(s.queries, begin + kQueriesOfTask);
    if (s.keys == 0) return write_nothing(a, s, begin, end);
    const bool copied = end - begin > 2 * kPanel;
    const int keys = a.causal ? std::min(s.keys, end) : s.keys;
    const int head = s.key_head(a);
    const HeadRows k = gather(rows_of(a.k, s.first_key, head), keys, a.width, copied, k_rows);
    const HeadRows v = gather(rows_of(a.v, s.first_key, head), keys, a.width, copied, v_rows);
    for (int i = begin; i < end; i += kPanel) attend(a, s, Panel(a, s, i), k, v);
  }

  void attend(const PackedAttention& a, const HeadSequence& s, const Panel& panel, HeadRows k,
              HeadRows v) {
    load_queries(a, s, panel, queries, distances);
    softmax.begin();
    for (int key = 0; key < panel.keys; key += kKeys) {
      const int keys = std::min(kKeys, panel.keys - key);
      score_tile(a, s, panel, queries, distances, k, key, keys, scores);
      softmax.add(a, s, panel, key, keys, scores);
      if (a.dropout > 0.0f) drop(a, s, panel, key, keys);
      if (key == 0) {
        product<Layout::kColumns, Result::kStored>(a.width, panel.padded, keys, v[key], v.pitch,
                                                   scores, kPanel, out.columns, kPanel);
      } else {
        scale_columns(a.width, panel.padded, softmax.rescale);
        product<Layout::kColumns, Result::kAdded>(a.width, panel.padded, keys, v[key], v.pitch,
                                                  scores, kPanel, out.columns, kPanel);
      }
    }
    write(a, s, panel);
  }

  static void load_queries(const PackedAttention& a, const HeadSequence& s, const Panel& panel,
                           Columns& queries, Distances& distances) {
    const HeadRows q = rows_of(a.q, s.first_query + panel.first, s.head);
    const int64_t bias = static_cast<int64_t>(s.head) * a.width;
    const float scale = a.scale * kLog2E;
    const bool relative = a.table != nullptr;
    copy_rows(q, panel.count, a.width, relative ? a.content_bias + bias : nullptr, scale,
              queries.rows, panel.padded);
    queries.turn(panel.padded, a.width);
    if (!relative) return;
    copy_rows(q, panel.count, a.width, a.position_bias + bias, scale, distances.queries.rows,
              panel.padded);
    distances.queries.turn(panel.padded, a.width);
  }

  void drop(const PackedAttention& a, const HeadSequence& s, const Panel& panel, int key,
            int keys) {
    keep_factors(a, s, panel.first, panel.padded, key, keys, factors);
    for (int j = 0; j < keys; ++j) {
      for (int i = j * kPanel; i < j * kPanel + panel.padded; i += kLanes) {
        store(scores + i, load(scores + i) * load(factors + i));
      }
    }
  }

  void scale_columns(int width, int padded, const float* factor) {
    for (int d = 0; d < width; ++d) {
      for (int i = 0; i < padded; i += kLanes) {
        float* place = out.columns + d * kPanel + i;
        store(place, load(place) * load(factor + i));
      }
    }
  }

  void write(const PackedAttention& a, const HeadSequence& s, const Panel& panel) {
    float reciprocal[kPanel];
    for (int i = 0; i < panel.padded; i += kLanes) {
      store(reciprocal + i, 1.0f / load(softmax.sum + i));
    }
    scale_columns(a.width, panel.padded, reciprocal);
    for (int d = a.width; d < to_lanes(a.width); ++d) {
      std::fill(out.columns + d * kPanel, out.columns + (d + 1) * kPanel, 0.0f);
    }
    out.turn_back(panel.padded, a.width);
    write_rows(out.rows, panel.count, a.width, 1.0f,
               rows_of(a.out, s.first_query + panel.first, s.head));
    for (int i = 0; i < panel.count; ++i) {
      const int64_t place = s.place(a, panel.first + i);
      if (a.softmax != nullptr) {
        a.softmax[2 * place] = softmax.largest[i];
        a.softmax[2 * place + 1] = reciprocal[i];
      }
      if (a.penalty != nullptr) a.penalty[place] = softmax.penalty[i] * reciprocal[i];
    }
  }

  static void write_nothing(const PackedAttention& a, const HeadSequence& s, int begin, int end) {
    const HeadRows out = rows_of(a.out, s.first_query, s.head);
    for (int i = begin; i < end; ++i) {
      std::fill(out[i], out[i] + a.width, 0.0f);
      const int64_t place = s.place(a, i);
      if (a.softmax != nullptr) a.softmax[2 * place] = a.softmax[2 * place + 1] = 0.0f;
      if (a.penalty != nullptr) a.penalty[place] = 0.0f;
    }
  }
};
