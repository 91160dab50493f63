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

// The tiles of keys of a block, and the blocks of 64 distances below 0 and from 0 on that their sequences have. If none
// is in chunks, they take the same rows of parts one after the other, from `row` on; else it is -1.
struct Share {
  int begin, end, below, above, row;

  // Chunks of sequences by the number of their pairs, in order. All lanes of a warp.
  __device__ Share(const AttentionCall& p, int split) : begin(0), end(0), below(0), above(0), row(-1) {
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
    if (begin < end && below <= kChunk / kRows) row = Pair(p, p.tiles + 4 * (1 + begin)).first_q;
    below = min(below, p.blocks / 2), above = min(above, p.blocks / 2);
  }
};

// Parts of sums in global memory have each 16 columns in the order in which lanes hold them, so that a lane's four are
// one word: columns 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 at 4 i.
__device__ inline int first_column(int place) { return place & ~15 | place % 16 / 2; }
__device__ inline int place_of_pair(int column) { return column & ~15 | column % 8 * 2 | column / 4 & 2; }

// A warp's 16 rows of a part, which has `rows` from them on; those behind have what the last has, and are not stored.
template <int N>
__device__ void load_part(float (&x)[N][4], const float* part, int rows, int stride) {
  if (rows <= 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* at = part + min(lane() / 4 + 8 * half, rows - 1) * stride + 4 * (lane() % 4);
#pragma unroll
    for (int n = 0; n < N; n += 2) {
      const float4 four = *reinterpret_cast<const float4*>(at + 8 * n);
      x[n][2 * half] = four.x, x[n][2 * half + 1] = four.y;
      x[n + 1][2 * half] = four.z, x[n + 1][2 * half + 1] = four.w;
    }
  }
}
template <int N>
__device__ void store_part(float* part, const float (&x)[N][4], int rows, int stride) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane() / 4 + 8 * half;
    if (row >= rows) continue;
#pragma unroll
    for (int n = 0; n < N; n += 2)
      *reinterpret_cast<float4*>(part + row * stride + 8 * n + 4 * (lane() % 4)) =
          make_float4(x[n][2 * half], x[n][2 * half + 1], x[n + 1][2 * half], x[n + 1][2 * half + 1]);
  }
}

