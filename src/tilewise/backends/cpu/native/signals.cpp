#include "signals.h"

#include <chrono>

#include "scratch.h"

namespace tw {
namespace {

constexpr int64_t kInterval = 50'000'000;  // nanoseconds; a shorter call never asks

thread_local const Watch *watch = nullptr;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Whether a handler raised; what it raised is then in `signals`.
bool handlers_raise(TwSignals &signals) {
  const ScratchAside kept;  // a handler that attends must not write over this call's tiles
  const int state = signals.enter();
  const bool raised = signals.check() != 0;
  if (raised) signals.fetch(&signals.raised[0], &signals.raised[1], &signals.raised[2]);
  signals.leave(state);
  return raised;
}

}  // namespace

Watch::Watch(TwSignals *signals) : outer(watch), signals(signals), next(signals ? now() + kInterval : 0) { watch = this; }

Watch::~Watch() { watch = outer; }

void run_signal_handlers() {
  if (!watch || !watch->signals || now() < watch->next) return;
  const bool raised = handlers_raise(*watch->signals);
  watch->next = raised ? INT64_MAX : now() + kInterval;  // what is raised first is what ends the call
  if (raised) throw Interrupted();
}

}  // namespace tw
