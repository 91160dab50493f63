// Which blocks of a launch are ordered by atomics. A release hands on what its thread has seen, and what
// warps of its block wrote before their last barrier; an acquire takes what was handed on at that address
// (PTX ISA, "Causality order": release patterns and barriers are cumulative).
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

// The stretch of a warp between two barriers; warps that leave a barrier together share its number. Warps of a
// block are ordered by barriers and by nothing else.
struct Phase {
  uint32_t number = 0;  // rises in the launch; 0 is none
  uint32_t block = 0;
  // Of each warp of the block the last phase that barriers have ordered before this one.
  std::vector<uint32_t> seen = {};

  bool follows(uint32_t then, uint16_t other, uint16_t warp) const {
    return other == warp || then <= seen[other];
  }
};

class Order {
 public:
  // An atomic of a warp, which reads what the earlier ones at the address wrote.
  void meet(uint64_t at, const Phase& phase, uint16_t warp, bool releases, bool acquires) {
    Known& there = released_[at];
    if (releases) {
      for (const Acquired& x : acquired_[phase.block])
        if (x.is_visible(phase, warp)) join(there, x.known);
      there[phase.block] = phase.number;
    }
    if (acquires) acquired_[phase.block].push_back({phase, warp, there});
  }

  // Whether what another block did in a phase, before its last barrier, is visible now; or, of an atomic,
  // in the phase that has released it.
  bool is_visible(const Phase& then, bool is_atomic, const Phase& now, uint16_t warp) const {
    const auto found = acquired_.find(now.block);
    if (found == acquired_.end()) return false;
    for (const Acquired& x : found->second) {
      if (!x.is_visible(now, warp)) continue;
      const auto released = x.known.find(then.block);
      if (released != x.known.end() && then.number < released->second + is_atomic) return true;
    }
    return false;
  }

 private:
  using Known = std::map<uint32_t, uint32_t>;  // of each block the phase of its last release

  struct Acquired {
    Phase phase;
    uint16_t warp;
    Known known;

    bool is_visible(const Phase& now, uint16_t other) const { return now.follows(phase.number, warp, other); }
  };

  static void join(Known& into, const Known& other) {
    for (const auto& [block, phase] : other) into[block] = std::max(into[block], phase);
  }

  std::map<uint64_t, Known> released_;                   // by address
  std::map<uint32_t, std::vector<Acquired>> acquired_;   // by block
};
