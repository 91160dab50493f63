// One step of a Transformer decoder on CPUs: the interface that Python calls.
//
// The interface is plain C and includes no header of torch. A step decodes one token of each row
// through all layers and appends to the keys and values of the rows. All floating-point values are
// float32. The result of a row depends neither on other rows nor on the number of threads.

#pragma once

#include <stdint.h>

#include "interface.h"

#ifdef __cplusplus
extern "C" {
#endif

// y = x A^T + bias, with A (outputs, inputs). Weights are stored in panels of 32 outputs, the last
// padded with zeros: element (o, i) of A is weight[(o / 32 * inputs + i) * 32 + o % 32].
typedef struct {
  const float* weight;
  const float* bias;  // (outputs,), or null
  int64_t inputs;
  int64_t outputs;
} PanelMatrix;

typedef struct {
  const float* weight;  // (width,); null for no norm
  const float* bias;    // (width,)
  double epsilon;
} LayerNorm;

typedef struct {
  LayerNorm self_norm, cross_norm, forward_norm;
  PanelMatrix qkv;        // queries, keys and values, (heads, head_width) each
  PanelMatrix self_out;
  PanelMatrix q;
  PanelMatrix cross_out;
  PanelMatrix first, second;
} DecoderLayer;

enum { kRelu = 0, kGelu = 1 };  // activation of feed-forward networks; exact GELU

typedef struct {
  const DecoderLayer* layers;
  const float* tokens;     // (vocabulary, width)
  const float* positions;  // (most_positions, width)
  LayerNorm embedding_norm, norm;
  int64_t vocabulary;
  int64_t most_positions;
  int32_t layer_count;
  int32_t width;
  int32_t heads;
  int32_t head_width;
  int32_t activation;
  float scale;             // factor of the scores
} DecoderWeights;

// Keys and values, (layers, 2, rows, heads, room, width); `room` is a multiple of 16, and values
// past the end of a row are finite. The width may exceed that of a head.
typedef struct {
  float* data;
  int64_t rows, room, width;
} KeyValueCache;

typedef struct {
  const int64_t* tokens;   // (rows,)
  int64_t* positions;      // (rows,): tokens decoded so far, incremented up to `most_position`
  const int64_t* active;   // (rows,): 0 for rows to skip; their output is zero
  const int64_t* frames;   // (rows / hypotheses,): number of valid positions in `cross`
  float* out;              // (rows, width), output of the last norm
  KeyValueCache self;      // written at each row's position
  KeyValueCache cross;     // shared by the hypotheses of a sequence, which are adjacent rows
  int64_t rows;
  int64_t hypotheses;
  int64_t most_position;
  int64_t wrong_row;       // written: a row whose token or position is out of range, or -1
  int32_t instructions;    // as in interface.h
} DecoderStep;

// The largest of the first `outputs` logits of each row, the first among equal logits.
typedef struct {
  const float* hidden;     // (rows, matrix.inputs)
  PanelMatrix matrix;
  int64_t* out;            // (rows,)
  int64_t rows;
  int32_t instructions;
} LargestLogit;

// Both return 0 for success, 1 if memory could not be allocated, and 2 if the CPU does not support
// `instructions`. A step with a wrong row only sets `wrong_row`.
int decoder_step_cpu(const DecoderWeights* weights, DecoderStep* step, int threads);
int largest_logit_cpu(const LargestLogit* request, int threads);

#ifdef __cplusplus
}
#endif
