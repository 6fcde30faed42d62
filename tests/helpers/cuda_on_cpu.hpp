// CUDA's keywords and built-ins on a CPU, to test network.cu without a GPU: each thread
// of a block is a system thread, and blocks run one after the other.
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
std::barrier<> *block_barrier;
std::deque<std::barrier<>> *warp_barriers;

// Yield now and then, so that a missing barrier shows as a wrong result.
void yield_at_random() {
  thread_local unsigned state = 2654435761u * (threadIdx.x + 1);
  state = state * 1664525u + 1013904223u;
  if (state >> 30 == 0) std::this_thread::yield();
}

void __syncthreads() {
  block_barrier->arrive_and_wait();
  yield_at_random();
}

// All threads of a warp must call it together; other warps do not wait.
template <class Real> Real __shfl_xor_sync(unsigned, Real x, int lane_mask) {
  static double exchange[1024];
  auto &warp = (*warp_barriers)[threadIdx.x / kWarp];
  exchange[threadIdx.x] = x;
  warp.arrive_and_wait();
  const Real result = exchange[threadIdx.x ^ lane_mask];
  warp.arrive_and_wait();
  yield_at_random();
  return result;
}

// Launch a kernel; false if a block wrote beyond its `shared` bytes of shared memory.
template <class F> bool launch(int blocks, int threads, int shared, F kernel) {
  blockDim.x = threads;
  gridDim.x = blocks;
  // Shared memory is uninitialized; NaN reveals reads of it.
  const std::vector<double> initial(std::size(shared_memory), NAN);
  for (int block = 0; block < blocks; block++) {
    std::copy(initial.begin(), initial.end(), shared_memory);
    std::barrier<> whole_block(threads);
    std::deque<std::barrier<>> warps;
    for (int t = 0; t < threads; t += kWarp)
      warps.emplace_back(std::min(kWarp, threads - t));
    block_barrier = &whole_block;
    warp_barriers = &warps;
    std::vector<std::thread> running;
    for (int t = 0; t < threads; t++)
      running.emplace_back([&, t] {
        threadIdx.x = t;
        blockIdx.x = block;
        kernel();
        warps[t / kWarp].arrive_and_drop();
        whole_block.arrive_and_drop();
      });
    for (auto &thread : running) thread.join();
    const char *memory = reinterpret_cast<const char *>(shared_memory);
    const char *expected = reinterpret_cast<const char *>(initial.data());
    if (std::memcmp(memory + shared, expected + shared, sizeof shared_memory - shared))
      return false;
  }
  return true;
}
