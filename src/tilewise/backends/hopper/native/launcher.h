// What driver.py and launcher.cpp agree on; driver.py declares the same structs for ctypes.
#pragma once

#include <cstdint>

#define TW_EXPORT __attribute__((visibility("default")))

constexpr int32_t kTwLauncherVersion = 4;
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
}
