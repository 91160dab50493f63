// The C interface of the lattices, for a group of packed sequences.
//
// The interface is plain C, called by effasr_kernels/shared/lattice.py. Lengths are differences of
// adjacent elements of `cu_...`, so a slice of the offsets of a layout describes a group.

#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// A transducer's lattice. Node (t, u) of sequence n, with U_n labels, is element
//     first_nodes[n] + t * (U_n + 1) + u
// of a plane. Either output may be the plane of its input.
typedef struct {
  const float* log_blank;   // log-probability to go to the next frame
  const float* log_label;   // to emit the next label; not read at u = U_n
  float* occ_blank;         // probability that a path takes the blank of this node,
  float* occ_label;         // and the label; both null to compute only log-likelihoods
  double* log_likelihood;   // (sequences,)
  const int32_t* cu_frames;    // (sequences + 1,)
  const int32_t* cu_labels;    // (sequences + 1,)
  const int64_t* first_nodes;  // (sequences,)
  int32_t sequences;
} TransducerLattice;

// The lattice of connectionist temporal classification. Tables have `columns` elements for each
// frame: the blank in column 0, then the labels of the frame's transcript. Elements to the right of
// these are neither read nor written.
typedef struct {
  const float* scores;          // logits
  const float* log_normalizer;  // (T,), subtracted from them; null for 0
  float* occupancies;           // may be `scores`; null to compute only log-likelihoods
  float* shares;                // workspace table; null if `occupancies` is null
  double* log_likelihood;       // (sequences,)
  const void* targets;          // int32, or int64 where `wide_targets`
  const int32_t* cu_frames;     // (sequences + 1,), of `scores`
  const int32_t* cu_targets;    // (sequences + 1,), of `targets`
  int32_t sequences;
  int32_t columns;  // more than any sequence has labels
  int32_t wide_targets;
} CtcLattice;

// The best monotone alignment of frames to tokens.
typedef struct {
  const float* speech;       // (T, width)
  const float* text;         // (U, width)
  int64_t* chosen;           // (T,), written: the row of `text` of each frame; -1 without tokens
  const int32_t* cu_frames;  // (sequences + 1,)
  const int32_t* cu_tokens;  // (sequences + 1,)
  int32_t sequences;
  int32_t width;
} BestAlignment;

// Results do not depend on the number of threads. Returns 0, or 1 if memory could not be allocated.
int transducer_lattice_cpu(const TransducerLattice* lattice, int threads);
int ctc_lattice_cpu(const CtcLattice* lattice, int threads);
int best_alignment_cpu(const BestAlignment* alignment, int threads);

#ifdef __cplusplus
}
#endif
