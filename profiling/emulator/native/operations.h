// What instructions do: of each lane, of memory, and between the lanes of a warp. Part of machine.cpp.

void Block::of_lanes(int op, uint32_t* r, const int32_t* a, uint32_t active) {
#define U(i) (r[a[i] + l])
#define S(i) (reinterpret_cast<int32_t*>(r + a[i])[l])
#define F(i) (reinterpret_cast<float*>(r + a[i])[l])
#define W(i) (reinterpret_cast<uint64_t*>(r + a[i])[l])
#define L(i) (reinterpret_cast<int64_t*>(r + a[i])[l])
#define D(i) (reinterpret_cast<double*>(r + a[i])[l])
#define H(i) (static_cast<uint16_t>(U(i)))
#define I(i) (static_cast<int16_t>(U(i)))
#define OP(name, kinds, ...)                 \
  case __COUNTER__ - kBase:                  \
    for (int l = 0; l < kLanes; ++l)         \
      if (active >> l & 1) { __VA_ARGS__; }  \
    break;
  constexpr int kBase = __COUNTER__ + 1;
  switch (op) {
#include "lanes.inc"
    default: throw std::runtime_error("an unknown operation");
  }
#undef OP
#undef U
#undef S
#undef F
#undef W
#undef L
#undef D
#undef H
#undef I
}

void Block::collective(Warp& warp, int op, const int32_t* a, uint32_t active) {
  switch (op) {
    case kLoad: return load(warp, a, active);
    case kStore: return store(warp, a, active);
    case kCopy: return copy(warp, a, active);
    case kCommitCopies:
      all_of(warp, active, "cp.async.commit_group");
      warp.copy_groups.push_back(std::move(warp.copies));
      warp.copies.clear();
      return;
    case kWaitCopies:
      all_of(warp, active, "cp.async.wait_group");
      return wait_copies(warp, a[0]);
    case kLoadMatrix: all_of(warp, active, "ldmatrix"); return move_matrices(warp, a, false);
    case kStoreMatrix: all_of(warp, active, "stmatrix"); return move_matrices(warp, a, true);
    case kProduct: all_of(warp, active, "mma"); return multiply(warp, a);
    case kAsyncProduct: all_of(warp, active, "wgmma"); return begin_product(warp, a);
    case kFenceProducts: warp.fenced = true; return all_of(warp, active, "wgmma.fence");
    case kCommitProducts:
      all_of(warp, active, "wgmma.commit_group");
      warp.product_groups.push_back(std::move(warp.products));
      warp.products.clear();
      return;
    case kWaitProducts:
      all_of(warp, active, "wgmma.wait_group");
      warp.fenced = false;
      while (warp.product_groups.size() > static_cast<size_t>(a[0])) {
        for (const Product& x : warp.product_groups.front()) end_product(warp, x);
        warp.product_groups.pop_front();
      }
      return;
    case kFenceProxy:
      all_of(warp, active, "fence.proxy.async");
      ++fences_[warp.number].count, fences_[warp.number].phase = warp.phase.number;
      return;
    case kShuffle: return shuffle(warp, a, active);
    case kReduce: return reduce(warp, a, active);
    case kAtomic: return add_atomically(warp, a, active);
    case kBarrier: {
      all_of(warp, active, "bar");
      const uint32_t* r = warp.registers.data() + __builtin_ctz(active);
      return arrive(warp, r[a[0]], r[a[1]], a[2]);
    }
    case kWarpBarrier: return all_of(warp, active, "bar.warp.sync");
    default: throw std::runtime_error("an unknown operation");
  }
}

// Operands: space, bytes of an element, elements, whether it is signed, address (place, is_wide,
// offset), then (place, is_wide) of each register.
void Block::load(Warp& warp, const int32_t* a, uint32_t active) {
  const int space = a[0], size = a[1], number = a[2];
  uint32_t* r = warp.registers.data();
  count(space, warp, a + 4, size * number, active);
  for (int l = 0; l < kLanes; ++l) {
    if (!(active >> l & 1)) continue;
    lane_ = l;
    const char* from = load_from(space, address(warp, a + 4, l), size * number, warp);
    for (int i = 0; i < number; ++i) {
      uint64_t value = 0;
      std::memcpy(&value, from + i * size, size);
      if (a[3] && size < 8) value = static_cast<int64_t>(value << (64 - 8 * size)) >> (64 - 8 * size);
      const int32_t* to = a + 7 + 2 * i;
      if (to[0] < 0) continue;
      if (to[1]) reinterpret_cast<uint64_t*>(r + to[0])[l] = value;
      else r[to[0] + l] = value;
    }
  }
}

