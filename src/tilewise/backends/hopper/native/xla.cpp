// XLA's custom call on a GPU: a call that was bound launches here, without Python. Any other goes to the handler that Python gave
// (docs/decisions.md#jax-handler).
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "launcher.h"

namespace {

// -- XLA's interface, version 0 (xla/ffi/api/c_api.h), to which XLA only appends: as far as it is read here --------

struct Head {
  size_t size;
  const void* extension;
};

struct Buffer : Head {
  int dtype;
  void* data;
  int64_t rank;
  const int64_t* dims;
};

struct Buffers : Head {
  int64_t count;
  const void* types;
  const Buffer* const* items;
};

struct Text {
  const char* data;
  size_t size;
};

struct Attributes : Head {
  int64_t count;
  const void *types, *names;
  const Text* const* items;
};

// What each of XLA's functions is given, and where its answer comes.
struct Asked : Head {
  const void* context;
  uint64_t words[3];
};

enum Function { kFail = 0, kStream = 4, kAllocate = 9, kFree = 10, kOrdinal = 17, kFunctions };

struct Api : Head {
  const void *version[3], *internal;
  void* (*functions[kFunctions])(Asked*);
};

struct Frame : Head {
  const Api* api;
  const void* context;
  int stage;
  Buffers operands, results;
  Attributes attributes;

  // Null, or XLA's error.
  void* ask(Function function, Asked& asked) const { return api->functions[function](&asked); }
  Asked asked(uint64_t a = 0, uint64_t b = 0) const { return {{sizeof(Asked), nullptr}, context, {a, b, 0}}; }

  const Buffer& buffer(int64_t n) const { return n < operands.count ? *operands.items[n] : *results.items[n - operands.count]; }
};

constexpr int kInternal = 13;
constexpr uint64_t kAlignment = 16;  // what XLA allocates has no larger one, and kernels need no larger one

// -- Bound calls ---------------------------------------------------------------------------------------------------

struct Bounds {
  std::shared_mutex lock;
  std::unordered_map<std::string, const TwBound*> by_call;  // never freed
  TwHandler other = nullptr;
};

Bounds& bounds() {
  static auto* found = new Bounds;  // for threads of XLA that outlive main
  return *found;
}

template <class Number>
void append(std::string& text, const Number* numbers, size_t count = 1) {
  text.append(reinterpret_cast<const char*>(numbers), count * sizeof *numbers);
}

// Everything that decides a call: its device, what it says, and the dtypes and sizes of its buffers. Returns XLA's error.
void* identify(const Frame& frame, int32_t* device, std::string* key) {
  Asked asked = frame.asked();
  if (void* wrong = frame.ask(kOrdinal, asked)) return wrong;
  *device = static_cast<int32_t>(asked.words[0]);
  key->assign(frame.attributes.items[0]->data, frame.attributes.items[0]->size);
  append(*key, device);
  for (int64_t n = 0; n < frame.operands.count + frame.results.count; ++n) {
    const Buffer& x = frame.buffer(n);
    append(*key, &x.dtype);
    append(*key, &x.rank);
    append(*key, x.dims, x.rank);
  }
  return nullptr;
}

const TwBound* bound_as(const std::string& key) {
  std::shared_lock<std::shared_mutex> held(bounds().lock);
  auto at = bounds().by_call.find(key);
  return at == bounds().by_call.end() ? nullptr : at->second;
}

// Memory that nobody reads after the call: XLA gives it to operations behind this one on the same stream.
class Scratch {
 public:
  explicit Scratch(const Frame& frame) : frame_(frame) {}
  ~Scratch() {
    Asked asked = frame_.asked(bytes_, first);
    if (first != 0) frame_.ask(kFree, asked);
  }
  void* take(uint64_t bytes) {
    Asked asked = frame_.asked(bytes_ = bytes, kAlignment);
    if (bytes == 0) return nullptr;
    void* wrong = frame_.ask(kAllocate, asked);
    return first = asked.words[2], wrong;
  }
  uint64_t first = 0;

 private:
  const Frame& frame_;
  uint64_t bytes_ = 0;
};

// False: some memory begins where kernels cannot read it.
bool find(const Frame& frame, const TwBound& bound, uint64_t scratch, std::vector<uint64_t>& found) {
  found.clear();
  for (const TwMemory* x = bound.memory; x != bound.memory + bound.memories; ++x) {
    found.push_back((x->buffer < 0 ? scratch : reinterpret_cast<uint64_t>(frame.buffer(x->buffer).data)) + x->first);
    if (found.back() % kAlignment) return false;
  }
  return true;
}

void* failed(const Frame& frame) {
  Asked asked{{sizeof asked, nullptr}, tw_launcher_error(), {kInternal, 0, 0}};
  return frame.ask(kFail, asked);
}

}  // namespace

extern "C" {

void tw_xla_else(TwHandler other) { bounds().other = other; }

void* tw_xla_bind(const void* call, const TwBound* bound) {
  std::string key;
  int32_t device;
  if (void* wrong = identify(*static_cast<const Frame*>(call), &device, &key)) return wrong;
  std::unique_lock<std::shared_mutex> held(bounds().lock);
  bounds().by_call.emplace(std::move(key), bound);
  return nullptr;
}

void* tw_xla(void* call) {
  const Frame& frame = *static_cast<const Frame*>(call);
  if (frame.extension != nullptr) return bounds().other(call);  // asks for metadata
  thread_local std::string key;
  thread_local std::vector<uint64_t> addresses;
  int32_t device;
  if (void* wrong = identify(frame, &device, &key)) return wrong;
  const TwBound* bound = bound_as(key);
  if (bound == nullptr) return bounds().other(call);
  Scratch scratch(frame);
  if (void* wrong = scratch.take(bound->scratch)) return wrong;
  if (!find(frame, *bound, scratch.first, addresses)) return bounds().other(call);
  Asked asked = frame.asked();
  if (void* wrong = frame.ask(kStream, asked)) return wrong;
  void* stream = reinterpret_cast<void*>(asked.words[0]);
  if (bound->zeros && tw_zero(scratch.first, bound->zeros, device, stream)) return failed(frame);
  for (const TwBoundLaunch* x = bound->launch; x != bound->launch + bound->launches; ++x)
    if (tw_run(x->recipe, x->given, addresses.data(), device, stream)) return failed(frame);
  return nullptr;
}
}
