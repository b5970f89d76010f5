// The C functions: choice of the instruction set, the list of work, and errors as codes with a text.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "complete.h"
#include "interface.h"
#include "operations.h"
#include "pool.h"
#include "scratch.h"
#include "signals.h"
#include "tile_permission.h"
#include "turns.h"
#include "work.h"

namespace tw {

#define TW_DECLARE(isa)         \
  namespace isa {               \
  extern const Kernels kernels; \
  }
#ifdef TW_X86
TW_DECLARE(avx512bf16)
TW_DECLARE(avx512)
TW_DECLARE(avx2)
#endif
#ifdef TW_AMX
TW_DECLARE(amxbf16)
#endif
#ifdef TW_EMULATED_AMX
TW_DECLARE(amxbf16_emulated)
#endif
TW_DECLARE(portable)

namespace {

// An instruction set: the kernels of bf16 inputs, and those of all others where a set adds to another only what bf16 needs.
struct Set {
  const Kernels *bf16, *others;
};

// Best first, those that this machine can run and the system lets this process use. AMX in software comes last: by name alone.
std::vector<Set> available() {
  std::vector<Set> found;
#ifdef TW_X86
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#ifdef TW_AMX
  if (bf16 && may_use_tile_registers()) found.push_back({&amxbf16::kernels, &avx512::kernels});
#endif
  if (bf16) found.push_back({&avx512bf16::kernels, &avx512::kernels});
  if (avx512) found.push_back({&avx512::kernels, &avx512::kernels});
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    found.push_back({&avx2::kernels, &avx2::kernels});
#endif
  found.push_back({&portable::kernels, &portable::kernels});
#ifdef TW_EMULATED_AMX
  if (bf16) found.push_back({&amxbf16_emulated::kernels, &avx512::kernels});
#endif
  return found;
}

const Kernels &chosen(const TwCall &c) {
  static const std::vector<Set> all = available();
  const bool any = !c.isa || !*c.isa;
  for (const Set &set : all)
    if (any || !std::strcmp(set.bf16->name, c.isa)) return c.type == TW_BF16 ? *set.bf16 : *set.others;
  throw std::invalid_argument(std::string("this machine has no instruction set ") + c.isa);
}

// The kernels of a call whose sizes are right.
const Kernels &checked(const TwCall &c) {
  if (c.version != TW_VERSION) throw std::invalid_argument("the struct is of another version than the library");
  if (c.batch < 0 || c.heads_k < 1 || c.heads_q < 1 || c.heads_q % c.heads_k || c.head_dim < 1 || c.head_dim_v < 1 || c.shares < 0)
    throw std::invalid_argument("sizes must be positive, shares not negative, and heads_q a multiple of heads_k");
  if (c.seqlen_q < 0 || c.seqlen_k < 0 || std::max(c.seqlen_q, c.seqlen_k) > INT32_MAX)
    throw std::invalid_argument("the ends of masks are 32-bit numbers: at most 2147483647 rows");
  if (c.block_table && (c.page_size < 1 || !(c.cu_seqlens_k || c.hi.data))) throw std::invalid_argument("pages need a size and lengths");
  if (c.cu_seqlens_q && !c.cu_seqlens_k) throw std::invalid_argument("packed queries need the lengths of their keys");
  if (c.q_start < 0 || c.k_start < 0) throw std::invalid_argument("a piece's first query and key must not be negative");
  return chosen(c);
}

void check_tiles(const TwCall &c) {
  if (c.tile_n < 64 || c.tile_n > kMaxTileN || c.tile_n % 64 || c.tile_m < 1 || c.heads_per_item < 1 || c.threads < 1)
    throw std::invalid_argument("tile_n must be 64, 128, 192 or 256, and tile_m, heads_per_item, threads at least 1");
  if (c.split < 0 || c.split % c.tile_n || (c.split && c.cu_seqlens_q && !c.block_table))
    throw std::invalid_argument("split must be a multiple of tile_n, and 0 for packed sequences");
}

struct ForwardPlan {
  std::vector<QueryItem> items;
  std::vector<int64_t> cost;
  int64_t parts = 0;                               // of the keys, where they are split
  std::unique_ptr<std::atomic<int64_t>[]> unfinished;  // parts that are not done yet, by item.rows
};

// Keys of the tiles that a predicate does not empty for an item, on average over its heads.
int64_t visited(const TwCall &c, const Sequence &s, const QueryItem &item) {
  const int64_t columns = (s.seqlen_k + c.tile_n - 1) / c.tile_n;
  int64_t tiles = 0;
  for (int64_t head = item.head; head < item.head + item.heads; ++head) {
    const uint8_t *row = c.status + c.status_at[s.b] + head * c.status_head[s.b] + item.m0 / c.tile_m * columns;
    tiles += columns - std::count(row, row + columns, uint8_t(TW_EMPTY));
  }
  return tiles * c.tile_n / item.heads;
}

// Keys that queries [m0, m1) of the heads see, at least: what an item costs.
int64_t visible(const TwCall &c, const Sequence &s, const QueryItem &item) {
  if (c.status && !c.split) return visited(c, s, item);
  if (!c.lo.data && !c.hi.data) return item.n1 - item.n0;
  auto end = [&](const TwEnds &e, int64_t i, int64_t none) -> int64_t {
    return e.data ? e.data[s.b * e.batch + item.head * e.head + s.row_q + i] : none;
  };
  const int64_t low = std::max(end(c.lo, item.m0, item.n0), item.n0);
  return std::max<int64_t>(0, std::min(end(c.hi, item.m1 - 1, item.n1), item.n1) - low);
}

// The items of the keys [n0, n1) of a sequence. Where keys are split, all heads' items of one split come before those of the
// next: what their rows share of a page, they read at one time.
void add_items(const TwCall &c, const Sequence &s, int64_t n0, int64_t n1, int64_t part, int64_t rows, ForwardPlan &plan) {
  const int64_t group = c.heads_q / c.heads_k;
  for (int64_t head = 0, heads; head < c.heads_q; head += heads) {
    heads = std::min<int64_t>(c.heads_per_item, group - head % group);
    for (int64_t m0 = 0; m0 < s.seqlen_q; m0 += c.tile_m, ++rows) {
      const QueryItem item{s.b, head, heads, m0, std::min(m0 + c.tile_m, s.seqlen_q), n0, n1, part, rows};
      plan.cost.push_back(heads * (item.m1 - m0) * visible(c, s, item));
      plan.items.push_back(item);
    }
  }
}

ForwardPlan plan_forward(const TwCall &c) {
  ForwardPlan plan;
  for (int64_t b = 0, rows = 0; b < c.batch; ++b) {
    const Sequence s = sequence_of(c, b);
    const int64_t split = split_of(c, s), step = split ? split : std::max<int64_t>(s.seqlen_k, 1);
    plan.parts = std::max(plan.parts, parts_of(c, s));
    for (int64_t n0 = 0, part = split ? 0 : -1; n0 < std::max<int64_t>(s.seqlen_k, 1); n0 += step, ++part)
      add_items(c, s, n0, std::min(n0 + step, s.seqlen_k), part, rows, plan);
    if (!plan.items.empty()) rows = plan.items.back().rows + 1;
  }
  if (!plan.parts || plan.items.empty()) return plan;
  plan.unfinished.reset(new std::atomic<int64_t>[size_t(plan.items.back().rows + 1)]);
  for (const QueryItem &item : plan.items) plan.unfinished[size_t(item.rows)] = parts_of(c, sequence_of(c, item.b));
  return plan;
}

std::vector<int64_t> longest_first(const std::vector<int64_t> &cost) {
  std::vector<int64_t> order(cost.size());
  for (size_t n = 0; n < order.size(); ++n) order[n] = int64_t(n);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return cost[size_t(a)] > cost[size_t(b)]; });
  return order;
}

