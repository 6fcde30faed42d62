// Vectors of 64 bytes, one number for each row of a block, and functions of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "polynomials.hpp"

#define INLINE inline __attribute__((always_inline))

namespace marl_pool {

template <class Real> struct Simd;

template <> struct Simd<float> {
  typedef float Vector __attribute__((vector_size(64)));
  typedef int32_t Bits __attribute__((vector_size(64)));
  // Adding it rounds to an integer, which is then in the lowest bits.
  static constexpr float round = 12582912.0f;
  static constexpr int exponent_shift = 23;
  static constexpr float least_exponent = -125.0f;
};

template <> struct Simd<double> {
  typedef double Vector __attribute__((vector_size(64)));
  typedef int64_t Bits __attribute__((vector_size(64)));
  static constexpr double round = 6755399441055744.0;
  static constexpr int exponent_shift = 52;
  static constexpr double least_exponent = -1021.0;
};

template <class Real> using Vector = typename Simd<Real>::Vector;
template <class Real> using Bits = typename Simd<Real>::Bits;
template <class Real> constexpr int lanes = 64 / sizeof(Real);

template <class F, int... i>
INLINE void unroll_over(F &f, std::integer_sequence<int, i...>) {
  (f(std::integral_constant<int, i>{}), ...);
}
// Call f(0), …, f(N - 1) with compile-time indices.
template <int N, class F> INLINE void unroll(F &&f) {
  unroll_over(f, std::make_integer_sequence<int, N>{});
}

template <class Real> INLINE Vector<Real> splat(Real x) {
  return Vector<Real>{} + x;
}
// b where one of them is NaN, so what may be NaN and must stay so comes second.
template <class V> INLINE V larger(V a, V b) { return a > b ? a : b; }
template <class V> INLINE V smaller(V a, V b) { return a < b ? a : b; }

// Bounds of the magnitudes of sums and scores that are not zero or infinite.
template <class Real> constexpr Real kTiny = Real(1e-30);
template <class Real> constexpr Real kHuge = Real(1e30);

template <class Real> INLINE Vector<Real> square_root(Vector<Real> x) {
  Vector<Real> root{};
  for (int lane = 0; lane < lanes<Real>; lane++) root[lane] = std::sqrt(x[lane]);
  return root;
}

template <class Real, class V, int n>
INLINE V polynomial(const Real (&coefficients)[n], V x) {
  V sum = V{} + coefficients[n - 1];
  unroll<n - 1>([&](auto i) { sum = sum * x + coefficients[n - 2 - i]; });
  return sum;
}

// 2^x for x <= 0; about the smallest normal number where x is below its exponent, NaN
// for NaN.
template <class Real> INLINE Vector<Real> exp2(Vector<Real> x) {
  using S = Simd<Real>;
  x = larger(splat<Real>(S::least_exponent), x);
  const Vector<Real> rounded = x + S::round;
  const Vector<Real> fraction = x - (rounded - S::round);
  const Vector<Real> power = polynomial(PowerOfTwo<Real>::coefficients, fraction);
  return (Vector<Real>)((Bits<Real>)power + ((Bits<Real>)rounded << S::exponent_shift));
}

template <class Real> constexpr Real log2_e = Real(1.4426950408889634074);
template <class Real> constexpr Real ln_2 = Real(0.69314718055994530942);

enum Activation { kNone = 0, kGelu = 1, kRelu = 2 };

// x Φ(x), and its derivative Φ(x) + x φ(x) if `derivative` is given.
template <class Real, bool Train>
INLINE Vector<Real> gelu(Vector<Real> x, Vector<Real> *derivative) {
  using V = Vector<Real>;
  // The polynomial is good up to the end of its fit, where the density is negligible.
  constexpr Real end = sizeof(Real) == 4 ? 10 : 12;
  const V a = smaller(x < 0 ? -x : x, splat<Real>(end));
  const V density = exp2<Real>(a * a * Real(-0.5 * log2_e<double>));
  const V tail = density * polynomial(NormalTail<Real>::coefficients, a);
  const V phi = x > 0 ? 1 - tail : tail;
  if constexpr (Train) *derivative = phi + x * (density * Real(0.39894228040143267794));
  return x * phi;
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
    unroll<S>([&](auto i) {
      constexpr auto order = std::make_integer_sequence<int, W>{};
      vectors[i] = add_halves<S>(vectors[i], vectors[i + S], order);
    });
  };
  if constexpr (W == 16) step(std::integral_constant<int, 8>{});
  step(std::integral_constant<int, 4>{});
  step(std::integral_constant<int, 2>{});
  step(std::integral_constant<int, 1>{});
  return vectors[0];
}

template <class Real> INLINE Real lane_sum(Vector<Real> x) {
  for (int half = lanes<Real> / 2; half; half /= 2)
    for (int lane = 0; lane < half; lane++) x[lane] += x[lane + half];
  return x[0];
}

}  // namespace marl_pool
