// The backward of attention with relative positions; `cuda/gradients.cuh` has what its kernels share.
#include "cuda/gradients.cuh"
#include "cuda/launch.cuh"

namespace effasr {

// Blocks of a multiprocessor, by its shared memory: one takes 84 or 140 kB.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
template <int D>
constexpr int kBlocks = 1;
#else
template <int D>
constexpr int kBlocks = 128 / D;
#endif

// Queries plus the biases, rounded once, and delta: rows of one head, D / 8 threads for each.
template <class T, int D>
__global__ void __launch_bounds__(kThreads) attention_backward_rows(const __grid_constant__ AttentionCall p) {
  constexpr int kWords = D / 8;
  const int64_t row = int64_t{blockIdx.x} * (kThreads / kWords) + threadIdx.x / kWords;
  const int head = blockIdx.y, column = threadIdx.x % kWords * 8;
  float sum = 0;
  if (row < p.rows_q) {
    const int64_t at = (row * p.heads + head) * D + column;
    const auto read = [](const uint16_t* x) { return *reinterpret_cast<const uint4*>(x); };
    const uint4 words[5] = {
        read(p.q + row * p.q_row + head * p.q_head + column), read(p.content_bias + head * D + column),
        read(p.position_bias + head * D + column), read(p.out + at), read(p.grad_out + at)};
    uint4 by_content, by_position;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 x[5];
#pragma unroll
      for (int j = 0; j < 5; ++j) x[j] = T::unpack((&words[j].x)[i]);
      (&by_content.x)[i] = T::pack(x[0].x + x[1].x, x[0].y + x[1].y);
      (&by_position.x)[i] = T::pack(x[0].x + x[2].x, x[0].y + x[2].y);
      sum = fmaf(x[3].x, x[4].x, fmaf(x[3].y, x[4].y, sum));
    }
    *reinterpret_cast<uint4*>(p.by_content + at) = by_content;
    *reinterpret_cast<uint4*>(p.by_position + at) = by_position;
  }
#pragma unroll
  for (int other = 1; other < kWords; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
  if (row < p.rows_q && column == 0) p.delta[int64_t{head} * p.rows_q + row] = sum;
}

// Gradients of 64 keys and values of a head, and this tile's part of the biases'.
template <class T, int D>
__global__ void __launch_bounds__(kThreads, kBlocks<D>) attention_backward_keys(const __grid_constant__ AttentionCall p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tiles<D> tiles(shared);
  const int32_t* tile = p.tiles + 4 * (1 + blockIdx.x);
  Pair x(p, tile, true);
  const int head = blockIdx.y, is_key = warp() / 4;
  const bool exists = x.key < tile[2];
  const Seers seers(p, x.key, min(x.key + kRows, x.keys) - 1, x.queries);
  const int end = exists ? seers.end : 0;
  x.query = seers.first / kRows * kRows;
  const bool is_seen = x.query < end;
  // Half of the warps have the gradient of 16 values each, half that of keys, and sums of its weights.
  float grad[D / 8][4] = {}, sums[2] = {};
  if (is_seen) {
    copy_keys<D>(tiles.keys, p.k, p.k_row, p.k_head, x, head);
    copy_keys<D>(tiles.values, p.v, p.v_row, p.v_head, x, head);
    copy_table<D>(p, tiles.table, x, head, false);
    copy_table<D>(p, tiles.table + kTileBytes<D>, x, head, true);
    copy_queries<D>(p, tiles.by_content, p.by_content, x, head);
    copy_queries<D>(p, tiles.by_position, p.by_position, x, head);
    copy_queries<D>(p, tiles.grad_out, p.grad_out, x, head);
  }
  commit_copies();
  const uint32_t one = T::pack(1, 1);
  // The upper half of the distances is new, and takes the place of the lower.
  int upper = 0;
  while (x.query < end) {
    wait_for_copies<0>();
    __syncthreads();
    Operands weights, grads;
    differentiate<T, D>(weights, grads, tiles, p, x, head, upper * kRows);
    __syncwarp();
    store_pairs(weights, tiles.ring, 0);
    store_pairs(grads, tiles.ring, 1);
    __syncthreads();
    x.query += kRows, upper ^= 1;
    if (x.query < end) {
      copy_table<D>(p, tiles.table + upper * kTileBytes<D>, x, head, false);
      copy_queries<D>(p, tiles.by_position, p.by_position, x, head);
    }
    // Unrolled whole, it would take registers for loads ahead.
#pragma unroll 1
    for (int query = 0; query < kRows; query += 16) {
      uint32_t a[4];
      load_pairs(a, tiles.rings, query, warp_query(), is_key);
      multiply_columns<T, D>(grad, a, is_key ? tiles.by_content : tiles.grad_out, query);
      if (is_key) {
        // All columns are the same.
        float columns[4] = {sums[0], 0, sums[1], 0};
        T::multiply(columns, a, one, one);
        sums[0] = columns[0], sums[1] = columns[2];
      }
    }
    __syncthreads();
    if (x.query < end) {
      copy_queries<D>(p, tiles.by_content, p.by_content, x, head);
      copy_queries<D>(p, tiles.grad_out, p.grad_out, x, head);
    }
    commit_copies();
  }
  if (exists) {
    const float factor = is_key ? p.scale : 256.0f / (256 - p.dropped), factors[2] = {factor, factor};
    const int row = x.key + warp_query();
    store_rows<T, D>(
        (is_key ? p.grad_k : p.grad_v) + int64_t{x.first_k + row} * p.grad_k_row + head * D, p.grad_k_row,
        x.keys - row, grad, factors, shared + warp() * 16 * D * 2);
  }
  // The gradient of the content bias is the sum over keys of the sums of their scores' gradients. That of the
  // position bias is what is left of the sum of the queries' gradients.
  float* by_key = reinterpret_cast<float*>(shared + (tiles.rings - tiles.by_content));
  if (is_key && lane() % 4 == 0) {
    const int key = warp_query() + lane() / 4;
    by_key[key] = sums[0], by_key[key + 8] = sums[1];
  }
  __syncthreads();
  if (threadIdx.x < D / 2) {
    const int word = threadIdx.x / 4;
    const unsigned char* keys = shared + (tiles.keys - tiles.by_content) + threadIdx.x % 4 * 4;
    float2 sum = {};
    for (int n = 0; is_seen && n < kRows; ++n) {
      const float2 two = T::unpack(*reinterpret_cast<const uint32_t*>(keys + place<D>(n, word)));
      sum.x = fmaf(by_key[n], two.x, sum.x), sum.y = fmaf(by_key[n], two.y, sum.y);
    }
    sum.x *= p.scale, sum.y *= p.scale;
    float* to = p.grad_biases + (2 * (int64_t{p.tiles_q} + blockIdx.x) * p.heads + head) * D + 2 * threadIdx.x;
    *reinterpret_cast<float2*>(to) = sum;
    *reinterpret_cast<float2*>(to + p.heads * D) = make_float2(-sum.x, -sum.y);
  }
}

// Gradients of 64 queries of a head, and their sum, for the position bias.
template <class T, int D>
__global__ void __launch_bounds__(kThreads, kBlocks<D>) attention_backward_queries(
    const __grid_constant__ AttentionCall p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tiles<D> tiles(shared);
  const int32_t* tile = p.tiles + 4 * (1 + blockIdx.x);
  Pair x(p, tile, false);
  const int head = blockIdx.y;
  const bool exists = x.query < tile[2];
  const Range of_first(p, x.query, x.keys), of_last(p, min(x.query + kRows, x.queries) - 1, x.keys);
  const int end = exists ? of_last.end : 0;
  x.key = of_first.first / kRows * kRows;
  float grad_q[D / 8][4] = {};
  if (x.key < end) {
    copy_queries<D>(p, tiles.by_content, p.by_content, x, head);
    copy_queries<D>(p, tiles.by_position, p.by_position, x, head);
    copy_queries<D>(p, tiles.grad_out, p.grad_out, x, head);
    copy_table<D>(p, tiles.table, x, head, false);
    copy_table<D>(p, tiles.table + kTileBytes<D>, x, head, true);
    copy_keys<D>(tiles.keys, p.k, p.k_row, p.k_head, x, head);
    copy_keys<D>(tiles.values, p.v, p.v_row, p.v_head, x, head);
  }
  commit_copies();
  int upper = 0;
  while (x.key < end) {
    wait_for_copies<0>();
    __syncthreads();
    Operands weights, grads;
    differentiate<T, D>(weights, grads, tiles, p, x, head, upper * kRows);
    __syncthreads();
    Pair next = x;
    next.key += kRows;
    if (next.key < end) copy_keys<D>(tiles.values, p.v, p.v_row, p.v_head, next, head);
#pragma unroll
    for (int n = 0; n < 2; ++n) multiply_columns<T, D>(grad_q, grads[n], tiles.keys, warp_key() + 16 * n);
    store_by_distance(grads, tiles.ring);
#pragma unroll 1
    for (int distance = 0; distance < kDistances; distance += 16) {
      uint32_t a[4];
      load_by_distance<false>(a, tiles.rings, warp(), distance);
      const int row = upper * kRows + 48 - warp_query() + warp_key() + distance;
      multiply_columns<T, D>(grad_q, a, tiles.table, row % 128);
    }
    __syncthreads();
    if (next.key < end) {
      // The lower half of the distances is the upper one now.
      copy_table<D>(p, tiles.table + upper * kTileBytes<D>, next, head, true);
      copy_keys<D>(tiles.keys, p.k, p.k_row, p.k_head, next, head);
    }
    commit_copies();
    x = next, upper ^= 1;
  }
  // Both halves of the keys.
  float* other = reinterpret_cast<float*>(shared) + warp_query() * D + lane();
  if (warp() >= 4)
#pragma unroll
    for (int i = 0; i < D / 2; ++i) other[i * 32] = grad_q[i / 4][i % 4];
  __syncthreads();
  float* by_warp = reinterpret_cast<float*>(shared + (tiles.rings - tiles.by_content));
  if (warp() < 4) {
#pragma unroll
    for (int i = 0; i < D / 2; ++i) grad_q[i / 4][i % 4] += other[i * 32];
#pragma unroll
    for (int i = 0; i < D / 4; ++i) {
      float sum = grad_q[i / 2][i % 2] + grad_q[i / 2][i % 2 + 2];
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) sum += __shfl_xor_sync(~0u, sum, apart);
      if (lane() < 4) by_warp[warp() * D + i / 2 * 8 + 2 * lane() + i % 2] = sum;
    }
    if (exists) {
      const float scale[2] = {p.scale, p.scale};
      const int row = x.query + warp_query();
      // Of the same warp, which has read it.
      unsigned char* staged = shared + warp_query() * D * 4;
      store_rows<T, D>(
          p.grad_q + int64_t{x.first_q + row} * p.grad_q_row + head * D, p.grad_q_row, x.queries - row, grad_q, scale,
          staged);
    }
  }
  __syncthreads();
  if (threadIdx.x < D) {
    float sum = 0;
    for (int n = 0; n < 4; ++n) sum += by_warp[n * D + threadIdx.x];
    float* to = p.grad_biases + (2 * int64_t{blockIdx.x} * p.heads + head) * D + threadIdx.x;
    to[0] = 0, to[p.heads * D] = sum * p.scale;
  }
}

