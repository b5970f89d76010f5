"""The peers of bench.serving: PyTorch's attentions over dense keys, each as a function of the copy of the keys that it reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

if TYPE_CHECKING:
    from bench.serving import Keys

Attend = Callable[[int], Tensor]


def sdpa(keys: Keys, which: SDPBackend) -> Attend:
    """PyTorch's attention by one of its backends."""
    case, q = keys.case, keys.q.transpose(1, 2)
    mask = causal_lower_right(case.queries, case.keys) if case.queries > 1 else None

    def attend(n: int) -> Tensor:
        k, v = (x.transpose(1, 2) for x in keys.dense[n])
        with sdpa_kernel(which):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)

    return attend


def every_pair(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.ones_like(j, dtype=torch.bool)


def flex(keys: Keys) -> Attend:
    """FlexAttention over one query a sequence, compiled when it is called first; on a CPU it runs without its compiler.

    It is given blocks of 128 keys, of which every pair counts: without them its decoding takes all keys for one block, of which only the
    first split has any, and at 8 × 32,768 keys takes 1,210 µs (H200, torch 2.11).
    Dynamo forgets what it compiled before: past its limit of recompilations FlexAttention would silently run eager.
    """
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    call, q = flex_attention, keys.q.transpose(1, 2)
    blocks = create_block_mask(every_pair, None, None, keys.case.queries, keys.case.keys, device=keys.device)
    if keys.device == "cuda":
        torch._dynamo.reset()
        call = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def attend(n: int) -> Tensor:
        k, v = (x.transpose(1, 2) for x in keys.dense[n])
        return call(q, k, v, block_mask=blocks, enable_gqa=True).transpose(1, 2)

    return attend
