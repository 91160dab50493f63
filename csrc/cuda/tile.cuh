// Tiles of 64 rows of D 16-bit numbers in shared memory, and products with them.
//
// A tile has 64 columns of all rows, then the other 64. The words of 16 bytes of a row are exchanged by the row's
// number, so that the eight rows of a matrix that ldmatrix reads lie in different banks; wgmma has the same layout.
#pragma once

#include "warp.cuh"

namespace effasr {

constexpr int kRows = 64;  // of a tile: queries, keys or distances
constexpr int kThreads = 128;  // of a block: four warps

__device__ inline int lane() { return threadIdx.x % 32; }
__device__ inline int warp() { return threadIdx.x / 32; }

template <int D>
constexpr int kTileBytes = kRows * D * 2;
constexpr int kPanel = kRows * 128;  // bytes of 64 columns

// Bytes from the beginning of a tile of N rows to a word of 16 bytes.
template <int D, int N = kRows>
__device__ int place(int row, int word) {
  return word / 8 * (N * 128) + row * 128 + (((word ^ row) & 7) << 4);
}
// Bytes to a row, of 128 in two tiles.
template <int D>
__device__ int row_of(int row) {
  return row * 128 + (row & 64) * (D - 64) * 2;
}

// Begins to copy 64 rows, all threads of the block together: row i is row first + kStep i of a matrix in global memory
// that has rows from 0 to end - 1; of others it is zero. `row_first` is where the first row is or would be.
template <int D, int kStep = 1>
__device__ void copy_rows(uint32_t tile, const uint16_t* row_first, int stride, int first, int end) {
  // A multiple of 8, so that a thread's words have one place in their rows.
  constexpr int kWords = D / 8, kApart = kThreads / kWords;
  const int row = threadIdx.x / kWords, word = threadIdx.x % kWords;
  uint64_t from = __cvta_generic_to_global(row_first + int64_t{kStep * row} * stride + word * 8);
  tile += place<D>(row, word);
#pragma unroll
  for (int i = 0; i < kRows; i += kApart, from += int64_t{kStep * kApart * 2} * stride)
    copy_or_zero(tile + i * 128, from, static_cast<uint32_t>(first + kStep * (row + i)) < static_cast<uint32_t>(end));
}

// Where in a tile a lane finds its rows of 8 x 8 matrices: of 16 rows and 16 columns, two below each other first,
// or two beside each other first. The tile is `offset` bytes behind the beginning of shared memory. All tiles
// share these few registers.
template <int D>
struct Places {
  uint32_t below[4], beside[4];
  explicit __device__ Places(uint32_t shared) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      beside[k] = shared + place<D>(lane() / 16 * 8 + lane() % 8, 2 * k + lane() / 8 % 2);
      below[k] = shared + place<D>(lane() % 16, 2 * k + lane() / 16);
    }
  }
};

// The left operands of products: 16 rows of a warp, in registers.
template <int D>
struct Held {
  uint32_t numbers[D / 16][4];
};
// sums += a b^T for 16 N rows of a tile from `row` on, a multiple of 16, all D columns. Behind row 127 comes row 0,
// for what two tiles hold as a ring.
template <class T, int D, int N>
__device__ void multiply_rows(float (&sums)[2 * N][4], const Held<D>& a, const Places<D>& at, int tile, int row) {
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t right[4];
      load_matrices<false>(right, at.beside[k % 4] + (tile + row_of<D>((row + 16 * n) & 127)) + k / 4 * kPanel);
      T::multiply(sums[2 * n], a.numbers[k], right[0], right[1]);
      T::multiply(sums[2 * n + 1], a.numbers[k], right[2], right[3]);
    }
}

// sums += a b for 16 rows of a tile from `row` on, a multiple of 16, which are 16 columns of a, in registers.
template <class T, int D>
__device__ void multiply_columns(
    float (&sums)[D / 8][4], const uint32_t (&a)[4], const Places<D>& at, int tile, int row) {
#pragma unroll
  for (int n = 0; n < D / 16; ++n) {
    uint32_t right[4];
    load_matrices<true>(right, at.below[n % 4] + (tile + row_of<D>(row)) + n / 4 * kPanel);
    T::multiply(sums[2 * n], a, right[0], right[1]);
    T::multiply(sums[2 * n + 1], a, right[2], right[3]);
  }
}

// Columns 16 k to 16 k + 15 of a result as a left operand.
template <class T>
__device__ void as_operand(uint32_t (&a)[4], const float (&low)[4], const float (&high)[4]) {
  a[0] = T::pack(low[0], low[1]), a[1] = T::pack(low[2], low[3]);
  a[2] = T::pack(high[0], high[1]), a[3] = T::pack(high[2], high[3]);
}

// Stores 16 rows of a warp, of which those from `rows` on do not exist, through 16 rows of a tile of its own
// in shared memory, so that whole words of 16 bytes go to global memory.
template <class T, int D>
__device__ void store_rows(
    uint16_t* to, int stride, int rows, const float (&x)[D / 8][4], const float (&factor)[2],
    unsigned char* tile) {
  // A word farther in all rows' order is an exchange of bits; the tile begins at a multiple of 128 bytes.
  const uint32_t first = place<D, 16>(lane() / 4, 0) + lane() % 4 * 4;
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      *reinterpret_cast<uint32_t*>(tile + (first ^ n % 8 * 16) + n / 8 * 2048 + half * 1024) =
          T::pack(x[n][2 * half] * factor[half], x[n][2 * half + 1] * factor[half]);
  __syncwarp();
  constexpr int kApart = 256 / D;
  const int row = lane() / (D / 8), word = lane() % (D / 8), step = kApart * stride;
  const uint32_t place_of_word = place<D, 16>(row, word);
  to += row * stride + word * 8;
#pragma unroll
  for (int i = 0; i < 16; i += kApart, to += step)
    if (row + i < rows)
      *reinterpret_cast<uint4*>(to) =
          *reinterpret_cast<const uint4*>(tile + ((place_of_word ^ i % 8 * 16) + i * 128));
  __syncwarp();
}

}  // namespace effasr
