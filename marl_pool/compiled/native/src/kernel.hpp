// The network on a whole batch, forward or with gradients, on several threads.
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

// Rows of a chunk. Gradients are summed within a chunk and then over the chunks in
// order, so the result does not depend on the number of threads.
constexpr long kChunk = 128;
// Chunks whose sums are held in memory at a time, which bounds it.
constexpr long kWave = 64;

// Memory of a block, pooled between calls, since fresh pages cost as much as the
// computation. The pool has no lock, which a fork could leave locked in the child.
class Workspace {
public:
  explicit Workspace(size_t size) {
    // Reuse a buffer of the pool; those that are too small are freed.
    for (auto &slot : pool()) {
      buffer_ = slot.load() ? slot.exchange(nullptr) : nullptr;
      if (buffer_ && buffer_->size >= size) return;
      std::free(buffer_);
    }
    size = (size + kPage - 1) / kPage * kPage;
    void *memory = std::aligned_alloc(kPage, size + kPage);
    if (!memory) throw std::bad_alloc();
    buffer_ = new (memory) Header{size};
  }
  ~Workspace() {
    for (auto &slot : pool()) {
      Header *empty = nullptr;
      if (slot.compare_exchange_strong(empty, buffer_)) return;
    }
    std::free(buffer_);
  }
  Workspace(const Workspace &) = delete;
  Workspace &operator=(const Workspace &) = delete;
  void *get() const { return reinterpret_cast<char *>(buffer_) + kPage; }

private:
  static constexpr size_t kPage = 4096;
  struct Header {
    size_t size;  // bytes of the memory, which starts one page after the header
  };
  using Slots = std::array<std::atomic<Header *>, 64>;
  static Slots &pool() {
    static Slots slots{};
    return slots;
  }
  Header *buffer_;
};

// Call work(next) on up to `threads` threads, each of which takes chunks from the counter
// `next` until none are left. Throws std::bad_alloc if any of them ran out of memory.
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
  const long num_workers = std::max(1L, std::min<long>(threads, chunks));
  std::vector<std::thread> helpers;
  helpers.reserve(num_workers - 1);
  try {
    for (long t = 1; t < num_workers; t++) helpers.emplace_back(run);
  } catch (const std::system_error &) {
    // The system refuses another thread; those that have started do all the work.
  }
  run();
  for (auto &thread : helpers) thread.join();
  if (out_of_memory) throw std::bad_alloc();
}

// Sum `size` numbers over the chunks, in order. run(from, count, sums) adds those of
// `count` chunks, from `from` on, to the rows of `sums`, (count, size).
template <class Real, class F>
void sum_in_waves(long chunks, long size, Real *total, F &&run) {
  std::fill(total, total + size, Real(0));
  std::vector<Real> partial(std::min(chunks, kWave) * size);
  for (long from = 0; from < chunks; from += kWave) {
    const long count = std::min(kWave, chunks - from);
    std::fill(partial.begin(), partial.end(), Real(0));
    run(from, count, partial.data());
    for (long chunk = 0; chunk < count; chunk++)
      for (long i = 0; i < size; i++) total[i] += partial[chunk * size + i];
  }
}

// Status codes that the C interface returns.
enum Status { kDone = 0, kUnknownType = 1, kNoMemory = 2, kUnknownAction = 3 };

// One call: a network and a batch.
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

  // Run forward and call visit(block, chunk) after each block. Each thread has a visitor,
  // made by make_visitor().
  template <class F> void forward(F &&make_visitor) {
    over_blocks<false>(0, chunks, make_visitor);
  }

  // Write the gradients w.r.t. the parameters, and w.r.t. the input unless
  // `values_gradient` is null.
  void gradients(const Real *out_gradient, Real *const *pointers, Real *values_gradient) {
    std::vector<Real> total = sum_over_chunks(folded.size(), [&] {
      return [&](auto &block, Real *sums) {
        block.backward(out_gradient, sums, values_gradient);
      };
    });
    store_gradients(total, pointers);
  }

  // Store the gradients w.r.t. the parameters, given those w.r.t. the folded weights.
  void store_gradients(std::vector<Real> &d_folded, Real *const *pointers) {
    unfold(parameters, folded, d_folded.data(), Parameters<Real>(pointers, s));
  }

  // Run forward and return sums of `size` numbers, to which visit(block, sums) adds after
  // each block. Each thread has a visitor, made by make_visitor().
  template <class F> std::vector<Real> sum_over_chunks(long size, F &&make_visitor) {
    std::vector<Real> total(size);
    sum_in_waves(chunks, size, total.data(), [&](long from, long count, Real *sums) {
      over_blocks<true>(from, count, [&] {
        return [&, visit = make_visitor()](auto &block, long chunk) mutable {
          visit(block, sums + chunk * size);
        };
      });
    });
    return total;
  }

private:
  // The same for `count` chunks from `from` on, which `visit` counts from 0.
  template <bool Train, class F>
  void over_blocks(long from, long count, F &&make_visitor) {
    using RowBlock = Block<Real, Train>;
    const long size = RowBlock(Arena<Real>{nullptr}, s, parameters, folded).used;
    on_threads(count, threads, [&](std::atomic<long> &next) {
      const Workspace workspace(size * sizeof(Vector<Real>));
      const Arena<Real> arena{static_cast<Vector<Real> *>(workspace.get())};
      RowBlock block(arena, s, parameters, folded);
      auto visit = make_visitor();
      for (long chunk; (chunk = next++) < count;) {
        const long first = (from + chunk) * kChunk;
        const long end = std::min<long>(s.rows, first + kChunk);
        for (long row = first; row < end; row += lanes<Real>) {
          if (!block.load(in, row)) return void(status = kUnknownType);
          block.forward();
          visit(block, chunk);
        }
      }
    });
  }
};

// Write the result to `out`; or, if `gradients` is given, the gradients w.r.t. the
// parameters, and w.r.t. the input unless `values_gradient` is null. Exceptions must not
// cross the C interface.
template <class Real>
int run(const Sizes &s, const Inputs<Real> &in, const Real *const *parameters, Real *out,
        const Real *out_gradient, Real *const *gradients, Real *values_gradient,
        int threads) noexcept {
  try {
    Call<Real> call(s, in, parameters, threads);
    if (gradients)
      call.gradients(out_gradient, gradients, values_gradient);
    else
      call.forward(out);
    return call.status;
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
