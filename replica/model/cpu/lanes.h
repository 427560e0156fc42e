// Vectors of floats, and the types that weights and activations have in memory.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

template <class To, class From>
static inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "of the same size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

struct Float32 {
  typedef float Type;
  static float widen(float value) { return value; }
  static float narrow(float value) { return value; }
  static Floats load(const Type *values) {
    Floats floats;
    memcpy(&floats, values, sizeof floats);
    return floats;
  }
  static void store(Type *place, Floats floats) { memcpy(place, &floats, sizeof floats); }
  static void load_pair(const Type *weights, Floats &even, Floats &odd) {
    even = load(weights);
    odd = load(weights + LANES);
  }
};

struct BFloat16 {
  typedef uint16_t Type;
  static float widen(Type value) { return bits<float>(uint32_t(value) << 16); }
  static Type narrow(float value) {  // to nearest, ties to even
    uint32_t word = bits<uint32_t>(value);
    if (value != value) return 0x7fc0;
    return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  }
  static Floats load(const Type *values) {
    Halves halves;
    memcpy(&halves, values, sizeof halves);
    return bits<Floats>(__builtin_convertvector(halves, Words) << 16);
  }
  static void store(Type *place, Floats floats) {
    Words words = bits<Words>(floats);
    words += 0x7fff + ((words >> 16) & 1);
    words = floats == floats ? words : Words{} + 0x7fc00000;
    const Halves halves = __builtin_convertvector(words >> 16, Halves);
    memcpy(place, &halves, sizeof halves);
  }
  static void load_pair(const Type *weights, Floats &even, Floats &odd) {
    Words words;
    memcpy(&words, weights, sizeof words);
    even = bits<Floats>(words << 16);
    odd = bits<Floats>(words & 0xffff0000u);
  }
};

// e^x to within 2 units in the last place, as 2^n 2^f with f from -1/2 to 1/2; the second factor is
// the series of e^(f ln 2).
static inline Floats exponential(Floats x) {
  const float log2_e = 1.44269504f, ln_2 = 0.69314718f;
  Floats power = x * log2_e;
  power = power < -126.f ? Floats{} - 126.f : power;
  power = power > 127.f ? Floats{} + 127.f : power;
  Ints whole = __builtin_convertvector(power + (power < 0.f ? Floats{} - .5f : Floats{} + .5f), Ints);
  Floats f = (power - __builtin_convertvector(whole, Floats)) * ln_2;
  Floats sum = 1.f + f * (1.f / 7);
#pragma GCC unroll 6
  for (int n = 6; n > 0; n--) sum = 1.f + f * sum * (1.f / n);
  return sum * bits<Floats>((whole + 127) << 23);
}

static inline long smaller(long a, long b) { return a < b ? a : b; }
