// CUDA's words for a CPU, to test network.cu without a GPU: a thread of the system for
// each thread of a block, one block after the other.
#pragma once

#include <barrier>
#include <cmath>
#include <thread>
#include <vector>

#define SHARED_MEMORY
#define __global__
#define __launch_bounds__(...)
#define __align__(...)
#define __restrict__

using std::erf, std::exp2, std::isnan, std::log2, std::nan;
template <class Real> Real rsqrt(Real x) { return 1 / std::sqrt(x); }

struct Index {
  int x;
};
thread_local Index threadIdx, blockIdx;
Index blockDim, gridDim;
alignas(16) double shared_memory[1 << 16];
std::barrier<> *meeting;

void __syncthreads() { meeting->arrive_and_wait(); }

// All threads of a block call it together.
template <class Real> Real __shfl_xor_sync(unsigned, Real x, int with) {
  static double given[1024];
  given[threadIdx.x] = x;
  __syncthreads();
  const Real found = given[threadIdx.x ^ with];
  __syncthreads();
  return found;
}

template <class F> void launch(int blocks, int threads, F kernel) {
  blockDim.x = threads;
  gridDim.x = blocks;
  for (int block = 0; block < blocks; block++) {
    // What a block finds in shared memory is arbitrary.
    for (double &number : shared_memory) number = NAN;
    std::barrier<> all(threads);
    meeting = &all;
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++)
      team.emplace_back([&, t] {
        threadIdx.x = t;
        blockIdx.x = block;
        kernel();
        all.arrive_and_drop();
      });
    for (auto &thread : team) thread.join();
  }
}
