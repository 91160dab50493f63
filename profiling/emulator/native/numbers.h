// Narrow numbers, and the bits of wide ones.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float from_bf16(uint16_t x) { return bits<float>(uint32_t{x} << 16); }

inline uint16_t to_bf16(float x) {
  if (std::isnan(x)) return 0x7fff;
  uint32_t wide = bits<uint32_t>(x);
  return (wide + 0x7fff + (wide >> 16 & 1)) >> 16;  // to the nearest, halves to even
}

inline float from_f16(uint16_t x) { return bits<_Float16>(x); }
inline uint16_t to_f16(float x) {
  return std::isnan(x) ? 0x7fff : bits<uint16_t>(static_cast<_Float16>(x));
}

inline uint32_t pair(uint16_t low, uint16_t high) { return uint32_t{high} << 16 | low; }

// PTX' min and max drop a NaN; with .NaN they pass it on.
template <class T>
inline T less(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : a < b ? a : b;
}
template <class T>
inline T more(T a, T b) {
  return std::isnan(a) ? b : std::isnan(b) ? a : a < b ? b : a;
}
inline float flushed(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

// What a GPU's approximation may return: the number with some relative error, always the same, of up to
// 2^-22, which is what the PTX ISA promises of ex2, lg2 and division. Plain numbers are right: ex2(0) is 1.
inline float approximate(float x) {
  const uint32_t word = bits<uint32_t>(x);
  if (!std::isfinite(x) || (word & 0xfff) == 0) return x;
  const float share = static_cast<float>(word * 2654435761u >> 8) / (1 << 23) - 1.0f;
  return std::fma(x, std::ldexp(share, -22), x);
}

// float to integer, towards zero, saturating; NaN is 0.
template <class To, class From>
inline To truncated(From x) {
  if (std::isnan(x)) return 0;
  constexpr double low = std::is_signed_v<To> ? -std::ldexp(1.0, 8 * sizeof(To) - 1) : 0.0;
  const double high = std::ldexp(1.0, 8 * sizeof(To) - std::is_signed_v<To>);
  if (x <= low) return static_cast<To>(low);
  if (x >= high) return static_cast<To>(~(std::is_signed_v<To> ? uint64_t{1} << (8 * sizeof(To) - 1) : 0));
  return static_cast<To>(x);
}

inline uint32_t permuted(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t both = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t which = selector >> 4 * i;
    uint32_t byte = both >> 8 * (which & 7) & 0xff;
    if (which & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * i;
  }
  return result;
}

template <class T>
inline T shifted_left(T x, uint32_t by) {
  return by >= 8 * sizeof(T) ? 0 : x << by;
}
template <class T>
inline T shifted_right(T x, uint32_t by) {
  const uint32_t most = 8 * sizeof(T) - 1;
  if (by > most) return std::is_signed_v<T> ? x >> most : 0;
  return x >> by;
}
template <class T>
inline T field(T x, uint32_t at, uint32_t length) {
  constexpr uint32_t width = 8 * sizeof(T);
  at &= 255, length &= 255;
  using U = std::make_unsigned_t<T>;
  if (length == 0 || (at >= width && !std::is_signed_v<T>)) return 0;
  U result = at >= width ? (x < 0 ? ~U{0} : 0) : static_cast<U>(x) >> at;
  const uint32_t kept = length < width ? length : width;
  if (kept < width) result &= (U{1} << kept) - 1;
  if (std::is_signed_v<T>) {
    const uint32_t top = at + length - 1 < width - 1 ? at + length - 1 : width - 1;
    if (static_cast<U>(x) >> top & 1 && kept < width) result |= ~((U{1} << kept) - 1);
  }
  return static_cast<T>(result);
}
