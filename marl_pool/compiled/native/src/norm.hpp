// LayerNorm without weight and bias, which are folded into the product that follows.
#pragma once

#include "linear.hpp"

namespace marl_pool {

constexpr double kNormEpsilon = 1e-5;

// Factor for numbers whose squares overflow; with it, not even the largest's do.
template <class Real> constexpr Real kShrink = Real(sizeof(Real) == 4 ? 0x1p-70 : 0x1p-520);

// Normalize again, without overflow, the rows whose `scale` is not finite. Those with NaN
// or infinity become NaN.
template <class Real>
void normalize_huge(View<Real> x, View<Real> normed, Vector<Real> *scale, int tokens,
                    int dim) {
  using V = Vector<Real>;
  const Real inv_dim = Real(1) / dim;
  for (int n = 0; n < tokens; n++) {
    const Bits<Real> huge = !(scale[n] <= kHuge<Real>);
    V sum{}, square{};
    for (int d = 0; d < dim; d++) sum += x(n, d) * kShrink<Real>;
    const V mean = sum * inv_dim;
    for (int d = 0; d < dim; d++) {
      const V centered = x(n, d) * kShrink<Real> - mean;
      square += centered * centered;
    }
    const V inverse = rsqrt<Real>(square * inv_dim);
    for (int d = 0; d < dim; d++)
      normed(n, d) = huge ? (x(n, d) * kShrink<Real> - mean) * inverse : normed(n, d);
    scale[n] = huge ? inverse * kShrink<Real> : scale[n];
  }
}

// normed = (x - mean) / σ for each token; `scale` keeps 1/σ.
template <class Real>
void normalize(View<Real> x, View<Real> normed, Vector<Real> *scale, int tokens,
               int dim) {
  using V = Vector<Real>;
  const Real inv_dim = Real(1) / dim;
  V sum_of_squares{};
  for (int n = 0; n < tokens; n++) {
    V sum{}, square{};
    for (int d = 0; d < dim; d++) sum += x(n, d);
    const V mean = sum * inv_dim;
    for (int d = 0; d < dim; d++) {
      const V centered = x(n, d) - mean;
      square += centered * centered;
      normed(n, d) = centered;
    }
    scale[n] = rsqrt<Real>(square * inv_dim + Real(kNormEpsilon));
    for (int d = 0; d < dim; d++) normed(n, d) *= scale[n];
    sum_of_squares += square;
  }
  // Overflow is rare, and any of it leaves the sum infinite or NaN: one test suffices.
  bool fits = true;
  for (int lane = 0; lane < lanes<Real>; lane++)
    fits &= sum_of_squares[lane] <= kHuge<Real>;
  if (!fits) normalize_huge(x, normed, scale, tokens, dim);
}

// dx += the gradient w.r.t. x of `normalize`, given that w.r.t. `normed`.
template <class Real>
void normalize_backward(View<Real> gradient, View<Real> normed, const Vector<Real> *scale,
                        View<Real> dx, int tokens, int dim) {
  using V = Vector<Real>;
  const Real inv_dim = Real(1) / dim;
  for (int n = 0; n < tokens; n++) {
    V mean{}, projection{};
    for (int d = 0; d < dim; d++) {
      mean += gradient(n, d);
      projection += gradient(n, d) * normed(n, d);
    }
    mean *= inv_dim;
    projection *= inv_dim;
    for (int d = 0; d < dim; d++)
      dx(n, d) += scale[n] * (gradient(n, d) - mean - normed(n, d) * projection);
  }
}

}  // namespace marl_pool
