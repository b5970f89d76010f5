"""The arguments of the kernel of latent attention: numbers, tensors and descriptors."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.params import OptionalParams


class LatentParams(NamedTuple):
    """The numbers and tensors of a launch.

    Attributes:
        seqlen_q: rows of q, those past the last sequence too.
        seqlen_k: rows of a page, up to a multiple of a key tile's; there are fewer only where a sequence has one page.
        heads_k, group: key heads, and query heads that share one.
        lo, hi: the band's ends, without a sequence's offset.
        least: key tiles that a split has at least.
        sinks: whether there are sinks; without them the sink tensor is not read.
        even: rows of q of each sequence, where all have as many; 0 where they come packed.
        scale2: softmax_scale · log2(e).
        q: (row, head, column); o, lse as in the launch, or the states of splits in ``extra``.
        pool, k_scale, v_scale: of a cache of e4m3 numbers its bytes (page, row, head, column), and its scales (sequence, head), fp32;
            the pool of selected keys too.
    """

    seqlen_q: I32
    seqlen_k: I32
    heads_k: I32
    group: I32
    lo: I32
    hi: I32
    least: I32
    sinks: I32
    even: I32
    scale2: F32
    q: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    sink: cute.Tensor
    extra: OptionalParams
    pool: cute.Tensor | None = None
    k_scale: cute.Tensor | None = None
    v_scale: cute.Tensor | None = None


class KeyMaps(NamedTuple):
    """The descriptors of a pool of 16-bit numbers, by columns (64, 9), rows of a page, head and page.

    ``latent`` is of two chunks of columns, ``rotary`` of one; a pool of e4m3 numbers has none.
    """

    latent: cpasync.TmaInfo | None
    rotary: cpasync.TmaInfo | None
