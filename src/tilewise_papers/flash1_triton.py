"""FlashAttention's own loop order (Dao et al. 2022, Algorithm 1; with a pattern of blocks, Algorithm 5) as a Triton kernel.

The outer loop runs over keys and the inner one over queries, so that O and its statistics l and m go through memory once for each key
block: what FlashAttention-2 turned round. A head is one program, as there. Margins have the lines of Algorithm 1. The kernel exists to
be counted and timed (traffic.py); its output is rounded to the inputs' dtype once for each key block, as the algorithm has it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, l_ptr, m_ptr, pattern_ptr, scale, seqlen,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """All of one head. q, k, v, o (heads, seqlen, HEAD_DIM); l, m fp32 (heads, seqlen), m in units of log2.

    pattern_ptr: int8 (seqlen / ROWS, seqlen / COLS), the blocks that take part; None: all do.
    """
    head = tl.program_id(0).to(tl.int64)
    first, stats = head * seqlen * HEAD_DIM, head * seqlen
    offs_d = tl.arange(0, HEAD_DIM)
    for j in range(0, seqlen, COLS):  # line 5
        offs_n = j + tl.arange(0, COLS)
        keys = first + offs_n[:, None] * HEAD_DIM + offs_d[None, :]
        k, v = tl.load(k_ptr + keys), tl.load(v_ptr + keys)  # line 6: (COLS, HEAD_DIM)
        for i in range(0, seqlen, ROWS):  # line 7
            visited = True
            if pattern_ptr is not None:
                visited = tl.load(pattern_ptr + (i // ROWS) * (seqlen // COLS) + j // COLS) != 0
            if visited:
                offs_m = i + tl.arange(0, ROWS)
                rows = first + offs_m[:, None] * HEAD_DIM + offs_d[None, :]
                # line 8: Q and O (ROWS, HEAD_DIM), l and m (ROWS,)
                q, o = tl.load(q_ptr + rows), tl.load(o_ptr + rows).to(tl.float32)
                l, m = tl.load(l_ptr + stats + offs_m), tl.load(m_ptr + stats + offs_m)
                s = tl.dot(q, k.T) * (scale * LOG2E)  # line 9: S = Q Kᵀ, (ROWS, COLS) fp32
                m_new = tl.maximum(m, tl.max(s, 1))  # lines 10 and 11, with one exponential for m̃ and the new m
                p = tl.exp2(s - m_new[:, None])
                old = l * tl.exp2(m - m_new)
                l_new = old + tl.sum(p, 1)
                o = (old[:, None] * o + tl.dot(p.to(v.dtype), v)) / l_new[:, None]  # line 12
                tl.store(o_ptr + rows, o.to(o_ptr.dtype.element_ty))
                tl.store(l_ptr + stats + offs_m, l_new)  # line 13
                tl.store(m_ptr + stats + offs_m, m_new)
        tl.debug_barrier()  # the next key block reads what other threads of the program have written


def forward(q: Tensor, k: Tensor, v: Tensor, rows: int, cols: int, pattern: Tensor | None = None) -> Tensor:
    """softmax(q kᵀ / √D) v of q, k, v (heads, seqlen, head_dim), contiguous, in blocks of ``rows`` queries and ``cols`` keys.

    Args:
        pattern: int8 (seqlen / rows, seqlen / cols), the blocks that take part. A row that sees none of them gives 0.

    Raises:
        ValueError: the blocks do not divide the sequence.
    """
    heads, seqlen, head_dim = q.shape
    if seqlen % rows or seqlen % cols:
        raise ValueError(f"blocks of {rows} queries and {cols} keys do not divide a sequence of {seqlen}")
    o = torch.zeros_like(q)  # line 2
    l = torch.zeros(heads, seqlen, device=q.device)
    m = torch.full_like(l, float("-inf"))
    forward_kernel[(heads,)](q, k, v, o, l, m, pattern, head_dim**-0.5, seqlen, head_dim, rows, cols, num_warps=4)
    return o
