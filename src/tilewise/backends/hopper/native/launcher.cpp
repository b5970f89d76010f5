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

#define DRIVER(X)                                                       \
  X(cuInit, (unsigned))                                                 \
  X(cuDriverGetVersion, (int*))                                         \
  X(cuGetErrorName, (Result, const char**))                             \
  X(cuGetErrorString, (Result, const char**))                           \
  X(cuDeviceGet, (Device*, int))                                        \
  X(cuDevicePrimaryCtxRetain, (Context*, Device))                       \
  X(cuCtxGetCurrent, (Context*))                                        \
  X(cuCtxGetDevice, (Device*))                                          \
  X(cuCtxGetId, (Context, unsigned long long*))                         \
  X(cuCtxPushCurrent_v2, (Context))                                     \
  X(cuCtxPopCurrent_v2, (Context*))                                     \
  X(cuThreadExchangeStreamCaptureMode, (int*))                          \
  X(cuModuleLoadData, (Module*, const void*))                           \
  X(cuModuleGetFunction, (Function*, Module, const char*))              \
  X(cuFuncSetAttribute, (Function, int, int))                           \
  X(cuLaunchKernelEx, (const Configuration*, Function, void**, void**)) \
  X(cuMemsetD8Async, (uint64_t, unsigned char, size_t, void*))

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

// -- Recipes -------------------------------------------------------------------------------------------------------

namespace {

// In the order of recipe.py's LEAVES and OPERATIONS.
enum Operation : uint8_t {
  kConstant, kNumber, kSize, kStride, kAddress,
  kAdd, kSub, kMul, kAnd, kOr, kXor, kShl, kLshr, kAshr, kUdiv, kUrem, kSdiv, kSrem, kZext, kTrunc, kSext, kSelect,
  kUmin, kUmax, kSmin, kSmax, kEq, kNe, kSlt, kSle, kSgt, kSge, kUlt, kUle, kUgt, kUge,
};

uint64_t cut(uint64_t n, unsigned bits) { return bits >= 64 ? n : n & ((uint64_t{1} << bits) - 1); }

int64_t with_sign(uint64_t n, unsigned bits) {
  unsigned above = bits >= 64 ? 0 : 64 - bits;
  return static_cast<int64_t>(n << above) >> above;
}

// Numbers that do not fit, and divisions by zero: the host code that a recipe was read from has neither.
bool leaf(const TwRecipe& recipe, const TwRow& row, const int64_t* given, uint64_t* value) {
  if (row.operation == kAddress) return *value = 0, true;
  if (row.operation == kConstant) return *value = cut(recipe.constant[row.a], row.bits), true;
  int64_t n = given[row.a], end = row.bits >= 64 ? INT64_MAX : (int64_t{1} << (row.bits - 1)) - 1;
  int64_t least = row.operation == kNumber ? -end - 1 : 0;
  *value = cut(n, row.bits);
  return row.b != 0 || (n >= least && n <= end);  // b: of bits, not of a number
}

bool computed(const TwRow& row, const uint64_t* values, uint64_t* value) {
  uint64_t a = values[row.a], b = row.b < 0 ? 0 : values[row.b], w = row.width;
  int64_t x = with_sign(a, w), y = with_sign(b, w);
  uint64_t found = 0;
  switch (row.operation) {
    case kAdd: found = a + b; break;
    case kSub: found = a - b; break;
    case kMul: found = a * b; break;
    case kAnd: found = a & b; break;
    case kOr: found = a | b; break;
    case kXor: found = a ^ b; break;
    case kShl: found = b < w ? a << b : 0; break;
    case kLshr: found = b < 64 ? a >> b : 0; break;
    case kAshr: found = x >> (b < 64 ? b : 63); break;
    case kUdiv: if (b == 0) return false; found = a / b; break;
    case kUrem: if (b == 0) return false; found = a % b; break;
    case kSdiv: if (y == 0 || y == -1) { if (y == 0) return false; found = -a; break; } found = x / y; break;
    case kSrem: if (y == 0) return false; found = y == -1 ? 0 : x % y; break;
    case kZext: case kTrunc: found = a; break;
    case kSext: found = x; break;
    case kSelect: found = a ? b : values[row.c]; break;
    case kUmin: found = a < b ? a : b; break;
    case kUmax: found = a < b ? b : a; break;
    case kSmin: found = x < y ? x : y; break;
    case kSmax: found = x < y ? y : x; break;
    case kEq: found = a == b; break;
    case kNe: found = a != b; break;
    case kSlt: found = x < y; break;
    case kSle: found = x <= y; break;
    case kSgt: found = x > y; break;
    case kSge: found = x >= y; break;
    case kUlt: found = a < b; break;
    case kUle: found = a <= b; break;
    case kUgt: found = a > b; break;
    case kUge: found = a >= b; break;
    default: return false;
  }
  *value = cut(found, row.bits);
  return true;
}

bool fits(const TwRecipe& recipe, const int64_t* given) {
  thread_local std::vector<int64_t> seen;
  seen.assign(recipe.symbols, -1);
  for (const TwCheck* x = recipe.check; x != recipe.check + recipe.checks; ++x) {
    int64_t n = given[x->place];
    if (x->free >= 0 && given[x->free] == 1) {  // a stride that leads nowhere, but tensor maps may hold it
      if (x->symbol >= 0 && n % x->number) return false;
      continue;
    }
    if (x->symbol < 0) {
      if (n != x->number) return false;
      continue;
    }
    if (seen[x->symbol] < 0) seen[x->symbol] = n;
    if (seen[x->symbol] != n || n % x->number) return false;
  }
  return true;
}

void fill(char* memory, const TwField* field, uint32_t count, const uint64_t* values) {
  for (const TwField* x = field; x != field + count; ++x) std::memcpy(memory + x->offset, &values[x->row], x->bytes);
}

// The values of a recipe's rows; false: its kernels were not compiled for what is given.
bool evaluate(const TwRecipe& recipe, const int64_t* given, uint64_t* values) {
  if (!fits(recipe, given)) return false;
  for (uint32_t n = 0; n < recipe.rows; ++n) {
    const TwRow& row = recipe.row[n];
    bool there = row.operation <= kAddress ? leaf(recipe, row, given, &values[n]) : computed(row, values, &values[n]);
    if (!there) return false;
  }
  return true;
}

// Whether a launch failed for its grid, which says so.
bool beyond(const TwLaunch& x, const uint64_t* values) {
  for (int d = 0; d < 3; ++d) {
    uint64_t most = d == 0 ? kTwBlocksAlongX : kTwBlocks, blocks = values[x.grid[d]];
    if (blocks <= most) continue;
    fail(std::to_string(blocks) + " blocks along " + "xyz"[d] + " in the launch of " + x.image->kernels[x.kernel] +
         ", where a GPU has " + std::to_string(most) + " at most");
    return true;
  }
  return false;
}

// The tensors of a call: `place` has of each the number of its memory, and its first byte there.
struct TwTensors {
  const int64_t* place;
  const uint64_t* memories;

