// Vectors, one number for each row of a block, and functions of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "polynomials.hpp"

#define INLINE inline __attribute__((always_inline))
// Unroll the loop that follows. An array that is indexed by unrolled loops alone lies in
// registers; GCC writes it to memory if the indices are those of a lambda.
#define UNROLL _Pragma("GCC unroll 64")

namespace marl_pool {

// A vector is as wide as the registers: GCC splits wider ones into scalar code that goes
// through memory.
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
  // Adding it rounds to an integer, which is then in the lowest bits.
  static constexpr float round = 12582912.0f;
  static constexpr int exponent_shift = 23;
  static constexpr float least_exponent = -125.0f;
  static constexpr int32_t magnitude = 0x7fffffff;  // all bits but the sign
  // The first guesses of `reciprocal` and `reciprocal_root`, and the steps that they need.
  static constexpr int32_t reciprocal = 0x7ef311c7, reciprocal_root = 0x5f375a86;
  static constexpr int steps = 2;
};

template <> struct Simd<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
  static constexpr double round = 6755399441055744.0;
  static constexpr int exponent_shift = 52;
  static constexpr double least_exponent = -1021.0;
  static constexpr int64_t magnitude = 0x7fffffffffffffff;
  static constexpr int64_t reciprocal = 0x7fde623822fc16e6;
  static constexpr int64_t reciprocal_root = 0x5fe6eb50c7b537a9;
  static constexpr int steps = 3;
};

template <class Real> using Vector = typename Simd<Real>::Vector;
template <class Real> using Bits = typename Simd<Real>::Bits;
template <class Real> constexpr int lanes = kVectorBytes / sizeof(Real);

template <class Real> INLINE Vector<Real> splat(Real x) {
  return Vector<Real>{} + x;
}
// b where one of them is NaN, so what may be NaN and must stay so comes second.
template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V smaller(V a, V b) { return a < b ? a : b; }

// A bound of sums that are not zero, and the largest number.
template <class Real> constexpr Real kTiny = Real(1e-30);
template <class Real> constexpr Real kHuge = std::numeric_limits<Real>::max();

// 1 / x and 1 / √x for positive x, to about a rounding error; not finite for NaN and
// infinity. The exponent,
// halved for the root, and its sign are changed in the bits, which is right to a few per
// cent; each step then cubes the error. Instructions that divide take several times as
// long as the products here.
template <class Real> INLINE Vector<Real> reciprocal(Vector<Real> x) {
  using S = Simd<Real>;
  auto y = (Vector<Real>)(S::reciprocal - (Bits<Real>)x);
  UNROLL for (int step = 0; step < S::steps; step++) {
    const Vector<Real> error = 1 - x * y;
    y += y * (error + error * error);
  }
  return y;
}
template <class Real> INLINE Vector<Real> reciprocal_root(Vector<Real> x) {
  using S = Simd<Real>;
  auto y = (Vector<Real>)(S::reciprocal_root - ((Bits<Real>)x >> 1));
  UNROLL for (int step = 0; step < S::steps; step++) {
    const Vector<Real> error = 1 - x * y * y;
    y += y * (error * (Real(0.5) + Real(0.375) * error));
  }
  return y;
}

template <class Real, class V, int n>
INLINE V polynomial(const Real (&coefficients)[n], V x) {
  V sum = V{} + coefficients[n - 1];
  UNROLL for (int p = n - 2; p >= 0; p--) sum = sum * x + coefficients[p];
  return sum;
}

// 2^x between the exponents of normal numbers.
template <class Real> INLINE Vector<Real> power_of_two(Vector<Real> x) {
  using S = Simd<Real>;
  const Vector<Real> rounded = x + S::round;
  const Vector<Real> fraction = x - (rounded - S::round);
  const Vector<Real> power = polynomial(PowerOfTwo<Real>::coefficients, fraction);
  return (Vector<Real>)((Bits<Real>)power + ((Bits<Real>)rounded << S::exponent_shift));
}
// 2^x for x <= 0; about the smallest normal number where x is below its exponent, NaN
// for NaN.
template <class Real> INLINE Vector<Real> exp2(Vector<Real> x) {
  return power_of_two<Real>(larger(splat<Real>(Simd<Real>::least_exponent), x));
}

