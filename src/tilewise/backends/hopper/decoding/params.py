"""The arguments of the decoding kernel: numbers, tensors and descriptors."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.params import OptionalParams


class DecodingParams(NamedTuple):
    """The numbers and tensors of a launch.

    Attributes:
        seqlen_k: rows of a page.
        heads_k, group, queries: key heads, query heads that share one, and queries of each sequence.
        shares: the CTAs of a key head, each of which has a share of all blocks. segment: 1; or the blocks of a segment, all of one
            sequence: a CTA then has every ``shares``-th segment.
        cached: whether lengths and a table say where keys are; without, each sequence has all rows of one page, in order.
        scale2: softmax_scale · log2(e); with a softcap, cap · log2(e). cap2: with a softcap, as :func:`softmax.softcap` takes it.
        lo, hi: query i sees keys from ``i + off + lo`` on and below ``i + off + hi``, ``off`` the sequence's keys less its queries.
        q, o: (query, sequence, head, column). lse: (query, head, sequence), fp32.
        sinks: whether there are sinks; without them the sink tensor, (head,), fp32, is not read.
        extra: ``seqlens_k``, ``block_table``, ``num_pages``, ``page_rows``; of states ``part_o`` (state, four, thread, 4) and ``part_lse``
            (state, thread, statistic), fp32; ``counts`` (sequence · heads_k + head,), int32: how many states of a sequence are there;
            the kernel finds zeros and leaves zeros.
    """

    seqlen_k: I32
    heads_k: I32
    group: I32
    queries: I32
    shares: I32
    segment: I32
    cached: I32
    scale2: F32
    cap2: F32
    lo: I32
    hi: I32
    q: cute.Tensor
    o: cute.Tensor
    lse: cute.Tensor
    sinks: I32
    sink: cute.Tensor
    extra: OptionalParams


class PoolMaps(NamedTuple):
    """The descriptors of the pools, with the modes of :func:`packed.ragged`."""

    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
