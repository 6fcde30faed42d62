// SIMD vectors, whose lanes are rows of the batch, and elementary functions of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "polynomials.hpp"

#define INLINE inline __attribute__((always_inline))
// Fully unroll the loop that follows. GCC keeps an array in registers if only such loops
// index it, but spills it where the index is a lambda's parameter.
#define UNROLL _Pragma("GCC unroll 64")

namespace marl_pool {

// A vector fills one register: GCC lowers wider ones to scalar code through memory.
#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class Real> struct Simd;

template <> struct Simd<float> {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
  // 1.5 · 2²³: adding it rounds to an integer, held in the lowest bits of the mantissa.
  static constexpr float round_magic = 12582912.0f;
  static constexpr int exponent_shift = 23;
  // One above that of the smallest normal number, since the polynomial of `power_of_two`
  // may be just below 1.
  static constexpr float min_exponent = -125.0f;
  static constexpr int32_t abs_mask = 0x7fffffff;
  // The initial guesses of `reciprocal` and `rsqrt`, and the steps that refine them.
  static constexpr int32_t reciprocal_magic = 0x7ef311c7, rsqrt_magic = 0x5f375a86;
  static constexpr int refinement_steps = 2;
};

template <> struct Simd<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
  static constexpr double round_magic = 6755399441055744.0;  // 1.5 · 2⁵²
  static constexpr int exponent_shift = 52;
  static constexpr double min_exponent = -1021.0;
  static constexpr int64_t abs_mask = 0x7fffffffffffffff;
  static constexpr int64_t reciprocal_magic = 0x7fde623822fc16e6;
  static constexpr int64_t rsqrt_magic = 0x5fe6eb50c7b537a9;
  static constexpr int refinement_steps = 3;
};

template <class Real> using Vector = typename Simd<Real>::Vector;
template <class Real> using Bits = typename Simd<Real>::Bits;
template <class Real> constexpr int lanes = kVectorBytes / sizeof(Real);

template <class Real> INLINE Vector<Real> splat(Real x) {
  return Vector<Real>{} + x;
}
// Return b where either is NaN, as x86's max and min do, so an operand whose NaN must
// propagate comes second.
template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V smaller(V a, V b) { return a < b ? a : b; }

// Below any sum of softmax weights, except that of a row without tokens.
template <class Real> constexpr Real kTiny = Real(1e-30);
// The largest finite number.
template <class Real> constexpr Real kHuge = std::numeric_limits<Real>::max();

// a b + c, rounded once where the processor can. GCC decides by the code around it whether
// it fuses the plain expression, so that the same function may round in two ways.
template <class Real>
INLINE Vector<Real> fused(Vector<Real> a, Vector<Real> b, Vector<Real> c) {
#if defined(__AVX512F__)
  if constexpr (sizeof(Real) == 4)
    return (Vector<Real>)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
  else
    return (Vector<Real>)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__) && defined(__FMA__)
  if constexpr (sizeof(Real) == 4)
    return (Vector<Real>)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
  else
    return (Vector<Real>)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
  return a * b + c;
#endif
}

// 1 / x and 1 / √x for positive x, to about a rounding error; not finite for NaN and
// infinity. The initial guess negates the exponent, halved for the root, by integer
// arithmetic on the bits, and is within 5 %; each step then cubes the error. A division
// instruction takes several times as long as the products here.
template <class Real> INLINE Vector<Real> reciprocal(Vector<Real> x) {
  using S = Simd<Real>;
  auto y = (Vector<Real>)(S::reciprocal_magic - (Bits<Real>)x);
  UNROLL for (int step = 0; step < S::refinement_steps; step++) {
    const Vector<Real> error = 1 - x * y;
    y = fused<Real>(y, error + error * error, y);
  }
  return y;
}
template <class Real> INLINE Vector<Real> rsqrt(Vector<Real> x) {
  using S = Simd<Real>;
  auto y = (Vector<Real>)(S::rsqrt_magic - ((Bits<Real>)x >> 1));
  UNROLL for (int step = 0; step < S::refinement_steps; step++) {
    const Vector<Real> error = 1 - x * y * y;
    y += y * (error * (Real(0.5) + Real(0.375) * error));
  }
  return y;
}

// Horner's rule; the coefficients ascend.
template <class Real, class V, int n>
INLINE V polynomial(const Real (&coefficients)[n], V x) {
  V sum = V{} + coefficients[n - 1];
  UNROLL for (int p = n - 2; p >= 0; p--) sum = sum * x + coefficients[p];
  return sum;
}

// 2^x for x from `min_exponent` to 127 (1023 for double).
template <class Real> INLINE Vector<Real> power_of_two(Vector<Real> x) {
  using S = Simd<Real>;
  const Vector<Real> rounded = x + S::round_magic;
  const Vector<Real> fraction = x - (rounded - S::round_magic);
  const Vector<Real> power = polynomial(PowerOfTwo<Real>::coefficients, fraction);
  return (Vector<Real>)((Bits<Real>)power + ((Bits<Real>)rounded << S::exponent_shift));
}
// 2^x for x <= 0, but at least 2^min_exponent; NaN for NaN.
template <class Real> INLINE Vector<Real> exp2(Vector<Real> x) {
  return power_of_two<Real>(larger(splat<Real>(Simd<Real>::min_exponent), x));
}

