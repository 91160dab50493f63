// Sequences shared out among threads. Each is computed by one of them, in the same way by any.
// Within a sequence, loops use the widest vectors of the machine, with -O3 -fno-trapping-math.

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

// Calls `run(scratch, n)` for every n below `count`; each thread has a scratch of its own. Returns
// 0, or 1 where memory was short.
template <class Scratch, class Run>
int for_each_sequence(int count, int threads, Run run) {
  std::atomic<int> next{0}, failed{0};
  auto work = [&] {
    try {
      Scratch scratch;
      // Lengths differ: whoever is done takes the next.
      for (int n = next++; n < count && !failed; n = next++) run(scratch, n);
    } catch (const std::bad_alloc&) {
      failed = 1;
    }
  };
  std::vector<std::thread> others;
  try {
    for (int i = 1; i < std::min(threads, count); ++i) others.emplace_back(work);
  } catch (const std::exception&) {
    // As many threads as the system gives; one is enough.
  }
  work();
  for (std::thread& other : others) other.join();
  return failed;
}

}  // namespace effasr