// The longest items first. Under a predicate heads come one after the other all the same, since their packed tiles then stay in caches:
// docs/decisions.md#cpu-packed-once.
std::vector<int64_t> order_of(const TwCall &c, const ForwardPlan &plan) {
  std::vector<int64_t> order = longest_first(plan.cost);
  if (!c.status || c.split) return order;
  auto head = [&](int64_t n) { return plan.items[size_t(n)].b * c.heads_q + plan.items[size_t(n)].head; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return head(a) < head(b); });
  return order;
}

// Query tiles that read a key tile on average, from which on it pays to pack the tiles of whole heads first
// (docs/decisions.md#cpu-packed-once).
constexpr int64_t kReaders = 3;

// Whether a predicate's tiles are read so often.
bool reads_tiles_often(const TwCall &c) {
  if (!c.status || c.block_table || c.split) return false;
  int64_t tiles = 0, visits = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    const Sequence s = sequence_of(c, b);
    const int64_t columns = (s.seqlen_k + c.tile_n - 1) / c.tile_n, states = (s.seqlen_q + c.tile_m - 1) / c.tile_m * columns;
    tiles += c.heads_k * columns;
    for (int64_t head = 0; head < (c.status_head[b] ? c.heads_q : 1); ++head) {
      const uint8_t *state = c.status + c.status_at[b] + head * c.status_head[b];
      const int64_t some = states - std::count(state, state + states, uint8_t(TW_EMPTY));
      visits += c.status_head[b] ? some : some * c.heads_q;
    }
  }
  return visits >= kReaders * tiles;
}

