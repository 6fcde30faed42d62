// The loss of proximal policy optimization, with its gradient by logits and values. The
// formula is that of PPOTerms (training/ppo/loss.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>

namespace marl_pool {

// Sizes, coefficients and columns, as Python passes them (ppo.py, class _Loss).
struct Loss {
  int64_t rows;
  int32_t width;    // logits of a row: those of choices, then means, then log-stds
  int32_t choices;  // K, choices of an action
  const int32_t *sizes;  // options of each choice (K)
  double clip, value_coeff, value_clip, entropy_coeff, kl_coeff;
  void *logits, *values;  // of the current policy
  // Recorded. Actions are int64 (K) where there are no means, otherwise the choices and
  // then the numbers.
  const void *actions, *log_probs, *old_logits, *advantages, *targets;  // recorded
  void *for_logits, *for_values;  // gradients

  int options() const { return std::accumulate(sizes, sizes + choices, 0); }
  template <class Real> const Real *row(const void *logits, long number) const {
    return static_cast<const Real *>(logits) + number * width;
  }
};

template <class Real> constexpr Real half_log_2pi = Real(0.91893853320467274178);

// The distribution of a row's numbers, a diagonal Gaussian: its logarithms, and what is
// added to the gradient by the logits for given gradients by the logarithms.
template <class Real> struct GaussianRow {
  const int n;
  const Real *mean, *log_std, *old_mean, *old_log_std, *action;

  GaussianRow(int count, const Real *logits, const Real *old_logits, const Real *numbers)
      : n(count), mean(logits), log_std(mean + n), old_mean(old_logits),
        old_log_std(old_mean + n), action(numbers) {}

  bool valid() const { return true; }
  Real log_prob() const {
    Real sum = n * half_log_2pi<Real>;
    for (int i = 0; i < n; i++) sum += log_std[i] + square(error(i)) / 2;
    return -sum;
  }
  Real entropy() const {
    Real sum = n * (half_log_2pi<Real> + Real(0.5));
    for (int i = 0; i < n; i++) sum += log_std[i];
    return sum;
  }
  Real divergence() const {
    Real sum = 0;
    for (int i = 0; i < n; i++)
      sum += log_std[i] - old_log_std[i] + (spread(i) - 1) / 2;
    return sum;
  }
  void gradient(Real by_log_prob, Real by_entropy, Real by_divergence, Real *out) const {
    for (int i = 0; i < n; i++) {
      const Real precision = std::exp(-log_std[i]);
      out[i] = by_log_prob * error(i) * precision;
      // The square of a huge error is infinite, and its ratio 0.
      out[n + i] =
          by_log_prob == 0 ? by_entropy : by_log_prob * (square(error(i)) - 1) + by_entropy;
      if (by_divergence == 0) continue;
      out[i] += by_divergence * (mean[i] - old_mean[i]) * square(precision);
      out[n + i] += by_divergence * (1 - spread(i));
    }
  }

private:
  static Real square(Real x) { return x * x; }
  Real error(int i) const { return (action[i] - mean[i]) * std::exp(-log_std[i]); }
  // The mean square of the old distribution in units of the new one.
  Real spread(int i) const {
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
  Real divergence() const {
    const Real old_log_sum = log_sum_exp(old_logits);
    Real sum = 0;
    for (int i = 0; i < n; i++) {
      const Real old = old_logits[i] - old_log_sum;
      sum += std::exp(old) * (old - logits[i] + log_sum);
    }
    return sum;
  }
  void gradient(Real by_log_prob, Real by_entropy, Real by_divergence, Real *out) const {
    const Real mean = by_entropy == 0 ? 0 : entropy();
    const Real old_log_sum = by_divergence == 0 ? 0 : log_sum_exp(old_logits);
    for (int i = 0; i < n; i++) {
      const Real p = probability(i);
      out[i] = by_log_prob * ((i == action) - p);
      if (by_entropy != 0) out[i] -= by_entropy * p * (logits[i] - log_sum + mean);
      if (by_divergence != 0)
        out[i] += by_divergence * (p - std::exp(old_logits[i] - old_log_sum));
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
  const int64_t *options;  // of all choices, where there are no numbers
  const Real *action;      // otherwise

  JointRow(const Loss &loss, long row)
      : s(loss), logits(s.row<Real>(s.logits, row)),
        old_logits(s.row<Real>(s.old_logits, row)),
        numbers((s.width - s.options()) / 2),
        options(static_cast<const int64_t *>(s.actions) + row * s.choices),
        action(static_cast<const Real *>(s.actions) + row * (s.choices + numbers)) {}

  bool valid() const {
    bool result = true;
    each([&](const auto &part, int) { result = result && part.valid(); });
    return result;
  }
  Real log_prob() const {
    return sum([](const auto &part) { return part.log_prob(); });
  }
  Real entropy() const {
    return sum([](const auto &part) { return part.entropy(); });
  }
  Real divergence() const {
    return sum([](const auto &part) { return part.divergence(); });
  }
  void gradient(Real by_log_prob, Real by_entropy, Real by_divergence, Real *out) const {
    each([&](const auto &part, int first) {
      part.gradient(by_log_prob, by_entropy, by_divergence, out + first);
    });
  }

private:
  template <class Visit> void each(Visit visit) const {
    int first = 0;
    for (int k = 0; k < s.choices; first += s.sizes[k++]) {
      // A number that is no option, such as NaN, becomes one that is refused.
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
    each([&](const auto &part, int) { total += value(part); });
    return total;
  }
};

// The loss of one row; its gradient, times `scale`, is stored.
template <class Real, class Distribution>
Real row_loss(const Loss &s, const Distribution &distribution, long row, Real scale) {
  const auto column = [&](const void *numbers) {
    return static_cast<const Real *>(numbers)[row];
  };
  // Clip the ratio where that lowers the objective. NaN stays NaN in all comparisons.
  const Real advantage = column(s.advantages), clip = Real(s.clip);
  const Real ratio = std::exp(distribution.log_prob() - column(s.log_probs));
  const Real limited = advantage * std::clamp(ratio, 1 - clip, 1 + clip);
  const bool kept = !(advantage * ratio > limited);
  Real loss = kept ? -advantage * ratio : -limited;
  // The values' error, limited so that outliers do not dominate.
  const Real error = column(s.values) - column(s.targets), coeff = Real(s.value_coeff);
  const bool inside = !(error * error > Real(s.value_clip));
  loss += coeff * (inside ? error * error : Real(s.value_clip));
  if (s.entropy_coeff != 0) loss -= Real(s.entropy_coeff) * distribution.entropy();
  if (s.kl_coeff != 0) loss += Real(s.kl_coeff) * distribution.divergence();

  distribution.gradient(kept ? -scale * advantage * ratio : 0,
                        -scale * Real(s.entropy_coeff),
                        scale * Real(s.kl_coeff),
                        static_cast<Real *>(s.for_logits) + row * s.width);
  static_cast<Real *>(s.for_values)[row] = inside ? scale * 2 * coeff * error : 0;
  return loss;
}

// The same for the distribution that the actions have; false if an action is not among
// the choices.
template <class Real>
bool row_loss(const Loss &s, long row, Real scale, Real *result) noexcept {
  const auto of = [&](const auto &distribution) {
    if (!distribution.valid()) return false;
    *result = row_loss<Real>(s, distribution, row, scale);
    return true;
  };
  const Real *logits = s.row<Real>(s.logits, row), *old = s.row<Real>(s.old_logits, row);
  if (s.choices == 0) {
    const int n = s.width / 2;
    const auto numbers = static_cast<const Real *>(s.actions) + row * n;
    return of(GaussianRow<Real>(n, logits, old, numbers));
  }
  if (s.choices == 1 && s.sizes[0] == s.width) {
    const auto option = static_cast<const int64_t *>(s.actions)[row];
    return of(CategoricalRow<Real>(s.width, logits, old, option));
  }
  return of(JointRow<Real>(s, row));
}

// The mean loss to `result`; false if an action is not among the choices.
template <class Real> bool ppo_loss(const Loss &s, Real *result) noexcept {
  const Real scale = 1 / Real(s.rows);
  double sum = 0;  // of many rows
  for (long row = 0; row < s.rows; row++) {
    Real loss;
    if (!row_loss<Real>(s, row, scale, &loss)) return false;
    sum += loss;
  }
  *result = Real(sum / s.rows);
  return true;
}

}  // namespace marl_pool
