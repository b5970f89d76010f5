// AMX's tile registers: eight of 16 rows x 64 bytes, and the few instructions that products need. Written as assembly, since
// the compiler's own forms take register numbers as text and do not say that they read and write memory.
//
//   dot<c, a, b>: C[m][n] += Σ_k A[m][k].low · B[k][n].low + A[m][k].high · B[k][n].high      16 x 16 floats, k < 16 pairs
#pragma once
#include "operands.h"

namespace tw::TW_ISA::tiles {

constexpr int kCount = 8, kSide = 16;  // registers; rows of one, and its columns of 4 bytes

// What LDTILECFG reads.
struct alignas(64) Shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

constexpr Shapes whole() {
  Shapes s{};
  s.palette = 1;
  for (int t = 0; t < kCount; ++t) s.row_bytes[t] = 64, s.rows[t] = kSide;
  return s;
}
constexpr Shapes kWhole = whole();

}  // namespace tw::TW_ISA::tiles

#ifdef TW_EMULATED_TILES
#include "tile_emulation.h"
#else
namespace tw::TW_ISA::tiles {

TW_INLINE void configure(const Shapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes) : "memory"); }
TW_INLINE void release() { asm volatile("tilerelease" ::: "memory"); }

template <int t>
TW_INLINE void zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(t) : "memory");
}
template <int t>
TW_INLINE void load(const void *from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(row_bytes), "i"(t) : "memory");
}
template <int t>
TW_INLINE void store(void *to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(row_bytes), "i"(t) : "memory");
}
template <int c, int a, int b>
TW_INLINE void dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(c), "i"(a), "i"(b) : "memory");
}

}  // namespace tw::TW_ISA::tiles
#endif

namespace tw::TW_ISA {

// The calling thread's tile registers are ours while this lives, where products of X need them. Signal handlers, which may
// use them too, run outside of it.
template <class X>
struct TileRegisters {
  TileRegisters() {
    if constexpr (kTiled<X>) tiles::configure(tiles::kWhole);
  }
  ~TileRegisters() {
    if constexpr (kTiled<X>) tiles::release();
  }
  TileRegisters(const TileRegisters &) = delete;
  TileRegisters &operator=(const TileRegisters &) = delete;
};

}  // namespace tw::TW_ISA
