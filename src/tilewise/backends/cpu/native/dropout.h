// Philox4x32-7 over global indices (docs/algorithm.md, section 9): the factor of a row of pairs, 0 or 65536 / T.
#pragma once
#include "vec.h"

namespace tw::TW_ISA {

struct Dropout {
  uint64_t seed;
  uint32_t keep_below;

  // factor[c] for columns j0 .. j0 + count of row i; j0 and count are multiples of 16.
  template <class T>
  void row(uint32_t head, int64_t i, int64_t j0, int64_t count, T *factor) const {
    const T scale = T(65536.0 / keep_below);
    const uint32_t c1 = uint32_t(8 * (i / 16) + i % 8);
    for (int64_t c = 0; c < count; c += 64) {  // 16 calls at a time, so that the rounds run on vectors
      uint32_t values[64];
      sixteen_calls(uint32_t((j0 + c) / 4), c1, head, (i / 8) % 2, values);
      const int64_t left = count - c < 64 ? count - c : 64;
      for (int64_t n = 0; n < left; ++n) factor[c + n] = values[n] < keep_below ? scale : T(0);
    }
  }

  // The 16-bit values of 64 columns: of each call the words of even and odd j, 0 and 2, or (odd) 1 and 3.
  void sixteen_calls(uint32_t c0, uint32_t c1, uint32_t c2, bool odd, uint32_t values[64]) const {
    uint32_t x0[16], x1[16], x2[16], x3[16];
    for (int n = 0; n < 16; ++n) x0[n] = c0 + uint32_t(n), x1[n] = c1, x2[n] = c2, x3[n] = 0;
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 7; ++round, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u)
      for (int n = 0; n < 16; ++n) {
        const uint64_t p0 = uint64_t(x0[n]) * 0xD2511F53u, p1 = uint64_t(x2[n]) * 0xCD9E8D57u;
        x0[n] = uint32_t(p1 >> 32) ^ x1[n] ^ k0, x1[n] = uint32_t(p1);
        x2[n] = uint32_t(p0 >> 32) ^ x3[n] ^ k1, x3[n] = uint32_t(p0);
      }
    uint32_t words[32];  // in the order of j, low halves before high ones
    for (int n = 0; n < 16; ++n) words[2 * n] = odd ? x1[n] : x0[n], words[2 * n + 1] = odd ? x3[n] : x2[n];
    for (int block = 0; block < 4; ++block)
      for (int n = 0; n < 8; ++n) {
        values[16 * block + n] = words[8 * block + n] & 0xFFFF;
        values[16 * block + 8 + n] = words[8 * block + n] >> 16;
      }
  }
};

}  // namespace tw::TW_ISA
