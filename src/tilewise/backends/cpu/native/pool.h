// Threads that live from call to call. One call uses them at a time; a second one, from another Python thread or from a
// signal handler, runs on its own thread alone. A forked child starts with none and makes its own. Where the system has
// no more threads to give, there are fewer.
#pragma once
#include <cstdint>
#include <functional>

namespace tw {

// task(n) for every n in [0, count), on so many threads, each taking the next n in turn. The first exception
// ends the others' tasks at their next heed_signals() and is thrown again here.
void parallel(int threads, int64_t count, const std::function<void(int64_t n)> &task);

}  // namespace tw
