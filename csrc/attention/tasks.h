// Who computes what: heads of sequences as tasks of threads, and the sums over sequences after them.

#pragma once

#include "../parallel.h"
#include "work.h"

namespace effasr {

// A thread is worth starting for this many products.
constexpr double kProductsOfThread = 2e6;

inline int worthwhile(const PackedAttention& a, int threads) {
  double products = 0.0;
  for (int n = 0; n < a.sequences; ++n) {
    const HeadSequence s(a, n, 0);
    products += 2.0 * s.queries * s.keys * a.width * a.heads;
  }
  return std::min<double>(threads, 1.0 + products / kProductsOfThread);
}

// Tasks of sequences, numbered on end; empty sequences have none.
template <class Count>
std::vector<int> number_tasks(const PackedAttention& a, Count count) {
  std::vector<int> first(a.sequences + 1, 0);
  for (int n = 0; n < a.sequences; ++n) first[n + 1] = first[n] + count(HeadSequence(a, n, 0));
  return first;
}

inline int sequence_of(const std::vector<int>& first, int task) {
  return static_cast<int>(std::upper_bound(first.begin(), first.end(), task) - first.begin()) - 1;
}

// What a thread makes when it begins with its first task.
template <class Work>
struct Once {
  std::unique_ptr<Work> work;
  Work& operator()(const PackedAttention& a) {
    if (!work) work.reset(new Work(a));
    return *work;
  }
};

inline void clear_tail(const PackedAttention& a, const PackedHeads& x, int64_t from, int64_t to) {
  for (int h = 0; h < a.heads; ++h) {
    const HeadRows rows = rows_of(x, 0, h);
    for (int64_t t = from; t < to; ++t) std::fill(rows[t], rows[t] + a.width, 0.0f);
  }
}

template <class Forward>
int run_forward(const PackedAttention& a, int threads) {
  const std::vector<int> first = number_tasks(a, [&](const HeadSequence& s) {
    return a.heads * ((s.queries + kQueriesOfTask - 1) / kQueriesOfTask);
  });
  const int64_t end = a.sequences > 0 ? a.cu_q[a.sequences] : 0;
  clear_tail(a, a.out, end, a.rows_q);
  if (a.penalty != nullptr) {
    std::fill(a.penalty + end * a.heads, a.penalty + a.rows_q * a.heads, 0.0f);
  }
  return for_each_sequence<Once<Forward>>(
      first.back(), worthwhile(a, threads), [&](Once<Forward>& scratch, int task) {
        const int n = sequence_of(first, task), place = task - first[n];
        scratch(a).run(a, HeadSequence(a, n, place % a.heads), place / a.heads * kQueriesOfTask);
      });
}

// Adds up what sequences gave to the rows of the table, and to the biases, of one head.
template <class SharedParts>
void add_parts(const PackedAttention& a, const AttentionGradients& g,
               const std::vector<SharedParts>& parts, int pitch, int h) {
  const int64_t row = static_cast<int64_t>(a.heads) * a.width;
  float* table = g.table + static_cast<int64_t>(h) * a.width;
  for (int t = 0; t < 2 * a.reach - 1; ++t) {
    std::fill(table + t * row, table + t * row + a.width, 0.0f);
  }
  std::vector<double> biases(2 * a.width, 0.0);
  for (int n = 0; n < a.sequences; ++n) {
    const HeadSequence s(a, n, h);
    if (s.distances() == 0) continue;
    const SharedParts& part = parts[static_cast<int64_t>(n) * a.heads + h];
    for (int d = 0; d < 2 * a.width; ++d) biases[d] += part.biases[d];
    float* to = table + static_cast<int64_t>(a.reach - s.keys) * row;
    const float* from = part.table;
    for (int t = 0; t < s.distances(); ++t, to += row, from += pitch) {
      for (int d = 0; d < a.width; ++d) to[d] += kLn2 * from[d];
    }
  }
  for (int d = 0; d < a.width; ++d) {
    g.content_bias[h * a.width + d] = static_cast<float>(biases[d]);
    g.position_bias[h * a.width + d] = static_cast<float>(biases[a.width + d]);
  }
}

template <class Backward, class SharedParts>
int run_backward(const PackedAttention& a, const AttentionGradients& g, int pitch, int threads) {
  const std::vector<int> first = number_tasks(
      a, [&](const HeadSequence& s) { return s.queries > 0 || s.keys > 0 ? a.heads : 0; });
  const int last = a.sequences;
  clear_tail(a, g.q, last > 0 ? a.cu_q[last] : 0, a.rows_q);
  clear_tail(a, g.k, last > 0 ? a.cu_k[last] : 0, a.rows_k);
  clear_tail(a, g.v, last > 0 ? a.cu_k[last] : 0, a.rows_k);
  const bool shared = a.table != nullptr;
  std::vector<SharedParts> parts(shared ? static_cast<int64_t>(a.sequences) * a.heads : 0);
  Memory memory;
  std::vector<double> biases(parts.size() * 2 * a.width);
  for (int64_t i = 0; i < static_cast<int64_t>(parts.size()); ++i) {
    const HeadSequence s(a, static_cast<int>(i / a.heads), static_cast<int>(i % a.heads));
    parts[i].biases = biases.data() + i * 2 * a.width;
    const int64_t size = static_cast<int64_t>(s.distances()) * pitch;
    parts[i].table = size > 0 ? memory.take(size) : nullptr;
  }
  threads = worthwhile(a, threads);
  const int failed = for_each_sequence<Once<Backward>>(
      first.back(), threads, [&](Once<Backward>& scratch, int task) {
        const int n = sequence_of(first, task), h = task - first[n];
        const SharedParts own =
            shared ? parts[static_cast<int64_t>(n) * a.heads + h] : SharedParts{};
        scratch(a).run(a, g, HeadSequence(a, n, h), own);
      });
  if (failed || !shared) return failed;
  return for_each_sequence<int>(a.heads, threads,
                                [&](int&, int h) { add_parts(a, g, parts, pitch, h); });
}

}  // namespace effasr
