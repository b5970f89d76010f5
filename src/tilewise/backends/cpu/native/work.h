// What a thread is handed: pieces of a call, and the table of one instruction set's functions.
#pragma once
#include "interface.h"

namespace tw {

constexpr int64_t kMaxTileN = 256;

// One attention of the batch: its lengths, and where its rows start in packed tensors.
struct Sequence {
  int64_t b, seqlen_q, seqlen_k, row_q, row_k;
};

inline Sequence sequence_of(const TwCall &c, int64_t b) {
  if (!c.cu_seqlens_q) return {b, c.seqlen_q, c.seqlen_k, 0, 0};
  auto bounded = [](int64_t row, int64_t rows) { return row < rows ? row : rows; };
  const int64_t q0 = bounded(c.cu_seqlens_q[b], c.seqlen_q), q1 = bounded(c.cu_seqlens_q[b + 1], c.seqlen_q);
  const int64_t k0 = bounded(c.cu_seqlens_k[b], c.seqlen_k), k1 = bounded(c.cu_seqlens_k[b + 1], c.seqlen_k);
  return {b, q1 - q0, k1 - k0, q0, k0};
}

// Forward: `heads` query heads from `head` on, queries [m0, m1), keys [n0, n1). Where keys are split, `part` numbers the
// chunk and the state goes to the partial results.
struct QueryItem {
  int64_t b, head, heads, m0, m1, n0, n1, part;
  int64_t head_of(int64_t row) const { return head + row / (m1 - m0); }
  int64_t query_of(int64_t row) const { return m0 + row % (m1 - m0); }
};

// Backward: key head `head_k`, keys [n0, n1), all queries of its group. `group` numbers the units that share leaf sums.
struct KeyUnit {
  int64_t b, head_k, n0, n1, chunk, group;
};

// Partial states, by chunk: o (part, b, h, i, d) and lse (part, b, h, i) in the compute type.
struct Partials {
  void *o, *lse;
  int64_t parts;
};

struct Kernels {
  const char *name;
  int64_t (*forward_bytes)(const TwCall &);
  void (*forward)(const TwCall &, const QueryItem &, const Partials &, char *scratch);
  int64_t (*list_bytes)(const TwCall &);
  void (*list_mask)(const TwCall &, int64_t b, int64_t head_k, char *scratch);
  void (*merge)(const TwCall &, const Partials &, int64_t b, int64_t head);
  int64_t (*backward_bytes)(const TwCall &);
  void (*delta)(const TwCall &, int64_t b, int64_t head);
  void (*backward)(const TwCall &, const KeyUnit &, char *scratch);
};

// Bytes handed out one after the other, each at a cache line; without memory it only counts.
struct Arena {
  char *memory;
  int64_t used = 0;
  template <class T>
  T *take(int64_t count) {
    T *at = memory ? (T *)(memory + used) : nullptr;
    used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return at;
  }
};

}  // namespace tw
