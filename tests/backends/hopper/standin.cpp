// A CUDA driver that launches nothing and writes every call down, and as much of the CUDA runtime as the DSL's own launches
// need, which writes its launches down in the same words. Devices, contexts and capture are as strict as the real ones where
// a launcher could go wrong: a function belongs to its module's context, and nothing may be loaded during a capture unless
// the thread's mode is relaxed.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

std::mutex lock;
std::string record;
std::map<std::string, std::vector<int>> sizes;  // of a kernel's parameters
std::map<std::string, int> failures;            // what a function returns, once
bool silent = false, capturing = false;
int devices = 4, known_version = 13000;
thread_local int mode = 0, runtime_device = 0;

struct Context {
  int device;
  unsigned long long id;
};
struct Module {
  const Context* context;
};
struct Function {
  std::string name;
  const Context* context;
};
std::map<int, Context*> primaries;
thread_local std::vector<Context*> stack;

int failure(const char* function) {
  std::lock_guard<std::mutex> held(lock);
  auto found = failures.find(function);
  if (found == failures.end()) return 0;
  int code = found->second;
  failures.erase(found);
  return code;
}

void write(const std::string& line) {
  std::lock_guard<std::mutex> held(lock);
  record += line + "\n";
}

std::string hex(const void* data, int count) {
  std::string text;
  char two[3];
  for (int n = 0; n < count; ++n) {
    std::snprintf(two, sizeof two, "%02x", static_cast<const unsigned char*>(data)[n]);
    text += two;
  }
  return text;
}

struct Attribute {
  unsigned id;
  char pad[4], value[64];
};

void write_launch(const std::string& kernel, const unsigned* grid, const unsigned* block, unsigned long long shared,
                  void* stream, const Attribute* attributes, unsigned count, void** parameters) {
  char head[512];
  std::snprintf(head, sizeof head, "launch %s grid %u %u %u block %u %u %u shared %llu stream %llx", kernel.c_str(), grid[0],
                grid[1], grid[2], block[0], block[1], block[2], shared, (unsigned long long)stream);
  std::string line = head;
  for (unsigned n = 0; n < count; ++n)  // of each attribute the part that means something
    line += " attribute " + std::to_string(attributes[n].id) + " " + hex(attributes[n].value, attributes[n].id == 4 ? 12 : 4);
  for (size_t n = 0; n < sizes[kernel].size(); ++n) line += " " + hex(parameters[n], sizes[kernel][n]);
  write(line);
}

}  // namespace

// -- For the test --------------------------------------------------------------------------------------------------

API void standin_reset() {
  record.clear();
  failures.clear();
  silent = capturing = false;
}
API const char* standin_record() { return record.c_str(); }
API void standin_sizes(const char* kernel, const int* of, int count) { sizes[kernel].assign(of, of + count); }
API void standin_fail(const char* function, int code) { failures[function] = code; }
API void standin_silent(int yes) { silent = yes; }
API void standin_capture(int yes) { capturing = yes; }
API void standin_current(int device) {
  stack.clear();
  if (device >= 0) stack.push_back(primaries[device]);
}
API int standin_stack() { return (int)stack.size(); }

// -- The driver ----------------------------------------------------------------------------------------------------

#define MAY_FAIL(name) \
  if (int code = failure(name)) return code

