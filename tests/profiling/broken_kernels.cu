// What nvcc makes of shared, dynamic and local memory, copies, named barriers and shuffles, and faults in it.
#include <cstdint>

enum Fault { kNone, kNoBarrier, kNoWait, kOtherHalf, kTooFew };

// Each half of a block reverses the doubled values of the other half, and adds those of the next lane, if there
// is one.
template <int kFault>
__global__ void __launch_bounds__(128) reverse(
    const float* __restrict__ values, float* result, int index) {
  __shared__ __align__(16) float staged[128];
  extern __shared__ float doubled[];
  const int thread = threadIdx.x, half = thread / 64, first = blockIdx.x * 128;
  if (thread % 4 == 0) {
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(staged + thread));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(values + first + thread));
  }
  asm volatile("cp.async.commit_group;");
  if (kFault != kNoWait) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (kFault != kNoBarrier) __syncthreads();
  doubled[thread] = 2 * staged[thread ^ 64];
  asm volatile("bar.sync %0, %1;" ::"r"(1 + half), "n"(kFault == kTooFew ? 96 : 64) : "memory");
  float turns[4];
  const int other = kFault == kOtherHalf ? 127 - thread : half * 64 + 63 - thread % 64;
  for (int i = 0; i < 4; ++i) turns[i] = doubled[other] + i;
  uint32_t next;
  asm volatile("{\n\t.reg .pred inside;\n\tshfl.sync.down.b32 %0|inside, %1, 1, 31, -1;\n\t"
               "selp.b32 %0, %0, 0, inside;\n\t}"
               : "=r"(next)
               : "r"(__float_as_uint(turns[index])));
  result[first + thread] = turns[index] + __uint_as_float(next);
}

#define INSTANCE(fault) template __global__ void reverse<fault>(const float*, float*, int);
INSTANCE(kNone) INSTANCE(kNoBarrier) INSTANCE(kNoWait) INSTANCE(kOtherHalf) INSTANCE(kTooFew)
