#include "tile_permission.h"

#if defined(TW_X86) && defined(__linux__)
#include <cpuid.h>
#include <cstdint>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tw {

#if defined(TW_X86) && defined(__linux__)

bool has_tile_registers() {
  unsigned a, b, c, d;
  constexpr unsigned saves_state = 1u << 27, tiles_and_bf16 = 1u << 24 | 1u << 22;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & saves_state)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & tiles_and_bf16) != tiles_and_bf16) return false;
  uint32_t low, high;
  asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr uint32_t tile_state = 3u << 17;  // their shapes and their data
  return (low & tile_state) == tile_state;
}

bool may_use_tile_registers() {
  constexpr long request = 0x1023, tile_data = 18;
  static const bool granted = has_tile_registers() && syscall(SYS_arch_prctl, request, tile_data) == 0;
  return granted;
}

#else

bool has_tile_registers() { return false; }
bool may_use_tile_registers() { return false; }

#endif

}  // namespace tw
