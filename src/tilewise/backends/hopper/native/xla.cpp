// XLA's custom call on a GPU: a call that was bound launches here, without Python. Any other goes to the handler that Python gave.
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

struct Buffer {
  Head head;
  int dtype;
  void* data;
  int64_t rank;
  const int64_t* dims;
};

struct Buffers {
  Head head;
  int64_t count;
  const void* types;
  const Buffer* const* items;
};

struct Text {
  const char* data;
  size_t size;
};

struct Attributes {
  Head head;
  int64_t count;
  const void *types, *names;
  const Text* const* items;
};

struct Asked {  // what each function of Api is given, and where its answer comes
  Head head;
  void* context;
  void* found;
};

struct Ordinal {
  Head head;
  void* context;
  int32_t found;
};

struct Allocation {
  Head head;
  void* context;
  size_t bytes, alignment;
  void* found;
};

struct Freed {
  Head head;
  void* context;
  size_t bytes;
  void* data;
};

struct Failure {
  Head head;
  const char* message;
  int code;
};

struct Api {
  Head head;
  struct {
    Head head;
    int major, minor;
  } version;
  const void* internal;
  void* (*fail)(Failure*);
  const void* between_1[3];
  void* (*stream)(Asked*);
  const void* between_2[4];
  void* (*allocate)(Allocation*);
  void* (*free)(Freed*);
  const void* between_3[6];
  void* (*ordinal)(Ordinal*);
};

struct Frame {
  Head head;
  const Api* api;
  void* context;
  int stage;
  Buffers operands, results;
  Attributes attributes;
};

constexpr int kInternal = 13;
constexpr size_t kAlignment = 16;  // of what XLA allocates, at most; and of what the copy engine reads

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

// Everything that decides a call: its device, what it says, and the dtypes and sizes of its buffers.
void write_key(const Frame& frame, int32_t device, std::string& key) {
  const Text& call = *frame.attributes.items[0];
  key.assign(call.data, call.size);
  append(key, &device);
  for (const Buffers* buffers : {&frame.operands, &frame.results})
    for (int64_t n = 0; n < buffers->count; ++n) {
      const Buffer& buffer = *buffers->items[n];
      append(key, &buffer.dtype);
      append(key, &buffer.rank);
      append(key, buffer.dims, buffer.rank);
    }
}

void* device_of(const Frame& frame, int32_t* device) {
  Ordinal asked{{sizeof asked, nullptr}, frame.context, 0};
  void* wrong = frame.api->ordinal(&asked);
  return *device = asked.found, wrong;
}

// Memory that nobody reads after the call. XLA gives it to operations behind this one on the same stream.
class Scratch {
 public:
  explicit Scratch(const Frame& frame) : frame_(frame) {}
  ~Scratch() {
    Freed freed{{sizeof freed, nullptr}, frame_.context, bytes_, data_};
    if (data_ != nullptr) frame_.api->free(&freed);
  }
  void* take(size_t bytes) {
    Allocation asked{{sizeof asked, nullptr}, frame_.context, bytes, kAlignment, nullptr};
    if (bytes == 0) return nullptr;
    void* wrong = frame_.api->allocate(&asked);
    return data_ = asked.found, bytes_ = bytes, wrong;
  }
  uint64_t at(int64_t byte) const { return reinterpret_cast<uint64_t>(data_) + byte; }

 private:
  const Frame& frame_;
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

void* failed(const Frame& frame) {
  Failure failure{{sizeof failure, nullptr}, tw_launcher_error(), kInternal};
  return frame.api->fail(&failure);
}

// False: some memory does not lie where kernels can read it. They read whole tensors' parts at multiples of the alignment.
bool addresses_of(const Frame& frame, const TwBound& bound, const Scratch& scratch, std::vector<uint64_t>& found) {
  found.clear();
  for (const TwMemory* x = bound.memory; x != bound.memory + bound.memories; ++x) {
    int64_t n = x->buffer, operands = frame.operands.count;
    const Buffers& buffers = n < operands ? frame.operands : frame.results;
    uint64_t first = n < 0 ? scratch.at(0) : reinterpret_cast<uint64_t>(buffers.items[n < operands ? n : n - operands]->data);
    found.push_back(first + x->first);
    if (found.back() % kAlignment) return false;
  }
  return true;
}

}  // namespace

extern "C" {

void tw_xla_else(TwHandler other) { bounds().other = other; }

void* tw_xla_bind(const void* call, const TwBound* bound) {
  const Frame& frame = *static_cast<const Frame*>(call);
  std::string key;
  int32_t device;
  if (void* wrong = device_of(frame, &device)) return wrong;
  write_key(frame, device, key);
  std::unique_lock<std::shared_mutex> held(bounds().lock);
  bounds().by_call.emplace(std::move(key), bound);
  return nullptr;
}

void* tw_xla(void* call) {
  const Frame& frame = *static_cast<const Frame*>(call);
  if (frame.head.extension != nullptr) return bounds().other(call);  // asks for metadata
  thread_local std::string key;
  thread_local std::vector<uint64_t> addresses;
  int32_t device;
  if (void* wrong = device_of(frame, &device)) return wrong;
  write_key(frame, device, key);
  const TwBound* bound = nullptr;
  {
    std::shared_lock<std::shared_mutex> held(bounds().lock);
    auto at = bounds().by_call.find(key);
    if (at != bounds().by_call.end()) bound = at->second;
  }
  if (bound == nullptr) return bounds().other(call);
  Scratch scratch(frame);
  if (void* wrong = scratch.take(bound->scratch)) return wrong;
  if (!addresses_of(frame, *bound, scratch, addresses)) return bounds().other(call);
  Asked stream{{sizeof stream, nullptr}, frame.context, nullptr};
  if (void* wrong = frame.api->stream(&stream)) return wrong;
  if (bound->zeros && tw_zero(scratch.at(0), bound->zeros, device, stream.found)) return failed(frame);
  for (const TwBoundLaunch* x = bound->launch; x != bound->launch + bound->launches; ++x)
    if (tw_run(x->recipe, x->given, addresses.data(), device, stream.found)) return failed(frame);
  return nullptr;
}
}