// The tiles of all key heads, packed by all threads; none where a tile is read too seldom.
KeyTiles packed_tiles(const TwCall &c, const Kernels &kernels, HugePages &memory) {
  if (!reads_tiles_often(c)) return {};
  const int64_t bytes = kernels.key_tile_bytes(c);
  const KeyTiles packed{memory.take(c.heads_k * KeyTiles::per_head(c) * bytes), bytes};
  const int64_t most = (c.seqlen_k + c.tile_n - 1) / c.tile_n;  // tiles of a sequence
  parallel(c.threads, c.batch * c.heads_k * most, [&](int64_t n) {
    const Sequence s = sequence_of(c, n / most / c.heads_k);
    const int64_t head_k = n / most % c.heads_k, n0 = n % most * c.tile_n;
    if (n0 < s.seqlen_k) kernels.pack_keys(c, s, head_k, n0, packed.at(c, s, head_k, n0));
  });
  return packed;
}

void run_forward(const TwCall &given) {
  const Kernels &kernels = checked(given);
  if (!given.batch) return;
  const Complete whole(given, kernels, false);
  const TwCall &c = whole.call;
  check_tiles(c);
  const ForwardPlan plan = plan_forward(c);
  const std::vector<int64_t> order = order_of(c, plan);
  const size_t size = c.type == TW_F64 ? 8 : 4;
  const size_t lines = size_t(plan.parts * lines_of(c));
  std::vector<char> o(lines * size_t(c.head_dim_v) * size), lse(lines * size), largest(lines * size);
  const Partials partials{o.data(), lse.data(), largest.data(), plan.parts};
  const int64_t bytes = kernels.forward_bytes(c);
  HugePages memory;
  const KeyTiles packed = packed_tiles(c, kernels, memory);
  parallel(c.threads, int64_t(order.size()), [&](int64_t n) {
    const QueryItem &item = plan.items[size_t(order[size_t(n)])];
    kernels.forward(c, item, partials, packed, scratch(bytes));
    // Whoever ends the last part of some rows merges them, in the order of the parts: a second round of threads costs more.
    if (item.part >= 0 && plan.unfinished[size_t(item.rows)].fetch_sub(1, std::memory_order_acq_rel) == 1) kernels.merge(c, item, partials);
  });
}

void run_jvp(const TwCall &given, const TwMoved &moved) {
  const Kernels &kernels = checked(given);
  if (given.block_table) throw std::invalid_argument("forward mode takes no pages");
  if (!given.batch) return;
  Complete whole(given, kernels, false);
  whole.call.split = 0;
  const TwCall &c = whole.call;
  check_tiles(c);
  const ForwardPlan plan = plan_forward(c);
  const std::vector<int64_t> order = order_of(c, plan);
  const int64_t bytes = kernels.tangent_bytes(c, moved);
  parallel(c.threads, int64_t(order.size()),
           [&](int64_t n) { kernels.tangent(c, moved, plan.items[size_t(order[size_t(n)])], scratch(bytes)); });
}

// Units by group: those of one group run one after the other, in order. Where the keys are parted, all first parts come
// first, so that whoever waits its turn waits for work that has begun.
struct BackwardPlan {
  std::vector<std::vector<GradientUnit>> groups;
  std::vector<int64_t> cost;
  std::vector<std::unique_ptr<Turns>> turns;
  std::vector<std::unique_ptr<float[]>> sums;  // of the dq that shares share

