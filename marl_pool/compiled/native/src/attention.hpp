// Self-attention of the tokens, for one head and one block of rows.
//
// Queries arrive scaled and multiplied by log2 e ("in units of ln 2"), so the weights of
// the softmax are 2^(q k). There are four algorithms:
//
// - Heads of width one, by moments. With 2^z ≈ Σ_p c_p z^p for |z| <= R / ln 2,
//       Σ_j 2^(q k_j) v_j ≈ Σ_p c_p q^p Σ_j k_j^p v_j,
//   so N² exponentials become 2 N P products. Keys are centered on the middle of their
//   range, so that the largest weight is at least 1 and the sum does not cancel.
// - Heads of width one, pair by pair, where the scores may be too large for that.
// - Heads of width two to four, pair by pair.
// - Wider heads, from a matrix of scores.
//
// An absent token (padding) has a weight of zero. The result of a row without tokens is
// zero.
#pragma once

#include "linear.hpp"

namespace marl_pool {

// Buffers of a head of width one, each a vector per token.
template <class Real> struct NarrowHead {
  Vector<Real> *query, *key, *value, *out;
  // For the backward pass: the peak subtracted from the scores, 1 / Σ weights,
  // d out / d query, and the weighted mean of the centered values.
  Vector<Real> *peak, *inverse, *slope, *mean;
};

template <class Real> struct WideHead {
  View<Real> query, key, value, out;
  Vector<Real> *peak, *inverse;  // for the backward pass, per query
};

template <class Real> struct KeyRange {
  Vector<Real> low, high, mean_value;
};

// 1 / total, or 0 for a row without tokens. It is not shortened for a block without
// padding: GCC would fuse other products there, and a row's last digits would depend on
// its neighbours' padding.
template <class Real> INLINE Vector<Real> safe_reciprocal(Vector<Real> total) {
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

// Center the keys on the middle of their range and the values on their mean, in place;
// those of absent tokens become 0.
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
  V inv_count = splat<Real>(Real(1) / tokens);
  if constexpr (Padded) {
    low = count > 0 ? low : V{};
    high = count > 0 ? high : V{};
    inv_count = 1 / larger(count, splat<Real>(1));
  }
  const V mean = sum * inv_count;
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
  for_tiles<2>(0, tokens, [&](int i, auto width) {
    constexpr int T = width;
    V query[T], peak[T], total[T] = {}, sum_value[T] = {}, sum_key[T] = {},
                                  sum_key_value[T] = {};
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
        sum_value[t] += weight * value;
        if constexpr (Train) {
          sum_key[t] += weight * key;
          sum_key_value[t] += weight * (key * value);
        }
      }
    }
    for (int t = 0; t < T; t++) {
      const V inverse = safe_reciprocal<Real>(total[t]);
      const V mean = sum_value[t] * inverse;
      head.out[i + t] = mean + range.mean_value;
      if constexpr (Train) {
        head.peak[i + t] = peak[t];
        head.inverse[i + t] = inverse;
        head.mean[i + t] = mean;
        head.slope[i + t] =
            (sum_key_value[t] - sum_key[t] * mean) * inverse * ln_2<Real>;
      }
    }
  });
}

// Gradients w.r.t. query, key and value, given that w.r.t. `out`; `scratch` is
// 3 x tokens.
template <class Real, bool Padded>
void pairs_backward(NarrowHead<Real> head, const Vector<Real> *present,
                    const Vector<Real> *gradient, NarrowHead<Real> result, int tokens,
                    Vector<Real> *scratch) {
  using V = Vector<Real>;
  V *scaled = scratch, *scaled_query = scratch + tokens;
  V *scaled_mean = scratch + 2 * tokens;
  for (int i = 0; i < tokens; i++) {
    result.query[i] = gradient[i] * head.slope[i];
    scaled[i] = gradient[i] * head.inverse[i];
    scaled_query[i] = scaled[i] * head.query[i] * ln_2<Real>;
    scaled_mean[i] = scaled_query[i] * head.mean[i];
  }
  for_tiles<2>(0, tokens, [&](int j, auto width) {
    constexpr int T = width;
    V key[T], sum[T] = {}, sum_query[T] = {}, sum_mean[T] = {};
    for (int t = 0; t < T; t++) key[t] = head.key[j + t];
    for (int i = 0; i < tokens; i++) {
      const V query = head.query[i], peak = head.peak[i];
      for (int t = 0; t < T; t++) {
        const V weight = exp2<Real>(query * key[t] - peak);
        sum[t] += weight * scaled[i];
        sum_query[t] += weight * scaled_query[i];
        sum_mean[t] += weight * scaled_mean[i];
      }
    }
    for (int t = 0; t < T; t++) {
      V d_key = head.value[j + t] * sum_query[t] - sum_mean[t], d_value = sum[t];
      if constexpr (Padded) {
        d_key *= present[j + t];
        d_value *= present[j + t];
      }
      result.key[j + t] = d_key;
      result.value[j + t] = d_value;
    }
  });
}

