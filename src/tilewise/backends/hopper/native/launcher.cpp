// Launches compiled kernels through the CUDA driver, which is found when the first one is: nothing of CUDA is needed to build
// this, and a machine without a driver can load it. It knows no kernel: what a launch is given comes as data (launcher.h).
#include "launcher.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

// -- The driver's interface, as its manual states it ---------------------------------------------------------------

using Result = int;
using Device = int;
using Context = struct ContextOf*;
using Module = struct ModuleOf*;
using Function = struct FunctionOf*;

struct Attribute {
  uint32_t number;
  char padding[4];
  char value[64];
};

struct Configuration {
  uint32_t grid[3], block[3], shared;
  void* stream;
  const Attribute* attributes;
  uint32_t count;
};

constexpr int kMaximumSharedBytes = 8, kRelaxed = 2;

#define DRIVER(X)                                                \
  X(cuInit, (unsigned))                                          \
  X(cuDriverGetVersion, (int*))                                  \
  X(cuGetErrorName, (Result, const char**))                      \
  X(cuGetErrorString, (Result, const char**))                    \
  X(cuDeviceGet, (Device*, int))                                 \
  X(cuDevicePrimaryCtxRetain, (Context*, Device))                \
  X(cuCtxGetCurrent, (Context*))                                 \
  X(cuCtxGetDevice, (Device*))                                   \
  X(cuCtxGetId, (Context, unsigned long long*))                  \
  X(cuCtxPushCurrent_v2, (Context))                              \
  X(cuCtxPopCurrent_v2, (Context*))                              \
  X(cuThreadExchangeStreamCaptureMode, (int*))                   \
  X(cuModuleLoadData, (Module*, const void*))                    \
  X(cuModuleGetFunction, (Function*, Module, const char*))       \
  X(cuFuncSetAttribute, (Function, int, int))                    \
  X(cuLaunchKernelEx, (const Configuration*, Function, void**, void**))

struct Driver {
#define MEMBER(name, parameters) Result(*name) parameters = nullptr;
  DRIVER(MEMBER)
#undef MEMBER
  std::string missing;  // why there is none

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = std::string("there is no CUDA driver: ") + dlerror();
      return;
    }
#define LOOK_UP(name, parameters)                                 \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
  if (name == nullptr) missing = "the CUDA driver is too old: it has no " #name;
    DRIVER(LOOK_UP)
#undef LOOK_UP
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

// -- Errors --------------------------------------------------------------------------------------------------------

thread_local std::string last_error;

int fail(std::string text) {
  last_error = std::move(text);
  return -1;
}

int fail(const char* call, Result code) {
  const Driver& d = driver();
  const char *name = nullptr, *text = nullptr;
  d.cuGetErrorName(code, &name);
  d.cuGetErrorString(code, &text);
  std::string all = std::string(call) + ": " + (name ? name : "an unknown error") + " (" + std::to_string(code) + ")";
  return fail(text ? all + ", " + text : all);
}

#define TRY(member, ...)                                            \
  if (Result code = driver().member(__VA_ARGS__)) return fail(#member, code)

// CUDA does not survive a fork: what a child finds loaded is its parent's.
std::atomic<bool> started{false}, forked{false};

int start() {
  if (!driver().missing.empty()) return fail(driver().missing);
  if (forked.load(std::memory_order_relaxed))
    return fail("CUDA was used before this process was forked, and does not work in its children; start them by spawn");
  static std::once_flag once;
  static Result result = 0;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, [] { forked = started.load(); });
    result = driver().cuInit(0);
    started = true;
  });
  return result ? fail("cuInit", result) : 0;
}

// -- Contexts ------------------------------------------------------------------------------------------------------

// The device's primary context, which torch and the CUDA runtime use: retained once, never released.
int primary(int ordinal, Context* context) {
  static std::mutex lock;
  static std::vector<Context> known;
  std::lock_guard<std::mutex> held(lock);
  if (ordinal < 0) return fail("device " + std::to_string(ordinal));
  if (known.size() <= static_cast<size_t>(ordinal)) known.resize(ordinal + 1);
  if (known[ordinal] == nullptr) {
    Device device;
    TRY(cuDeviceGet, &device, ordinal);
    TRY(cuDevicePrimaryCtxRetain, &known[ordinal], device);
  }
  *context = known[ordinal];
  return 0;
}

// A thread's current context where it is of the device; else the primary one, current for as long as this lives.
class Entered {
 public:
  ~Entered() {
    Context mine;
    if (pushed_) driver().cuCtxPopCurrent_v2(&mine);
  }
  int enter(int ordinal) {
    Device device;
    TRY(cuCtxGetCurrent, &context_);
    if (context_ == nullptr || driver().cuCtxGetDevice(&device) || device != ordinal) {
      if (primary(ordinal, &context_)) return -1;
      TRY(cuCtxPushCurrent_v2, context_);
      pushed_ = true;
    }
    TRY(cuCtxGetId, context_, &id);
    return 0;
  }
  unsigned long long id = 0;

