// The tiles of a predicate: the state of each, and the keys that some query sees. A predicate is evaluated once for every pair or,
// where it has one value on blocks of pairs, once for every block. Tiles that come with a state keep none of its pairs, or all, and are
// not asked. A mask with intervals alone needs none of this.
#pragma once
#include <cstring>

#include "tile.h"

namespace tw::TW_ISA {

class MaskList {
 public:
  MaskList(const TwCall &c, const Blocks &blocks, char *scratch) : c(c), blocks(blocks) {
    Arena arena{scratch};
    machine = {&c.program, arena.take<char>(Machine::bytes(c.program, kMaxTileN)), kMaxTileN};
    some = arena.take<uint8_t>(c.seqlen_k / c.tile_n + 1), every = arena.take<uint8_t>(c.seqlen_k / c.tile_n + 1);
    marked = arena.take<uint8_t>(c.seqlen_k / blocks.k + 1);
    bytes = arena.used;
  }

  int64_t bytes;

  // The tiles of one row of them in a key head's group; where heads share their mask, the first stands for all.
  void run(const ListUnit &unit) {
    s = sequence_of(c, unit.b);
    const int64_t group = c.status_head[s.b] ? c.heads_q / c.heads_k : 1, columns = (s.seqlen_k + c.tile_n - 1) / c.tile_n;
    seen = (uint8_t *)c.seen + s.b * c.seen_batch + unit.head_k * c.seen_head + s.row_k;
    if (!blocks.pairs())
      for (int64_t n = 0; n * blocks.k < s.seqlen_k; ++n) marked[n] = 0;
    for (int64_t head = unit.head_k * group; head < (unit.head_k + 1) * group; ++head) {
      const Line line{head, unit.m0, smaller(unit.m0 + c.tile_m, s.seqlen_q), ends_of(c.lo, s, head, s.row_q), ends_of(c.hi, s, head, s.row_q),
                      (uint8_t *)c.status + c.status_at[s.b] + head * c.status_head[s.b] + unit.m0 / c.tile_m * columns};
      if (!blocks.pairs()) tiles_of_blocks(line);
      else
        for (int64_t n0 = 0; n0 < s.seqlen_k; n0 += c.tile_n) heed_signals(), tile_of_pairs(line, n0);
    }
  }

 private:
  // A row of tiles: queries [m0, m1) of a head, the ends of the mask's interval for each query of the head, and the tiles' states.
  struct Line {
    int64_t head, m0, m1;
    const int32_t *lo, *hi;
    uint8_t *state;
    int64_t low(int64_t i) const { return lo ? lo[i] : 0; }
    int64_t high(int64_t i, int64_t none) const { return hi ? hi[i] : none; }
  };

  const TwCall &c;
  const Blocks &blocks;
  Sequence s;
  uint8_t *seen, *some, *every, *marked;
  Machine machine;

  void enter(const Place &at) const {
    machine.run(TW_PREDICATE, TW_PER_HEAD, at, 0, kMaxTileN), machine.run(TW_PREDICATE, TW_PER_COLUMN, at, 0, kMaxTileN);
  }

  // Other threads and signal handlers may mark the same key: with a one as well.
  void mark(int64_t key) const {
    if (!__atomic_load_n(seen + key, __ATOMIC_RELAXED)) __atomic_store_n(seen + key, uint8_t(1), __ATOMIC_RELAXED);
  }

  static uint8_t state_of(bool some, bool every) { return some ? every ? TW_FULL : TW_PARTIAL : TW_EMPTY; }

