// Runs one launch of a kernel in PTX on the CPU, warp by warp, in random order.
//
// What a GPU leaves open is chosen to be as bad as it may be: warps advance by random stretches,
// blocks come in random order, asynchronous copies and products happen when they are waited for and not
// before, and shared memory begins as NaN. See memory.h for what is an error.
#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <random>

#include "counts.h"
#include "matrix.h"
#include "memory.h"
#include "numbers.h"

namespace {

constexpr int kLanes = 32;
constexpr uint32_t kAll = 0xffffffff;

struct Instruction {
  int32_t op;
  int32_t guard;    // where the predicate is, in words; -1 for none
  int32_t negated;  // whether it must be false
  int32_t operands; // where they begin
  int32_t line;     // of the kernel's source
};

struct Tensor {
  uint64_t address, bytes;
  const char* name;
};

struct Launch {
  const Instruction* code;
  int32_t length;
  const int32_t* operands;
  int32_t words;  // of registers, for each lane
  const int32_t* constants;  // (place, is_wide, low, high) each
  int32_t num_constants;
  const int32_t* specials;   // (place, which) each
  int32_t num_specials;
  const uint8_t* parameters;
  int32_t parameter_bytes;
  uint32_t threads, shared_bytes, local_bytes;
  uint32_t grid[3];
  const Tensor* tensors;
  int32_t num_tensors;
  uint64_t seed;
  uint64_t most_steps;  // of a warp
  Counts* counts;       // of each instruction; may be null
};

// What is not of each lane alone, by the names that parse.py gives it.
enum Special : int {
  kLoad = 10000, kStore, kCopy, kCommitCopies, kWaitCopies, kLoadMatrix, kStoreMatrix, kProduct,
  kAsyncProduct, kFenceProducts, kCommitProducts, kWaitProducts, kFenceProxy, kShuffle, kReduce, kAtomic,
  kBarrier, kWarpBarrier, kBranch, kReturn
};
const char* const kSpecialNames[] = {
  "ld", "st", "cp.async", "cp.async.commit_group", "cp.async.wait_group", "ldmatrix", "stmatrix", "mma",
  "wgmma", "wgmma.fence", "wgmma.commit_group", "wgmma.wait_group", "fence.proxy.async", "shfl", "redux",
  "atom", "bar.sync", "bar.warp.sync", "bra", "ret"
};
enum Space { kGlobal, kShared, kParameter, kLocal };

struct Copy {
  uint32_t to;
  uint64_t from;
  uint32_t bytes, source_bytes;
};

struct Product {
  const int32_t* a;  // operands of the instruction
  uint64_t descriptor_a, descriptor_b;
  bool adds;
};

class Block;

// Lanes that go together, and where they meet others: behind a branch that parts them, at its immediate
// post-dominator.
struct Path {
  uint32_t pc, meeting, lanes;
};

struct Warp {
  Block* block;
  uint16_t number;
  std::vector<uint32_t> registers;
  uint32_t alive = 0;
  std::vector<Path> paths;  // the last runs; those below wait for it where they meet
  Phase phase;
  int waiting = -1;  // at the barrier of this number
  std::vector<char> local;  // memory of each lane
  uint64_t steps = 0;
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> copy_groups;
  std::vector<Product> products;
  std::deque<std::vector<Product>> product_groups;
  bool fenced = false;  // since it last waited for products, behind which it writes their registers
};

// Warps that came to a barrier, and the last phases that they have seen, theirs included.
struct Barrier {
  uint32_t warps = 0, expected = 0;  // 0 for all of the block
  std::vector<uint32_t> seen;
};

class Block {
 public:
  Block(const Launch& launch, Memory& global, Order& order, std::vector<uint32_t>& blocks,
        uint32_t number, std::mt19937_64& random)
      : launch_(launch), global_(global), shared_("shared memory"), order_(order), blocks_(blocks),
        random_(random) {
    // Products read whole atoms of swizzled shared memory, so that it begins where one does.
    storage_.resize(launch.shared_bytes + 1024);
    bytes_ = storage_.data() + (1024 - reinterpret_cast<uintptr_t>(storage_.data()) % 1024) % 1024;
    std::memset(bytes_, 0xff, launch.shared_bytes);
    shared_.add(0, launch.shared_bytes, "the block");
    shared_.blocks = &blocks_;
    const uint32_t grid[] = {launch.grid[0], launch.grid[1], launch.grid[2]};
    place_[0] = number % grid[0], place_[1] = number / grid[0] % grid[1];
    place_[2] = number / grid[0] / grid[1];
    const uint32_t count = (launch.threads + kLanes - 1) / kLanes;
    fences_.resize(count);
    const Phase phase{next_phase(number), number, std::vector<uint32_t>(count)};
    for (uint32_t i = 0; i < count; ++i) warps_.push_back(make_warp(i, phase));
  }

