// Matrix products for a block of rows: with weights, for the gradients of weights, and
// within each row.
#pragma once

#include "simd.hpp"

namespace marl_pool {

// A strided matrix of vectors, one for each token and feature; the lanes are the block's
// rows.
template <class Real> struct View {
  Vector<Real> *data;
  long token_stride, feature_stride;

  INLINE Vector<Real> &operator()(long n, long d) const {
    return data[n * token_stride + d * feature_stride];
  }
  INLINE View from_token(long n) const {
    return {data + n * token_stride, token_stride, feature_stride};
  }
  INLINE View from_feature(long d) const {
    return {data + d * feature_stride, token_stride, feature_stride};
  }
  INLINE View transposed() const { return {data, feature_stride, token_stride}; }
};

// Register tile: tokens x outputs whose sums fit in the registers.
constexpr int kTileTokens = 4;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileOutputs = 6;
#else
constexpr int kTileOutputs = 3;  // 16 registers instead of 32
#endif

template <class Real, int Tokens, int Outputs, bool Add>
INLINE void linear_tile(View<Real> x, const Real *weight, long stride, const Real *bias,
                        View<Real> y, int inputs) {
  using V = Vector<Real>;
  V sums[Tokens][Outputs];
  UNROLL for (int o = 0; o < Outputs; o++) {
    const V init = bias ? splat<Real>(bias[o]) : V{};
    UNROLL for (int t = 0; t < Tokens; t++) sums[t][o] = Add ? y(t, o) + init : init;
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

// Cover [begin, end) with tiles of `Width`, then narrower ones for the remainder. Calls
// tile(start, width) with a compile-time width.
template <int Width, class F> INLINE void for_tiles(int begin, int end, F &&tile) {
  constexpr std::integral_constant<int, Width> width{};
  for (; begin + Width <= end; begin += Width) tile(begin, width);
  if constexpr (Width > 1) {
    if (begin < end) for_tiles<(Width > 4 ? 4 : Width - 1)>(begin, end, tile);
  }
}

// y = x Wᵀ + bias for `Tokens` tokens, or y += … with `Add`; weight is (outputs, inputs).
template <class Real, int Tokens, bool Add>
void linear_tokens(View<Real> x, const Real *weight, long stride, const Real *bias,
                   View<Real> y, int inputs, int outputs) {
  auto tile = [&](int o, auto width) {
    linear_tile<Real, Tokens, width, Add>(x, weight + o * stride, stride,
                                          bias ? bias + o : nullptr, y.from_feature(o),
                                          inputs);
  };
  // Eight outputs are two tiles of four, rather than six and two.
  if (outputs % kTileOutputs && outputs % 4 == 0 && kTileOutputs > 4)
    for_tiles<4>(0, outputs, tile);
  else
    for_tiles<kTileOutputs>(0, outputs, tile);
}

template <class Real, bool Add>
void linear(View<Real> x, const Real *weight, long stride, const Real *bias, View<Real> y,
            int tokens, int inputs, int outputs) {
  for_tiles<kTileTokens>(0, tokens, [&](int n, auto width) {
    linear_tokens<Real, width, Add>(x.from_token(n), weight, stride, bias,
                                    y.from_token(n), inputs, outputs);
  });
}

// A tile of the weights' gradient has as many entries as a vector has lanes, so that one
// `lane_sums` reduces it.
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
  for_tiles<kGradientOutputs<Real>>(0, outputs, [&](int o, auto rows) {
    for_tiles<kGradientInputs<Real>>(0, inputs, [&](int i, auto columns) {
      Real *corner = gradient + o * stride + i;
      weight_gradient_tile<Real, rows, columns>(dy.from_feature(o), x.from_feature(i),
                                                corner, stride, tokens);
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
    // Independent sums hide the latency of the additions.
    for_tiles<4>(0, width, [&](int i, auto count) {
      constexpr int C = count;
      V partial[C] = {};
      for (int n = 0; n < tokens; n++)
        UNROLL for (int k = 0; k < C; k++) partial[k] += dy(n, o + i + k);
      UNROLL for (int k = 0; k < C; k++) sums[i + k] = partial[k];
    });
    const V totals = lane_sums<Real>(sums);
    for (int i = 0; i < width; i++) gradient[o + i] += totals[i];
  }
}

// c(i, j) = Σ_m a(i, m) b(m, j), or c += … with `Add`, for each row separately.
template <class Real, bool Add = false>
void block_product(View<Real> a, View<Real> b, View<Real> c, int rows, int inner,
                   int columns) {
  using V = Vector<Real>;
  for_tiles<kTileTokens>(0, rows, [&](int i, auto height) {
    for_tiles<kTileTokens>(0, columns, [&](int j, auto width) {
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
