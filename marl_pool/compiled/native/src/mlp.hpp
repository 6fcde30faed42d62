// A multilayer perceptron on a batch, forward or with gradients.
#pragma once

#include "kernel.hpp"

namespace marl_pool {

// Sizes, as Python passes them (call.py, class MlpSizes).
struct MlpSizes {
  int64_t rows;
  int32_t layers, activation;
  const int32_t *widths;  // of the input and of each layer's result
};

// Weight and bias of each layer, as Python passes them, and their transposes.
template <class Real> struct MlpWeights {
  const MlpSizes &s;
  const Real *const *parameters;
  std::vector<long> offsets;  // of each layer in a contiguous array, then its size
  std::vector<Real> transposes;

  MlpWeights(const MlpSizes &sizes, const Real *const *pointers)
      : s(sizes), parameters(pointers), offsets{0} {
    for (int l = 0; l < s.layers; l++)
      offsets.push_back(offsets[l] + (s.widths[l] + 1L) * s.widths[l + 1]);
  }
  long size() const { return offsets[s.layers]; }
  const Real *weight(int l) const { return parameters[2 * l]; }
  const Real *bias(int l) const { return parameters[2 * l + 1]; }
  const Real *transposed(int l) const { return &transposes[offsets[l]]; }

  void transpose() {
    transposes.resize(size());
    for (int l = 0; l < s.layers; l++)
      marl_pool::transpose(weight(l), &transposes[offsets[l]], s.widths[l + 1],
                           s.widths[l]);
  }
};

// A chunk of at most `max_rows` rows. Vectors of rows take the place of a View's tokens.
// `Train` keeps what the backward pass needs.
template <class Real, bool Train> struct MlpChunk {
  using V = Vector<Real>;
  static constexpr int W = lanes<Real>;

  const MlpSizes &s;
  const MlpWeights<Real> &weights;
  long first = 0;  // the first row
  int rows = 0, vectors = 0;
  std::vector<View<Real>> x;       // the input of each layer, then the result
  std::vector<View<Real>> slopes;  // derivatives of the activations that gave x
  View<Real> dx{}, dy{};

  MlpChunk(Arena<Real> arena, const MlpSizes &sizes, const MlpWeights<Real> &w,
           long max_rows = kChunk)
      : s(sizes), weights(w) {
    // An odd stride spreads the features over the cache sets.
    const long stride = ((max_rows + W - 1) / W) | 1;
    int widest = 0;
    for (int l = 0; l <= s.layers; l++) {
      x.push_back(arena.by_feature(s.widths[l], stride));
      if (Train) slopes.push_back(arena.by_feature(s.widths[l], stride));
      widest = std::max<int>(widest, s.widths[l]);
    }
    if (Train) {
      dx = arena.by_feature(widest, stride);
      dy = arena.by_feature(widest, stride);
    }
    used = arena.used;
  }
  long used;

  View<Real> result() const { return x[s.layers]; }

  void load(const Real *values, long from) {
    first = from;
    rows = int(std::min<long>(kChunk, s.rows - first));
    vectors = (rows + W - 1) / W;
    read(values, x[0], s.widths[0]);
  }

  void forward() {
    const auto kind = Activation(s.activation);
    for (int l = 0; l < s.layers; l++) {
      const int inputs = s.widths[l], outputs = s.widths[l + 1];
      const View<Real> y = x[l + 1];
      linear<Real, false>(x[l], weights.weight(l), inputs, weights.bias(l), y, vectors,
                          inputs, outputs);
      if (l + 1 == s.layers) return;
      for (int o = 0; o < outputs; o++)
        for (int n = 0; n < vectors; n++)
          y(n, o) = activate<Real, Train>(kind, y(n, o),
                                          Train ? &slopes[l + 1](n, o) : nullptr);
    }
  }

  // Load one vector of `count` rows; feature i is values[i].
  void load_vector(const V *values, int count) {
    rows = count;
    vectors = 1;
    for (int i = 0; i < s.widths[0]; i++) x[0](0, i) = values[i];
  }

  void store(Real *out) const { write(result(), out, s.widths[s.layers]); }

  // Add to the gradient w.r.t. the parameters; write that w.r.t. the input to
  // `values_gradient` unless it is null.
  void backward(const Real *out_gradient, Real *gradient, Real *values_gradient) {
    read(out_gradient, dy, s.widths[s.layers]);
    backward(gradient, values_gradient != nullptr);
    if (values_gradient) write(dy, values_gradient, s.widths[0]);
  }

  // The same, given the gradient w.r.t. the result in `dy`, which becomes that w.r.t. the
  // input if requested.
  void backward(Real *gradient, bool with_input_gradient) {
    for (int l = s.layers - 1; l >= 0; l--) {
      const int inputs = s.widths[l], outputs = s.widths[l + 1];
      Real *layer_gradient = gradient + weights.offsets[l];
      weight_gradient(dy, x[l], layer_gradient, inputs, vectors, outputs, inputs);
      bias_gradient(dy, layer_gradient + long(outputs) * inputs, vectors, outputs);
      if (l == 0 && !with_input_gradient) return;
      linear<Real, false>(dy, weights.transposed(l), outputs, nullptr, dx, vectors,
                          outputs, inputs);
      if (l > 0)
        for (int i = 0; i < inputs; i++)
          for (int n = 0; n < vectors; n++) dx(n, i) *= slopes[l](n, i);
      std::swap(dx, dy);
    }
  }

private:
  int rows_of(int n) const { return std::min(W, rows - n * W); }

  // Unused lanes of the last vector are zero.
  void read(const Real *from, View<Real> to, int width) const {
    for (int n = 0; n < vectors; n++) {
      const Real *row = from + (first + n * W) * width;
      for (int i = 0; i < width; i++) {
        V value{};
        for (int r = 0; r < rows_of(n); r++) value[r] = row[r * width + i];
        to(n, i) = value;
      }
    }
  }

  void write(View<Real> from, Real *to, int width) const {
    for (int n = 0; n < vectors; n++) {
      Real *row = to + (first + n * W) * width;
      for (int i = 0; i < width; i++) {
        const V value = from(n, i);
        for (int r = 0; r < rows_of(n); r++) row[r * width + i] = value[r];
      }
    }
  }
};

// One call: a perceptron and a batch.
template <class Real> struct MlpCall {
  // Multiplications that take about as long as starting a thread.
  static constexpr long kThreadProducts = 1L << 21;

  const MlpSizes &s;
  const Real *values;
  MlpWeights<Real> weights;
  const long chunks;
  const int threads;

  MlpCall(const MlpSizes &sizes, const Real *input, const Real *const *parameters,
          int num_threads)
      : s(sizes), values(input), weights(sizes, parameters),
        chunks((sizes.rows + kChunk - 1) / kChunk),
        threads(int(std::min<long>(num_threads,
                                   1 + sizes.rows * weights.size() / kThreadProducts))) {}

  void forward(Real *out) {
    over_chunks<false>(0, chunks, [&](auto &chunk, long) { chunk.store(out); });
  }

  // Write the gradient w.r.t. the parameters, contiguously, and w.r.t. the input unless
  // `values_gradient` is null.
  void gradients(const Real *out_gradient, Real *gradient, Real *values_gradient) {
    weights.transpose();
    const long size = weights.size();
    sum_in_waves(chunks, size, gradient, [&](long from, long count, Real *sums) {
      over_chunks<true>(from, count, [&](auto &chunk, long c) {
        chunk.backward(out_gradient, sums + c * size, values_gradient);
      });
    });
  }

private:
  // Run `count` chunks forward, and call visit(chunk, index) after each.
  template <bool Train, class F> void over_chunks(long from, long count, F &&visit) {
    using Chunk = MlpChunk<Real, Train>;
    const long size = Chunk(Arena<Real>{nullptr}, s, weights).used;
    on_threads(count, threads, [&](std::atomic<long> &next) {
      const Workspace workspace(size * sizeof(Vector<Real>));
      Chunk chunk(Arena<Real>{static_cast<Vector<Real> *>(workspace.get())}, s, weights);
      for (long c; (c = next++) < count;) {
        chunk.load(values, (from + c) * kChunk);
        chunk.forward();
        visit(chunk, c);
      }
    });
  }
};

// Write the result to `out`; or, if `gradient` is given, the gradient w.r.t. the
// parameters, and w.r.t. the input unless `values_gradient` is null. Exceptions must not
// cross the C interface.
template <class Real>
int run_mlp(const MlpSizes &s, const Real *values, const Real *const *parameters,
            Real *out, const Real *out_gradient, Real *gradient, Real *values_gradient,
            int threads) noexcept {
  try {
    MlpCall<Real> call(s, values, parameters, threads);
    if (gradient)
      call.gradients(out_gradient, gradient, values_gradient);
    else
      call.forward(out);
    return kDone;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
