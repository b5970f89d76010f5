#include "pool.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>
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
  std::atomic<int> members{0};  // in work()

  void work() {
    ++members;
    const Job *outer = std::exchange(mine, this);
    keep_error([this] {
      for (int64_t n; (n = next.fetch_add(1)) < count;) heed_signals(), (*task)(n);
    });
    mine = outer;
    --members;
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

// -- OpenMP's threads ------------------------------------------------------------------------------------------------

using GompParallel = void (*)(void (*)(void *), void *, unsigned threads, unsigned flags);
std::atomic<GompParallel> gomp_parallel{nullptr};
std::atomic<pid_t> gomp_owner{0};

// Whether the system gives this thread so many: where it does not, OpenMP would end the process.
bool can_have(int threads) {
  thread_local int tried = 1;
  if (threads <= tried) return true;
  std::mutex held;
  std::vector<std::thread> some;
  bool all = true;
  {
    std::lock_guard<std::mutex> hold(held);
    try {
      some.reserve(size_t(threads));
      for (int n = tried; n < threads; ++n) some.emplace_back([&held] { std::lock_guard<std::mutex> wait(held); });
    } catch (const std::exception &) {
      all = false;
    }
  }
  for (std::thread &thread : some) thread.join();
  if (all) tried = threads;
  return all;
}

struct Team {
  Job *job;
  std::thread::id caller;

  // The caller waits in here, not at OpenMP's barrier, where no signal would reach it.
  static void member(void *data) {
    const Team &team = *static_cast<Team *>(data);
    team.job->work();
    if (std::this_thread::get_id() != team.caller) return;
    while (team.job->members) std::this_thread::yield(), team.job->keep_error(run_signal_handlers);
  }
};

bool run_on_openmp(Job &job, int threads) {
  const GompParallel start = gomp_parallel;
  if (!start || gomp_owner != getpid() || !can_have(threads)) return false;
  Team team{&job, std::this_thread::get_id()};
  start(Team::member, &team, unsigned(threads), 0);
  return true;
}

}  // namespace

void use_openmp(void *address) { gomp_parallel = (GompParallel)address, gomp_owner = getpid(); }

void heed_signals() {
  if (mine && mine->failed) throw Interrupted();
  run_signal_handlers();
}

void parallel(int threads, int64_t count, const std::function<void(int64_t)> &task) {
  Job job{&task, count, {}, {}, {}, {}, {}};
  Pool *mates = nullptr;
  // All of OpenMP's team even where there is less to do: those that a smaller one leaves out would end, and be made again by
  // torch's next operation (docs/decisions.md#cpu-decode-splits).
  if (threads > 1 && count > 1 && !run_on_openmp(job, threads)) mates = &pool();
  if (mates && !mates->taken.exchange(true)) {
    mates->run(job, int(std::min<int64_t>(threads, count)));
    mates->taken = false;
  } else {
    job.work();  // nothing is left of it after OpenMP
  }
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace tw
