// Attention of the tokens to each other, for one head and one block of rows.
//
// Queries are in units of ln 2 and scaled, so the weights are 2^(q k). Three ways:
//
// - Heads of width one, by moments. With e^z ≈ Σ_p c_p z^p for |z| <= R,
//       Σ_j e^{q k_j} v_j = Σ_p c_p q^p Σ_j k_j^p v_j,
//   so N² exponentials become 2 N P products. Keys are centered on the middle of their
//   range: then the largest term is at least 1 and nothing cancels.
// - Heads of width one, pair by pair, where R is too large.
// - Wider heads, by a matrix of scores.
//
// An absent token (padding) has the weight zero. A row without tokens gives zero.
#pragma once

#include "linear.hpp"

namespace marl_pool {

// What one head of width one reads and keeps, a vector for each token.
template <class Real> struct NarrowHead {
  Vector<Real> *query, *key, *value, *out;
  // Kept for the gradient: the largest score, 1 / Σ weights, the slope d out / d query
  // and the mean of the centered values.
  Vector<Real> *peak, *inverse, *slope, *mean;
};

template <class Real> struct KeyRange {
  Vector<Real> low, high, mean_value;
};

// Numbers below which a sum of weights counts as that of an empty row.
template <class Real> constexpr Real kTiny = Real(1e-30);
template <class Real> constexpr Real kHuge = Real(1e30);

// 1 / total, or 0 for an empty row.
template <class Real, bool Padded> INLINE Vector<Real> inverse_of(Vector<Real> total) {
  if constexpr (!Padded) return 1 / total;
  const Vector<Real> safe = larger(total, splat<Real>(kTiny<Real>));
  return total > kTiny<Real> ? 1 / safe : Vector<Real>{};
}

// Center the keys on the middle of their range and the values on their mean, in place.
template <class Real, bool Padded>
INLINE KeyRange<Real> center(NarrowHead<Real> head, const Vector<Real> *present,
                             int tokens) {
  using V = Vector<Real>;
  V low = splat<Real>(kHuge<Real>), high = splat<Real>(-kHuge<Real>), sum{}, count{};
  for (int j = 0; j < tokens; j++) {
    const V key = head.key[j];
    if constexpr (Padded) {
      low = smaller(low, present[j] > 0 ? key : splat<Real>(kHuge<Real>));
      high = larger(high, present[j] > 0 ? key : splat<Real>(-kHuge<Real>));
      sum += present[j] * head.value[j];
      count += present[j];
    } else {
      low = smaller(low, key);
      high = larger(high, key);
      sum += head.value[j];
    }
  }
  V mean = sum * (Real(1) / tokens);
  if constexpr (Padded) {
    low = count > 0 ? low : V{};
    high = count > 0 ? high : V{};
    mean = sum / larger(count, splat<Real>(1));
  }
  const V middle = (low + high) * Real(0.5);
  for (int j = 0; j < tokens; j++) {
    head.key[j] -= middle;
    head.value[j] -= mean;
    if constexpr (Padded) {
      head.key[j] *= present[j];
      head.value[j] *= present[j];
    }
  }
  return {low - middle, high - middle, mean};
}

// ---- pair by pair

template <class Real, bool Padded, bool Train>
void pairs_forward(NarrowHead<Real> head, KeyRange<Real> range,
                   const Vector<Real> *present, int tokens) {
  using V = Vector<Real>;
  split<2>(0, tokens, [&](int i, auto width) {
    constexpr int T = width;
    V query[T], peak[T], total[T] = {}, with_value[T] = {}, with_key[T] = {},
                                  with_both[T] = {};
    for (int t = 0; t < T; t++) {
      query[t] = head.query[i + t];
      peak[t] = larger(query[t] * range.low, query[t] * range.high);
    }
    for (int j = 0; j < tokens; j++) {
      const V key = head.key[j], value = head.value[j];
      for (int t = 0; t < T; t++) {
        V weight = exp2<Real>(query[t] * key - peak[t]);
        if constexpr (Padded) weight *= present[j];
        total[t] += weight;
        with_value[t] += weight * value;
        if constexpr (Train) {
          with_key[t] += weight * key;
          with_both[t] += weight * (key * value);
        }
      }
    }
    for (int t = 0; t < T; t++) {
      const V inverse = inverse_of<Real, Padded>(total[t]);
      const V mean = with_value[t] * inverse;
      head.out[i + t] = mean + range.mean_value;
      if constexpr (Train) {
        head.peak[i + t] = peak[t];
        head.inverse[i + t] = inverse;
        head.mean[i + t] = mean;
        head.slope[i + t] =
            (with_both[t] - with_key[t] * mean) * inverse * ln_2<Real>;
      }
    }
  });
}

// Gradients by query, key and value, given that of `out`; `scratch` is 3 x tokens.
template <class Real, bool Padded>
void pairs_backward(NarrowHead<Real> head, const Vector<Real> *present,
                    const Vector<Real> *gradient, NarrowHead<Real> result, int tokens,
                    Vector<Real> *scratch) {
  using V = Vector<Real>;
  V *plain = scratch, *by_query = scratch + tokens, *by_mean = scratch + 2 * tokens;
  for (int i = 0; i < tokens; i++) {
    result.query[i] = gradient[i] * head.slope[i];
    plain[i] = gradient[i] * head.inverse[i];
    by_query[i] = plain[i] * head.query[i] * ln_2<Real>;
    by_mean[i] = by_query[i] * head.mean[i];
  }
  split<2>(0, tokens, [&](int j, auto width) {
    constexpr int T = width;
    V key[T], sum[T] = {}, sum_query[T] = {}, sum_mean[T] = {};
    for (int t = 0; t < T; t++) key[t] = head.key[j + t];
    for (int i = 0; i < tokens; i++) {
      const V query = head.query[i], peak = head.peak[i];
      for (int t = 0; t < T; t++) {
        const V weight = exp2<Real>(query * key[t] - peak);
        sum[t] += weight * plain[i];
        sum_query[t] += weight * by_query[i];
        sum_mean[t] += weight * by_mean[i];
      }
    }
    for (int t = 0; t < T; t++) {
      V for_key = head.value[j + t] * sum_query[t] - sum_mean[t], for_value = sum[t];
      if constexpr (Padded) {
        for_key *= present[j + t];
        for_value *= present[j + t];
      }
      result.key[j + t] = for_key;
      result.value[j + t] = for_value;
    }
  });
}

// ---- by moments; Series is an ExponentialSeries

template <class Real, class Series, bool Padded, bool Train>
void moments_forward(NarrowHead<Real> head, KeyRange<Real> range,
                     const Vector<Real> *present, int tokens) {
  using V = Vector<Real>;
  constexpr int P = Series::degree;
  constexpr auto &c = Series::coefficients;
  // Σ_j k_j^p and Σ_j k_j^p v_j.
  V moment[P + 1] = {}, with_value[P + 1] = {};
  for (int j = 0; j < tokens; j++) {
    const V key = head.key[j], value = head.value[j];
    V power = Padded ? present[j] : splat<Real>(1);
    unroll<P + 1>([&](auto p) {
      moment[p] += power;
      with_value[p] += power * value;
      power *= key;
    });
  }
  unroll<P + 1>([&](auto p) {
    moment[p] *= c[p];
    with_value[p] *= c[p];
  });
  // Both series at each query, and with Train their derivatives, by Horner's rule.
  for (int i = 0; i < tokens; i++) {
    const V q = head.query[i];
    V total = moment[P], sum = with_value[P], d_total{}, d_sum{};
    unroll<P>([&](auto step) {
      constexpr int p = P - 1 - step;
      if constexpr (Train) {
        d_total = d_total * q + total;
        d_sum = d_sum * q + sum;
      }
      total = total * q + moment[p];
      sum = sum * q + with_value[p];
    });
    const V inverse = inverse_of<Real, Padded>(total), mean = sum * inverse;
    head.out[i] = mean + range.mean_value;
    if constexpr (Train) {
      head.inverse[i] = inverse;
      head.mean[i] = mean;
      head.slope[i] = (d_sum - mean * d_total) * inverse;
    }
  }
}

template <class Real, class Series, bool Padded>
void moments_backward(NarrowHead<Real> head, const Vector<Real> *present,
                      const Vector<Real> *gradient, NarrowHead<Real> result,
                      int tokens) {
  using V = Vector<Real>;
  constexpr int P = Series::degree;
  constexpr auto &c = Series::coefficients;
  // Σ_i g_i / total_i q_i^p, and the same times the mean value of query i.
  V plain[P + 1] = {}, by_mean[P + 1] = {};
  for (int i = 0; i < tokens; i++) {
    const V q = head.query[i], mean = head.mean[i];
    result.query[i] = gradient[i] * head.slope[i];
    V power = gradient[i] * head.inverse[i];
    unroll<P + 1>([&](auto p) {
      plain[p] += power;
      by_mean[p] += power * mean;
      power *= q;
    });
  }
  unroll<P + 1>([&](auto p) {
    plain[p] *= c[p];
    by_mean[p] *= c[p];
  });
  for (int j = 0; j < tokens; j++) {
    const V key = head.key[j];
    V sum = plain[P], d_sum{}, d_mean{}, mean = by_mean[P];
    unroll<P>([&](auto step) {
      constexpr int p = P - 1 - step;
      d_sum = d_sum * key + sum;
      d_mean = d_mean * key + mean;
      sum = sum * key + plain[p];
      mean = mean * key + by_mean[p];
    });
    V for_key = head.value[j] * d_sum - d_mean, for_value = sum;
    if constexpr (Padded) {
      for_key *= present[j];
      for_value *= present[j];
    }
    result.key[j] = for_key;
    result.value[j] = for_value;
  }
}

// Call f(series) with the series for a bound of the scores; false if it is too large.
template <class Real, class F> INLINE bool with_series(int bound, F &&f) {
  if (bound == 1) return f(ExponentialSeries<Real, 1>{}), true;
  if (bound == 2) return f(ExponentialSeries<Real, 2>{}), true;
  if (bound == 4) return f(ExponentialSeries<Real, 4>{}), true;
  if (bound == 8) return f(ExponentialSeries<Real, 8>{}), true;
  return false;
}

// ---- heads of any width

template <class Real> struct WideHead {
  View<Real> query, key, value, out;
  Vector<Real> *peak, *inverse;  // kept for the gradient, for each query
};

// `scratch` is kTokens x tokens.
template <class Real, bool Padded, bool Train>
void wide_forward(WideHead<Real> head, const Vector<Real> *present, int tokens,
                  int width, Vector<Real> *scratch) {
  using V = Vector<Real>;
  const View<Real> keys{head.key.at, head.key.feature, head.key.token};  // transposed
  for (int i = 0; i < tokens; i += kTokens) {
    const int rows = tokens - i < kTokens ? tokens - i : kTokens;
    const View<Real> scores{scratch, tokens, 1};
    block_product(head.query.from_token(i), keys, scores, rows, width, tokens);
    for (int r = 0; r < rows; r++) {
      V *score = scratch + r * tokens;
      V peak = splat<Real>(-kHuge<Real>), total{};
      for (int j = 0; j < tokens; j++) {
        if constexpr (Padded)
          score[j] = present[j] > 0 ? score[j] : splat<Real>(-kHuge<Real>);
        peak = larger(peak, score[j]);
      }
      for (int j = 0; j < tokens; j++) {
        score[j] = exp2<Real>(score[j] - peak);
        if constexpr (Padded) score[j] *= present[j];
        total += score[j];
      }
      const V inverse = inverse_of<Real, Padded>(total);
      for (int j = 0; j < tokens; j++) score[j] *= inverse;
      if constexpr (Train) {
        head.peak[i + r] = peak;
        head.inverse[i + r] = inverse;
      }
    }
    block_product(scores, head.value, head.out.from_token(i), rows, tokens, width);
  }
}

// `scratch` is 2 x tokens x tokens.
template <class Real, bool Padded>
void wide_backward(WideHead<Real> head, const Vector<Real> *present,
                   View<Real> gradient, WideHead<Real> result, int tokens, int width,
                   Vector<Real> *scratch) {
  using V = Vector<Real>;
  const auto transposed = [](View<Real> x) { return View<Real>{x.at, x.feature, x.token}; };
  const View<Real> weights{scratch, tokens, 1};
  const View<Real> for_scores{scratch + long(tokens) * tokens, tokens, 1};
  block_product(head.query, transposed(head.key), weights, tokens, width, tokens);
  block_product(gradient, transposed(head.value), for_scores, tokens, width, tokens);
  for (int i = 0; i < tokens; i++) {
    V along{};
    for (int d = 0; d < width; d++) along += gradient(i, d) * head.out(i, d);
    for (int j = 0; j < tokens; j++) {
      // Scores of absent tokens may be above the peak.
      const V score = smaller(weights(i, j) - head.peak[i], V{});
      V weight = exp2<Real>(score) * head.inverse[i];
      if constexpr (Padded) weight *= present[j];
      weights(i, j) = weight;
      for_scores(i, j) = weight * (for_scores(i, j) - along) * ln_2<Real>;
    }
  }
  block_product(for_scores, head.key, result.query, tokens, tokens, width);
  block_product(transposed(for_scores), head.query, result.key, tokens, tokens, width);
  block_product(transposed(weights), gradient, result.value, tokens, tokens, width);
}

}  // namespace marl_pool