void Block::store(Warp& warp, const int32_t* a, uint32_t active) {
  const int space = a[0], size = a[1], number = a[2];
  const uint32_t* r = warp.registers.data();
  count(space, warp, a + 4, size * number, active);
  for (int l = 0; l < kLanes; ++l) {
    if (!(active >> l & 1)) continue;
    lane_ = l;
    char values[16];
    for (int i = 0; i < number; ++i) {
      const int32_t* from = a + 7 + 2 * i;
      const uint64_t value = from[1] ? reinterpret_cast<const uint64_t*>(r + from[0])[l] : r[from[0] + l];
      std::memcpy(values + i * size, &value, size);
    }
    store_to(space, address(warp, a + 4, l), values, size * number, warp);
  }
}

// Operands: whether it releases and acquires, address (place, is_wide, offset), where the value before goes,
// and what is added. Of 32 bits in global memory.
void Block::add_atomically(Warp& warp, const int32_t* a, uint32_t active) {
  uint32_t* r = warp.registers.data();
  count(kGlobal, warp, a + 2, 4, active);
  for (int l = 0; l < kLanes; ++l) {
    if (!(active >> l & 1)) continue;
    const uint64_t at = address(warp, a + 2, l);
    order_.meet(at, warp.phase, warp.number, a[0], a[1]);
    global_.write_atomically(at, 4, warp.phase, warp.number, fences_[warp.number].count + 1);
    uint32_t* place = reinterpret_cast<uint32_t*>(at);
    const uint32_t before = *place;
    *place = before + r[a[6] + l];
    r[a[5] + l] = before;
  }
}

// Operands: address in shared memory, address in global memory, bytes, place of the bytes to read or -1.
void Block::copy(Warp& warp, const int32_t* a, uint32_t active) {
  uint32_t reading = active;
  for (int l = 0; l < kLanes; ++l)
    if (a[7] >= 0 && warp.registers[a[7] + l] == 0) reading &= ~(1u << l);
  count(kGlobal, warp, a + 3, a[6], reading);
  count(kShared, warp, a, a[6], active);
  for (int l = 0; l < kLanes; ++l) {
    if (!(active >> l & 1)) continue;
    const uint32_t bytes = a[6];
    const uint32_t source = a[7] < 0 ? bytes : warp.registers[a[7] + l];
    const Copy x{static_cast<uint32_t>(address(warp, a, l)), address(warp, a + 3, l), bytes, source};
    if (source != 0 && source != bytes) throw std::runtime_error("copies a part of a word");
    if (source) global_.read(x.from, source, warp.phase, warp.number);
    shared_.begin_copy(x.to, bytes, warp.phase, warp.number);
    warp.copies.push_back(x);
  }
}

void Block::wait_copies(Warp& warp, size_t left) {
  while (warp.copy_groups.size() > left) {
    for (const Copy& x : warp.copy_groups.front()) {
      if (x.source_bytes) global_.read(x.from, x.bytes, warp.phase, warp.number);
      if (x.source_bytes) std::memcpy(bytes_ + x.to, reinterpret_cast<const char*>(x.from), x.bytes);
      else std::memset(bytes_ + x.to, 0, x.bytes);
      shared_.end_copy(x.to, x.bytes, warp.phase, warp.number);
    }
    warp.copy_groups.pop_front();
  }
}

// Operands: places of destination and source, how (0 bfly, 1 idx, 2 up, 3 down), places of the lane or
// distance, of the limit, and of the predicate "inside" or -1.
void Block::shuffle(Warp& warp, const int32_t* a, uint32_t active) {
  uint32_t* r = warp.registers.data();
  uint32_t source[kLanes];
  std::copy_n(r + a[1], kLanes, source);
  for (int l = 0; l < kLanes; ++l) {
    if (!(active >> l & 1)) continue;
    const int by = r[a[3] + l], limit = r[a[4] + l] & 31, segment = r[a[4] + l] >> 8 & 31;
    const int low = l & segment, high = low | (limit & ~segment);
    int from;
    switch (a[2]) {
      case 0: from = l ^ by; break;
      case 1: from = low | (by & ~segment & 31); break;
      case 2: from = l - by; break;
      default: from = l + by; break;
    }
    const bool is_inside = a[2] == 2 ? from >= (low | limit) : from <= high;
    if (!is_inside) from = l;
    if (a[5] >= 0) r[a[5] + l] = is_inside;
    if (!(active >> from & 1)) throw std::runtime_error("takes a number from a lane that is not there");
    r[a[0] + l] = source[from];
  }
}

// Operands: destination, source, how (0 add, 1 max, 2 min; signed).
void Block::reduce(Warp& warp, const int32_t* a, uint32_t active) {
  uint32_t* r = warp.registers.data();
  bool first = true;
  int32_t result = 0;
  for (int l = 0; l < kLanes; ++l) {
    if (!(active >> l & 1)) continue;
    const int32_t x = r[a[1] + l];
    if (first) result = x;
    else if (a[2] == 0) result = static_cast<uint32_t>(result) + static_cast<uint32_t>(x);
    else result = a[2] == 1 ? std::max(result, x) : std::min(result, x);
    first = false;
  }
  for (int l = 0; l < kLanes; ++l)
    if (active >> l & 1) r[a[0] + l] = result;
}
