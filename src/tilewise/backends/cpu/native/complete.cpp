#include "complete.h"

#include <algorithm>
#include <stdexcept>
#include <thread>

namespace tw {
namespace {

// The smallest and the largest split, and the number of splits, for few queries and many keys: docs/decisions.md#cpu-decode-splits.
constexpr int64_t kLeastSplit = 1024, kMostSplit = 4096, kSplits = 16;
constexpr int64_t kPagedSplit = 1024;     // of a cache, whatever its capacity, so that a sequence's bits are its own
constexpr int64_t kPagedRows = 16;        // queries of a tile, if sequences have few
constexpr int64_t kPredicateTile = 128;   // patterns come in blocks of 64 or 128, and smaller tiles are more often empty or full
constexpr int64_t kEnoughUnits = 8;       // of the backward: with fewer key heads, every tile of keys is a work unit
// Threads take turns at the heads if whole heads would keep them busy for less than this share: docs/decisions.md#cpu-dq-in-turns.
constexpr double kBusy = 0.875;

int64_t up(int64_t n, int64_t by) { return (n + by - 1) / by; }

bool has_predicate(const TwCall &c) { return c.program.registers && c.program.keep >= 0; }

// Sequences whose number may decide.
int64_t batch_of(const TwCall &c) { return c.deterministic ? 1 : c.batch; }

// Keys of a tile: as many as fit L2 with K, V and the sums of a tile.
int64_t keys_of_tile(const TwCall &c) {
  const int64_t row = std::max(c.head_dim, c.head_dim_v) * (c.type == TW_F64 ? 8 : 4);
  int64_t most = row <= 256 ? 256 : row <= 512 ? 192 : row <= 1024 ? 128 : 64;
  if (!c.one_order) most = std::min(most, std::max<int64_t>(64, up(c.seqlen_k, 64) * 64));  // over pages the length is a capacity
  return has_predicate(c) ? std::min(most, kPredicateTile) : most;
}

// Queries of a forward's tile: many, to pack K and V less often, yet with tiles for every thread, in blocks of the products' rows.
int64_t queries_of_tile(const TwCall &c, int64_t block) {
  if (c.cu_seqlens_q && c.block_table && (c.deterministic || c.seqlen_q <= kPagedRows * c.batch)) return kPagedRows;
  auto enough = [&](int64_t m) { return c.heads_q * up(c.seqlen_q, m) * (c.cu_seqlens_q ? 1 : c.batch) >= 16; };
  const int64_t large = 516 / block * block, most = enough(large) ? large : enough(192) ? 192 : 96;
  return c.cu_seqlens_q ? most : std::max<int64_t>(1, up(up(c.seqlen_q, std::max<int64_t>(1, up(c.seqlen_q, most))), block)) * block;
}

// Keys of a split by their number alone: splits for every thread, each long enough that starting it costs little.
int64_t keys_of_split(const TwCall &c) {
  if (c.one_order) return 0;
  if (c.block_table) return kPagedSplit;
  const bool idle = c.heads_k * batch_of(c) < 2 * kSplits && c.seqlen_k >= 2 * kLeastSplit;
  if (c.cu_seqlens_q || c.seqlen_q > 16 || !(idle || c.seqlen_k >= 2 * kMostSplit)) return 0;
  return std::min(kMostSplit, std::max(kLeastSplit, up(c.seqlen_k, kSplits * 128) * 128));
}

// One part for each tile of keys if whole heads would leave threads idle. Only where leaves have sums do parts change bits.
int64_t parts_of_keys(const TwCall &c) {
  const int64_t heads = c.batch * c.heads_k;
  const bool idle = heads < kBusy * c.threads * up(heads, c.threads) && !c.program.leaf_gradients;
  const bool few = c.heads_k * batch_of(c) < kEnoughUnits;
  return !c.cu_seqlens_q && (few || idle) ? std::max<int64_t>(1, up(c.seqlen_k, c.tile_n)) : 1;
}

// The ends of the lines of a sequence, line n's n + moved, within [0, most].
void fill(int32_t *to, int64_t lines, int64_t moved, int64_t most) {
  for (int64_t n = 0; n < lines; ++n) to[n] = int32_t(std::clamp<int64_t>(n + moved, 0, most));
}

}  // namespace

// By shape and never by threads, so that bits do not depend on them. Deterministic calls ignore the batch too. These tiles were the fastest
// with 1 MiB of L2: docs/decisions.md#cpu-tiles.
void choose(TwCall &c, const Kernels &kernels, bool backward) {
  if (!c.threads) c.threads = int32_t(std::max(1u, std::thread::hardware_concurrency()));
  if (!c.tile_m) {
    if (c.status) throw std::invalid_argument("the states of tiles need their sizes");
    const int64_t most = backward ? 96 : queries_of_tile(c, kernels.block_rows);
    c.tile_m = std::clamp<int64_t>(c.seqlen_q, 1, !has_predicate(c) ? most : backward ? kPredicateTile : std::min(most, kPredicateTile));
    c.split = backward ? 0 : keys_of_split(c);
    c.tile_n = c.split ? 128 : keys_of_tile(c);
    c.heads_per_item = c.cu_seqlens_q && !c.block_table ? 1 : int32_t(std::clamp<int64_t>(192 / c.tile_m, 1, c.heads_q / c.heads_k));
  }
  if (!c.shares) c.shares = backward ? int32_t(parts_of_keys(c)) : 1;
}

Complete::Complete(const TwCall &given, const Kernels &kernels, bool backward) : call(given) {
  choose(call, kernels, backward);
  TwProgram &program = call.program;
  if (!program.registers) program.raw = program.score = program.keep = program.slope = -1;
  if (call.window.ends) fill_window(backward), mark_seen();
}

void Complete::fill_window(bool backward) {
  TwCall &c = call;
  if (c.lo.data || c.hi.data || c.first.data || c.last.data || c.seen) throw std::invalid_argument("a window fills the ends and `seen`");
  const bool own = c.cu_seqlens_k, in_rows = own && !c.cu_seqlens_q;  // lengths of each sequence; the lines of all, one after the other
  const int64_t lines = (backward ? c.seqlen_k : c.seqlen_q) * (in_rows ? c.batch : 1);
  // An end of columns is the other end of rows.
  const bool start = c.window.ends & (backward ? TW_RIGHT : TW_LEFT), stop = c.window.ends & (backward ? TW_LEFT : TW_RIGHT);
  if (start) starts.resize(size_t(lines));
  if (stop) stops.resize(size_t(lines));
  for (int64_t b = 0; b < (own ? c.batch : 1); ++b) {
    const Sequence s = sequence_of(c, b);
    const int64_t off = s.seqlen_k - s.seqlen_q, origin = backward ? s.row_k : in_rows ? b * c.seqlen_q : s.row_q;
    const int64_t count = backward ? s.seqlen_k : s.seqlen_q, most = backward ? s.seqlen_q : s.seqlen_k;
    if (start) fill(starts.data() + origin, count, backward ? -off - c.window.right : off - c.window.left, most);
    if (stop) fill(stops.data() + origin, count, 1 + (backward ? c.window.left - off : off + c.window.right), most);
  }
  auto ends = [&](bool some, const std::vector<int32_t> &of) { return TwEnds{some ? of.data() : nullptr, in_rows ? c.seqlen_q : 0, 0}; };
  (backward ? c.first : c.lo) = ends(start, starts), (backward ? c.last : c.hi) = ends(stop, stops);
}

// A row sees one key further than the row before: seen keys have no gaps. Of those in pages the kernels ask the rows.
void Complete::mark_seen() {
  TwCall &c = call;
  if (c.block_table) return;
  const TwWindow &w = c.window;
  const bool some = w.ends != (TW_LEFT | TW_RIGHT) || w.left + w.right >= 0;
  bool every = true;
  seen.resize(size_t(c.seqlen_k));
  for (int64_t b = 0; b < (c.cu_seqlens_k ? c.batch : 1); ++b) {
    const Sequence s = sequence_of(c, b);
    const int64_t off = s.seqlen_k - s.seqlen_q;
    const int64_t from = w.ends & TW_LEFT ? std::clamp<int64_t>(off - w.left, 0, s.seqlen_k) : 0;
    const int64_t to = !some || !s.seqlen_q ? 0 : w.ends & TW_RIGHT ? std::clamp<int64_t>(s.seqlen_k + w.right, 0, s.seqlen_k) : s.seqlen_k;
    if (from < to) std::fill_n(seen.begin() + s.row_k + from, to - from, uint8_t(1));
    every &= from == 0 && to == s.seqlen_k;
  }
  if (!every) c.seen = seen.data();
}

}  // namespace tw