// ---- by moments; Series is an ExponentialSeries (polynomials.hpp)

template <class Real, class Series, bool Padded, bool Train>
void moments_forward(NarrowHead<Real> head, KeyRange<Real> range,
                     const Vector<Real> *present, int tokens) {
  using V = Vector<Real>;
  constexpr int P = Series::degree;
  constexpr auto &c = Series::coefficients;
  // Σ_j k_j^p and Σ_j k_j^p v_j.
  V moment[P + 1] = {}, value_moment[P + 1] = {};
  for (int j = 0; j < tokens; j++) {
    const V key = head.key[j], value = head.value[j];
    V power = Padded ? present[j] : splat<Real>(1);
    UNROLL for (int p = 0; p <= P; p++) {
      moment[p] += power;
      value_moment[p] += power * value;
      power *= key;
    }
  }
  UNROLL for (int p = 0; p <= P; p++) {
    moment[p] *= c[p];
    value_moment[p] *= c[p];
  }
  // Horner's rule for both polynomials, and with Train for their derivatives.
  for (int i = 0; i < tokens; i++) {
    const V q = head.query[i];
    V total = moment[P], sum = value_moment[P], d_total{}, d_sum{};
    UNROLL for (int p = P - 1; p >= 0; p--) {
      if constexpr (Train) {
        d_total = d_total * q + total;
        d_sum = d_sum * q + sum;
      }
      total = total * q + moment[p];
      sum = sum * q + value_moment[p];
    }
    const V inverse = safe_reciprocal<Real>(total), mean = sum * inverse;
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
  // Σ_i g_i / total_i q_i^p, and the same with each term times mean_i.
  V moment[P + 1] = {}, mean_moment[P + 1] = {};
  for (int i = 0; i < tokens; i++) {
    const V q = head.query[i], mean = head.mean[i];
    result.query[i] = gradient[i] * head.slope[i];
    V power = gradient[i] * head.inverse[i];
    UNROLL for (int p = 0; p <= P; p++) {
      moment[p] += power;
      mean_moment[p] += power * mean;
      power *= q;
    }
  }
  UNROLL for (int p = 0; p <= P; p++) {
    moment[p] *= c[p];
    mean_moment[p] *= c[p];
  }
  for (int j = 0; j < tokens; j++) {
    const V key = head.key[j];
    V sum = moment[P], d_sum{}, d_mean{}, mean = mean_moment[P];
    UNROLL for (int p = P - 1; p >= 0; p--) {
      d_sum = d_sum * key + sum;
      d_mean = d_mean * key + mean;
      sum = sum * key + moment[p];
      mean = mean * key + mean_moment[p];
    }
    V d_key = head.value[j] * d_sum - d_mean, d_value = sum;
    if constexpr (Padded) {
      d_key *= present[j];
      d_value *= present[j];
    }
    result.key[j] = d_key;
    result.value[j] = d_value;
  }
}

// Call f(series) with the series that covers a bound of `score_bounds`; false for 0.
template <class Real, class F> INLINE bool dispatch_series(int bound, F &&f) {
  if (bound == 1) return f(ExponentialSeries<Real, 1>{}), true;
  if (bound == 2) return f(ExponentialSeries<Real, 2>{}), true;
  if (bound == 4) return f(ExponentialSeries<Real, 4>{}), true;
  if (bound == 8) return f(ExponentialSeries<Real, 8>{}), true;
  return false;
}

// ---- heads of width two to four, pair by pair

// Queries of a register tile, whose sums stay in registers.
constexpr int kPairQueries = kTileTokens / 2;

// If a query's scores may spread over more than this, in units of ln 2, their exact
// maximum is needed: relative to the bound from the box, all weights could underflow.
template <class Real> constexpr Real kMaxSpread = Real(60);

template <class Real, int Width> struct KeyBox {
  Vector<Real> low[Width], high[Width];
};

// The bounding box of the present keys; 0 for a row without tokens.
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

// An upper bound of a query's scores: from the box of the keys where that is tight enough
// for the weights not to underflow, otherwise their maximum.
template <class Real, int Width, bool Padded>
INLINE Vector<Real> score_peak(const Vector<Real> (&query)[Width],
                            const KeyBox<Real, Width> &box, View<Real> key,
                            const Vector<Real> *present, int tokens) {
  using V = Vector<Real>;
  V bound{}, spread{};
  UNROLL for (int d = 0; d < Width; d++) {
    const V low = query[d] * box.low[d], high = query[d] * box.high[d];
    bound += larger(low, high);
    spread += magnitude<Real>(high - low);
  }
  const Bits<Real> far = !(spread <= kMaxSpread<Real>);  // also if NaN
  bool any_far = false;
  for (int lane = 0; lane < lanes<Real>; lane++) any_far |= far[lane] != 0;
  if (!any_far) return bound;
  // The other lanes keep their bound, so that a row's peak does not depend on other rows.
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
  for_tiles<kPairQueries>(0, tokens, [&](int i, auto queries) {
    constexpr int T = queries;
    V query[T][Width], peak[T], total[T] = {}, sum[T][Width] = {};
    UNROLL for (int t = 0; t < T; t++) {
      UNROLL for (int d = 0; d < Width; d++) query[t][d] = head.query(i + t, d);
      peak[t] = score_peak<Real, Width, Padded>(query[t], box, head.key, present, tokens);
    }
    for (int j = 0; j < tokens; j++) {
      UNROLL for (int t = 0; t < T; t++) {
        V score = dot<Real, Width>(query[t], head.key, j, -peak[t]);
        // Only scores of absent tokens exceed the peak by more than a rounding error, and
        // exp2 expects none above 127.
        if constexpr (Padded) score = smaller(splat<Real>(1), score);
        V weight = exp2<Real>(score);
        if constexpr (Padded) weight = present[j] > 0 ? weight : V{};
        total[t] += weight;
        UNROLL for (int d = 0; d < Width; d++) sum[t][d] += weight * head.value(j, d);
      }
    }
    UNROLL for (int t = 0; t < T; t++) {
      const V inverse = safe_reciprocal<Real>(total[t]);
      UNROLL for (int d = 0; d < Width; d++) head.out(i + t, d) = sum[t][d] * inverse;
      if constexpr (Train) {
        head.peak[i + t] = peak[t];
        head.inverse[i + t] = inverse;
      }
    }
  });
}

// Gradients w.r.t. query, key and value, given that w.r.t. `out`. With weights w and
// δ = d_out · out, d_score = w (d_out · value - δ).
template <class Real, int Width, bool Padded>
void small_backward(WideHead<Real> head, const Vector<Real> *present,
                    View<Real> gradient, WideHead<Real> result, int tokens) {
  using V = Vector<Real>;
  for (int j = 0; j < tokens; j++)
    UNROLL for (int d = 0; d < Width; d++) result.key(j, d) = result.value(j, d) = V{};
  for_tiles<kPairQueries>(0, tokens, [&](int i, auto queries) {
    constexpr int T = queries;
    // The weights are not normalized; d_out is divided by their sum instead.
    V query[T][Width], d_out[T][Width], d_query[T][Width] = {}, delta[T] = {}, peak[T];
    UNROLL for (int t = 0; t < T; t++) {
      UNROLL for (int d = 0; d < Width; d++) {
        query[t][d] = head.query(i + t, d);
        d_out[t][d] = gradient(i + t, d) * head.inverse[i + t];
        delta[t] += d_out[t][d] * head.out(i + t, d);
      }
      peak[t] = head.peak[i + t];
    }
    for (int j = 0; j < tokens; j++) {
      V d_key[Width], d_value[Width];
      UNROLL for (int d = 0; d < Width; d++) {
        d_key[d] = result.key(j, d);
        d_value[d] = result.value(j, d);
      }
      UNROLL for (int t = 0; t < T; t++) {
        V score = dot<Real, Width>(query[t], head.key, j, -peak[t]);
        // Only scores of absent tokens exceed the peak by more than a rounding error, and
        // exp2 expects none above 127.
        if constexpr (Padded) score = smaller(splat<Real>(1), score);
        V weight = exp2<Real>(score);
        if constexpr (Padded) weight = present[j] > 0 ? weight : V{};
        const V d_score = weight * dot<Real, Width>(d_out[t], head.value, j, -delta[t]);
        UNROLL for (int d = 0; d < Width; d++) {
          d_query[t][d] += d_score * head.key(j, d);
          d_key[d] += d_score * query[t][d];
          d_value[d] += weight * d_out[t][d];
        }
      }
      UNROLL for (int d = 0; d < Width; d++) {
        result.key(j, d) = d_key[d];
        result.value(j, d) = d_value[d];
      }
    }
    UNROLL for (int t = 0; t < T; t++)
      UNROLL for (int d = 0; d < Width; d++)
        result.query(i + t, d) = d_query[t][d] * ln_2<Real>;
  });
  for (int j = 0; j < tokens; j++)
    UNROLL for (int d = 0; d < Width; d++) result.key(j, d) *= ln_2<Real>;
}

// Call f(width) with a head's width as a compile-time constant; false if it is wider.
template <class F> INLINE bool dispatch_width(int width, F &&f) {
  if (width == 2) return f(std::integral_constant<int, 2>{}), true;
  if (width == 3) return f(std::integral_constant<int, 3>{}), true;
  if (width == 4) return f(std::integral_constant<int, 4>{}), true;
  return false;
}

// ---- heads of any width

template <class Real> struct SoftmaxScale {
  Vector<Real> peak, inverse;  // the largest score, and 1 / Σ weights
};

// Replace scores, in units of ln 2, by their softmax; by zeros in a row without tokens.
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
  const V inverse = safe_reciprocal<Real>(total);
  for (int n = 0; n < tokens; n++) score[n] *= inverse;
  return {peak, inverse};
}

