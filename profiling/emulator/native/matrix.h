// Where the elements of matrices lie: in registers of a warp's lanes, and in shared memory.
#pragma once

#include <cstdint>

#include "numbers.h"

// Of a 16 x 16 operand A, or of 16 x 8 halves of it: lane and place (register, half) of (row, column).
struct Place {
  int lane, word, half;
};
inline Place place_a(int row, int column) {
  return {row % 8 * 4 + column % 8 / 2, row / 8 + column / 8 * 2, column % 2};
}
// Of a 16 (k) x 8 operand B.
inline Place place_b(int k, int column) {
  return {column * 4 + k % 8 / 2, k / 8, k % 2};
}
// Of a 16 x 8 accumulator, a word an element.
inline Place place_c(int row, int column) {
  return {row % 8 * 4 + column / 2, row / 8 * 2 + column % 2, 0};
}

inline float narrow(uint16_t x, bool is_bf16) { return is_bf16 ? from_bf16(x) : from_f16(x); }

// A wgmma matrix descriptor (PTX ISA, "Matrix descriptor"): addresses in units of 16 bytes.
struct Descriptor {
  uint32_t start, leading, stride;
  int swizzle;  // bytes of a row of an atom: 128, 64, 32, or 16 without swizzling

  explicit Descriptor(uint64_t x)
      : start((x & 0x3fff) << 4), leading((x >> 16 & 0x3fff) << 4), stride((x >> 32 & 0x3fff) << 4) {
    constexpr int bytes[] = {16, 128, 64, 32};
    swizzle = bytes[x >> 62];
  }

  // Where element (line, k) lies, line being a row of A or a column of B: along k (K-major), or along
  // lines (transposed) where `across`. The canonical layouts of CUTLASS, cute/arch/mma_sm90_desc.hpp.
  uint32_t address(int line, int k, bool across) const {
    uint32_t at;
    if (!across) {
      const int bytes = k * 2;
      at = line / 8 * stride + line % 8 * swizzle;
      at += swizzle == 16 ? bytes / 16 * leading + bytes % 16 : bytes;
    } else {
      const int in_atom = swizzle / 2;
      at = line % in_atom * 2 + k % 8 * swizzle;
      at += line / in_atom * (swizzle == 16 ? stride : leading);
      at += k / 8 * (swizzle == 16 ? leading : stride);
    }
    at += start;
    // Bits 4.. are exchanged with bits 7..: as many as a row of the atom has words of 16 bytes.
    return at ^ (at >> 7 & (swizzle / 16 - 1)) << 4;
  }
};
