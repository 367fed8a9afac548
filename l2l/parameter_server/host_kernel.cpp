// The native host kernel: optimizer updates on flat buffers, one pass over memory each; and rows of
// tables that stay on the host, gathered and added.
//
// Build, with nothing but g++ (libhost_kernel.so belongs beside host_kernel.py):
//
//   g++ -O3 -std=c++17 -fPIC -shared -pthread -fopenmp-simd -ffp-contract=off -fno-math-errno
//       -fno-trapping-math -o libhost_kernel.so host_kernel.cpp
//
// An update reads and writes each byte of a layer once, so memory bandwidth bounds it: 26 bytes per
// parameter for exact AdamW on a split master, 14 with 8-bit moments. The code only has to stay
// below that bound. It is called through a plain C interface, knows neither torch nor Python, and
// leaves every decision (when, on which range, with how many threads) to the caller.
//
// [Note: levels] Every loop is written once, as the `run` of an operation, and compiled three
// times: for AVX-512, for AVX2 and for the compiler's baseline. The processor chooses at run time.
// All levels perform the same IEEE operations in the same order (no contraction to fused
// multiply-add, no approximating instruction, no reordered sum; but for a guess that the result
// does not depend on, see [Note: 8-bit moments]), so all give the same bits. The one freedom left is which payload survives when two NaNs meet.
//
// [Note: split master] A float32 master is held as the bfloat16 weight that crosses the link and
// the 16 bits that are missing, all modulo 2^32:
//
//     weight = (bits + 0x8000) >> 16     remainder = low 16 bits, taken as signed
//     bits = (weight << 16) + remainder
//
// That is a bijection on all patterns. No bijection can give every NaN a NaN weight (float32 has
// more NaNs than those of bfloat16 have preimages): the few with a payload near the ends round to
// infinity or wrap to zero, and 0x7fffffff, the NaN that CUDA computes, is one of them. So updates
// store every NaN as 0x7fc00000.
//
// [Note: 8-bit moments] The first moment m and the root r = sqrt(v) of the second are stored in
// blocks of 128 as 8-bit codes q, with one float32 per block and moment: the unit, the value of
// code 1.
//
//     m = sign(q) q^2 unit, |q| <= 127          r = q^2 unit, 4 <= q <= 255
//
// Squares give small values fine steps (m resolves 1/16,129 of its block's largest), and cost
// little to decode; the update needs sqrt(v) anyway.
//
// Rounding is stochastic and unbiased in the value: q or q + 1, in proportion to the distance from
// q^2 and (q + 1)^2. Rounding to nearest stalls: with beta2 = 0.999 one step moves a code by far
// less than a half, so r would not follow gradients that shrink (simulated: 5 times too large for
// ever), and a small m would never decay. The random number is uniform over seeds for each element
// and evenly spread within a block: a hash of the block plus multiples of the golden ratio. So a
// result depends on neither threads nor chunks. The root of an element is rounded by the number of
// the one half a block away: two for each would cost more.
//
// Let x be a magnitude over its unit, and u the random number, uniform in [0, 1). Then q + 1 is
// chosen over q if
//
//     x > q^2 + u (2q + 1) = (q + u)^2 + u (1 - u)
//
// So the code is sqrt(x) - u rounded up, but for the small last term. Hence, with a root s that is
// wrong by less than a quarter of a code, n = s - u rounded to nearest is the code or one below it,
// and the comparison for q = n decides, exactly. So s may be rough, and no square root is spent on
// it: a guess from the exponent and one Newton step, wrong by at most 0.0009 s. Levels may even
// differ in it, so it is the one place with fused multiply-adds where there are any. The divider, the
// one slow unit of a processor, is left to the update: a square root and a division per element.
//
// No code of r is below 4 in a block that has any. Hence no denominator is lost; and since the step
// of m is a quarter of the smallest r (relative to their blocks' largest), an element too small for
// m to resolve gets a damped update, not a random large one.
//
// A block whose largest value is below 1e-18 is stored as zeros (its squares would be subnormal);
// one that holds an infinity or a NaN gets a NaN unit, so that the fault is seen, not hidden.
//
// [Note: subnormals] A moment below the smallest normal float32 is stored as 0. The first moments
// of embedding rows that are not used end there after some 800 steps, and arithmetic on subnormals
// is many times slower; no weight can feel the difference.
//
// [Note: threads] Work is cut into pieces, and threads take the next one as they come. The threads
// are our own and sleep when there is nothing to do: OpenMP's wait by spinning, before and after
// every loop, on cores that the threads which feed the device need. Whoever calls works as well, and
// waits for those who have come, never for a thread that has not. So a thread that gets no core
// delays next to nothing, and after a fork, where only the calling thread is left, all of it still
// runs. Several callers may have work at once; idle threads help whoever came first.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#define INLINE inline __attribute__((always_inline))

