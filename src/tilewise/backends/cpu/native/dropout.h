// Philox4x32-7 over the indices of the whole attention (docs/algorithm.md#9-dropout): the factors of a row of pairs, each 0
// or 65536 / T.
#pragma once
#include "program.h"

namespace tw::TW_ISA {

struct Dropout {
  const TwCall &c;

  // Writes factor[n] of the pair (at.i, at.j0 + n) for n in [begin, end). Counters are those of the whole attention, and a
  // piece may start inside one of its blocks of 16 x 16 pairs. Each step makes 16 calls, so that the rounds run on vectors.
  template <class T>
  void row(const Place &at, int64_t begin, int64_t end, T *factor) const {
    const T scale = T(65536.0 / c.keep_below);
    const uint32_t head = uint32_t(at.b * c.heads_q + at.h);
    const int64_t i = c.q_start + at.i, j0 = c.k_start + at.j0;
    const uint32_t c1 = uint32_t(8 * (i / 16) + i % 8);
    for (int64_t j = (j0 + begin) / 16 * 16; j < j0 + end; j += 64) {
      uint32_t values[64];
      sixteen_calls(uint32_t(j / 4), c1, head, (i / 8) % 2, values);
      const int64_t n0 = j - j0, first = n0 < begin ? begin : n0, last = end < n0 + 64 ? end : n0 + 64;
      for (int64_t n = first; n < last; ++n) factor[n] = values[n - n0] < c.keep_below ? scale : T(0);
    }
  }

  // The 16-bit values of 64 columns: of each call the words of even and odd j, 0 and 2, or (odd) 1 and 3.
  void sixteen_calls(uint32_t c0, uint32_t c1, uint32_t c2, bool odd, uint32_t values[64]) const {
    uint32_t x0[16], x1[16], x2[16], x3[16];
    for (int n = 0; n < 16; ++n) x0[n] = c0 + uint32_t(n), x1[n] = c1, x2[n] = c2, x3[n] = 0;
    uint32_t k0 = uint32_t(c.seed), k1 = uint32_t(c.seed >> 32);
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
