// Attention of the tokens to each other, for one head and one block of rows.
//
// Queries are in units of ln 2 and scaled, so the weights are 2^(q k). Four ways:
//
// - Heads of width one, by moments. With e^z ≈ Σ_p c_p z^p for |z| <= R,
//       Σ_j e^{q k_j} v_j = Σ_p c_p q^p Σ_j k_j^p v_j,
//   so N² exponentials become 2 N P products. Keys are centered on the middle of their
//   range: then the largest term is at least 1 and nothing cancels.
// - Heads of width one, pair by pair, where R is too large.
// - Heads of width two to four, pair by pair.
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

template <class Real> struct WideHead {
  View<Real> query, key, value, out;
  Vector<Real> *peak, *inverse;  // kept for the gradient, for each query
};

template <class Real> struct KeyRange {
  Vector<Real> low, high, mean_value;
};

// 1 / total, or 0 for an empty row.
template <class Real, bool Padded> INLINE Vector<Real> inverse_of(Vector<Real> total) {
  if constexpr (!Padded) return reciprocal<Real>(total);
  const Vector<Real> inverse = reciprocal<Real>(larger(splat<Real>(kTiny<Real>), total));
  return total < kTiny<Real> ? Vector<Real>{} : inverse;
}

// Extend the range [low, high] by x where its token is present.
template <class Real, bool Padded>
INLINE void extend(Vector<Real> &low, Vector<Real> &high, Vector<Real> x,
                   const Vector<Real> *present, int token) {
  if constexpr (Padded) {
    low = smaller(low, present[token] > 0 ? x : splat<Real>(kHuge<Real>));
    high = larger(high, present[token] > 0 ? x : splat<Real>(-kHuge<Real>));
  } else {
    low = smaller(low, x);
    high = larger(high, x);
  }
}

