"""The arguments of the forward kernel: numbers, tensor maps, and the optional parameters of :mod:`tilewise.backends.hopper.kit.params`."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from tilewise.backends.hopper.kit.dtypes import F32, I32
from tilewise.backends.hopper.kit.params import OptionalParams


class ForwardParams(NamedTuple):
    """The numbers of a launch.

    Attributes:
        heads_q, group: query heads, and how many of them share a key head.
        section: heads that are at work at a time (:class:`tilewise.backends.hopper.kit.schedule.Order`).
        lo, hi: the band's ends.
        sinks: whether there are sinks; without them the sink tensor is not read.
        scale2: softmax_scale · log2(e); with a softcap, cap · log2(e); with a traced score, log2(e).
        cap2: with a softcap, as :func:`softmax.softcap` takes it; with a traced score, :attr:`score_scale`.
        extra: what only some kernels have.
    """

    seqlen_q: I32
    seqlen_k: I32
    heads_q: I32
    group: I32
    batch: I32
    section: I32
    lo: I32
    hi: I32
    # A number and no part of the config, so that one kernel serves calls with and without sinks.
    sinks: I32
    # Base 2, since the hardware has an exponential of base 2 alone.
    scale2: F32
    cap2: F32
    extra: OptionalParams = OptionalParams()

    @property
    def score_scale(self) -> F32:
        """softmax_scale, by which a traced score takes products. Its kernels have no softcap: it comes in place of ``cap2``."""
        return self.cap2

    @property
    def queue(self) -> cute.Tensor:
        """The queue of packed tiles."""
        return self.extra.queue


class TensorMaps(NamedTuple):
    """The TMA descriptors, coordinates and shared layouts of q, k, v and o, and of a bias by pair.

    q, k and o have the modes (rows, columns, head, batch), v has (columns, rows, head, batch). Where a tile holds several heads
    of a group, the rows of q and o are (head of the group, row), and the third mode is the group. Packed sequences have the
    modes of :func:`packed.ragged`. The bias has (rows, keys, head, batch), the last two of one element where all share it.
    """

    q: cpasync.TmaInfo
    k: cpasync.TmaInfo
    v: cpasync.TmaInfo
    o: cpasync.TmaInfo
    bias: cpasync.TmaInfo | None = None
