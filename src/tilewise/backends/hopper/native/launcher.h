// What driver.py and launcher.cpp agree on; driver.py declares the same structs for ctypes.
#pragma once

#include <cstdint>

#define TW_EXPORT __attribute__((visibility("default")))

constexpr int32_t kTwLauncherVersion = 1;
constexpr uint32_t kTwParameterBytes = 32764, kTwParameters = 1024;  // of one kernel, at most: the driver's own limit

struct TwImage;  // a cubin and its kernels

// Eight bytes at `offset` of the parameters become the address of tensor number `tensor`, a multiple of `align`.
struct TwPatch {
  uint32_t offset, tensor, align;
};

struct TwLaunch {
  TwImage* image;
  const char* parameters;  // `bytes` of them, addresses left out
  const uint32_t* offsets;  // of each of `count` parameters
  const TwPatch* patch;
  const char* attribute;  // 72 bytes each, as the driver has them
  uint32_t kernel;  // number among the image's
  uint32_t grid[3], block[3], shared;
  uint32_t bytes, count, patches, attributes;
};

extern "C" {
TW_EXPORT int32_t tw_launcher_version();
TW_EXPORT int64_t tw_launch_size();
// Why this thread's last call returned other than 0.
TW_EXPORT const char* tw_launcher_error();
// A cubin, copied, with the names of its kernels and the dynamic shared memory that each may ask for. Never freed.
TW_EXPORT TwImage* tw_image(const void* cubin, int64_t bytes, const char* const* kernels, const int32_t* shared, int32_t count);
// Loads it on a device, if it is not there yet: a launch that follows calls nothing but the launch itself.
TW_EXPORT int32_t tw_load(TwImage* image, int32_t device);
// Launches kernels one after the other on a stream of a device.
TW_EXPORT int32_t tw_launch(const TwLaunch* launches, int32_t count, const uint64_t* addresses, int32_t device, void* stream);
}
