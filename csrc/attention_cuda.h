// C interface of attention with relative positions on NVIDIA GPUs. Matrices are of 16-bit floats, their rows
// contiguous, and addresses and strides (in numbers) multiples of 16 bytes. `attention/_cuda.py` declares this
// structure again, checks what points to it, and has the meaning of all shapes.
#pragma once

#include <cstdint>

// To be increased there, in `runtime/cuda.py`, and here with every change of the structure.
#define EFFASR_CUDA_INTERFACE 3

namespace effasr {

struct AttentionCall {
  const uint16_t *q, *k, *v;                     // (T_q, H, D), (T_k, H, D) twice
  const uint16_t *table;                         // (2 reach - 1, H, D), by rising distance
  const uint16_t *content_bias, *position_bias;  // (H, D), contiguous
  const int32_t *cu_seqlens_q, *cu_seqlens_k;    // (sequences + 1,)
  const int32_t *tiles;                          // of 64 rows; `effasr_kernels.runtime.tiles.read_tile`
  const int64_t *seed;                           // of dropout
  uint16_t *out;                                 // (T_q, H, D), contiguous
  float *lse;                                    // (H, T_q), to base 2
  // Of the backward; contiguous where nothing else is said.
  const uint16_t *grad_out;                      // (T_q, H, D)
  float *norms;                                  // (chunks of keys, H, T_q, 2): lse, sums of out * grad_out
  float *grad_q_parts;                           // (chunks of keys, T_q, H, D), to be summed; columns: `first_column`
  uint16_t *grad_q, *grad_k, *grad_v;            // rows are contiguous, heads adjacent
  uint16_t *grad_table;                          // (2 reach - 1, H, D)
  // To be summed: (splits, then tiles of queries; content and position; H, D), and (splits, H, blocks of
  // distances, 64, D), columns as above, of which each split has the blocks that `extents` says, (splits, 2).
  float *grad_biases, *grad_distances;
  int32_t *extents;
  int32_t q_row, k_row, v_row, table_row, grad_q_row, grad_k_row, q_head, k_head, v_head, table_head;
  int32_t heads, rows_q, sequences, reach;
  int32_t left, right, chunk;  // `Context.bounds`; at most 2 ** 29 each
  int32_t dropped;             // of 256 weights
  int32_t splits;              // blocks for a head that go through tiles of keys
  int32_t blocks;              // of 64 distances, half of them below 0
  float scale;                 // of scores, above 0
};

}  // namespace effasr