 private:
  Context context_ = nullptr;
  bool pushed_ = false;
};

// For as long as this lives, this thread may call what a capture on any thread would else forbid: nothing here waits for a
// stream, or is to be part of a graph.
class Relaxed {
 public:
  Relaxed() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }
  ~Relaxed() { driver().cuThreadExchangeStreamCaptureMode(&mode_); }

 private:
  int mode_ = kRelaxed;
};

}  // namespace

// -- Cubins --------------------------------------------------------------------------------------------------------

struct TwImage {
  struct Loaded {
    unsigned long long context;
    std::vector<Function> functions;
  };
  std::string cubin;
  std::vector<std::string> kernels;
  std::vector<int> shared;
  std::mutex lock;
  std::vector<std::unique_ptr<Loaded>> loaded;  // one of each context that it was used in

  int functions(unsigned long long context, const Function** found) {
    std::lock_guard<std::mutex> held(lock);
    for (const auto& one : loaded)
      if (one->context == context) return *found = one->functions.data(), 0;
    auto one = std::make_unique<Loaded>();
    one->context = context;
    if (load(one->functions)) return -1;
    *found = one->functions.data();
    loaded.push_back(std::move(one));
    return 0;
  }

 private:
  int load(std::vector<Function>& functions) const {
    Relaxed relaxed;
    Module module;
    if (Result code = driver().cuModuleLoadData(&module, cubin.data())) {
      int version = 0;
      driver().cuDriverGetVersion(&version);
      fail("cuModuleLoadData", code);
      return fail(last_error + "; the driver is of CUDA " + std::to_string(version / 1000) + "." +
                  std::to_string(version % 1000 / 10) + ", " + kernels[0] + " is for sm_90a");
    }
    for (size_t n = 0; n < kernels.size(); ++n) {
      Function function;
      TRY(cuModuleGetFunction, &function, module, kernels[n].c_str());
      if (shared[n] > 0) TRY(cuFuncSetAttribute, function, kMaximumSharedBytes, shared[n]);
      functions.push_back(function);
    }
    return 0;
  }
};

namespace {

int launch_one(const TwLaunch& x, Function function, const uint64_t* addresses, void* stream) {
  char parameters[kTwParameterBytes];
  void* at[kTwParameters];
  if (x.bytes > kTwParameterBytes || x.count > kTwParameters) return fail("parameters of " + std::to_string(x.bytes) + " bytes");
  std::memcpy(parameters, x.parameters, x.bytes);
  for (uint32_t n = 0; n < x.patches; ++n) {
    const TwPatch& patch = x.patch[n];
    uint64_t address = addresses[patch.tensor];
    if (address % patch.align)
      return fail("tensor " + std::to_string(patch.tensor) + " does not begin at a multiple of " +
                  std::to_string(patch.align) + " bytes");
    std::memcpy(parameters + patch.offset, &address, sizeof address);
  }
  for (uint32_t n = 0; n < x.count; ++n) at[n] = parameters + x.offsets[n];
  Configuration configuration{};
  std::memcpy(configuration.grid, x.grid, sizeof x.grid);
  std::memcpy(configuration.block, x.block, sizeof x.block);
  configuration.shared = x.shared;
  configuration.stream = stream;
  configuration.attributes = reinterpret_cast<const Attribute*>(x.attribute);
  configuration.count = x.attributes;
  TRY(cuLaunchKernelEx, &configuration, function, at, nullptr);
  return 0;
}

}  // namespace

extern "C" {

int32_t tw_launcher_version() { return kTwLauncherVersion; }

int64_t tw_launch_size() { return sizeof(TwLaunch); }

const char* tw_launcher_error() { return last_error.c_str(); }

TwImage* tw_image(const void* cubin, int64_t bytes, const char* const* kernels, const int32_t* shared, int32_t count) {
  auto* image = new TwImage;
  image->cubin.assign(static_cast<const char*>(cubin), bytes);
  image->kernels.assign(kernels, kernels + count);
  image->shared.assign(shared, shared + count);
  return image;
}

int32_t tw_load(TwImage* image, int32_t device) {
  if (start()) return -1;
  Entered context;
  if (context.enter(device)) return -1;
  const Function* functions;
  return image->functions(context.id, &functions);
}

int32_t tw_launch(const TwLaunch* launches, int32_t count, const uint64_t* addresses, int32_t device, void* stream) {
  if (start()) return -1;
  Entered context;
  if (context.enter(device)) return -1;
  for (const TwLaunch* x = launches; x != launches + count; ++x) {
    const Function* functions;
    if (x->image->functions(context.id, &functions)) return -1;
    if (launch_one(*x, functions[x->kernel], addresses, stream)) return -1;
  }
  return 0;
}
}
