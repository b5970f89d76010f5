// Replays calls of the C interface that record.py wrote to a file, without Python and torch: under sanitizers, on every
// instruction set that this machine has, with several numbers of threads. Every array has a heap allocation of exactly its
// size, so that one byte read past it is one error.
//
//   replay FILE [--threads 1,3] [--at-most KILOBYTES] [--together N] [--starve]
//
// Results equal the recorded ones bit by bit on the instruction set that made them. On others, and under sanitizers, where
// products and sums are not contracted, they differ by at most allowed(type) of the array's largest number.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "interface.h"
#include "scratch.h"

// -- Allocations that fail ---------------------------------------------------------------------------------------------

static std::atomic<int64_t> allocations_left{INT64_MAX};

static bool may_allocate() { return allocations_left.load() == INT64_MAX || allocations_left.fetch_sub(1) > 0; }

void *operator new(size_t size) {
  void *p = may_allocate() ? std::malloc(size ? size : 1) : nullptr;
  if (!p) throw std::bad_alloc();
  return p;
}
void *operator new(size_t size, const std::nothrow_t &) noexcept {
  return may_allocate() ? std::malloc(size ? size : 1) : nullptr;
}
void operator delete(void *p) noexcept { std::free(p); }
void operator delete(void *p, size_t) noexcept { std::free(p); }

extern "C" void *__real_aligned_alloc(size_t alignment, size_t size);
extern "C" void *__wrap_aligned_alloc(size_t alignment, size_t size) {  // the linker sends the kernels' calls here
  return may_allocate() ? __real_aligned_alloc(alignment, size) : nullptr;
}

namespace {

// -- The file ------------------------------------------------------------------------------------------------------------

struct Free {
  void operator()(char *p) const { std::free(p); }
};
using Memory = std::unique_ptr<char, Free>;

struct Block {
  std::string before, after;  // `after` is empty for what a call only reads
  int32_t type;
};

struct Pointer {
  uint32_t block, offset, target;
};

struct Case {
  std::string name;
  int32_t function;
  std::vector<int64_t> more;  // what the function takes beside the call
  std::vector<Block> blocks;  // the first one is the TwCall; in forward mode the second is the TwMoved
  std::vector<Pointer> pointers;

  size_t bytes() const {
    size_t total = 0;
    for (const Block &block : blocks) total += block.before.size();
    return total;
  }
};

template <class T>
T number(std::istream &in) {
  T x{};
  if (!in.read((char *)&x, sizeof x)) throw std::runtime_error("the file ends early");
  return x;
}

std::string text(std::istream &in, uint64_t size) {
  std::string s(size, 0);
  if (size && !in.read(s.data(), std::streamsize(size))) throw std::runtime_error("the file ends early");
  return s;
}

Case read_case(std::istream &in) {
  Case c;
  c.name = text(in, number<uint32_t>(in));
  c.function = number<int32_t>(in);
  c.more.resize(number<uint32_t>(in));
  for (int64_t &x : c.more) x = number<int64_t>(in);
  c.blocks.resize(number<uint32_t>(in));
  for (Block &block : c.blocks) {
    block.type = number<int32_t>(in);
    const uint64_t size = number<uint64_t>(in);
    const bool written = number<uint32_t>(in) != 0;
    block.before = text(in, size);
    if (written) block.after = text(in, size);
  }
  c.pointers.resize(number<uint32_t>(in));
  for (Pointer &p : c.pointers) p = {number<uint32_t>(in), number<uint32_t>(in), number<uint32_t>(in)};
  return c;
}

std::vector<Case> read_cases(const char *file, size_t at_most) {
  std::ifstream in(file, std::ios::binary);
  if (!in || text(in, 8) != "TWCASES2") throw std::runtime_error(std::string(file) + " is not a file of cases");
  if (number<int32_t>(in) != TW_VERSION) throw std::runtime_error("the cases are of another version; record them again");
  std::vector<Case> cases;
  while (in.peek() != EOF) {
    Case c = read_case(in);
    if (c.bytes() <= at_most) cases.push_back(std::move(c));
  }
  return cases;
}

// -- One call ------------------------------------------------------------------------------------------------------------

struct Arrays {
  std::vector<Memory> memory;