namespace {

constexpr int64_t chunk_size = 32768;  // what a thread takes at a time, and what is summed as one
constexpr int64_t tile_size = 512;     // what stays in the first-level cache between two loops
constexpr int64_t block_size = 128;    // 8-bit moments
static_assert(chunk_size % tile_size == 0 && tile_size % block_size == 0, "each holds whole ones");

// Computed in float64 by the caller, and rounded once.
struct Coefficients {
  float factor;           // multiplies the gradient: clipping, loss scale
  float decay;            // AdamW, Lion: 1 - lr * weight_decay; SGD: weight_decay
  float rate;             // AdamW: lr / bias_correction1; SGD, Lion: lr
  float keep_first;       // Lion: beta1; SGD: momentum
  float blend_first;      // AdamW, Lion: 1 - beta1; SGD: 1 - dampening
  float keep_second;      // AdamW, Lion: beta2
  float blend_second;     // AdamW, Lion: 1 - beta2
  float root_correction;  // AdamW: sqrt(bias_correction2)
  float epsilon;          // AdamW
  uint32_t seed;          // 8-bit AdamW
  int32_t first_step;     // SGD: the momentum becomes this step's gradient
  int32_t nesterov;       // SGD
  float blend_average;    // of [Note: averages]
};

struct Job;
using ChunkFunction = double (*)(const Job&, int64_t begin, int64_t end);  // its sum, if it has one
using LoadFunction = void (*)(const Job&, int64_t start, int64_t count, float* values);

// What one call works on. A pointer that the operation does not use may be null.
struct Job {
  void* weight;
  void* companion;  // what the weight's form needs besides
  const void* gradient;
  void* first;
  void* second;
  float* first_unit;
  float* second_unit;
  float* average;              // of [Note: averages]; none: null
  LoadFunction load_gradient;  // a tile of it, in float32
  int64_t first_block;         // of element 0, in its flat buffer: for the random numbers
  Coefficients coefficients;
};

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE float magnitude(float value) { return float_of(bits_of(value) & 0x7fffffffu); }

// See [Note: subnormals].
INLINE float without_subnormals(float value) {
  return magnitude(value) < 0x1p-126f ? 0.0f : value;
}

INLINE uint16_t split_weight(uint32_t bits) { return uint16_t((bits + 0x8000u) >> 16); }
INLINE int16_t split_remainder(uint32_t bits) { return int16_t(bits & 0xffffu); }
INLINE uint32_t join_bits(uint16_t weight, int16_t remainder) {
  return (uint32_t(weight) << 16) + uint32_t(int32_t(remainder));
}
INLINE uint32_t bits_with_one_nan(float value) {
  return value == value ? bits_of(value) : 0x7fc00000u;
}

// Exact for every pattern. A subnormal half is its mantissa times 2^-24, as a normal float.
INLINE float float_of_half(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16;
  const uint32_t rest = half & 0x7fffu;
  const uint32_t subnormal = bits_of(float(int32_t(rest)) * 0x1p-24f);
  const uint32_t normal = (rest << 13) + (rest < 0x7c00u ? 0x38000000u : 0x70000000u);
  return float_of(sign | (rest < 0x400u ? subnormal : normal));
}

// To nearest, ties to even. Adding 0.5 rounds what will be subnormal at 2^-24, in hardware.
INLINE uint16_t half_of_float(float value) {
  const uint32_t sign = bits_of(value) & 0x80000000u;
  const uint32_t rest = bits_of(value) ^ sign;
  const uint32_t subnormal = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
  const uint32_t normal = (rest - 0x38000000u + 0xfffu + ((rest >> 13) & 1u)) >> 13;
  const uint32_t finite = rest < 0x38800000u ? subnormal : (rest < 0x477ff000u ? normal : 0x7c00u);
  return uint16_t((sign >> 16) | (rest > 0x7f800000u ? 0x7e00u : finite));
}

// To nearest, ties to even.
INLINE uint16_t bfloat16_of_float(float value) {
  const uint32_t bits = bits_with_one_nan(value);
  return uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Rows lie anywhere, and a processor foresees only the rest of one.
INLINE void prefetch(const void* base, int64_t begin_byte, int64_t num_bytes) {
  const char* const begin = static_cast<const char*>(base) + begin_byte;
  for (int64_t byte = 0; byte < num_bytes; byte += 64) __builtin_prefetch(begin + byte, 0, 2);
}

// Gradients, as a load of one tile. Apart from the updates, or there would be three of each of
// them and the build three times as long; the tile stays in cache, so this costs next to nothing.

struct Float32Gradient {
  static INLINE void run(const Job& job, int64_t start, int64_t count, float* values) {
    const float* const gradient = static_cast<const float*>(job.gradient) + start;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) values[j] = gradient[j];
  }
};

struct BFloat16Gradient {
  static INLINE void run(const Job& job, int64_t start, int64_t count, float* values) {
    const uint16_t* const gradient = static_cast<const uint16_t*>(job.gradient) + start;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) values[j] = float_of(uint32_t(gradient[j]) << 16);
  }
};

struct Float16Gradient {
  static INLINE void run(const Job& job, int64_t start, int64_t count, float* values) {
    const uint16_t* const gradient = static_cast<const uint16_t*>(job.gradient) + start;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) values[j] = float_of_half(gradient[j]);
  }
};

// Weights, as a load and a store of the float32 master.

struct SplitWeight {  // see [Note: split master]
  static INLINE float load(const Job& job, int64_t i) {
    return float_of(join_bits(static_cast<const uint16_t*>(job.weight)[i],
                              static_cast<const int16_t*>(job.companion)[i]));
  }
  static INLINE void store(const Job& job, int64_t i, float value) {
    const uint32_t bits = bits_with_one_nan(value);
    static_cast<uint16_t*>(job.weight)[i] = split_weight(bits);
    static_cast<int16_t*>(job.companion)[i] = split_remainder(bits);
  }
};
struct Float32Weight {
  static INLINE float load(const Job& job, int64_t i) {
    return static_cast<const float*>(job.weight)[i];
  }
  static INLINE void store(const Job& job, int64_t i, float value) {
    static_cast<float*>(job.weight)[i] = value;
  }
};
struct BFloat16Weight {  // without a remainder: in sums of rows, not in updates
  static INLINE float load(const Job& job, int64_t i) {
    return float_of(uint32_t(static_cast<const uint16_t*>(job.weight)[i]) << 16);
  }
  static INLINE void store(const Job& job, int64_t i, float value) {
    static_cast<uint16_t*>(job.weight)[i] = bfloat16_of_float(value);
  }
};
struct Float16Weight {  // the master is the companion
  static INLINE float load(const Job& job, int64_t i) {
    return static_cast<const float*>(job.companion)[i];
  }
  static INLINE void store(const Job& job, int64_t i, float value) {
    static_cast<float*>(job.companion)[i] = value;
    static_cast<uint16_t*>(job.weight)[i] = half_of_float(value);
  }
};

