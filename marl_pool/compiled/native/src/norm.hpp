// LayerNorm without weight and bias, which are part of the product that follows.
#pragma once

#include "linear.hpp"

namespace marl_pool {

constexpr double kNormEpsilon = 1e-5;

// For numbers whose squares overflow: a factor that makes the largest ones' fit.
template <class Real> constexpr Real kShrink = Real(sizeof(Real) == 4 ? 0x1p-70 : 0x1p-520);

// Normalize anew the rows whose `scale` is not finite; NaN and infinity stay NaN.
template <class Real>
void normalize_huge(View<Real> x, View<Real> normed, Vector<Real> *scale, int tokens,
                    int dim) {
  using V = Vector<Real>;
  const Real share = Real(1) / dim;
  for (int n = 0; n < tokens; n++) {
    const Bits<Real> huge = !(scale[n] <= kHuge<Real>);
    V sum{}, square{};
    for (int d = 0; d < dim; d++) sum += x(n, d) * kShrink<Real>;
    const V mean = sum * share;
    for (int d = 0; d < dim; d++) {
      const V centered = x(n, d) * kShrink<Real> - mean;
      square += centered * centered;
    }
    const V inverse = reciprocal_root<Real>(square * share);
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
  const Real share = Real(1) / dim;
  V squares{};
  for (int n = 0; n < tokens; n++) {
    V sum{}, square{};
    for (int d = 0; d < dim; d++) sum += x(n, d);
    const V mean = sum * share;
    for (int d = 0; d < dim; d++) {
      const V centered = x(n, d) - mean;
      square += centered * centered;
      normed(n, d) = centered;
    }
    scale[n] = reciprocal_root<Real>(square * share + Real(kNormEpsilon));
    for (int d = 0; d < dim; d++) normed(n, d) *= scale[n];
    squares += square;
  }
  // An overflow, which is rare, stays in the sum.
  bool fits = true;
  for (int lane = 0; lane < lanes<Real>; lane++)
    fits &= squares[lane] <= kHuge<Real>;
  if (!fits) normalize_huge(x, normed, scale, tokens, dim);
}

// dx += the gradient through `normalize`.
template <class Real>
void normalize_backward(View<Real> gradient, View<Real> normed, const Vector<Real> *scale,
                        View<Real> dx, int tokens, int dim) {
  using V = Vector<Real>;
  const Real share = Real(1) / dim;
  for (int n = 0; n < tokens; n++) {
    V mean{}, along{};
    for (int d = 0; d < dim; d++) {
      mean += gradient(n, d);
      along += gradient(n, d) * normed(n, d);
    }
    mean *= share;
    along *= share;
    for (int d = 0; d < dim; d++)
      dx(n, d) += scale[n] * (gradient(n, d) - mean - normed(n, d) * along);
  }
}

}  // namespace marl_pool