  void run() {
    for (;;) {
      open_barriers();
      std::vector<Warp*> ready;
      bool any = false;
      for (Warp& warp : warps_) {
        any |= warp.alive != 0;
        if (warp.alive && warp.waiting < 0) ready.push_back(&warp);
      }
      if (!any) return;
      if (ready.empty()) throw std::runtime_error("waits at a barrier that others do not come to");
      Warp& warp = *ready[random_() % ready.size()];
      for (uint64_t left = 1 + random_() % 300; left && warp.alive && warp.waiting < 0; --left) step(warp);
    }
  }

  uint64_t steps() const {
    uint64_t sum = 0;
    for (const Warp& warp : warps_) sum += warp.steps;
    return sum;
  }

  const Instruction* current = nullptr;

 private:
  Warp make_warp(uint32_t number, const Phase& phase) {
    Warp warp;
    warp.block = this;
    warp.number = number;
    warp.phase = phase;
    warp.local.assign(static_cast<size_t>(launch_.local_bytes) * kLanes, '\xff');
    warp.registers.assign(static_cast<size_t>(launch_.words) * kLanes, 0xffffffff);
    const uint32_t threads = std::min<uint32_t>(kLanes, launch_.threads - number * kLanes);
    warp.alive = threads == kLanes ? kAll : (1u << threads) - 1;
    warp.paths.push_back({0, ~0u, kAll});
    uint32_t* r = warp.registers.data();
    for (int i = 0; i < launch_.num_constants; ++i) {
      const int32_t* c = launch_.constants + 4 * i;
      const uint64_t wide = uint64_t{static_cast<uint32_t>(c[3])} << 32 | static_cast<uint32_t>(c[2]);
      for (int lane = 0; lane < kLanes; ++lane) {
        if (c[1]) reinterpret_cast<uint64_t*>(r + c[0])[lane] = wide;
        else r[c[0] + lane] = c[2];
      }
    }
    for (int i = 0; i < launch_.num_specials; ++i) {
      const int32_t* s = launch_.specials + 2 * i;
      for (int lane = 0; lane < kLanes; ++lane) r[s[0] + lane] = special(s[1], number * kLanes + lane);
    }
    return warp;
  }

  uint32_t special(int which, uint32_t thread) const {
    switch (which) {
      case 0: return thread;
      case 1: case 2: return 0;
      case 3: return launch_.threads;
      case 4: case 5: return 1;
      case 6: case 7: case 8: return place_[which - 6];
      case 9: case 10: case 11: return launch_.grid[which - 9];
      case 12: return thread % kLanes;
      default: throw std::runtime_error("an unknown special register");
    }
  }

  uint32_t next_phase(uint32_t block) {
    blocks_.push_back(block);
    return blocks_.size() - 1;
  }

  // A barrier of some warps of the block, 0 of all. Those that only arrive do not wait, and learn nothing.
  void arrive(Warp& warp, int number, uint32_t threads, bool waits) {
    if (threads % kLanes) throw std::runtime_error("a barrier of a part of a warp");
    Barrier& barrier = barriers_[number];
    std::vector<uint32_t> seen = warp.phase.seen;
    seen[warp.number] = warp.phase.number;
    barrier.seen.resize(seen.size());
    for (size_t i = 0; i < seen.size(); ++i) barrier.seen[i] = std::max(barrier.seen[i], seen[i]);
    ++barrier.warps, barrier.expected = threads / kLanes;
    if (waits) warp.waiting = number;
    else warp.phase.number = next_phase(warp.phase.block);
  }

