// The loss of proximal policy optimization, with its gradient w.r.t. logits and values.
// PPOTerms (training/ppo/loss.py) has the formula.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

namespace marl_pool {

// Sizes, coefficients and columns, as Python passes them (ppo.py, class _Loss).
struct Loss {
  int64_t rows;
  int32_t width;         // logits of a row: of the choices, then means, then log-stds
  int32_t choices;       // K, categorical choices of an action
  const int32_t *sizes;  // options of each choice (K)
  double clip, value_coeff, value_clip, entropy_coeff, kl_coeff;
  void *logits, *values;  // of the current policy
  // Recorded. Actions are int64 (K) if there are no means, otherwise Real: the choices,
  // then the continuous ones.
  const void *actions, *log_probs, *old_logits, *advantages, *targets;
  void *logits_gradient, *values_gradient;

  int options() const { return std::accumulate(sizes, sizes + choices, 0); }
  template <class Real> const Real *row(const void *logits, long number) const {
    return static_cast<const Real *>(logits) + number * width;
  }
};

template <class Real> constexpr Real half_log_2pi = Real(0.91893853320467274178);

// The diagonal Gaussian of a row's continuous actions: log-probability, entropy and
// KL(old ‖ new), and the gradient w.r.t. the logits, given those w.r.t. these three.
template <class Real> struct GaussianRow {
  const int n;
  const Real *mean, *log_std, *old_mean, *old_log_std, *action;

  GaussianRow(int count, const Real *logits, const Real *old_logits, const Real *numbers)
      : n(count), mean(logits), log_std(mean + n), old_mean(old_logits),
        old_log_std(old_mean + n), action(numbers) {}

  bool valid() const { return true; }
  Real log_prob() const {
    Real sum = n * half_log_2pi<Real>;
    for (int i = 0; i < n; i++) sum += log_std[i] + square(z(i)) / 2;
    return -sum;
  }
  Real entropy() const {
    Real sum = n * (half_log_2pi<Real> + Real(0.5));
    for (int i = 0; i < n; i++) sum += log_std[i];
    return sum;
  }
  Real kl() const {
    Real sum = 0;
    for (int i = 0; i < n; i++)
      sum += log_std[i] - old_log_std[i] + (second_moment(i) - 1) / 2;
    return sum;
  }
  void gradient(Real d_log_prob, Real d_entropy, Real d_kl, Real *out) const {
    for (int i = 0; i < n; i++) {
      const Real precision = std::exp(-log_std[i]);
      out[i] = d_log_prob * z(i) * precision;
      // For a huge z the ratio is 0 and z² infinite, whose product would be NaN.
      out[n + i] =
          d_log_prob == 0 ? d_entropy : d_log_prob * (square(z(i)) - 1) + d_entropy;
      if (d_kl == 0) continue;
      out[i] += d_kl * (mean[i] - old_mean[i]) * square(precision);
      out[n + i] += d_kl * (1 - second_moment(i));
    }
  }

private:
  static Real square(Real x) { return x * x; }
  Real z(int i) const { return (action[i] - mean[i]) * std::exp(-log_std[i]); }
  // The old distribution's second moment about the new mean, over the new variance.
  Real second_moment(int i) const {
    return (std::exp(2 * old_log_std[i]) + square(old_mean[i] - mean[i])) *
           std::exp(-2 * log_std[i]);
  }
};

// As GaussianRow, for one choice.
template <class Real> struct CategoricalRow {
  const int n;
  const Real *logits, *old_logits;
  const int64_t action;
  const Real log_sum;

  CategoricalRow(int options, const Real *current, const Real *old, int64_t option)
      : n(options), logits(current), old_logits(old), action(option),
        log_sum(log_sum_exp(logits)) {}

  bool valid() const { return 0 <= action && action < n; }
  Real log_prob() const { return logits[action] - log_sum; }
  Real entropy() const {
    Real sum = 0;
    for (int i = 0; i < n; i++) sum -= probability(i) * (logits[i] - log_sum);
    return sum;
  }
  Real kl() const {
    const Real old_log_sum = log_sum_exp(old_logits);
    Real sum = 0;
    for (int i = 0; i < n; i++) {
      const Real old = old_logits[i] - old_log_sum;
      sum += std::exp(old) * (old - logits[i] + log_sum);
    }
    return sum;
  }
  void gradient(Real d_log_prob, Real d_entropy, Real d_kl, Real *out) const {
    const Real mean = d_entropy == 0 ? 0 : entropy();
    const Real old_log_sum = d_kl == 0 ? 0 : log_sum_exp(old_logits);
    for (int i = 0; i < n; i++) {
      const Real p = probability(i);
      out[i] = d_log_prob * ((i == action) - p);
      if (d_entropy != 0) out[i] -= d_entropy * p * (logits[i] - log_sum + mean);
      if (d_kl != 0) out[i] += d_kl * (p - std::exp(old_logits[i] - old_log_sum));
    }
  }

private:
  Real probability(int i) const { return std::exp(logits[i] - log_sum); }
  Real log_sum_exp(const Real *x) const {
    const Real largest = *std::max_element(x, x + n);
    Real sum = 0;
    for (int i = 0; i < n; i++) sum += std::exp(x[i] - largest);
    return largest + std::log(sum);
  }
};

// As GaussianRow, for several independent choices and numbers.
template <class Real> struct JointRow {
  const Loss &s;
  const Real *logits, *old_logits;
  const int numbers;
  const int64_t *options;  // the action if it has no numbers
  const Real *action;      // the action otherwise

  JointRow(const Loss &loss, long row)
      : s(loss), logits(s.row<Real>(s.logits, row)),
        old_logits(s.row<Real>(s.old_logits, row)),
        numbers((s.width - s.options()) / 2),
        options(static_cast<const int64_t *>(s.actions) + row * s.choices),
        action(static_cast<const Real *>(s.actions) + row * (s.choices + numbers)) {}

  bool valid() const {
    bool result = true;
    for_each([&](const auto &part, int) { result = result && part.valid(); });
    return result;
  }
  Real log_prob() const {
    return sum([](const auto &part) { return part.log_prob(); });
  }
  Real entropy() const {
    return sum([](const auto &part) { return part.entropy(); });
  }
  Real kl() const {
    return sum([](const auto &part) { return part.kl(); });
  }
  void gradient(Real d_log_prob, Real d_entropy, Real d_kl, Real *out) const {
    for_each([&](const auto &part, int first) {
      part.gradient(d_log_prob, d_entropy, d_kl, out + first);
    });
  }

private:
  template <class Visit> void for_each(Visit visit) const {
    int first = 0;
    for (int k = 0; k < s.choices; first += s.sizes[k++]) {
      // A number that is no option, such as NaN, becomes -1, which `valid` refuses.
      const int64_t option = !numbers                                   ? options[k]
                             : action[k] >= 0 && action[k] < s.sizes[k] ? int64_t(action[k])
                                                                        : -1;
      visit(CategoricalRow<Real>(s.sizes[k], logits + first, old_logits + first, option),
            first);
    }
    if (numbers)
      visit(GaussianRow<Real>(numbers, logits + first, old_logits + first,
                              action + s.choices),
            first);
  }
  template <class Value> Real sum(Value value) const {
    Real total = 0;
    for_each([&](const auto &part, int) { total += value(part); });
    return total;
  }
};

// Return the loss of one row, and store its gradient times `scale`.
template <class Real, class Distribution>
Real row_loss(const Loss &s, const Distribution &distribution, long row, Real scale) {
  const auto column = [&](const void *memory) {
    return static_cast<const Real *>(memory)[row];
  };
  // Clip the ratio where that lowers the objective. The comparisons propagate NaN.
  const Real advantage = column(s.advantages), clip = Real(s.clip);
  const Real ratio = std::exp(distribution.log_prob() - column(s.log_probs));
  const Real clipped = advantage * std::clamp(ratio, 1 - clip, 1 + clip);
  const bool unclipped = !(advantage * ratio > clipped);
  Real loss = unclipped ? -advantage * ratio : -clipped;
  // The squared error of the value, limited so that outliers do not dominate.
  const Real error = column(s.values) - column(s.targets), coeff = Real(s.value_coeff);
  const bool within_clip = !(error * error > Real(s.value_clip));
  loss += coeff * (within_clip ? error * error : Real(s.value_clip));
  if (s.entropy_coeff != 0) loss -= Real(s.entropy_coeff) * distribution.entropy();
  if (s.kl_coeff != 0) loss += Real(s.kl_coeff) * distribution.kl();

  distribution.gradient(unclipped ? -scale * advantage * ratio : 0,
                        -scale * Real(s.entropy_coeff), scale * Real(s.kl_coeff),
                        static_cast<Real *>(s.logits_gradient) + row * s.width);
  static_cast<Real *>(s.values_gradient)[row] =
      within_clip ? scale * 2 * coeff * error : 0;
  return loss;
}

// The same for the distribution of the actions' kind; writes the loss to `result`. False
// if an action is not among the choices.
template <class Real>
bool row_loss(const Loss &s, long row, Real scale, Real *result) noexcept {
  const auto compute = [&](const auto &distribution) {
    if (!distribution.valid()) return false;
    *result = row_loss<Real>(s, distribution, row, scale);
    return true;
  };
  const Real *logits = s.row<Real>(s.logits, row), *old = s.row<Real>(s.old_logits, row);
  if (s.choices == 0) {
    const int n = s.width / 2;
    const auto action = static_cast<const Real *>(s.actions) + row * n;
    return compute(GaussianRow<Real>(n, logits, old, action));
  }
  if (s.choices == 1 && s.sizes[0] == s.width) {
    const auto option = static_cast<const int64_t *>(s.actions)[row];
    return compute(CategoricalRow<Real>(s.width, logits, old, option));
  }
  return compute(JointRow<Real>(s, row));
}

// Write the mean loss to `result`; false if an action is not among the choices.
template <class Real> bool ppo_loss(const Loss &s, Real *result) noexcept {
  const Real scale = 1 / Real(s.rows);
  double sum = 0;  // double, as there are many rows
  for (long row = 0; row < s.rows; row++) {
    Real loss;
    if (!row_loss<Real>(s, row, scale, &loss)) return false;
    sum += loss;
  }
  *result = Real(sum / s.rows);
  return true;
}

}  // namespace marl_pool
