// What an instruction asks of memory: sectors of 32 bytes of global memory, and wavefronts of shared
// memory, which has 32 banks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

struct Counts {
  uint64_t issued = 0;     // by a warp
  uint64_t sectors = 0;    // of global memory that it touched
  uint64_t needed = 0;     // as many as hold the bytes that it wanted
  uint64_t wavefronts = 0; // of shared memory
  uint64_t fewest = 0;     // as many as there would be without bank conflicts
  uint64_t products = 0;   // multiplications of tensor cores
};

inline void count_global(Counts& counts, std::vector<uint64_t>& at, uint32_t bytes) {
  std::sort(at.begin(), at.end());
  at.erase(std::unique(at.begin(), at.end()), at.end());
  uint64_t last = ~uint64_t{0};
  for (uint64_t x : at)
    for (uint64_t sector = x / 32; sector <= (x + bytes - 1) / 32; ++sector)
      if (sector != last) ++counts.sectors, last = sector;
  counts.needed += (at.size() * bytes + 31) / 32;
}

// Addresses of the lanes in order. Accesses of 8 bytes are served for half a warp at a time, those of 16
// for a quarter.
inline void count_shared(Counts& counts, const std::vector<uint64_t>& at, uint32_t bytes) {
  const size_t lanes = bytes <= 4 ? 32 : 128 / bytes;
  for (size_t begin = 0; begin < at.size(); begin += lanes) {
    std::vector<uint64_t> words;
    for (size_t i = begin; i < std::min(begin + lanes, at.size()); ++i)
      for (uint32_t byte = 0; byte < bytes; byte += 4) words.push_back((at[i] + byte) / 4);
    std::sort(words.begin(), words.end());
    words.erase(std::unique(words.begin(), words.end()), words.end());
    uint32_t banks[32] = {};
    uint32_t most = 0;
    for (uint64_t word : words) most = std::max(most, ++banks[word % 32]);
    counts.wavefronts += most;
    counts.fewest += (words.size() + 31) / 32;
  }
}
