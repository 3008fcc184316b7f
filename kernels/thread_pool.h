// The threads behind parallel.h.
#pragma once
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <new>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kdtree {

// Workers that take tasks from a counter beside the caller, who waits for tasks in progress but for no worker that has
// not begun. OpenMP's barrier waits for every thread: on two cores with two other busy processes it turned a step of
// 0.1 ms into one of 1 to 50 ms.
class ThreadPool {
 public:
  using Call = void (*)(void* body, int64_t task, int thread);

  // Hidden: every library has its own. Never destroyed: the workers run until the process ends.
  __attribute__((visibility("hidden"))) static ThreadPool& get() {
    static ThreadPool* const pool = new ThreadPool;
    return *pool;
  }

  // Runs all tasks on up to num_threads threads, numbered from the caller's 0. False, and nothing is run, where the
  // pool is at work already, for another thread or for the caller itself.
  bool run(int num_threads, int64_t num_tasks, Call call, void* body) noexcept {
    if (busy_.exchange(true)) return false;
    if (Clock::now() < rest_until_) return busy_ = false;
    hire(num_threads - 1);
    call_ = call, body_ = body, num_threads_ = num_threads, num_tasks_ = num_tasks;
    num_left_ = 0;
    caller_cpu_ = sched_getcpu();
    open_ = (num_threads - 1) * kSeat + num_tasks;
    if (num_asleep_ > 0) {
      ++num_calls_;
      futex(num_calls_, FUTEX_WAKE_PRIVATE, num_threads - 1);
    }
    work(0);
    const uint32_t num_joined = num_threads - 1 - open_ / kSeat;  // nobody joins where no task is left
    if (num_left_ != num_joined) wait_for(num_joined);
    busy_ = false;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds kSpin{50};  // sleep costs a system call and 5 to 50 us at waking
  static constexpr int64_t kSeat = int64_t(1) << 40;

  // The job: free seats for workers * kSeat + tasks that nobody has taken. A worker reads the rest after it has taken a
  // seat with a task; then the job cannot end before it leaves.
  alignas(64) std::atomic<int64_t> open_{0};
  Call call_;
  void* body_;
  int64_t num_tasks_;
  int num_threads_;
  alignas(64) std::atomic<uint32_t> num_left_{0};  // workers that have joined the job and left it
  std::atomic<bool> caller_asleep_{false};
  alignas(64) std::atomic<bool> busy_{false};
  std::atomic<int> num_asleep_{0};
  std::atomic<uint32_t> num_calls_{0};  // to sleepers
  std::atomic<int> caller_cpu_{-1};
  int num_workers_ = 0;  // this and the next two belong to the caller that has set busy_
  Clock::time_point rest_until_{};
  cpu_set_t allowed_;  // cores of a worker; written before the first one starts

  ThreadPool() {
    pthread_atfork(nullptr, nullptr, [] { new (&get()) ThreadPool(Child()); });
  }

  struct Child {};
  explicit ThreadPool(Child) {}  // no worker lives in a forked process

  static long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
    return syscall(SYS_futex, &word, operation, value, nullptr, nullptr, 0);
  }

  // Waits for the workers that have joined. One that has lost its core in the middle of a task costs milliseconds; then
  // the pool rests for 8 times as long, so that a busy machine costs little more than the lack of workers.
  void wait_for(uint32_t num_joined) {
    const auto start = Clock::now();
    auto waited = Clock::duration::zero();
    for (uint32_t num_left; (num_left = num_left_) != num_joined; waited = Clock::now() - start) {
      if (waited < kSpin) {
        pause();
      } else {
        caller_asleep_ = true;
        futex(num_left_, FUTEX_WAIT_PRIVATE, num_left);
        caller_asleep_ = false;
      }
    }
    if (waited > 4 * kSpin) rest_until_ = start + 9 * waited;
  }

  static void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }

  void hire(int num_wanted) {
    if (num_workers_ == 0) sched_getaffinity(0, sizeof allowed_, &allowed_);
    try {
      for (; num_workers_ < num_wanted; ++num_workers_) std::thread(&ThreadPool::serve, this).detach();
    } catch (const std::system_error&) {  // the system gives no more threads: those there are do all tasks
    }
  }

  // Takes tasks until none is left.
  void work(int thread) {
    for (int64_t open = open_; open % kSeat > 0;)
      if (open_.compare_exchange_weak(open, open - 1)) {
        call_(body_, num_tasks_ - open % kSeat, thread);
        open = open_;
      }
  }

  static bool has_place(int64_t open) { return open >= kSeat && open % kSeat > 0; }

  // Joins the job if it has a seat and a task. False if not.
  bool join() {
    int64_t open = open_;
    do {
      if (!has_place(open)) return false;
    } while (!open_.compare_exchange_weak(open, open - kSeat - 1));
    const int thread = num_threads_ - int(open / kSeat);
    call_(body_, num_tasks_ - open % kSeat, thread);
    work(thread);
    ++num_left_;
    if (caller_asleep_) futex(num_left_, FUTEX_WAKE_PRIVATE, 1);
    return true;
  }

  // The kernel likes to wake a sleeper on its caller's core, where it would only take turns with the caller; on two
  // cores busy with niced processes no task found a second thread. Not where this is the only core allowed.
  void move_from(int cpu) {
    cpu_set_t allowed = allowed_;
    CPU_CLR(cpu, &allowed);
    if (CPU_COUNT(&allowed) > 0) sched_setaffinity(0, sizeof allowed, &allowed);
  }

  void serve() {
    for (auto idle_since = Clock::now();;) {
      const uint32_t num_calls = num_calls_;
      if (join()) {
        idle_since = Clock::now();
      } else if (Clock::now() - idle_since < kSpin) {
        pause();
      } else {
        ++num_asleep_;
        if (!has_place(open_)) futex(num_calls_, FUTEX_WAIT_PRIVATE, num_calls);
        --num_asleep_;
        if (const int cpu = sched_getcpu(); cpu >= 0 && cpu == caller_cpu_) move_from(cpu);
        idle_since = Clock::now();
      }
    }
  }
};

}  // namespace kdtree