// Center the keys on the middle of their range and the values on their mean, in place.
template <class Real, bool Padded>
INLINE KeyRange<Real> center(NarrowHead<Real> head, const Vector<Real> *present,
                             int tokens) {
  using V = Vector<Real>;
  V low = splat<Real>(kHuge<Real>), high = splat<Real>(-kHuge<Real>), sum{}, count{};
  for (int j = 0; j < tokens; j++) {
    extend<Real, Padded>(low, high, head.key[j], present, j);
    if constexpr (Padded) {
      sum += present[j] * head.value[j];
      count += present[j];
    } else {
      sum += head.value[j];
    }
  }
  V share = splat<Real>(Real(1) / tokens);
  if constexpr (Padded) {
    low = count > 0 ? low : V{};
    high = count > 0 ? high : V{};
    share = 1 / larger(count, splat<Real>(1));
  }
  const V mean = sum * share;
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
    UNROLL for (int p = 0; p <= P; p++) {
      moment[p] += power;
      with_value[p] += power * value;
      power *= key;
    }
  }
  UNROLL for (int p = 0; p <= P; p++) {
    moment[p] *= c[p];
    with_value[p] *= c[p];
  }
  // Both series at each query, and with Train their derivatives, by Horner's rule.
  for (int i = 0; i < tokens; i++) {
    const V q = head.query[i];
    V total = moment[P], sum = with_value[P], d_total{}, d_sum{};
    UNROLL for (int p = P - 1; p >= 0; p--) {
      if constexpr (Train) {
        d_total = d_total * q + total;
        d_sum = d_sum * q + sum;
      }
      total = total * q + moment[p];
      sum = sum * q + with_value[p];
    }
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
    UNROLL for (int p = 0; p <= P; p++) {
      plain[p] += power;
      by_mean[p] += power * mean;
      power *= q;
    }
  }
  UNROLL for (int p = 0; p <= P; p++) {
    plain[p] *= c[p];
    by_mean[p] *= c[p];
  }
  for (int j = 0; j < tokens; j++) {
    const V key = head.key[j];
    V sum = plain[P], d_sum{}, d_mean{}, mean = by_mean[P];
    UNROLL for (int p = P - 1; p >= 0; p--) {
      d_sum = d_sum * key + sum;
      d_mean = d_mean * key + mean;
      sum = sum * key + plain[p];
      mean = mean * key + by_mean[p];
    }
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

// ---- heads of width two to four, pair by pair

// Queries at a time, whose numbers fit in the registers.
constexpr int kPairQueries = kTokens / 2;

// Scores that may be further apart than this, in units of ln 2, need their exact maximum:
// beside the bound all weights could vanish.
template <class Real> constexpr Real kFarApart = Real(60);

template <class Real, int Width> struct KeyBox {
  Vector<Real> low[Width], high[Width];
};

// The smallest and the largest number of the present keys, 0 for an empty row.
template <class Real, int Width, bool Padded>
INLINE KeyBox<Real, Width> key_box(View<Real> key, const Vector<Real> *present,
                                   int tokens) {
  using V = Vector<Real>;
  KeyBox<Real, Width> box;
  UNROLL for (int d = 0; d < Width; d++) {
    V low = splat<Real>(kHuge<Real>), high = splat<Real>(-kHuge<Real>);
    for (int j = 0; j < tokens; j++)
      extend<Real, Padded>(low, high, key(j, d), present, j);
    box.low[d] = low > high ? V{} : low;
    box.high[d] = low > high ? V{} : high;
  }
  return box;
}

template <class Real, int Width>
INLINE Vector<Real> dot(const Vector<Real> (&a)[Width], View<Real> b, int n,
                        Vector<Real> sum) {
  UNROLL for (int d = 0; d < Width; d++) sum += a[d] * b(n, d);
  return sum;
}

// An upper bound of a query's scores: from the box of the keys where that is close enough
// for the weights not to vanish, else the largest score.
template <class Real, int Width, bool Padded>
INLINE Vector<Real> peak_of(const Vector<Real> (&query)[Width],
                            const KeyBox<Real, Width> &box, View<Real> key,
                            const Vector<Real> *present, int tokens) {
  using V = Vector<Real>;
  V bound{}, apart{};
  UNROLL for (int d = 0; d < Width; d++) {
    const V low = query[d] * box.low[d], high = query[d] * box.high[d];
    bound += larger(low, high);
    apart += magnitude<Real>(high - low);
  }
  const Bits<Real> far = !(apart <= kFarApart<Real>);  // also if NaN
  bool any = false;
  for (int lane = 0; lane < lanes<Real>; lane++) any |= far[lane] != 0;
  if (!any) return bound;
  // A row's peak must not depend on the other rows, so the others keep their bound.
  V largest = splat<Real>(-kHuge<Real>);
  for (int j = 0; j < tokens; j++) {
    V score = dot<Real, Width>(query, key, j, V{});
    if constexpr (Padded) score = present[j] > 0 ? score : splat<Real>(-kHuge<Real>);
    largest = larger(largest, score);
  }
  return far ? largest : bound;
}

template <class Real, int Width, bool Padded, bool Train>
void small_forward(WideHead<Real> head, const Vector<Real> *present, int tokens) {
  using V = Vector<Real>;
  const auto box = key_box<Real, Width, Padded>(head.key, present, tokens);
  split<kPairQueries>(0, tokens, [&](int i, auto queries) {
    constexpr int T = queries;
    V query[T][Width], peak[T], total[T] = {}, sum[T][Width] = {};
    UNROLL for (int t = 0; t < T; t++) {
      UNROLL for (int d = 0; d < Width; d++) query[t][d] = head.query(i + t, d);
      peak[t] = peak_of<Real, Width, Padded>(query[t], box, head.key, present, tokens);
    }
    for (int j = 0; j < tokens; j++) {
      UNROLL for (int t = 0; t < T; t++) {
        V score = dot<Real, Width>(query[t], head.key, j, -peak[t]);
        // Scores of absent tokens may be above the peak.
        if constexpr (Padded) score = smaller(V{}, score);
        V weight = exp2<Real>(score);
        if constexpr (Padded) weight *= present[j];
        total[t] += weight;
        UNROLL for (int d = 0; d < Width; d++) sum[t][d] += weight * head.value(j, d);
      }
    }
    UNROLL for (int t = 0; t < T; t++) {
      const V inverse = inverse_of<Real, Padded>(total[t]);
      UNROLL for (int d = 0; d < Width; d++) head.out(i + t, d) = sum[t][d] * inverse;
      if constexpr (Train) {
        head.peak[i + t] = peak[t];
        head.inverse[i + t] = inverse;
      }
    }
  });
}

// Gradients by query, key and value, given that of `out`.
template <class Real, int Width, bool Padded>
void small_backward(WideHead<Real> head, const Vector<Real> *present,
                    View<Real> gradient, WideHead<Real> result, int tokens) {
  using V = Vector<Real>;
  for (int j = 0; j < tokens; j++)
    UNROLL for (int d = 0; d < Width; d++) result.key(j, d) = result.value(j, d) = V{};
  split<kPairQueries>(0, tokens, [&](int i, auto queries) {
    constexpr int T = queries;
    // Both gradient and query with the factors that all pairs have.
    V query[T][Width], by_out[T][Width], for_query[T][Width] = {}, along[T] = {}, peak[T];
    UNROLL for (int t = 0; t < T; t++) {
      UNROLL for (int d = 0; d < Width; d++) {
        query[t][d] = head.query(i + t, d);
        by_out[t][d] = gradient(i + t, d) * head.inverse[i + t];
        along[t] += by_out[t][d] * head.out(i + t, d);
      }
      peak[t] = head.peak[i + t];
    }
    for (int j = 0; j < tokens; j++) {
      V for_key[Width], for_value[Width];
      UNROLL for (int d = 0; d < Width; d++) {
        for_key[d] = result.key(j, d);
        for_value[d] = result.value(j, d);
      }
      UNROLL for (int t = 0; t < T; t++) {
        V score = dot<Real, Width>(query[t], head.key, j, -peak[t]);
        if constexpr (Padded) score = smaller(V{}, score);
        V weight = exp2<Real>(score);
        if constexpr (Padded) weight *= present[j];
        const V slope = weight * dot<Real, Width>(by_out[t], head.value, j, -along[t]);
        UNROLL for (int d = 0; d < Width; d++) {
          for_query[t][d] += slope * head.key(j, d);
          for_key[d] += slope * query[t][d];
          for_value[d] += weight * by_out[t][d];
        }
      }
      UNROLL for (int d = 0; d < Width; d++) {
        result.key(j, d) = for_key[d];
        result.value(j, d) = for_value[d];
      }
    }
    UNROLL for (int t = 0; t < T; t++)
      UNROLL for (int d = 0; d < Width; d++)
        result.query(i + t, d) = for_query[t][d] * ln_2<Real>;
  });
  for (int j = 0; j < tokens; j++)
    UNROLL for (int d = 0; d < Width; d++) result.key(j, d) *= ln_2<Real>;
}

// Call f(width) with the width of a head as a constant; false if it has no code.
template <class F> INLINE bool with_width(int width, F &&f) {
  if (width == 2) return f(std::integral_constant<int, 2>{}), true;
  if (width == 3) return f(std::integral_constant<int, 3>{}), true;
  if (width == 4) return f(std::integral_constant<int, 4>{}), true;
  return false;
}

// ---- heads of any width

template <class Real> struct SoftmaxScale {
  Vector<Real> peak, inverse;  // the largest score and 1 / Σ weights
};

// Replace scores, in units of ln 2, by their softmax; by zeros for an empty row.
template <class Real, bool Padded>
INLINE SoftmaxScale<Real> softmax(Vector<Real> *score, const Vector<Real> *present,
                                  int tokens) {
  using V = Vector<Real>;
  V peak = splat<Real>(-kHuge<Real>), total{};
  for (int n = 0; n < tokens; n++) {
    if constexpr (Padded)
      score[n] = present[n] > 0 ? score[n] : splat<Real>(-kHuge<Real>);
    peak = larger(peak, score[n]);
  }
  for (int n = 0; n < tokens; n++) {
    score[n] = exp2<Real>(score[n] - peak);
    if constexpr (Padded) score[n] *= present[n];
    total += score[n];
  }
  const V inverse = inverse_of<Real, Padded>(total);
  for (int n = 0; n < tokens; n++) score[n] *= inverse;
  return {peak, inverse};
}

// `scratch` is kTokens x tokens.
template <class Real, bool Padded, bool Train>
void wide_forward(WideHead<Real> head, const Vector<Real> *present, int tokens,
                  int width, Vector<Real> *scratch) {
  const View<Real> keys = head.key.transposed();
  for (int i = 0; i < tokens; i += kTokens) {
    const int rows = tokens - i < kTokens ? tokens - i : kTokens;
    const View<Real> scores{scratch, tokens, 1};
    block_product(head.query.from_token(i), keys, scores, rows, width, tokens);
    for (int r = 0; r < rows; r++) {
      const auto scale = softmax<Real, Padded>(&scores(r, 0), present, tokens);
      if constexpr (Train) {
        head.peak[i + r] = scale.peak;
        head.inverse[i + r] = scale.inverse;
      }
    }
    block_product(scores, head.value, head.out.from_token(i), rows, tokens, width);
  }
}

// Queries of a tile, few enough for their weights to stay in the cache.
constexpr int kQueries = 16;

// `scratch` is 2 x kQueries x tokens.
template <class Real, bool Padded>
void wide_backward(WideHead<Real> head, const Vector<Real> *present,
                   View<Real> gradient, WideHead<Real> result, int tokens, int width,
                   Vector<Real> *scratch) {
  using V = Vector<Real>;
  const View<Real> weights{scratch, tokens, 1};
  const View<Real> for_scores{scratch + long(kQueries) * tokens, tokens, 1};
  for (int i = 0; i < tokens; i += kQueries) {
    const int rows = tokens - i < kQueries ? tokens - i : kQueries;
    const View<Real> query = head.query.from_token(i), by_out = gradient.from_token(i);
    block_product(query, head.key.transposed(), weights, rows, width, tokens);
    block_product(by_out, head.value.transposed(), for_scores, rows, width, tokens);
    for (int r = 0; r < rows; r++) {
      V along{};
      for (int d = 0; d < width; d++) along += by_out(r, d) * head.out(i + r, d);
      for (int j = 0; j < tokens; j++) {
        // Scores of absent tokens may be above the peak.
        const V score = smaller(V{}, weights(r, j) - head.peak[i + r]);
        V weight = exp2<Real>(score) * head.inverse[i + r];
        if constexpr (Padded) weight *= present[j];
        weights(r, j) = weight;
        for_scores(r, j) = weight * (for_scores(r, j) - along) * ln_2<Real>;
      }
    }
    block_product(for_scores, head.key, result.query.from_token(i), rows, tokens, width);
    // The tiles are added in the order of the queries.
    const auto add = i ? block_product<Real, true> : block_product<Real, false>;
    add(for_scores.transposed(), query, result.key, tokens, rows, width);
    add(weights.transposed(), by_out, result.value, tokens, rows, width);
  }
}

}  // namespace marl_pool
