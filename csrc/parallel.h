// Distribution of sequences among threads. One thread computes a sequence, and the result does not
// depend on which. Loops use the widest vectors of the CPU, with -O3 -fno-trapping-math.

#pragma once

#include <algorithm>
#include <atomic>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define EFFASR_FOR_WIDE_VECTORS \
  __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define EFFASR_FOR_WIDE_VECTORS
#endif

namespace effasr {

// Calls `run(scratch, n)` for every n below `count`, with a separate scratch for each thread.
// Returns 0, or 1 if memory could not be allocated.
template <class Scratch, class Run>
int for_each_sequence(int count, int threads, Run run) {
  std::atomic<int> next{0}, failed{0};
  auto work = [&] {
    try {
      Scratch scratch;
      // Lengths differ, so an idle thread takes the next sequence.
      for (int n = next++; n < count && !failed; n = next++) run(scratch, n);
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < std::min(threads, count); ++i) others.emplace_back(work);
  } catch (const std::exception&) {
    // If the system cannot start more threads, the existing ones compute everything.
  }
  work();
  for (std::thread& other : others) other.join();
  return failed;
}

}  // namespace effasr
