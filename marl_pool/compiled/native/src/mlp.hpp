// A multilayer perceptron on rows, forward or with gradients.
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
  std::vector<long> at;  // of each layer among all numbers, one behind the other
  std::vector<Real> transposes;

  MlpWeights(const MlpSizes &sizes, const Real *const *pointers)
      : s(sizes), parameters(pointers), at{0} {
    for (int l = 0; l < s.layers; l++)
      at.push_back(at[l] + (s.widths[l] + 1L) * s.widths[l + 1]);
  }
  long size() const { return at[s.layers]; }
  const Real *weight(int l) const { return parameters[2 * l]; }
  const Real *bias(int l) const { return parameters[2 * l + 1]; }
  const Real *transposed(int l) const { return &transposes[at[l]]; }

  void transpose() {
    transposes.resize(size());
    for (int l = 0; l < s.layers; l++)
      for (int o = 0; o < s.widths[l + 1]; o++)
        for (int i = 0; i < s.widths[l]; i++)
          transposes[at[l] + long(i) * s.widths[l + 1] + o] =
              weight(l)[long(o) * s.widths[l] + i];
  }
};

// A chunk of at most `most` rows: the tokens of a View are its vectors of rows. `Train`
// keeps what the gradient needs.
template <class Real, bool Train> struct MlpChunk {
  using V = Vector<Real>;
  static constexpr int W = lanes<Real>;

  const MlpSizes &s;
  const MlpWeights<Real> &weights;
  long first = 0;  // the first row
  int rows = 0, vectors = 0;
  std::vector<View<Real>> x, slopes;  // each layer's input, and the result; derivatives
  View<Real> dx{}, dy{};

  MlpChunk(Arena<Real> arena, const MlpSizes &sizes, const MlpWeights<Real> &w,
           long most = kChunk)
      : s(sizes), weights(w) {
    // An odd stride spreads the features over the sets of the cache.
    const long stride = ((most + W - 1) / W) | 1;
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

  // One vector of rows, each feature of which is a vector of `values`.
  void load_vector(const V *values, int count) {
    rows = count;
    vectors = 1;
    for (int i = 0; i < s.widths[0]; i++) x[0](0, i) = values[i];
  }

  void store(Real *out) const { write(result(), out, s.widths[s.layers]); }

  // Add to the gradient by parameters; `for_values` gets that by the input, or is null.
  void backward(const Real *out_gradient, Real *gradient, Real *for_values) {
    read(out_gradient, dy, s.widths[s.layers]);
    backward(gradient, for_values != nullptr);
    if (for_values) write(dy, for_values, s.widths[0]);
  }

  // The same from `dy`, the gradient by the result, which becomes that by the input if
  // that is asked for.
  void backward(Real *gradient, bool for_values) {
    for (int l = s.layers - 1; l >= 0; l--) {
      const int inputs = s.widths[l], outputs = s.widths[l + 1];
      Real *at = gradient + weights.at[l];
      weight_gradient(dy, x[l], at, inputs, vectors, outputs, inputs);
      bias_gradient(dy, at + long(outputs) * inputs, vectors, outputs);
      if (l == 0 && !for_values) return;
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

  // Lanes without a row are zero.
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

// One call: a perceptron and the rows that it is computed for.
template <class Real> struct MlpCall {
  // Products that take about as long as it takes to start a thread.
  static constexpr long kWorth = 1L << 21;

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
                                   1 + sizes.rows * weights.size() / kWorth))) {}

  void forward(Real *out) {
    over_chunks<false>(0, chunks, [&](auto &chunk, long) { chunk.store(out); });
  }

  // The gradient by parameters, one behind the other, and by the input unless
  // `for_values` is null.
  void gradients(const Real *out_gradient, Real *gradient, Real *for_values) {
    weights.transpose();
    const long size = weights.size();
    std::fill(gradient, gradient + size, Real(0));
    std::vector<Real> partial(std::min(chunks, kWave) * size);
    // Waves bound the memory of the chunks' gradients.
    for (long wave = 0; wave < chunks; wave += kWave) {
      const long count = std::min(kWave, chunks - wave);
      std::fill(partial.begin(), partial.end(), Real(0));
      over_chunks<true>(wave, count, [&](auto &chunk, long c) {
        chunk.backward(out_gradient, &partial[c * size], for_values);
      });
      for (long c = 0; c < count; c++)
        for (long i = 0; i < size; i++) gradient[i] += partial[c * size + i];
    }
  }

private:
  // Run `count` chunks forward, and call use(chunk, its index) after each.
  template <bool Train, class F> void over_chunks(long from, long count, F &&use) {
    using Chunk = MlpChunk<Real, Train>;
    const long size = Chunk(Arena<Real>{nullptr}, s, weights).used;
    on_threads(count, threads, [&](std::atomic<long> &next) {
      const Memory memory(size * sizeof(Vector<Real>));
      Chunk chunk(Arena<Real>{static_cast<Vector<Real> *>(memory.get())}, s, weights);
      for (long c; (c = next++) < count;) {
        chunk.load(values, (from + c) * kChunk);
        chunk.forward();
        use(chunk, c);
      }
    });
  }
};

// The result to `out`; or, if `gradient` is given, the gradient by parameters, and by
// the input unless `for_values` is null. C knows no exceptions.
template <class Real>
int run_mlp(const MlpSizes &s, const Real *values, const Real *const *parameters,
            Real *out, const Real *out_gradient, Real *gradient, Real *for_values,
            int threads) noexcept {
  try {
    MlpCall<Real> call(s, values, parameters, threads);
    if (gradient)
      call.gradients(out_gradient, gradient, for_values);
    else
      call.forward(out);
    return kDone;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
