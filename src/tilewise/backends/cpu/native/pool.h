// Threads that live from call to call. One call uses them at a time; a second one, from another Python thread, runs on
// its own thread alone. A forked child starts with none and makes its own.
#pragma once
#include <cstdint>
#include <functional>

namespace tw {

// task(worker, n) for every n in [0, count), workers 0 .. threads - 1 taking the next n in turn; returns the number of
// workers that may have run. The first exception is thrown again here.
void parallel(int threads, int64_t count, const std::function<void(int worker, int64_t n)> &task);

}  // namespace tw
