// The forward of attention with relative positions: one block for 64 queries of a head, 16 for each warp.
//
// The softmax is computed online, as in FlashAttention-2 (https://arxiv.org/abs/2307.08691), in powers of two.
// No score leaves the multiprocessor; `cuda/scores.cuh` has the part of them that depends on distance. Shared
// memory has two tiles of the table, one of keys, one of values, and the ring. sm_90a has products of four warps.
#include <cmath>

#include "cuda/group.cuh"
#include "cuda/launch.cuh"

namespace effasr {

// Queries of a warp plus either bias, rounded once; past the sequence the biases.
template <class T, int D>
__device__ void load_queries(
    Held<D>& by_content, Held<D>& by_position, const AttentionCall& p, const uint16_t* q, int rows, int head) {
  const auto read = [](const uint16_t* from) { return *reinterpret_cast<const uint32_t*>(from); };
  const uint16_t* lines[2] = {q + lane() / 4 * p.q_row, q + (lane() / 4 + 8) * p.q_row};
  const int first = lane() % 4 * 2, column_of_head = head * D + first;
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 16 * k + i / 2 * 8;
      const uint32_t pair = lane() / 4 + i % 2 * 8 < rows ? read(lines[i % 2] + first + column) : 0;
      by_content.numbers[k][i] = T::add(pair, read(p.content_bias + column_of_head + column));
      by_position.numbers[k][i] = T::add(pair, read(p.position_bias + column_of_head + column));
    }
}

template <class T, int D>
__global__ void __launch_bounds__(kThreads, D == 64 ? 3 : 2) attention_forward(const __grid_constant__ AttentionCall p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const int32_t* tile = p.tiles + 4 * (1 + blockIdx.x);
  const int sequence = tile[0], length = tile[2], start = tile[3];
  if (start >= length) return;
  const int64_t first_q = tile[1], first_k = p.cu_seqlens_k[sequence];
  // The tail is number `sequences`, without keys.
  const int keys = sequence < p.sequences ? p.cu_seqlens_k[sequence + 1] - static_cast<int>(first_k) : 0;
  const int head = blockIdx.y, first_row = start + 16 * warp(), g = lane() / 4, pair = 2 * (lane() % 4);
  // Two tiles of the table are first.
  constexpr int kKeyTile = 2 * kTileBytes<D>, kValueTile = 3 * kTileBytes<D>;
  const uint32_t tiles = shared_address(shared);
  const Places<D> at(tiles);
  constexpr int kRingPitch = kHasGroups ? kGroupPitch : kPitch;
  float* ring = reinterpret_cast<float*>(shared + 4 * kTileBytes<D>) + warp() * 16 * kRingPitch;

  Held<D> by_content, by_position;
  const uint16_t* q = p.q + (first_q + first_row) * p.q_row + int64_t{head} * p.q_head;
  load_queries<T, D>(by_content, by_position, p, q, length - first_row, head);

  const Range seen[2] = {{p, first_row + g, keys}, {p, first_row + g + 8, keys}};
  const Range of_first(p, start, keys), of_last(p, min(start + kRows, length) - 1, keys);
  const int begin = of_first.first / kRows * kRows, end = of_last.end;
  const uint16_t* k = p.k + first_k * p.k_row + int64_t{head} * p.k_head;
  const uint16_t* v = p.v + first_k * p.v_row + int64_t{head} * p.v_head;
  const uint16_t* table = p.table + int64_t{head} * p.table_head;
  // The table's row of the largest distance of these queries and the first keys.
  const int largest_distance = p.reach - 1 + start + kRows - 1 - begin;
  const auto copy_table = [&](int block) {
    const uint32_t to = tiles + block % 2 * kTileBytes<D>;
    const int first = largest_distance - block * kRows;
    copy_rows<D, -1>(to, table + int64_t{first} * p.table_row, p.table_row, first, 2 * p.reach - 1);
  };
  const int64_t seed = p.dropped ? *p.seed : 0;
  const float scale_log2 = p.scale * 1.44269504f;

  float out[D / 8][4] = {}, largest[2] = {-INFINITY, -INFINITY}, total[2] = {};
  if (begin < end) {
    copy_table(0);
    copy_table(1);
    copy_rows<D>(tiles + kKeyTile, k + int64_t{begin} * p.k_row, p.k_row, begin, keys);
    commit_copies();
  }
  for (int key = begin, step = 0; key < end; key += kRows, ++step) {
    wait_for_copies<0>();
    publish();
    __syncthreads();
    // All warps have multiplied the last values.
    copy_rows<D>(tiles + kValueTile, v + int64_t{key} * p.v_row, p.v_row, key, keys);
    commit_copies();
    float scores[8][4];
    if constexpr (kHasGroups) {
      if (step == 0) write_group_scores<T, D>(ring, by_position, tiles, -1);
      write_group_scores<T, D>(ring, by_position, tiles + (step + 1) % 2 * kTileBytes<D>, step);
      read_group_scores(scores, ring, step);
      // Of two products in a loop that each are the only one of their left operands, ptxas 12.8 to 13.0 gives one
      // register to both operands, though the queries are needed again. At width 64 the weights have one product, so
      // the queries have two. `overwritten_operands` in tests/support/kernel_resources.py looks for it.
      multiply_group_rows<T, D, true, D == 64 ? 4 : 8>(scores, by_content, tiles + kKeyTile);
    } else {
      const int row = step % 2 * kRows + 48 - 16 * warp();
      write_scores<T, D>(ring, by_position, at, 0, row, step == 0);
      read_scores(scores, ring);
      multiply_rows<T, D, 4>(scores, by_content, at, kKeyTile, 0);
    }
    __syncthreads();
    if constexpr (!kHasGroups) keep_scores(ring);
    if (key + kRows < end) {
      copy_table(step + 2);
      copy_rows<D>(tiles + kKeyTile, k + int64_t{key + kRows} * p.k_row, p.k_row, key + kRows, keys);
    }
    commit_copies();

    if (key + kRows > of_first.end) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (8 * n + i % 2 >= seen[i / 2].end - key - pair) scores[n][i] = -INFINITY;
    }
    if (key < of_last.first) {
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (8 * n + i % 2 < seen[i / 2].first - key - pair) scores[n][i] = -INFINITY;
    }
    float pivot[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float larger = largest[half];
#pragma unroll
      for (int n = 0; n < 8; ++n) larger = fmaxf(larger, fmaxf(scores[n][2 * half], scores[n][2 * half + 1]));
      larger = quad_max(larger);
      // With a context, a query may see none of the first keys.
      pivot[half] = larger == -INFINITY ? 0 : larger * scale_log2;
      const float shrink = exp2_approximately(largest[half] * scale_log2 - pivot[half]);
      largest[half] = larger;
      total[half] *= shrink;
      if (step == 0) continue;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) out[n][2 * half] *= shrink, out[n][2 * half + 1] *= shrink;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = exp2_approximately(fmaf(scores[n][i], scale_log2, -pivot[i / 2]));
        total[i / 2] += scores[n][i];
      }
    if (p.dropped)