API int cuInit(unsigned) {
  MAY_FAIL("cuInit");
  write("init");
  return 0;
}
API int cuDriverGetVersion(int* version) { return *version = known_version, 0; }
API int cuGetErrorName(int code, const char** name) {
  *name = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED"
          : code == 900 ? "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED" : code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : nullptr;
  return 0;
}
API int cuGetErrorString(int code, const char** text) {
  *text = code == 719 ? "unspecified launch failure" : nullptr;
  return 0;
}
API int cuDeviceGet(int* device, int ordinal) { return ordinal < devices ? (*device = ordinal, 0) : 101; }
API int cuDevicePrimaryCtxRetain(Context** context, int device) {
  std::lock_guard<std::mutex> held(lock);
  record += "retain " + std::to_string(device) + "\n";
  if (!primaries[device]) primaries[device] = new Context{device, 70ull + device};
  *context = primaries[device];
  return 0;
}
API int cuCtxGetCurrent(Context** context) { return *context = stack.empty() ? nullptr : stack.back(), 0; }
API int cuCtxGetDevice(int* device) { return stack.empty() || !stack.back() ? 201 : (*device = stack.back()->device, 0); }
API int cuCtxGetId(Context* context, unsigned long long* id) { return *id = context->id, 0; }
API int cuCtxPushCurrent_v2(Context* context) { return stack.push_back(context), 0; }
API int cuCtxPopCurrent_v2(Context** context) { return *context = stack.back(), stack.pop_back(), 0; }
API int cuThreadExchangeStreamCaptureMode(int* other) { return std::swap(mode, *other), 0; }
API int cuModuleLoadData(Module** module, const void* image) {
  MAY_FAIL("cuModuleLoadData");
  if (stack.empty()) return 201;
  if (capturing && mode != 2) return 900;
  if (std::memcmp(image, "\x7f" "ELF", 4)) return 200;
  write("load in " + std::to_string(stack.back()->id));
  *module = new Module{stack.back()};
  return 0;
}
API int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  MAY_FAIL("cuModuleGetFunction");
  *function = new Function{name, module->context};
  return 0;
}
API int cuFuncSetAttribute(Function* function, int attribute, int value) {
  MAY_FAIL("cuFuncSetAttribute");
  write("set " + function->name + " " + std::to_string(attribute) + " " + std::to_string(value));
  return 0;
}
struct DriverConfiguration {
  unsigned grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
API int cuLaunchKernelEx(const DriverConfiguration* c, Function* function, void** parameters, void** extra) {
  if (silent) return 0;
  MAY_FAIL("cuLaunchKernelEx");
  if (extra || stack.empty() || function->context != stack.back()) return 400;
  write_launch(function->name, c->grid, c->block, c->shared, c->stream, c->attributes, c->count, parameters);
  return 0;
}
API int cuMemsetD8Async(unsigned long long memory, unsigned char value, size_t bytes, void* stream) {
  MAY_FAIL("cuMemsetD8Async");
  char line[128];
  std::snprintf(line, sizeof line, "set %llx to %d in %zu bytes on stream %llx", memory, value, bytes, (unsigned long long)stream);
  write(line);
  return 0;
}

// -- The runtime, as the DSL's launches call it --------------------------------------------------------------------

struct RuntimeConfiguration {
  unsigned grid[3], block[3];
  unsigned long long shared;
  void* stream;
  Attribute* attributes;
  unsigned count;
};
API int cudaGetDevice(int* device) { return *device = runtime_device, 0; }
API int cudaSetDevice(int device) { return runtime_device = device, 0; }
API int cudaGetDeviceCount(int* count) { return *count = devices, 0; }
API int cudaDeviceGetAttribute(int* value, int attribute, int) { return *value = attribute == 97 ? 232448 : 0, 0; }
API int cudaLibraryLoadData(void** library, const void*, void*, void**, unsigned, void*, void**, unsigned) {
  return *library = &record, 0;
}
API int cudaLibraryUnload(void*) { return 0; }
API int cudaLibraryGetKernel(Function** kernel, void*, const char* name) { return *kernel = new Function{name, nullptr}, 0; }
API int cudaKernelSetAttributeForDevice(Function* kernel, int attribute, int value, int device) {
  write("runtime set " + kernel->name + " " + std::to_string(attribute) + " " + std::to_string(value) + " on " +
        std::to_string(device));
  return 0;
}
API int cuKernelGetAttribute(int* value, int, Function*, int) { return *value = 0, 0; }
API int cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, int* found) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (found) *found = *function ? 0 : 1;
  return *function ? 0 : 1;
}
API int cudaLaunchKernelExC(const RuntimeConfiguration* c, Function* kernel, void** parameters) {
  write_launch(kernel->name, c->grid, c->block, c->shared, c->stream, c->attributes, c->count, parameters);
  return 0;
}
API const char* cudaGetErrorName(int) { return "cudaErrorUnknown"; }
API const char* cudaGetErrorString(int) { return "unknown error"; }
API int cudaGetLastError() { return 0; }
