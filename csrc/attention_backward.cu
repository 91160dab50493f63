// The backward of attention with relative positions; `cuda/gradients.cuh` has the gradients of scores.
//
// A block goes through tiles of keys of a head, and for each through the tiles of queries that see it. Gradients of
// keys and values stay in registers; those of queries and of the table are added up in global memory, in parts
// that no other block has, so that no atomics are needed and results are the same each time. Behind the last keys of a
// sequence its block rounds the gradients of its queries, unless the sequence has several chunks.
#include "cuda/gradients.cuh"
#include "cuda/launch.cuh"

namespace effasr {

// Keys of a sequence whose gradients one block has at least. Each such chunk has its part of the queries'.
constexpr int kChunk = 8 * kRows;

// The tiles of keys of a block, and the blocks of 64 distances below 0 and from 0 on that their sequences have.
struct Share {
  int begin, end, below, above;

  // Chunks of sequences by the number of their pairs, in order. All lanes of a warp.
  __device__ Share(const AttentionCall& p, int split) : begin(0), end(0), below(0), above(0) {
    const int live = p.tiles[0];
    int64_t total = 0, before = 0;
    for (int pass = 0; pass < 2; ++pass)
      for (int first = 0; first < live; first += 32) {
        const int number = first + lane();
        int queries = 0, chunk = 0, keys = 0;
        if (number < live) {
          const Pair x(p, p.tiles + 4 * (1 + number));
          queries = (x.queries + kRows - 1) / kRows, chunk = x.key % kChunk / kRows;
          keys = queries ? (x.keys + kRows - 1) / kRows : 0;
        }
        const int work = number < live ? max(queries, 1) : 0;
        int sum = work;
#pragma unroll
        for (int other = 1; other < 32; other *= 2) {
          const int lower = __shfl_up_sync(~0u, sum, other);
          if (lane() >= other) sum += lower;
        }
        // That of a tile's chunk decides.
        const int64_t at = before + sum - work - chunk * work;
        const bool is_before = pass && number < live && at * p.splits < split * total;
        const bool is_in = pass && number < live && !is_before && at * p.splits < (split + 1) * total;
        begin += is_before, end += is_before || is_in;
        if (is_in) below = max(below, keys), above = max(above, queries);
        before += __shfl_sync(~0u, sum, 31);
        if (!pass) total = before;
        if (!pass && first + 32 >= live) before = 0;
      }
#pragma unroll
    for (int other = 1; other < 32; other *= 2) {
      begin += __shfl_xor_sync(~0u, begin, other), end += __shfl_xor_sync(~0u, end, other);
      below = max(below, __shfl_xor_sync(~0u, below, other));
      above = max(above, __shfl_xor_sync(~0u, above, other));
    }
    below = min(below, p.blocks / 2), above = min(above, p.blocks / 2);
  }
};

// Adds a warp's result to rows in global memory.
template <int N>
__device__ void add_to(float* to, const float (&x)[N][4], int rows, int stride) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane() / 4 + 8 * half;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float2& at = *reinterpret_cast<float2*>(to + row * stride + 8 * n + 2 * (lane() % 4));
      at = make_float2(at.x + x[n][2 * half], at.y + x[n][2 * half + 1]);
    }
  }
}