// [Note: changes] An update also finds the sum of squares of what it changes: new master minus old.
// No memory is read for that. The tile of gradients, which is in cache and not needed any more,
// becomes the tile of changes, and is summed when the tile is done. A reduction inside the loop of
// an update would save that store, but it keeps the compiler from making vectors of some of them.
//
// A tile is summed in float32, always in the same 32 running sums of at most 16 squares, and tiles
// in float64: to about 1e-7 of the sum (all in float64 costs Lion a fifth of its speed). Chunks are
// the same whatever the threads, and are added in their order. So it is the same bits at any level,
// for any number of threads. A change below 1e-19 may count as none, as its square has no float32.
class SumOfChanges {
 public:
  // Overwrites what is beyond `count` in a tile that has less.
  INLINE void add_tile(float* changes, int64_t count) {
    alignas(64) float squares[lanes] = {};
    for (int64_t j = count; j % lanes; ++j) changes[j] = 0.0f;
    for (int64_t j = 0; j < count; j += lanes) {
#pragma omp simd
      for (int64_t lane = 0; lane < lanes; ++lane) {
        squares[lane] += changes[j + lane] * changes[j + lane];
      }
    }
#pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) sums[lane] += double(squares[lane]);
  }

  INLINE double sum() const {
    double sum = 0.0;
    for (const double lane_sum : sums) sum += lane_sum;
    return sum;
  }

 private:
  static constexpr int64_t lanes = 32;
  static_assert(tile_size % lanes == 0, "padding stays in the tile");
  double sums[lanes] = {};
};

// Optimizers: one tile, in torch's order of arithmetic. Those that change weights leave the changes
// where the gradients were.

// Stores a weight, and returns its change.
template <class Weight>
INLINE float replace_weight(const Job& job, int64_t i, float before, float after) {
  Weight::store(job, i, after);
  return after - before;
}

// [Note: halves] An update can be done in two passes: weights from the old moments first, the
// moments later, from the same gradient. Together they read more than one pass does, but whoever
// waits for the weights waits for 18 bytes a parameter instead of 26. Both do the arithmetic of the
// whole update, so the bits are the same.
template <class Weight, bool weights, bool moments>
struct AdamWPass {
  using Form = Weight;
  static constexpr bool changes_weights = weights;
  static INLINE void update(const Job& job, int64_t start, int64_t count, float* gradients) {
    const Coefficients c = job.coefficients;
    float* const first = static_cast<float*>(job.first);
    float* const second = static_cast<float*>(job.second);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float gradient = gradients[j] * c.factor;
      const float m = first[i] + (gradient - first[i]) * c.blend_first;
      const float v = second[i] * c.keep_second + c.blend_second * gradient * gradient;
      if (moments) {
        first[i] = without_subnormals(m);
        second[i] = without_subnormals(v);
      }
      if (weights) {
        const float denominator = __builtin_sqrtf(v) / c.root_correction + c.epsilon;
        const float weight = Weight::load(job, i);
        const float step = c.rate * m / denominator;
        gradients[j] = replace_weight<Weight>(job, i, weight, weight * c.decay - step);
      }
    }
  }
};
template <class Weight>
using AdamW = AdamWPass<Weight, true, true>;
template <class Weight>
using AdamWWeights = AdamWPass<Weight, true, false>;
template <class Weight>
using AdamWMoments = AdamWPass<Weight, false, true>;

// Without decay the weight must not enter: zero times infinity is NaN.
INLINE float decayed_gradient(float gradient, float weight, const Coefficients& c) {
  const float scaled = gradient * c.factor;
  return c.decay != 0.0f ? scaled + c.decay * weight : scaled;
}

template <class Weight>
struct SGD {
  using Form = Weight;
  static constexpr bool changes_weights = true;
  static INLINE void update(const Job& job, int64_t start, int64_t count, float* gradients) {
    const Coefficients c = job.coefficients;
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float weight = Weight::load(job, i);
      const float gradient = decayed_gradient(gradients[j], weight, c);
      gradients[j] = replace_weight<Weight>(job, i, weight, weight - c.rate * gradient);
    }
  }
};

template <class Weight>
struct MomentumSGD {
  using Form = Weight;
  static constexpr bool changes_weights = true;
  static INLINE void update(const Job& job, int64_t start, int64_t count, float* gradients) {
    const Coefficients c = job.coefficients;
    float* const first = static_cast<float*>(job.first);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float weight = Weight::load(job, i);
      const float gradient = decayed_gradient(gradients[j], weight, c);
      const float later = first[i] * c.keep_first + c.blend_first * gradient;
      const float m = c.first_step ? gradient : later;
      first[i] = without_subnormals(m);
      const float direction = c.nesterov ? gradient + c.keep_first * m : m;
      gradients[j] = replace_weight<Weight>(job, i, weight, weight - c.rate * direction);
    }
  }
};

template <class Weight>
struct Lion {
  using Form = Weight;
  static constexpr bool changes_weights = true;
  static INLINE void update(const Job& job, int64_t start, int64_t count, float* gradients) {
    const Coefficients c = job.coefficients;
    float* const first = static_cast<float*>(job.first);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float gradient = gradients[j] * c.factor;
      const float direction = c.keep_first * first[i] + c.blend_first * gradient;
      // Zero and NaN are their own sign.
      const float sign = direction > 0.0f ? 1.0f : (direction < 0.0f ? -1.0f : direction);
      first[i] = without_subnormals(c.keep_second * first[i] + c.blend_second * gradient);
      const float weight = Weight::load(job, i);
      gradients[j] = replace_weight<Weight>(job, i, weight, weight * c.decay - c.rate * sign);
    }
  }
};

// `first` is the mean x of iterates z, the weight is y between them: see ScheduleFreeAdamW in
// optimizers.py. `keep_first` is the iterate's share of the mean, `decay` is times the weight.
template <class Weight>
struct ScheduleFreeAdamW {
  using Form = Weight;
  static constexpr bool changes_weights = true;
  static INLINE void update(const Job& job, int64_t start, int64_t count, float* gradients) {
    const Coefficients c = job.coefficients;
    float* const mean = static_cast<float*>(job.first);
    float* const second = static_cast<float*>(job.second);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float gradient = gradients[j] * c.factor;
      const float v = second[i] * c.keep_second + c.blend_second * gradient * gradient;
      second[i] = without_subnormals(v);
      const float denominator = __builtin_sqrtf(v) / c.root_correction + c.epsilon;
      const float weight = Weight::load(job, i);
      const float before = c.first_step ? weight : mean[i];
      const float iterate = before + (weight - before) / c.blend_first;
      const float stepped = iterate - c.rate * gradient / denominator - c.decay * weight;
      const float later = before + c.keep_first * (stepped - before);
      mean[i] = later;
      gradients[j] = replace_weight<Weight>(job, i, weight, later + c.blend_first * (stepped - later));
    }
  }
};

