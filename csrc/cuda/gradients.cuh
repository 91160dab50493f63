// The gradients of scores, for 64 queries and 64 keys of a sequence, from tiles in shared memory.
//
//   dA_ij = keep_ij / (1 - p) (dy_i v_j),    dS_ij = A_ij (dA_ij - delta_i),    delta_i = dy_i y_i
//
// Three kernels compute them, each for the sums along another side: one goes through the queries of a tile of
// keys, one through the keys of a tile of queries, and one through the tiles of a diagonal, whose distances are
// the same. So nothing is added by atomics, and no matrix of T x T numbers is stored.
#pragma once

#include "scores.cuh"

namespace effasr {

// Eight warps: four of 16 queries for the first 32 keys of a tile, four for the others.
constexpr int kThreads = 256;
constexpr int kKeys = 32;
constexpr int kRingFloats = 16 * kPitch<kKeys>;
__device__ inline int warp_query() { return warp() % 4 * 16; }
__device__ inline int warp_key() { return warp() / 4 * kKeys; }

// Where the tiles of a pair lie: queries with either bias, gradients of results, keys, values, and 128 rows of
// the table in a ring; then the rings of the warps, which hold gradients of scores after the scores.
template <int D>
struct Tiles {
  uint32_t by_content, by_position, grad_out, keys, values, table, rings;
  float* ring;  // of this warp

  explicit __device__ Tiles(unsigned char* shared) {
    uint32_t next = shared_address(shared);
    for (uint32_t* tile : {&by_content, &by_position, &grad_out, &keys, &values, &table}) {
      *tile = next;
      next += kTileBytes<D>;
    }
    rings = next + kTileBytes<D>;
    ring = reinterpret_cast<float*>(shared + (rings - by_content)) + warp() * kRingFloats;
  }
};

// A sequence, and the first row of 64 queries and of 64 keys in it.
struct Pair {
  int sequence, queries, keys, first_q, first_k, query, key;

  // Of a tile of queries, or of keys: the sequence and the tile's first row.
  __device__ Pair(const AttentionCall& p, const int32_t* tile, bool is_of_keys)
      : sequence(tile[0]), queries(0), keys(0), first_q(0), first_k(0), query(tile[3]), key(tile[3]) {
    // The tail is number `sequences`: a part without the other one.
    if (sequence < p.sequences) {
      first_q = p.cu_seqlens_q[sequence], queries = p.cu_seqlens_q[sequence + 1] - first_q;
      first_k = p.cu_seqlens_k[sequence], keys = p.cu_seqlens_k[sequence + 1] - first_k;
    } else if (is_of_keys) {
      first_k = tile[1], keys = tile[2];
    } else {
      first_q = tile[1], queries = tile[2];
    }
  }
};

template <int D>
__device__ void copy_queries(const AttentionCall& p, uint32_t to, const uint16_t* matrix, const Pair& x, int head) {
  const int64_t stride = int64_t{p.heads} * D;
  copy_rows<D, kThreads>(to, matrix + x.first_q * stride + head * D, stride, x.query, x.queries);
}
template <int D>
__device__ void copy_keys(
    uint32_t to, const uint16_t* matrix, int64_t row, int64_t column, const Pair& x, int head) {
  copy_rows<D, kThreads>(to, matrix + x.first_k * row + head * column, row, x.key, x.keys);
}
// The table's rows for the upper 64 of the 128 distances of a pair, from the largest, or for the lower 64.
template <int D>
__device__ void copy_table(const AttentionCall& p, uint32_t to, const Pair& x, int head, bool is_lower) {
  const int largest = p.reach - 1 + x.query - x.key + (is_lower ? -1 : kRows - 1);
  copy_rows<D, kThreads, -1>(to, p.table + head * p.table_head, p.table_row, largest, 2 * p.reach - 1);
}

// 16 queries of a warp and 32 keys as left operands of products, 16 keys each.
using Operands = uint32_t[2][4];

// Weights after dropout, but for the factor, and the gradients of scores, but for their scale. `table_row` is
// that of the pair's largest distance.
template <class T, int D>
__device__ void differentiate(
    Operands& weights, Operands& grads, const Tiles<D>& tiles, const AttentionCall& p, const Pair& x, int head,
    int table_row) {
  const int query = x.query + warp_query(), key = x.key + warp_key();
  float a[4][4], ds[4][4] = {};
  write_scores<T, D, kKeys>(
      tiles.ring, Stored<D>{tiles.by_position, warp_query()}, tiles.table,
      table_row + 48 - warp_query() + warp_key(), true);
  read_scores<kKeys>(a, tiles.ring);
  multiply_rows<T, D, 2>(a, Stored<D>{tiles.by_content, warp_query()}, tiles.keys, warp_key());
  multiply_rows<T, D, 2>(ds, Stored<D>{tiles.grad_out, warp_query()}, tiles.values, warp_key());

  const float scale_log2 = p.scale * 1.44269504f, factor = 256.0f / (256 - p.dropped);
  float delta[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + lane() / 4 + 8 * half;
    const int64_t index = int64_t{head} * p.rows_q + x.first_q + row;
    const bool exists = row < x.queries;
    const float lse = exists ? p.lse[index] : 0;
    delta[half] = exists ? p.delta[index] : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& weight = a[i / 2][2 * half + i % 2];
      weight = exp2_approximately(fmaf(weight, scale_log2, -lse));
    }
  }
  // Queries past the end need no mask: their gradients of results are zeros.
  const Range of_first(p, x.query, x.keys), of_last(p, min(x.query + kRows, x.queries) - 1, x.keys);
  if (x.key < of_last.first || x.key + kRows > of_first.end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Range seen(p, query + lane() / 4 + 8 * half, x.keys);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (!seen.holds(key + i / 2 * 8 + 2 * (lane() % 4) + i % 2)) a[i / 2][2 * half + i % 2] = 0;
    }
  }
  if (p.dropped) {
    const Kept kept(p, *p.seed, x.sequence, head, query, key);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float &weight = a[i / 4][i % 4], &grad = ds[i / 4][i % 4];
      const bool is_kept = kept.holds(i / 4, i % 4);
      grad = weight * ((is_kept ? grad * factor : 0) - delta[i % 4 / 2]);
      if (!is_kept) weight = 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      ds[i / 4][i % 4] = a[i / 4][i % 4] * (ds[i / 4][i % 4] - delta[i % 4 / 2]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    as_operand<T>(weights[n], a[2 * n], a[2 * n + 1]);
    as_operand<T>(grads[n], ds[2 * n], ds[2 * n + 1]);
  }
}

