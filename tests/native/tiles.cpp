// AMX's instructions, emulated, against their definition number by number; and against the hardware where there is some.
//
//   tiles [--steps N]      exit code 1: they differ in a bit
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "tile_permission.h"
#include "tile_step.h"

namespace tw {

namespace emulated {
void step(const TileStep &in, float (&out)[16][16]);
}
namespace hardware {
void step(const TileStep &in, float (&out)[16][16]);
}

namespace {

// Numbers below the normal ones are 0, as operands and as results.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x; }

float half(uint32_t pair, int which) {
  const uint32_t bits = which ? pair & 0xFFFF0000u : pair << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return flushed(x);
}

void defined(const TileStep &in, float (&out)[16][16]) {
  for (int m = 0; m < in.rows; ++m)
    for (int n = 0; n < in.columns; ++n) {
      float sum[2] = {0, 0};
      for (int k = 0; k < in.pairs; ++k)
        for (int which = 0; which < 2; ++which)
          sum[which] = flushed(std::fma(half(in.a[m][k], which), half(in.b[k][n], which), sum[which]));
      out[m][n] = flushed(flushed(in.c[m][n]) + flushed(sum[0] + sum[1]));
    }
}

// Whole and cut-off tiles; numbers of every size, of the smallest, and infinities.
TileStep drawn(std::mt19937 &random) {
  TileStep in{};
  auto below = [&](uint32_t n) { return random() % n; };
  const bool whole = below(3) == 0, finite = below(4) != 0;
  in.rows = whole ? 16 : 1 + int(below(16)), in.columns = whole ? 16 : 1 + int(below(16)), in.pairs = whole ? 16 : 1 + int(below(16));
  const uint32_t least = below(2) ? 120 : 0, range = least ? 14 : 254;
  auto exponent = [&] { return !finite && below(64) == 0 ? 255u : least + below(range); };
  auto bf16 = [&] { return below(2) << 15 | exponent() << 7 | below(128); };
  for (int r = 0; r < 16; ++r)
    for (int n = 0; n < 16; ++n) {
      in.a[r][n] = bf16() | bf16() << 16, in.b[r][n] = bf16() | bf16() << 16;
      const uint32_t bits = bf16() << 16 | below(1 << 16);
      std::memcpy(&in.c[r][n], &bits, 4);
    }
  return in;
}

// NaN equals NaN.
bool equal(const TileStep &in, const float (&x)[16][16], const float (&y)[16][16]) {
  for (int m = 0; m < in.rows; ++m)
    for (int n = 0; n < in.columns; ++n)
      if (std::memcmp(&x[m][n], &y[m][n], 4) && !(std::isnan(x[m][n]) && std::isnan(y[m][n]))) return false;
  return true;
}

// What lies beyond the tile's shape in memory stays as it was.
bool untouched(const TileStep &in, const float (&x)[16][16]) {
  for (int m = 0; m < 16; ++m)
    for (int n = 0; n < 16; ++n)
      if ((m >= in.rows || n >= in.columns) && x[m][n] != -1) return false;
  return true;
}

}  // namespace
}  // namespace tw

int main(int count, char **words) {
  const int steps = count > 2 ? std::atoi(words[2]) : 2000;
  const bool real = tw::may_use_tile_registers();
  std::mt19937 random(0);
  int wrong = 0, differs = 0;
  for (int n = 0; n < steps; ++n) {
    const TileStep in = tw::drawn(random);
    float expected[16][16], out[2][16][16];
    for (auto &x : out)
      for (auto &row : x)
        for (float &number : row) number = -1;
    tw::defined(in, expected), tw::emulated::step(in, out[0]);
    wrong += !tw::equal(in, expected, out[0]) || !tw::untouched(in, out[0]);
    if (!real) continue;
    tw::hardware::step(in, out[1]);
    differs += !tw::equal(in, out[0], out[1]) || !tw::untouched(in, out[1]);
  }
  std::printf("%d steps: the emulation differs from the definition in %d", steps, wrong);
  if (real) std::printf(", from the hardware in %d\n", differs);
  else std::printf("; no AMX here to compare with\n");
  return wrong || differs ? 1 : 0;
}
