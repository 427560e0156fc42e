// Rotary embedding, the write to the KV pool, and attention of rows with one query each.
//
// The pool of a layer is [slots, 2, kv_heads, dim], a slot being block * block_size + offset. Only
// slots that hold a token of the row itself are read. A query's keys are read once, then its
// values: scores wait in between in float32.
//
// Block ids and slots are checked where they are used, since nothing else keeps a wrong one from
// other memory: false says that one was out of range, and nothing there was touched.

#include <utility>

#include "lanes.h"

// One level of adding up LANES vectors: lane l of the result adds a's lanes l and l ^ S where bit S
// of l is not set, b's where it is.
template <int S, int... LANE>
static inline Floats fold(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
  const Ints own = {(LANE & S ? LANES + LANE : LANE)...};
  const Ints other = {(LANE & S ? LANES + (LANE ^ S) : LANE ^ S)...};
  return __builtin_shuffle(a, b, own) + __builtin_shuffle(a, b, other);
}

// Lane l is the sum of the lanes of vectors[l]. Changes the vectors.
template <int S = LANES / 2>
static inline Floats totals(Floats *vectors) {
  for (int i = 0; i < S; i++)
    vectors[i] = fold<S>(vectors[i], vectors[i + S], std::make_integer_sequence<int, LANES>());
  if constexpr (S == 1) return vectors[0];
  else return totals<S / 2>(vectors);
}

// The scores become e^(score - the highest), whose sum is returned.
static float softmax(float *scores, long count) {
  float top = scores[0], sum = 0;
  for (long i = 1; i < count; i++) top = scores[i] > top ? scores[i] : top;
  for (long first = 0; first < count; first += LANES) {
    const long some = smaller(LANES, count - first);
    Floats floats = {};
    memcpy(&floats, scores + first, some * sizeof(float));
    floats = exponential(floats - top);
    memcpy(scores + first, &floats, some * sizeof(float));
    for (long i = 0; i < some; i++) sum += floats[i];
  }
  return sum;
}

// product: [tokens, heads + 2 kv_heads, dim], of which queries and keys are rotated in place.
// cos, sin: [tokens, dim], sin negative in the first half. scale: [heads + kv_heads, dim], or null
// if queries and keys are not normalised; offset is added to it. slots: [tokens], below `capacity`.
template <class T>
static bool rotate_and_store(typename T::Type *product, const typename T::Type *cos,
                             const typename T::Type *sin, const typename T::Type *scale,
                             float eps, float offset, typename T::Type *pool,
                             const int64_t *slots, long capacity, long tokens, long heads, long kv_heads, long dim) {
  const long kv = kv_heads * dim, half = dim / 2, stride = (heads + 2 * kv_heads) * dim;
  bool valid = true;
#pragma omp parallel for if (tokens > 32) reduction(&& : valid)
  for (long token = 0; token < tokens; token++) {
    const typename T::Type *c = cos + token * dim, *s = sin + token * dim;
    for (long head = 0; head < heads + kv_heads; head++) {
      typename T::Type *x = product + token * stride + head * dim;
      float wide[dim];
      for (long i = 0; i < dim; i++) wide[i] = T::widen(x[i]);
      if (scale) {
        float squares = 0;
        for (long i = 0; i < dim; i++) squares += wide[i] * wide[i];
        const float factor = 1.f / std::sqrt(squares / dim + eps);
        for (long i = 0; i < dim; i++) wide[i] *= factor * (T::widen(scale[head * dim + i]) + offset);
      }
      for (long i = 0; i < half; i++) {
        x[i] = T::narrow(wide[i] * T::widen(c[i]) + wide[half + i] * T::widen(s[i]));
        x[half + i] =
            T::narrow(wide[half + i] * T::widen(c[half + i]) + wide[i] * T::widen(s[half + i]));
      }
    }
    const int64_t slot = slots[token];
    if (slot < 0 || slot >= capacity) valid = false;
    else
      memcpy(pool + slot * 2 * kv, product + token * stride + heads * dim,
             2 * kv * sizeof(typename T::Type));
  }
  return valid;
}

// One KV head of what a row sees: keys at `first`, values `kv` behind them, of `length` tokens from
// position `begin` on.
template <class T>
struct Context {
  const typename T::Type *first;
  long kv;
  const int32_t *table;
  long blocks, block_size, begin, length;
  bool valid = true;

  // From the key with that index on, keys or values of up to LANES tokens, as floats. Returns how
  // many.
  template <int PARTS>
  int load(long index, long offset, Floats (*floats)[PARTS]) {
    const int count = smaller(LANES, length - index);
    for (long t = 0, key = begin + index; t < count; t++, key++) {
      long block = table[key / block_size];
      if (block < 0 || block >= blocks) block = 0, valid = false;
      const long slot = block * block_size + key % block_size;
      for (int i = 0; i < PARTS; i++)
        floats[t][i] = T::load(first + slot * 2 * kv + offset + i * LANES);
    }
    return count;
  }
};

