// A policy: the network and both heads, while a block of rows is in the cache.
#pragma once

#include <memory>

#include "mlp.hpp"

namespace marl_pool {

// What follows the network, as Python passes it (actor_critic.py, class _Heads).
struct Heads {
  MlpSizes action, value;
  const void *const *action_weights, *const *value_weights;
  const void *lowest, *highest;  // bounds to which the logits are clamped (L), or null
  const void *value_scale;       // factors of the values (B), or null for 1
  void *logits, *values;         // results: (B, L), (B)

  int num_logits() const { return action.widths[action.layers]; }
};

template <class Real> MlpWeights<Real> action_weights(const Heads &s) {
  return {s.action, reinterpret_cast<const Real *const *>(s.action_weights)};
}
template <class Real> MlpWeights<Real> value_weights(const Heads &s) {
  return {s.value, reinterpret_cast<const Real *const *>(s.value_weights)};
}

// Both heads of one block of rows, with their own memory.
template <class Real, bool Train> class HeadBlock {
  using V = Vector<Real>;
  using RowBlock = Block<Real, Train>;
  using Chunk = MlpChunk<Real, Train>;
  static constexpr int W = lanes<Real>;

public:
  HeadBlock(const Heads &heads, const MlpWeights<Real> &w_action,
            const MlpWeights<Real> &w_value)
      : s(heads), D(heads.action.widths[0]), L(heads.num_logits()),
        workspace(sizeof(V) * (Chunk({nullptr}, s.action, w_action, W).used +
                               Chunk({nullptr}, s.value, w_value, W).used + D + L)),
        action({static_cast<V *>(workspace.get())}, s.action, w_action, W),
        value({static_cast<V *>(workspace.get()) + action.used}, s.value, w_value, W),
        d_pooled(static_cast<V *>(workspace.get()) + action.used + value.used),
        within_limits(d_pooled + D) {}

  // Write the rows' logits and values.
  void forward(const RowBlock &block) {
    action.load_vector(block.result, block.rows);
    action.forward();
    const auto lowest = static_cast<const Real *>(s.lowest);
    const auto highest = static_cast<const Real *>(s.highest);
    Real *logits = static_cast<Real *>(s.logits) + block.first * L;
    for (int o = 0; o < L; o++) {
      V x = action.result()(0, o);
      if (lowest) {
        const V low = splat<Real>(lowest[o]), high = splat<Real>(highest[o]);
        within_limits[o] = ((x >= low) & (x <= high)) ? splat<Real>(1) : V{};
        x = x < low ? low : x > high ? high : x;  // propagates NaN
      }
      for (int r = 0; r < block.rows; r++) logits[long(r) * L + o] = x[r];
    }
    value.load_vector(block.result, block.rows);
    value.forward();
    Real *values = static_cast<Real *>(s.values) + block.first;
    for (int r = 0; r < block.rows; r++)
      values[r] = value.result()(0, 0)[r] * value_scale(block.first + r);
  }

  // Add to the gradients w.r.t. each head's weights, given those w.r.t. logits and
  // values, and return that w.r.t. the pooling head's result.
  const V *backward(const RowBlock &block, const Real *d_logits, const Real *d_values,
                    Real *action_gradient, Real *value_gradient) {
    for (int o = 0; o < L; o++) {
      V &x = action.dy(0, o) = V{};
      for (int r = 0; r < block.rows; r++) x[r] = d_logits[(block.first + r) * L + o];
      if (s.lowest) x = within_limits[o] > 0 ? x : V{};
    }
    action.backward(action_gradient, true);
    V &x = value.dy(0, 0) = V{};
    for (int r = 0; r < block.rows; r++) {
      const long row = block.first + r;
      x[r] = d_values[row] * value_scale(row);
    }
    value.backward(value_gradient, true);
    for (int d = 0; d < D; d++) d_pooled[d] = action.dy(0, d) + value.dy(0, d);
    return d_pooled;
  }

private:
  Real value_scale(long row) const {
    return s.value_scale ? static_cast<const Real *>(s.value_scale)[row] : Real(1);
  }

  const Heads &s;
  const int D, L;  // width of the network's result, number of logits
  const Workspace workspace;
  Chunk action, value;
  V *d_pooled;       // gradient w.r.t. the network's result
  V *within_limits;  // 1 where a logit is not clamped
};

// Write logits and values. Exceptions must not cross the C interface.
template <class Real>
int run_actor_critic(const Sizes &s, const Inputs<Real> &in,
                     const Real *const *parameters, const Heads &heads,
                     int threads) noexcept {
  try {
    Call<Real> call(s, in, parameters, threads);
    const auto action = action_weights<Real>(heads), value = value_weights<Real>(heads);
    call.forward([&] {
      auto head_block = std::make_unique<HeadBlock<Real, false>>(heads, action, value);
      return [head_block = std::move(head_block)](auto &block, long) {
        head_block->forward(block);
      };
    });
    return call.status;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
