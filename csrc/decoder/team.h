// Threads that compute one step together, phase by phase.

#pragma once

#include <algorithm>
#include <atomic>
#include <exception>
#include <new>
#include <thread>
#include <vector>

namespace effasr {

struct Range {
  int begin, end;
};

class Team {
 public:
  int size() const { return size_; }

  // Returns the range of `count` items that a thread computes.
  Range share(int count, int thread) const {
    const auto bound = [&](int64_t n) { return static_cast<int>(count * n / size_); };
    return {bound(thread), bound(thread + 1)};
  }

  // Barrier of all threads. Phases take microseconds, so it spins before it yields.
  void wait() {
    if (size_ == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins > kSpins) std::this_thread::yield();
    }
  }

  // Calls `work(thread)` on up to `threads` threads, as many as can be started. `work` must not
  // throw.
  template <class Work>
  void run(int threads, Work work) {
    std::vector<std::thread> others;
    std::atomic<bool> is_complete{false};
    try {
      for (int i = 1; i < threads; ++i) {
        others.emplace_back([&, i] {
          while (!is_complete.load(std::memory_order_acquire)) std::this_thread::yield();
          work(i);
        });
      }
    } catch (const std::exception&) {
      // The threads that could be started are enough.
    }
    size_ = static_cast<int>(others.size()) + 1;
    is_complete.store(true, std::memory_order_release);
    work(0);
    for (std::thread& other : others) other.join();
  }

 private:
  static constexpr int kSpins = 4096;
  int size_ = 1;
  std::atomic<int> arrived_{0}, phase_{0};
};

// Minimum number of multiply-adds between two barriers for which a thread pays.
constexpr int64_t kWorkOfThread = 1 << 18;

inline int threads_for(int64_t work, int most) {
  return static_cast<int>(std::clamp<int64_t>(work / kWorkOfThread, 1, std::max(1, most)));
}

}  // namespace effasr
