// LayerNorm without weight and bias, which are part of the product that follows.
#pragma once

#include "linear.hpp"

namespace marl_pool {

constexpr double kNormEpsilon = 1e-5;

// normed = (x - mean) / σ for each token; `scale` keeps 1/σ.
template <class Real>
void normalize(View<Real> x, View<Real> normed, Vector<Real> *scale, int tokens,
               int dim) {
  using V = Vector<Real>;
  const Real share = Real(1) / dim;
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
  }
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