// See [Note: 8-bit moments]. The loops are many and small on purpose: with 8-bit codes beside wider
// data in one loop, the compiler works on 64 elements at once and spills; and the units of a tile
// are all computed before one is needed.

INLINE uint32_t hash_of_block(uint32_t block, uint32_t seed) {
  uint32_t x = (block ^ seed) * 0x9e3779b1u;
  x = (x ^ (x >> 15)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

struct GoldenMultiples {
  alignas(64) uint32_t of[block_size] = {};
  constexpr GoldenMultiples() {
    for (uint32_t i = 0; i < block_size; ++i) of[i] = i * 0x9e3779b1u;
  }
};
constexpr GoldenMultiples golden_multiples;

// To 0.0009 of itself, and 0 for 0; less u. Constants that minimize that error were found by
// search; they absorb the factors of the usual Newton step.
template <bool fused>
INLINE float rough_root_less(float x, float u) {
  const float guess = float_of(0x5f0b4000u - (bits_of(x) >> 1));  // near 0.79 / sqrt(x)
  const float product = x * guess;
  if (fused) return __builtin_fmaf(product, __builtin_fmaf(-product, guess, 1.891f), -u);
  return product * (1.891f - product * guess) - u;
}

// Adding it rounds a small float to a whole number, which then is in the sum's lowest byte.
constexpr float rounder = 0x1.8p23f;

// `scaled` is a magnitude over its unit, `u` a random number in [0, 1). The code is in the lowest
// byte of the result, above the bits of `rounder`: saves conversions.
template <bool fused>
INLINE uint32_t code_of(float scaled, float u, float smallest_code) {
  const float smallest = smallest_code + rounder;
  const float rounded = rough_root_less<fused>(scaled, u) + rounder;
  const float kept = rounded > smallest ? rounded : smallest;
  const float low = kept - rounder;
  return scaled > low * (low + u + u) + u ? bits_of(kept) + 1u : bits_of(kept);
}

// One tile: the moments decoded, and one number per block.
struct Tile {
  alignas(64) float first[tile_size];
  alignas(64) float root[tile_size];
  uint32_t largest_first[tile_size / block_size];
  uint32_t largest_root[tile_size / block_size];
  float first_inverse[tile_size / block_size];
  float root_inverse[tile_size / block_size];
};

// Into beta1 m and sqrt(beta2) r: the units carry the factors.
INLINE void decode_tile(const Job& job, int64_t start, int64_t count, Tile& tile) {
  const int8_t* const first_code = static_cast<const int8_t*>(job.first) + start;
  const uint8_t* const root_code = static_cast<const uint8_t*>(job.second) + start;
  const float keep_first = 1.0f - job.coefficients.blend_first;
  const float keep_root = __builtin_sqrtf(job.coefficients.keep_second);
  for (int64_t begin = 0; begin < count; begin += block_size) {
    const int64_t end = smaller(begin + block_size, count);
    const float first_unit = job.first_unit[(start + begin) / block_size] * keep_first;
    const float root_unit = job.second_unit[(start + begin) / block_size] * keep_root;
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) {
      const float code = float(int32_t(first_code[j]));
      tile.first[j] = code * magnitude(code) * first_unit;
    }
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) {
      const float code = float(int32_t(root_code[j]));
      tile.root[j] = code * code * root_unit;
    }
  }
}

INLINE void find_largest(int64_t count, Tile& tile) {
  for (int64_t begin = 0; begin < count; begin += block_size) {
    const int64_t end = smaller(begin + block_size, count);
    // As integers, bits order like magnitudes, with NaN above all: a maximum in any order. A root
    // has no sign, unless it is a NaN, which then is above all too.
    int32_t largest_first = 0;
    uint32_t largest_root = 0;
#pragma omp simd reduction(max : largest_first, largest_root)
    for (int64_t j = begin; j < end; ++j) {
      const int32_t first = int32_t(bits_of(magnitude(tile.first[j])));
      const uint32_t root = bits_of(tile.root[j]);
      largest_first = first > largest_first ? first : largest_first;
      largest_root = root > largest_root ? root : largest_root;
    }
    tile.largest_first[begin / block_size] = uint32_t(largest_first);
    tile.largest_root[begin / block_size] = largest_root;
  }
}

// The inverse is a little small, so that rounding never makes a code larger than the largest.
INLINE void find_units(const uint32_t* largest_bits, float largest_code, int64_t num_blocks,
                       float* units, float* inverses) {
  const float largest_square = largest_code * largest_code;
#pragma omp simd
  for (int64_t block = 0; block < num_blocks; ++block) {
    const float largest = float_of(largest_bits[block]);
    const bool is_finite = largest_bits[block] < 0x7f800000u;
    const bool is_zero = largest < 1e-18f;
    const float unit = largest / largest_square;
    const float inverse = 0.9999997f / unit;
    units[block] = is_finite ? (is_zero ? 0.0f : unit) : float_of(0x7fc00000u);
    inverses[block] = is_finite && !is_zero ? inverse : 0.0f;
  }
}

