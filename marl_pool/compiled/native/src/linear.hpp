// Products of a block of rows with weights, and the gradients of weights.
#pragma once

#include "simd.hpp"

namespace marl_pool {

// Numbers of a block: one vector for each token and feature.
template <class Real> struct View {
  Vector<Real> *at;
  long token, feature;  // strides

  INLINE Vector<Real> &operator()(long n, long d) const {
    return at[n * token + d * feature];
  }
  INLINE View from_token(long n) const { return {at + n * token, token, feature}; }
  INLINE View from_feature(long d) const { return {at + d * feature, token, feature}; }
  INLINE View transposed() const { return {at, feature, token}; }
};

// Tiles of tokens x outputs that fit in the registers.
constexpr int kTokens = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kOutputs = 6;
#else
constexpr int kOutputs = 3;  // 16 registers instead of 32
#endif

template <class Real, int Tokens, int Outputs, bool Add>
INLINE void linear_tile(View<Real> x, const Real *weight, long stride, const Real *bias,
                        View<Real> y, int inputs) {
  using V = Vector<Real>;
  V sums[Tokens][Outputs];
  UNROLL for (int o = 0; o < Outputs; o++) {
    const V from = bias ? splat<Real>(bias[o]) : V{};
    UNROLL for (int t = 0; t < Tokens; t++) sums[t][o] = Add ? y(t, o) + from : from;
  }
  for (int i = 0; i < inputs; i++) {
    V value[Tokens];
    UNROLL for (int t = 0; t < Tokens; t++) value[t] = x(t, i);
    UNROLL for (int o = 0; o < Outputs; o++) {
      const Real w = weight[o * stride + i];
      UNROLL for (int t = 0; t < Tokens; t++) sums[t][o] += w * value[t];
    }
  }
  UNROLL for (int o = 0; o < Outputs; o++)
    UNROLL for (int t = 0; t < Tokens; t++) y(t, o) = sums[t][o];
}

// Tiles of `Width` outputs as long as they fit, then narrower ones.
template <int Width, class F> INLINE void split(int from, int size, F &&tile) {
  constexpr std::integral_constant<int, Width> width{};
  for (; from + Width <= size; from += Width) tile(from, width);
  if constexpr (Width > 1) {
    if (from < size) split<(Width > 4 ? 4 : Width - 1)>(from, size, tile);
  }
}

// y = x Wᵀ + bias for `Tokens` tokens, or y += …; weight is (outputs, inputs).
template <class Real, int Tokens, bool Add>
void linear_tokens(View<Real> x, const Real *weight, long stride, const Real *bias,
                   View<Real> y, int inputs, int outputs) {
  auto tile = [&](int o, auto width) {
    linear_tile<Real, Tokens, width, Add>(x, weight + o * stride, stride,
                                          bias ? bias + o : nullptr, y.from_feature(o),
                                          inputs);
  };
  // Eight outputs are two tiles of four, rather than six and two.
  if (outputs % kOutputs && outputs % 4 == 0 && kOutputs > 4)
    split<4>(0, outputs, tile);
  else
    split<kOutputs>(0, outputs, tile);
}

template <class Real, bool Add>
void linear(View<Real> x, const Real *weight, long stride, const Real *bias, View<Real> y,
            int tokens, int inputs, int outputs) {
  split<kTokens>(0, tokens, [&](int n, auto width) {
    linear_tokens<Real, width, Add>(x.from_token(n), weight, stride, bias,
                                    y.from_token(n), inputs, outputs);
  });
}

// A gradient's tile has as many numbers as a vector.
template <class Real> constexpr int kGradientOutputs = lanes<Real> < 4 ? lanes<Real> : 4;
template <class Real>
constexpr int kGradientInputs = lanes<Real> / kGradientOutputs<Real>;

// gradient(o, i) += Σ over tokens and rows of dy(n, o) x(n, i); gradient is (outputs,
// inputs) with the given stride.
template <class Real, int Outputs, int Inputs>
INLINE void weight_gradient_tile(View<Real> dy, View<Real> x, Real *gradient,
                                 long stride, int tokens) {
  using V = Vector<Real>;
  constexpr int Columns = kGradientInputs<Real>;
  V sums[lanes<Real>] = {};
  for (int n = 0; n < tokens; n++) {
    V value[Inputs];
    UNROLL for (int i = 0; i < Inputs; i++) value[i] = x(n, i);
    UNROLL for (int o = 0; o < Outputs; o++) {
      const V d = dy(n, o);
      UNROLL for (int i = 0; i < Inputs; i++) sums[o * Columns + i] += d * value[i];
    }
  }
  const V totals = lane_sums<Real>(sums);
  UNROLL for (int o = 0; o < Outputs; o++)
    UNROLL for (int i = 0; i < Inputs; i++)
      gradient[o * stride + i] += totals[o * Columns + i];
}

template <class Real>
void weight_gradient(View<Real> dy, View<Real> x, Real *gradient, long stride, int tokens,
                     int outputs, int inputs) {
  split<kGradientOutputs<Real>>(0, outputs, [&](int o, auto rows) {
    split<kGradientInputs<Real>>(0, inputs, [&](int i, auto columns) {
      Real *at = gradient + o * stride + i;
      weight_gradient_tile<Real, rows, columns>(dy.from_feature(o), x.from_feature(i), at,
                                                stride, tokens);
    });
  });
}

// gradient(o) += Σ over tokens and rows of dy(n, o).
template <class Real>
void bias_gradient(View<Real> dy, Real *gradient, int tokens, int outputs) {
  using V = Vector<Real>;
  constexpr int W = lanes<Real>;
  for (int o = 0; o < outputs; o += W) {
    V sums[W] = {};
    const int width = outputs - o < W ? outputs - o : W;
    // Several sums at a time, since each addition waits for the one before.
    split<4>(0, width, [&](int i, auto count) {
      constexpr int C = count;
      V part[C] = {};
      for (int n = 0; n < tokens; n++)
        UNROLL for (int k = 0; k < C; k++) part[k] += dy(n, o + i + k);
      UNROLL for (int k = 0; k < C; k++) sums[i + k] = part[k];
    });
    const V totals = lane_sums<Real>(sums);
    for (int i = 0; i < width; i++) gradient[o + i] += totals[i];
  }
}

// c(i, j) = Σ_m a(i, m) b(m, j), where all three are numbers of the block.
template <class Real, bool Add = false>
void block_product(View<Real> a, View<Real> b, View<Real> c, int rows, int inner,
                   int columns) {
  using V = Vector<Real>;
  split<kTokens>(0, rows, [&](int i, auto height) {
    split<kTokens>(0, columns, [&](int j, auto width) {
      constexpr int I = height, J = width;
      V sums[I][J];
      UNROLL for (int s = 0; s < I; s++)
        UNROLL for (int t = 0; t < J; t++) sums[s][t] = Add ? c(i + s, j + t) : V{};
      for (int m = 0; m < inner; m++) {
        V left[I];
        UNROLL for (int s = 0; s < I; s++) left[s] = a(i + s, m);
        UNROLL for (int t = 0; t < J; t++) {
          const V right = b(m, j + t);
          UNROLL for (int s = 0; s < I; s++) sums[s][t] += left[s] * right;
        }
      }
      UNROLL for (int s = 0; s < I; s++)
        UNROLL for (int t = 0; t < J; t++) c(i + s, j + t) = sums[s][t];
    });
  });
}

}  // namespace marl_pool
