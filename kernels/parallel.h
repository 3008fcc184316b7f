// Threads for the loops of the CPU kernels. How work is shared out never changes a result.
#pragma once
#include <omp.h>

#include <algorithm>
#include <cstdint>

namespace kdtree {

// The unit of work is one multiply-add of a product that is bound by memory, about 1/30 ns. A parallel region costs a
// microsecond, so a thread is worth waking for two.
constexpr int64_t kMinWorkPerThread = 64 * 1024;

inline int threads_for(int64_t work, int num_threads) {
  return int(std::max<int64_t>(1, std::min<int64_t>(num_threads, work / kMinWorkPerThread)));
}

// Runs body(thread) for thread = 0 … num_threads-1 at the same time; one thread enters no parallel region.
template <class Body>
inline void run_threads(int num_threads, Body&& body) {
  if (num_threads <= 1) return body(0);
#pragma omp parallel for num_threads(num_threads) schedule(static, 1)
  for (int thread = 0; thread < num_threads; ++thread) body(thread);
}

// Runs body(task, thread) for every task, each on the next free thread.
template <class Body>
inline void run_tasks(int num_threads, int64_t num_tasks, Body&& body) {
  num_threads = int(std::min<int64_t>(num_threads, num_tasks));
  if (num_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) body(task, 0);
    return;
  }
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t task = 0; task < num_tasks; ++task) body(task, omp_get_thread_num());
}

}  // namespace kdtree
