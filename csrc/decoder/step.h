// A step through all layers, and the selection of tokens. Included once for each instruction set.

// Data shared by the threads of a step, with active rows stored contiguously and padded to panels.
struct Shared {
  const DecoderWeights& w;
  DecoderStep& step;
  const std::vector<int>& rows;
  float *x, *q, *heads, *hidden;         // (rows, pitch)
  int64_t x_pitch, q_pitch, hidden_pitch;  // queries, keys and values have the pitch of q
};

// One thread of the team.
struct Member {
  const Shared& s;
  Team& team;
  int thread;
  float *normed, *block, *weights;  // workspace of this thread

  int count() const { return static_cast<int>(s.rows.size()); }

  void norm(const LayerNorm& norm) const {
    // Every thread normalizes all rows, because each column of a product needs all of them.
    for (int r = 0; r < count(); ++r) {
      normalize(norm, s.w.width, s.x + r * s.x_pitch, normed + r * s.x_pitch);
    }
  }

  template <class Use>
  void product_of(const float* a, int64_t a_pitch, const PanelMatrix& m, Use use) const {
    linear(team.share(panels_of(m.outputs), thread), count(), a, a_pitch, m, block, use);
  }

  void add_to_x(const float* a, int64_t a_pitch, const PanelMatrix& m) const {
    product_of(a, a_pitch, m, [&](int r, int column, Vec y) {
      float* place = s.x + r * s.x_pitch + column;
      store(place, load(place) + y);
    });
  }

  // Computes all heads of all rows, from the queries in `q` to `heads`.
  void attention(int layer, const KeyValueCache& cache, int64_t group, bool is_self) const {
    const int heads = s.w.heads, width = s.w.head_width;
    const int64_t row_size = heads * cache.room * cache.width;
    const int64_t all = cache.rows * row_size;
    const Range tasks = team.share(count() * heads, thread);
    for (int task = tasks.begin; task < tasks.end; ++task) {
      const int r = task / heads, head = task % heads, row = s.rows[r];
      float* keys = cache.data + 2 * layer * all + row / group * row_size +
                    head * cache.room * cache.width;
      float* values = keys + all;
      const float* q = s.q + r * s.q_pitch + head * width;
      int64_t length;
      if (is_self) {
        const int64_t place = s.step.positions[row] * cache.width;
        std::memcpy(keys + place, q + heads * width, width * sizeof(float));
        std::memcpy(values + place, q + 2 * heads * width, width * sizeof(float));
        length = s.step.positions[row] + 1;
      } else {
        length = s.step.frames[row / group];
      }
      attend(q, keys, values, cache.width, width, static_cast<int>(length), s.w.scale, weights,
             s.heads + r * s.q_pitch + head * width);
    }
  }

  void layer(int number) const {
    const DecoderLayer& l = s.w.layers[number];
    const auto queries = [&](int r, int column, Vec y) {
      store(s.q + r * s.q_pitch + column, y);
    };
    norm(l.self_norm);
    product_of(normed, s.x_pitch, l.qkv, queries);
    team.wait();
    attention(number, s.step.self, 1, true);
    team.wait();
    add_to_x(s.heads, s.q_pitch, l.self_out);
    team.wait();
    norm(l.cross_norm);
    product_of(normed, s.x_pitch, l.q, queries);
    team.wait();
    attention(number, s.step.cross, s.step.hypotheses, false);
    team.wait();
    add_to_x(s.heads, s.q_pitch, l.cross_out);
    team.wait();
    norm(l.forward_norm);
    product_of(normed, s.x_pitch, l.first, [&](int r, int column, Vec y) {
      store(s.hidden + r * s.hidden_pitch + column,
            s.w.activation == kGelu ? gelu(y) : larger(y, Vec{}));
    });
    team.wait();
    add_to_x(s.hidden, s.hidden_pitch, l.second);
    team.wait();
  }

  void embed(int r) const {
    const int width = s.w.width, row = s.rows[r];
    float* x = s.x + r * s.x_pitch;
    const int64_t position = std::min(s.step.positions[row], s.w.most_positions - 1);
    const float* token = s.w.tokens + s.step.tokens[row] * width;
    const float* place = s.w.positions + position * width;
    for (int c = 0; c < width; ++c) x[c] = token[c] + place[c];
    if (s.w.embedding_norm.weight != nullptr) normalize(s.w.embedding_norm, width, x, x);
  }

  void run() const {
    if (thread == 0) {
      for (int r = 0; r < count(); ++r) embed(r);
    }
    team.wait();
    for (int n = 0; n < s.w.layer_count; ++n) layer(n);
    if (thread == 0) {
      for (int r = 0; r < count(); ++r) {
        const int row = s.rows[r];
        normalize(s.w.norm, s.w.width, s.x + r * s.x_pitch,
                  s.step.out + static_cast<int64_t>(row) * s.w.width);
        int64_t& position = s.step.positions[row];
        position = std::min(position + 1, s.step.most_position);
      }
    }
  }
};

