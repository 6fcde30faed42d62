// Pooling heads: from the encoder's vectors to one vector for each row.
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

// What a block knows of its tokens, a vector for each.
template <class Real> struct TokenMarks {
  const Vector<Real> *present;  // 1 or 0
  const Vector<Real> *own;      // 1 for present tokens of the observer's own type
};

// Avg, sum and the first token are weighted sums with fixed weights.
template <class Real>
INLINE void fixed_weights(const PoolingSizes &s, TokenMarks<Real> marks,
                          Vector<Real> *weights) {
  using V = Vector<Real>;
  V count{};
  for (int n = 0; n < s.tokens; n++) count += marks.present[n];
  const V share = 1 / larger(count, splat<Real>(1));
  for (int n = 0; n < s.tokens; n++) {
    if (s.kind == kFirst)
      weights[n] = n == 0 ? splat<Real>(1) : V{};
    else
      weights[n] = s.kind == kAvg ? marks.present[n] * share : marks.present[n];
  }
}

// The weights of the tokens in AdaPool's query: the mean of the observer's own tokens,
// or of all where there is none.
template <class Real>
INLINE void query_weights(const PoolingSizes &s, TokenMarks<Real> marks,
                          Vector<Real> *weights) {
  using V = Vector<Real>;
  V own{}, present{};
  for (int n = 0; n < s.tokens; n++) {
    own += marks.own[n];
    present += marks.present[n];
  }
  const bool by_type = s.query == kSelf;
  for (int n = 0; n < s.tokens; n++) {
    const V mean = marks.present[n] / larger(present, splat<Real>(1));
    const V of_own = marks.own[n] / larger(own, splat<Real>(1));
    weights[n] = by_type ? (own > 0 ? of_own : mean) : mean;
  }
}

template <class Real> struct AdaParameters {
  Real *query, *key, *value, *out, *learned;  // (D, D) each; (D,) or null
};

