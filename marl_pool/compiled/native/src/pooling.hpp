// Pooling heads: from the encoder's vectors to one vector per row.
#pragma once

#include "attention.hpp"

namespace marl_pool {

enum Pooling { kNoPooling = 0, kAvg = 1, kMax = 2, kSum = 3, kFirst = 4, kAda = 5 };
enum Query { kSelf = 0, kMean = 1, kLearned = 2 };

struct PoolingSizes {
  int tokens, dim, heads;
  Pooling kind;
  Query query;
  bool residual;
  double scale;
};

// Masks of a block's tokens, a vector for each.
template <class Real> struct TokenMasks {
  const Vector<Real> *present;   // 1 or 0
  const Vector<Real> *own_type;  // 1 for present tokens of the observer's own type
};

// The weights of `avg`, `sum` and `first`, which are weighted sums of the tokens.
template <class Real>
INLINE void fixed_weights(const PoolingSizes &s, TokenMasks<Real> masks,
                          Vector<Real> *weights) {
  using V = Vector<Real>;
  V count{};
  for (int n = 0; n < s.tokens; n++) count += masks.present[n];
  const V inv_count = 1 / larger(count, splat<Real>(1));
  for (int n = 0; n < s.tokens; n++) {
    if (s.kind == kFirst)
      weights[n] = n == 0 ? splat<Real>(1) : V{};
    else
      weights[n] = s.kind == kAvg ? masks.present[n] * inv_count : masks.present[n];
  }
}

// The weights of the tokens in AdaPool's query: the mean of those of the observer's own
// type, or of all where there are none.
template <class Real>
INLINE void query_weights(const PoolingSizes &s, TokenMasks<Real> masks,
                          Vector<Real> *weights) {
  using V = Vector<Real>;
  V own_count{}, present_count{};
  for (int n = 0; n < s.tokens; n++) {
    own_count += masks.own_type[n];
    present_count += masks.present[n];
  }
  const bool by_type = s.query == kSelf;
  for (int n = 0; n < s.tokens; n++) {
    const V mean = masks.present[n] / larger(present_count, splat<Real>(1));
    const V own_mean = masks.own_type[n] / larger(own_count, splat<Real>(1));
    weights[n] = by_type ? (own_count > 0 ? own_mean : mean) : mean;
  }
}

template <class Real> struct AdaParameters {
  Real *query, *key, *value, *out;  // (D, D) each
  Real *learned;                    // (D), or null
};

// AdaPool for one block. Scores are computed as x · (W_Kᵀ q), and values are projected
// after the weighted sum, so that no token needs a projection.
template <class Real> struct AdaPool {
  using V = Vector<Real>;
  using Parameters = AdaParameters<const Real>;

  PoolingSizes s;
  // Kept for the backward pass.
  V *query_weight, *query, *projected, *pooled, *any_present;
  View<Real> direction, weight, mean;  // (H, D), (H, N), (H, D)
  // Scratch of the backward pass.
  View<Real> d_score, d_mean, d_direction;
  V *d_result, *d_query, *d_projected, *d_pooled;

  template <class Arena> AdaPool(Arena &arena, const PoolingSizes &sizes) : s(sizes) {
    const long D = s.dim, H = s.heads, N = s.tokens;
    query_weight = arena.take(N);
    any_present = arena.take(1);
    for (V **buffer : {&query, &projected, &pooled, &d_result, &d_query, &d_projected,
                       &d_pooled})
      *buffer = arena.take(D);
    for (View<Real> *buffer : {&direction, &mean, &d_mean, &d_direction})
      *buffer = {arena.take(H * D), D, 1};
    for (View<Real> *buffer : {&weight, &d_score}) *buffer = {arena.take(H * N), N, 1};
  }

  void forward(const Parameters &p, View<Real> x, TokenMasks<Real> masks, V *result) {
    const int D = s.dim, N = s.tokens;
    *any_present = V{};
    for (int n = 0; n < N; n++) *any_present = larger(*any_present, masks.present[n]);
    find_query(p, x, masks);
    // W_Kᵀ q, head by head, and the softmax of the scores.
    linear<Real, false>(row(query), p.query, D, nullptr, row(projected), 1, D, D);
    for (int c = 0; c < D; c++) projected[c] *= Real(s.scale * log2_e<double>);
    transposed_product_by_head(p.key, projected, direction);
    block_product(direction, x.transposed(), weight, s.heads, D, N);
    for (int h = 0; h < s.heads; h++)
      softmax<Real, true>(&weight(h, 0), masks.present, N);
    // The weighted means of the tokens, then their values.
    block_product(weight, x, mean, s.heads, N, D);
    const int width = D / s.heads;
    for (int h = 0; h < s.heads; h++)
      linear<Real, false>(row(&mean(h, 0)), p.value + h * width * D, D, nullptr,
                          row(pooled + h * width), 1, D, width);
    linear<Real, false>(row(pooled), p.out, D, nullptr, row(result), 1, D, D);
    for (int d = 0; d < D; d++) {
      if (s.residual) result[d] += query[d];
      result[d] = *any_present > 0 ? result[d] : V{};
    }
  }

  // Set dx to the gradient w.r.t. x, given that w.r.t. the result; add to those of the
  // parameters.
  void backward(const Parameters &p, AdaParameters<Real> g, View<Real> x,
                const V *gradient, View<Real> dx) {
    const int D = s.dim, N = s.tokens, width = D / s.heads;
    for (int d = 0; d < D; d++) {
      d_result[d] = *any_present > 0 ? gradient[d] : V{};
      d_query[d] = s.residual ? d_result[d] : V{};
    }
    // Through the projections of the result and of the values.
    weight_gradient(row(d_result), row(pooled), g.out, D, 1, D, D);
    transposed_product(p.out, d_result, d_pooled, D, D);
    transposed_product_by_head(p.value, d_pooled, d_mean);
    for (int h = 0; h < s.heads; h++)
      weight_gradient(row(d_pooled + h * width), row(&mean(h, 0)),
                      g.value + h * width * D, D, 1, width, D);
    // Through the softmax.
    block_product(d_mean, x.transposed(), d_score, s.heads, D, N);
    for (int h = 0; h < s.heads; h++) {
      V delta{};
      for (int d = 0; d < D; d++) delta += d_mean(h, d) * mean(h, d);
      for (int n = 0; n < N; n++)
        d_score(h, n) = weight(h, n) * (d_score(h, n) - delta) * ln_2<Real>;
    }
    block_product(weight.transposed(), d_mean, dx, N, s.heads, D);
    block_product<Real, true>(d_score.transposed(), direction, dx, N, s.heads, D);
    // Through the directions to the query.
    block_product(d_score, x, d_direction, s.heads, N, D);
    for (int h = 0; h < s.heads; h++) {
      const int first = h * width;
      weight_gradient(row(projected + first), row(&d_direction(h, 0)),
                      g.key + first * D, D, 1, width, D);
      linear<Real, false>(row(&d_direction(h, 0)), p.key + first * D, D, nullptr,
                          row(d_projected + first), 1, D, width);
    }
    for (int c = 0; c < D; c++) d_projected[c] *= Real(s.scale * log2_e<double>);
    weight_gradient(row(d_projected), row(query), g.query, D, 1, D, D);
    transposed_product(p.query, d_projected, pooled, D, D);
    for (int d = 0; d < D; d++) d_query[d] += pooled[d];
    if (s.query == kLearned) {
      bias_gradient(row(d_query), g.learned, 1, D);
      return;
    }
    for (int d = 0; d < D; d++)
      for (int n = 0; n < N; n++) dx(n, d) += query_weight[n] * d_query[d];
  }

private:
  static View<Real> row(V *data) { return {data, 0, 1}; }

  void find_query(const Parameters &p, View<Real> x, TokenMasks<Real> masks) {
    if (s.query != kLearned) query_weights(s, masks, query_weight);
    for (int d = 0; d < s.dim; d++) {
      query[d] = s.query == kLearned ? splat<Real>(p.learned[d]) : V{};
      if (s.query == kLearned) continue;
      for (int n = 0; n < s.tokens; n++) query[d] += query_weight[n] * x(n, d);
    }
  }

  // result(h) = matrixᵀ vector, with the matrix's rows and vector's entries of head h.
  void transposed_product_by_head(const Real *matrix, const V *vector,
                                  View<Real> result) {
    const int width = s.dim / s.heads;
    for (int h = 0; h < s.heads; h++)
      transposed_product(matrix + h * width * s.dim, vector + h * width, &result(h, 0),
                         width, s.dim);
  }

  // result = matrixᵀ vector; the matrix is (rows, columns).
  static void transposed_product(const Real *matrix, const V *vector, V *result,
                                 int rows, int columns) {
    for (int i = 0; i < columns; i++) {
      result[i] = V{};
      for (int r = 0; r < rows; r++) result[i] += matrix[r * columns + i] * vector[r];
    }
  }
};

}  // namespace marl_pool
