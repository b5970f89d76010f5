// What a thread is handed: pieces of a call, and the table of one instruction set's functions.
// Functions are static: of inline ones the linker may keep the copy that an instruction set's object has, which another machine cannot run.
#pragma once
#include "interface.h"

namespace tw {

constexpr int64_t kMaxTileN = 256;

class Turns;  // turns.h

// One attention of the batch: its lengths, and where its rows start in packed tensors.
struct Sequence {
  int64_t b, seqlen_q, seqlen_k, row_q, row_k;
};

static inline Sequence sequence_of(const TwCall &c, int64_t b) {
  if (!c.cu_seqlens_k) return {b, c.seqlen_q, c.seqlen_k, 0, 0};
  auto bounded = [](int64_t row, int64_t rows) { return row < rows ? row : rows; };
  const int64_t keys = c.block_table ? INT64_MAX : c.seqlen_k;
  const int64_t k0 = bounded(c.cu_seqlens_k[b], keys), k1 = bounded(c.cu_seqlens_k[b + 1], keys);
  if (!c.cu_seqlens_q) return {b, c.seqlen_q, k1 - k0, 0, k0};
  const int64_t q0 = bounded(c.cu_seqlens_q[b], c.seqlen_q), q1 = bounded(c.cu_seqlens_q[b + 1], c.seqlen_q);
  return {b, q1 - q0, k1 - k0, q0, k0};
}

// Keys of a split of a sequence; 0: it is not split. Over pages its own lengths decide, so that its batch-mates cannot.
constexpr int64_t kSplitRows = 16;
static inline int64_t split_of(const TwCall &c, const Sequence &s) {
  return !c.block_table || (s.seqlen_q <= kSplitRows && s.seqlen_k >= 2 * c.split) ? c.split : 0;
}
static inline int64_t parts_of(const TwCall &c, const Sequence &s) {
  const int64_t split = split_of(c, s), parts = split ? (s.seqlen_k + split - 1) / split : 0;
  return split && !parts ? 1 : parts;
}

// Forward: `heads` query heads from `head` on, queries [m0, m1), keys [n0, n1). Where keys are split, `part` numbers the
// split and the state goes to the partial results; items of the same `rows` differ in their split alone. Else `part` is -1.
struct QueryItem {
  int64_t b, head, heads, m0, m1, n0, n1, part, rows;
  int64_t head_of(int64_t row) const { return head + row / (m1 - m0); }
  int64_t query_of(int64_t row) const { return m0 + row % (m1 - m0); }
};

// Backward: the keys [n0, n1) of key head `head_k`, and of the query heads [head, head + heads) all queries, for dk and dv
// (`keys`), or the queries [m0, m1) alone. It sums the dq of the latter. `group` numbers the units that share leaf sums.
// Where `turns` is set, units of other `share`s add to the same `dq`; where `dq` is null, a unit has its own.
struct GradientUnit {
  int64_t b, head_k, head, heads, m0, m1, n0, n1;
  bool keys;
  int64_t share, group;
  void *dq;
  Turns *turns;
};

// Of 16-bit inputs dq is summed in fp32, in so much memory at most: a head group whose queries need more has a pass of its
// own for the dq of the others, which computes S and dP again (7 products for 5) in blocks of kPassBytes.
// docs/decisions.md#cpu-dq-in-turns
constexpr int64_t kHeldBytes = 8 << 20, kPassBytes = 1 << 20;

static inline bool sixteen_bit(const TwCall &c) { return c.type == TW_BF16 || c.type == TW_F16; }

// Rows of a head's dq in whole tiles that `bytes` hold for each of `heads` heads.
static inline int64_t rows_of_dq(const TwCall &c, int64_t heads, int64_t bytes) {
  return bytes / (heads * ((c.head_dim + 15) / 16 * 16) * 4) / c.tile_m * c.tile_m;
}

// The queries [0, ...) of each head whose dq is summed beside dk and dv; and how many at a time after them.
static inline int64_t held_queries(const TwCall &c) {
  const int64_t rows = sixteen_bit(c) ? rows_of_dq(c, c.heads_q / c.heads_k, kHeldBytes) : c.seqlen_q;
  return rows < c.seqlen_q ? rows : c.seqlen_q;
}
static inline int64_t pass_queries(const TwCall &c) {
  const int64_t rows = rows_of_dq(c, 1, kPassBytes);
  return rows > c.tile_m ? rows : c.tile_m;
}

// Rows of dq in a thread's own memory.
static inline int64_t own_rows_of_dq(const TwCall &c) {
  if (!sixteen_bit(c)) return 0;
  const int64_t held = held_queries(c), whole = c.shares > 1 ? 0 : c.heads_q / c.heads_k * held;
  const int64_t pass = held < c.seqlen_q ? pass_queries(c) : 0;
  return whole > pass ? whole : pass;
}

// Partial states, by split: o (part, line, d), lse and the largest scores (part, line) in the compute type. `parts` is the most
// that a sequence has.
struct Partials {
  void *o, *lse, *largest;
  int64_t parts;
};

// The line of a row among partial states: (b, h, i), packed (h, row); and how many there are.
static inline int64_t line_of(const TwCall &c, const Sequence &s, int64_t head, int64_t i) {
  return ((c.cu_seqlens_q ? 0 : s.b) * c.heads_q + head) * c.seqlen_q + s.row_q + i;
}
static inline int64_t lines_of(const TwCall &c) { return (c.cu_seqlens_q ? 1 : c.batch) * c.heads_q * c.seqlen_q; }

// Blocks of `q` queries by `k` keys, from the first pair on, on each of which a mask's predicate has one value.
struct Blocks {
  int64_t q, k;
  bool pairs() const { return q == 1 || k == 1; }
};

// A row of tiles, from query m0 on, whose states are listed for the query heads of key head `head_k`.
struct ListUnit {
  int64_t b, head_k, m0;
};

// K and V of whole heads in packed tiles of `bytes` each, K first: many query tiles read each, which is packed once for all of them.
// Without memory every item packs the tiles that it reads.
struct KeyTiles {
  char *memory = nullptr;
  int64_t bytes = 0;

