// The C interface for double, called by call.py.
#include "kernel.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int marl_pool_run_double(
    const marl_pool::Sizes *sizes, const double *values, const int64_t *types,
    const uint8_t *padding, const double *const *parameters, double *out,
    const double *out_gradient, double *const *gradients, double *for_values,
    int threads) {
  return marl_pool::run<double>(*sizes, {values, types, padding}, parameters, out,
                             out_gradient, gradients, for_values, threads);
}
