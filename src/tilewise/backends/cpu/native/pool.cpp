#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>
#include <unistd.h>

namespace tw {
namespace {

struct Job {
  const std::function<void(int64_t)> *task;
  int64_t count;
  std::atomic<int64_t> next{0};
  std::exception_ptr error;
  std::mutex error_lock;

  void work() {
    try {
      for (int64_t n; (n = next.fetch_add(1)) < count;) (*task)(n);
    } catch (...) {
      next = count;
      std::lock_guard<std::mutex> hold(error_lock);
      if (!error) error = std::current_exception();
    }
  }
};

class Pool {
 public:
  std::mutex in_use;

  void run(Job &job, int threads) {
    {
      std::lock_guard<std::mutex> hold(lock);
      while (int(workers.size()) < threads - 1) {
        const int id = int(workers.size()) + 1;
        workers.emplace_back([this, id] { loop(id); });
        workers.back().detach();
      }
      current = &job, wanted = threads - 1, busy = threads - 1, ++round;
    }
    wake.notify_all();
    job.work();
    std::unique_lock<std::mutex> hold(lock);
    done.wait(hold, [this] { return busy == 0; });
    current = nullptr;
  }

 private:
  std::mutex lock;
  std::condition_variable wake, done;
  std::vector<std::thread> workers;
  Job *current = nullptr;
  int wanted = 0, busy = 0;
  uint64_t round = 0;

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
  static std::mutex making;
  static std::atomic<Pool *> made{nullptr};
  static std::atomic<pid_t> owner{0};
  if (made && owner == getpid()) return *made;
  std::lock_guard<std::mutex> hold(making);
  if (!made || owner != getpid()) made = new Pool, owner = getpid();
  return *made;
}

}  // namespace

void parallel(int threads, int64_t count, const std::function<void(int64_t)> &task) {
  if (threads > count) threads = int(count);
  Job job{&task, count, {}, {}, {}};
  std::unique_lock<std::mutex> mine;
  if (threads > 1) mine = std::unique_lock<std::mutex>(pool().in_use, std::try_to_lock);
  if (mine.owns_lock()) pool().run(job, threads);
  else job.work();
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace tw
