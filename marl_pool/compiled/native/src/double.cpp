#define REAL double
#define NAME(function) marl_pool_##function##_double
#include "c_interface.hpp"