  // Lets go on who waits for nobody any more. Nobody waits for warps that have ended.
  void open_barriers() {
    uint32_t alive = 0;
    for (const Warp& warp : warps_) alive += warp.alive != 0;
    for (auto next = barriers_.begin(); next != barriers_.end();) {
      const auto& [number, barrier] = *next;
      if (barrier.warps < (barrier.expected ? barrier.expected : alive)) {
        ++next;
        continue;
      }
      const uint32_t phase = next_phase(warps_[0].phase.block);
      for (Warp& warp : warps_)
        if (warp.waiting == number)
          warp.waiting = -1, warp.phase.number = phase, warp.phase.seen = barrier.seen;
      next = barriers_.erase(next);
    }
  }

  void step(Warp& warp) {
    while (warp.paths.back().pc == warp.paths.back().meeting || !(warp.paths.back().lanes & warp.alive))
      warp.paths.pop_back();
    Path& path = warp.paths.back();
    const uint32_t lanes = path.lanes & warp.alive;
    if (++warp.steps > launch_.most_steps) throw std::runtime_error("does not end");
    const Instruction& x = launch_.code[path.pc];
    current = &x;
    if (launch_.counts) ++counts().issued;
    uint32_t active = lanes;
    const uint32_t* r = warp.registers.data();
    if (x.guard >= 0)
      for (int l = 0; l < kLanes; ++l)
        if ((r[x.guard + l] != 0) == (x.negated != 0)) active &= ~(1u << l);
    const int32_t* a = launch_.operands + x.operands;
    if (x.op == kBranch) return branch(warp, lanes, active, a[0], a[1]);
    ++path.pc;
    if (x.op == kReturn) {
      if (!warp.copies.empty() || !warp.products.empty() || !warp.product_groups.empty())
        throw std::runtime_error("ends with copies or products that nobody waits for");
      warp.alive &= ~active;
    } else if (x.op >= kLoad) {
      collective(warp, x.op, a, active);
    } else {
      of_lanes(x.op, warp.registers.data(), a, active);
    }
  }

  void branch(Warp& warp, uint32_t lanes, uint32_t taken, uint32_t target, uint32_t meeting) {
    Path& path = warp.paths.back();
    const uint32_t next = path.pc + 1;
    path.pc = taken == lanes ? target : taken == 0 ? next : meeting;
    if (taken == lanes || taken == 0) return;
    warp.paths.push_back({next, meeting, lanes & ~taken});
    warp.paths.push_back({target, meeting, taken});
  }

  static void of_lanes(int op, uint32_t* r, const int32_t* a, uint32_t active);
  void collective(Warp& warp, int op, const int32_t* a, uint32_t active);

  Counts& counts() const { return launch_.counts[current - launch_.code]; }

  // What a load, store or copy of these lanes asks for; `size` bytes each.
  void count(int space, const Warp& warp, const int32_t* address_operands, uint32_t size,
             uint32_t active) const {
    if (!launch_.counts || space == kParameter || space == kLocal || !active) return;
    std::vector<uint64_t> at;
    for (int l = 0; l < kLanes; ++l)
      if (active >> l & 1) at.push_back(address(warp, address_operands, l));
    if (space == kGlobal) count_global(counts(), at, size);
    else count_shared(counts(), at, size);
  }

  void all_of(const Warp& warp, uint32_t active, const char* what) const {
    if (active != warp.alive)
      throw std::runtime_error(std::string("not all lanes come to ") + what);
  }

  uint64_t address(const Warp& warp, const int32_t* a, int lane) const {
    const uint32_t* r = warp.registers.data();
    const int64_t offset = a[2];
    return a[1] ? reinterpret_cast<const uint64_t*>(r + a[0])[lane] + offset
                : uint64_t{static_cast<uint32_t>(r[a[0] + lane] + offset)};
  }

  char* local(Warp& warp, uint64_t at, uint32_t bytes) {
    if (at % bytes || at + bytes > launch_.local_bytes)
      throw std::runtime_error("an address outside of local memory");
    return warp.local.data() + lane_ * launch_.local_bytes + at;
  }

