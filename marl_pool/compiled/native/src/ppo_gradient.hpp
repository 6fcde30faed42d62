// The gradient of PPO's loss w.r.t. all weights of a policy, in one pass: while a block
// of rows is in the cache, it goes through the network, both heads and the loss, and
// back.
#pragma once

#include "heads.hpp"
#include "ppo_loss.hpp"

namespace marl_pool {

// Results besides logits and values, as Python passes them (ppo.py, class _Results).
struct Results {
  // A pointer for each parameter.
  void *const *network_gradients, *const *action_gradients, *const *value_gradients;
  void *losses, *loss;  // of the rows (B), and their mean
};

// Copy the gradients w.r.t. a perceptron's parameters from a contiguous array.
template <class Real>
void store_gradients(const MlpWeights<Real> &weights, const Real *from, void *const *to) {
  const MlpSizes &s = weights.s;
  for (int l = 0; l < s.layers; l++) {
    const Real *weight = from + weights.offsets[l], *end = from + weights.offsets[l + 1];
    const Real *bias = end - s.widths[l + 1];
    std::copy(weight, bias, static_cast<Real *>(to[2 * l]));
    std::copy(bias, end, static_cast<Real *>(to[2 * l + 1]));
  }
}

// Write the mean loss, the gradients w.r.t. all parameters, and logits and values, which
// the loss reads. Exceptions must not cross the C interface.
template <class Real>
int ppo_gradient(const Sizes &s, const Inputs<Real> &in, const Real *const *parameters,
                 const Heads &heads, const Loss &loss, const Results &results,
                 int threads) noexcept {
  try {
    Call<Real> call(s, in, parameters, threads);
    auto action = action_weights<Real>(heads), value = value_weights<Real>(heads);
    action.transpose();
    value.transpose();
    // Layout of a chunk's sums: network, action head, value head.
    const long action_offset = call.folded.size();
    const long value_offset = action_offset + action.size();
    const auto d_logits = static_cast<const Real *>(loss.logits_gradient);
    const auto d_values = static_cast<const Real *>(loss.values_gradient);
    const auto losses = static_cast<Real *>(results.losses);
    const Real scale = 1 / Real(loss.rows);
    std::vector<Real> total = call.sum_over_chunks(value_offset + value.size(), [&] {
      auto head_block = std::make_unique<HeadBlock<Real, true>>(heads, action, value);
      return [&, head_block = std::move(head_block)](auto &block, Real *sums) {
        head_block->forward(block);
        for (long row = block.first; row < block.first + block.rows; row++)
          if (!row_loss<Real>(loss, row, scale, losses + row))
            return void(call.status = kUnknownAction);
        block.backward(head_block->backward(block, d_logits, d_values,
                                            sums + action_offset, sums + value_offset),
                       sums);
      };
    });
    if (call.status != kDone) return call.status;
    call.store_gradients(total,
                         reinterpret_cast<Real *const *>(results.network_gradients));
    store_gradients(action, &total[action_offset], results.action_gradients);
    store_gradients(value, &total[value_offset], results.value_gradients);
    double sum = 0;  // double, as there are many rows
    for (long row = 0; row < s.rows; row++) sum += losses[row];
    *static_cast<Real *>(results.loss) = Real(sum / s.rows);
    return kDone;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
