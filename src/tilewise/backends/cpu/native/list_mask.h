// The tiles of a predicate that differs from pair to pair: each evaluated once, for the state of every tile and the keys
// that some query sees. A mask with intervals alone needs none of this, one of whole blocks is listed in Python.
#pragma once
#include "tile.h"

namespace tw::TW_ISA {

class MaskList {
 public:
  MaskList(const TwCall &c, char *scratch) : c(c) {
    Arena arena{scratch};
    machine = {&c.program, arena.take<char>(Machine::bytes(c.program, c.tile_n)), c.tile_n};
    bytes = arena.used;
  }

  int64_t bytes;

  // All tiles of a key head's group; where heads share their mask, the first stands for all.
  void run(int64_t b, int64_t head_k) {
    s = sequence_of(c, b);
    const int64_t group = c.status_head[b] ? c.heads_q / c.heads_k : 1;
    seen = (uint8_t *)c.seen + s.b * c.seen_batch + head_k * c.seen_head + s.row_k;
    for (int64_t head = head_k * group; head < (head_k + 1) * group; ++head)
      for (int64_t m0 = 0; m0 < s.seqlen_q; m0 += c.tile_m)
        for (int64_t n0 = 0; n0 < s.seqlen_k; n0 += c.tile_n) heed_signals(), tile(head, m0, n0);
  }

 private:
  const TwCall &c;
  Sequence s;
  uint8_t *seen;
  Machine machine;

  void tile(int64_t head, int64_t m0, int64_t n0) {
    const int32_t *lo = ends_of(c.lo, s, head, s.row_q), *hi = ends_of(c.hi, s, head, s.row_q);
    const int64_t width = smaller(c.tile_n, s.seqlen_k - n0), m1 = smaller(m0 + c.tile_m, s.seqlen_q);
    Place at{s.b, head, s.seqlen_q, s.seqlen_k, m0, n0};
    bool some = false, every = true, entered = false;
    uint8_t column[kMaxTileN] = {};  // some query of the tile sees the key
    for (at.i = m0; at.i < m1; ++at.i) {
      const int64_t from = greater(lo ? lo[at.i] - n0 : 0, 0), to = smaller(hi ? hi[at.i] - n0 : width, width);
      every &= from == 0 && to == width;
      if (from >= to) continue;
      if (!entered) machine.enter_head(at), machine.enter_tile(at), entered = true;
      machine.run_row(TW_PREDICATE, at, 0, c.tile_n);
      const int64_t *kept = machine.at<int64_t>(c.program.keep);
      int64_t any = 0, all = 1;
      for (int64_t n = from; n < to; ++n) any |= kept[n], all &= kept[n], column[n] |= uint8_t(kept[n]);
      some |= any != 0, every &= all != 0;
    }
    for (int64_t n = 0; n < width; ++n)
      if (column[n]) seen[n0 + n] = 1;  // ones alone: a signal handler may list the same mask meanwhile
    const int64_t columns = (s.seqlen_k + c.tile_n - 1) / c.tile_n;
    uint8_t *state = (uint8_t *)c.status + c.status_at[s.b] + head * c.status_head[s.b];
    state[m0 / c.tile_m * columns + n0 / c.tile_n] = some ? every ? TW_FULL : TW_PARTIAL : TW_EMPTY;
  }
};

}  // namespace tw::TW_ISA
