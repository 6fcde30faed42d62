// CUDA's words for a CPU, to test network.cu without a GPU: a thread of the system for
// each thread of a block, one block after the other.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <deque>
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
constexpr int kWarp = 32;
std::barrier<> *meeting;
std::deque<std::barrier<>> *warps;

// Let others run first, now and then, so that a barrier that lacks is noticed.
void dawdle() {
  thread_local unsigned state = 2654435761u * (threadIdx.x + 1);
  state = state * 1664525u + 1013904223u;
  if (state >> 30 == 0) std::this_thread::yield();
}

void __syncthreads() {
  meeting->arrive_and_wait();
  dawdle();
}

// All threads of a warp call it together; those of other warps do not wait.
template <class Real> Real __shfl_xor_sync(unsigned, Real x, int with) {
  static double given[1024];
  auto &warp = (*warps)[threadIdx.x / kWarp];
  given[threadIdx.x] = x;
  warp.arrive_and_wait();
  const Real found = given[threadIdx.x ^ with];
  warp.arrive_and_wait();
  dawdle();
  return found;
}

// Run the blocks; false if one wrote beyond its `shared` bytes of shared memory.
template <class F> bool launch(int blocks, int threads, int shared, F kernel) {
  blockDim.x = threads;
  gridDim.x = blocks;
  // What a block finds in shared memory is arbitrary.
  const std::vector<double> empty(std::size(shared_memory), NAN);
  for (int block = 0; block < blocks; block++) {
    std::copy(empty.begin(), empty.end(), shared_memory);
    std::barrier<> all(threads);
    std::deque<std::barrier<>> each;
    for (int t = 0; t < threads; t += kWarp) each.emplace_back(std::min(kWarp, threads - t));
    meeting = &all;
    warps = &each;
    std::vector<std::thread> team;
    for (int t = 0; t < threads; t++)
      team.emplace_back([&, t] {
        threadIdx.x = t;
        blockIdx.x = block;
        kernel();
        each[t / kWarp].arrive_and_drop();
        all.arrive_and_drop();
      });
    for (auto &thread : team) thread.join();
    const char *memory = reinterpret_cast<const char *>(shared_memory);
    const char *before = reinterpret_cast<const char *>(empty.data());
    if (std::memcmp(memory + shared, before + shared, sizeof shared_memory - shared))
      return false;
  }
  return true;
}
