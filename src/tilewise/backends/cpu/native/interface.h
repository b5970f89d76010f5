// The C interface of the CPU kernels, for C11 and C++. Python fills it in by ctypes (library.py mirrors every struct).
//
// Zeros are what is left out. A forward needs `version`, `type`, the sizes, `softmax_scale`, q, k, v, o and lse, and beside them a `window`
// if the mask is causal or one; a backward also dout, dlse, delta, dq, dk and dv. The library fills in the rest (complete.h).
// tests/native/attend.c is a whole program.
//
// All strides count elements; the last dimension of q, k, v, o and their gradients has stride 1.
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { TW_VERSION = 14, TW_DIMS = 8 };
enum TwType { TW_F32 = 0, TW_F64 = 1, TW_BF16 = 2, TW_F16 = 3, TW_I64 = 4, TW_I32 = 5, TW_I16 = 6, TW_I8 = 7, TW_U8 = 8 };
enum TwStatus { TW_OK = 0, TW_BAD_CALL = 1, TW_NO_MEMORY = 2, TW_FAILED = 3, TW_INTERRUPTED = 4 };
enum TwTile { TW_EMPTY = 0, TW_PARTIAL = 1, TW_FULL = 2 };

// q, k, v, o, do, dq, dk, dv: element (b, n, h, d) at b * batch + n * row + h * head + d. Packed: batch = 0.
typedef struct {
  void *data;
  int64_t batch, row, head;
} TwTensor;

// One end of the mask's interval for every line: (b, h, line) at b * batch + h * head + line; data null: unbounded.
typedef struct {
  const int32_t *data;
  int64_t batch, head;
} TwEnds;

// A causal mask or a window: query i sees the keys i + off - left <= j <= i + off + right, where off is how many more keys than queries
// its sequence has. `ends` says which of the two ends count: causal is {TW_RIGHT, 0, 0, 0}.
enum TwEnd { TW_LEFT = 1, TW_RIGHT = 2 };
typedef struct {
  int32_t ends, unused;
  int64_t left, right;
} TwWindow;

// A tensor that masks and scores read. The strides are those of the tensor, in elements.
typedef struct {
  const void *data;
  int32_t type, dims;
  int64_t size[TW_DIMS], stride[TW_DIMS];
} TwLeaf;

// One operation on registers, each a row of values. `type` is that of the operands, TwType's F32, F64 or I64.
// A lookup reads leaf `b` at registers `index`; `mode` says how each index moves along a row (TwIndexMode). A selection looks for
// register `a` in the row of leaf `b`, int32, that the registers `index` name.
typedef struct {
  int32_t op, type, out, a, b, c, dims;
  int32_t index[TW_DIMS], mode[TW_DIMS];
  double number;
  int64_t integer;
} TwInstruction;

enum TwIndexMode { TW_UNIFORM = 0, TW_COLUMN = 1, TW_VARYING = 2 };
// When an operation runs: once for (b, h); once a row; once a tile, by columns; for every pair.
enum TwLevel { TW_PER_HEAD = 0, TW_PER_ROW = 1, TW_PER_COLUMN = 2, TW_PER_PAIR = 3, TW_LEVELS = 4 };
enum TwPart { TW_PREDICATE = 0, TW_SCORE = 1, TW_SLOPES = 2, TW_PARTS = 3 };

// The gradient of one lookup: values `slope` (register) times dz, added at `index` of a contiguous array.
// Each group of work units has its own copy, `group_stride` apart (0: one for all), in fp64 where `wide`.
typedef struct {
  void *data;
  int64_t group_stride;
  int32_t wide, slope, dims;
  int32_t index[TW_DIMS], mode[TW_DIMS];
  int64_t size[TW_DIMS], stride[TW_DIMS];
} TwLeafGradient;

typedef struct {
  const TwInstruction *code;
  int32_t range[TW_PARTS][TW_LEVELS][2];
  int32_t registers, raw, score, keep, slope;  // how many, 0: no program; those of s, z, the predicate, dz/ds, -1: none
  int32_t leaf_gradients;
  const TwLeaf *leaves;
  const TwLeafGradient *gradients;
} TwProgram;

// Python's PyGILState_Ensure, PyErr_CheckSignals, PyErr_Fetch and PyGILState_Release: a long call runs Python's signal
// handlers. What one raised is left in `raised`, for PyErr_Restore, and the call ends as TW_INTERRUPTED.
typedef struct {
  int (*enter)(void);
  int (*check)(void);
  void (*fetch)(void **type, void **value, void **traceback);
  void (*leave)(int);
  void *raised[3];
} TwSignals;

