// Attention within packed sequences on CPUs: the interface that Python calls.
//
// The interface is plain C and includes no header of torch. Scores are computed in tiles and not
// stored; the backward recomputes them. All floating-point values are float32.

#pragma once

#include <stdint.h>

#include "interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// Packed rows of all heads: element (t, h, d) is data[t * row + h * head + d]. It may be a part of
// a larger tensor, such as q, k and v in the output of one projection.
typedef struct {
  float* data;
  int64_t row;
  int64_t head;
} PackedHeads;

// score(i, j) = scale * ((q_i + content_bias) . k_j + (q_i + position_bias) . table[reach-1 + i-j])
// with i and j counted from zero in their own sequence; without `table` it is scale * q_i . k_j.
// Head h of q reads head h / group of k and v.
typedef struct {
  PackedHeads q, k, v;
  PackedHeads out;             // zero for a query without keys, and in the tail
  float* softmax;              // (rows_q, heads, 2): the largest score times log2(e), and the
                               // reciprocal of the sum; written by the forward, or null there
  const float* content_bias;   // (heads, width); null, all three, without relative positions
  const float* position_bias;  // (heads, width)
  const float* table;          // (2 * reach - 1, heads, width)
  float* penalty;              // (rows_q, heads): sum_j A_ij (1 - exp(-(i/Tq - j/Tk)^2/2 sigma^2));
                               // null to skip it
  const int32_t* cu_q;         // (sequences + 1,)
  const int32_t* cu_k;         // (sequences + 1,)
  int64_t rows_q;              // of the tensors; those past cu_q[sequences] are the tail
  int64_t rows_k;
  int64_t seed;                // seed of dropout, see attention/dropout.h
  float scale;
  float sigma;                 // width of the penalty
  float dropout;               // probability to drop a weight in `out`, in [0, 1)
  int32_t sequences;
  int32_t heads;               // of q
  int32_t group;               // heads of q that share a head of k and v; 1 with `table`
  int32_t width;
  int32_t reach;               // with `table`: at least the longest length
  int32_t causal;              // whether query i attends only to keys 0 to i
  int32_t instructions;
} PackedAttention;

typedef struct {
  PackedHeads out;       // of the output, read
  const float* penalty;  // of the penalty, read; null for zero
  PackedHeads q, k, v;   // written, zero in the tail
  float* content_bias;   // written; null, all three, without relative positions
  float* position_bias;
  float* table;
} AttentionGradients;

// Results of a sequence depend only on that sequence (with dropout also on its number). Gradients
// of biases and table depend on the order of the sequences. Nothing depends on the number of
// threads. Returns 0 for success, 1 if memory could not be allocated, and 2 if the CPU does not
// support `instructions`.
int attention_forward_cpu(const PackedAttention* attention, int threads);
int attention_backward_cpu(const PackedAttention* attention, const AttentionGradients* gradients,
                           int threads);

#ifdef __cplusplus
}
#endif
