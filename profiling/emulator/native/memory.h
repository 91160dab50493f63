// What a block can address, and who touched it: accesses out of bounds and races are errors.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "order.h"

struct Trace {
  uint32_t written = 0, read = 0;  // the phases in which it was, last
  uint32_t readers = 0;   // warps that read it and are not ordered before the last of them
  uint16_t writer = 0;
  bool elsewhere = false; // another block read it
  bool pending = false;   // a copy to it is under way
  bool atomic = false;    // the last write was an atomic
  uint16_t products = 0;  // so many products of it are under way
  uint32_t unfenced = 0;  // how many fences its writer must have passed; 0 for a copy
};

struct Region {
  uint64_t begin = 0, end = 0;
  const char* name = "";
  std::vector<Trace> traces;
};

// Those of a warp: how many, and in which phase the last was.
struct Fences {
  uint32_t count = 0, phase = 0;
};

class Memory {
 public:
  explicit Memory(const char* what) : what_(what) {}

  void add(uint64_t begin, uint64_t bytes, const char* name) {
    regions_.push_back({begin, begin + bytes, name, std::vector<Trace>(bytes)});
  }

  // Blocks by the number of their phases.
  std::vector<uint32_t>* blocks = nullptr;

  // How blocks are ordered; null for memory of one block.
  const Order* order = nullptr;

  void read(uint64_t at, uint32_t bytes, const Phase& phase, uint16_t warp) {
    for (Trace& x : traces(at, bytes, "reads")) {
      if (x.pending) fail(at, bytes, "reads what a copy that was not waited for is to write");
      if (unordered(x, phase, warp)) fail(at, bytes, race("reads", x, phase));
      if (x.read != phase.number) {
        if (x.read && block(x.read) != phase.block) x.elsewhere = true, x.readers = 0;
        for (uint16_t other = 0; x.readers && other < phase.seen.size(); ++other)
          if (phase.follows(x.read, other, warp)) x.readers &= ~(1u << other);
        // Of warps that nothing orders, the first: a later one may pass for ordered, and none for a race.
        if (!x.readers) x.read = phase.number;
      }
      x.readers |= 1u << warp;
    }
  }

  // To write what is there already disturbs nobody: threads that hold the same value all store it.
  void write(uint64_t at, const void* value, const void* place, uint32_t bytes, Phase phase,
             uint16_t warp, uint32_t unfenced) {
    auto&& touched = traces(at, bytes, "writes");
    const char *next = static_cast<const char*>(value), *now = static_cast<const char*>(place);
    for (uint32_t i = 0; i < bytes; ++i) {
      Trace& x = touched.begin_[i];
      if (x.pending) fail(at, bytes, "writes where an asynchronous copy is under way");
      if (next[i] != now[i]) {
        if (unordered(x, phase, warp)) fail(at, bytes, race("writes", x, phase));
        if (x.products) fail(at, bytes, "writes what an asynchronous product is reading");
        if (read_by_others(x, phase, warp) || x.elsewhere)
          fail(at, bytes, "writes what others read, with no barrier between");
      }
      x.written = phase.number, x.writer = warp, x.unfenced = unfenced, x.atomic = false;
    }
  }

  // Atomics do not race with each other.
  void write_atomically(uint64_t at, uint32_t bytes, const Phase& phase, uint16_t warp, uint32_t unfenced) {
    for (Trace& x : traces(at, bytes, "writes")) {
      if (x.pending || x.products) fail(at, bytes, "writes where a copy or product is under way");
      if (!x.atomic && unordered(x, phase, warp)) fail(at, bytes, race("writes", x, phase));
      if (x.read == phase.number || read_by_others(x, phase, warp) || x.elsewhere)
        fail(at, bytes, "writes what others read, with no barrier between");
      x.written = phase.number, x.writer = warp, x.unfenced = unfenced, x.atomic = true;
    }
  }

  void begin_copy(uint64_t at, uint32_t bytes, const Phase& phase, uint16_t warp) {
    for (Trace& x : traces(at, bytes, "copies to")) {
      if (x.pending || x.products) fail(at, bytes, "copies to where a copy or product is under way");
      if (unordered(x, phase, warp)) fail(at, bytes, race("writes", x, phase));
      if (read_by_others(x, phase, warp))
        fail(at, bytes, "copies to what others read, with no barrier between");
      x.pending = true;
    }
  }

