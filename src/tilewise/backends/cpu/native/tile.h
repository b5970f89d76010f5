// Addresses, mask ends and tile states that forward and backward share.
#pragma once
#include "pack.h"
#include "program.h"
#include "signals.h"
#include "work.h"

namespace tw::TW_ISA {

template <class E>
TW_INLINE E *row_of(const TwTensor &t, const Sequence &s, int64_t origin, int64_t row, int64_t head) {
  return (E *)t.data + s.b * t.batch + (origin + row) * t.row + head * t.head;
}

template <class T>
TW_INLINE T *statistic(const TwCall &c, const void *data, const Sequence &s, int64_t head) {
  return (T *)data + s.b * c.lse_batch + head * c.lse_head + s.row_q;
}

TW_INLINE const int32_t *ends_of(const TwEnds &e, const Sequence &s, int64_t head, int64_t origin) {
  return e.data ? e.data + s.b * e.batch + head * e.head + origin : nullptr;
}

TW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TW_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
TW_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Key rows of a tile that starts at key n0.
template <class E>
TW_INLINE Rows<E> key_rows(const TwCall &c, const TwTensor &t, const Sequence &s, int64_t head_k, int64_t n0) {
  const uint8_t *seen = c.seen ? c.seen + s.b * c.seen_batch + head_k * c.seen_head + s.row_k + n0 : nullptr;
  return {row_of<E>(t, s, s.row_k, n0, head_k), t.row, s.seqlen_k - n0, seen};
}

// The state of tile (m, n) of a head; without a predicate every tile that the interval reaches is full for it.
TW_INLINE uint8_t tile_state(const TwCall &c, const Sequence &s, int64_t head, int64_t m, int64_t n) {
  if (!c.status) return TW_FULL;
  const int64_t columns = (s.seqlen_k + c.tile_n - 1) / c.tile_n;
  return c.status[c.status_at[s.b] + head * c.status_head[s.b] + m * columns + n];
}

}  // namespace tw::TW_ISA
