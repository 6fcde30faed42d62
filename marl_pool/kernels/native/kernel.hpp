// A whole batch, forward or with gradients, on several threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <thread>

#include "network.hpp"

namespace marl_pool {

// Rows of a chunk. A chunk has a gradient of its own, and these are added in order, so
// the result does not depend on the number of threads.
constexpr long kChunk = 128;
constexpr long kWave = 64;

// Memory of blocks, kept between calls, since fresh pages cost as much as the work.
class Memory {
public:
  explicit Memory(size_t size) {
    std::lock_guard<std::mutex> lock(mutex());
    auto &kept = pool();
    for (size_t i = 0; i < kept.size(); i++)
      if (kept[i].second >= size) {
        held_ = kept[i];
        kept.erase(kept.begin() + i);
        return;
      }
    if (!kept.empty()) {
      std::free(kept.back().first);
      kept.pop_back();
    }
    size = (size + 4095) / 4096 * 4096;
    held_ = {std::aligned_alloc(4096, size), size};
  }
  ~Memory() {
    std::lock_guard<std::mutex> lock(mutex());
    pool().push_back(held_);
  }
  Memory(const Memory &) = delete;
  void *get() const { return held_.first; }

private:
  using Piece = std::pair<void *, size_t>;
  static std::vector<Piece> &pool() {
    static auto *pieces = new std::vector<Piece>;
    return *pieces;
  }
  static std::mutex &mutex() {
    static auto *lock = new std::mutex;
    return *lock;
  }
  Piece held_;
};

// Call worker(chunk) for each chunk on up to `threads` threads, each with a worker of its
// own from make_worker().
template <class F> void over_chunks(long chunks, int threads, F &&make_worker) {
  std::atomic<long> next{0};
  const auto run = [&] {
    auto worker = make_worker();
    for (long chunk; (chunk = next++) < chunks;) worker(chunk);
  };
  std::vector<std::thread> others;
  for (long t = 1; t < std::min<long>(threads, chunks); t++) others.emplace_back(run);
  run();
  for (auto &thread : others) thread.join();
}

// The result to `out`; or, if `out_gradient` is given, the gradients by parameters, and by
// the input unless `for_values` is null. Returns 1 if a type is out of range.
template <class Real>
int run(const Sizes &s, const Inputs<Real> &in, const Real *const *parameter_pointers,
        Real *out, const Real *out_gradient, Real *const *gradient_pointers,
        Real *for_values, int threads) {
  const Parameters<const Real> parameters(parameter_pointers, s);
  Folded<Real> folded{s, {}, {}, {}};
  fold(parameters, folded);
  const long chunks = (s.rows + kChunk - 1) / kChunk;
  std::atomic<int> failed{0};

  if (!out_gradient) {
    using Forward = Block<Real, false>;
    const long size = Forward(Arena<Real>{nullptr}, s, parameters, folded).used;
    over_chunks(chunks, threads, [&] {
      auto memory = std::make_shared<Memory>(size * sizeof(Vector<Real>));
      Arena<Real> arena{static_cast<Vector<Real> *>(memory->get())};
      auto block = std::make_shared<Forward>(arena, s, parameters, folded);
      return [&, memory, block](long chunk) {
        for (long row = chunk * kChunk; row < std::min(s.rows, (chunk + 1) * kChunk);
             row += lanes<Real>) {
          if (!block->load(in, row)) return void(failed = 1);
          block->forward();
          block->store(out);
        }
      };
    });
    return failed;
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
          if (!block->load(in, row)) return void(failed = 1);
          block->forward();
          block->backward(out_gradient, &partial[index * weights], for_values);
        }
      };
    });
    for (long chunk = 0; chunk < count; chunk++)
      for (long i = 0; i < weights; i++) total[i] += partial[chunk * weights + i];
  }
  unfold(parameters, folded, total.data(), Parameters<Real>(gradient_pointers, s));
  return failed;
}

}  // namespace marl_pool