  explicit BackwardPlan(const TwCall &c) {
    if (c.block_table) {
      add_selected(c);
      return;
    }
    const int64_t batches = c.serial_batch ? 1 : c.batch, heads = c.serial_head ? 1 : c.heads_k;
    groups.resize(size_t(batches * heads * c.shares)), cost.resize(groups.size());
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t head = 0; head < c.heads_k; ++head) {
        add_keys(c, b, head, ((c.serial_batch ? 0 : b) * heads + (c.serial_head ? 0 : head)) * c.shares);
        add_queries(c, b, head);
      }
  }

 private:
  // Queries that selected their keys, in shares.
  void add_selected(const TwCall &c) {
    for (int64_t n = 0, heads = c.heads_q / c.heads_k; n < c.batch * c.heads_k * c.shares; ++n) {
      const int64_t share = n % c.shares, head_k = n / c.shares % c.heads_k, m0 = c.seqlen_q * share / c.shares;
      const int64_t m1 = c.seqlen_q * (share + 1) / c.shares;
      groups.push_back({{n / c.shares / c.heads_k, head_k, head_k * heads, heads, m0, m1, 0, c.seqlen_k, true, share, 0, nullptr, nullptr}});
      cost.push_back(m1 - m0);
    }
  }

  // A head's keys, in shares, and the dq of as many queries as are held.
  void add_keys(const TwCall &c, int64_t b, int64_t head_k, int64_t group) {
    const Sequence s = sequence_of(c, b);
    const int64_t tiles = (s.seqlen_k + c.tile_n - 1) / c.tile_n, heads = c.heads_q / c.heads_k;
    const int64_t held = std::min(held_queries(c), s.seqlen_q);
    GradientUnit unit{b, head_k, head_k * heads, heads, 0, held, 0, 0, true, 0, group, nullptr, nullptr};
    if (c.shares > 1) {
      turns.push_back(std::make_unique<Turns>(c.shares)), unit.turns = turns.back().get();
      const int64_t rows = sixteen_bit(c) ? heads * held : 0;
      sums.push_back(std::unique_ptr<float[]>(new float[size_t(rows * ((c.head_dim + 15) / 16 * 16))]));
      unit.dq = sums.back().get();
    }
    for (; unit.share < c.shares; ++unit.share, ++unit.group) {
      unit.n0 = tiles * unit.share / c.shares * c.tile_n;
      unit.n1 = std::min(tiles * (unit.share + 1) / c.shares * c.tile_n, s.seqlen_k);
      groups[size_t(unit.group)].push_back(unit);
      const int64_t work = 5 * heads * (unit.n1 - unit.n0) * (1 + s.seqlen_q);
      cost[size_t(unit.group)] += c.shares > 1 ? c.shares - unit.share : work;
    }
  }

  // The dq of the other queries.
  void add_queries(const TwCall &c, int64_t b, int64_t head_k) {
    const Sequence s = sequence_of(c, b);
    const int64_t heads = c.heads_q / c.heads_k, step = pass_queries(c);
    for (int64_t head = head_k * heads; head < (head_k + 1) * heads; ++head)
      for (int64_t m0 = held_queries(c); m0 < s.seqlen_q; m0 += step) {
        const int64_t m1 = std::min(m0 + step, s.seqlen_q);
        groups.push_back({{b, head_k, head, 1, m0, m1, 0, s.seqlen_k, false, 0, 0, nullptr, nullptr}});
        cost.push_back(c.shares > 1 ? 0 : 3 * (m1 - m0) * s.seqlen_k);
      }
  }
};

void run_backward(const TwCall &given) {
  const Kernels &kernels = checked(given);
  if (!given.batch) return;
  const Complete whole(given, kernels, true);
  const TwCall &c = whole.call;
  check_tiles(c);
  parallel(c.threads, c.batch * c.heads_q, [&](int64_t n) { kernels.delta(c, n / c.heads_q, n % c.heads_q); });
  const BackwardPlan plan(c);
  const std::vector<int64_t> order = longest_first(plan.cost);
  const int64_t bytes = kernels.backward_bytes(c);
  parallel(c.threads, int64_t(order.size()), [&](int64_t n) {
    for (const GradientUnit &unit : plan.groups[size_t(order[size_t(n)])]) kernels.backward(c, unit, scratch(bytes));
  });
}

