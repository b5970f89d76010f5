// What driver.py, xla.py, launcher.cpp and xla.cpp agree on; driver.py and xla.py declare the same structs for ctypes.
#pragma once

#include <cstdint>

#define TW_EXPORT __attribute__((visibility("default")))

constexpr int32_t kTwLauncherVersion = 5;
constexpr int32_t kTwUnfit = -2, kTwBeyond = -3;
constexpr uint32_t kTwBlocksAlongX = 2147483647, kTwBlocks = 65535;  // of a grid, at most: device.py has them too
constexpr uint32_t kTwParameterBytes = 32764, kTwParameters = 1024, kTwAttributes = 8;  // of one kernel, at most

struct TwImage;  // a cubin and its kernels

// Eight bytes at `offset` of the parameters become the address of tensor number `tensor`, a multiple of `align`.
struct TwPatch {
  uint32_t offset, tensor, align;
};

// One operation of a recipe (host/recipe.py), on the values of rows before it. `a` of a leaf is its place among the constants, or among
// what a call gives.
struct TwRow {
  uint8_t operation, bits, width, padding;
  int32_t a, b, c;
};

// The value of a row, in `bytes` at `offset`.
struct TwField {
  uint32_t offset, bytes, row;
};

// What a kernel was compiled for of the number at `place`: that it is `number`; or, of a symbol, that it is a multiple of `number` and
// equal to all others of that symbol. Strides of a dimension of size one, whose size is at `free`, may be anything.
struct TwCheck {
  int32_t place, free, symbol;
  int32_t padding;
  int64_t number;
};

// A kernel of a recipe. `grid` and `block` are rows; an attribute has its number, and fields of its value of 64 bytes.
struct TwLaunch {
  TwImage* image;
  const uint32_t* offsets;  // of each of `count` parameters, all of `bytes`
  const TwPatch* patch;
  const TwField* field;
  const uint32_t* attribute;  // number and count of fields of each
  const TwField* attribute_field;
  uint32_t kernel;  // number among the image's
  uint32_t grid[3], block[3], shared;
  uint32_t bytes, count, patches, fields, attributes;
};

struct TwRecipe {
  const TwRow* row;
  const int64_t* constant;
  const TwCheck* check;
  const TwLaunch* launch;
  uint32_t rows, checks, symbols, launches;
  uint32_t given;  // sizes, strides and numbers of a call, behind which are the places of its tensors
};

// Memory of a bound call: byte `first` of a buffer, which is the number of an operand, or behind these of a result; -1: of the scratch memory.
struct TwMemory {
  int64_t buffer, first;
};

struct TwBoundLaunch {
  const TwRecipe* recipe;
  const int64_t* given;
};

// All launches of a custom call of XLA. The scratch memory begins with bytes that are zero.
struct TwBound {
  const TwMemory* memory;
  const TwBoundLaunch* launch;
  int64_t scratch, zeros;
  uint32_t memories, launches;
};

using TwHandler = void* (*)(void* call);  // a handler of XLA's FFI: of a call frame null, or XLA's error

extern "C" {
TW_EXPORT int32_t tw_launcher_version();
TW_EXPORT int64_t tw_launch_size();  // of a TwLaunch, in bytes
// Why this thread's last call returned other than 0.
TW_EXPORT const char* tw_launcher_error();
// A cubin, copied, with the names of its kernels and the dynamic shared memory that each may ask for. Never freed.
TW_EXPORT TwImage* tw_image(const void* cubin, int64_t bytes, const char* const* kernels, const int32_t* shared, int32_t count);
// Launches the kernels of a recipe, one after the other on a stream of a device, with the sizes, strides and numbers of a call (32-bit floats
// as their bits). Behind these, `given` says of each tensor the number of its memory, and its first byte there; `memories` are addresses.
// kTwUnfit: the kernels were not compiled for these numbers, and none was launched. kTwBeyond: a grid is larger than a GPU's.
TW_EXPORT int32_t tw_run(const TwRecipe* recipe, const int64_t* given, const uint64_t* memories, int32_t device, void* stream);
// Sets memory of a device to zero, in the order of a stream.
TW_EXPORT int32_t tw_zero(uint64_t memory, int64_t bytes, int32_t device, void* stream);
// The handler of custom calls on a GPU. tw_xla_bind: how calls like this one are launched from now on; the bound call is never freed.
// tw_xla_else: the handler of all others.
TW_EXPORT void* tw_xla(void* call);
TW_EXPORT void* tw_xla_bind(const void* call, const TwBound* bound);
TW_EXPORT void tw_xla_else(TwHandler other);
}
