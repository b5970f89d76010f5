// What ends a call early: a failure on another thread, or a signal handler of the calling program that raised (Ctrl-C).
#pragma once
#include "interface.h"

namespace tw {

// Ends the call at once; the text for Python is in what was raised.
struct Interrupted {};

// Asked once a tile, by every thread: throws where the call shall end. On the calling thread, at most every 50 ms, signal
// handlers run in here; they may call the library again.
void heed_signals();

// The part of it that concerns the calling thread alone.
void run_signal_handlers();

// Makes heed_signals() of this thread ask `signals` (null: nobody) as long as it lives.
class Watch {
 public:
  explicit Watch(TwSignals *signals);
  ~Watch();
  Watch(const Watch &) = delete;
  Watch &operator=(const Watch &) = delete;

 private:
  const Watch *outer;
  TwSignals *signals;
  mutable int64_t next;  // of the steady clock, nanoseconds
  friend void run_signal_handlers();
};

}  // namespace tw
