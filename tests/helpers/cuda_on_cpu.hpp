// CUDA's words for a CPU, to test network.cu without a GPU: one block after the other,
// its warps by turns in a random order, each thread until it waits for others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#include <ucontext.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

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
Index threadIdx, blockIdx, blockDim, gridDim;
alignas(16) double shared_memory[1 << 16];
constexpr int kWarp = 32;
constexpr size_t kStack = 1 << 18;

// Where threads wait until all members have arrived.
struct Barrier {
  int members, arrived = 0, passes = 0;
  void check() {
    if (arrived < members) return;
    arrived = 0;
    passes++;
  }
};

struct Thread {
  int index;
  std::unique_ptr<char[]> stack{new char[kStack]};
  ucontext_t context{};
  Barrier *barrier = nullptr;
  int passes = 0;
  bool has_ended = false;
  bool can_run() const {
    return !has_ended && (!barrier || barrier->passes != passes);
  }
};

ucontext_t scheduler;
Thread *running;
std::function<void()> program;
Barrier *meeting;
std::deque<Barrier> *warps;

// Change stacks, which the sanitizer is told.
const void *scheduler_stack;
size_t scheduler_size;
void change(ucontext_t &from, ucontext_t &to, [[maybe_unused]] const void *stack,
            [[maybe_unused]] size_t size) {
#ifdef __SANITIZE_ADDRESS__
  void *frames;
  __sanitizer_start_switch_fiber(&frames, stack, size);
  swapcontext(&from, &to);
  const bool in_thread = &to == &scheduler;
  __sanitizer_finish_switch_fiber(frames, in_thread ? &scheduler_stack : nullptr,
                                  in_thread ? &scheduler_size : nullptr);
#else
  swapcontext(&from, &to);
#endif
}

void leave() { change(running->context, scheduler, scheduler_stack, scheduler_size); }

void enter() {
#ifdef __SANITIZE_ADDRESS__
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_size);
#endif
  program();
  running->has_ended = true;
  for (Barrier *barrier : {meeting, &(*warps)[running->index / kWarp]}) {
    barrier->members--;
    if (barrier->arrived) barrier->check();
  }
  leave();
}

void wait(Barrier &barrier) {
  running->barrier = &barrier;
  running->passes = barrier.passes;
  barrier.arrived++;
  barrier.check();
  leave();
}

void __syncthreads() { wait(*meeting); }

// All threads of a warp call it together; those of other warps do not wait.
template <class Real> Real __shfl_xor_sync(unsigned, Real x, int with) {
  static double values[1024];
  const int index = threadIdx.x;
  Barrier &warp = (*warps)[index / kWarp];
  values[index] = x;
  wait(warp);
  const Real value = values[index ^ with];
  wait(warp);
  return value;
}

// Run a block; false if its threads wait for ever. A barrier that lacks is noticed: some
// warps are far ahead of others, which read too early or what is overwritten.
bool run(std::vector<Thread> &threads, std::mt19937 &random) {
  int warp = 0;
  for (;;) {
    std::vector<Thread *> ready;
    for (auto &thread : threads)
      if (thread.can_run()) ready.push_back(&thread);
    if (ready.empty())
      return std::all_of(threads.begin(), threads.end(),
                         [](const Thread &thread) { return thread.has_ended; });
    std::shuffle(ready.begin(), ready.end(), random);
    const auto in_turn = [&](const Thread *t) { return t->index / kWarp == warp; };
    if (random() % 8 == 0 || std::none_of(ready.begin(), ready.end(), in_turn))
      warp = ready[0]->index / kWarp;
    for (Thread *thread : ready) {
      if (!in_turn(thread)) continue;
      running = thread;
      threadIdx.x = thread->index;
      change(scheduler, thread->context, thread->stack.get(), kStack);
    }
  }
}

// Run the blocks; false if one wrote beyond its `shared` bytes of shared memory, or
// does not end.
template <class F> bool launch(int blocks, int threads, int shared, F kernel) {
  blockDim.x = threads;
  gridDim.x = blocks;
  program = kernel;
  std::mt19937 random(blocks);
  std::vector<Thread> team(threads);
  // What a block finds in shared memory is arbitrary.
  const std::vector<double> empty(std::size(shared_memory), NAN);
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++) {
    std::copy(empty.begin(), empty.end(), shared_memory);
    Barrier all{threads};
    std::deque<Barrier> parts;
    for (int t = 0; t < threads; t += kWarp)
      parts.push_back({std::min(kWarp, threads - t)});
    meeting = &all;
    warps = &parts;
    for (int t = 0; t < threads; t++) {
      Thread &thread = team[t];
      thread.index = t;
      thread.barrier = nullptr;
      thread.has_ended = false;
      getcontext(&thread.context);
      thread.context.uc_stack.ss_sp = thread.stack.get();
      thread.context.uc_stack.ss_size = kStack;
      thread.context.uc_link = nullptr;
      makecontext(&thread.context, enter, 0);
    }
    if (!run(team, random)) return false;
    const char *memory = reinterpret_cast<const char *>(shared_memory);
    const char *before = reinterpret_cast<const char *>(empty.data());
    if (std::memcmp(memory + shared, before + shared, sizeof shared_memory - shared))
      return false;
  }
  return true;
}
