// Distribution of the heads of sequences to threads as tasks, and the sums over tasks.

#pragma once

#include "../parallel.h"
#include "work.h"

namespace effasr {

// Minimum number of multiply-adds for which a thread is started.
constexpr double kProductsOfThread = 2e6;

inline int worthwhile(const PackedAttention& a, int threads) {
  double products = 0.0;
  for (int n = 0; n < a.sequences; ++n) {
    const HeadSequence s(a, n, 0);
    products += 2.0 * s.queries * s.keys * a.width * a.heads;
  }
  return std::min<double>(threads, 1.0 + products / kProductsOfThread);
}

// Returns the index of the first task of each sequence, and their total. Tasks are numbered
// consecutively.
template <class Count>
std::vector<int> number_tasks(const PackedAttention& a, Count count) {
  std::vector<int> first(a.sequences + 1, 0);
  for (int n = 0; n < a.sequences; ++n) first[n + 1] = first[n] + count(HeadSequence(a, n, 0));
  return first;
}

inline int sequence_of(const std::vector<int>& first, int task) {
  return static_cast<int>(std::upper_bound(first.begin(), first.end(), task) - first.begin()) - 1;
}

// Workspace of a thread, created at its first task.
template <class Work>
struct Once {
  std::unique_ptr<Work> work;
  Work& operator()(const PackedAttention& a) {
    if (!work) work.reset(new Work(a));
    return *work;
  }
};

inline void clear_tail(const PackedAttention& a, const PackedHeads& x, int heads, int64_t from,
                       int64_t to) {
  for (int h = 0; h < heads; ++h) {
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
  clear_tail(a, a.out, a.heads, end, a.rows_q);
  if (a.penalty != nullptr) {
    std::fill(a.penalty + end * a.heads, a.penalty + a.rows_q * a.heads, 0.0f);
  }
  return for_each_sequence<Once<Forward>>(
      first.back(), worthwhile(a, threads), [&](Once<Forward>& scratch, int task) {
        const int n = sequence_of(first, task), place = task - first[n];
        scratch(a).run(a, HeadSequence(a, n, place % a.heads), place / a.heads * kQueriesOfTask);
      });
}

// Tasks of the backward and their contributions to sums over tasks.
class BackwardTasks {
 public:
  BackwardTasks(const PackedAttention& a, int pitch) : a_(a), pitch_(pitch) {
    const auto parts = [&](const HeadSequence& s) { return a.heads * parts_of(s); };
    first_ = number_tasks(a, parts);
    sums_.assign(first_.back(), Sums{});
    const int64_t biases = a.table == nullptr ? 0 : 2 * static_cast<int64_t>(a.width);
    biases_.assign(biases * sums_.size(), 0.0);
    int64_t size = 0;
    for (int task = 0; task < count(); ++task) size += place(task, nullptr);
    float* memory = memory_.take(size);
    for (int task = 0; task < count(); ++task) {
      memory += place(task, memory);
      if (biases == 0) continue;
      sums_[task].content = biases_.data() + task * biases;
      sums_[task].position = sums_[task].content + a.width;
    }
  }

  int count() const { return static_cast<int>(sums_.size()); }

  template <class Backward>
  void run(const AttentionGradients& g, Backward& backward, int task) {
    const int n = sequence_of(first_, task), h = (task - first_[n]) % a_.heads;
    const HeadSequence s(a_, n, h);
    backward.run(a_, g, s, part_of(s, (task - first_[n]) / a_.heads), sums_[task]);
  }

  // Adds up the contributions of all parts of sequences for one head, in order; the first head of a
  // group adds those to its keys and values.
  void add_up(const AttentionGradients& g, int h) const {
    if (a_.table != nullptr) clear_shared(g, h);
    std::vector<double> content(a_.width, 0.0), position(a_.width, 0.0);
    for (int n = 0; n < a_.sequences; ++n) {
      const HeadSequence s(a_, n, h);
      const int parts = parts_of(s);
      if (shares_keys(a_, s) && h % a_.group == 0) add_keys(g, s, parts);
      if (a_.table == nullptr) continue;
      for (int i = 0; i < parts; ++i) {
        const Sums& sums = sums_[task_of(s, i)];
        add_table(g, s, part_of(s, i), sums.table);
        for (int d = 0; d < a_.width; ++d) {
          content[d] += sums.content[d];
          position[d] += sums.position[d];
        }
      }
    }
    if (a_.table == nullptr) return;
    const int64_t row = static_cast<int64_t>(h) * a_.width;
    std::copy(content.begin(), content.end(), g.content_bias + row);
    std::copy(position.begin(), position.end(), g.position_bias + row);
  }

 private:
  int task_of(const HeadSequence& s, int part) const {
    return first_[s.number] + part * a_.heads + s.head;
  }

  // Returns how many floats the task needs; places its sums in `memory` unless that is null.
  int64_t place(int task, float* memory) {
    const int n = sequence_of(first_, task);
    const HeadSequence s(a_, n, 0);
    const int64_t keys = shares_keys(a_, s) ? static_cast<int64_t>(s.keys) * pitch_ : 0;
    const Part part = part_of(s, (task - first_[n]) / a_.heads);
    const int64_t rows = a_.table == nullptr ? 0 : part.rows_of_table(s);
    if (memory != nullptr) {
      if (keys > 0) sums_[task].keys = memory;
      if (keys > 0) sums_[task].values = memory + keys;
      sums_[task].table = memory + 2 * keys;
    }
    return 2 * keys + rows * pitch_;
  }

  void add_keys(const AttentionGradients& g, const HeadSequence& s, int parts) const {
    const int head = s.key_head(a_);
    const HeadRows dk = rows_of(g.k, s.first_key, head), dv = rows_of(g.v, s.first_key, head);
    for (int i = 0; i < a_.group * parts; ++i) {
      const Sums& sums = sums_[task_of(HeadSequence(a_, s.number, s.head + i / parts), i % parts)];
      for (int j = 0; j < s.keys; ++j) {
        const float *k = sums.keys + static_cast<int64_t>(j) * pitch_;
        const float *v = sums.values + static_cast<int64_t>(j) * pitch_;
        for (int d = 0; d < a_.width; ++d) {
          dk[j][d] = (i == 0 ? 0.0f : dk[j][d]) + kLn2 * k[d];
          dv[j][d] = (i == 0 ? 0.0f : dv[j][d]) + v[d];
        }
      }
    }
  }

  HeadRows table_of(const AttentionGradients& g, int h) const {
    const int64_t row = static_cast<int64_t>(a_.heads) * a_.width;
    return {g.table + static_cast<int64_t>(h) * a_.width, row};
  }

  void clear_shared(const AttentionGradients& g, int h) const {
    const HeadRows table = table_of(g, h);
    for (int t = 0; t < 2 * a_.reach - 1; ++t) std::fill(table[t], table[t] + a_.width, 0.0f);
  }

  void add_table(const AttentionGradients& g, const HeadSequence& s, Part part,
                 const float* from) const {
    const HeadRows table = table_of(g, s.head);
    const int64_t first = a_.reach - s.keys + part.begin;
    for (int t = 0; t < part.rows_of_table(s); ++t, from += pitch_) {
      float* to = table[first + t];
      for (int d = 0; d < a_.width; ++d) to[d] += kLn2 * from[d];
    }
  }

  const PackedAttention& a_;
  const int pitch_;
  std::vector<int> first_;
  std::vector<Sums> sums_;
  std::vector<double> biases_;
  Memory memory_;
};

template <class Backward>
int run_backward(const PackedAttention& a, const AttentionGradients& g, int pitch, int threads) {
  const int last = a.sequences;
  const int key_heads = a.heads / a.group;
  clear_tail(a, g.q, a.heads, last > 0 ? a.cu_q[last] : 0, a.rows_q);
  clear_tail(a, g.k, key_heads, last > 0 ? a.cu_k[last] : 0, a.rows_k);
  clear_tail(a, g.v, key_heads, last > 0 ? a.cu_k[last] : 0, a.rows_k);
  threads = worthwhile(a, threads);
  BackwardTasks tasks(a, pitch);
  const int failed = for_each_sequence<Once<Backward>>(
      tasks.count(), threads,
      [&](Once<Backward>& scratch, int task) { tasks.run(g, scratch(a), task); });
  if (failed) return failed;
  return for_each_sequence<int>(a.heads, threads, [&](int&, int h) { tasks.add_up(g, h); });
}

}  // namespace effasr