template <bool fused>
INLINE void encode_tile(const Job& job, int64_t start, int64_t count, Tile& tile) {
  constexpr int64_t half = block_size / 2;
  alignas(64) float uniform[block_size + half];  // the first half again at its end
  int8_t* const first_code = static_cast<int8_t*>(job.first) + start;
  uint8_t* const root_code = static_cast<uint8_t*>(job.second) + start;
  for (int64_t begin = 0; begin < count; begin += block_size) {
    const int64_t end = smaller(begin + block_size, count);
    const float first_inverse = tile.first_inverse[begin / block_size];
    const float root_inverse = tile.root_inverse[begin / block_size];
    const float smallest_first = 0.0f * first_inverse;  // 0, but a constant compiles to more
    const float smallest_root = root_inverse > 0.0f ? 4.0f : 0.0f;
    const int64_t block = job.first_block + (start + begin) / block_size;
    const uint32_t hash = hash_of_block(uint32_t(block), job.coefficients.seed);
#pragma omp simd
    for (int64_t j = 0; j < block_size; ++j) {
      uniform[j] = float(int32_t((hash + golden_multiples.of[j]) >> 16)) * 0x1p-16f;
    }
    std::memcpy(uniform + block_size, uniform, half * sizeof(float));
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) {
      const float first_scaled = magnitude(tile.first[j]) * first_inverse;
      const uint32_t first = code_of<fused>(first_scaled, uniform[j - begin], smallest_first);
      const float root_scaled = tile.root[j] * root_inverse;
      const uint32_t root = code_of<fused>(root_scaled, uniform[j - begin + half], smallest_root);
      tile.first[j] = float_of(tile.first[j] < 0.0f ? 2u * bits_of(rounder) - first : first);
      tile.root[j] = float_of(root);
    }
  }
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) first_code[j] = int8_t(bits_of(tile.first[j]));
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) root_code[j] = uint8_t(bits_of(tile.root[j]));
}

// Constants are multiplied with each other first, and bias_correction2 enters them, not the root.
template <class Weight, bool weights, bool moments, bool fused = false>
struct EightBitAdamWPass {
  using Form = Weight;
  static constexpr bool changes_weights = weights;
  static INLINE void update(const Job& job, int64_t start, int64_t count, float* gradients) {
    const Coefficients c = job.coefficients;
    const float first_factor = c.factor * c.blend_first;
    const float root_factor = c.factor * __builtin_sqrtf(c.blend_second);
    const float rate = c.rate * c.root_correction;
    const float epsilon = c.epsilon * c.root_correction;
    Tile tile;
    decode_tile(job, start, count, tile);
#pragma omp simd
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = start + j;
      const float m = tile.first[j] + gradients[j] * first_factor;
      const float new_root = gradients[j] * root_factor;
      const float root = __builtin_sqrtf(tile.root[j] * tile.root[j] + new_root * new_root);
      if (weights) {
        const float weight = Weight::load(job, i);
        const float step = rate * m / (root + epsilon);
        gradients[j] = replace_weight<Weight>(job, i, weight, weight * c.decay - step);
      }
      tile.first[j] = m;
      tile.root[j] = root;
    }
    if (!moments) return;
    find_largest(count, tile);
    const int64_t first_block = start / block_size;
    const int64_t num_blocks = (count + block_size - 1) / block_size;
    find_units(tile.largest_first, 127.0f, num_blocks, job.first_unit + first_block,
               tile.first_inverse);
    find_units(tile.largest_root, 255.0f, num_blocks, job.second_unit + first_block,
               tile.root_inverse);
    encode_tile<fused>(job, start, count, tile);
  }
};
template <class Weight>
using EightBitAdamW = EightBitAdamWPass<Weight, true, true>;
template <class Weight>
using EightBitAdamWWeights = EightBitAdamWPass<Weight, true, false>;
template <class Weight>
using EightBitAdamWMoments = EightBitAdamWPass<Weight, false, true>;

// [Note: averages] A running mean of a float32 master may follow it: with each update it comes closer
// by a share of the distance, all of it at the first. The tile of the weight is in cache by then.
template <class Weight>
INLINE void follow(const Job& job, int64_t start, int64_t count) {
  const float blend = job.coefficients.blend_average;
  float* const average = job.average;
#pragma omp simd
  for (int64_t i = start; i < start + count; ++i) {
    average[i] += blend * (Weight::load(job, i) - average[i]);
  }
}

// An optimizer on a chunk, tile by tile; see [Note: changes].
template <class Optimizer>
struct Update {
  static INLINE double run(const Job& shared, int64_t begin, int64_t end) {
    const Job job = shared;  // a local copy, which stores cannot alias
    alignas(64) float gradients[tile_size];
    SumOfChanges changes;
    for (int64_t start = begin; start < end; start += tile_size) {
      const int64_t count = smaller(tile_size, end - start);
      job.load_gradient(job, start, count, gradients);
      Optimizer::update(job, start, count, gradients);
      if (!Optimizer::changes_weights) continue;
      changes.add_tile(gradients, count);
      if (job.average != nullptr) follow<typename Optimizer::Form>(job, start, count);
    }
    return changes.sum();
  }
};

// What an operation is where fused multiply-adds are at hand, and give the same results.
template <class Operation>
struct WithFused {
  using Type = Operation;
};
template <class Weight, bool weights, bool moments>
struct WithFused<Update<EightBitAdamWPass<Weight, weights, moments>>> {
  using Type = Update<EightBitAdamWPass<Weight, weights, moments, true>>;
};

// Which source rows are added to which target row. A group is what goes to one target row: the
// source rows positions[starts[group]] up to positions[starts[group + 1]], in this order.
struct RowGroups {
  const int64_t* rows;  // target row of each group, all different
  const int64_t* starts;
  const int64_t* positions;
  int64_t num_groups;
  int64_t width;
  int64_t source_bytes;  // of one element
  int64_t target_bytes;
};

struct Piece {
  int64_t first_group;
  int64_t end_group;
  int64_t first_column;
  int64_t end_column;
};

