// The gradients of scores, for 64 queries and 64 keys of a sequence, from tiles in shared memory.
//
//   dA_ij = keep_ij / (1 - p) (dy_i v_j),    dS_ij = A_ij (dA_ij - delta_i),    delta_i = dy_i y_i
//
// They are in shared memory as two matrices, by key and by distance, from which warps make the products of all
// gradients. So they are computed once, and no matrix of T x T numbers is stored.
#pragma once

#include "scores.cuh"

namespace effasr {

// Eight warps: four of 16 queries for the first 32 keys of a tile, four for the others.
constexpr int kThreads = 256;
constexpr int kKeys = 32;
constexpr int kRingFloats = 16 * kPitch<kKeys>;
__device__ inline int warp_query() { return warp() % 4 * 16; }
__device__ inline int warp_key() { return warp() / 4 * kKeys; }

// Gradients of scores by distance, 80 for 16 queries and 64 keys: zeros where there is no key. The pitch is an
// odd number of words of 16 bytes.
constexpr int kDistances = kRows + 16, kDistancePitch = kDistances + 8, kBandBytes = 16 * kDistancePitch * 2;

// Where the tiles of a pair lie: queries with either bias, gradients of results, keys, values, and 128 rows of
// the table in a ring; then the rings of the warps, which hold gradients of scores after the scores, and those
// by distance.
template <int D>
struct Tiles {
  static constexpr int kByContent = 0, kByPosition = kTileBytes<D>, kGradOut = 2 * kTileBytes<D>,
                       kKeyTile = 3 * kTileBytes<D>, kValues = 4 * kTileBytes<D>, kTable = 5 * kTileBytes<D>,
                       kRings = 7 * kTileBytes<D>, kBands = kRings + kThreads / 32 * kRingFloats * 4,
                       kEnd = kBands + 4 * kBandBytes;
};

// A sequence, and the first row of 64 queries and of 64 keys in it.
struct Pair {
  int sequence, queries, keys, first_q, first_k, query, key;

  // Of a tile of keys: the sequence and the tile's first row.
  __device__ Pair(const AttentionCall& p, const int32_t* tile)
      : sequence(tile[0]), queries(0), keys(tile[2]), first_q(0), first_k(tile[1]), query(0), key(tile[3]) {
    // The tail is number `sequences`: keys without queries.
    if (sequence < p.sequences)
      first_q = p.cu_seqlens_q[sequence], queries = p.cu_seqlens_q[sequence + 1] - first_q;
  }
};

template <int D>
__device__ void copy_grad_out(const AttentionCall& p, uint32_t to, const Pair& x, int head) {
  const int stride = p.heads * D;
  copy_rows<D, kThreads>(to, p.grad_out + int64_t{x.first_q} * stride + head * D, stride, x.query, x.queries);
}
// Stores queries plus either bias, rounded once; zeros past the sequence.
template <class T, int D>
__device__ void add_biases(const AttentionCall& p, uint32_t shared, const Pair& x, int head) {
  constexpr int kApart = kThreads / (D / 8);
  const int word = threadIdx.x % (D / 8), row = threadIdx.x / (D / 8);
  const auto read = [](const uint16_t* from) { return *reinterpret_cast<const uint4*>(from); };
  const uint4 content = read(p.content_bias + head * D + word * 8);
  const uint4 position = read(p.position_bias + head * D + word * 8);
  const uint16_t* q = p.q + (int64_t{x.first_q} + x.query + row) * p.q_row + int64_t{head} * p.q_head + word * 8;
  const uint32_t to = shared + place<D>(row, word);
#pragma unroll
  for (int i = 0; i < kRows; i += kApart, q += kApart * p.q_row) {
    uint4 by_content = {}, by_position = {};
    if (x.query + row + i < x.queries) {
      const uint4 numbers = read(q);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t pair = (&numbers.x)[j];
        (&by_content.x)[j] = T::add(pair, (&content.x)[j]), (&by_position.x)[j] = T::add(pair, (&position.x)[j]);
      }
    }
    store_word(to + Tiles<D>::kByContent + i * 128, by_content);
    store_word(to + Tiles<D>::kByPosition + i * 128, by_position);
  }
}
template <int D>
__device__ void copy_keys(
    uint32_t to, const uint16_t* matrix, int row, int column, const Pair& x, int head) {
  copy_rows<D, kThreads>(to, matrix + int64_t{x.first_k} * row + int64_t{head} * column, row, x.key, x.keys);
}
// The table's rows for the upper 64 of the 128 distances of a pair, from the largest, or for the lower 64.
template <int D>
__device__ void copy_table(const AttentionCall& p, uint32_t to, const Pair& x, int head, bool is_lower) {
  const int largest = p.reach - 1 + x.query - x.key + (is_lower ? -1 : kRows - 1);
  copy_rows<D, kThreads, -1>(to, p.table + int64_t{head} * p.table_head, p.table_row, largest, 2 * p.reach - 1);
}

