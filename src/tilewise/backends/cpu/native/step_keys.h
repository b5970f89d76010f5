// What few_queries.h reads keys by: which of them its rows see, and where those of a step and of the next one lie.
#pragma once
#include "forward.h"

namespace tw::TW_ISA {

// Row g sees the keys [lo[g], hi[g]); all rows see [all_from, all_to), and none sees a key outside of [begin, end).
template <int W>
struct RowEnds {
  int64_t lo[W], hi[W], all_from, all_to, begin, end;

  RowEnds(const TwCall &c, const Sequence &s, const QueryItem &item, int64_t rows)
      : all_from(item.n0), all_to(item.n1), begin(item.n1), end(item.n0) {
    for (int64_t g = 0; g < W; ++g) {
      lo[g] = hi[g] = item.n0;
      if (g >= rows) continue;
      const Range keys = seen_keys(c, s, item, item.head_of(g), item.query_of(g));
      lo[g] = keys.begin, hi[g] = keys.end;
      all_from = greater(all_from, lo[g]), all_to = smaller(all_to, hi[g]);
      if (lo[g] < hi[g]) begin = smaller(begin, lo[g]), end = greater(end, hi[g]);
    }
  }
};

template <class E>
struct StepKeys {
  static constexpr int64_t kMost = 128, kMostBytes = 16384, kRun = 16;

  const TwCall &c;
  const Sequence s;
  const int64_t head_k;
  int64_t keys;  // of a step
  const E **k, **v, **next_k, **next_v;
  const E **ahead_k, **ahead_v;  // the next step's, in the order in which they are fetched

  // K and V of a step, and what is fetched for the next, share L1. A step's keys are a multiple of `block`.
  StepKeys(const TwCall &c, const Sequence &s, int64_t head_k, int64_t block, Arena &arena) : c(c), s(s), head_k(head_k) {
    const int64_t row = greater(greater(c.head_dim, c.head_dim_v), 1) * int64_t(sizeof(E));
    keys = greater(block, smaller(kMost, kMostBytes / row / block * block));
    for (const E ***at : {&k, &v, &next_k, &next_v, &ahead_k, &ahead_v}) *at = arena.take<const E *>(kMost);
  }

  // The keys from n0 on, of those before `end`, become the next step's; places that it does not need are those of its last key.
  void place(int64_t n0, int64_t end) {
    const int64_t count = smaller(keys, end - n0);
    if (count <= 0) return;
    place_keys<E>(c, c.k, s, head_k, n0, count, next_k), place_keys<E>(c, c.v, s, head_k, n0, count, next_v);
    for (int64_t n = count; n < keys; ++n) next_k[n] = next_k[count - 1], next_v[n] = next_v[count - 1];
  }

  // The next step becomes this one, and the keys from n0 on the next; where there are none, what is at hand is fetched again.
  void advance(int64_t n0, int64_t end) {
    exchange(k, next_k), exchange(v, next_v);
    place(n0, end);
    order(n0 < end ? next_k : k, ahead_k), order(n0 < end ? next_v : v, ahead_v);
  }

 private:
  static void exchange(const E **&x, const E **&y) {
    const E **last = x;
    x = y, y = last;
  }

  // The first key of each run of 16, then the second of each, and so on: the processor's own prefetchers then follow as many pages
  // at a time. One page after the other takes up to twice as long (docs/decisions.md#cpu-decode-prefetch).
  void order(const E *const *rows, const E **to) const {
    for (int64_t r = 0; r < kRun; ++r)
      for (int64_t n = r; n < keys; n += kRun) *to++ = rows[n];
  }
};

}  // namespace tw::TW_ISA