// The norms of a sequence's queries, and zeros for their gradients.
template <class T, int D>
__device__ void prepare_queries(const AttentionCall& p, const Pair& x, int head, float2* norms, float* grad_q) {
  constexpr int kWords = D / 8;
  const int column = threadIdx.x % kWords * 8;
  // Whole warps, for their sums.
  for (int row = threadIdx.x / kWords; row - threadIdx.x % 32 / kWords < x.queries; row += kThreads<D> / kWords) {
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

// Rows of four columns for each thread of a block.
constexpr int kSummers = 128;
template <int D, int kThreads = kSummers>
constexpr int kApart = kThreads / (D / 4);
__device__ inline void add(float4& a, const float4& b) { a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w; }
// Four numbers of a part to their columns.
template <class T>
__device__ void store_scaled(uint16_t* to, const float4& x, float scale) {
  *reinterpret_cast<uint32_t*>(to) = T::pack(x.x * scale, x.y * scale);
  *reinterpret_cast<uint32_t*>(to + 8) = T::pack(x.z * scale, x.w * scale);
}

// Rounds the gradients of rows of a head, the sums of the parts that so many keys have, and adds them to `total`.
template <class T, int D, int kThreads>
__device__ void store_queries(
    const AttentionCall& p, int64_t at, int64_t row_of_parts, int rows, int keys, int head, float4& total) {
  const int first = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4, stride = p.heads * D;
  const float* from = p.grad_q_parts + (row_of_parts + first) * stride + head * D + column;
  uint16_t* to = p.grad_q + (at + first) * p.grad_q_row + head * D + first_column(column);
  constexpr int kStep = kApart<D, kThreads>;
  for (int row = first; row < rows; row += kStep, from += kStep * stride, to += kStep * p.grad_q_row) {
    float4 sum = *reinterpret_cast<const float4*>(from);
    const float* part = from;
#pragma unroll 1
    for (int key = kChunk; key < keys; key += kChunk)
      add(sum, *reinterpret_cast<const float4*>(part += int64_t{p.rows_q} * stride));
    add(total, sum);
    store_scaled<T>(to, sum, p.scale);
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads<D>, kIsOneGroup<D> ? 2 : 1)
    attention_backward_pairs(const __grid_constant__ AttentionCall p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Shared = Tiles<D>;
  // Half of the warps have the gradients of keys, half those of values; one group has both. The compiler is to know
  // that a group takes one path.
  const int is_key = kIsOneGroup<D> ? 1 : __shfl_sync(~0u, warp() / 4, 0), is_value = kIsOneGroup<D> || !is_key;
  constexpr int kRoles = kIsOneGroup<D> ? 2 : 1;
  const int head = blockIdx.y, split = blockIdx.x, column = is_key * (D / 2);
  const uint32_t tiles = shared_address(shared);
  const Places<D> at(tiles);
  unsigned char* bands = shared + Shared::kBands;
  float* ring = reinterpret_cast<float*>(shared + Shared::kRings) + warp() * kRingFloats<D>;
  // In shared memory, as registers are few: with each thread's part of the gradients of both biases, and of the
  // content bias.
  float4* of_both = reinterpret_cast<float4*>(shared + Shared::kEnd + 32);
  float2* parts = reinterpret_cast<float2*>(of_both + kThreads<D>);
  of_both[threadIdx.x] = float4{}, parts[threadIdx.x] = float2{};
  const Share& share = *reinterpret_cast<Share*>(shared + Shared::kEnd);
  if (warp() == 0) {
    const Share computed(p, split);
    if (lane() == 0) *reinterpret_cast<Share*>(shared + Shared::kEnd) = computed;
  }
#pragma unroll
  for (int i = 0; i < kBandsBytes / 16; i += kThreads<D>) reinterpret_cast<uint4*>(bands)[i + threadIdx.x] = uint4{};
  __syncthreads();
  if (head == 0 && threadIdx.x == 0) p.extents[2 * split] = share.below, p.extents[2 * split + 1] = share.above;
  // That of distances from 0 on.
  float* distances = p.grad_distances + ((int64_t{split} * p.heads + head) * p.blocks + p.blocks / 2) * (kRows * D);
  for (int block = -share.below; block < share.above; ++block)
#pragma unroll
    for (int i = 0; i < kRows * D / 4; i += kThreads<D>)
      reinterpret_cast<float4*>(distances)[block * (kRows * D / 4) + i + static_cast<int>(threadIdx.x)] = float4{};
  // Queries without keys, those of the tail among them.
  for (int n = split + warp() * p.splits; n <= p.sequences; n += kThreads<D> / 32 * p.splits) {
    const bool is_tail = n == p.sequences;
    if (!is_tail && p.cu_seqlens_k[n] != p.cu_seqlens_k[n + 1]) continue;
    const int first = p.cu_seqlens_q[n], rows = (is_tail ? p.rows_q : p.cu_seqlens_q[n + 1]) - first;
    uint16_t* to = p.grad_q + int64_t{first} * p.grad_q_row + head * D;
    for (int i = lane(); i < rows * (D / 8); i += 32)
      *reinterpret_cast<uint4*>(to + int64_t{i / (D / 8)} * p.grad_q_row + i % (D / 8) * 8) = uint4{};
  }
  for (int number = share.begin; number < share.end; ++number) {
    __syncthreads();
    const int32_t* tile = p.tiles + 4 * (1 + number);
    Pair x(p, tile);
    const int64_t chunk = x.key / kChunk;
    float2* norms = reinterpret_cast<float2*>(p.norms) + (chunk * p.heads + head) * p.rows_q + x.first_q;
    const auto row_of_parts = [&] { return share.row < 0 ? x.first_q : share.row; };
    float* grad_q = p.grad_q_parts + ((chunk * p.rows_q + row_of_parts()) * p.heads + head) * D;
    if (x.key % kChunk == 0) prepare_queries<T, D>(p, x, head, norms, grad_q);
    const Seers seers(p, x.key, min(x.key + kRows, x.keys) - 1, x.queries);
    const int end = seers.end;
    x.query = seers.first / kRows * kRows;
    const bool is_seen = x.query < end;
    // A warp has the gradients of 16 keys and the sums of their weights, or of values. Of queries and distances it has
    // 16 as well, but half of the columns; of groups the one of keys has queries, that of values distances.
    float grad[kRoles][D / 8][4] = {}, sums[2] = {}, part[kRoles][D / 8][4];
    auto &grad_k = grad[0], &grad_v = grad[kRoles - 1], &of_query = part[0], &of_distance = part[kRoles - 1];
    int block = (x.query - x.key) / kRows;
    float* of_block = distances + (int64_t{block} * kRows + warp_query()) * D + (kHasGroups ? 0 : column);
    // Half of the 128 distances of a pair: the upper or the lower one. None are beyond the table.
    const auto load_distances = [&](auto& x, int lower) {
      if (block - lower >= -share.below && block - lower < share.above)
        load_part(x, of_block - lower * (kRows * D), kRows, D);
    };
    const auto store_distances = [&](const auto& x, int lower) {
      if (block - lower >= -share.below && block - lower < share.above)
        store_part(of_block - lower * (kRows * D), x, kRows, D);
    };
    const auto add_sums = [&](const uint32_t (&a)[4]) {
      // All columns are the same.
      const uint32_t one = T::pack(1, 1);
      float columns[4] = {sums[0], 0, sums[1], 0};
      T::multiply(columns, a, one, one);
      sums[0] = columns[0], sums[1] = columns[2];
    };
    const int64_t row_q = int64_t{x.first_q} + x.query, stride = p.heads * D;
    const uint16_t* q = p.q + row_q * p.q_row + int64_t{head} * p.q_head;
    const uint16_t* grad_out = p.grad_out + row_q * stride + head * D;
    float* of_queries = grad_q + (x.query + warp_query()) * stride + (kHasGroups ? 0 : column);
    int largest = p.reach - 1 + x.query - x.key + kRows - 1;
    const uint16_t* table = p.table + int64_t{head} * p.table_head + int64_t{largest} * p.table_row;
    const auto copy_table = [&](int half, int below) {
      const uint32_t to = tiles + Shared::kTable + half * kTileBytes<D>;
      const uint16_t* first = table - int64_t{below} * p.table_row;
      copy_rows<D, kThreads<D>, -1>(to, first, p.table_row, largest - below, 2 * p.reach - 1);
    };
    if (is_seen) {
      copy_keys<D>(tiles + Shared::kKeyTile, p.k, p.k_row, p.k_head, x, head);
      copy_keys<D>(tiles + Shared::kValues, p.v, p.v_row, p.v_head, x, head);
      copy_table(0, 0);
      copy_table(1, kRows);
    }
    // The upper half of the distances is new, and takes the place of the lower.
    int upper = 0;
    // With few registers no sums stay in them from one pair to the next.
    constexpr bool kStays = kHasGroups && D == 64;
    if (kStays && is_seen && is_value) load_distances(of_distance, 1);
    while (x.query < end) {
      copy_rows<D, kThreads<D>>(tiles + Shared::kGradOut, grad_out, stride, x.query, x.queries);
      commit_copies();
      add_biases<T, D>(p, tiles, q, x.queries - x.query, head);
      wait_for_copies<0>();
      publish();
      __syncthreads();
      Operands<kKeys<D> / 16> weights, grads;
      differentiate<T, D>(weights, grads, tiles, at, ring, p, x, head, upper * kRows, norms);
      const int rows = x.queries - x.query - warp_query();
      // All warps have read their rings.
      __syncthreads();
      // In the tile of weights: where the lane stores its first, and its row of four matrices of 16 queries and its keys.
      const uint32_t word = warp_key<D>() / 8, stored = tiles + Shared::kOfWeights + warp_query() * 128 +
          (kHasGroups ? place<kRows>(lane() % 16, word + lane() / 16) : place<kRows>(lane() / 4, word) + lane() % 4 * 4);
      const uint32_t transposed =
          tiles + Shared::kOfWeights + place<kRows>(lane() / 16 * 8 + lane() % 8, warp_query() / 8 + lane() / 8 % 2);
      store_operands(weights, stored);
      store_operands(grads, stored + kTileBytes<kRows>);
      store_in_octets<D>(grads, bands);
      if (kHasGroups && is_key) load_part(of_query, of_queries, rows, stride);
      if (kHasGroups && !kStays && is_value) load_distances(of_distance, 1);
      publish();
      __syncthreads();
      if constexpr (kHasGroups) {
        const uint64_t first = descriptor(tiles), of_scores = first + Shared::kOfScores / 16;
        const auto table = [&](int half) { return first + (Shared::kTable + half * kTileBytes<D>) / 16; };
        constexpr int kDown = 16 * 128 / 16, kHalf = kRows / 8 * 128 / 16;
        const auto add_half = [&](int at) {
          const uint64_t by_distance = descriptor(tiles + Shared::kBands, kOctetBytes, 128) + at;
          multiply_tile_columns<T, D, 1>(
              of_distance, by_distance, 2 * kOctetBytes / 16, first + Shared::kByPosition / 16);
        };
        if (is_key) {
          begin_products();
          const uint64_t by_distance = descriptor(tiles + Shared::kBands, 128, kOctetBytes);
          multiply_tile_columns<T, D, 1>(grad_k, of_scores, kDown, first + Shared::kByContent / 16);
          multiply_tile_columns<T, D, 0>(of_query, of_scores, 2, first + Shared::kKeyTile / 16);
          multiply_tile_columns<T, D, 0>(of_query, by_distance, 256 / 16, table(upper));
          multiply_tile_columns<T, D, 0>(of_query, by_distance + kHalf, 256 / 16, table(upper ^ 1));
          end_products(of_query);
          end_products(grad_k);
          store_part(of_queries, of_query, rows, stride);
#pragma unroll
          for (int other = 0; other < kRows; other += 16) {
            uint32_t a[4];
            load_matrices<true>(a, transposed + kTileBytes<kRows> + other * 128);
            add_sums(a);
          }
        }
        if (is_value) {
          begin_products();
          // The lower half was the upper one of the queries before.
          multiply_tile_columns<T, D, 1>(grad_v, first + Shared::kOfWeights / 16, kDown, first + Shared::kGradOut / 16);
          add_half(kHalf);
          end_products(of_distance);
          end_products(grad_v);
          store_distances(of_distance, 1);
          load_distances(of_distance, 0);
          begin_products();
          add_half(0);
          end_products(of_distance);
          if (!kStays) store_distances(of_distance, 0);
        }
      } else {
#pragma unroll
        for (int other = 0; other < kRows; other += 16) {
          uint32_t a[4];
          load_matrices<true>(a, transposed + is_key * kTileBytes<kRows> + other * 128);
          multiply_columns<T, D>(grad_k, a, at, is_key ? Shared::kByContent : Shared::kGradOut, other);
          if (is_key) add_sums(a);
        }
        float by_query[D / 16][4];
        load_part(by_query, of_queries, rows, stride);
#pragma unroll
        for (int key = 0; key < kRows; key += 16) {
          uint32_t a[4];
          load_matrices<false>(a, at.below[key / 16] + Shared::kOfScores + warp_query() * 128);
          multiply_columns<T, D, D / 32>(by_query, a, at, Shared::kKeyTile, key, is_key);
        }
#pragma unroll
        for (int n = 0; n < kDistances; n += 16) {
          uint32_t a[4];
          const int distance = 48 - warp_query() + n;
          load_by_distance<false>(a, tiles + Shared::kBands, warp_query(), distance);
          multiply_columns<T, D, D / 32>(by_query, a, at, Shared::kTable, (upper * kRows + distance) & 127, is_key);
        }
        store_part(of_queries, by_query, rows, stride);
        // 16 distances of the upper and of the lower half.
#pragma unroll 1
        for (int is_lower = 0; is_lower < 2; ++is_lower) {
          float by_distance[D / 16][4];
          load_distances(by_distance, is_lower);
#pragma unroll
          for (int other = 0; other < kRows; other += 16) {
            const int distance = is_lower * kRows + warp_query(), first = distance + other - 48;
            if (first < 0 || first >= kDistances) continue;
            uint32_t a[4];
            load_by_distance<true>(a, tiles + Shared::kBands, other, distance);
            multiply_columns<T, D, D / 32>(by_distance, a, at, Shared::kByPosition, other, is_key);
          }
          store_distances(by_distance, is_lower);
        }
      }
      x.query += kRows, block += 1, largest += kRows, upper ^= 1;
      q += kRows * p.q_row, grad_out += kRows * stride, table += kRows * p.table_row;
      of_queries += kRows * stride, of_block += kRows * D;
      __syncthreads();
      if (x.query < end) copy_table(upper, 0);
    }
    if (kStays && is_seen && is_value) store_distances(of_distance, 1);
#pragma unroll
    for (int role = 0; role < kRoles; ++role) {
      const bool of_keys = kRoles == 2 ? role == 0 : is_key;
      const float factor = of_keys ? p.scale : 256.0f / (256 - p.dropped), factors[2] = {factor, factor};
      // Read again, as registers are few.
      const int row = tile[3] + warp_query();
      store_rows<T, D>(
          (of_keys ? p.grad_k : p.grad_v) + (int64_t{tile[1]} + row) * p.grad_k_row + head * D, p.grad_k_row,
          tile[2] - row, grad[role], factors, shared + warp() * 16 * D * 2);
    }
    // The gradient of the content bias is the sum over keys of the sums of their scores' gradients. That of the
    // position bias is what is left of the sum of the queries' gradients.
    float* by_key = reinterpret_cast<float*>(shared + Shared::kRings);
    if (is_key && lane() % 4 == 0) {
      const int key = warp_query() + lane() / 4;
      by_key[key] = sums[0], by_key[key + 8] = sums[1];
    }
    __syncthreads();
    if (is_seen) {
      const int first = threadIdx.x / (D / 2), at = place<D>(first, threadIdx.x % (D / 2) / 4) + threadIdx.x % 4 * 4;
      const unsigned char* keys = shared + Shared::kKeyTile;
      float2 sum = parts[threadIdx.x];
#pragma unroll
      for (int n = 0; n < kRows; n += kThreads<D> / (D / 2)) {
        const float2 two = T::unpack(*reinterpret_cast<const uint32_t*>(keys + (at ^ n % 8 * 16) + n * 128));
        sum.x = fmaf(by_key[first + n], two.x, sum.x), sum.y = fmaf(by_key[first + n], two.y, sum.y);
      }
      parts[threadIdx.x] = sum;
    }
    if (x.key + kRows >= x.keys && x.keys <= kChunk)
      store_queries<T, D, kThreads<D>>(p, x.first_q, row_of_parts(), x.queries, 0, head, of_both[threadIdx.x]);
  }
  __syncthreads();
  if (threadIdx.x < D / 2) {
    float2 sum = {}, both = {};
    for (int n = threadIdx.x; n < kThreads<D>; n += D / 2) {
      const float2 two = parts[n];
      sum.x = fmaf(two.x, p.scale, sum.x), sum.y = fmaf(two.y, p.scale, sum.y);
    }
    const float* at = reinterpret_cast<const float*>(of_both) + place_of_pair(2 * threadIdx.x);
    for (int n = 0; n < kApart<D, kThreads<D>>; ++n, at += D)
      both.x = fmaf(at[0], p.scale, both.x), both.y = fmaf(at[1], p.scale, both.y);
    float* to = p.grad_biases + (2 * int64_t{split} * p.heads + head) * D + 2 * threadIdx.x;
    *reinterpret_cast<float2*>(to) = sum;
    *reinterpret_cast<float2*>(to + p.heads * D) = make_float2(both.x - sum.x, both.y - sum.y);
  }
}

// Gradients of 64 queries of a head whose sequence has several chunks of keys, the sums of their parts, and their sum
// for the position bias. The tail, number `sequences`, has no keys.
template <class T, int D>
__global__ void __launch_bounds__(kSummers) attention_backward_queries(const __grid_constant__ AttentionCall p) {
  __shared__ float4 parts[kSummers];
  const int32_t* tile = p.tiles + 4 * (1 + blockIdx.x);
  const int sequence = tile[0], rows = min(tile[2] - tile[3], kRows), head = blockIdx.y;
  const int column = threadIdx.x % (D / 4) * 4, stride = p.heads * D;
  const int keys = sequence < p.sequences ? p.cu_seqlens_k[sequence + 1] - p.cu_seqlens_k[sequence] : 0;
  float4 total = {};
  const int64_t at = int64_t{tile[1]} + tile[3];
  if (keys > kChunk) store_queries<T, D, kSummers>(p, at, at, rows, keys, head, total);
  parts[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x >= D / 4) return;
  for (int n = 1; n < kApart<D>; ++n) add(total, parts[n * (D / 4) + threadIdx.x]);
  float* sums = p.grad_biases + (2 * (int64_t{p.splits} + blockIdx.x) * p.heads + head) * D;
  *reinterpret_cast<float4*>(sums + column) = float4{};
  float2* of_position = reinterpret_cast<float2*>(sums + stride + first_column(column));
  of_position[0] = make_float2(total.x * p.scale, total.y * p.scale);
  of_position[4] = make_float2(total.z * p.scale, total.w * p.scale);
}

// The gradient of 64 rows of the table: the sums over the splits that have these distances.
template <class T, int D>
__global__ void __launch_bounds__(kSummers) attention_backward_table(const __grid_constant__ AttentionCall p) {
  const int block = static_cast<int>(blockIdx.x) - (p.reach + kRows - 1) / kRows, head = blockIdx.y;
  const int first = threadIdx.x / (D / 4), column = threadIdx.x % (D / 4) * 4;
  const int64_t blocks = int64_t{p.heads} * p.blocks * (kRows * D);
  const int64_t number = int64_t{head} * p.blocks + p.blocks / 2 + block;
  const float* from = p.grad_distances + number * (kRows * D) + first * D + column;
  float4 sums[kRows / kApart<D>] = {};
  bool is_used = false;
  for (int begin = 0; begin < p.splits; begin += 32, from += 32 * blocks) {
    const int split = min(begin + lane(), p.splits - 1);
    const int2 extent = reinterpret_cast<const int2*>(p.extents)[split];
    const bool has_block = split == begin + lane() && block >= -extent.x && block < extent.y;
    // One bit for each, from the lowest.
    const int bit = static_cast<int>(uint32_t{has_block} << lane());
    for (uint32_t left = __reduce_add_sync(~0u, bit); left; left &= left - 1) {
      is_used = true;
      const float* part = from + __popc((left & -left) - 1) * blocks;
#pragma unroll
      for (int i = 0; i < kRows / kApart<D>; ++i)
        add(sums[i], *reinterpret_cast<const float4*>(part + i * kApart<D> * D));
    }
  }
  const int lowest = block * kRows + p.reach - 1, row = lowest + kRows - 1 - first, stride = p.heads * D;
  // Of a table for long sequences no split has most rows.
  for (int i = threadIdx.x; !is_used && i < kRows * D / 8; i += kSummers)
    if (const int at = lowest + i / (D / 8); at >= 0 && at < 2 * p.reach - 1)
      *reinterpret_cast<uint4*>(p.grad_table + int64_t{at} * stride + head * D + i % (D / 8) * 8) = uint4{};
  if (!is_used) return;
  uint16_t* to = p.grad_table + int64_t{row} * stride + head * D + first_column(column);
#pragma unroll
  for (int i = 0; i < kRows; i += kApart<D>, to -= kApart<D> * stride)
    if (row >= i && row - i < 2 * p.reach - 1) store_scaled<T>(to, sums[i / kApart<D>], p.scale);
}

}  // namespace effasr

EFFASR_LAUNCHER(attention_backward_pairs)
EFFASR_LAUNCHER(attention_backward_queries)
EFFASR_LAUNCHER(attention_backward_table)