template <class Real> constexpr Real log2_e = Real(1.4426950408889634074);
template <class Real> constexpr Real ln_2 = Real(0.69314718055994530942);

enum Activation { kNone = 0, kGelu = 1, kRelu = 2 };

template <class Real> INLINE Vector<Real> magnitude(Vector<Real> x) {
  return (Vector<Real>)((Bits<Real>)x & Simd<Real>::magnitude);
}
template <class Real> INLINE Vector<Real> with_sign(Vector<Real> size, Vector<Real> x) {
  return (Vector<Real>)((Bits<Real>)size ^ ((Bits<Real>)x & ~Simd<Real>::magnitude));
}
// The smaller one of x >= 0 and `end`; `end` for NaN. The bits of positive numbers are in
// the order of the numbers, and integers have an instruction for it.
template <class Real> INLINE Vector<Real> up_to(Vector<Real> x, Real end) {
  const auto bits = (Bits<Real>)x, most = (Bits<Real>)splat<Real>(end);
  return (Vector<Real>)(bits < most ? bits : most);
}

// The density φ(x) and Φ(x) - 1/2 for x >= 0; beyond 12 the density is negligible.
template <class Real> struct Normal {
  Vector<Real> density, above_half;
};
template <class Real> INLINE Normal<Real> normal(Vector<Real> x) {
  constexpr Real log2_peak = Real(-1.3257480647361593990);  // log2 φ(0)
  x = up_to<Real>(x, 12);
  const auto density = power_of_two<Real>(x * x * Real(-0.5 * log2_e<double>) + log2_peak);
  return {density, Real(0.5) - density * polynomial(MillsRatio<Real>::coefficients, x)};
}

// x Φ(x), and its derivative Φ(x) + x φ(x) if `derivative` is given.
template <class Real, bool Train>
INLINE Vector<Real> gelu(Vector<Real> x, Vector<Real> *derivative) {
  constexpr Real half = Real(0.5);
  const Vector<Real> size = magnitude<Real>(x);
  // Without the density a polynomial alone is faster, but not at the degree of double.
  if constexpr (!Train && sizeof(Real) == 4) {
    using Fit = NormalCenter;
    const Vector<Real> a = up_to<Real>(size, Fit::end);
    const Vector<Real> at = a * a * Real(2 / (Fit::end * Fit::end)) - 1;
    return half * x + size * (a * polynomial(Fit::coefficients, at));
  }
  const Normal<Real> at = normal<Real>(size);
  if constexpr (Train) {
    // Times the density at 12, a huge number would not be negligible.
    const Vector<Real> bounded = smaller(splat<Real>(12), size);
    *derivative = half + with_sign<Real>(at.above_half + bounded * at.density, x);
  }
  return half * x + size * at.above_half;
}

template <class Real, bool Train>
INLINE Vector<Real> activate(Activation kind, Vector<Real> x, Vector<Real> *derivative) {
  using V = Vector<Real>;
  if (kind == kGelu) return gelu<Real, Train>(x, derivative);
  if (kind == kRelu) {
    if constexpr (Train) *derivative = x > 0 ? splat<Real>(1) : V{};
    return x < 0 ? V{} : x;  // NaN stays
  }
  if constexpr (Train) *derivative = splat<Real>(1);
  return x;
}

// Lanes of a where bit `Half` of their index is 0, of b elsewhere: the first term takes
// them from the same place, the second from the other half.
template <int Half, class V, int... l>
INLINE V add_halves(V a, V b, std::integer_sequence<int, l...>) {
  constexpr int W = sizeof...(l);
  return __builtin_shufflevector(a, b, (l & Half ? W + l : l)...) +
         __builtin_shufflevector(a, b, (l & Half ? W + (l ^ Half) : (l ^ Half))...);
}

// Sum over the lanes of as many vectors as there are lanes: lane i is the sum of
// vectors[i]. Each step adds halves of two vectors, in an order that is always the same.
template <class Real>
INLINE Vector<Real> lane_sums(Vector<Real> (&vectors)[lanes<Real>]) {
  constexpr int W = lanes<Real>;
  auto step = [&](auto half) {
    constexpr int S = half;
    constexpr auto order = std::make_integer_sequence<int, W>{};
    UNROLL for (int i = 0; i < S; i++)
      vectors[i] = add_halves<S>(vectors[i], vectors[i + S], order);
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
