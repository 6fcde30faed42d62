#define REAL float
#define NAME(function) marl_pool_##function##_float
#include "c_interface.hpp"

// The x86-64 level of this machine, 2 to 4; 0 on other architectures.
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

// The hash of the sources that this library was built from.
EXPORT const char *marl_pool_sources() { return MARL_POOL_SOURCES; }
