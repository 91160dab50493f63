// One head of one sequence, and the workspace of a thread.

#pragma once

#include <stdint.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../attention.h"

namespace effasr {

constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

// Queries of a panel and keys of a tile; multiples of 16.
constexpr int kPanel = 32, kKeys = 128;
// Queries of a forward task, enough that its copy of the keys costs little; and maximum tasks per
// head of a sequence in the backward, few because each has its own sum of the gradients of the
// keys.
constexpr int kQueriesOfTask = 8 * kPanel, kMostParts = 4;

struct HeadRows {
  float* data;
  int64_t pitch;
  float* operator[](int64_t row) const { return data + row * pitch; }
};

inline HeadRows rows_of(const PackedHeads& x, int64_t first, int head) {
  return {x.data == nullptr ? nullptr : x.data + first * x.row + head * x.head, x.row};
}

struct HeadSequence {
  int number, head, queries, keys;
  int64_t first_query, first_key;

  HeadSequence(const PackedAttention& a, int n, int h)
      : number(n), head(h), queries(a.cu_q[n + 1] - a.cu_q[n]), keys(a.cu_k[n + 1] - a.cu_k[n]),
        first_query(a.cu_q[n]), first_key(a.cu_k[n]) {}

  // The head of keys and values, which the heads of a group share.
  int key_head(const PackedAttention& a) const { return head / a.group; }

  // Index of query i in a tensor (rows_q, heads).
  int64_t place(const PackedAttention& a, int i) const {
    return (first_query + i) * a.heads + head;
  }
};

// Range of queries of a head that one task of the backward computes.
struct Part {
  int begin, end;
  int rows_of_table(const HeadSequence& s) const {
    return begin < end && s.keys > 0 ? end - begin + s.keys - 1 : 0;
  }
};

// The division into parts depends only on the lengths of the sequence.
inline int queries_of_part(const HeadSequence& s) {
  const int even = (s.queries + kMostParts - 1) / kMostParts;
  return std::max(2 * kQueriesOfTask, (even + kPanel - 1) / kPanel * kPanel);
}
inline int parts_of(const HeadSequence& s) {
  if (s.queries == 0) return s.keys > 0;
  return (s.queries + queries_of_part(s) - 1) / queries_of_part(s);
}
inline Part part_of(const HeadSequence& s, int number) {
  const int begin = number * queries_of_part(s);
  return {begin, std::min(s.queries, begin + queries_of_part(s))};
}

// Whether several tasks have a share in the gradients of the keys of a head.
inline bool shares_keys(const PackedAttention& a, const HeadSequence& s) {
  return a.group > 1 || parts_of(s) > 1;
}

// Contributions of a backward task to sums over tasks; null for results without such sums.
struct Sums {
  float *keys, *values;    // (keys, pitch)
  double *content, *position;  // (width,), gradients of the biases
  float* table;            // (Part::rows_of_table(), pitch) times log2(e), by ascending distance
};

// Uninitialized floats, aligned for all vectors.
class Memory {
 public:
  float* take(int64_t count) {
    blocks_.emplace_back(new float[count + 16]);
    const auto address = reinterpret_cast<uintptr_t>(blocks_.back().get());
    return reinterpret_cast<float*>((address + 63) / 64 * 64);
  }

 private:
  std::vector<std::unique_ptr<float[]>> blocks_;
};

// A buffer of a thread that grows to the requested size.
class Growing {
 public:
  float* at_least(int64_t count) {
    if (count > size_) {
      block_ = Memory();
      data_ = block_.take(count);
      size_ = count;
    }
    return data_;
  }

 private:
  Memory block_;
  float* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace effasr