// Source rows are summed first, in float32, and added to the target once. Also the sum of squares
// that the target gains, before it is rounded, in running sums as above.
template <class Target>
struct AddRows {
  static INLINE double run(const Job& shared, const RowGroups* groups, const Piece* piece) {
    constexpr int64_t lanes = 16;
    const Job job = shared;
    const RowGroups g = *groups;
    const Piece p = *piece;
    double gains[lanes] = {};
    alignas(64) float sums[tile_size];
    alignas(64) float values[tile_size];
    for (int64_t group = p.first_group; group < p.end_group; ++group) {
      for (int64_t column = p.first_column; column < p.end_column; column += tile_size) {
        const int64_t count = smaller(tile_size, p.end_column - column);
        for (int64_t j = 0; j < tile_size; ++j) sums[j] = 0.0f;
        for (int64_t k = g.starts[group]; k < g.starts[group + 1]; ++k) {
          if (k + 2 < g.starts[g.num_groups]) {
            const int64_t ahead = g.positions[k + 2] * g.width + column;
            prefetch(job.gradient, ahead * g.source_bytes, count * g.source_bytes);
          }
          job.load_gradient(job, g.positions[k] * g.width + column, count, values);
#pragma omp simd
          for (int64_t j = 0; j < count; ++j) sums[j] += values[j];
        }
        if (group + 1 < p.end_group) {
          const int64_t ahead = g.rows[group + 1] * g.width + column;
          prefetch(job.weight, ahead * g.target_bytes, count * g.target_bytes);
        }
        const int64_t start = g.rows[group] * g.width + column;
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) {
          values[j] = Target::load(job, start + j);
          sums[j] = values[j] + sums[j];
          Target::store(job, start + j, sums[j]);
        }
        for (int64_t j = count; j % lanes; ++j) values[j] = sums[j] = 0.0f;
        for (int64_t j = 0; j < count; j += lanes) {
#pragma omp simd
          for (int64_t lane = 0; lane < lanes; ++lane) {
            gains[lane] += double(sums[j + lane]) * double(sums[j + lane]) -
                           double(values[j + lane]) * double(values[j + lane]);
          }
        }
      }
    }
    double gain = 0.0;
    for (const double lane_gain : gains) gain += lane_gain;
    return gain;
  }
};

// Pieces of similar work, which depend on the groups alone, so that sums over them do not depend on
// threads: several groups of few source rows, or some columns of a group of many (every text has a
// word that fills a tenth of it).
std::vector<Piece> pieces_of(const RowGroups& groups) {
  std::vector<Piece> pieces;
  int64_t work = chunk_size;  // in the last piece; at a chunk, nothing more goes into it
  for (int64_t group = 0; group < groups.num_groups; ++group) {
    const int64_t num_rows = groups.starts[group + 1] - groups.starts[group] + 2;  // target: twice
    if (num_rows * tile_size > chunk_size) {
      for (int64_t column = 0; column < groups.width; column += tile_size) {
        pieces.push_back({group, group + 1, column, smaller(column + tile_size, groups.width)});
      }
      work = chunk_size;
      continue;
    }
    if (work >= chunk_size) {
      pieces.push_back({group, group, 0, groups.width});
      work = 0;
    }
    pieces.back().end_group = group + 1;
    work += num_rows * groups.width;
  }
  return pieces;
}

struct Split {
  static INLINE double run(const Job& shared, int64_t begin, int64_t end) {
    const Job job = shared;
    const uint32_t* const master = static_cast<const uint32_t*>(job.gradient);
    uint16_t* const weight = static_cast<uint16_t*>(job.weight);
    int16_t* const remainder = static_cast<int16_t*>(job.companion);
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      weight[i] = split_weight(master[i]);
      remainder[i] = split_remainder(master[i]);
    }
    return 0.0;
  }
};

// Elements are bit patterns here. Each must come back, be rounded to nearest (except that ties go
// up), and, if it is a NaN, be one as a weight once an update has stored it.
struct CheckSplit {
  static INLINE double run(const Job&, int64_t begin, int64_t end) {
    int32_t failures = 0;
#pragma omp simd reduction(+ : failures)
    for (int32_t j = 0; j < int32_t(end - begin); ++j) {
      const uint32_t bits = uint32_t(begin) + uint32_t(j);
      const uint32_t weight = split_weight(bits);
      const uint32_t lost = join_bits(uint16_t(weight), split_remainder(bits)) ^ bits;
      const uint32_t nearest_even = ((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) & 0xffffu;
      const uint32_t not_nearest = (bits & 0xffffu) == 0x8000u ? 0u : weight ^ nearest_even;
      const uint32_t stored = bits_with_one_nan(float_of(bits));
      const uint32_t not_nan = (uint32_t(split_weight(stored)) & 0x7fffu) > 0x7f80u ? 0u : 1u;
      const uint32_t not_kept = (bits & 0x7fffffffu) > 0x7f800000u ? not_nan : stored ^ bits;
      failures += (lost | not_nearest | not_kept) != 0u ? 1 : 0;
    }
    return double(failures);
  }
};

// See [Note: levels].

template <class Operation, class... Arguments>
auto run_portable(const Job& job, Arguments... arguments) {
  return Operation::run(job, arguments...);
}

#if defined(__x86_64__)
template <class Operation, class... Arguments>
__attribute__((target("avx2,fma"))) auto run_avx2(const Job& job, Arguments... arguments) {
  return WithFused<Operation>::Type::run(job, arguments...);
}

template <class Operation, class... Arguments>
__attribute__((target("fma,avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))) auto
run_avx512(const Job& job, Arguments... arguments) {
  return WithFused<Operation>::Type::run(job, arguments...);
}

int32_t highest_level() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("fma")) return 0;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return 2;
  }
  return __builtin_cpu_supports("avx2") ? 1 : 0;
}
#else
int32_t highest_level() { return 0; }
#endif

int32_t level = highest_level();

template <class Operation, class... Arguments>
auto at_level() {
#if defined(__x86_64__)
  if (level == 2) return run_avx512<Operation, Arguments...>;
  if (level == 1) return run_avx2<Operation, Arguments...>;
#endif
  return run_portable<Operation, Arguments...>;
}

template <class Operation>
ChunkFunction chunk_function() {
  return at_level<Operation, int64_t, int64_t>();
}

// Gradients: 0 float32, 1 bfloat16, 2 float16.
LoadFunction load_function(int32_t gradient_form) {
  switch (gradient_form) {
    case 0: return at_level<Float32Gradient, int64_t, int64_t, float*>();
    case 1: return at_level<BFloat16Gradient, int64_t, int64_t, float*>();
    default: return at_level<Float16Gradient, int64_t, int64_t, float*>();
  }
}

template <template <class> class Optimizer>
ChunkFunction update_function(int32_t weight_form) {
  switch (weight_form) {
    case 0: return chunk_function<Update<Optimizer<SplitWeight>>>();
    case 1: return chunk_function<Update<Optimizer<Float32Weight>>>();
    default: return chunk_function<Update<Optimizer<Float16Weight>>>();
  }
}

// Optimizers: 0 AdamW, 1 AdamW with 8-bit moments, 2 SGD, 3 SGD with momentum, 4 Lion; 5 and 6 the
// weights' half of the first two, 7 and 8 the moments' half (see [Note: halves]); 9 AdamW without a
// schedule.
// Weights: 0 split, 1 float32, 2 float16 with a float32 master.
ChunkFunction function_of(int32_t optimizer, int32_t weight_form) {
  switch (optimizer) {
    case 0: return update_function<AdamW>(weight_form);
    case 1: return update_function<EightBitAdamW>(weight_form);
    case 2: return update_function<SGD>(weight_form);
    case 3: return update_function<MomentumSGD>(weight_form);
    case 5: return update_function<AdamWWeights>(weight_form);
    case 6: return update_function<EightBitAdamWWeights>(weight_form);
    case 7: return update_function<AdamWMoments>(weight_form);
    case 8: return update_function<EightBitAdamWMoments>(weight_form);
    case 9: return update_function<ScheduleFreeAdamW>(weight_form);
    default: return update_function<Lion>(weight_form);
  }
}

// See [Note: threads].
class Team {
 public:
  // Never destroyed: its threads wait for more until the process ends.
  static Team& current() { return *instance; }