// `scratch` is kTileTokens x tokens.
template <class Real, bool Padded, bool Train>
void wide_forward(WideHead<Real> head, const Vector<Real> *present, int tokens,
                  int width, Vector<Real> *scratch) {
  const View<Real> keys = head.key.transposed();
  for (int i = 0; i < tokens; i += kTileTokens) {
    const int rows = tokens - i < kTileTokens ? tokens - i : kTileTokens;
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

// Queries of a tile, few enough that their weights stay in the cache.
constexpr int kTileQueries = 16;

// `scratch` is 2 x kTileQueries x tokens.
template <class Real, bool Padded>
void wide_backward(WideHead<Real> head, const Vector<Real> *present,
                   View<Real> gradient, WideHead<Real> result, int tokens, int width,
                   Vector<Real> *scratch) {
  using V = Vector<Real>;
  const View<Real> weights{scratch, tokens, 1};
  const View<Real> d_scores{scratch + long(kTileQueries) * tokens, tokens, 1};
  for (int i = 0; i < tokens; i += kTileQueries) {
    const int rows = tokens - i < kTileQueries ? tokens - i : kTileQueries;
    const View<Real> query = head.query.from_token(i), d_out = gradient.from_token(i);
    block_product(query, head.key.transposed(), weights, rows, width, tokens);
    block_product(d_out, head.value.transposed(), d_scores, rows, width, tokens);
    for (int r = 0; r < rows; r++) {
      V delta{};
      for (int d = 0; d < width; d++) delta += d_out(r, d) * head.out(i + r, d);
      for (int j = 0; j < tokens; j++) {
        // Scores of absent tokens may exceed the peak, but exp2 expects none above 0.
        const V score = smaller(V{}, weights(r, j) - head.peak[i + r]);
        V weight = exp2<Real>(score) * head.inverse[i + r];
        if constexpr (Padded) weight *= present[j];
        weights(r, j) = weight;
        d_scores(r, j) = weight * (d_scores(r, j) - delta) * ln_2<Real>;
      }
    }
    block_product(d_scores, head.key, result.query.from_token(i), rows, tokens, width);
    // The first tile of queries overwrites the gradients, the others add to them.
    const auto add = i ? block_product<Real, true> : block_product<Real, false>;
    add(d_scores.transposed(), query, result.key, tokens, rows, width);
    add(weights.transposed(), d_out, result.value, tokens, rows, width);
  }
}

}  // namespace marl_pool
