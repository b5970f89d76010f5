// The instructions of tile_registers.h in software, for tests on machines without them (Intel's Software Developer's Manual,
// volume 2: LDTILECFG, TILELOADD, TILESTORED, TDPBF16PS, TILEZERO, TILERELEASE). Where the hardware would raise an exception
// the process ends with a word about it.
#pragma once
#include <cstdio>
#include <cstdlib>

namespace tw::TW_ISA::tiles {

struct Registers {
  Shapes shapes;  // palette 0: none
  alignas(64) uint8_t rows[kCount][kSide][64];
};
inline thread_local Registers registers{};

inline void require(bool met, const char *what) {
  if (met) return;
  std::fprintf(stderr, "AMX, emulated: %s\n", what);
  std::abort();
}

inline void release() { registers = {}; }

inline void configure(const Shapes &shapes) {
  require(shapes.palette <= 1, "there are palettes 0 and 1");
  require(shapes.start_row < kSide, "start_row is of a tile");
  for (uint8_t x : shapes.reserved) require(!x, "what is reserved is 0");
  for (int t = 0; t < 16; ++t) {
    require(shapes.rows[t] <= kSide && shapes.row_bytes[t] <= 64, "a tile has at most 16 rows of 64 bytes");
    require((shapes.rows[t] == 0) == (shapes.row_bytes[t] == 0), "a tile has rows and bytes, or neither");
    require(t < kCount || !shapes.rows[t], "palette 1 has eight tiles");
  }
  registers = {};
  if (shapes.palette) registers.shapes = shapes;
}

inline void require_tile(int t) { require(registers.shapes.palette && registers.shapes.rows[t], "the tile is configured"); }

template <int t>
inline void zero() {
  require_tile(t);
  __builtin_memset(registers.rows[t], 0, sizeof registers.rows[t]);
}

template <int t>
inline void load(const void *from, int64_t row_bytes) {
  zero<t>();  // rows and bytes beyond the tile's shape
  const Shapes &s = registers.shapes;
  for (int m = 0; m < s.rows[t]; ++m)
    __builtin_memcpy(registers.rows[t][m], (const char *)from + m * row_bytes, s.row_bytes[t]);
}

template <int t>
inline void store(void *to, int64_t row_bytes) {
  require_tile(t);
  const Shapes &s = registers.shapes;
  for (int m = 0; m < s.rows[t]; ++m) __builtin_memcpy((char *)to + m * row_bytes, registers.rows[t][m], s.row_bytes[t]);
}

// While it lives sums flush numbers below the normal ones to 0, read such as 0, and round to nearest even.
class FlushToZero {
 public:
  FlushToZero() : before(_mm_getcsr()) { _mm_setcsr(0x9FC0), fence(); }
  ~FlushToZero() { fence(), _mm_setcsr(before); }

 private:
  const unsigned before;
  static TW_INLINE void fence() { asm volatile("" ::: "memory"); }
};

// Of each row the products of low halves and those of high halves are summed apart, both from 0; their sum then joins C.
template <int c, int a, int b>
inline void dot() {
  require_tile(c), require_tile(a), require_tile(b);
  const Shapes &s = registers.shapes;
  require(c != a && c != b && a != b, "the three tiles differ");
  require(s.rows[c] == s.rows[a] && s.row_bytes[c] == s.row_bytes[b] && s.row_bytes[a] == 4 * s.rows[b], "shapes agree");
  require(s.row_bytes[a] % 4 == 0 && s.row_bytes[c] % 4 == 0, "rows are of whole pairs");
  const FlushToZero mode;
  for (int m = 0; m < s.rows[c]; ++m) {
    __m512 low = _mm512_setzero_ps(), high = low;
    for (int k = 0; k < s.rows[b]; ++k) {
      Pair pair;
      __builtin_memcpy(&pair, registers.rows[a][m] + 4 * k, 4);
      const __m512i x = _mm512_set1_epi32(int(pair)), y = _mm512_load_si512(registers.rows[b][k]);
      const __m512i half = _mm512_set1_epi32(int(0xFFFF0000));
      low = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16), low);
      high = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, half), (__m512)_mm512_and_si512(y, half), high);
    }
    float *sum = (float *)registers.rows[c][m];
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(low, high)));  // unused columns stay 0
  }
}

}  // namespace tw::TW_ISA::tiles