  uint64_t address(uint32_t n) const { return memories[place[2 * n]] + place[2 * n + 1]; }
};

int launch_one(const TwLaunch& x, const uint64_t* values, const TwTensors& tensors, Function function, void* stream) {
  char parameters[kTwParameterBytes];
  void* at[kTwParameters];
  Attribute attributes[kTwAttributes];
  if (x.bytes > kTwParameterBytes || x.count > kTwParameters || x.attributes > kTwAttributes)
    return fail("parameters of " + std::to_string(x.bytes) + " bytes, " + std::to_string(x.attributes) + " attributes");
  std::memset(parameters, 0, x.bytes);
  fill(parameters, x.field, x.fields, values);
  for (uint32_t n = 0; n < x.patches; ++n) {
    const TwPatch& patch = x.patch[n];
    uint64_t address = tensors.address(patch.tensor);
    if (address % patch.align)
      return fail("tensor " + std::to_string(patch.tensor) + " does not begin at a multiple of " +
                  std::to_string(patch.align) + " bytes");
    std::memcpy(parameters + patch.offset, &address, sizeof address);
  }
  for (uint32_t n = 0; n < x.count; ++n) at[n] = parameters + x.offsets[n];
  Configuration configuration{};
  for (int d = 0; d < 3; ++d) {
    configuration.grid[d] = values[x.grid[d]];
    configuration.block[d] = values[x.block[d]];
  }
  const TwField* field = x.attribute_field;
  for (uint32_t n = 0; n < x.attributes; ++n) {
    attributes[n] = Attribute{x.attribute[2 * n], {}, {}};
    fill(attributes[n].value, field, x.attribute[2 * n + 1], values);
    field += x.attribute[2 * n + 1];
  }
  configuration.shared = x.shared;
  configuration.stream = stream;
  configuration.attributes = attributes;
  configuration.count = x.attributes;
  Result code = driver().cuLaunchKernelEx(&configuration, function, at, nullptr);
  if (code == 0) return 0;
  return beyond(x, values) ? kTwBeyond : fail("cuLaunchKernelEx", code);
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

int32_t tw_run(const TwRecipe* recipe, const int64_t* given, const uint64_t* memories, int32_t device, void* stream) {
  thread_local std::vector<uint64_t> values;
  values.resize(recipe->rows);
  if (!evaluate(*recipe, given, values.data())) return kTwUnfit;
  if (start()) return -1;
  Entered context;
  if (context.enter(device)) return -1;
  for (const TwLaunch* x = recipe->launch; x != recipe->launch + recipe->launches; ++x) {
    const Function* functions;
    if (x->image->functions(context.id, &functions)) return -1;
    if (int code = launch_one(*x, values.data(), {given + recipe->given, memories}, functions[x->kernel], stream)) return code;
  }
  return 0;
}

int32_t tw_zero(uint64_t memory, int64_t bytes, int32_t device, void* stream) {
  if (start()) return -1;
  Entered context;
  if (context.enter(device)) return -1;
  TRY(cuMemsetD8Async, memory, 0, bytes, stream);
  return 0;
}
}