  explicit Arrays(const Case &c) {
    for (const Block &block : c.blocks) {
      memory.emplace_back((char *)std::malloc(block.before.size()));
      std::memcpy(memory.back().get(), block.before.data(), block.before.size());
    }
    for (const Pointer &p : c.pointers) {
      char *target = memory[p.target].get();
      std::memcpy(memory[p.block].get() + p.offset, &target, sizeof target);
    }
  }

  TwCall &call() { return *(TwCall *)memory[0].get(); }
};

int run(const Case &c, Arrays &arrays, char *error, int64_t size) {
  const TwCall &call = arrays.call();
  if (c.function == 3) return tw_jvp(&call, (const TwMoved *)arrays.memory[1].get(), error, size);
  if (c.function == 2) return tw_list_blocks(&call, c.more.at(0), c.more.at(1), error, size);
  return (c.function ? tw_backward : tw_forward)(&call, error, size);
}

// -- Comparison ------------------------------------------------------------------------------------------------------------

double allowed(int type) {
  switch (type) {
    case TW_F64: return 0x1p-40;
    case TW_F32: return 0x1p-8;  // a score of e^(2s) makes that of a difference in the last bit of s
    default: return 0x1p-6;      // one instruction set rounds P to bf16, another does not
  }
}

double value(int type, const char *at) {
  if (type == TW_F32) return *(const float *)at;
  if (type == TW_F64) return *(const double *)at;
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  if (type == TW_BF16) {
    const uint32_t wide = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  if (type != TW_F16) return uint8_t(*at);
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                      : exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return bits >> 15 ? -size : size;
}

int width(int type) { return type == TW_F64 ? 8 : type == TW_F32 ? 4 : type == TW_BF16 || type == TW_F16 ? 2 : 1; }

// The largest difference, of the largest finite number; infinity where one is not finite and the other is something else.
double difference(const Block &block, const char *found) {
  double largest = 0, most = 0;
  for (size_t n = 0; n < block.after.size(); n += size_t(width(block.type))) {
    const double x = value(block.type, found + n), y = value(block.type, block.after.data() + n);
    if (x == y || (x != x && y != y)) {
      if (std::isfinite(y)) most = std::max(most, std::fabs(y));
      continue;
    }
    if (!std::isfinite(x) || !std::isfinite(y)) return INFINITY;
    most = std::max(most, std::fabs(y)), largest = std::max(largest, std::fabs(x - y));
  }
  return largest == 0 ? 0 : largest / most;
}

// -- The runs --------------------------------------------------------------------------------------------------------------

struct Tally {
  std::atomic<int64_t> runs{0}, equal{0}, wrong{0};
  double worst = 0;
};

std::vector<std::string> instruction_sets() {
  char names[256];
  tw_isas(names, sizeof names);
  std::vector<std::string> all;
  std::stringstream parts(names);
  for (std::string name; std::getline(parts, name, ',');) all.push_back(name);
  return all;
}

void complain(Tally &tally, const Case &c, const std::string &isa, int threads, const std::string &what) {
  ++tally.wrong;
  std::printf("WRONG %s %s, %d threads: %s\n", c.name.c_str(), isa.c_str(), threads, what.c_str());
}

// Compares what a finished call wrote.
void judge(Tally &tally, const Case &c, Arrays &arrays, const std::string &isa, int threads, const std::string &recorded) {
  bool equal = true;
  double worst = 0;
  for (size_t n = 0; n < c.blocks.size(); ++n) {
    const Block &block = c.blocks[n];
    const std::string &expected = block.after.empty() ? block.before : block.after;
    const char *found = arrays.memory[n].get();
    if (n == 0 || block.type < 0 || !std::memcmp(found, expected.data(), expected.size())) continue;
    if (block.after.empty()) return complain(tally, c, isa, threads, "an input was written to");
    equal = false, worst = std::max(worst, difference(block, found));
  }
  ++tally.runs, tally.equal += equal, tally.worst = std::max(tally.worst, worst);
  const double bound = isa == recorded && !TW_SANITIZED ? 0.0 : allowed(arrays.call().type);
  if (worst > bound) complain(tally, c, isa, threads, "differs by " + std::to_string(worst) + " of the largest number");
}

void replay(Tally &tally, const Case &c, const std::string &isa, int threads) {
  Arrays arrays(c);
  const std::string recorded = arrays.call().isa;
  arrays.call().isa = isa.c_str(), arrays.call().threads = threads;
  char error[256] = "";
  if (run(c, arrays, error, sizeof error)) return complain(tally, c, isa, threads, error);
  judge(tally, c, arrays, isa, threads, recorded);
}

// Every allocation of a call fails once: each time it must say so, and at last be right.
void starve(Tally &tally, const Case &c, const std::string &isa, int threads) {
  for (int64_t left = 0;; ++left) {
    Arrays arrays(c);
    arrays.call().isa = isa.c_str(), arrays.call().threads = threads;
    char error[256] = "";
    const tw::ScratchAside none;
    allocations_left = left;
    const int status = run(c, arrays, error, sizeof error);
    const bool failed = allocations_left.exchange(INT64_MAX) < 0;
    if (status == TW_OK && !failed) return judge(tally, c, arrays, isa, threads, "another");
    if (status != TW_OK && (status != TW_NO_MEMORY || std::strcmp(error, "out of memory")))
      return complain(tally, c, isa, threads, "allocation " + std::to_string(left) + " failed: " + error);
    ++tally.runs;
  }
}

// So many threads replay at once, each its own share of the cases: one has the pool, the others work alone.
void together(Tally &tally, const std::vector<Case> &cases, int callers) {
  std::vector<std::thread> running;
  std::vector<Tally> tallies(static_cast<size_t>(callers));
  const std::vector<std::string> sets = instruction_sets();
  for (int n = 0; n < callers; ++n)
    running.emplace_back([&, n] {
      for (size_t at = size_t(n); at < cases.size(); at += size_t(callers))
        replay(tallies[size_t(n)], cases[at], sets[at % sets.size()], 1 + int(at % 4));
    });
  for (std::thread &thread : running) thread.join();
  for (const Tally &t : tallies)
    tally.runs += t.runs, tally.equal += t.equal, tally.wrong += t.wrong, tally.worst = std::max(tally.worst, t.worst);
}

struct Options {
  std::vector<int> threads{1};
  size_t at_most = SIZE_MAX;
  int callers = 0;
  bool starving = false;

  Options(int count, char **words) {
    for (int n = 2; n < count; ++n) {
      const std::string word = words[n], next = n + 1 < count ? words[n + 1] : "";
      if (word == "--starve") starving = true;
      else if (word == "--together") callers = std::atoi(next.c_str()), ++n;
      else if (word == "--at-most") at_most = size_t(std::atoll(next.c_str())) * 1024, ++n;
      else if (word == "--threads") read_threads(next), ++n;
      else throw std::runtime_error("unknown option " + word);
    }
  }

  void read_threads(const std::string &list) {
    threads.clear();
    std::stringstream parts(list);
    for (std::string part; std::getline(parts, part, ',');) threads.push_back(std::atoi(part.c_str()));
  }
};

int replay_all(int count, char **words) {
  const Options options(count, words);
  const std::vector<Case> cases = read_cases(words[1], options.at_most);
  Tally tally;
  for (const std::string &isa : instruction_sets())
    for (int threads : options.threads)
      for (const Case &c : cases) options.starving ? starve(tally, c, isa, threads) : replay(tally, c, isa, threads);
  if (options.callers) together(tally, cases, options.callers);
  std::printf("%zu cases, %lld runs: %lld equal bit by bit, %lld wrong; largest difference %.2g of the largest number\n",
              cases.size(), (long long)tally.runs, (long long)tally.equal, (long long)tally.wrong, tally.worst);
  return tally.wrong || !tally.runs ? 1 : 0;
}

}  // namespace

int main(int count, char **words) {
  try {
    if (count < 2) throw std::runtime_error("replay FILE [--threads 1,3] [--at-most KILOBYTES] [--together N] [--starve]");
    return replay_all(count, words);
  } catch (const std::exception &e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
