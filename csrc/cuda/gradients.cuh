// The gradients of scores, for 64 queries and 64 keys of a sequence, from tiles in shared memory.
//
//   dA_ij = keep_ij / (1 - p) (dy_i v_j),    dS_ij = A_ij (dA_ij - delta_i),    delta_i = dy_i y_i
//
// They are in shared memory as two matrices, by key and by distance, from which warps make the products of all
// gradients. So they are computed once, and no matrix of T x T numbers is stored.
#pragma once

#include "group.cuh"
#include "scores.cuh"

namespace effasr {

// Eight warps: four of 16 queries for the first 32 keys of a tile, four for the others. Where registers of a group of
// warps suffice, it has all 64 keys.
template <int D>
constexpr bool kIsOneGroup = kHasGroups && D == 64;
template <int D>
constexpr int kThreads = kIsOneGroup<D> ? 128 : 256;
template <int D>
constexpr int kKeys = kIsOneGroup<D> ? kRows : kRows / 2;
template <int D>
constexpr int kRingFloats = 16 * kPitch<kKeys<D>>;
__device__ inline int warp_query() { return warp() % 4 * 16; }
template <int D>
__device__ int warp_key() { return kIsOneGroup<D> ? 0 : warp() / 4 * kKeys<D>; }

// 16 queries and 64 keys have 80 distances, 64 queries 128, for which there are matrices of 8 x 8.
constexpr int kDistances = kRows + 16;
constexpr int kOctetBytes = 2 * kRows / 8 * 128, kBandsBytes = kRows / 8 * kOctetBytes;

// Where the tiles of a pair lie: queries with either bias, gradients of results, keys, values, and 128 rows of
// the table in a ring; then the rings of the warps, which hold weights and gradients of scores after the scores (for
// a group as two tiles), and those by distance.
template <int D>
struct Tiles {
  static constexpr int kByContent = 0, kByPosition = kTileBytes<D>, kGradOut = 2 * kTileBytes<D>,
                       kKeyTile = 3 * kTileBytes<D>, kValues = 4 * kTileBytes<D>, kTable = 5 * kTileBytes<D>,
                       kRings = 7 * kTileBytes<D>, kBands = kRings + 8 * 16 * kPitch<kRows / 2> * 4,
                       kOfWeights = kRings, kOfScores = kRings + kTileBytes<kRows>,
                       kEnd = kBands + kBandsBytes;
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

// Stores 64 queries from `q` on plus either bias, rounded once; past the sequence, which has `rows`, again the last.
template <class T, int D>
__device__ void add_biases(const AttentionCall& p, uint32_t shared, const uint16_t* q, int rows, int head) {
  constexpr int kApart = kThreads<D> / (D / 8);
  const int word = threadIdx.x % (D / 8), row = threadIdx.x / (D / 8);
  const auto read = [](const uint16_t* from) { return *reinterpret_cast<const uint4*>(from); };
  const uint4 content = read(p.content_bias + head * D + word * 8);
  const uint4 position = read(p.position_bias + head * D + word * 8);
  const uint32_t to = shared + place<D>(row, word);
#pragma unroll
  for (int i = 0; i < kRows; i += kApart) {
    const uint4 numbers = read(q + int64_t{min(row + i, rows - 1)} * p.q_row + word * 8);
    uint4 by_content, by_position;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t pair = (&numbers.x)[j];
      (&by_content.x)[j] = T::add(pair, (&content.x)[j]), (&by_position.x)[j] = T::add(pair, (&position.x)[j]);
    }
    store_word(to + Tiles<D>::kByContent + i * 128, by_content);
    store_word(to + Tiles<D>::kByPosition + i * 128, by_position);
  }
}
template <int D>
__device__ void copy_keys(
    uint32_t to, const uint16_t* matrix, int row, int column, const Pair& x, int head) {
  copy_rows<D, kThreads<D>>(
      to, matrix + (int64_t{x.first_k} + x.key) * row + int64_t{head} * column, row, x.key, x.keys);
}

// 16 queries of a warp and its keys as left operands of products, 16 keys each.
template <int N>
using Operands = uint32_t[N][4];

// Weights after dropout, but for the factor, and the gradients of scores, but for their scale. `table_row` is
// that of the pair's largest distance; `norms` are the sequence's.
template <class T, int D>
__device__ void differentiate(
    Operands<kKeys<D> / 16>& weights, Operands<kKeys<D> / 16>& grads, uint32_t tiles, const Places<D>& at, float* ring,
    const AttentionCall& p, const Pair& x, int head, int table_row, const float2* norms) {
  constexpr int N = kKeys<D> / 8;
  const int first = warp_key<D>(), query = x.query + warp_query(), key = x.key + first;
  float a[N][4], ds[N][4];
  using Shared = Tiles<D>;
  if constexpr (kHasGroups) {
    // The group's queries meet 64 distances more than it has keys, the warp's 16 more.
    const uint64_t tile = descriptor(tiles), keys = tile + first * 128 / 16;
#pragma unroll
    for (int x = 0; x < 8 + N; x += N) {
      float by_position[N][4];
      begin_products();
      multiply_tile_rows<T, D, false>(
          by_position, tile + Shared::kByPosition / 16,
          tile + (Shared::kTable + row_of<D>((table_row + first + 8 * x) & 127)) / 16);
      if (x == 0) multiply_tile_rows<T, D, false>(ds, tile + Shared::kGradOut / 16, keys + Shared::kValues / 16);
      end_products(by_position);
      if (x == 0) end_products(ds);
#pragma unroll
      for (int number = 0; number < 4; ++number)
        if (warp() % 4 == number)
#pragma unroll
          for (int n = 0; n < N; ++n) {
            const int place = x + n - 6 + 2 * number;
            if (place >= 0 && place < N + 2) write_distances<kKeys<D>>(ring, by_position[n], 8 * place);
          }
    }
    __syncwarp();
    read_scores<kKeys<D>>(a, ring);
    begin_products();
    multiply_tile_rows<T, D, true>(a, tile + Shared::kByContent / 16, keys + Shared::kKeyTile / 16);
    end_products(a);
  } else {
    const auto stored = [](int number) { return Stored<D>{number, warp_query()}; };
    write_scores<T, D, kKeys<D>>(
        ring, stored(Shared::kByPosition), at, Shared::kTable, table_row + 48 - warp_query() + first, true);
    read_scores<kKeys<D>>(a, ring);
    multiply_rows<T, D, N / 2>(a, stored(Shared::kByContent), at, Shared::kKeyTile, first);
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) ds[i / 4][i % 4] = 0;
    multiply_rows<T, D, N / 2>(ds, stored(Shared::kGradOut), at, Shared::kValues, first);
  }