  template <class Function>
  void run(int64_t num_pieces, int32_t num_threads, const Function& function) {
    const int64_t num_helpers = smaller(num_threads, num_pieces) - 1;
    if (num_helpers < 1) {
      for (int64_t piece = 0; piece < num_pieces; ++piece) function(piece);
      return;
    }
    const auto call = [](const void* context, int64_t piece) {
      (*static_cast<const Function*>(context))(piece);
    };
    Task task(call, &function, num_pieces, num_helpers);
    begin(task);
    task.work();
    finish(task);
  }

 private:
  using Call = void (*)(const void* context, int64_t piece);

  struct Task {
    Task(Call call_, const void* context_, int64_t num_pieces_, int64_t num_places_)
        : call(call_), context(context_), num_pieces(num_pieces_), num_places(num_places_) {}

    bool wants_help() const { return num_places > 0 && next.load() < num_pieces; }
    void work() {
      for (int64_t piece = next++; piece < num_pieces; piece = next++) call(context, piece);
    }

    const Call call;
    const void* const context;
    const int64_t num_pieces;
    std::atomic<int64_t> next{0};
    int64_t num_places;     // how many threads may still come; with the team's lock, as is
    int64_t num_inside{0};  // how many are at work besides the caller
  };

  void begin(Task& task) {
    const int64_t num_helpers = task.num_places;
    {
      const std::lock_guard<std::mutex> hold(lock);
      tasks.push_back(&task);
      try {
        for (; num_threads < num_helpers; ++num_threads) {
          std::thread([this] { help(); }).detach();
        }
      } catch (const std::system_error&) {  // no more threads to be had: fewer, then
      }
    }
    for (int64_t helper = 0; helper < num_helpers; ++helper) has_work.notify_one();
  }

  void finish(Task& task) {
    std::unique_lock<std::mutex> hold(lock);
    tasks.erase(std::find(tasks.begin(), tasks.end(), &task));
    has_left.wait(hold, [&] { return task.num_inside == 0; });
  }

  void help() {
    std::unique_lock<std::mutex> hold(lock);
    for (;;) {
      Task* task = nullptr;
      has_work.wait(hold, [&] { return (task = first_that_wants_help()) != nullptr; });
      --task->num_places;
      ++task->num_inside;
      hold.unlock();
      task->work();
      hold.lock();
      if (--task->num_inside == 0) has_left.notify_all();  // not touched any more
    }
  }

  Task* first_that_wants_help() const {
    for (Task* const task : tasks) {
      if (task->wants_help()) return task;
    }
    return nullptr;
  }

  static Team* instance;
  std::mutex lock;
  std::condition_variable has_work;
  std::condition_variable has_left;
  std::vector<Task*> tasks;
  int64_t num_threads = 0;
};

// Made when the library is loaded, not at the first call, which a fork could interrupt.
Team* Team::instance =
    (static_cast<void>(pthread_atfork(nullptr, nullptr, [] { instance = new Team; })), new Team);

template <class Function>
void run_pieces(int64_t num_pieces, int32_t num_threads, const Function& function) {
  Team::current().run(num_pieces, num_threads, function);
}

// The sum of a function of pieces: in their order, so that it does not depend on threads.
template <class Function>
double sum_of_pieces(int64_t num_pieces, int32_t num_threads, const Function& function) {
  std::vector<double> found(size_t(num_pieces), 0.0);
  run_pieces(num_pieces, num_threads, [&](int64_t piece) {
    found[size_t(piece)] = function(piece);
  });
  double sum = 0.0;
  for (const double one : found) sum += one;
  return sum;
}

double run_chunks(ChunkFunction function, const Job& job, int64_t num_elements,
                  int32_t num_threads) {
  const int64_t num_chunks = (num_elements + chunk_size - 1) / chunk_size;
  return sum_of_pieces(num_chunks, num_threads, [&](int64_t chunk) {
    return function(job, chunk * chunk_size, smaller((chunk + 1) * chunk_size, num_elements));
  });
}

// A function on ranges of elements: pairs (begin, end), each of whole blocks unless it ends with the
// last element. They are laid end to end and cut into chunks: a thread takes a part of a long range
// at a time, or many short ones.
class ChunksOfRanges {
 public:
  ChunksOfRanges(ChunkFunction function_, const Job& job_, const int64_t* ranges_,
                 int64_t num_ranges_)
      : function(function_), job(job_), ranges(ranges_), num_ranges(num_ranges_) {
    starts.reserve(size_t(num_ranges) + 1);
    for (int64_t range = 0; range < num_ranges; ++range) {
      const int64_t num_elements = ranges[2 * range + 1] - ranges[2 * range];
      starts.push_back(starts.back() + (num_elements + block_size - 1) / block_size);
    }
  }

