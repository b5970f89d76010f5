#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <unistd.h>

#include "signals.h"

namespace tw {
namespace {

struct Job;
thread_local const Job *mine = nullptr;

struct Job {
  const std::function<void(int64_t)> *task;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  std::exception_ptr error;  // the first one
  std::mutex error_lock;

  void work() {
    const Job *outer = std::exchange(mine, this);
    keep_error([this] {
      for (int64_t n; (n = next.fetch_add(1)) < count;) heed_signals(), (*task)(n);
    });
    mine = outer;
  }

  template <class F>
  void keep_error(F run) {
    try {
      run();
    } catch (...) {
      std::lock_guard<std::mutex> hold(error_lock);
      if (!error) error = std::current_exception();
      next = count, failed = true;
    }
  }
};

class Pool {
 public:
  const pid_t owner = getpid();
  std::atomic<bool> taken{false};

  void run(Job &job, int threads) {
    {
      std::lock_guard<std::mutex> hold(lock);
      current = &job, wanted = busy = grown(threads - 1), ++round;
    }
    wake.notify_all();
    job.work();
    std::unique_lock<std::mutex> hold(lock);
    while (!done.wait_for(hold, std::chrono::milliseconds(50), [this] { return busy == 0; })) {
      hold.unlock();
      job.keep_error(run_signal_handlers);
      hold.lock();
    }
    current = nullptr;
  }

 private:
  std::mutex lock;
  std::condition_variable wake, done;
  Job *current = nullptr;
  int workers = 0, wanted = 0, busy = 0;
  uint64_t round = 0;

  // As many workers as asked for, or as the system has threads to give.
  int grown(int asked) {
    try {
      for (; workers < asked; ++workers) std::thread([this, id = workers + 1] { loop(id); }).detach();
    } catch (const std::exception &) {
    }
    return workers < asked ? workers : asked;
  }

  void loop(int id) {
    uint64_t seen = 0;
    std::unique_lock<std::mutex> hold(lock);
    for (;;) {
      wake.wait(hold, [&] { return round != seen; });
      seen = round;
      if (id > wanted) continue;
      Job *job = current;
      hold.unlock();
      job->work();
      hold.lock();
      if (--busy == 0) done.notify_one();
    }
  }
};

// The pool of this process. After a fork the threads are gone and the locks in any state: the old pool is left alone.
Pool &pool() {
  static std::atomic<Pool *> made{nullptr};
  Pool *found = made;
  while (!found || found->owner != getpid()) {
    Pool *fresh = new Pool;
    if (made.compare_exchange_strong(found, fresh)) return *fresh;
    delete fresh;
  }
  return *found;
}

}  // namespace

void heed_signals() {
  if (mine && mine->failed) throw Interrupted();
  run_signal_handlers();
}

void parallel(int threads, int64_t count, const std::function<void(int64_t)> &task) {
  if (threads > count) threads = int(count);
  Job job{&task, count, {}, {}, {}, {}};
  Pool *mates = threads > 1 ? &pool() : nullptr;
  if (mates && !mates->taken.exchange(true)) {
    mates->run(job, threads);
    mates->taken = false;
  } else {
    job.work();
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace tw