// AdaPool for one block. Scores are x · (W_Kᵀ q), and values are projected after the
// weighted sum, so that no token has to be projected.
template <class Real> struct AdaPool {
  using V = Vector<Real>;
  using Parameters = AdaParameters<const Real>;

  PoolingSizes s;
  // Kept for the gradient.
  V *query_weight, *query, *projected, *pooled, *any;
  View<Real> direction, weight, mean;  // (H, D), (H, N), (H, D)
  // Memory of the gradient.
  View<Real> for_score, for_mean, for_direction;
  V *for_result, *for_query, *for_projected, *for_pooled;

  template <class Arena> AdaPool(Arena &arena, const PoolingSizes &sizes) : s(sizes) {
    const long D = s.dim, H = s.heads, N = s.tokens;
    query_weight = arena.take(N);
    any = arena.take(1);
    for (V **each : {&query, &projected, &pooled, &for_result, &for_query, &for_projected,
                     &for_pooled})
      *each = arena.take(D);
    for (View<Real> *each : {&direction, &mean, &for_mean, &for_direction})
      *each = {arena.take(H * D), D, 1};
    for (View<Real> *each : {&weight, &for_score}) *each = {arena.take(H * N), N, 1};
  }

  void forward(const Parameters &p, View<Real> x, TokenMarks<Real> marks, V *result) {
    const int D = s.dim, N = s.tokens;
    *any = V{};
    for (int n = 0; n < N; n++) *any = larger(*any, marks.present[n]);
    find_query(p, x, marks);
    // W_Kᵀ q, head by head, and the softmax of the scores.
    linear<Real, false>(row(query), p.query, D, nullptr, row(projected), 1, D, D);
    for (int c = 0; c < D; c++) projected[c] *= Real(s.scale * log2_e<double>);
    by_head(p.key, projected, direction);
    block_product(direction, x.transposed(), weight, s.heads, D, N);
    for (int h = 0; h < s.heads; h++)
      softmax<Real, true>(&weight(h, 0), marks.present, N);
    // The values of the weighted mean.
    block_product(weight, x, mean, s.heads, N, D);
    const int width = D / s.heads;
    for (int h = 0; h < s.heads; h++)
      linear<Real, false>(row(&mean(h, 0)), p.value + h * width * D, D, nullptr,
                          row(pooled + h * width), 1, D, width);
    linear<Real, false>(row(pooled), p.out, D, nullptr, row(result), 1, D, D);
    for (int d = 0; d < D; d++) {
      if (s.residual) result[d] += query[d];
      result[d] = *any > 0 ? result[d] : V{};
    }
  }

  // dx = the gradient by x, given that by the result.
  void backward(const Parameters &p, AdaParameters<Real> g, View<Real> x,
                const V *gradient, View<Real> dx) {
    const int D = s.dim, N = s.tokens, width = D / s.heads;
    for (int d = 0; d < D; d++) {
      for_result[d] = *any > 0 ? gradient[d] : V{};
      for_query[d] = s.residual ? for_result[d] : V{};
    }
    // Through the projections of the result and of the values.
    weight_gradient(row(for_result), row(pooled), g.out, D, 1, D, D);
    product_transposed(p.out, for_result, for_pooled, D, D);
    by_head(p.value, for_pooled, for_mean);
    for (int h = 0; h < s.heads; h++)
      weight_gradient(row(for_pooled + h * width), row(&mean(h, 0)),
                      g.value + h * width * D, D, 1, width, D);
    // Through the softmax.
    block_product(for_mean, x.transposed(), for_score, s.heads, D, N);
    for (int h = 0; h < s.heads; h++) {
      V along{};
      for (int d = 0; d < D; d++) along += for_mean(h, d) * mean(h, d);
      for (int n = 0; n < N; n++)
        for_score(h, n) = weight(h, n) * (for_score(h, n) - along) * ln_2<Real>;
    }
    block_product(weight.transposed(), for_mean, dx, N, s.heads, D);
    block_product<Real, true>(for_score.transposed(), direction, dx, N, s.heads, D);
    // Through the directions to the query.
    block_product(for_score, x, for_direction, s.heads, N, D);
    for (int h = 0; h < s.heads; h++) {
      const int first = h * width;
      weight_gradient(row(projected + first), row(&for_direction(h, 0)),
                      g.key + first * D, D, 1, width, D);
      linear<Real, false>(row(&for_direction(h, 0)), p.key + first * D, D, nullptr,
                          row(for_projected + first), 1, D, width);
    }
    for (int c = 0; c < D; c++) for_projected[c] *= Real(s.scale * log2_e<double>);
    weight_gradient(row(for_projected), row(query), g.query, D, 1, D, D);
    product_transposed(p.query, for_projected, pooled, D, D);
    for (int d = 0; d < D; d++) for_query[d] += pooled[d];
    if (s.query == kLearned) {
      bias_gradient(row(for_query), g.learned, 1, D);
      return;
    }
    for (int d = 0; d < D; d++)
      for (int n = 0; n < N; n++) dx(n, d) += query_weight[n] * for_query[d];
  }

private:
  static View<Real> row(V *at) { return {at, 0, 1}; }

  void find_query(const Parameters &p, View<Real> x, TokenMarks<Real> marks) {
    if (s.query != kLearned) query_weights(s, marks, query_weight);
    for (int d = 0; d < s.dim; d++) {
      query[d] = s.query == kLearned ? splat<Real>(p.learned[d]) : V{};
      if (s.query == kLearned) continue;
      for (int n = 0; n < s.tokens; n++) query[d] += query_weight[n] * x(n, d);
    }
  }

  // result(h) = Σ over the features c of head h of weight(c) · vector[c].
  void by_head(const Real *weight_, const V *vector, View<Real> result) {
    const int width = s.dim / s.heads;
    for (int h = 0; h < s.heads; h++)
      product_transposed(weight_ + h * width * s.dim, vector + h * width, &result(h, 0),
                         width, s.dim);
  }

  // result = weightᵀ vector, weight (rows, columns).
  static void product_transposed(const Real *weight_, const V *vector, V *result,
                                 int rows, int columns) {
    for (int i = 0; i < columns; i++) {
      result[i] = V{};
      for (int r = 0; r < rows; r++) result[i] += weight_[r * columns + i] * vector[r];
    }
  }
};

}  // namespace marl_pool
