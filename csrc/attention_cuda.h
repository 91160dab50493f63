// C interface of the forward of attention with relative positions on NVIDIA GPUs. Matrices are of 16-bit floats, their rows
// contiguous, and addresses and strides (in numbers) multiples of 16 bytes. `attention/_cuda.py` declares this
// structure again, checks what points to it, and has the meaning of all shapes.
#pragma once

#include <cstdint>

// To be increased there, in `runtime/cuda.py`, and here with every change of the structure.
#define EFFASR_CUDA_INTERFACE 4

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
  int32_t q_row, k_row, v_row, table_row, q_head, k_head, v_head, table_head;
  int32_t heads, rows_q, sequences, reach;
  int32_t left, right, chunk;  // `Context.bounds`; at most 2 ** 29 each
  int32_t dropped;             // of 256 weights
  float scale;                 // of scores, above 0
};

}  // namespace effasr
