// A whole batch, forward or with gradients, on several threads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <memory>
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

// Call worker(chunk) for each chunk on up to `threads` threads, each with a worker of its
// own from make_worker(). Throws std::bad_alloc if there is no memory for a worker.
template <class F> void over_chunks(long chunks, int threads, F &&make_worker) {
  std::atomic<long> next{0};
  std::atomic<bool> out_of_memory{false};
  const auto run = [&] {
    try {
      auto worker = make_worker();
      for (long chunk; (chunk = next++) < chunks;) worker(chunk);
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
enum Status { kDone = 0, kUnknownType = 1, kNoMemory = 2 };

// The result to `out`; or, if `gradient_pointers` is given, the gradients by parameters,
// and by the input unless `for_values` is null.
template <class Real>
Status run_chunks(const Sizes &s, const Inputs<Real> &in,
                  const Real *const *parameter_pointers, Real *out,
                  const Real *out_gradient, Real *const *gradient_pointers,
                  Real *for_values, int threads) {
  const Parameters<const Real> parameters(parameter_pointers, s);
  Folded<Real> folded{s, {}, {}, {}};
  fold(parameters, folded);
  const long chunks = (s.rows + kChunk - 1) / kChunk;
  std::atomic<Status> status{kDone};

  if (!gradient_pointers) {
    using Forward = Block<Real, false>;
    const long size = Forward(Arena<Real>{nullptr}, s, parameters, folded).used;
    over_chunks(chunks, threads, [&] {
      auto memory = std::make_shared<Memory>(size * sizeof(Vector<Real>));
      Arena<Real> arena{static_cast<Vector<Real> *>(memory->get())};
      auto block = std::make_shared<Forward>(arena, s, parameters, folded);
      return [&, memory, block](long chunk) {
        for (long row = chunk * kChunk; row < std::min(s.rows, (chunk + 1) * kChunk);
             row += lanes<Real>) {
          if (!block->load(in, row)) return void(status = kUnknownType);
          block->forward();
          block->store(out);
        }
      };
    });
    return status;
  }

  using Backward = Block<Real, true>;
  const long size = Backward(Arena<Real>{nullptr}, s, parameters, folded).used;
  const long weights = folded.size();
  std::vector<Real> total(weights, 0), partial(std::min<long>(chunks, kWave) * weights);
  // Waves bound the memory of the chunks' gradients.
  for (long wave = 0; wave < chunks; wave += kWave) {
    const long count = std::min(kWave, chunks - wave);
    std::fill(partial.begin(), partial.end(), Real(0));
    over_chunks(count, threads, [&] {
      auto memory = std::make_shared<Memory>(size * sizeof(Vector<Real>));
      Arena<Real> arena{static_cast<Vector<Real> *>(memory->get())};
      auto block = std::make_shared<Backward>(arena, s, parameters, folded);
      return [&, memory, block](long index) {
        const long from = (wave + index) * kChunk;
        for (long row = from; row < std::min(s.rows, from + kChunk); row += lanes<Real>) {
          if (!block->load(in, row)) return void(status = kUnknownType);
          block->forward();
          block->backward(out_gradient, &partial[index * weights], for_values);
        }
      };
    });
    for (long chunk = 0; chunk < count; chunk++)
      for (long i = 0; i < weights; i++) total[i] += partial[chunk * weights + i];
  }
  unfold(parameters, folded, total.data(), Parameters<Real>(gradient_pointers, s));
  return status;
}

// The same for C, which knows no exceptions.
template <class Real, class... Arguments>
int run(const Sizes &s, const Inputs<Real> &in, Arguments... arguments) noexcept {
  try {
    return run_chunks<Real>(s, in, arguments...);
  } catch (const std::bad_alloc &) {
    return kNoMemory;
  }
}

}  // namespace marl_pool
