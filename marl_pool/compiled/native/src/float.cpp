// The C interface for float, called by call.py.
#include "ppo_gradient.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int marl_pool_run_float(
    const marl_pool::Sizes *sizes, const float *values, const int64_t *types,
    const uint8_t *padding, const float *const *parameters, float *out,
    const float *out_gradient, float *const *gradients, float *for_values,
    int threads) {
  return marl_pool::run<float>(*sizes, {values, types, padding}, parameters, out,
                            out_gradient, gradients, for_values, threads);
}

EXPORT int marl_pool_mlp_float(const marl_pool::MlpSizes *sizes, const float *values,
                               const float *const *parameters, float *out,
                               const float *out_gradient, float *gradient,
                               float *for_values, int threads) {
  return marl_pool::run_mlp<float>(*sizes, values, parameters, out, out_gradient,
                                   gradient, for_values, threads);
}

EXPORT bool marl_pool_ppo_loss_float(const marl_pool::Loss *loss, float *result) {
  return marl_pool::ppo_loss<float>(*loss, result);
}

EXPORT int marl_pool_actor_critic_float(
    const marl_pool::Sizes *sizes, const float *values, const int64_t *types,
    const uint8_t *padding, const float *const *parameters, const marl_pool::Heads *heads,
    int threads) {
  return marl_pool::run_actor_critic<float>(*sizes, {values, types, padding}, parameters,
                                         *heads, threads);
}

EXPORT int marl_pool_ppo_gradient_float(
    const marl_pool::Sizes *sizes, const float *values, const int64_t *types,
    const uint8_t *padding, const float *const *parameters, const marl_pool::Heads *heads,
    const marl_pool::Loss *loss, const marl_pool::Results *results, int threads) {
  return marl_pool::ppo_gradient<float>(*sizes, {values, types, padding}, parameters,
                                     *heads, *loss, *results, threads);
}

// The level of the instruction set that this machine has: 2, 3 or 4 for x86-64-v2 to v4.
EXPORT int marl_pool_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2");
  const bool v4 =
      __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl");
  return v3 && v4 ? 4 : v3 ? 3 : 2;
#else
  return 0;
#endif
}

// A hash of the sources that this library was built from.
EXPORT const char *marl_pool_sources() { return MARL_POOL_SOURCES; }