inline int64_t to_panels(int64_t n) { return panels_of(n) * kPanelColumns; }

int run_step(const DecoderWeights& w, DecoderStep& step, const std::vector<int>& rows, int most) {
  const int64_t count = static_cast<int64_t>(rows.size());
  const DecoderLayer& first = w.layers[0];
  Memory memory;
  const int64_t x_pitch = to_panels(w.width), hidden_pitch = to_panels(first.first.outputs);
  const int64_t q_pitch = to_panels(first.qkv.outputs);
  Shared shared{w, step, rows, memory.take(count * x_pitch), memory.take(count * q_pitch),
                memory.take(count * q_pitch), memory.take(count * hidden_pitch),
                x_pitch, q_pitch, hidden_pitch};
  int64_t longest = 0;
  for (int row : rows) {
    longest = std::max({longest, step.positions[row] + 1, step.frames[row / step.hypotheses]});
  }
  int64_t work = 0;
  for (const PanelMatrix& m : {first.qkv, first.self_out, first.q, first.cross_out, first.first,
                                first.second}) {
    work += m.inputs * m.outputs;
  }
  // A layer has six products, each followed by a barrier.
  const int threads = threads_for(count * work / 6, most);
  std::vector<float*> own;
  for (int i = 0; i < 3 * threads; i += 3) {
    own.push_back(memory.take(count * x_pitch));
    own.push_back(memory.take(count * kBlockColumns));
    own.push_back(memory.take(longest + kLanes));
  }
  Team team;
  team.run(threads, [&](int i) {
    Member{shared, team, i, own[3 * i], own[3 * i + 1], own[3 * i + 2]}.run();
  });
  return 0;
}

struct Largest {
  float value;
  int64_t index;
};

// NaN is larger than any number, as in torch.
inline bool is_larger(float a, float b) { return a > b || (a != a && b == b); }

// Workspace of a thread: products, and for each row and lane the largest value and its index.
struct LargestMemory {
  float *block, *values;
  int32_t* indices;
};

void largest_of_panels(const LargestLogit& request, Range panels, const LargestMemory& own,
                       Largest* found) {
  const PanelMatrix& m = request.matrix;
  const int rows = static_cast<int>(request.rows);
  // Each lane keeps the first among equal values, because it is only replaced by larger ones.
  std::fill_n(own.values, rows * kLanes, -INFINITY);
  std::fill_n(own.indices, rows * kLanes, panels.begin * kPanelColumns);
  linear(panels, rows, request.hidden, m.inputs, m, own.block, [&](int r, int column, Vec z) {
    float* values = own.values + r * kLanes;
    int32_t* indices = own.indices + r * kLanes;
    const Vec before = load(values);
    const Ints numbers = lane_numbers() + column;
    const Ints is_new = (numbers < static_cast<int>(m.outputs)) &
                        ((z > before) | ((z != z) & (before == before)));
    store(values, is_new ? z : before);
    Ints kept;
    std::memcpy(&kept, indices, sizeof kept);
    kept = is_new ? numbers : kept;
    std::memcpy(indices, &kept, sizeof kept);
  });
  for (int r = 0; r < rows; ++r) {
    const float* values = own.values + r * kLanes;
    const int32_t* indices = own.indices + r * kLanes;
    found[r] = {values[0], indices[0]};
    for (int i = 1; i < kLanes; ++i) {
      const bool is_tied = !is_larger(found[r].value, values[i]) && indices[i] < found[r].index;
      if (is_larger(values[i], found[r].value) || is_tied) found[r] = {values[i], indices[i]};
    }
  }
}

int run_largest(const LargestLogit& request, int most) {
  const PanelMatrix& m = request.matrix;
  const int rows = static_cast<int>(request.rows);
  const int threads = threads_for(rows * m.inputs * m.outputs, most);
  Memory memory;
  std::vector<LargestMemory> own;
  for (int i = 0; i < threads; ++i) {
    own.push_back({memory.take(rows * kBlockColumns), memory.take(rows * kLanes),
                   reinterpret_cast<int32_t*>(memory.take(rows * kLanes))});
  }
  std::vector<Largest> found(static_cast<size_t>(threads) * rows);
  Team team;
  team.run(threads, [&](int i) {
    largest_of_panels(request, team.share(panels_of(m.outputs), i), own[i],
                      found.data() + i * rows);
  });
  for (int r = 0; r < rows; ++r) {
    Largest best = found[r];
    for (int i = 1; i < team.size(); ++i) {
      if (is_larger(found[i * rows + r].value, best.value)) best = found[i * rows + r];
    }
    request.out[r] = best.index;
  }
  return 0;
}
