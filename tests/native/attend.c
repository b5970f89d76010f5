// Causal attention with a window and grouped heads, forward and backward, in C alone. test_attend.py compiles and judges it.
//
//   attend SEQLEN_Q SEQLEN_K HEADS_Q HEADS_K DIM LEFT < q k v do > o lse dq dk dv
//
// All arrays are float (seqlen, heads, dim), lse (heads, seqlen).
#include <stdio.h>
#include <stdlib.h>

#include "tilewise.h"

static TwTensor tensor(int64_t rows, int64_t heads, int64_t dim) {
  const TwTensor x = {calloc((size_t)(rows * heads * dim), sizeof(float)), rows * heads * dim, heads * dim, dim};
  return x;
}

static int moved(const TwTensor *x, int read) {
  const size_t count = (size_t)x->batch;
  return (read ? fread(x->data, sizeof(float), count, stdin) : fwrite(x->data, sizeof(float), count, stdout)) == count;
}

int main(int argc, char **argv) {
  if (argc != 7) return 2;
  int64_t n[7];
  for (int i = 1; i < 7; ++i) n[i] = atoll(argv[i]);
  TwCall call = {.version = TW_VERSION, .type = TW_F32, .batch = 1, .softmax_scale = 0.125};
  call.seqlen_q = n[1], call.seqlen_k = n[2], call.heads_q = n[3], call.heads_k = n[4], call.head_dim = call.head_dim_v = n[5];
  call.q = tensor(n[1], n[3], n[5]), call.k = tensor(n[2], n[4], n[5]), call.v = tensor(n[2], n[4], n[5]);
  call.o = tensor(n[1], n[3], n[5]), call.dout = tensor(n[1], n[3], n[5]);
  call.dq = tensor(n[1], n[3], n[5]), call.dk = tensor(n[2], n[4], n[5]), call.dv = tensor(n[2], n[4], n[5]);
  const TwTensor lse = tensor(n[1], n[3], 1), dlse = tensor(n[1], n[3], 1), delta = tensor(n[1], n[3], 1);
  call.lse = lse.data, call.dlse = dlse.data, call.delta = delta.data, call.lse_batch = lse.batch, call.lse_head = call.seqlen_q;
  call.window = (TwWindow){.ends = TW_LEFT | TW_RIGHT, .left = n[6]};

  char error[256] = "";
  if (!moved(&call.q, 1) || !moved(&call.k, 1) || !moved(&call.v, 1) || !moved(&call.dout, 1)) return 2;
  if (tw_forward(&call, error, sizeof error) || tw_backward(&call, error, sizeof error)) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  return !(moved(&call.o, 0) && moved(&lse, 0) && moved(&call.dq, 0) && moved(&call.dk, 0) && moved(&call.dv, 0));
}
