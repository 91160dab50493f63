// The scores of 16 queries of a warp and 64 keys, with a position:
//
//   s_ij = (q_i + u) k_j + (q_i + v) r_(i - j)
//
// The second part is a product with rows of the table, by distance, whose row for query i is shifted by one
// more key than that of query i - 1. The shift is in the addresses: a warp writes the product of its 16
// queries and 80 distances to its rows of a ring in shared memory at the columns of their keys, and reads it
// back as a result of tensor cores lies in registers, to which the product with keys is added. From one 64
// keys to the next the distances slide by 64, so 16 of the 80 stay: the ring has 64 columns and the first 16
// of the next keys, and one 64 x 64 product is new.
#pragma once

#include "../attention_cuda.h"
#include "tile.cuh"

namespace effasr {

constexpr int kKept = 16;  // columns that stay
// Pitch in words of the ring: reads of pairs meet no other in a bank, as 4 pitches are 0, 24, 16 and 8 mod 32.
constexpr int kPitch = kRows + kKept + 8;

// Keys that a query sees: those of its chunk, and some to the left and right (`effasr_kernels.Context`).
struct Range {
  int first, end;
  __device__ Range(const AttentionCall& p, int query, int keys) {
    // Most often there are no chunks, and the division takes 20 instructions.
    const int chunk = p.chunk == 1 ? query : query / p.chunk * p.chunk;
    first = max(chunk - p.left, 0), end = min(chunk + p.chunk + p.right, keys);
  }
  __device__ bool holds(int key) const { return key >= first && key < end; }
};

// Writes scores by position of 8 distances, from the x-th on.
__device__ inline void write_distances(float* ring, const float (&sums)[4], int x) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Query r meets distance x, counted from the largest, at key x + r - 15.
    const int r = lane() / 4 + i / 2 * 8, key = x + 2 * (lane() % 4) + i % 2 + r - 15;
    if (x >= kKept || key >= 0) ring[r * kPitch + key] = sums[i];
  }
}

// Writes scores by position of 16 N distances to the ring, from the x-th on. The tiles at `table` hold 128 rows in a
// ring, by falling distance; `row` is that of the largest distance of the warp's queries and these keys, a multiple of 16.
template <class T, int D, int N>
__device__ void write_scores_from(
    float* ring, const Held<D>& queries, const Places<D>& at, int table, int row, int x) {
  float sums[2 * N][4] = {};
  multiply_rows<T, D, N>(sums, queries, at, table, row + x);
#pragma unroll
  for (int n = 0; n < 2 * N; ++n) write_distances(ring, sums[n], x + 8 * n);
}

// The scores by position of the next 64 keys; of the first ones all distances are new.
template <class T, int D>
__device__ void write_scores(
    float* ring, const Held<D>& queries, const Places<D>& at, int table, int row, bool is_first) {
  if (is_first) write_scores_from<T, D, 1>(ring, queries, at, table, row, 0);
#pragma unroll
  for (int x = kKept; x < kKept + kRows; x += 32)
    write_scores_from<T, D, 2>(ring, queries, at, table, row, x);
  __syncwarp();
}

__device__ inline void read_scores(float (&scores)[8][4], const float* ring) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* at = ring + (lane() / 4 + 8 * half) * kPitch + 8 * n + 2 * (lane() % 4);
      const float2 two = *reinterpret_cast<const float2*>(at);
      scores[n][2 * half] = two.x, scores[n][2 * half + 1] = two.y;
    }
}

// Moves the scores of the next keys to the ring's beginning. A barrier is to follow.
__device__ inline void keep_scores(float* ring) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float* at = ring + (lane() / 4 + 8 * half) * kPitch + lane() % 4 * 4;
    *reinterpret_cast<float4*>(at) = *reinterpret_cast<float4*>(at + kRows);
  }
}

// Which weights of 16 queries and 32 keys survive dropout: Philox 4 x 32 with 7 rounds decides on the 16 that
// a lane holds, 8 bits each, as `effasr_kernels.shared.philox.keep_mask` does.
struct Kept {
  uint32_t words[4], threshold;
  __device__ Kept(const AttentionCall& p, int64_t seed, int sequence, int head, int query, int key)
      : threshold(static_cast<uint32_t>(p.dropped) << 24) {
    uint32_t c0 = query / 16 * 8 + lane() / 4, c1 = key / 32 * 4 + lane() % 4, c2 = head, c3 = sequence;
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
      const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
      c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ key0, c1 = static_cast<uint32_t>(b);
      c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ key1, c3 = static_cast<uint32_t>(a);
      key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
  }
  // Whether number i of the lane's four in the n-th 8 of the 32 keys is kept.
  __device__ bool holds(int n, int i) const {
    return words[n / 2 * 2 + i % 2] << (24 - 8 * (i / 2 * 2 + n % 2)) >= threshold;
  }
};

}  // namespace effasr