  char* load_from(int space, uint64_t at, uint32_t bytes, Warp& warp) {
    if (space == kParameter) {
      if (at + bytes > static_cast<uint64_t>(launch_.parameter_bytes))
        throw std::runtime_error("reads outside of the parameters");
      return const_cast<char*>(reinterpret_cast<const char*>(launch_.parameters)) + at;
    }
    if (space == kLocal) return local(warp, at, bytes);
    Memory& memory = space == kGlobal ? global_ : shared_;
    memory.read(at, bytes, warp.phase, warp.number);
    return space == kGlobal ? reinterpret_cast<char*>(at) : bytes_ + at;
  }

  void store_to(int space, uint64_t at, const void* value, uint32_t bytes, Warp& warp) {
    if (space == kLocal) return void(std::memcpy(local(warp, at, bytes), value, bytes));
    char* place = space == kGlobal ? reinterpret_cast<char*>(at) : bytes_ + at;
    Memory& memory = space == kGlobal ? global_ : shared_;
    if (!memory.holds(at, bytes)) place = nullptr;
    static const char nothing[16] = {};
    memory.write(at, value, place ? place : nothing, bytes, warp.phase, warp.number,
                 fences_[warp.number].count + 1);
    std::memcpy(place, value, bytes);
  }

  void load(Warp& warp, const int32_t* a, uint32_t active);
  void store(Warp& warp, const int32_t* a, uint32_t active);
  void copy(Warp& warp, const int32_t* a, uint32_t active);
  void wait_copies(Warp& warp, size_t left);
  void move_matrices(Warp& warp, const int32_t* a, bool stores);
  void multiply(Warp& warp, const int32_t* a);
  void begin_product(Warp& warp, const int32_t* a);
  void end_product(Warp& warp, const Product& x);
  template <class Visit>
  void visit_operands(const Warp& warp, const Product& x, Visit visit) const;
  void add_atomically(Warp& warp, const int32_t* a, uint32_t active);
  void shuffle(Warp& warp, const int32_t* a, uint32_t active);
  void reduce(Warp& warp, const int32_t* a, uint32_t active);

  const Launch& launch_;
  Memory& global_;
  Memory shared_;
  Order& order_;
  std::vector<uint32_t>& blocks_;
  std::mt19937_64& random_;
  std::vector<char> storage_;
  char* bytes_;
  uint32_t place_[3];
  int lane_ = 0;  // whose load or store is under way
  std::map<int, Barrier> barriers_;
  std::vector<Fences> fences_;
  std::vector<Warp> warps_;
};

#include "operations.h"
#include "products.h"

}  // namespace

// How many lane operations there are, and of each its names and operands.
extern "C" int ptx_operation(int number, const char** name, const char** kinds) {
#define OP(name, kinds, ...) {name, kinds},
  static const char* const all[][2] = {
#include "lanes.inc"
  };
#undef OP
  constexpr int count = sizeof all / sizeof *all;
  if (number < count) *name = all[number][0], *kinds = all[number][1];
  return count;
}

extern "C" const char* ptx_special(int number) {
  constexpr int count = sizeof kSpecialNames / sizeof *kSpecialNames;
  return number < count ? kSpecialNames[number] : nullptr;
}

// Returns 0, or 1 with what is wrong in `error` and the source's line in `line`. `steps` counts
// instructions of warps.
extern "C" int ptx_run(const Launch* launch, char* error, int error_bytes, int* line, uint64_t* steps) {
  std::unique_ptr<Block> block;
  try {
    std::mt19937_64 random(launch->seed);
    Memory global("global memory");
    std::vector<uint32_t> blocks{0};
    global.blocks = &blocks;
    Order ordered;
    global.order = &ordered;
    for (int i = 0; i < launch->num_tensors; ++i) {
      const Tensor& x = launch->tensors[i];
      global.add(x.address, x.bytes, x.name);
    }
    std::vector<uint32_t> order(launch->grid[0] * launch->grid[1] * launch->grid[2]);
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    *steps = 0;
    for (uint32_t number : order) {
      block = std::make_unique<Block>(*launch, global, ordered, blocks, number, random);
      block->run();
      *steps += block->steps();
    }
    return 0;
  } catch (const std::exception& problem) {
    std::strncpy(error, problem.what(), error_bytes - 1);
    *line = block && block->current ? block->current->line : 0;
    return 1;
  }
}
