// Threads that live from call to call. One call uses them at a time; a second one, from another Python thread or from a
// signal handler, runs on its own thread alone. A forked child starts with none and makes its own. Where the system has
// no more threads to give, there are fewer.
//
// Where the process already computes on OpenMP threads (torch does), they do the work: they spin for milliseconds after
// their last one, and threads of our own would have to fight them for the cores (docs/decisions.md#cpu-torch-threads).
#pragma once
#include <cstdint>
#include <functional>

namespace tw {

// task(n) for every n in [0, count), on so many threads, each taking the next n in turn. The first exception
// ends the others' tasks at their next heed_signals() and is thrown again here.
void parallel(int threads, int64_t count, const std::function<void(int64_t n)> &task);

// The address of `GOMP_parallel`, or null: threads of our own. It has to know the threads of this process: a child that is
// forked later has threads of its own; one that was forked before gives null (cpu/library.py:openmp).
void use_openmp(void *gomp_parallel);

}  // namespace tw