// Gradients of the 128 distances of a diagonal of tiles: of 64 queries and the 64 keys that are so many tiles
// before or behind. Each split takes its share of the tiles of queries.
template <class T, int D>
__global__ void __launch_bounds__(kThreads, kBlocks<D>) attention_backward_distances(
    const __grid_constant__ AttentionCall p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const Tiles<D> tiles(shared);
  const int head = blockIdx.y, split = blockIdx.x % p.splits, diagonal = blockIdx.x / p.splits;
  const int behind = (diagonal - p.diagonals / 2) * kRows;
  // Without a row there is no table of tiles.
  const int live = p.rows_q ? p.tiles[0] : 0;
  float sums[D / 8][4] = {};  // of 16 distances
  bool has_table = false;
  for (int number = split; number < live; number += p.splits) {
    Pair x(p, p.tiles + 4 * (1 + number), false);
    x.key = x.query - behind;
    if (x.key < 0 || x.key >= x.keys) continue;
    const Range of_first(p, x.query, x.keys), of_last(p, min(x.query + kRows, x.queries) - 1, x.keys);
    if (x.key + kRows <= of_first.first || x.key >= of_last.end) continue;
    __syncthreads();
    if (!has_table) {
      copy_table<D>(p, tiles.table, x, head, false);
      copy_table<D>(p, tiles.table + kTileBytes<D>, x, head, true);
      has_table = true;
    }
    copy_queries<D>(p, tiles.by_content, p.by_content, x, head);
    copy_queries<D>(p, tiles.by_position, p.by_position, x, head);
    copy_queries<D>(p, tiles.grad_out, p.grad_out, x, head);
    copy_keys<D>(tiles.keys, p.k, p.k_row, p.k_head, x, head);
    copy_keys<D>(tiles.values, p.v, p.v_row, p.v_head, x, head);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    Operands weights, grads;
    differentiate<T, D>(weights, grads, tiles, p, x, head, 0);
    store_by_distance(grads, tiles.ring);
    __syncthreads();
#pragma unroll
    for (int other = 0; other < 8; ++other) {
      const int query = other % 4 * 16, key = other / 4 * kKeys;
      // Where the other's largest distance is among those of the pair.
      const int distance = 16 * warp() - (48 - query + key);
      if (distance < 0 || distance >= kDistances) continue;
      uint32_t a[4];
      load_by_distance<true>(a, tiles.rings, other, distance);
      multiply_columns<T, D>(sums, a, tiles.by_position, query);
    }
  }
  float* to = p.grad_distances + (int64_t{blockIdx.x} * p.heads + head) * (2 * kRows * D);
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * warp() + lane() / 4 + 8 * half;
      *reinterpret_cast<float2*>(to + row * D + 8 * n + 2 * (lane() % 4)) =
          make_float2(sums[n][2 * half], sums[n][2 * half + 1]);
    }
}

