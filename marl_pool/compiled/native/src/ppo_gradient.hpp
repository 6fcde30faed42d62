// The gradient of PPO's loss by all weights of a policy, in one pass: while a block of rows
// is in the cache it goes through the network, both heads and the loss, and back.
#pragma once

#include "heads.hpp"
#include "ppo_loss.hpp"

namespace marl_pool {

// Results besides logits and values, as Python passes them (ppo.py, class _Results).
struct Results {
  void *const *for_network, *const *for_action, *const *for_value;  // by parameter
  void *losses, *loss;  // of the rows (B), and their mean
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

// The mean loss and the gradients by all parameters; logits and values are stored where
// the loss reads them. C knows no exceptions.
template <class Real>
int ppo_gradient(const Sizes &s, const Inputs<Real> &in, const Real *const *parameters,
                 const Heads &heads, const Loss &loss, const Results &results,
                 int threads) noexcept {
  try {
    Call<Real> call(s, in, parameters, threads);
    auto action = action_weights<Real>(heads), value = value_weights<Real>(heads);
    action.transpose();
    value.transpose();
    // The sums of a chunk: for the network, then for the heads.
    const long network = call.folded.size(), both = network + action.size();
    const auto by_logits = static_cast<const Real *>(loss.for_logits);
    const auto by_values = static_cast<const Real *>(loss.for_values);
    const auto losses = static_cast<Real *>(results.losses);
    const Real scale = 1 / Real(loss.rows);
    std::vector<Real> total = call.sum_over_chunks(both + value.size(), [&] {
      auto own = std::make_unique<HeadBlock<Real, true>>(heads, action, value);
      return [&, own = std::move(own)](auto &block, Real *sums) {
        own->forward(block);
        for (long row = block.first; row < block.first + block.rows; row++)
          if (!row_loss<Real>(loss, row, scale, losses + row))
            return void(call.status = kUnknownAction);
        block.backward(
            own->backward(block, by_logits, by_values, sums + network, sums + both),
            sums);
      };
    });
    if (call.status != kDone) return call.status;
    call.store_gradients(total, reinterpret_cast<Real *const *>(results.for_network));
    store_gradients(action, &total[network], results.for_action);
    store_gradients(value, &total[both], results.for_value);
    double sum = 0;  // of many rows
    for (long row = 0; row < s.rows; row++) sum += losses[row];
    *static_cast<Real *>(results.loss) = Real(sum / s.rows);
    return kDone;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