typedef struct {
  int32_t version, type, threads, heads_per_item;  // threads 0: one for each processor
  const char *isa;                                 // null: the best one of this machine
  int64_t batch, heads_q, heads_k, head_dim, head_dim_v, seqlen_q, seqlen_k;
  int64_t tile_m, tile_n, split;                   // split: keys of a split; 0: all keys are one. tile_m 0: tw_choose
  double softmax_scale;
  const int64_t *cu_seqlens_q, *cu_seqlens_k;      // null: a dense batch
  // Forward over pages: key j of sequence b is row j % page_size of page block_table[b * table_row + j / page_size], k.batch and
  // v.batch are a page's stride, and cu_seqlens_k adds up the lengths. cu_seqlens_q may be null, and seqlen_k is the capacity.
  // Backward of selected keys in a dense batch: key n of query i of key head h is row n % page_size of entry n / page_size of the line of
  // `hi` (b, h, i), which says how many there are; the entries count through the batch. dk and dv are in the compute type, zeroed, and
  // have `shares` of each sequence, one after the other.
  const int32_t *block_table;                      // null: no pages
  int64_t table_row, page_size;
  TwTensor q, k, v, o;
  void *lse;                                       // (b, h, i) at b * lse_batch + h * lse_head + i, fp32 or fp64
  int64_t lse_batch, lse_head;
  void *max_logit;                                 // forward: as lse, each row's largest score; null: not asked for
  const void *sink;                                // (heads_q,), as lse; null: none
  TwWindow window;                                 // fills the four ends and `seen`
  TwEnds lo, hi, first, last;
  const uint8_t *status;                           // tiles of sequence b, head h from status_at[b] + h * status_head[b]
  const int64_t *status_at, *status_head;          // null status: no predicate
  const uint8_t *seen;                             // keys that some query sees, (b, key head, j); null: all
  int64_t seen_batch, seen_head;
  TwProgram program;
  uint64_t seed;
  int64_t q_start, k_start;                        // this piece's first query and key in the whole: dropout alone asks
  uint32_t keep_below;                             // dropout's threshold; 0: no dropout
  int32_t shares;                                  // backward: parts of the keys that threads share; 0: tw_choose
  int32_t serial_batch, serial_head;               // backward: units that differ there alone run one after the other
  int32_t one_order;                               // forward: the sums of a row have one order, whatever rows are beside it
  int32_t deterministic;                           // bits do not depend on the rest of the batch
  // Backward alone:
  TwTensor dout, dq, dk, dv;                       // dq zeroed, unless the inputs are of 16 bits
  const void *dlse;                                // as lse
  void *delta;                                     // as lse, written first
  TwSignals *signals;                              // null: nothing interrupts the call
} TwCall;

// Forward mode: the tangents of q, k, v and the sink (null data: zero), and where those of o and lse go, which are as o and lse.
// The call's o and lse are the forward's. `raw` is the register of the products' tangents, and the program's `slope` that of dz/ds
// times these and of all that the tangents of leaves add.
typedef struct {
  TwTensor q, k, v, o;
  void *lse;
  const void *sink;
  int64_t raw;
} TwMoved;

int tw_forward(const TwCall *call, char *error, int64_t error_size);
int tw_backward(const TwCall *call, char *error, int64_t error_size);
int tw_jvp(const TwCall *call, const TwMoved *moved, char *error, int64_t error_size);
// Fills status and seen, where the predicate has one value on each block of block_q queries by block_k keys; 1, 1: on pairs alone.
int tw_list_blocks(const TwCall *call, int64_t block_q, int64_t block_k, char *error, int64_t error_size);
// Fills tile_m, tile_n, split and heads_per_item if tile_m is 0, and shares if that is 0, as the functions above do themselves.
int tw_choose(TwCall *call, int backward, char *error, int64_t error_size);
void tw_use_openmp(void *gomp_parallel);  // the process's GOMP_parallel, whose threads then do the work; null: our own
int tw_version(void);
int64_t tw_call_size(void);
const char *tw_operations(void);         // names, in the order of TwInstruction::op
int tw_isas(char *names, int64_t size);  // this machine's instruction sets, best first, separated by commas

#ifdef __cplusplus
}
#endif