// The gradient of the table: of each distance the sums of the two diagonals that have it.
template <class T, int D>
__global__ void __launch_bounds__(kThreads) attention_backward_table(const __grid_constant__ AttentionCall p) {
  const int row = blockIdx.x * (kThreads / (D / 2)) + threadIdx.x / (D / 2), rows = 2 * p.reach - 1;
  if (row >= rows) return;
  const int distance = row - (p.reach - 1), head = blockIdx.y, column = threadIdx.x % (D / 2) * 2;
  const int diagonal = (distance >> 6) + p.diagonals / 2;
  float2 sum = {};
  for (int lower = 0; lower < 2; ++lower)
    if (diagonal + lower >= 0 && diagonal + lower < p.diagonals)
      for (int split = 0; split < p.splits; ++split) {
        const int64_t block = (int64_t{diagonal + lower} * p.splits + split) * p.heads + head;
        const float* from = p.grad_distances + (block * 2 * kRows + 63 + 64 * lower - (distance & 63)) * D;
        const float2 two = *reinterpret_cast<const float2*>(from + column);
        sum.x += two.x, sum.y += two.y;
      }
  *reinterpret_cast<uint32_t*>(p.grad_table + (int64_t{row} * p.heads + head) * D + column) =
      T::pack(sum.x * p.scale, sum.y * p.scale);
}

}  // namespace effasr

EFFASR_LAUNCHER(attention_backward_rows, kThreads)
EFFASR_LAUNCHER(attention_backward_keys, kThreads)
EFFASR_LAUNCHER(attention_backward_queries, kThreads)
EFFASR_LAUNCHER(attention_backward_distances, kThreads)
EFFASR_LAUNCHER(attention_backward_table, kThreads)
