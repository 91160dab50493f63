// Where the nodes of a transducer's lattice are, as a walk over its anti-diagonals meets them.
//
// A walk goes from node (0, 0) to the last one or, mirrored, the other way; t and u then count from
// the end, and all else is the same. On diagonal d, column u is at frame d - u of the walk.

#pragma once

#include "lattice_step.h"

namespace effasr {

struct Shape {
  int frames, labels;
  bool skewed;

  EFFASR_BOTH int states() const { return labels + 1; }
  EFFASR_BOTH int diagonals() const { return frames + labels; }
  // Walks from both ends meet between this diagonal and the one before it.
  EFFASR_BOTH int cut() const { return diagonals() / 2; }
};

// The node of one column of a walk, diagonal after diagonal.
class Cursor {
 public:
  EFFASR_BOTH Cursor(const Shape& shape, bool mirrored, int diagonal, int column)
      : frame_(diagonal - column),
        column_(mirrored ? shape.labels - column : column),
        step_(mirrored ? -1 : 1),
        shape_(shape) {
    if (shape.skewed) {
      // May be negative before the walk begins.
      row_ = (mirrored ? shape.diagonals() - 1 - diagonal : diagonal) % shape.frames;
      if (row_ < 0) row_ += shape.frames;
    } else {
      row_ = mirrored ? shape.frames - 1 - frame_ : frame_;
    }
  }

  EFFASR_BOTH void advance() {
    ++frame_;
    row_ += step_;
    if (!shape_.skewed) return;
    if (row_ == shape_.frames) row_ = 0;
    if (row_ < 0) row_ = shape_.frames - 1;
  }

  // Frame of the walk.
  EFFASR_BOTH int frame() const { return frame_; }
  EFFASR_BOTH bool exists() const {
    return frame_ >= 0 && frame_ < shape_.frames && column_ >= 0 && column_ <= shape_.labels;
  }
  EFFASR_BOTH bool has_label() const { return column_ < shape_.labels; }
  EFFASR_BOTH int64_t node() const {
    return static_cast<int64_t>(row_) * shape_.states() + column_;
  }

 private:
  int frame_, column_, step_, row_;
  Shape shape_;
};

}  // namespace effasr