  void end_copy(uint64_t at, uint32_t bytes, const Phase& phase, uint16_t warp) {
    for (Trace& x : traces(at, bytes, "copies to"))
      x.pending = false, x.written = phase.number, x.writer = warp, x.unfenced = 0, x.atomic = false;
  }

  // The matrix unit's asynchronous reads see ordinary writes only behind a fence between proxies: of
  // the writer after it wrote, or of the reader after the barrier (PTX ISA, "Causality order").
  void begin_product(uint64_t at, uint32_t bytes, const Phase& phase, uint16_t warp,
                     const std::vector<Fences>& fences) {
    read(at, bytes, phase, warp);
    for (Trace& x : traces(at, bytes, "multiplies")) {
      if (fences[x.writer].count < x.unfenced && fences[warp].phase <= x.written)
        fail(at, bytes, "multiplies what was written without fence.proxy.async");
      ++x.products;
    }
  }

  void end_product(uint64_t at, uint32_t bytes, const Phase& phase, uint16_t warp) {
    read(at, bytes, phase, warp);
    for (Trace& x : traces(at, bytes, "multiplies")) --x.products;
  }

  bool holds(uint64_t at, uint32_t bytes) { return find(at, bytes) != nullptr; }

 private:
  struct Span {
    Trace *begin_, *end_;
    Trace* begin() { return begin_; }
    Trace* end() { return end_; }
  };

  Region* find(uint64_t at, uint32_t bytes) {
    if (last_ < regions_.size() && regions_[last_].begin <= at && at + bytes <= regions_[last_].end)
      return &regions_[last_];
    for (last_ = 0; last_ < regions_.size(); ++last_)
      if (regions_[last_].begin <= at && at + bytes <= regions_[last_].end) return &regions_[last_];
    return nullptr;
  }

  Span traces(uint64_t at, uint32_t bytes, const char* verb) {
    if (at % bytes) fail(at, bytes, std::string(verb) + " a misaligned address");
    Region* region = find(at, bytes);
    if (!region) fail(at, bytes, std::string(verb) + " outside of every tensor");
    Trace* first = region->traces.data() + (at - region->begin);
    return {first, first + bytes};
  }

  uint32_t block(uint32_t phase) const { return (*blocks)[phase]; }

  // Whether nothing orders the last write before what a warp does now.
  bool unordered(const Trace& x, const Phase& now, uint16_t warp) const {
    if (!x.written) return false;
    const Phase then{x.written, block(x.written)};
    if (then.block == now.block) return !now.follows(then.number, x.writer, warp);
    return !order || !order->is_visible(then, x.atomic, now, warp);
  }

  // Whether nothing orders the last reads before what a warp does now.
  bool read_by_others(const Trace& x, const Phase& now, uint16_t warp) const {
    if (!x.read) return false;
    if (block(x.read) != now.block) return true;
    for (uint16_t other = 0; other < now.seen.size(); ++other)
      if (x.readers >> other & 1 && !now.follows(x.read, other, warp)) return true;
    return false;
  }

  std::string race(const char* verb, const Trace& x, const Phase& now) const {
    std::ostringstream text;
    text << verb << " what " << (block(x.written) != now.block ? "another block" : "another warp")
         << " wrote, with no barrier between";
    return text.str();
  }

  [[noreturn]] void fail(uint64_t at, uint32_t bytes, const std::string& why) {
    std::ostringstream text;
    text << why << " (" << bytes << " bytes of " << what_;
    uint64_t nearest = ~uint64_t{0};
    const Region* near = nullptr;
    for (const Region& x : regions_) {
      const uint64_t distance = at < x.begin ? x.begin - at : at >= x.end ? at - x.end : 0;
      if (distance < nearest) nearest = distance, near = &x;
    }
    if (near)
      text << " at " << static_cast<int64_t>(at - near->begin) << " of " << near->name << ", which has "
           << near->end - near->begin;
    text << ")";
    throw std::runtime_error(text.str());
  }

  const char* what_;
  std::vector<Region> regions_;
  size_t last_ = 0;
};
