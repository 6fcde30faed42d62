// The C interface for double, called by call.py.
#include "ppo_gradient.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int marl_pool_run_double(
    const marl_pool::Sizes *sizes, const double *values, const int64_t *types,
    const uint8_t *padding, const double *const *parameters, double *out,
    const double *out_gradient, double *const *gradients, double *for_values,
    int threads) {
  return marl_pool::run<double>(*sizes, {values, types, padding}, parameters, out,
                             out_gradient, gradients, for_values, threads);
}

EXPORT int marl_pool_mlp_double(const marl_pool::MlpSizes *sizes, const double *values,
                                const double *const *parameters, double *out,
                                const double *out_gradient, double *gradient,
                                double *for_values, int threads) {
  return marl_pool::run_mlp<double>(*sizes, values, parameters, out, out_gradient,
                                    gradient, for_values, threads);
}

EXPORT bool marl_pool_ppo_loss_double(const marl_pool::Loss *loss, double *result) {
  return marl_pool::ppo_loss<double>(*loss, result);
}

EXPORT int marl_pool_actor_critic_double(
    const marl_pool::Sizes *sizes, const double *values, const int64_t *types,
    const uint8_t *padding, const double *const *parameters, const marl_pool::Heads *heads,
    int threads) {
  return marl_pool::run_actor_critic<double>(*sizes, {values, types, padding}, parameters,
                                         *heads, threads);
}

EXPORT int marl_pool_ppo_gradient_double(
    const marl_pool::Sizes *sizes, const double *values, const int64_t *types,
    const uint8_t *padding, const double *const *parameters, const marl_pool::Heads *heads,
    const marl_pool::Loss *loss, const marl_pool::Results *results, int threads) {
  return marl_pool::ppo_gradient<double>(*sizes, {values, types, padding}, parameters,
                                     *heads, *loss, *results, threads);
}