// The queries of `group` heads that share a KV head. q, out: [group, PARTS * LANES]. scores: room
// for [group, context, a multiple of LANES].
template <class T, int PARTS>
static void attend_one(const typename T::Type *q, Context<T> &context, long group, float scale,
                       float cap, float *scores, typename T::Type *out) {
  const long room = (context.length + LANES - 1) / LANES * LANES, dim = PARTS * LANES;
  Floats tokens[LANES][PARTS], queries[group][PARTS], sums[group][PARTS];
  for (long g = 0; g < group; g++)
    for (int i = 0; i < PARTS; i++) {
      queries[g][i] = T::load(q + g * dim + i * LANES) * scale;
      sums[g][i] = Floats{};
    }
  for (long key = 0; key < context.length; key += LANES) {
    const int count = context.load(key, 0, tokens);
    for (long g = 0; g < group; g++) {
      Floats products[LANES] = {};
      for (int t = 0; t < count; t++)
        for (int i = 0; i < PARTS; i++) products[t] += queries[g][i] * tokens[t][i];
      Floats score = totals(products);
      if (cap > 0) score = cap * (1.f - 2.f / (1.f + exponential(score * (2.f / cap))));
      memcpy(scores + g * room + key, &score, sizeof score);
    }
  }
  float weights[group];
  for (long g = 0; g < group; g++) weights[g] = 1.f / softmax(scores + g * room, context.length);
  for (long key = 0; key < context.length; key += LANES) {
    const int count = context.load(key, context.kv, tokens);
    for (long g = 0; g < group; g++) {
      Floats sum[PARTS];
      memcpy(sum, sums[g], sizeof sum);
      for (int t = 0; t < count; t++)
        for (int i = 0; i < PARTS; i++) sum[i] += scores[g * room + key + t] * tokens[t][i];
      memcpy(sums[g], sum, sizeof sum);
    }
  }
  for (long g = 0; g < group; g++)
    for (int i = 0; i < PARTS; i++) T::store(out + g * dim + i * LANES, sums[g][i] * weights[g]);
}

// Rows with one query each. q: the first row's; those of a row lie `stride` behind those of the row
// before. tables: [rows, width], of ids below `blocks`. contexts: [rows]. out: [rows, heads, dim].
// window: keys that a query sees, 0 for all. cap: c of c * tanh(score / c), 0 for none.
template <class T, int PARTS>
static bool attend(const typename T::Type *q, long stride, const typename T::Type *pool,
                   const int32_t *tables, long width, long blocks, long block_size,
                   const int64_t *contexts, typename T::Type *out, long rows, long heads,
                   long kv_heads, long window, float scale, float cap) {
  const long group = heads / kv_heads, dim = PARTS * LANES;
  bool valid = true;
#pragma omp parallel reduction(&& : valid)
  {
    static thread_local std::vector<float> scores;
#pragma omp for schedule(dynamic)
    for (long task = 0; task < rows * kv_heads; task++) {
      const long row = task / kv_heads, head = task % kv_heads;
      const long length = window ? smaller(window, contexts[row]) : contexts[row];
      Context<T> context = {pool + head * dim, kv_heads * dim, tables + row * width,
                            blocks, block_size, contexts[row] - length, length};
      scores.resize(group * (context.length + LANES));
      attend_one<T, PARTS>(q + row * stride + head * group * dim, context, group, scale, cap,
                           scores.data(), out + (row * heads + head * group) * dim);
      valid = valid && context.valid;
    }
  }
  return valid;
}

// Sizes of a head that there are instances for.
typedef std::integer_sequence<int, 16, 32, 64, 80, 96, 128, 256> Dims;

template <class T, int DIM, int... MORE, class... Arguments>
static bool attend_over(std::integer_sequence<int, DIM, MORE...>, long dim, Arguments... arguments) {
  if (dim == DIM) return attend<T, DIM / LANES>(arguments...);
  if constexpr (sizeof...(MORE) > 0)
    return attend_over<T>(std::integer_sequence<int, MORE...>(), dim, arguments...);
  return false;
}

template <int... DIM>
static bool is_any(std::integer_sequence<int, DIM...>, long dim) {
  return ((dim == DIM) || ...);
}

#define EXPORT(NAME, T)                                                                           \
  extern "C" bool rotate_and_store_##NAME(                                                        \
      T::Type *product, const T::Type *cos, const T::Type *sin, const T::Type *norm, float eps,   \
      float offset, T::Type *pool, const int64_t *slots, long capacity, long tokens, long heads,  \
      long kv_heads, long dim) {                                                                  \
    return rotate_and_store<T>(product, cos, sin, norm, eps, offset, pool, slots, capacity,       \
                               tokens, heads, kv_heads, dim);                                     \
  }                                                                                               \
  extern "C" bool attend_##NAME(const T::Type *q, long stride, const T::Type *pool,               \
                                const int32_t *tables, long width, long blocks, long block_size,  \
                                const int64_t *contexts, T::Type *out, long rows, long heads,     \
                                long kv_heads, long dim, long window, float scale, float cap) {   \
    return attend_over<T>(Dims(), dim, q, stride, pool, tables, width, blocks, block_size,        \
                          contexts, out, rows, heads, kv_heads, window, scale, cap);              \
  }

EXPORT(float32, Float32)
EXPORT(bfloat16, BFloat16)
extern "C" bool attends_over(long dim) { return is_any(Dims(), dim); }
