// A policy: the network, and both heads while a block of rows is in the cache.
#pragma once

#include <memory>

#include "mlp.hpp"

namespace marl_pool {

// What follows the network, as Python passes it (actor_critic.py, class _Heads).
struct Heads {
  MlpSizes action, value;
  const void *const *action_weights, *const *value_weights;
  const void *lowest, *highest;  // limits of the logits (L), or null
  const void *value_scale;       // factors of the values (B), or null
  void *logits, *values;         // results: (B, L), (B)

  int num_logits() const { return action.widths[action.layers]; }
};

template <class Real> MlpWeights<Real> action_weights(const Heads &s) {
  return {s.action, reinterpret_cast<const Real *const *>(s.action_weights)};
}
template <class Real> MlpWeights<Real> value_weights(const Heads &s) {
  return {s.value, reinterpret_cast<const Real *const *>(s.value_weights)};
}

// Both heads of one block of rows, with memory of its own.
template <class Real, bool Train> class HeadBlock {
  using V = Vector<Real>;
  using Rows = Block<Real, Train>;
  using Chunk = MlpChunk<Real, Train>;
  static constexpr int W = lanes<Real>;

public:
  HeadBlock(const Heads &heads, const MlpWeights<Real> &for_action,
            const MlpWeights<Real> &for_value)
      : s(heads), D(heads.action.widths[0]), L(heads.num_logits()),
        memory(sizeof(V) * (Chunk({nullptr}, s.action, for_action, W).used +
                            Chunk({nullptr}, s.value, for_value, W).used + D + L)),
        action({static_cast<V *>(memory.get())}, s.action, for_action, W),
        value({static_cast<V *>(memory.get()) + action.used}, s.value, for_value, W),
        by_pooled(static_cast<V *>(memory.get()) + action.used + value.used),
        inside(by_pooled + D) {}

  // Store logits and values of the rows.
  void forward(const Rows &block) {
    action.load_vector(block.result, block.rows);
    action.forward();
    const auto lowest = static_cast<const Real *>(s.lowest);
    const auto highest = static_cast<const Real *>(s.highest);
    Real *logits = static_cast<Real *>(s.logits) + block.first * L;
    for (int o = 0; o < L; o++) {
      V x = action.result()(0, o);
      if (lowest) {
        const V low = splat<Real>(lowest[o]), high = splat<Real>(highest[o]);
        inside[o] = ((x >= low) & (x <= high)) ? splat<Real>(1) : V{};
        x = x < low ? low : x > high ? high : x;  // NaN stays
      }
      for (int r = 0; r < block.rows; r++) logits[long(r) * L + o] = x[r];
    }
    value.load_vector(block.result, block.rows);
    value.forward();
    Real *values = static_cast<Real *>(s.values) + block.first;
    for (int r = 0; r < block.rows; r++)
      values[r] = value.result()(0, 0)[r] * value_scale(block.first + r);
  }

  // Add to the gradients by each head's weights, given those by logits and values, and
  // return that by the result of the pooling head.
  const V *backward(const Rows &block, const Real *by_logits, const Real *by_values,
                    Real *for_action, Real *for_value) {
    for (int o = 0; o < L; o++) {
      V &x = action.dy(0, o) = V{};
      for (int r = 0; r < block.rows; r++) x[r] = by_logits[(block.first + r) * L + o];
      if (s.lowest) x = inside[o] > 0 ? x : V{};
    }
    action.backward(for_action, true);
    V &x = value.dy(0, 0) = V{};
    for (int r = 0; r < block.rows; r++) {
      const long row = block.first + r;
      x[r] = by_values[row] * value_scale(row);
    }
    value.backward(for_value, true);
    for (int d = 0; d < D; d++) by_pooled[d] = action.dy(0, d) + value.dy(0, d);
    return by_pooled;
  }

private:
  Real value_scale(long row) const {
    return s.value_scale ? static_cast<const Real *>(s.value_scale)[row] : Real(1);
  }

  const Heads &s;
  const int D, L;  // widths of the network's result and of the logits
  const Memory memory;
  Chunk action, value;
  V *by_pooled;  // gradient by the network's result
  V *inside;     // 1 where a logit is within its limits
};

// Logits and values. C knows no exceptions.
template <class Real>
int run_actor_critic(const Sizes &s, const Inputs<Real> &in,
                     const Real *const *parameters, const Heads &heads,
                     int threads) noexcept {
  try {
    Call<Real> call(s, in, parameters, threads);
    const auto action = action_weights<Real>(heads), value = value_weights<Real>(heads);
    call.forward([&] {
      auto own = std::make_unique<HeadBlock<Real, false>>(heads, action, value);
      return [own = std::move(own)](auto &block, long) { own->forward(block); };
    });
    return call.status;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