#pragma unroll
      for (int n = 0; n < 8; n += 4) {
        const Kept kept(p, seed, sequence, head, first_row, key + 8 * n);
#pragma unroll
        for (int i = 0; i < 16; ++i)
          if (!kept.holds(i / 4, i % 4)) scores[n + i / 4][i % 4] = 0;
      }
    wait_for_copies<1>();
    publish();
    __syncthreads();
    uint32_t weights[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      as_operand<T>(weights[n], scores[2 * n], scores[2 * n + 1]);
      if constexpr (!kHasGroups) multiply_columns<T, D>(out, weights[n], at, kValueTile, 16 * n);
    }
    if constexpr (kHasGroups) multiply_group_columns<T, D>(out, weights, tiles + kValueTile);
  }

  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    total[half] = quad_sum(total[half]);
    // For a query without keys the sum is 0 and the output stays zero.
    if (total[half] == 0) total[half] = 1;
    inverse[half] = 256.0f / ((256 - p.dropped) * total[half]);
    const int row = first_row + g + 8 * half;
    if (pair == 0 && row < length)
      p.lse[int64_t{head} * p.rows_q + first_q + row] = largest[half] * scale_log2 + log2_approximately(total[half]);
  }
  // Only this warp reads its ring.
  store_rows<T, D>(
      p.out + ((first_q + first_row) * p.heads + head) * D, p.heads * D, length - first_row, out,
      inverse, reinterpret_cast<unsigned char*>(ring));
}

}  // namespace effasr

EFFASR_LAUNCHER(attention_forward)

extern "C" int effasr_cuda_interface() { return EFFASR_CUDA_INTERFACE; }