  const float scale_log2 = p.scale * 1.44269504f, factor = 256.0f / (256 - p.dropped);
  float mean[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = query + lane() / 4 + 8 * half;
    // Weights of queries past the end are zeros.
    const float2 norm = row < x.queries ? norms[row] : float2{INFINITY, 0};
    mean[half] = norm.y;
#pragma unroll
    for (int i = 0; i < 2 * N; ++i) {
      float& weight = a[i / 2][2 * half + i % 2];
      weight = exp2_approximately(fmaf(weight, scale_log2, -norm.x));
    }
  }
  const Range of_first(p, x.query, x.keys), of_last(p, min(x.query + kRows, x.queries) - 1, x.keys);
  const int first_key = key + 2 * (lane() % 4);
  if (x.key + kRows > of_first.end) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int end = Range(p, query + lane() / 4 + 8 * half, x.keys).end - first_key;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i)
        if (i / 2 * 8 + i % 2 >= end) a[i / 2][2 * half + i % 2] = 0;
    }
  }
  if (x.key < of_last.first) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int first = Range(p, query + lane() / 4 + 8 * half, x.keys).first - first_key;
#pragma unroll
      for (int i = 0; i < 2 * N; ++i)
        if (i / 2 * 8 + i % 2 < first) a[i / 2][2 * half + i % 2] = 0;
    }
  }
#pragma unroll
  for (int n = 0; n < N / 2; ++n) as_operand<T>(weights[n], a[2 * n], a[2 * n + 1]);
  if (p.dropped) {
#pragma unroll
    for (int n = 0; n < N; n += 4) {
      const Kept kept(p, *p.seed, x.sequence, head, query, key + 8 * n);
#pragma unroll
      for (int i = 4 * n; i < 4 * n + 16; ++i) {
        const bool is_kept = kept.holds(i / 4 - n, i % 4);
        float& grad = ds[i / 4][i % 4];
        grad = a[i / 4][i % 4] * ((is_kept ? grad * factor : 0) - mean[i % 4 / 2]);
        if (!is_kept) weights[i / 8][i % 8 / 2] &= i % 2 ? 0xffff : 0xffff0000;
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4 * N; ++i) ds[i / 4][i % 4] = a[i / 4][i % 4] * (ds[i / 4][i % 4] - mean[i % 4 / 2]);
  }
#pragma unroll
  for (int n = 0; n < N / 2; ++n) as_operand<T>(grads[n], ds[2 * n], ds[2 * n + 1]);
}

// Stores a warp's rows in a tile of 64 x 64; `to` is where its first word goes, of a group as `store_matrices` has it.
template <int N>
__device__ void store_operands(const Operands<N>& x, uint32_t to) {
#pragma unroll
  for (int i = 0; i < (kHasGroups ? N : 4 * N); ++i)
    // A word of 16 bytes farther in all rows' order is an exchange of bits.
    if constexpr (kHasGroups) store_matrices(to ^ i * 32, x[i]);
    else asm volatile("st.shared.b32 [%0], %1;" ::"r"((to ^ i / 2 * 16) + i % 2 * 1024), "r"(x[i / 4][i % 4]) : "memory");
}

// The same by distance, in matrices of 8 x 8 queries and distances: zeros where there is no key.
template <int D>
__device__ void store_in_octets(const Operands<kKeys<D> / 16>& x, unsigned char* bands) {
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int distance = kRows - 1 - warp_query() - lane() / 4 + warp_key<D>() + 2 * (lane() % 4) + odd;
    unsigned char* row = bands + warp_query() / 8 * kOctetBytes + lane() / 4 * 16;
    unsigned char* to = row + distance / 8 * 128 + distance % 8 * 2;
#pragma unroll
    for (int i = 0; i < kKeys<D> / 4; ++i)
      *reinterpret_cast<uint16_t*>(to + i % 2 * (kOctetBytes - 128) + i / 2 * 128) =
          static_cast<uint16_t>(x[i / 4][i % 4] >> 16 * odd);
  }
}

// A left operand of 16 queries from `query` on by 16 distances from `distance` on, or transposed.
template <bool kTransposed>
__device__ void load_by_distance(uint32_t (&a)[4], uint32_t bands, int query, int distance) {
  const int low = lane() / 8 % 2, high = lane() / 16;
  const int row = query / 8 + (kTransposed ? high : low), column = distance / 8 + (kTransposed ? low : high);
  load_matrices<kTransposed>(a, bands + row * kOctetBytes + column * 128 + lane() % 8 * 16);
}

}  // namespace effasr
