"""Keys that a mask hides from every query of a sequence, in the backward of a tensor whose gradient is made of kept dS.

dS is kept where descriptors may read every key and every tile is visited (:attr:`host.plan.Plan.sheet`). A mask of keys alone, lengths or
padding, forbids both, though all that it says is which columns of P are zero. So that backward gets zeros for the hidden keys, which
may hold NaN, and for the mask one more tensor that the score adds: -inf at these (docs/decisions.md#triton-hidden-keys).
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


def revealed(p: Problem) -> Problem | None:
    """Return the problem that sees every key, of :func:`inputs`; None where the mask is of no keys alone."""
    region, spec = p.spec.region, p.spec
    alone = not region.everything and not expr.depends_on(*region.parts) & {"i", "h"} and region.prepared is None
    if not alone or region.selections or p.packed or p.paged or spec.piece is not None or spec.mapped:
        return None
    shape = p.batch, 1, 1, p.seqlen_k
    added = bias(torch.empty(shape, dtype=p.dtype, device="meta")).text
    seen = replace(
        spec,
        mask_text="",
        mask_slots=(),
        score_text=f"{spec.score_text}{THEN}{added}" if spec.score_text else added,
        score_slots=(*spec.score_slots, len(p.extras)),
    )
    k, v, leaf = (TensorFacts.contiguous(of, p.dtype) for of in (p.k.shape, p.v.shape, shape))
    return replace(p, k=k, v=v, extras=(*p.extras, leaf), spec=seen)


def inputs(p: Problem, seen: Problem, given: Inputs) -> Inputs:
    """Return the tensors of the problem that sees every key; ``p``: the problem as it was given."""
    lengths = p.batch, p.heads_q, p.seqlen_q, p.seqlen_k
    grid = Grid.whole(p.spec.region, given.leaves, lengths, p.device)
    index = devices.indices(p.device, max(p.seqlen_k, 1))
    kept = grid.kept(index[:1], index[: p.seqlen_k]).expand(p.batch, 1, 1, p.seqlen_k)
    zero = given.k.new_zeros(())
    added = torch.where(kept, zero, zero - torch.inf)
    k, v = (_of_kept(x, kept, zero) for x in (given.k, given.v))
    return Inputs.of(seen, given.q, k, v, [*given.leaves, added], given.seed)


def _of_kept(x: Tensor, kept: Tensor, zero: Tensor) -> Tensor:
    """Return the rows of k or v that are kept, and zeros for the others, contiguous."""
    rows = kept.view(*x.shape[:2], 1, 1)
    return torch.where(rows, x, zero, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
