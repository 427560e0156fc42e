// Products of few rows with large weights, and what lies between them, for CPUs.
//
// A weight [outputs, inputs] is laid out in blocks of LANES outputs. A block holds, for two inputs
// at a time, the LANES outputs of both: side by side in a word for bfloat16, one after the other
// for float32. So one load brings in 2 * LANES weights in the order in which they are needed, and
// bfloat16 becomes float32 by a shift or a mask. Sums are float32 and run over the inputs in order,
// so that a row's result does not depend on how many rows are computed with it.

#include "lanes.h"

#ifdef __AVX512F__
constexpr int ROWS = 8;  // a tile's 16 sums, 4 weights and an input fit into 32 registers
#else
constexpr int ROWS = 4;
#endif
constexpr int AHEAD = 16;  // prefetched pairs of inputs: a core's own prefetcher stops at each page

// x: [inputs, R]. left, right: two blocks of weights. sums: R rows of both blocks.
template <class T, int R>
static void multiply_tile(const float *x, const typename T::Type *left,
                          const typename T::Type *right, long inputs, Floats (*sums)[2]) {
  Floats sum[R][2] = {};
  for (long k = 0; k < inputs; k += 2, x += 2 * R, left += 2 * LANES, right += 2 * LANES) {
    __builtin_prefetch(left + AHEAD * 2 * LANES);
    __builtin_prefetch(right + AHEAD * 2 * LANES);
    Floats left_even, left_odd, right_even, right_odd;
    T::load_pair(left, left_even, left_odd);
    T::load_pair(right, right_even, right_odd);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      sum[r][0] += x[r] * left_even;
      sum[r][1] += x[r] * right_even;
      sum[r][0] += x[R + r] * left_odd;
      sum[r][1] += x[R + r] * right_odd;
    }
  }
  memcpy(sums, sum, sizeof sum);
}

template <class T, int R = ROWS>
static void multiply_rows(int rows, const float *x, const typename T::Type *left,
                          const typename T::Type *right, long inputs, Floats (*sums)[2]) {
  if (rows == R) return multiply_tile<T, R>(x, left, right, inputs, sums);
  if constexpr (R > 1) multiply_rows<T, R - 1>(rows, x, left, right, inputs, sums);
}

// The sums of each pair of blocks, `step` blocks after the pair before, the second `partner` blocks
// after the first: given to store(row, pair, sums). inputs is even.
template <class T, class Store>
static void multiply(const typename T::Type *x, const typename T::Type *weight, long rows,
                     long inputs, long pairs, long step, long partner, Store store) {
  static thread_local std::vector<float> scratch;
  scratch.resize(rows * inputs);
  float *wide = scratch.data();
  const long block = inputs * LANES;
#pragma omp parallel
  {
#pragma omp for
    for (long first = 0; first < rows; first += ROWS) {
      const long count = smaller(ROWS, rows - first);
      for (long k = 0; k < inputs; k++)
        for (long r = 0; r < count; r++)
          wide[first * inputs + k * count + r] = T::widen(x[(first + r) * inputs + k]);
    }
// Another process may take a core from a thread at any time: what it then does not do, others do.
#pragma omp for schedule(dynamic)
    for (long pair = 0; pair < pairs; pair++) {
      const typename T::Type *left = weight + pair * step * block, *right = left + partner * block;
      for (long first = 0; first < rows; first += ROWS) {
        const long count = smaller(ROWS, rows - first);
        Floats sums[ROWS][2];
        multiply_rows<T>(count, wide + first * inputs, left, right, inputs, sums);
        for (long r = 0; r < count; r++) store(first + r, pair, sums[r]);
      }
    }
  }
}

template <class T, class Out>
static void linear(const typename T::Type *x, const typename T::Type *weight,
                   const typename T::Type *bias, typename Out::Type *out, long rows, long inputs,
                   long outputs) {
  const long width = 2 * LANES;
  multiply<T>(x, weight, rows, inputs, (outputs + width - 1) / width, 2, 1,
              [=](long row, long pair, const Floats *sums) {
                const float *sum = reinterpret_cast<const float *>(sums);
                const long first = pair * width, count = smaller(width, outputs - first);
                for (long i = 0; i < count; i++) {
                  float value = sum[i] + (bias ? T::widen(bias[first + i]) : 0.f);
                  out[row * outputs + first + i] = Out::narrow(value);
                }
              });
}

// The activation is x / (1 + e^-u): SiLU with u = x, and the tanh form of GELU with what stands here.
template <class T>
static void gated(const typename T::Type *x, const typename T::Type *weight,
                  typename T::Type *out, long rows, long inputs, long outputs, bool gelu) {
  const long blocks = outputs / LANES;
  multiply<T>(x, weight, rows, inputs, blocks, 1, blocks,
              [=](long row, long block, const Floats *sums) {
                const Floats gate = sums[0];
                Floats u = gate;
                if (gelu) u = 1.59576912f * (gate + .044715f * gate * gate * gate);
                Floats value = gate / (1.f + exponential(-u)) * sums[1];
                T::store(out + row * outputs + block * LANES, value);
              });
}

template <class T>
static void add_norm(typename T::Type *residual, const typename T::Type *update,
                     const typename T::Type *scale, float offset, typename T::Type *out,
                     long rows, long width, float eps) {
#pragma omp parallel for if (rows > 4 * ROWS)
  for (long row = 0; row < rows; row++) {
    typename T::Type *x = residual + row * width, *y = out + row * width;
    const typename T::Type *more = update ? update + row * width : nullptr;
    float squares[LANES] = {};
    for (long first = 0; first < width; first += LANES)
      for (long i = first; i < smaller(first + LANES, width); i++) {
        if (more) x[i] = T::narrow(T::widen(x[i]) + T::widen(more[i]));
        squares[i - first] += T::widen(x[i]) * T::widen(x[i]);
      }
    float sum = 0;
    for (float square : squares) sum += square;
    const float factor = 1.f / std::sqrt(sum / width + eps);
    for (long i = 0; i < width; i++)
      y[i] = T::narrow(T::widen(x[i]) * factor * (T::widen(scale[i]) + offset));
  }
}

#define EXPORT(NAME, T)                                                                          \
  extern "C" void linear_##NAME(const T::Type *x, const T::Type *weight, const T::Type *bias,    \
                                T::Type *out, long rows, long inputs, long outputs) {            \
    linear<T, T>(x, weight, bias, out, rows, inputs, outputs);                                   \
  }                                                                                              \
  extern "C" void logits_##NAME(const T::Type *x, const T::Type *weight, float *out, long rows,  \
                                long inputs, long outputs) {                                     \
    linear<T, Float32>(x, weight, nullptr, out, rows, inputs, outputs);                          \
  }                                                                                              \
  extern "C" void gated_##NAME(const T::Type *x, const T::Type *weight, T::Type *out, long rows, \
                               long inputs, long outputs, bool gelu) {                           \
    gated<T>(x, weight, out, rows, inputs, outputs, gelu);                                       \
  }                                                                                              \
  extern "C" void add_norm_##NAME(T::Type *residual, const T::Type *update,                      \
                                  const T::Type *scale, float offset, T::Type *out, long rows,   \
                                  long width, float eps) {                                       \
    add_norm<T>(residual, update, scale, offset, out, rows, width, eps);                         \
  }

EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
extern "C" long lanes() { return LANES; }
