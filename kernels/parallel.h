// Threads for the loops of the CPU kernels. How work is shared out never changes a result.
#pragma once
#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "thread_pool.h"

namespace kdtree {

// The unit of work is one multiply-add of a product that is bound by memory, about 1/30 ns. A worker takes up
// its first task a few tenths of a microsecond after the call, so a thread must have half a microsecond to do.
constexpr int64_t kMinWorkPerThread = 16 * 1024;

inline int threads_for(int64_t work, int num_threads) {
  return int(std::max<int64_t>(1, std::min<int64_t>(num_threads, work / kMinWorkPerThread)));
}

// Runs body(task, thread) for every task, on the caller (thread 0) and on workers as they come.
template <class Body>
inline void run_tasks(int num_threads, int64_t num_tasks, Body&& body) {
  num_threads = int(std::min<int64_t>(num_threads, num_tasks));
  const auto call = [](void* untyped, int64_t task, int thread) {
    (*static_cast<std::remove_reference_t<Body>*>(untyped))(task, thread);
  };
  if (num_threads > 1 && ThreadPool::get().run(num_threads, num_tasks, call, &body)) return;
  for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
}

// Runs body(begin, end, thread) over [0, count), cut into a few shares per thread.
template <class Body>
inline void run_shares(int num_threads, int64_t count, Body&& body) {
  const int64_t num_shares = num_threads > 1 ? std::min<int64_t>(4 * num_threads, count) : 1;
  run_tasks(num_threads, num_shares, [&](int64_t i, int thread) {
    body(count * i / num_shares, count * (i + 1) / num_shares, thread);
  });
}

}  // namespace kdtree
