// Attention of one query to the positions of its row. Included once for each instruction set.

// Returns the scores of kLanes keys times log2(e).
inline Vec scores_of_keys(const float* q, const float* keys, int64_t pitch, int width,
                          float factor) {
  float partial[kLanes * kLanes], columns[kLanes * kLanes], rest[kLanes];
  const int whole = width / kLanes * kLanes;
  for (int j = 0; j < kLanes; ++j) {
    const float* key = keys + j * pitch;
    Vec sum = {};
    for (int c = 0; c < whole; c += kLanes) sum += load(q + c) * load(key + c);
    store(partial + j * kLanes, sum);
    rest[j] = 0;
    for (int c = whole; c < width; ++c) rest[j] += q[c] * key[c];
  }
  transpose_square(partial, kLanes, columns, kLanes);
  Vec sum = load(rest);
  for (int c = 0; c < kLanes; ++c) sum += load(columns + c * kLanes);
  return sum * factor;
}

// out = softmax(scale q K^T) V over `length` positions, zero if there are none. `weights` is a
// workspace of `length` elements, rounded up to kLanes.
inline void attend(const float* q, const float* keys, const float* values, int64_t pitch, int width,
                   int length, float scale, float* weights, float* out) {
  if (length == 0) {
    for (int c = 0; c < width; ++c) out[c] = 0;
    return;
  }
  Vec most = splat(-INFINITY);
  for (int j = 0; j < length; j += kLanes) {
    Vec s = scores_of_keys(q, keys + j * pitch, pitch, width, scale * kLog2E);
    if (j + kLanes > length) s = lane_numbers() < length - j ? s : splat(-INFINITY);
    store(weights + j, s);
    most = larger(most, s);
  }
  float largest = most[0];
  for (int i = 1; i < kLanes; ++i) largest = largest > most[i] ? largest : most[i];
  Vec mass = {};
  for (int j = 0; j < length; j += kLanes) {
    const Vec w = power_of_two(load(weights + j) - largest);
    store(weights + j, w);
    mass += w;
  }
  const float factor = 1.0f / sum_of_lanes(mass);
  int c = 0;
  for (; c + kLanes <= width; c += kLanes) {
    // Several independent sums hide the latency.
    Vec sums[4] = {};
    int j = 0;
    for (; j + 4 <= length; j += 4) {
      for (int i = 0; i < 4; ++i) sums[i] += weights[j + i] * load(values + (j + i) * pitch + c);
    }
    for (; j < length; ++j) sums[0] += weights[j] * load(values + j * pitch + c);
    store(out + c, ((sums[0] + sums[1]) + (sums[2] + sums[3])) * factor);
  }
  for (; c < width; ++c) {
    float sum = 0;
    for (int j = 0; j < length; ++j) sum += weights[j] * values[j * pitch + c];
    out[c] = sum * factor;
  }
}
