// The gradient of PPO's loss by all weights of a policy, in one pass: while a block of rows
// is in the cache it goes through the network, both heads and the loss, and back.
#pragma once

#include "mlp.hpp"
#include "ppo_loss.hpp"

namespace marl_pool {

// What follows the network, as Python passes it (ppo_gradient.py, class _Heads).
struct Heads {
  MlpSizes action, value;
  const void *const *action_weights, *const *value_weights;
  const void *lowest, *highest;  // limits of the logits (L), or null
  const void *value_scale;       // factors of the values (B), or null
  void *losses;                  // of the rows (B)
  void *const *for_action, *const *for_value;  // gradients by the weights of a head
};

// Both heads and the loss for blocks of rows, with memory of its own.
template <class Real> class HeadBlock {
  using V = Vector<Real>;
  static constexpr int W = lanes<Real>;

public:
  HeadBlock(const Heads &heads, const Loss &loss_, const MlpWeights<Real> &action_weights,
            const MlpWeights<Real> &value_weights, std::atomic<Status> &status_)
      : s(heads), loss(loss_), status(status_), D(heads.action.widths[0]),
        memory(sizeof(V) * (Chunk({nullptr}, s.action, action_weights, W).used +
                            Chunk({nullptr}, s.value, value_weights, W).used + D +
                            loss.width)),
        action({static_cast<V *>(memory.get())}, s.action, action_weights, W),
        value({static_cast<V *>(memory.get()) + action.used}, s.value, value_weights, W),
        by_pooled(static_cast<V *>(memory.get()) + action.used + value.used),
        inside(by_pooled + D) {}

  // Add to the gradients by the network's folded weights, `for_network`, and by those of
  // both heads.
  void operator()(Block<Real, true> &block, Real *for_network, Real *for_action,
                  Real *for_value) {
    forward(block);
    const Real scale = 1 / Real(loss.rows);
    for (int r = 0; r < block.rows; r++) {
      const long row = block.first + r;
      if (!row_loss<Real>(loss, row, scale, static_cast<Real *>(s.losses) + row))
        return void(status = kUnknownAction);
    }
    backward(block, for_action, for_value);
    block.backward(by_pooled, for_network);
  }

private:
  using Chunk = MlpChunk<Real, true>;

  // Logits and values of the rows, stored for the loss and for Python.
  void forward(const Block<Real, true> &block) {
    action.load_vector(block.result, block.rows);
    action.forward();
    const auto lowest = static_cast<const Real *>(s.lowest);
    const auto highest = static_cast<const Real *>(s.highest);
    auto *logits = static_cast<Real *>(loss.logits) + block.first * loss.width;
    for (int o = 0; o < loss.width; o++) {
      V x = action.result()(0, o);
      if (lowest) {
        const V low = splat<Real>(lowest[o]), high = splat<Real>(highest[o]);
        inside[o] = (x >= low) & (x <= high) ? splat<Real>(1) : V{};
        x = x < low ? low : x > high ? high : x;  // NaN stays
      }
      for (int r = 0; r < block.rows; r++) logits[long(r) * loss.width + o] = x[r];
    }
    value.load_vector(block.result, block.rows);
    value.forward();
    auto *values = static_cast<Real *>(loss.values) + block.first;
    for (int r = 0; r < block.rows; r++)
      values[r] = value.result()(0, 0)[r] * value_scale(block.first + r);
  }

  // `by_pooled`, the gradient by the result of the pooling head.
  void backward(const Block<Real, true> &block, Real *for_action, Real *for_value) {
    const Real *by_logits =
        static_cast<const Real *>(loss.for_logits) + block.first * loss.width;
    for (int o = 0; o < loss.width; o++) {
      V &x = action.dy(0, o) = V{};
      for (int r = 0; r < block.rows; r++) x[r] = by_logits[long(r) * loss.width + o];
      if (s.lowest) x = inside[o] > 0 ? x : V{};
    }
    action.backward(for_action, true);
    V &x = value.dy(0, 0) = V{};
    for (int r = 0; r < block.rows; r++) {
      const long row = block.first + r;
      x[r] = static_cast<const Real *>(loss.for_values)[row] * value_scale(row);
    }
    value.backward(for_value, true);
    for (int d = 0; d < D; d++)
      by_pooled[d] = action.dy(0, d) + value.dy(0, d);
  }

  Real value_scale(long row) const {
    return s.value_scale ? static_cast<const Real *>(s.value_scale)[row] : Real(1);
  }

  const Heads &s;
  const Loss &loss;
  std::atomic<Status> &status;
  const int D;  // width of the network's result
  const Memory memory;
  Chunk action, value;
  V *by_pooled;  // gradient by the network's result
  V *inside;     // 1 where a logit is within its limits
};

// Write the gradients by a perceptron's parameters, which lie one behind the other.
template <class Real>
void store_gradients(const MlpWeights<Real> &weights, const Real *from, void *const *to) {
  const MlpSizes &s = weights.s;
  for (int l = 0; l < s.layers; l++) {
    const Real *weight = from + weights.at[l], *end = from + weights.at[l + 1];
    const Real *bias = end - s.widths[l + 1];
    std::copy(weight, bias, static_cast<Real *>(to[2 * l]));
    std::copy(bias, end, static_cast<Real *>(to[2 * l + 1]));
  }
}

// The mean loss to `result`, and the gradients by all parameters; logits and values are
// stored where the loss reads them. C knows no exceptions.
template <class Real>
int ppo_gradient(const Sizes &s, const Inputs<Real> &in, const Real *const *parameters,
                 const Heads &heads, const Loss &loss, Real *const *gradients,
                 Real *result, int threads) noexcept {
  try {
    Call<Real> call(s, in, parameters, threads);
    const auto weights = [](const void *const *at) {
      return reinterpret_cast<const Real *const *>(at);
    };
    MlpWeights<Real> action(heads.action, weights(heads.action_weights));
    MlpWeights<Real> value(heads.value, weights(heads.value_weights));
    action.transpose();
    value.transpose();
    // The sums of a chunk: for the network, then for the heads.
    const long network = call.folded.size(), both = network + action.size();
    std::vector<Real> total = call.sum_over_chunks(both + value.size(), [&] {
      auto own = std::make_unique<HeadBlock<Real>>(heads, loss, action, value, call.status);
      return [own = std::move(own), network, both](auto &block, Real *sums) {
        (*own)(block, sums, sums + network, sums + both);
      };
    });
    if (call.status != kDone) return call.status;
    call.store_gradients(total, gradients);
    store_gradients(action, &total[network], heads.for_action);
    store_gradients(value, &total[both], heads.for_value);
    double sum = 0;  // of many rows
    for (long row = 0; row < s.rows; row++) sum += static_cast<Real *>(heads.losses)[row];
    *result = Real(sum / s.rows);
    return kDone;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