// The warp's 16 rows of 32 numbers, in its ring: those of `number` 0 and 1 one after the other, with a pitch
// by which eight rows of a matrix lie in different banks.
constexpr int kPairPitch = 2 * kKeys + 16;
__device__ inline void store_pairs(const Operands& x, float* ring, int number) {
  unsigned char* to = reinterpret_cast<unsigned char*>(ring) + number * 16 * kPairPitch;
#pragma unroll
  for (int i = 0; i < 8; ++i)
    *reinterpret_cast<uint32_t*>(
        to + (lane() / 4 + i % 2 * 8) * kPairPitch + i / 2 * 16 + lane() % 4 * 4) = x[i / 4][i % 4];
}
// A left operand of 16 keys of the tile from `key` on and 16 queries from `query` on.
__device__ inline void load_pairs(uint32_t (&a)[4], uint32_t rings, int query, int key, int number) {
  const uint32_t tile = rings + (query / 16 + key / kKeys * 4) * kRingFloats * 4 + number * 16 * kPairPitch;
  const int row = lane() / 16 * 8 + lane() % 8, word = key % kKeys / 8 + lane() / 8 % 2;
  load_matrices<true>(a, tile + row * kPairPitch + word * 16);
}

// The warp's 16 rows by distance, in its ring: 48 columns from its largest distance on, zeros where there is no
// key. The pitch is an odd number of words of 16 bytes.
constexpr int kDistances = kKeys + 16, kDistancePitch = kDistances + 8;
__device__ inline void store_by_distance(const Operands& x, float* ring) {
  uint4* words = reinterpret_cast<uint4*>(ring);
  __syncwarp();
  for (int i = lane(); i < 16 * kDistancePitch / 8; i += 32) words[i] = make_uint4(0, 0, 0, 0);
  __syncwarp();
  uint16_t* to = reinterpret_cast<uint16_t*>(ring);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = lane() / 4 + i % 2 * 8, key = i / 2 * 8 + 2 * (lane() % 4);
    uint16_t* at = to + r * kDistancePitch + key + 15 - r;
    at[0] = static_cast<uint16_t>(x[i / 4][i % 4]), at[1] = static_cast<uint16_t>(x[i / 4][i % 4] >> 16);
  }
  __syncwarp();
}
// A left operand of what a warp has stored: its 16 queries by 16 distances from `first` on, or transposed.
template <bool kTransposed>
__device__ void load_by_distance(uint32_t (&a)[4], uint32_t rings, int warp, int first) {
  const int low = lane() % 16, high = lane() / 16;
  const int row = kTransposed ? high * 8 + lane() % 8 : low;
  const int column = kTransposed ? lane() / 8 % 2 : high;
  const uint32_t tile = rings + warp * kRingFloats * 4;
  load_matrices<kTransposed>(a, tile + (row * kDistancePitch + first + column * 8) * 2);
}

}  // namespace effasr