// Fills status and seen. A mask that all of the batch, or all heads, share is listed once.
void run_list(const TwCall &c, const Blocks &blocks) {
  const Kernels &kernels = checked(c);
  check_tiles(c);
  if (blocks.q < 1 || blocks.k < 1) throw std::invalid_argument("a block has at least one query and one key");
  if (c.program.keep < 0) throw std::invalid_argument("there is no predicate to list");
  if (!c.status || !c.seen) return;  // no queries or no keys: empty lists
  // Sequences over pages and packed ones have lists of their own; that of one without keys is empty and begins where the next does.
  const bool shared = !c.cu_seqlens_q && !c.block_table && c.batch > 1 && c.status_at[0] == c.status_at[1];
  const bool by_head = std::any_of(c.status_head, c.status_head + c.batch, [](int64_t stride) { return stride != 0; });
  const int64_t batch = shared ? 1 : c.batch, heads = by_head ? c.heads_k : 1;
  std::vector<ListUnit> units;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t head_k = 0; head_k < heads; ++head_k)
      for (int64_t m0 = 0; m0 < sequence_of(c, b).seqlen_q; m0 += c.tile_m) units.push_back({b, head_k, m0});
  const int64_t bytes = kernels.list_bytes(c, blocks);
  parallel(c.threads, int64_t(units.size()),
           [&](int64_t n) { kernels.list_mask(c, blocks, units[size_t(n)], scratch(bytes)); });
}

template <class F>
int guarded(F run, TwSignals *signals, char *error, int64_t size) {
  auto say = [&](const char *text) {
    if (error && size > 0) std::snprintf(error, size_t(size), "%s", text);
  };
  try {
    const Watch watch(signals);
    run();
    return TW_OK;
  } catch (const Interrupted &) {
    say("interrupted");
    return TW_INTERRUPTED;
  } catch (const std::invalid_argument &e) {
    say(e.what());
    return TW_BAD_CALL;
  } catch (const std::bad_alloc &) {
    say("out of memory");
    return TW_NO_MEMORY;
  } catch (const std::exception &e) {
    say(e.what());
    return TW_FAILED;
  } catch (...) {
    say("unknown error");
    return TW_FAILED;
  }
}

}  // namespace
}  // namespace tw

#define TW_EXPORT extern "C" __attribute__((visibility("default")))

TW_EXPORT int tw_forward(const TwCall *call, char *error, int64_t error_size) {
  return tw::guarded([&] { tw::run_forward(*call); }, call->signals, error, error_size);
}

TW_EXPORT int tw_backward(const TwCall *call, char *error, int64_t error_size) {
  return tw::guarded([&] { tw::run_backward(*call); }, call->signals, error, error_size);
}

TW_EXPORT int tw_jvp(const TwCall *call, const TwMoved *moved, char *error, int64_t error_size) {
  return tw::guarded([&] { tw::run_jvp(*call, *moved); }, call->signals, error, error_size);
}

TW_EXPORT int tw_list_blocks(const TwCall *call, int64_t block_q, int64_t block_k, char *error, int64_t error_size) {
  return tw::guarded([&] { tw::run_list(*call, {block_q, block_k}); }, call->signals, error, error_size);
}

TW_EXPORT int tw_choose(TwCall *call, int backward, char *error, int64_t error_size) {
  return tw::guarded([&] { tw::choose(*call, tw::checked(*call), backward); }, nullptr, error, error_size);
}

TW_EXPORT void tw_use_openmp(void *gomp_parallel) { tw::use_openmp(gomp_parallel); }

TW_EXPORT int tw_version(void) { return TW_VERSION; }

TW_EXPORT int64_t tw_call_size(void) { return int64_t(sizeof(TwCall)); }

TW_EXPORT int tw_isas(char *names, int64_t size) {
  return tw::guarded(
      [&] {
        std::string all;
        for (const tw::Set &set : tw::available()) all += (all.empty() ? "" : ",") + std::string(set.bf16->name);
        std::snprintf(names, size_t(size), "%s", all.c_str());
      },
      nullptr, nullptr, 0);
}

TW_EXPORT const char *tw_operations(void) {
#define TW_NAME(name) #name " "
  return TW_OPERATIONS(TW_NAME);
#undef TW_NAME
}
