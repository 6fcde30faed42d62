// A whole batch, forward or with gradients, on several threads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <system_error>
#include <thread>

#include "network.hpp"

namespace marl_pool {

// Rows of a chunk. A chunk has a gradient of its own, and these are added in order, so
// the result does not depend on the number of threads.
constexpr long kChunk = 128;
constexpr long kWave = 64;

// Memory of a block, kept for later calls, since fresh pages cost as much as the work.
// There is no lock, which a fork could leave locked in the child.
class Memory {
public:
  explicit Memory(size_t size) {
    // A piece that another call left, or a new one in place of one that is too small.
    for (auto &slot : kept()) {
      held_ = slot.load() ? slot.exchange(nullptr) : nullptr;
      if (held_ && held_->size >= size) return;
      std::free(held_);
    }
    size = (size + kPage - 1) / kPage * kPage;
    void *at = std::aligned_alloc(kPage, size + kPage);
    if (!at) throw std::bad_alloc();
    held_ = new (at) Piece{size};
  }
  ~Memory() {
    for (auto &slot : kept()) {
      Piece *empty = nullptr;
      if (slot.compare_exchange_strong(empty, held_)) return;
    }
    std::free(held_);
  }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  void *get() const { return reinterpret_cast<char *>(held_) + kPage; }

private:
  static constexpr size_t kPage = 4096;
  struct Piece {
    size_t size;  // of the memory, which starts one page behind
  };
  using Slots = std::array<std::atomic<Piece *>, 64>;
  static Slots &kept() {
    static Slots slots{};
    return slots;
  }
  Piece *held_;
};

// Call work(next) on up to `threads` threads; each takes chunks from `next` until there
// are none. Throws std::bad_alloc if there is no memory for one of them.
template <class F> void on_threads(long chunks, int threads, F &&work) {
  std::atomic<long> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto run = [&] {
    try {
      work(next);
    } catch (const std::bad_alloc &) {
      out_of_memory = true;
    }
  };
  const long workers = std::max(1L, std::min<long>(threads, chunks));
  std::vector<std::thread> others;
  others.reserve(workers - 1);
  try {
    for (long t = 1; t < workers; t++) others.emplace_back(run);
  } catch (const std::system_error &) {
    // No more threads are to be had: those there are do all the work.
  }
  run();
  for (auto &thread : others) thread.join();
  if (out_of_memory) throw std::bad_alloc();
}

// What Python is told.
enum Status { kDone = 0, kUnknownType = 1, kNoMemory = 2, kUnknownAction = 3 };

// One call: a network and the rows that it is computed for.
template <class Real> struct Call {
  const Sizes &s;
  const Inputs<Real> &in;
  const int threads;
  const Parameters<const Real> parameters;
  const long chunks;
  Folded<Real> folded;
  std::atomic<Status> status{kDone};

  Call(const Sizes &sizes, const Inputs<Real> &inputs, const Real *const *pointers,
       int num_threads)
      : s(sizes), in(inputs), threads(num_threads), parameters(pointers, sizes),
        chunks((sizes.rows + kChunk - 1) / kChunk), folded{sizes, {}, {}, {}} {
    fold(parameters, folded);
  }

  void forward(Real *out) {
    forward([&] { return [&](auto &block, long) { block.store(out); }; });
  }

  // Call use(block, chunk) after each block; each thread has a `use` of its own, from
  // start().
  template <class F> void forward(F &&start) { over_blocks<false>(0, chunks, start); }

  // Gradients by parameters, and by the input unless `for_values` is null.
  void gradients(const Real *out_gradient, Real *const *pointers, Real *for_values) {
    std::vector<Real> total = sum_over_chunks(folded.size(), [&] {
      return [&](auto &block, Real *sums) {
        block.backward(out_gradient, sums, for_values);
      };
    });
    store_gradients(total, pointers);
  }

  // The gradients by parameters from those by folded weights, which are used up.
  void store_gradients(std::vector<Real> &by_folded, Real *const *pointers) {
    unfold(parameters, folded, by_folded.data(), Parameters<Real>(pointers, s));
  }

  // Sums of `size` numbers, to which add(block, sums) adds for each block, chunk by chunk.
  // Each thread has an `add` of its own, from start().
  template <class F> std::vector<Real> sum_over_chunks(long size, F &&start) {
    std::vector<Real> total(size, 0), partial(std::min(chunks, kWave) * size);
    // Waves bound the memory of the chunks' sums.
    for (long wave = 0; wave < chunks; wave += kWave) {
      const long count = std::min(kWave, chunks - wave);
      std::fill(partial.begin(), partial.end(), Real(0));
      over_blocks<true>(wave, count, [&] {
        return [&, add = start()](auto &block, long chunk) mutable {
          add(block, &partial[chunk * size]);
        };
      });
      for (long chunk = 0; chunk < count; chunk++)
        for (long i = 0; i < size; i++) total[i] += partial[chunk * size + i];
    }
    return total;
  }

private:
  // Run `count` chunks forward, block by block, and call use(block, chunk) after each,
  // where each thread has a `use` of its own, from start().
  template <bool Train, class F> void over_blocks(long from, long count, F &&start) {
    using Rows = Block<Real, Train>;
    const long size = Rows(Arena<Real>{nullptr}, s, parameters, folded).used;
    on_threads(count, threads, [&](std::atomic<long> &next) {
      const Memory memory(size * sizeof(Vector<Real>));
      const Arena<Real> arena{static_cast<Vector<Real> *>(memory.get())};
      Rows block(arena, s, parameters, folded);
      auto use = start();
      for (long chunk; (chunk = next++) < count;) {
        const long first = (from + chunk) * kChunk;
        const long end = std::min<long>(s.rows, first + kChunk);
        for (long row = first; row < end; row += lanes<Real>) {
          if (!block.load(in, row)) return void(status = kUnknownType);
          block.forward();
          use(block, chunk);
        }
      }
    });
  }
};

// The result to `out`; or, if `gradients` is given, the gradients by parameters, and by
// the input unless `for_values` is null. C knows no exceptions.
template <class Real>
int run(const Sizes &s, const Inputs<Real> &in, const Real *const *parameters, Real *out,
        const Real *out_gradient, Real *const *gradients, Real *for_values,
        int threads) noexcept {
  try {
    Call<Real> call(s, in, parameters, threads);
    if (gradients)
      call.gradients(out_gradient, gradients, for_values);
    else
      call.forward(out);
    return call.status;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