template <class Real> constexpr Real log2_e = Real(1.4426950408889634074);
template <class Real> constexpr Real ln_2 = Real(0.69314718055994530942);

enum Activation { kNone = 0, kGelu = 1, kRelu = 2 };

template <class Real> INLINE Vector<Real> magnitude(Vector<Real> x) {
  return (Vector<Real>)((Bits<Real>)x & Simd<Real>::abs_mask);
}
// x times the sign of y.
template <class Real> INLINE Vector<Real> mul_sign(Vector<Real> x, Vector<Real> y) {
  return (Vector<Real>)((Bits<Real>)x ^ ((Bits<Real>)y & ~Simd<Real>::abs_mask));
}
// min(x, bound) for x >= 0; `bound` for NaN. The bits of non-negative floats are ordered
// like the floats, so this is an integer minimum.
template <class Real> INLINE Vector<Real> clamp_above(Vector<Real> x, Real bound) {
  const auto bits = (Bits<Real>)x, limit = (Bits<Real>)splat<Real>(bound);
  return (Vector<Real>)(bits < limit ? bits : limit);
}

// φ(x) and Φ(x) - 1/2 of the standard normal distribution for x >= 0; x is clamped to 12,
// where φ is negligible.
template <class Real> struct Normal {
  Vector<Real> density, cdf_minus_half;
};
template <class Real> INLINE Normal<Real> normal(Vector<Real> x) {
  constexpr Real log2_peak = Real(-1.3257480647361593990);  // log2 φ(0)
  x = clamp_above<Real>(x, 12);
  const auto density = power_of_two<Real>(x * x * Real(-0.5 * log2_e<double>) + log2_peak);
  return {density, Real(0.5) - density * polynomial(MillsRatio<Real>::coefficients, x)};
}

// x Φ(x), and its derivative Φ(x) + x φ(x) if `derivative` is given.
template <class Real, bool Train>
INLINE Vector<Real> gelu(Vector<Real> x, Vector<Real> *derivative) {
  constexpr Real half = Real(0.5);
  const Vector<Real> abs_x = magnitude<Real>(x);
  // Inference needs no density, so a single polynomial is faster; not in double, where
  // its degree would be too high.
  if constexpr (!Train && sizeof(Real) == 4) {
    using Fit = NormalCenter;
    const Vector<Real> a = clamp_above<Real>(abs_x, Fit::end);
    const Vector<Real> t = a * a * Real(2 / (Fit::end * Fit::end)) - 1;
    const Vector<Real> center = half * x + abs_x * (a * polynomial(Fit::coefficients, t));
    // Beyond, Φ is 0 or 1: its error would be multiplied by a large negative x, for which
    // x Φ(x) vanishes. NaN is beyond.
    return abs_x < Real(Fit::end) ? center : larger(Vector<Real>{}, x);
  }
  const Normal<Real> gauss = normal<Real>(abs_x);
  if constexpr (Train) {
    // φ is taken at 12 at most, so x φ(x) would not vanish for a huge x.
    const Vector<Real> bounded = smaller(splat<Real>(12), abs_x);
    *derivative =
        half + mul_sign<Real>(gauss.cdf_minus_half + bounded * gauss.density, x);
  }
  return half * x + abs_x * gauss.cdf_minus_half;
}

template <class Real, bool Train>
INLINE Vector<Real> activate(Activation kind, Vector<Real> x, Vector<Real> *derivative) {
  using V = Vector<Real>;
  if (kind == kGelu) return gelu<Real, Train>(x, derivative);
  if (kind == kRelu) {
    if constexpr (Train) *derivative = x > 0 ? splat<Real>(1) : V{};
    return x < 0 ? V{} : x;  // propagates NaN
  }
  if constexpr (Train) *derivative = splat<Real>(1);
  return x;
}

// One step of a butterfly reduction of two vectors: lane l is the sum of lanes l and
// l ^ Half, of a where bit `Half` of l is 0 and of b elsewhere.
template <int Half, class V, int... l>
INLINE V butterfly_add(V a, V b, std::integer_sequence<int, l...>) {
  constexpr int W = sizeof...(l);
  return __builtin_shufflevector(a, b, (l & Half ? W + l : l)...) +
         __builtin_shufflevector(a, b, (l & Half ? W + (l ^ Half) : (l ^ Half))...);
}

// Reduce as many vectors as there are lanes: lane i of the result is the sum over the
// lanes of vectors[i], always in the same order.
template <class Real>
INLINE Vector<Real> lane_sums(Vector<Real> (&vectors)[lanes<Real>]) {
  constexpr int W = lanes<Real>;
  auto step = [&](auto half) {
    constexpr int S = half;
    constexpr auto order = std::make_integer_sequence<int, W>{};
    UNROLL for (int i = 0; i < S; i++)
      vectors[i] = butterfly_add<S>(vectors[i], vectors[i + S], order);
  };
  if constexpr (W > 8) step(std::integral_constant<int, 8>{});
  if constexpr (W > 4) step(std::integral_constant<int, 4>{});
  if constexpr (W > 2) step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 1>{});
  return vectors[0];
}

template <class Real> INLINE Real lane_sum(Vector<Real> x) {
  for (int half = lanes<Real> / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) x[lane] += x[lane + half];
  return x[0];
}

}  // namespace marl_pool