// 16 queries of a warp and 32 keys as left operands of products, 16 keys each.
using Operands = uint32_t[2][4];

// Weights after dropout, but for the factor, and the gradients of scores, but for their scale. `table_row` is
// that of the pair's largest distance; `norms` are the sequence's.
template <class T, int D>
__device__ void differentiate(
    Operands& weights, Operands& grads, const Places<D>& at, float* ring, const AttentionCall& p, const Pair& x,
    int head, int table_row, const float2* norms) {
  const int query = x.query + warp_query(), key = x.key + warp_key();
  float a[4][4], ds[4][4] = {};
  using Shared = Tiles<D>;
  const auto stored = [](int tile) { return Stored<D>{tile, warp_query()}; };
  write_scores<T, D, kKeys>(
      ring, stored(Shared::kByPosition), at, Shared::kTable, table_row + 48 - warp_query() + warp_key(), true);
  read_scores<kKeys>(a, ring);
  multiply_rows<T, D, 2>(a, stored(Shared::kByContent), at, Shared::kKeyTile, warp_key());
  multiply_rows<T, D, 2>(ds, stored(Shared::kGradOut), at, Shared::kValues, warp_key());

  const float scale_log2 = p.scale * 1.44269504f, factor = 256.0f / (256 - p.dropped);
  float mean[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + lane() / 4 + 8 * half;
    const float2 norm = row < x.queries ? norms[row] : float2{};
    mean[half] = norm.y;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& weight = a[i / 2][2 * half + i % 2];
      weight = exp2_approximately(fmaf(weight, scale_log2, -norm.x));
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
      grad = weight * ((is_kept ? grad * factor : 0) - mean[i % 4 / 2]);
      if (!is_kept) weight = 0;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      ds[i / 4][i % 4] = a[i / 4][i % 4] * (ds[i / 4][i % 4] - mean[i % 4 / 2]);
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
// The place of a lane's row in four 8 x 8 matrices, for the left operand of 16 rows, or of 16 columns.
template <bool kTransposed>
__device__ int place_of_left(int pitch) {
  const int low = lane() % 16, high = lane() / 16;
  return kTransposed ? (high * 8 + lane() % 8) * pitch + lane() / 8 % 2 * 16 : low * pitch + high * 16;
}
// A left operand of 16 queries from `query` on and 16 keys of the tile from `key` on, or transposed.
template <bool kTransposed>
__device__ void load_pairs(uint32_t (&a)[4], uint32_t rings, int query, int key, int number) {
  const uint32_t tile = rings + (query / 16 + key / kKeys * 4) * kRingFloats * 4 + number * 16 * kPairPitch;
  load_matrices<kTransposed>(a, tile + key % kKeys * 2 + place_of_left<kTransposed>(kPairPitch));
}

// The warp's 16 rows and 32 keys among those of its queries by distance, from their largest on.
__device__ inline void store_by_distance(const Operands& x, unsigned char* bands) {
  uint16_t* to = reinterpret_cast<uint16_t*>(bands + warp_query() / 16 * kBandBytes) + warp_key();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = lane() / 4 + i % 2 * 8, key = i / 2 * 8 + 2 * (lane() % 4);
    uint16_t* at = to + r * (kDistancePitch - 1) + key + 15;
    at[0] = static_cast<uint16_t>(x[i / 4][i % 4]), at[1] = static_cast<uint16_t>(x[i / 4][i % 4] >> 16);
  }
}
// A left operand of 16 queries from `query` on by 16 distances from `first` on, or transposed.
template <bool kTransposed>
__device__ void load_by_distance(uint32_t (&a)[4], uint32_t bands, int query, int first) {
  const uint32_t band = bands + query / 16 * kBandBytes + first * 2;
  load_matrices<kTransposed>(a, band + place_of_left<kTransposed>(kDistancePitch * 2));
}

}  // namespace effasr
