#pragma once
#include <cstdint>

// C (rows x columns) += A (rows x pairs) B (pairs x columns), each in the corner of 16 x 16 elements of 4 bytes.
struct TileStep {
  int rows, columns, pairs;
  uint32_t a[16][16], b[16][16];
  float c[16][16];
};
