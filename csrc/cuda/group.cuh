// Products of a group of four warps on sm_90a, 16 rows of each: wgmma, whose left operands are in registers.
// The tensor cores read tiles in shared memory, and write sums to registers, while warps go on; so the
// registers of a product are not to be touched between `begin_products` and `end_products`.
//
// The scores by distance go through a ring as in `scores.cuh`. But the four warps multiply the same 64 distances, so
// those for the next keys are as many as 64 of a query: the ring has 128 columns, and no score moves in it.
#pragma once

#include "tile.cuh"

namespace effasr {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
constexpr bool kHasGroups = true;
#else
constexpr bool kHasGroups = false;
#endif

// Behind a barrier, products see this thread's writes to shared memory and the copies that it waited for.
__device__ inline void publish() {
  if constexpr (kHasGroups) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#define EFFASR_ROW(x) "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3])
#define EFFASR_32_COLUMNS(x) EFFASR_ROW(x[0]), EFFASR_ROW(x[1]), EFFASR_ROW(x[2]), EFFASR_ROW(x[3])
#define EFFASR_64_COLUMNS(x) \
  EFFASR_32_COLUMNS(x), EFFASR_ROW(x[4]), EFFASR_ROW(x[5]), EFFASR_ROW(x[6]), EFFASR_ROW(x[7])
#define EFFASR_32_PLACES "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define EFFASR_64_PLACES \
  EFFASR_32_PLACES ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EFFASR_PRODUCT(type, columns, operands, ...)                                  \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32." type "." type  \
               " {" EFFASR_##columns##_PLACES "}, " operands ";"                      \
               : EFFASR_##columns##_COLUMNS(sums)                                     \
               : __VA_ARGS__)
#define EFFASR_GROUP_PRODUCT(...)                                    \
  if constexpr (T::kIsBFloat16) EFFASR_PRODUCT("bf16", __VA_ARGS__); \
  else EFFASR_PRODUCT("f16", __VA_ARGS__)

using GroupSums = float[8][4];

// sums (+)= a b, of 64 x 16 and 16 x 64 or 16 x 32 numbers; b lies with its rows contiguous where kAcross, else its
// columns.
template <class T, int kAcross, int kAdds, int N>
__device__ void multiply_group(float (&sums)[N][4], const uint32_t (&a)[4], uint64_t b) {
  if constexpr (N == 8) {
    EFFASR_GROUP_PRODUCT(
        64, "{%32, %33, %34, %35}, %36, %37, 1, 1, %38", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
        "n"(kAdds), "n"(kAcross));
  } else {
    EFFASR_GROUP_PRODUCT(
        32, "{%16, %17, %18, %19}, %20, %21, 1, 1, %22", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),
        "n"(kAdds), "n"(kAcross));
  }
}
// Of 128 bytes of the rows of a tile: the words' exchange by 128 bytes, and 1024 from 8 rows to the next.
__device__ inline uint64_t descriptor(uint32_t address) {
  return uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16 | address >> 4;
}
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
template <int N>
__device__ void end_products(float (&sums)[N][4]) {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#pragma unroll
  for (int n = 0; n < N; n += 4)
    asm volatile("wgmma.wait_group.sync.aligned 0;" : EFFASR_32_COLUMNS((&sums[n]))::"memory");
}

// sums (+)= a b^T for the 64 rows of a tile, 8 N at a time.
template <class T, int D, bool kAdds, int N = 8>
__device__ void multiply_group_rows(GroupSums& sums, const Held<D>& a, uint32_t tile) {
  begin_products();
#pragma unroll
  for (int n = 0; n < 8; n += N) {
    auto& some = reinterpret_cast<float(&)[N][4]>(sums[n]);
    const uint64_t b = descriptor(tile + n * 1024);
    multiply_group<T, 0, kAdds>(some, a.numbers[0], b);
#pragma unroll
    for (int k = 1; k < D / 16; ++k)
      multiply_group<T, 0, true>(some, a.numbers[k], b + (k / 4 * kPanel + k % 4 * 32) / 16);
  }
  end_products(sums);
}
// sums += a b for the 64 rows of a tile, which are 64 columns of a.
template <class T, int D>
__device__ void multiply_group_columns(float (&sums)[D / 8][4], const uint32_t (&a)[4][4], uint32_t tile) {
  const uint64_t b = descriptor(tile);
  begin_products();
#pragma unroll
  for (int n = 0; n < D / 8; n += 8)
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply_group<T, 1, true>(
          reinterpret_cast<GroupSums&>(sums[n]), a[k], b + (n / 8 * kPanel + k * 16 * 128) / 16);
  end_products(sums);
}

// As many columns as the last 8 of the 128 and a skew of 15 reach.
constexpr int kGroupPitch = 136;

// Writes the scores by position of the tile of the table whose first distance is the largest of these queries and of
// the keys behind those of `step`: query r of the block meets distance x at key x + r + 1 of that step.
template <class T, int D>
__device__ void write_group_scores(float* ring, const Held<D>& queries, uint32_t table, int step) {
  GroupSums sums;
  multiply_group_rows<T, D, false>(sums, queries, table);
  float* row = ring + lane() / 4 * kGroupPitch + lane() / 4 + 1 + 2 * (lane() % 4);
#pragma unroll
  for (int n = 0; n <= 8; ++n) {
    // Column 128 + j has what the ring's end has of column j of the next keys.
    float* at = row + (step * kRows + warp() * 16 + 8 * n & 127);
    if (n < 8) at[0] = sums[n & 7][0], at[1] = sums[n & 7][1];
    at += 8 * kGroupPitch;
    if (n > 0) at[0] = sums[n - 1 & 7][2], at[1] = sums[n - 1 & 7][3];
  }
  __syncwarp();
}

__device__ inline void read_group_scores(GroupSums& scores, const float* ring, int step) {
  const int g = lane() / 4, column = 2 * (lane() % 4), behind = step % 2 ? 0 : 128;
  const float* at = ring + g * kGroupPitch + column + step % 2 * kRows;
#pragma unroll
  for (int half = 0; half < 2; ++half, at += 8 * kGroupPitch) {
    scores[0][2 * half] = at[column <= g ? behind : 0];
    scores[0][2 * half + 1] = at[1 + (column + 1 <= g ? behind : 0)];
#pragma unroll
    for (int n = 1; n < 8; ++n) {
      const float2 two = *reinterpret_cast<const float2*>(at + 8 * n);
      scores[n][2 * half] = two.x, scores[n][2 * half + 1] = two.y;
    }
  }
}

}  // namespace effasr