// The norms of a sequence's queries, and zeros for their gradients.
template <class T, int D>
__device__ void prepare_queries(const AttentionCall& p, const Pair& x, int head, float2* norms, float* grad_q) {
  constexpr int kWords = D / 8;
  const int column = threadIdx.x % kWords * 8;
  // Whole warps, for their sums.
  for (int row = threadIdx.x / kWords; row - threadIdx.x % 32 / kWords < x.queries; row += kThreads / kWords) {
    float sum = 0;
    if (row < x.queries) {
      const int64_t at = ((int64_t{x.first_q} + row) * p.heads + head) * D + column;
      const uint4 out = *reinterpret_cast<const uint4*>(p.out + at);
      const uint4 grad = *reinterpret_cast<const uint4*>(p.grad_out + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 a = T::unpack((&out.x)[i]), b = T::unpack((&grad.x)[i]);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
      }
      float4* zeros = reinterpret_cast<float4*>(grad_q + int64_t{row} * p.heads * D + column);
      zeros[0] = zeros[1] = float4{};
    }
#pragma unroll
    for (int other = 1; other < kWords; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (row < x.queries && column == 0)
      norms[row] = make_float2(p.lse[int64_t{head} * p.rows_q + x.first_q + row], sum);
  }
}

// Rounds the gradients of rows of a head, or zeros where there are none, and adds them to `total`, for two columns.
template <class T, int D>
__device__ void store_queries(
    const AttentionCall& p, int64_t first, int rows, int head, const float* grads, float2& total) {
  const int column = head * D + threadIdx.x % (D / 2) * 2;
  for (int row = threadIdx.x / (D / 2); row < rows; row += kThreads / (D / 2)) {
    float2 two = {};
    if (grads) two = *reinterpret_cast<const float2*>(grads + int64_t{row} * p.heads * D + column);
    total.x += two.x, total.y += two.y;
    *reinterpret_cast<uint32_t*>(p.grad_q + (first + row) * p.grad_q_row + column) =
        T::pack(two.x * p.scale, two.y * p.scale);
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, 1) attention_backward_pairs(const __grid_constant__ AttentionCall p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Shared = Tiles<D>;
  const int head = blockIdx.y, split = blockIdx.x, is_key = warp() / 4, column = is_key * (D / 2);
  const uint32_t tiles = shared_address(shared);
  const Places<D> at(tiles);
  unsigned char* bands = shared + Shared::kBands;
  float* ring = reinterpret_cast<float*>(shared + Shared::kRings) + warp() * kRingFloats;
  // In shared memory, as registers are few: with each thread's part of the gradients of the content bias, and of
  // both biases.
  float2* parts = reinterpret_cast<float2*>(shared + Shared::kEnd + 16);
  float2* of_both = parts + kThreads;
  parts[threadIdx.x] = of_both[threadIdx.x] = float2{};
  const Share& share = *reinterpret_cast<Share*>(shared + Shared::kEnd);
  if (warp() == 0) {
    const Share computed(p, split);
    if (lane() == 0) *reinterpret_cast<Share*>(shared + Shared::kEnd) = computed;
  }
  for (int i = threadIdx.x; i < 4 * kBandBytes / 16; i += kThreads) reinterpret_cast<uint4*>(bands)[i] = uint4{};
  __syncthreads();
  if (head == 0 && threadIdx.x == 0) p.extents[2 * split] = share.below, p.extents[2 * split + 1] = share.above;
  // That of distances from 0 on.
  float* distances = p.grad_distances + ((int64_t{split} * p.heads + head) * p.blocks + p.blocks / 2) * (kRows * D);
  for (int i = threadIdx.x * 4 - share.below * (kRows * D); i < share.above * (kRows * D); i += kThreads * 4)
    *reinterpret_cast<float4*>(distances + i) = float4{};
  // Queries without keys, those of the tail among them.
  for (int n = split; n <= p.sequences; n += p.splits) {
    const bool is_tail = n == p.sequences;
    const int first = p.cu_seqlens_q[n], end = is_tail ? p.rows_q : p.cu_seqlens_q[n + 1];
    if (is_tail || p.cu_seqlens_k[n] == p.cu_seqlens_k[n + 1])
      store_queries<T, D>(p, first, end - first, head, nullptr, of_both[threadIdx.x]);
  }
  for (int number = share.begin; number < share.end; ++number) {
    __syncthreads();
    const int32_t* tile = p.tiles + 4 * (1 + number);
    Pair x(p, tile);
    const int64_t chunk = x.key / kChunk;
    float2* norms = reinterpret_cast<float2*>(p.norms) + (chunk * p.heads + head) * p.rows_q + x.first_q;
    float* grad_q = p.grad_q_parts + ((chunk * p.rows_q + x.first_q) * p.heads + head) * D;
    if (x.key % kChunk == 0) prepare_queries<T, D>(p, x, head, norms, grad_q);
    const Seers seers(p, x.key, min(x.key + kRows, x.keys) - 1, x.queries);
    const int end = seers.end;
    x.query = seers.first / kRows * kRows;
    const bool is_seen = x.query < end;
    // Half of the warps have the gradient of 16 values each, half that of keys, and sums of its weights. Of queries
    // and distances each has 16 as well, but half of the columns.
    float grad[D / 8][4] = {}, sums[2] = {};
    if (is_seen) {
      copy_keys<D>(tiles + Shared::kKeyTile, p.k, p.k_row, p.k_head, x, head);
      copy_keys<D>(tiles + Shared::kValues, p.v, p.v_row, p.v_head, x, head);
      copy_table<D>(p, tiles + Shared::kTable, x, head, false);
      copy_table<D>(p, tiles + Shared::kTable + kTileBytes<D>, x, head, true);
    }
    const uint32_t one = T::pack(1, 1);
    // The upper half of the distances is new, and takes the place of the lower.
    int upper = 0;
    while (x.query < end) {
      copy_grad_out<D>(p, tiles + Shared::kGradOut, x, head);
      commit_copies();
      add_biases<T, D>(p, tiles, x, head);
      wait_for_copies<0>();
      __syncthreads();
      Operands weights, grads;
      differentiate<T, D>(weights, grads, at, ring, p, x, head, upper * kRows, norms);
      __syncwarp();
      store_pairs(weights, ring, 0);
      store_pairs(grads, ring, 1);
      store_by_distance(grads, bands);
      __syncthreads();
#pragma unroll
      for (int query = 0; query < kRows; query += 16) {
        uint32_t a[4];
        load_pairs<true>(a, tiles + Shared::kRings, query, warp_query(), is_key);
        multiply_columns<T, D>(grad, a, at, is_key ? Shared::kByContent : Shared::kGradOut, query);
        if (is_key) {
          // All columns are the same.
          float columns[4] = {sums[0], 0, sums[1], 0};
          T::multiply(columns, a, one, one);
          sums[0] = columns[0], sums[1] = columns[2];
        }
      }
      float by_query[D / 16][4] = {};
#pragma unroll
      for (int key = 0; key < kRows; key += 16) {
        uint32_t a[4];
        load_pairs<false>(a, tiles + Shared::kRings, warp_query(), key, 1);
        multiply_columns<T, D, D / 32>(by_query, a, at, Shared::kKeyTile, key, is_key);
      }
#pragma unroll
      for (int distance = 0; distance < kDistances; distance += 16) {
        uint32_t a[4];
        load_by_distance<false>(a, tiles + Shared::kBands, warp_query(), distance);
        const int row = (upper * kRows + 48 - warp_query() + distance) & 127;
        multiply_columns<T, D, D / 32>(by_query, a, at, Shared::kTable, row, is_key);
      }
      const int query = x.query + warp_query();
      add_to(grad_q + int64_t{query} * p.heads * D + column, by_query, x.queries - query, p.heads * D);
      // 16 distances of the upper and of the lower half.
      const int block = (x.query - x.key) / kRows;
      float* to = distances + (int64_t{block} * kRows + warp_query()) * D + column;
#pragma unroll 1
      for (int is_lower = 0; is_lower < 2; ++is_lower, to -= kRows * D) {
        if (is_lower ? block <= -share.below : block >= share.above) continue;
        float by_distance[D / 16][4] = {};
#pragma unroll
        for (int other = 0; other < kRows; other += 16) {
          const int first = is_lower * kRows + warp_query() + other - 48;
          if (first < 0 || first >= kDistances) continue;
          uint32_t a[4];
          load_by_distance<true>(a, tiles + Shared::kBands, other, first);
          multiply_columns<T, D, D / 32>(by_distance, a, at, Shared::kByPosition, other, is_key);
        }
        add_to(to, by_distance, kRows, D);
      }
      x.query += kRows, upper ^= 1;
      __syncthreads();
      if (x.query < end) copy_table<D>(p, tiles + Shared::kTable + upper * kTileBytes<D>, x, head, false);
    }
    const float factor = is_key ? p.scale : 256.0f / (256 - p.dropped), factors[2] = {factor, factor};
    // Read again, as registers are few.
    const int row = tile[3] + warp_query();
    store_rows<T, D>(
        (is_key ? p.grad_k : p.grad_v) + (int64_t{tile[1]} + row) * p.grad_k_row + head * D, p.grad_k_row,
        tile[2] - row, grad, factors, shared + warp() * 16 * D * 2);
    // The gradient of the content bias is the sum over keys of the sums of their scores' gradients. That of the
    // position bias is what is left of the sum of the queries' gradients.
    float* by_key = reinterpret_cast<float*>(shared + Shared::kRings);
    if (is_key && lane() % 4 == 0) {
      const int key = warp_query() + lane() / 4;
      by_key[key] = sums[0], by_key[key + 8] = sums[1];
    }
    __syncthreads();
    const unsigned char* keys = shared + Shared::kKeyTile + threadIdx.x % 4 * 4;
    float2 sum = parts[threadIdx.x];
    for (int n = threadIdx.x / (D / 2); is_seen && n < kRows; n += kThreads / (D / 2)) {
      const float2 two = T::unpack(*reinterpret_cast<const uint32_t*>(keys + place<D>(n, threadIdx.x % (D / 2) / 4)));
      sum.x = fmaf(by_key[n], two.x, sum.x), sum.y = fmaf(by_key[n], two.y, sum.y);
    }
    parts[threadIdx.x] = sum;
    if (x.key + kRows >= x.keys && x.keys <= kChunk)
      store_queries<T, D>(p, x.first_q, x.queries, head, grad_q - head * D, of_both[threadIdx.x]);
  }
  __syncthreads();
  if (threadIdx.x < D / 2) {
    float2 sum = {}, both = {};
    for (int n = threadIdx.x; n < kThreads; n += D / 2) {
      const float2 two = parts[n], more = of_both[n];
      sum.x = fmaf(two.x, p.scale, sum.x), sum.y = fmaf(two.y, p.scale, sum.y);
      both.x = fmaf(more.x, p.scale, both.x), both.y = fmaf(more.y, p.scale, both.y);
    }
    float* to = p.grad_biases + (2 * int64_t{split} * p.heads + head) * D + 2 * threadIdx.x;
    *reinterpret_cast<float2*>(to) = sum;
    *reinterpret_cast<float2*>(to + p.heads * D) = make_float2(both.x - sum.x, both.y - sum.y);
  }
}

// Rows of four columns for each thread of a block.
template <int D>
constexpr int kApart = kThreads / (D / 4);
__device__ inline void add(float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
template <class T>
__device__ void store_scaled(uint16_t* to, const float4& x, float scale) {
  *reinterpret_cast<uint2*>(to) = make_uint2(T::pack(x.x * scale, x.y * scale), T::pack(x.z * scale, x.w * scale));
}

// Gradients of 64 queries of a head whose sequence has several chunks of keys, the sums of their parts, and their sum
// for the position bias. The tail, number `sequences`, has no keys.
template <class T, int D>
__global__ void __launch_bounds__(kThreads) attention_backward_queries(const __grid_constant__ AttentionCall p) {
  __shared__ float4 parts[kThreads];
  const int32_t* tile = p.tiles + 4 * (1 + blockIdx.x);
  const int sequence = tile[0], rows = min(tile[2] - tile[3], kRows), head = blockIdx.y;
  const int first = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4, stride = p.heads * D;
  const int keys = sequence < p.sequences ? p.cu_seqlens_k[sequence + 1] - p.cu_seqlens_k[sequence] : 0;
  const int64_t at = int64_t{tile[1]} + tile[3] + first;
  const float* from = p.grad_q_parts + at * stride + head * D + column;
  uint16_t* to = p.grad_q + at * p.grad_q_row + head * D + column;
  float4 total = {};
  for (int row = first; keys > kChunk && row < rows; row += kApart<D>, from += kApart<D> * stride, to += kApart<D> * p.grad_q_row) {
    float4 sum = {};
    const float* part = from;
    for (int key = 0; key < keys; key += kChunk, part += int64_t{p.rows_q} * stride)
      add(sum, *reinterpret_cast<const float4*>(part));
    add(total, sum);
    store_scaled<T>(to, sum, p.scale);
  }
  parts[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x >= D / 4) return;
  for (int n = 1; n < kApart<D>; ++n) add(total, parts[n * (D / 4) + threadIdx.x]);
  float* sums = p.grad_biases + (2 * (int64_t{p.splits} + blockIdx.x) * p.heads + head) * D + column;
  *reinterpret_cast<float4*>(sums) = float4{};
  *reinterpret_cast<float4*>(sums + stride) =
      make_float4(total.x * p.scale, total.y * p.scale, total.z * p.scale, total.w * p.scale);
}

// The gradient of 64 rows of the table: the sums over the splits that have these distances.
template <class T, int D>
__global__ void __launch_bounds__(kThreads) attention_backward_table(const __grid_constant__ AttentionCall p) {
  const int block = static_cast<int>(blockIdx.x) - (p.reach + kRows - 1) / kRows, head = blockIdx.y;
  const int first = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;
  const int64_t blocks = int64_t{p.heads} * p.blocks * (kRows * D);
  const int64_t number = int64_t{head} * p.blocks + p.blocks / 2 + block;
  const float* from = p.grad_distances + number * (kRows * D) + first * D + column;
  float4 sums[kRows / kApart<D>] = {};
  for (int split = 0; split < p.splits; ++split, from += blocks) {
    const int2 extent = reinterpret_cast<const int2*>(p.extents)[split];
    if (block < -extent.x || block >= extent.y) continue;
#pragma unroll
    for (int i = 0; i < kRows / kApart<D>; ++i)
      add(sums[i], *reinterpret_cast<const float4*>(from + i * kApart<D> * D));
  }
#pragma unroll
  for (int i = 0; i < kRows / kApart<D>; ++i) {
    const int row = block * kRows + kRows - 1 - first - i * kApart<D> + p.reach - 1;
    if (row >= 0 && row < 2 * p.reach - 1)
      store_scaled<T>(p.grad_table + (int64_t{row} * p.heads + head) * D + column, sums[i], p.scale);
  }
}

}  // namespace effasr

EFFASR_LAUNCHER(attention_backward_pairs, kThreads)
EFFASR_LAUNCHER(attention_backward_queries, kThreads)
EFFASR_LAUNCHER(attention_backward_table, kThreads)
