"""Masks as a tensor that the score adds, in the backward of a tensor whose gradient is made of kept dS.

dS is kept where descriptors may read every key (:attr:`host.plan.Plan.sheet`). A mask of keys, lengths or padding, forbids it, though all
that it says is which columns of P are zero. So that backward gets zeros for the keys that no query sees, which may hold NaN, and for the
mask one more tensor: -inf where it hides (docs/decisions.md#triton-mask-as-score). Masks that vary by query take as many numbers as they
have pairs, which is done for short sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import expr
from tilewise.backends.base import Inputs
from tilewise.planning.tiles import Grid
from tilewise.problem import Problem
from tilewise.scores.catalogue import THEN, bias
from tilewise.signature import TensorFacts

# The pairs of a batch element and head in a short sequence. Longer ones have programs enough to compute tiles of dS again, and tiles enough
# for lists of them (host.plan.Decisions.lists).
WINDOW_PAIRS = 1 << 16


def unmasked(p: Problem) -> Problem | None:
    """Return the problem without a mask, of :func:`inputs`; None where it has none, or too large a one."""
    region, spec = p.spec.region, p.spec
    if region.everything or region.prepared or region.selections or p.packed or p.paged or spec.piece or spec.mapped:
        return None
    varies = expr.depends_on(*region.parts)
    if varies & {"i", "h"} and p.seqlen_q * p.seqlen_k > WINDOW_PAIRS:
        return None
    sizes = {"b": p.batch, "h": p.heads_q, "i": p.seqlen_q}
    shape = *(n if name in varies else 1 for name, n in sizes.items()), p.seqlen_k
    added = bias(torch.empty(shape, dtype=p.dtype, device="meta")).text
    scored = replace(
        spec,
        mask_text="",
        mask_slots=(),
        score_text=f"{spec.score_text}{THEN}{added}" if spec.score_text else added,
        score_slots=(*spec.score_slots, len(p.extras)),
    )
    leaf = TensorFacts.contiguous(shape, p.dtype)
    k, v = (TensorFacts.contiguous(of, p.dtype) for of in (p.k.shape, p.v.shape))
    return replace(p, k=k, v=v, extras=(*p.extras, leaf), spec=scored)


def inputs(p: Problem, without: Problem, given: Inputs) -> Inputs:
    """Return the tensors of the problem ``without`` a mask; ``p``: the problem as it was given."""
    lengths = p.batch, p.heads_q, p.seqlen_q, p.seqlen_k
    grid = Grid.whole(p.spec.region, given.leaves, lengths, p.device)
    index, zero = devices.indices(p.device, max(p.seqlen_q, p.seqlen_k)), given.k.new_zeros(())
    shape = without.extras[-1].shape
    kept = grid.kept(index[: shape[2]], index[: p.seqlen_k]).expand(shape)
    added = torch.where(kept, zero, zero - torch.inf)
    seen_keys = kept.flatten(1, 2).any(1).expand(p.batch, p.seqlen_k)
    k, v = (_of_kept(x, seen_keys, zero) for x in (given.k, given.v))
    return Inputs.of(without, given.q, k, v, [*given.leaves, added], given.seed)


def _of_kept(x: Tensor, kept: Tensor, zero: Tensor) -> Tensor:
    """Return the rows of k or v that are kept, ``(batch, seqlen_k)``, and zeros for the others, contiguous."""
    return torch.where(kept[..., None, None], x, zero, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
