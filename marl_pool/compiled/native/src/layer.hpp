// One layer of a pre-norm transformer:
//     x += attention(norm(x)),  x += dropout(W₂ φ(W₁ norm(x) + b₁) + b₂).
#pragma once

#include "attention.hpp"
#include "norm.hpp"

namespace marl_pool {

struct LayerSizes {
  int tokens, stride, dim, heads, dim_ff;  // stride between features
  Activation activation;
  double scale, dropout;
};

// Weights of a layer with the LayerNorms folded in, or their gradients. Those of the
// queries include the scale of the scores and log2 e.
template <class Real> struct LayerArrays {
  Real *qkv, *qkv_bias, *out, *up, *up_bias, *down, *down_bias;

  static long size(long dim, long dim_ff) {
    return 4 * dim * dim + 3 * dim + 2 * dim * dim_ff + dim_ff + dim;
  }
  LayerArrays(Real *base, long dim, long dim_ff) {
    qkv = base;
    qkv_bias = qkv + 3 * dim * dim;
    out = qkv_bias + 3 * dim;
    up = out + dim * dim;
    up_bias = up + dim_ff * dim;
    down = up_bias + dim_ff;
    down_bias = down + dim * dim_ff;
  }
};

// The same transposed, for the gradients w.r.t. the inputs.
template <class Real> struct LayerTransposes {
  Real *qkv, *out, *up, *down;

  LayerTransposes(Real *base, long dim, long dim_ff) {
    qkv = base;
    out = qkv + 3 * dim * dim;
    up = out + dim * dim;
    down = up + dim_ff * dim;
  }
};

// Pointers to the parameters of a layer, in the order in which Python passes them.
template <class Real> struct LayerParameters {
  static constexpr int count = 12;
  Real *norm1, *norm1_bias, *query, *key, *value, *out;
  Real *norm2, *norm2_bias, *up, *up_bias, *down, *down_bias;

  explicit LayerParameters(Real *const *p)
      : norm1(p[0]), norm1_bias(p[1]), query(p[2]), key(p[3]), value(p[4]), out(p[5]),
        norm2(p[6]), norm2_bias(p[7]), up(p[8]), up_bias(p[9]), down(p[10]),
        down_bias(p[11]) {}
};

template <class Real>
void transpose(const Real *from, Real *to, long rows, long columns) {
  for (long r = 0; r < rows; r++)
    for (long c = 0; c < columns; c++) to[c * rows + r] = from[r * columns + c];
}

// Fold a LayerNorm's weight g and bias b into the product that follows: W (x̂ g + b) + c,
// times a factor.
template <class Real>
void fold_rows(const Real *weight, const Real *bias, const Real *norm,
               const Real *norm_bias, double factor, Real *folded, Real *folded_bias,
               long outputs, long inputs) {
  for (long o = 0; o < outputs; o++) {
    double sum = bias ? bias[o] : 0;
    for (long i = 0; i < inputs; i++) {
      const double w = weight[o * inputs + i];
      sum += w * norm_bias[i];
      folded[o * inputs + i] = Real(factor * w * norm[i]);
    }
    folded_bias[o] = Real(factor * sum);
  }
}

// The chain rule of `fold_rows`; adds to d_norm and d_norm_bias, and sets the others.
template <class Real>
void unfold_rows(const Real *weight, const Real *norm, const Real *norm_bias,
                 double factor, const Real *d_folded, const Real *d_folded_bias,
                 Real *d_weight, Real *d_bias, double *d_norm, double *d_norm_bias,
                 long outputs, long inputs) {
  for (long o = 0; o < outputs; o++) {
    const double db = factor * d_folded_bias[o];
    if (d_bias) d_bias[o] = Real(db);
    for (long i = 0; i < inputs; i++) {
      const double dw = factor * d_folded[o * inputs + i];
      const double w = weight[o * inputs + i];
      d_weight[o * inputs + i] = Real(dw * norm[i] + db * norm_bias[i]);
      d_norm[i] += dw * w;
      d_norm_bias[i] += db * w;
    }
  }
}

template <class Real>
void fold_layer(const LayerParameters<const Real> &p, LayerArrays<Real> f,
                LayerTransposes<Real> t, const LayerSizes &s) {
  const long D = s.dim, FF = s.dim_ff;
  const double to_log2 = s.scale * log2_e<double>;
  const Real *parts[] = {p.query, p.key, p.value};
  for (int part = 0; part < 3; part++)
    fold_rows<Real>(parts[part], nullptr, p.norm1, p.norm1_bias, part ? 1 : to_log2,
                    f.qkv + part * D * D, f.qkv_bias + part * D, D, D);
  fold_rows(p.up, p.up_bias, p.norm2, p.norm2_bias, 1, f.up, f.up_bias, FF, D);
  std::memcpy(f.out, p.out, D * D * sizeof(Real));
  std::memcpy(f.down, p.down, D * FF * sizeof(Real));
  std::memcpy(f.down_bias, p.down_bias, D * sizeof(Real));
  transpose(f.qkv, t.qkv, 3 * D, D);
  transpose(f.out, t.out, D, D);
  transpose(f.up, t.up, FF, D);
  transpose(f.down, t.down, D, FF);
}

// The gradients of the parameters from those of the folded weights.
template <class Real>
void unfold_layer(const LayerParameters<const Real> &p, LayerArrays<Real> g,
                  const LayerParameters<Real> &result, const LayerSizes &s) {
  const long D = s.dim, FF = s.dim_ff;
  const double to_log2 = s.scale * log2_e<double>;
  const Real *parts[] = {p.query, p.key, p.value};
  Real *results[] = {result.query, result.key, result.value};
  std::vector<double> norm(2 * D), norm2(2 * D);
  for (int part = 0; part < 3; part++)
    unfold_rows<Real>(parts[part], p.norm1, p.norm1_bias, part ? 1 : to_log2,
                      g.qkv + part * D * D, g.qkv_bias + part * D, results[part], nullptr,
                      norm.data(), norm.data() + D, D, D);
  unfold_rows(p.up, p.norm2, p.norm2_bias, 1, g.up, g.up_bias, result.up, result.up_bias,
              norm2.data(), norm2.data() + D, FF, D);
  for (long d = 0; d < D; d++) {
    result.norm1[d] = Real(norm[d]);
    result.norm1_bias[d] = Real(norm[D + d]);
    result.norm2[d] = Real(norm2[d]);
    result.norm2_bias[d] = Real(norm2[D + d]);
  }
  std::memcpy(result.out, g.out, D * D * sizeof(Real));
  std::memcpy(result.down, g.down, D * FF * sizeof(Real));
  std::memcpy(result.down_bias, g.down_bias, D * sizeof(Real));
}

// For each head of width one, the range R of the ExponentialSeries that covers its
// scores; 0 if none does. The bound of |q k| follows from the weights alone, so that a
// row's result does not depend on other rows: a normalized vector has a norm of at most
// √D and is orthogonal to the vector of ones, and as keys are centered, their bias does
// not matter. Heads with large queries or keys also get 0, whatever the product, since
// powers of them would overflow.
template <class Real>
void score_bounds(LayerArrays<Real> f, const LayerSizes &s, int *bounds) {
  // The maximum of |row · x̂|.
  const auto max_product = [&](const Real *row) {
    double mean = 0, square = 0;
    for (int d = 0; d < s.dim; d++) mean += row[d] / double(s.dim);
    for (int d = 0; d < s.dim; d++) square += (row[d] - mean) * (row[d] - mean);
    return std::sqrt(square * s.dim);
  };
  for (int h = 0; h < s.heads; h++) {
    const double query = max_product(f.qkv + h * s.dim) + std::abs(double(f.qkv_bias[h]));
    const double key = max_product(f.qkv + (s.dim + h) * s.dim);
    const double bound = query * key * ln_2<double> * 1.001;  // margin for rounding
    const bool balanced = query <= 16 && key <= 16;
    bounds[h] = 0;
    for (const int range : {8, 4, 2, 1})
      if (balanced && bound <= range) bounds[h] = range;
  }
}

// Activations of a layer, kept for its backward pass.
template <class Real> struct LayerState {
  View<Real> normed1, qkv, mixed, normed2, hidden, slope;
  Vector<Real> *scale1, *scale2;
  // `stride` vectors for each head: see NarrowHead and WideHead.
  Vector<Real> *peak, *inverse, *query_slope, *mean;

  template <class Arena> LayerState(Arena &arena, const LayerSizes &s) {
    const long D = s.dim, LD = s.stride, N = s.tokens, FF = s.dim_ff;
    normed1 = arena.by_feature(D, LD);
    qkv = arena.by_feature(3 * D, LD);
    mixed = arena.by_feature(D, LD);
    normed2 = arena.by_feature(D, LD);
    hidden = {arena.take(N * FF), FF, 1};
    slope = {arena.take(N * FF), FF, 1};
    scale1 = arena.take(N);
    scale2 = arena.take(N);
    const long H = s.heads;
    peak = arena.take(H * LD);
    inverse = arena.take(H * LD);
    query_slope = arena.take(H * LD);
    mean = arena.take(H * LD);
  }

  NarrowHead<Real> narrow(int h, const LayerSizes &s) const {
    const long LD = s.stride;
    return {&qkv(0, h),       &qkv(0, s.dim + h), &qkv(0, 2 * s.dim + h), &mixed(0, h),
            peak + h * LD,    inverse + h * LD,   query_slope + h * LD,   mean + h * LD};
  }
  WideHead<Real> wide(int h, const LayerSizes &s) const {
    const int first = h * (s.dim / s.heads);
    return {qkv.from_feature(first), qkv.from_feature(s.dim + first),
            qkv.from_feature(2 * s.dim + first), mixed.from_feature(first),
            peak + h * s.stride, inverse + h * s.stride};
  }
};

// The finalizer of MurmurHash3 (public domain). Dropout's random bits are hashes of a
// seed and a counter, so the backward pass samples the same mask again, on any thread.
INLINE uint64_t fmix64(uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
  x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return x ^ (x >> 33);
}

// 1 / (1 - p) where a feature is kept, 0 where it is dropped. `position` identifies
// layer, token and feature; `row` is the first row of the block.
template <class Real>
INLINE Vector<Real> dropout_mask(uint64_t seed, uint64_t position, long row, double p) {
  Vector<Real> mask{};
  const uint64_t key = fmix64(seed + 0x9e3779b97f4a7c15ULL * (position + 1));
  const uint64_t threshold = uint64_t(p * 18446744073709551616.0);  // p 2⁶⁴
  const Real inv_keep = Real(1 / (1 - p));
  for (int lane = 0; lane < lanes<Real>; lane++)
    mask[lane] = fmix64(key ^ uint64_t(row + lane)) < threshold ? 0 : inv_keep;
  return mask;
}

struct DropoutSource {
  uint64_t seed;
  long row;
  int layer;
};

template <class Real>
INLINE Vector<Real> dropout_mask(const DropoutSource &source, int n, int d,
                                 const LayerSizes &s) {
  const uint64_t position = (uint64_t(source.layer) * s.tokens + n) * s.dim + d;
  return dropout_mask<Real>(source.seed, position, source.row, s.dropout);
}

template <class Real, bool Padded, bool Train>
void attention_forward(const LayerState<Real> &state, const LayerSizes &s,
                       const int *bounds, const Vector<Real> *present,
                       Vector<Real> *scratch) {
  const int N = s.tokens, width = s.dim / s.heads;
  for (int h = 0; h < s.heads; h++) {
    if (width > 1) {
      const WideHead<Real> head = state.wide(h, s);
      const bool done = dispatch_width(width, [&](auto small) {
        small_forward<Real, small, Padded, Train>(head, present, N);
      });
      if (!done)
        wide_forward<Real, Padded, Train>(head, present, N, width, scratch);
      continue;
    }
    const NarrowHead<Real> head = state.narrow(h, s);
    const KeyRange<Real> range = center<Real, Padded>(head, present, N);
    const bool done = dispatch_series<Real>(bounds[h], [&](auto series) {
      moments_forward<Real, decltype(series), Padded, Train>(head, range, present, N);
    });
    if (!done) pairs_forward<Real, Padded, Train>(head, range, present, N);
  }
}

// `gradient` is that w.r.t. `mixed`; `result` is laid out like qkv.
template <class Real, bool Padded>
void attention_backward(const LayerState<Real> &state, const LayerSizes &s,
                        const int *bounds, const Vector<Real> *present,
                        View<Real> gradient, View<Real> result, Vector<Real> *scratch) {
  const int width = s.dim / s.heads;
  for (int h = 0; h < s.heads; h++) {
    if (width > 1) {
      WideHead<Real> head = state.wide(h, s), out = head;
      out.query = result.from_feature(h * width);
      out.key = result.from_feature(s.dim + h * width);
      out.value = result.from_feature(2 * s.dim + h * width);
      const View<Real> g = gradient.from_feature(h * width);
      const bool done = dispatch_width(width, [&](auto small) {
        small_backward<Real, small, Padded>(head, present, g, out, s.tokens);
      });
      if (!done)
        wide_backward<Real, Padded>(head, present, g, out, s.tokens, width, scratch);
      continue;
    }
    NarrowHead<Real> head = state.narrow(h, s), out = head;
    out.query = &result(0, h);
    out.key = &result(0, s.dim + h);
    out.value = &result(0, 2 * s.dim + h);
    const Vector<Real> *g = &gradient(0, h);
    const bool done = dispatch_series<Real>(bounds[h], [&](auto series) {
      moments_backward<Real, decltype(series), Padded>(head, present, g, out, s.tokens);
    });
    if (!done) pairs_backward<Real, Padded>(head, present, g, out, s.tokens, scratch);
  }
}

template <class Real, bool Padded, bool Train>
void layer_forward(View<Real> x, const LayerState<Real> &state, LayerArrays<Real> w,
                   const LayerSizes &s, const int *bounds, const Vector<Real> *present,
                   const DropoutSource &source, Vector<Real> *scratch) {
  const int N = s.tokens, D = s.dim;
  normalize(x, state.normed1, state.scale1, N, D);
  linear<Real, false>(state.normed1, w.qkv, D, w.qkv_bias, state.qkv, N, D, 3 * D);
  attention_forward<Real, Padded, Train>(state, s, bounds, present, scratch);
  linear<Real, true>(state.mixed, w.out, D, nullptr, x, N, D, D);

  normalize(x, state.normed2, state.scale2, N, D);
  // A few tokens at a time, so that their hidden vectors stay in the cache.
  for_tiles<kTileTokens>(0, N, [&](int n, auto width) {
    const long slot = Train ? n : 0;
    const View<Real> hidden = state.hidden.from_token(slot);
    Vector<Real> *slope = &state.slope(slot, 0);
    linear_tokens<Real, width, false>(state.normed2.from_token(n), w.up, D, w.up_bias,
                                      hidden, D, s.dim_ff);
    for (int i = 0; i < width * s.dim_ff; i++)
      hidden.data[i] = activate<Real, Train>(s.activation, hidden.data[i], slope + i);
    if (s.dropout == 0) {
      linear_tokens<Real, width, true>(hidden, w.down, s.dim_ff, w.down_bias,
                                       x.from_token(n), s.dim_ff, D);
      return;
    }
    const View<Real> result{scratch, D, 1};
    linear_tokens<Real, width, false>(hidden, w.down, s.dim_ff, w.down_bias, result,
                                      s.dim_ff, D);
    for (int t = 0; t < width; t++)
      for (int d = 0; d < D; d++)
        x(n + t, d) += result(t, d) * dropout_mask<Real>(source, n + t, d, s);
  });
}

// dx: the gradient w.r.t. the layer's result on entry, w.r.t. its input on return.
// `buffer` and `d_qkv` are scratch for D and 3 D features.
template <class Real, bool Padded>
void layer_backward(View<Real> dx, const LayerState<Real> &state, LayerTransposes<Real> t,
                    LayerArrays<Real> g, const LayerSizes &s, const int *bounds,
                    const Vector<Real> *present, const DropoutSource &source,
                    View<Real> buffer, View<Real> d_qkv, Vector<Real> *scratch) {
  const int N = s.tokens, D = s.dim, FF = s.dim_ff;
  // Through the feed-forward part.
  View<Real> dropped = dx;
  if (s.dropout != 0) {
    dropped = d_qkv;  // which is needed only for the attention
    for (int n = 0; n < N; n++)
      for (int d = 0; d < D; d++)
        dropped(n, d) = dx(n, d) * dropout_mask<Real>(source, n, d, s);
  }
  weight_gradient(dropped, state.hidden, g.down, FF, N, D, FF);
  bias_gradient(dropped, g.down_bias, N, D);
  for_tiles<kTileTokens>(0, N, [&](int n, auto width) {
    const View<Real> d_hidden{scratch, FF, 1}, slope = state.slope.from_token(n);
    linear_tokens<Real, width, false>(dropped.from_token(n), t.down, D, nullptr,
                                      d_hidden, D, FF);
    for (int i = 0; i < width * FF; i++) slope.data[i] *= d_hidden.data[i];
    linear_tokens<Real, width, false>(slope, t.up, FF, nullptr, buffer.from_token(n),
                                      FF, D);
  });
  weight_gradient(state.slope, state.normed2, g.up, D, N, FF, D);
  bias_gradient(state.slope, g.up_bias, N, FF);
  normalize_backward(buffer, state.normed2, state.scale2, dx, N, D);

  // Through the attention.
  weight_gradient(dx, state.mixed, g.out, D, N, D, D);
  linear<Real, false>(dx, t.out, D, nullptr, buffer, N, D, D);
  attention_backward<Real, Padded>(state, s, bounds, present, buffer, d_qkv, scratch);
  weight_gradient(d_qkv, state.normed1, g.qkv, D, N, 3 * D, D);
  bias_gradient(d_qkv, g.qkv_bias, N, 3 * D);
  linear<Real, false>(d_qkv, t.qkv, 3 * D, nullptr, buffer, N, 3 * D, D);
  normalize_backward(buffer, state.normed1, state.scale1, dx, N, D);
}

}  // namespace marl_pool
