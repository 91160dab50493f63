// One head of one sequence, and the memory in which a thread works.

#pragma once

#include <stdint.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "../attention.h"

namespace effasr {

constexpr float kLog2E = 1.44269504088896340736f, kLn2 = 0.69314718055994530942f;

// Queries of a panel, which lie side by side in vectors, and keys of a tile. Multiples of 16.
constexpr int kPanel = 32, kKeys = 128;
// Queries of a task of the forward: enough that its copy of the keys costs little.
constexpr int kQueriesOfTask = 8 * kPanel;

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

  // Where values of (rows_q, heads) belong to its query i.
  int64_t place(const PackedAttention& a, int i) const {
    return (first_query + i) * a.heads + head;
  }
  // Distances between its queries and keys, which are rows of the table.
  int distances() const { return queries > 0 && keys > 0 ? queries + keys - 1 : 0; }
};

// Floats that are not set, aligned for every vector.
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

// A buffer of a thread that grows with what it is asked for.
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