  // Tiles of a key head of the whole batch; each sequence starts a new one.
  static int64_t per_head(const TwCall &c) {
    return c.cu_seqlens_k ? c.seqlen_k / c.tile_n + c.batch : c.batch * ((c.seqlen_k + c.tile_n - 1) / c.tile_n);
  }
  char *at(const TwCall &c, const Sequence &s, int64_t head_k, int64_t n0) const {
    const int64_t first = c.cu_seqlens_k ? s.row_k / c.tile_n + s.b : s.b * ((s.seqlen_k + c.tile_n - 1) / c.tile_n);
    return memory + (head_k * per_head(c) + first + n0 / c.tile_n) * bytes;
  }
};

struct Kernels {
  const char *name;
  int64_t block_rows;  // of a product's block in registers
  int64_t (*forward_bytes)(const TwCall &);
  void (*forward)(const TwCall &, const QueryItem &, const Partials &, const KeyTiles &, char *scratch);
  int64_t (*key_tile_bytes)(const TwCall &);
  void (*pack_keys)(const TwCall &, const Sequence &, int64_t head_k, int64_t n0, char *to);
  int64_t (*list_bytes)(const TwCall &, const Blocks &);
  void (*list_mask)(const TwCall &, const Blocks &, const ListUnit &, char *scratch);
  void (*merge)(const TwCall &, const QueryItem &, const Partials &);
  int64_t (*tangent_bytes)(const TwCall &, const TwMoved &);
  void (*tangent)(const TwCall &, const TwMoved &, const QueryItem &, char *scratch);
  int64_t (*backward_bytes)(const TwCall &);
  void (*delta)(const TwCall &, int64_t b, int64_t head);
  void (*backward)(const TwCall &, const GradientUnit &, char *scratch);
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
