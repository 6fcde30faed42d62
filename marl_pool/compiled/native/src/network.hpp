// The network for one block of rows: embedding, transformer layers, pooling; and back.
#pragma once

#include "layer.hpp"
#include "pooling.hpp"

namespace marl_pool {

// Sizes and options, as Python passes them (call.py, class _Sizes).
struct Sizes {
  int64_t rows;        // B
  int32_t tokens;      // N, without the learned tokens
  int32_t features;    // F, per token; 0 if the input is embedded already, (B, N, D)
  int32_t types;       // K; 0 without a type embedding
  int32_t type_width;  // E
  int32_t input_activation;
  int32_t extra;  // learned tokens, which come first
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

// Weights as the kernel uses them: contiguous, with type embeddings, LayerNorms and
// scales folded in. Their gradients have the same layout.
template <class Real> struct Folded {
  Sizes s;
  std::vector<Real> values, transposes;
  std::vector<int> bounds;

  int inputs() const { return s.features ? s.features + type_columns() : 0; }
  int type_columns() const { return s.types ? s.types : 1; }  // without types, the bias
  long embedding_size() const { return long(s.dim) * inputs(); }
  long layer_size() const { return LayerArrays<Real>::size(s.dim, s.dim_ff); }
  long extra_offset() const { return embedding_size() + s.layers * layer_size(); }
  long pooling_offset() const { return extra_offset() + long(s.extra) * s.dim; }
  long size() const {
    return pooling_offset() + (s.pooling == kAda ? 4L * s.dim * s.dim + s.dim : 0);
  }
  LayerArrays<Real> layer(Real *base, int l) const {
    return {base + embedding_size() + l * layer_size(), s.dim, s.dim_ff};
  }
  LayerTransposes<Real> transposed(int l) {
    return {transposes.data() + l * layer_size(), s.dim, s.dim_ff};
  }
  AdaParameters<Real> ada(Real *base) const {
    Real *query = base + pooling_offset();
    const long square = long(s.dim) * s.dim;
    return {query, query + square, query + 2 * square, query + 3 * square,
            query + 4 * square};
  }
};

inline LayerSizes layer_sizes(const Sizes &s) {
  const int tokens = s.tokens + s.extra;
  // An odd stride spreads the features over the cache sets.
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

  Parameters(Real *const *p, const Sizes &s) {
    if (s.features) project = *p++, bias = *p++;
    if (s.types) types = *p++;
    if (s.extra) extra = *p++;
    for (int l = 0; l < s.layers; l++, p += LayerParameters<Real>::count)
      layers.emplace_back(p);
    if (s.pooling != kAda) return;
    ada = {p[0], p[1], p[2], p[3], s.query == kLearned ? p[4] : nullptr};
  }
};

// Fold the embedding into one matrix (D, F + K): W_f beside W_e e_k + b for each type k.
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
    Real *d_weight = result.project + d * width;
    std::memcpy(d_weight, row, s.features * sizeof(Real));
    for (int e = 0; e < s.type_width; e++) d_weight[s.features + e] = 0;
    result.bias[d] = 0;
    for (int k = 0; k < inputs - s.features; k++) {
      const Real d_entry = row[s.features + k];
      result.bias[d] += d_entry;
      for (int e = 0; e < s.type_width; e++) {
        d_weight[s.features + e] += d_entry * p.types[k * s.type_width + e];
        result.types[k * s.type_width + e] += d_entry * weight[s.features + e];
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

// The gradients of the parameters from those of the folded weights.
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
  if (s.extra) copy(result.extra, gradient + f.extra_offset(), long(s.extra) * s.dim);
  if (s.pooling != kAda) return;
  const AdaParameters<Real> ada = f.ada(gradient);
  const long square = long(s.dim) * s.dim;
  copy(result.ada.query, ada.query, square);
  copy(result.ada.key, ada.key, square);
  copy(result.ada.value, ada.value, square);
  copy(result.ada.out, ada.out, square);
  if (result.ada.learned) copy(result.ada.learned, ada.learned, s.dim);
}

// Bump allocator of a block's memory; with a null base it only counts.
template <class Real> struct Arena {
  Vector<Real> *base;
  long used = 0;
  Vector<Real> *take(long count) {
    Vector<Real> *start = base + used;
    used += count;
    return start;
  }
  // A feature-major matrix: `width` features of `stride` tokens each.
  View<Real> by_feature(long width, long stride) {
    return {take(width * stride), 1, stride};
  }
};

// One block of rows. `Train` keeps what the backward pass needs.
template <class Real, bool Train> struct Block {
  using V = Vector<Real>;
  static constexpr int W = lanes<Real>;

  const Sizes &s;
  const Parameters<const Real> &parameters;
  Folded<Real> &folded;
  const LayerSizes layer;
  const PoolingSizes pooling;
  const int N, D, LD;  // tokens with the learned ones, width, stride between features
  long first = 0;      // the first row
  int rows = 0;
  bool padded = false;

  View<Real> input, x, input_slope, dx, buffer, d_qkv;
  V *present, *own_type, *weights, *scratch, *result;
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
    own_type = arena.take(N);
    weights = arena.take(N);
    result = arena.take(D);
    const long attention = (s.heads == D ? 3L : 2L * kTileQueries) * N;
    const long hidden = long(kTileTokens) * (s.dim_ff + D);
    scratch = arena.take(attention > hidden ? attention : hidden);
    for (int l = 0; l < s.layers; l++)
      states.push_back(l == 0 || Train ? LayerState<Real>(arena, layer) : states[0]);
    if (Train) {
      dx = arena.by_feature(D, LD);
      buffer = arena.by_feature(D, LD);
      d_qkv = arena.by_feature(3 * D, LD);
    }
    used = arena.used;
  }
  long used;

  // Load the rows from `from` on, at most one per lane; false if a type is out of range.
  bool load(const Inputs<Real> &in, long from) {
    first = from;
    rows = s.rows - first < W ? s.rows - first : W;
    padded = false;
    if (in.padding)
      for (long i = first * s.tokens; i < (first + rows) * s.tokens; i++)
        padded |= in.padding[i] != 0;
    for (int n = 0; n < s.extra; n++) {
      present[n] = splat<Real>(1);
      own_type[n] = V{};
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

  // Add to the gradient w.r.t. the folded weights; write that w.r.t. the input to
  // `values_gradient` unless it is null.
  void backward(const Real *out_gradient, Real *folded_gradient, Real *values_gradient) {
    if (s.pooling == kNoPooling) {
      read(out_gradient);
    } else {
      V *d_result = scratch;
      for (int d = 0; d < D; d++) {
        d_result[d] = V{};
        for (int r = 0; r < rows; r++)
          d_result[d][r] = out_gradient[(first + r) * D + d];
      }
      pool_backward(d_result, folded_gradient);
    }
    encoder_backward(folded_gradient, values_gradient);
  }

  // The same, given the gradient w.r.t. the pooling head's result, whose unused lanes are
  // zero.
  void backward(const V *d_result, Real *folded_gradient) {
    pool_backward(d_result, folded_gradient);
    encoder_backward(folded_gradient, nullptr);
  }

private:
  void encoder_backward(Real *folded_gradient, Real *values_gradient) {
    for (int l = s.layers - 1; l >= 0; l--) {
      const auto run = padded ? layer_backward<Real, true> : layer_backward<Real, false>;
      run(dx, states[l], folded.transposed(l), folded.layer(folded_gradient, l), layer,
          &folded.bounds[l * s.heads], present, {s.seed, first, l}, buffer, d_qkv,
          scratch);
    }
    embed_backward(folded_gradient, values_gradient);
  }

  // Load token n of each row. Unused lanes hold zeros and count as present.
  bool load_token(const Inputs<Real> &in, int n) {
    const int slot = n + s.extra, width = s.features ? s.features : D;
    const long token = first * s.tokens + n;  // of the first row
    V in_batch{}, is_present{}, type{};
    for (int r = 0; r < rows; r++) {
      in_batch[r] = 1;
      const long i = token + long(r) * s.tokens;
      if (padded && in.padding[i]) continue;
      const int64_t type_id = in.types ? in.types[i] : 0;
      if (s.types && (type_id < 0 || type_id >= s.types)) return false;
      is_present[r] = 1;
      type[r] = Real(type_id);
    }
    present[slot] = is_present;
    for (int r = rows; r < W; r++) present[slot][r] = 1;
    own_type[slot] = in.types ? masked(is_present, type == 0) : V{};
    for (int i = 0; i < width; i++) {
      V &to = s.features ? input(slot, i) : x(slot, i);
      const Real *from = in.values + token * width + i;
      to = V{};
      for (int r = 0; r < rows; r++) to[r] = from[long(r) * s.tokens * width];
      // Features of absent tokens may be NaN; embedded vectors are finite.
      if (padded && s.features) to = masked(to, is_present > 0);
    }
    if (!s.features) return true;
    // The one-hot type, which is type 0 for an absent token; without types, a 1 for the
    // bias.
    for (int k = 0; k < folded.type_columns(); k++)
      input(slot, s.features + k) =
          s.types ? masked(in_batch, type == Real(k)) : in_batch;
    return true;
  }

  // x where the condition holds, 0 elsewhere.
  static V masked(V x, Bits<Real> condition) {
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

  void embed_backward(Real *folded_gradient, Real *values_gradient) {
    for (int n = 0; n < s.extra; n++)
      for (int d = 0; d < D; d++)
        folded_gradient[folded.extra_offset() + n * D + d] += lane_sum<Real>(dx(n, d));
    const int inputs = folded.inputs(), width = s.features ? s.features : D;
    const View<Real> tokens = dx.from_token(s.extra);
    if (s.features) {
      if (s.input_activation != kNone)
        for (int d = 0; d < D; d++)
          for (int n = s.extra; n < N; n++) dx(n, d) *= input_slope(n, d);
      weight_gradient(tokens, input.from_token(s.extra), folded_gradient, inputs,
                      s.tokens, D, inputs);
    }
    if (!values_gradient) return;
    for (int n = 0; n < s.tokens; n++)
      for (int i = 0; i < width; i++) {
        V sum = s.features ? V{} : tokens(n, i);
        if (s.features) {
          for (int d = 0; d < D; d++) sum += folded.values[d * inputs + i] * tokens(n, d);
          sum = present[n + s.extra] > 0 ? sum : V{};
        }
        for (int r = 0; r < rows; r++)
          values_gradient[((first + r) * s.tokens + n) * width + i] = sum[r];
      }
  }

  void pool() {
    if (s.pooling == kNoPooling) return;
    if (padded) clear_absent(x);
    if (s.pooling == kAda)
      return ada.forward(parameters.ada, x, {present, own_type}, result);
    if (s.pooling != kMax) fixed_weights<Real>(pooling, {present, own_type}, weights);
    for (int d = 0; d < D; d++) {
      if (s.pooling == kMax) {
        result[d] = token_max(d);
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

  // The maximum of feature d over the present tokens; NaN if any is.
  V token_max(int d) const {
    V maximum = splat<Real>(-kHuge<Real>), any_present{};
    for (int n = 0; n < N; n++) {
      const V value = present[n] > 0 ? x(n, d) : splat<Real>(-kHuge<Real>);
      maximum = ((value > maximum) | (value != value)) ? value : maximum;
      any_present += present[n];
    }
    return any_present > 0 ? maximum : V{};
  }

  // Without a pooling head, read the gradient w.r.t. the encoder's vectors into dx.
  void read(const Real *out_gradient) {
    for (int d = 0; d < D; d++)
      for (int n = 0; n < N; n++) {
        dx(n, d) = V{};
        for (int r = 0; r < rows; r++)
          dx(n, d)[r] = out_gradient[((first + r) * N + n) * D + d];
      }
  }

  // With one, compute dx from the gradient w.r.t. its result.
  void pool_backward(const V *d_result, Real *folded_gradient) {
    if (s.pooling == kAda)
      ada.backward(parameters.ada, folded.ada(folded_gradient), x, d_result, dx);
    else if (s.pooling == kMax)
      max_backward(d_result);
    else
      for (int d = 0; d < D; d++)
        for (int n = 0; n < N; n++) dx(n, d) = weights[n] * d_result[d];
    if (padded) clear_absent(dx);
  }

  // Tied tokens share the gradient equally, as in torch's amax.
  void max_backward(const V *d_result) {
    for (int d = 0; d < D; d++) {
      V ties{};
      for (int n = 0; n < N; n++) ties += x(n, d) == result[d] ? present[n] : V{};
      const V share = d_result[d] / larger(ties, splat<Real>(1));
      for (int n = 0; n < N; n++)
        dx(n, d) = (x(n, d) == result[d] ? present[n] : V{}) * share;
    }
  }
};

}  // namespace marl_pool