  void tile_of_pairs(const Line &line, int64_t n0) {
    const int64_t width = smaller(c.tile_n, s.seqlen_k - n0);
    uint8_t &state = line.state[n0 / c.tile_n];
    if (state == TW_EMPTY) return;
    const bool ask = state != TW_FULL;
    Place at{s.b, line.head, s.seqlen_q, s.seqlen_k, line.m0, n0};
    bool found = false, all_rows = true, entered = false;
    uint8_t column[kMaxTileN] = {};  // some query of the tile sees the key
    for (at.i = line.m0; at.i < line.m1; ++at.i) {
      const int64_t from = greater(line.low(at.i) - n0, 0), to = smaller(line.high(at.i, s.seqlen_k) - n0, width);
      all_rows &= from == 0 && to == width;
      if (from >= to) continue;
      if (!ask) {
        found = true, std::memset(column + from, 1, size_t(to - from));
        continue;
      }
      if (!entered) enter(at), entered = true;
      machine.run_row(TW_PREDICATE, at, 0, c.tile_n);
      const int64_t *kept = machine.at<int64_t>(c.program.keep);
      int64_t any = 0, all = 1;
      for (int64_t n = from; n < to; ++n) any |= kept[n], all &= kept[n], column[n] |= uint8_t(kept[n]);
      found |= any != 0, all_rows &= all != 0;
    }
    for (int64_t n = 0; n < width; ++n)
      if (column[n]) mark(n0 + n);
    state = state_of(found, all_rows);
  }

  // All tiles of the row, from one pair of each block. Ends never decrease from query to query: all queries see a whole tile if the
  // last one's interval has started before it and the first one's ends behind it.
  void tiles_of_blocks(const Line &line) {
    const int64_t columns = (s.seqlen_k + c.tile_n - 1) / c.tile_n, count = (s.seqlen_k + blocks.k - 1) / blocks.k;
    for (int64_t n = 0; n < columns; ++n) some[n] = 0, every[n] = 1;
    for (int64_t first = 0; first < count; first += kMaxTileN) {
      Place at{s.b, line.head, s.seqlen_q, s.seqlen_k, line.m0, first * blocks.k, blocks.k};
      enter(at);
      for (int64_t next; at.i < line.m1; at.i = next) {
        heed_signals();
        next = smaller(line.m1, (at.i / blocks.q + 1) * blocks.q);
        machine.run_row(TW_PREDICATE, at, 0, kMaxTileN);
        row_of_blocks(line, at.i, next, first, smaller(count - first, kMaxTileN));
      }
    }
    const int64_t from = line.low(line.m1 - 1), to = line.high(line.m0, s.seqlen_k);
    for (int64_t n = 0; n < columns; ++n) {
      const bool inside = from <= n * c.tile_n && to >= smaller((n + 1) * c.tile_n, s.seqlen_k);
      line.state[n] = state_of(some[n], every[n] && inside);
    }
  }

  // What `count` blocks from block `first` on, whose queries are [i0, i1), say of tiles and keys.
  void row_of_blocks(const Line &line, int64_t i0, int64_t i1, int64_t first, int64_t count) {
    const int64_t *kept = machine.at<int64_t>(c.program.keep);
    const int64_t low = line.low(i0), high = line.high(i1 - 1, s.seqlen_k);
    for (int64_t n = 0; n < count; ++n) {
      const int64_t begin = (first + n) * blocks.k, end = smaller(begin + blocks.k, s.seqlen_k);
      if (!kept[n])
        for (int64_t tile = begin / c.tile_n; tile * c.tile_n < end; ++tile) every[tile] = 0;
      const int64_t from = greater(begin, low), to = smaller(end, high);
      if (!kept[n] || from >= to) continue;
      for (int64_t tile = from / c.tile_n; tile * c.tile_n < to; ++tile) some[tile] = 1;
      if (!marked[first + n]) marked[first + n] = mark_seen(line, i0, i1, from, to) && from == begin && to == end;
    }
  }

  // Marks those of the keys [from, to) that some query of [i0, i1) has in its interval. Returns whether all are.
  bool mark_seen(const Line &line, int64_t i0, int64_t i1, int64_t from, int64_t to) const {
    bool all = true;
    for (int64_t i = i0; i < i1 && from < to; ++i) {
      const int64_t low = greater(line.low(i), from), high = smaller(line.high(i, s.seqlen_k), to);
      if (low >= high) continue;
      all &= low == from;
      for (int64_t key = low; key < high; ++key) mark(key);
      from = high;  // the intervals of later queries do not start earlier
    }
    return all && from >= to;
  }
};

}  // namespace tw::TW_ISA
