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

struct Range {
  int64_t begin, end;
};

// The keys of an item that one of its queries sees; none: at the item's first key.
TW_INLINE Range seen_keys(const TwCall &c, const Sequence &s, const QueryItem &item, int64_t head, int64_t i) {
  const int32_t *low = ends_of(c.lo, s, head, s.row_q), *high = ends_of(c.hi, s, head, s.row_q);
  const int64_t begin = low && low[i] > item.n0 ? low[i] : item.n0, end = high && high[i] < item.n1 ? high[i] : item.n1;
  return begin < end ? Range{begin, end} : Range{item.n0, item.n0};
}

// The keys of a tile are padded to a multiple of this: whole vectors, and of pairs what tile registers read at a time
// (docs/decisions.md#cpu-tiles).
template <class X>
constexpr int64_t kDeep = __is_same(X, Pair) ? 32 : 16;

TW_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
TW_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
TW_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// The marks of the keys from n0 on that some query sees; null: all are seen, or nobody listed them.
TW_INLINE const uint8_t *listed_seen(const TwCall &c, const Sequence &s, int64_t head_k, int64_t n0) {
  return c.seen ? c.seen + s.b * c.seen_batch + head_k * c.seen_head + s.row_k + n0 : nullptr;
}

// Key rows of a tile that starts at key n0.
template <class E>
TW_INLINE Rows<E> key_rows(const TwCall &c, const TwTensor &t, const Sequence &s, int64_t head_k, int64_t n0) {
  return {row_of<E>(t, s, s.row_k, n0, head_k), t.row, s.seqlen_k - n0, listed_seen(c, s, head_k, n0)};
}

// Where each of the keys [n0, n0 + count) lies, all of which exist.
template <class E>
void place_keys(const TwCall &c, const TwTensor &t, const Sequence &s, int64_t head_k, int64_t n0, int64_t count, const E **at) {
  if (!c.block_table) {
    const E *first = row_of<E>(t, s, s.row_k, n0, head_k);
    for (int64_t n = 0; n < count; ++n) at[n] = first + n * t.row;
    return;
  }
  const int32_t *page = c.block_table + s.b * c.table_row + n0 / c.page_size;
  const E *first = (const E *)t.data + head_k * t.head;
  for (int64_t n = 0, row = n0 % c.page_size; n < count; row = 0) {
    const int64_t end = smaller(count, n + c.page_size - row);
    for (const E *from = first + *page++ * t.batch + row * t.row; n < end; ++n, from += t.row) at[n] = from;
  }
}

// Of the keys [n0, n0 + count), those that some row sees, where rows see [lo, hi); null: all. Keys in pages come without a list of
// what is seen, and a mask may hide what an earlier owner left in a page.
inline const uint8_t *seen_by_rows(const int64_t *lo, const int64_t *hi, int64_t rows, int64_t n0, int64_t count, uint8_t *seen) {
  for (int64_t r = 0; r < rows; ++r)
    if (lo[r] <= n0 && hi[r] >= n0 + count) return nullptr;
  for (int64_t n = 0; n < count; ++n) seen[n] = 0;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = greater(lo[r] - n0, 0); n < smaller(hi[r] - n0, count); ++n) seen[n] = 1;
  return seen;
}

// The state of tile (m, n) of a head; without a predicate every tile that the interval reaches is full for it.
TW_INLINE uint8_t tile_state(const TwCall &c, const Sequence &s, int64_t head, int64_t m, int64_t n) {
  if (!c.status) return TW_FULL;
  const int64_t columns = (s.seqlen_k + c.tile_n - 1) / c.tile_n;
  return c.status[c.status_at[s.b] + head * c.status_head[s.b] + m * columns + n];
}

}  // namespace tw::TW_ISA
