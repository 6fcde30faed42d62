// The network for one block of rows: embedding, transformer layers, pooling; and back.
#pragma once

#include "layer.hpp"
#include "pooling.hpp"

namespace marl_pool {

// Sizes and options, as Python passes them (call.py, class _Sizes).
struct Sizes {
  int64_t rows;        // B
  int32_t tokens;      // N, without extra tokens
  int32_t features;    // F of the tokens; 0 where the input is (B, N, D) already
  int32_t types;       // K; 0 without a type embedding
  int32_t type_width;  // E
  int32_t input_activation;
  int32_t extra;  // learned tokens before the others
  int32_t dim, layers, heads, dim_ff, activation;
  int32_t pooling, pooling_heads, query, residual;
  double scale, pooling_scale, dropout;
  uint64_t seed;
};

template <class Real> struct Inputs {
  const Real *values;       // (B, N, F) or (B, N, D)
  const int64_t *types;     // (B, N) or null
  const uint8_t *padding;   // (B, N), 1 = absent, or null
};

// Weights as the kernel uses them, and gradients by these, one behind the other.
template <class Real> struct Folded {
  Sizes s;
  std::vector<Real> values, transposes;
  std::vector<int> bounds;

  int inputs() const { return s.features ? s.features + columns() : 0; }
  int columns() const { return s.types ? s.types : 1; }  // a bias is a single type
  long embedding_size() const { return long(s.dim) * inputs(); }
  long layer_size() const { return LayerArrays<Real>::size(s.dim, s.dim_ff); }
  long extra_at() const { return embedding_size() + s.layers * layer_size(); }
  long pooling_at() const { return extra_at() + long(s.extra) * s.dim; }
  long size() const {
    return pooling_at() + (s.pooling == kAda ? 4L * s.dim * s.dim + s.dim : 0);
  }
  LayerArrays<Real> layer(Real *base, int l) const {
    return {base + embedding_size() + l * layer_size(), s.dim, s.dim_ff};
  }
  LayerTransposes<Real> transposed(int l) {
    return {transposes.data() + l * layer_size(), s.dim, s.dim_ff};
  }
  AdaParameters<Real> ada(Real *base) const {
    Real *at = base + pooling_at();
    const long square = long(s.dim) * s.dim;
    return {at, at + square, at + 2 * square, at + 3 * square, at + 4 * square};
  }
};

inline LayerSizes layer_sizes(const Sizes &s) {
  const int tokens = s.tokens + s.extra;
  // An odd stride spreads the features over the sets of the cache.
  return {tokens,   tokens | 1, s.dim, s.heads, s.dim_ff, Activation(s.activation),
          s.scale, s.dropout};
}
inline PoolingSizes pooling_sizes(const Sizes &s) {
  return {s.tokens + s.extra, s.dim, s.pooling_heads, Pooling(s.pooling), Query(s.query),
          s.residual != 0, s.pooling_scale};
}

// Pointers to parameters, or to their gradients, in the order in which Python passes
// them.
template <class Real> struct Parameters {
  Real *project = nullptr, *bias = nullptr, *types = nullptr, *extra = nullptr;
  std::vector<LayerParameters<Real>> layers;
  AdaParameters<Real> ada{};

  Parameters(Real *const *at, const Sizes &s) {
    if (s.features) project = *at++, bias = *at++;
    if (s.types) types = *at++;
    if (s.extra) extra = *at++;
    for (int l = 0; l < s.layers; l++, at += LayerParameters<Real>::count)
      layers.emplace_back(at);
    if (s.pooling != kAda) return;
    ada = {at[0], at[1], at[2], at[3], s.query == kLearned ? at[4] : nullptr};
  }
};

// The embedding as one matrix (D, F + K): W_f beside W_e e_k + b for each type k.
template <class Real>
void fold_embedding(const Parameters<const Real> &p, const Sizes &s, Real *folded,
                    int inputs) {
  const int width = s.features + s.type_width;
  for (int d = 0; d < s.dim; d++) {
    const Real *weight = p.project + d * width;
    Real *row = folded + d * inputs;
    std::memcpy(row, weight, s.features * sizeof(Real));
    for (int k = 0; k < inputs - s.features; k++) {
      double sum = p.bias[d];
      for (int e = 0; e < s.type_width; e++)
        sum += double(weight[s.features + e]) * p.types[k * s.type_width + e];
      row[s.features + k] = Real(sum);
    }
  }
}

template <class Real>
void unfold_embedding(const Parameters<const Real> &p, const Parameters<Real> &result,
                      const Sizes &s, const Real *gradient, int inputs) {
  const int width = s.features + s.type_width;
  for (long i = 0; i < long(s.types) * s.type_width; i++) result.types[i] = 0;
  for (int d = 0; d < s.dim; d++) {
    const Real *weight = p.project + d * width, *row = gradient + d * inputs;
    Real *for_weight = result.project + d * width;
    std::memcpy(for_weight, row, s.features * sizeof(Real));
    for (int e = 0; e < s.type_width; e++) for_weight[s.features + e] = 0;
    result.bias[d] = 0;
    for (int k = 0; k < inputs - s.features; k++) {
      const Real g = row[s.features + k];
      result.bias[d] += g;
      for (int e = 0; e < s.type_width; e++) {
        for_weight[s.features + e] += g * p.types[k * s.type_width + e];
        result.types[k * s.type_width + e] += g * weight[s.features + e];
      }
    }
  }
}

template <class Real> void fold(const Parameters<const Real> &p, Folded<Real> &f) {
  const Sizes &s = f.s;
  const LayerSizes layer = layer_sizes(s);
  f.values.resize(f.size());
  f.transposes.resize(s.layers * f.layer_size());
  f.bounds.assign(s.layers * s.heads, 0);
  Real *base = f.values.data();
  if (s.features) fold_embedding(p, s, base, f.inputs());
  for (int l = 0; l < s.layers; l++) {
    fold_layer(p.layers[l], f.layer(base, l), f.transposed(l), layer);
    if (s.heads == s.dim) score_bounds(f.layer(base, l), layer, &f.bounds[l * s.heads]);
  }
}

// The gradient by parameters from that by folded weights.
template <class Real>
void unfold(const Parameters<const Real> &p, const Folded<Real> &f, Real *gradient,
            const Parameters<Real> &result) {
  const Sizes &s = f.s;
  if (s.features) unfold_embedding(p, result, s, gradient, f.inputs());
  for (int l = 0; l < s.layers; l++)
    unfold_layer(p.layers[l], f.layer(gradient, l), result.layers[l], layer_sizes(s));
  const auto copy = [](Real *to, const Real *from, long count) {
    std::memcpy(to, from, count * sizeof(Real));
  };
  if (s.extra) copy(result.extra, gradient + f.extra_at(), long(s.extra) * s.dim);
  if (s.pooling != kAda) return;
  const AdaParameters<Real> ada = f.ada(gradient);
  const long square = long(s.dim) * s.dim;
  copy(result.ada.query, ada.query, square);
  copy(result.ada.key, ada.key, square);
  copy(result.ada.value, ada.value, square);
  copy(result.ada.out, ada.out, square);
  if (result.ada.learned) copy(result.ada.learned, ada.learned, s.dim);
}

// Memory of a block; with a null base it only counts.
template <class Real> struct Arena {
  Vector<Real> *base;
  long used = 0;
  Vector<Real> *take(long count) {
    Vector<Real> *at = base + used;
    used += count;
    return at;
  }
  // Numbers of `width` features, one behind the other, with `stride` tokens each.
  View<Real> by_feature(long width, long stride) {
    return {take(width * stride), 1, stride};
  }
};

// One block of rows. `Train` keeps what the gradient needs.
template <class Real, bool Train> struct Block {
  using V = Vector<Real>;
  static constexpr int W = lanes<Real>;

  const Sizes &s;
  const Parameters<const Real> &parameters;
  Folded<Real> &folded;
  const LayerSizes layer;
  const PoolingSizes pooling;
  const int N, D, LD;  // tokens with the extra ones, width, stride
  long first = 0;      // the first row
  int rows = 0;
  bool padded = false;

  View<Real> input, x, input_slope, dx, gradient, wide;
  V *present, *own, *weights, *scratch, *result;
  std::vector<LayerState<Real>> states;
  AdaPool<Real> ada;

  Block(Arena<Real> arena, const Sizes &sizes, const Parameters<const Real> &p,
        Folded<Real> &f)
      : s(sizes), parameters(p), folded(f), layer(layer_sizes(sizes)),
        pooling(pooling_sizes(sizes)), N(layer.tokens), D(sizes.dim), LD(layer.stride),
        ada(arena, pooling) {
    input = arena.by_feature(f.inputs(), LD);
    x = arena.by_feature(D, LD);
    input_slope = arena.by_feature(D, LD);
    present = arena.take(N);
    own = arena.take(N);
    weights = arena.take(N);
    result = arena.take(D);
    const long attention = (s.heads == D ? 3L : 2L * kQueries) * N;
    const long hidden = long(kTokens) * (s.dim_ff + D);
    scratch = arena.take(attention > hidden ? attention : hidden);
    for (int l = 0; l < s.layers; l++)
      states.push_back(l == 0 || Train ? LayerState<Real>(arena, layer) : states[0]);
    if (Train) {
      dx = arena.by_feature(D, LD);
      gradient = arena.by_feature(D, LD);
      wide = arena.by_feature(3 * D, LD);
    }
    used = arena.used;
  }
  long used;

  // Row `first` and those behind it; false if a type is out of range.
  bool load(const Inputs<Real> &in, long from) {
    first = from;
    rows = s.rows - first < W ? s.rows - first : W;
    padded = false;
    if (in.padding)
      for (long i = first * s.tokens; i < (first + rows) * s.tokens; i++)
        padded |= in.padding[i] != 0;
    for (int n = 0; n < s.extra; n++) {
      present[n] = splat<Real>(1);
      own[n] = V{};
    }
    for (int n = 0; n < s.tokens; n++)
      if (!load_token(in, n)) return false;
    return true;
  }

  void forward() {
    embed();
    for (int l = 0; l < s.layers; l++) {
      const auto run =
          padded ? layer_forward<Real, true, Train> : layer_forward<Real, false, Train>;
      run(x, states[l], folded.layer(folded.values.data(), l), layer,
          &folded.bounds[l * s.heads], present, {s.seed, first, l}, scratch);
    }
    pool();
  }

  // Write the result: (B, D), or (B, N, D) without a pooling head.
  void store(Real *out) const {
    if (s.pooling != kNoPooling) {
      for (int r = 0; r < rows; r++)
        for (int d = 0; d < D; d++) out[(first + r) * D + d] = result[d][r];
      return;
    }
    for (int r = 0; r < rows; r++)
      for (int n = 0; n < N; n++)
        for (int d = 0; d < D; d++) out[((first + r) * N + n) * D + d] = x(n, d)[r];
  }

  // Add to the gradient by folded weights; `for_values` gets that by the input, or is
  // null.
  void backward(const Real *out_gradient, Real *folded_gradient, Real *for_values) {
    if (s.pooling == kNoPooling) {
      read(out_gradient);
    } else {
      V *by_result = scratch;
      for (int d = 0; d < D; d++) {
        by_result[d] = V{};
        for (int r = 0; r < rows; r++)
          by_result[d][r] = out_gradient[(first + r) * D + d];
      }
      pool_backward(by_result, folded_gradient);
    }
    encoder_backward(folded_gradient, for_values);
  }

  // The same from the gradient by the pooling head's result, of which lanes without a
  // row are zero.
  void backward(const V *by_result, Real *folded_gradient) {
    pool_backward(by_result, folded_gradient);
    encoder_backward(folded_gradient, nullptr);
  }

private:
  void encoder_backward(Real *folded_gradient, Real *for_values) {
    for (int l = s.layers - 1; l >= 0; l--) {
      const auto run = padded ? layer_backward<Real, true> : layer_backward<Real, false>;
      run(dx, states[l], folded.transposed(l), folded.layer(folded_gradient, l), layer,
          &folded.bounds[l * s.heads], present, {s.seed, first, l}, gradient, wide,
          scratch);
    }
    embed_backward(folded_gradient, for_values);
  }

  // Token n of each row; lanes without a row are zero.
  bool load_token(const Inputs<Real> &in, int n) {
    const int at = n + s.extra, width = s.features ? s.features : D;
    const long token = first * s.tokens + n;  // of the first row
    V row{}, here{}, type{};
    for (int r = 0; r < rows; r++) {
      row[r] = 1;
      const long i = token + long(r) * s.tokens;
      if (padded && in.padding[i]) continue;
      const int64_t found = in.types ? in.types[i] : 0;
      if (s.types && (found < 0 || found >= s.types)) return false;
      here[r] = 1;
      type[r] = Real(found);
    }
    present[at] = here;
    for (int r = rows; r < W; r++) present[at][r] = 1;  // lanes without a row
    own[at] = in.types ? only(here, type == 0) : V{};
    for (int i = 0; i < width; i++) {
      V &to = s.features ? input(at, i) : x(at, i);
      const Real *from = in.values + token * width + i;
      to = V{};
      for (int r = 0; r < rows; r++) to[r] = from[long(r) * s.tokens * width];
      // Features under padding may be NaN; vectors are finite.
      if (padded && s.features) to = only(to, here > 0);
    }
    if (!s.features) return true;
    // A one in the column of the type, 0 for an absent token; without types, in that of
    // the bias.
    for (int k = 0; k < folded.columns(); k++)
      input(at, s.features + k) = s.types ? only(row, type == Real(k)) : row;
    return true;
  }

  // x where the condition is true, 0 elsewhere.
  static V only(V x, Bits<Real> condition) {
    return (V)((Bits<Real>)x & condition);
  }

  void embed() {
    for (int n = 0; n < s.extra; n++)
      for (int d = 0; d < D; d++) x(n, d) = splat<Real>(parameters.extra[n * D + d]);
    if (!s.features) return;
    const View<Real> tokens = x.from_token(s.extra);
    const int inputs = folded.inputs();
    linear<Real, false>(input.from_token(s.extra), folded.values.data(), inputs, nullptr,
                        tokens, s.tokens, inputs, D);
    const auto kind = Activation(s.input_activation);
    if (kind == kNone) return;
    for (int d = 0; d < D; d++)
      for (int n = s.extra; n < N; n++)
        x(n, d) = activate<Real, Train>(kind, x(n, d), &input_slope(n, d));
  }

  void embed_backward(Real *folded_gradient, Real *for_values) {
    for (int n = 0; n < s.extra; n++)
      for (int d = 0; d < D; d++)
        folded_gradient[folded.extra_at() + n * D + d] += lane_sum<Real>(dx(n, d));
    const int inputs = folded.inputs(), width = s.features ? s.features : D;
    const View<Real> tokens = dx.from_token(s.extra);
    if (s.features) {
      if (s.input_activation != kNone)
        for (int d = 0; d < D; d++)
          for (int n = s.extra; n < N; n++) dx(n, d) *= input_slope(n, d);
      weight_gradient(tokens, input.from_token(s.extra), folded_gradient, inputs,
                      s.tokens, D, inputs);
    }
    if (!for_values) return;
    for (int n = 0; n < s.tokens; n++)
      for (int i = 0; i < width; i++) {
        V sum = s.features ? V{} : tokens(n, i);
        if (s.features) {
          for (int d = 0; d < D; d++) sum += folded.values[d * inputs + i] * tokens(n, d);
          sum = present[n + s.extra] > 0 ? sum : V{};
        }
        for (int r = 0; r < rows; r++)
          for_values[((first + r) * s.tokens + n) * width + i] = sum[r];
      }
  }

  void pool() {
    if (s.pooling == kNoPooling) return;
    if (padded) clear_absent(x);
    if (s.pooling == kAda) return ada.forward(parameters.ada, x, {present, own}, result);
    if (s.pooling != kMax) fixed_weights<Real>(pooling, {present, own}, weights);
    for (int d = 0; d < D; d++) {
      if (s.pooling == kMax) {
        result[d] = largest(d);
        continue;
      }
      result[d] = V{};
      for (int n = 0; n < N; n++) result[d] += weights[n] * x(n, d);
    }
  }

  void clear_absent(View<Real> vectors) const {
    for (int d = 0; d < D; d++)
      for (int n = 0; n < N; n++)
        vectors(n, d) = present[n] > 0 ? vectors(n, d) : V{};
  }

  // The largest number of feature d; NaN if one is.
  V largest(int d) const {
    V most = splat<Real>(-kHuge<Real>), any{};
    for (int n = 0; n < N; n++) {
      const V value = present[n] > 0 ? x(n, d) : splat<Real>(-kHuge<Real>);
      most = ((value > most) | (value != value)) ? value : most;
      any += present[n];
    }
    return any > 0 ? most : V{};
  }

  // dx, the gradient by the encoder's vectors, without a pooling head.
  void read(const Real *out_gradient) {
    for (int d = 0; d < D; d++)
      for (int n = 0; n < N; n++) {
        dx(n, d) = V{};
        for (int r = 0; r < rows; r++)
          dx(n, d)[r] = out_gradient[((first + r) * N + n) * D + d];
      }
  }

  // The same with one.
  void pool_backward(const V *by_result, Real *folded_gradient) {
    if (s.pooling == kAda)
      ada.backward(parameters.ada, folded.ada(folded_gradient), x, by_result, dx);
    else if (s.pooling == kMax)
      max_backward(by_result);
    else
      for (int d = 0; d < D; d++)
        for (int n = 0; n < N; n++) dx(n, d) = weights[n] * by_result[d];
    if (padded) clear_absent(dx);
  }

  // Tokens that tie share the gradient equally, as torch's amax does.
  void max_backward(const V *by_result) {
    for (int d = 0; d < D; d++) {
      V ties{};
      for (int n = 0; n < N; n++) ties += x(n, d) == result[d] ? present[n] : V{};
      const V share = by_result[d] / larger(ties, splat<Real>(1));
      for (int n = 0; n < N; n++)
        dx(n, d) = (x(n, d) == result[d] ? present[n] : V{}) * share;
    }
  }
};

}  // namespace marl_pool