  int64_t num_chunks() const { return (starts.back() + blocks_per_chunk - 1) / blocks_per_chunk; }

  double run(int64_t chunk) const {
    const int64_t first = chunk * blocks_per_chunk;
    const int64_t last = smaller(first + blocks_per_chunk, starts.back());
    int64_t range = std::upper_bound(starts.begin(), starts.end(), first) - starts.begin() - 1;
    double sum = 0.0;
    for (; range < num_ranges && starts[range] < last; ++range) {
      const int64_t skipped = first > starts[range] ? first - starts[range] : 0;
      const int64_t begin = ranges[2 * range] + skipped * block_size;
      const int64_t end = ranges[2 * range] + (last - starts[range]) * block_size;
      sum += function(job, begin, smaller(end, ranges[2 * range + 1]));
    }
    return sum;
  }

 private:
  static constexpr int64_t blocks_per_chunk = chunk_size / block_size;
  ChunkFunction function;
  Job job;
  const int64_t* ranges;
  int64_t num_ranges;
  std::vector<int64_t> starts = {0};  // of each range, laid end to end, and their end; in blocks
};

// One contiguous range of whole pages per thread: long enough for the C library to bypass caches.
template <class Function>
void run_ranges(int64_t num_bytes, int32_t num_threads, const Function& function) {
  constexpr int64_t page = 4096;
  const int64_t share = (num_bytes / num_threads / page + 1) * page;
  run_pieces((num_bytes + share - 1) / share, num_threads, [&](int64_t piece) {
    function(piece * share, smaller((piece + 1) * share, num_bytes));
  });
}

}  // namespace

extern "C" {

// Levels: 0 portable, 1 AVX2, 2 AVX-512.
int32_t host_kernel_level() { return level; }
int32_t host_kernel_highest_level() { return highest_level(); }
void host_kernel_set_level(int32_t wanted) { level = wanted; }

// One update. Ranges: see `ChunksOfRanges`; no two may overlap.
struct Call {
  int32_t optimizer;
  int32_t weight_form;
  int32_t gradient_form;
  int32_t unused;
  const Job* job;
  const int64_t* ranges;
  int64_t num_ranges;
};

// Several updates at once, in no order, so no two may touch the same memory: whoever calls from
// Python gives its lock up once, threads are woken once, and what is small is done beside what is
// large. Returns the sum of squares of all changes of weights (see [Note: changes]).
double host_kernel_updates(const Call* calls, int64_t num_calls, int32_t num_threads) {
  std::vector<ChunksOfRanges> updates;
  std::vector<int64_t> starts = {0};  // of each update among all chunks, and their end
  for (const Call* call = calls; call < calls + num_calls; ++call) {
    Job job = *call->job;
    job.load_gradient = load_function(call->gradient_form);
    updates.emplace_back(function_of(call->optimizer, call->weight_form), job, call->ranges,
                         call->num_ranges);
    starts.push_back(starts.back() + updates.back().num_chunks());
  }
  return sum_of_pieces(starts.back(), num_threads, [&](int64_t piece) {
    const auto after = std::upper_bound(starts.begin(), starts.end(), piece);
    const size_t number = size_t(after - starts.begin()) - 1;
    return updates[number].run(piece - starts[number]);
  });
}

void host_kernel_split(const void* master, void* weight, void* remainder, int64_t num_elements,
                       int32_t num_threads) {
  Job job = {};
  job.gradient = master;
  job.weight = weight;
  job.companion = remainder;
  run_chunks(chunk_function<Split>(), job, num_elements, num_threads);
}

int64_t host_kernel_check_split(int32_t num_threads) {
  return int64_t(run_chunks(chunk_function<CheckSplit>(), Job{}, int64_t(1) << 32, num_threads));
}

void host_kernel_copy(void* to, const void* from, int64_t num_bytes, int32_t num_threads) {
  run_ranges(num_bytes, num_threads, [to, from](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                size_t(end - begin));
  });
}

void host_kernel_gather(const void* table, const int64_t* ids, void* out, int64_t num_ids,
                        int64_t row_bytes, int32_t num_threads) {
  constexpr int64_t piece_bytes = 65536;
  const int64_t rows_per_piece = row_bytes > 0 ? piece_bytes / row_bytes + 1 : piece_bytes;
  const int64_t num_pieces = (num_ids + rows_per_piece - 1) / rows_per_piece;
  run_pieces(num_pieces, num_threads, [=](int64_t piece) {
    const int64_t begin = piece * rows_per_piece;
    for (int64_t i = begin; i < smaller(begin + rows_per_piece, num_ids); ++i) {
      std::memcpy(static_cast<char*>(out) + i * row_bytes,
                  static_cast<const char*>(table) + ids[i] * row_bytes, size_t(row_bytes));
    }
  });
}

// Targets: 0 float32, 1 bfloat16. Sources as gradients.
double host_kernel_add_rows(int32_t target_form, int32_t source_form, void* target,
                            const void* source, const int64_t* rows, const int64_t* starts,
                            const int64_t* positions, int64_t num_groups, int64_t width,
                            int32_t num_threads) {
  Job job = {};
  job.weight = target;
  job.gradient = source;
  job.load_gradient = load_function(source_form);
  const int64_t source_bytes = source_form == 0 ? 4 : 2;
  const int64_t target_bytes = target_form == 0 ? 4 : 2;
  const RowGroups groups = {rows,  starts,       positions,   num_groups,
                            width, source_bytes, target_bytes};
  const std::vector<Piece> pieces = pieces_of(groups);
  const auto function =
      target_form == 0
          ? at_level<AddRows<Float32Weight>, const RowGroups*, const Piece*>()
          : at_level<AddRows<BFloat16Weight>, const RowGroups*, const Piece*>();
  return sum_of_pieces(int64_t(pieces.size()), num_threads, [&](int64_t piece) {
    return function(job, &groups, &pieces[size_t(piece)]);
  });
}

// Whoever calls must mean the same by a job and a call.
int64_t host_kernel_job_bytes() { return sizeof(Job); }
int64_t host_kernel_call_bytes() { return sizeof(Call); }

}  // extern "C"
