// The C interface for one number type, called by call.py. REAL is float or double, and
// NAME(function) is marl_pool_function_float or …_double.
#pragma once

#include "ppo_gradient.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int NAME(run)(const marl_pool::Sizes *sizes, const REAL *values,
                     const int64_t *types, const uint8_t *padding,
                     const REAL *const *parameters, REAL *out, const REAL *out_gradient,
                     REAL *const *gradients, REAL *values_gradient, int threads) {
  return marl_pool::run<REAL>(*sizes, {values, types, padding}, parameters, out,
                              out_gradient, gradients, values_gradient, threads);
}

EXPORT int NAME(mlp)(const marl_pool::MlpSizes *sizes, const REAL *values,
                     const REAL *const *parameters, REAL *out, const REAL *out_gradient,
                     REAL *gradient, REAL *values_gradient, int threads) {
  return marl_pool::run_mlp<REAL>(*sizes, values, parameters, out, out_gradient, gradient,
                                  values_gradient, threads);
}

EXPORT bool NAME(ppo_loss)(const marl_pool::Loss *loss, REAL *result) {
  return marl_pool::ppo_loss<REAL>(*loss, result);
}

EXPORT int NAME(actor_critic)(const marl_pool::Sizes *sizes, const REAL *values,
                              const int64_t *types, const uint8_t *padding,
                              const REAL *const *parameters,
                              const marl_pool::Heads *heads, int threads) {
  return marl_pool::run_actor_critic<REAL>(*sizes, {values, types, padding}, parameters,
                                           *heads, threads);
}

EXPORT int NAME(ppo_gradient)(const marl_pool::Sizes *sizes, const REAL *values,
                              const int64_t *types, const uint8_t *padding,
                              const REAL *const *parameters,
                              const marl_pool::Heads *heads, const marl_pool::Loss *loss,
                              const marl_pool::Results *results, int threads) {
  return marl_pool::ppo_gradient<REAL>(*sizes, {values, types, padding}, parameters,
                                       *heads, *loss, *results, threads);
}
