"""Hugging Face models whose sequence is sharded over ranks.

::

    cp = tw.context_parallel(mesh["cp"])
    with tilewise.compat.transformers.sharded(cp):
        logits = model(cp.shard(ids), position_ids=cp.positions(ids.shape[1])[None]).logits

A model sees its own rows alone, so what transformers says of a mask is of these rows. It is said of the whole sequence here:
bands and chunks count global positions, a padding mask is gathered, and packed documents are found from the ``position_ids`` of
all ranks, by transformers' own rule. What cannot be said again is refused, on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewise.compat.padding import padding
from tilewise.compat.transformers.masks import (
    Band,
    Documents,
    HandedMask,
    MaskCall,
    joined,
    made_by,
    read_terms,
)
from tilewise.masks.catalogue import Mask, documents
from tilewise.parallel.context import ContextParallel

_group: ContextVar[ContextParallel | None] = ContextVar("sharded", default=None)
_open = 0  # blocks of `sharded` in this process: torch.compile reads a number, and breaks its graph at a ContextVar


@contextlib.contextmanager
def sharded(parallel: ContextParallel) -> Iterator[ContextParallel]:
    """Let models that are called inside attend to the rows of all ranks, each rank with its own rows of the sequence.

    Every rank calls the model in the same way, with ``position_ids=parallel.positions(seqlen)[None]`` (packed: ``parallel.shard`` of
    positions that begin at 0 in each document). Pass ``attention_mask=parallel.shard(mask)`` if there is padding. A model shifts labels
    along its own rows, so compute the loss outside, from ``parallel.roll(ids, -1)``. The backward may run outside.

    Args:
        parallel: from :func:`tilewise.context_parallel`.
    """
    global _open
    token = _group.set(parallel)
    _open += 1
    try:
        yield parallel
    finally:
        _open -= 1
        _group.reset(token)


def group() -> ContextParallel | None:
    """Return the ranks of the ``with`` around a call of a model; None outside of any."""
    return _group.get() if _open else None


@dataclass(frozen=True)
class ShardedMask(HandedMask):
    """A mask of the whole sequence, handed to the layers of a model that holds a rank's rows.

    Attributes:
        mask: over all keys, without packed documents, which only positions tell. shape: that of this rank's rows.
        parallel: the ranks. found: the whole mask, once the first layer has handed over its positions.
        packed: positions may tell documents apart, as transformers reads them where there is no padding mask.
    """

    parallel: ContextParallel
    packed: bool
    found: dict[str, Mask] = field(default_factory=dict, compare=False)

    def whole(self, positions: Tensor | None) -> Mask:
        """Return the mask with the packed documents of these position_ids ``(batch or 1, rows)``; a layer's first call gathers them.

        Raises:
            ValueError: on every rank: no positions, or such as no layout and no packing gives.
        """
        if "mask" not in self.found:
            self.found["mask"] = joined([self.mask, self._documents(positions)])
        return self.found["mask"]

    def _documents(self, positions: Tensor | None) -> Mask | None:
        """Return the packed documents of the whole sequence: one begins wherever positions do not go on by 1. None: there is one alone."""
        rows = self.shape[2]
        wrong = (
            "the model hands no position_ids to its attention, so that nothing says where its rows lie"
            if positions is None
            else f"position_ids have {positions.shape[-1]} columns, this rank holds {rows} rows"
            if positions.shape[-1] != rows
            else ""
        )
        _agree(self.parallel, wrong, "")
        locally = bool((positions == torch.arange(rows, device=positions.device)).all())
        forgotten = [bool(said) for (said,) in self.parallel.exchange.numbers([locally])]
        whole = self.parallel.unshard(positions, 1)
        steps = torch.diff(whole, dim=-1)
        starts = torch.nn.functional.pad(steps != 1, (1, 0), value=False)
        if all(forgotten) and self.parallel.size > 1:
            wrong = (
                "every rank's position_ids are 0, 1, 2 ...: pass position_ids=parallel.positions(seqlen)[None]; packed documents that "
                "end exactly where shards do need no sharding"
            )
        elif not self.packed:
            return None
        elif bool((whole[starts] != 0).any()) or bool((whole[:, 0] != 0).any()):
            wrong = "position_ids of the whole sequence jump to another number than 0; pass position_ids=parallel.positions(seqlen)[None]"
        if wrong:  # all ranks see the same positions
            raise ValueError(f"a sharded model was called wrongly: {wrong}")
        ids = starts.cumsum(-1)
        return documents(ids if len(ids) > 1 else ids[0]) if bool(starts.any()) else None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(
            f"this model calls torch.{func.__name__} with its attention mask itself, which is not built for a sharded sequence"
        )


def read_sharded(call: MaskCall, parallel: ContextParallel) -> ShardedMask:
    """Return the mask of a call whose rows are a rank's part of a sequence.

    Raises:
        ValueError: on every rank: what one of them cannot say of the whole sequence, or ranks that say different things.
    """
    terms = [term for term in read_terms(call.mask_function) if not _is_packing(term)]
    given = call.attention_mask
    wrong = []
    if not all(isinstance(term, (Band, Documents)) for term in terms):
        wrong.append("the model composes a mask of functions of its own rows")
    if call.q_length != call.kv_length or not isinstance(call.first, int) or call.first:
        wrong.append(
            f"{call.kv_length} keys for {call.q_length} rows: pass use_cache=False, and an attention_mask of this rank's rows"
        )
    if given is not None and any(isinstance(term, Documents) for term in terms):
        wrong.append("chunks that are counted from each sequence's padding")
    bands = [(term.left, term.right) for term in terms if isinstance(term, Band)]
    _agree(parallel, "; ".join(wrong), f"{bands} {len(terms)} {call.batch_size} padding {given is not None}")
    seqlen = sum(n for (n,) in parallel.exchange.numbers([call.q_length]))
    whole = replace(call, q_length=seqlen, kv_length=seqlen, attention_mask=None)
    padded = None if given is None else padding(parallel.unshard(given.long(), 1), 0, seqlen)
    mask = joined([*[term.mask(whole, seqlen) for term in terms], padded])
    shape = (call.batch_size, 1, call.q_length, call.kv_length)
    return ShardedMask(mask, call.kv_length, shape, None, call.device, parallel, packed=given is None)


def _is_packing(term: object) -> bool:
    """Return whether a term tells packed documents apart, which transformers finds in this rank's positions alone."""
    return isinstance(term, Documents) and made_by(term.function)[0] == "packed_sequence_mask_function"


def _agree(parallel: ContextParallel, wrong: str, said: str) -> None:
    """Raise the same ValueError on every rank where one has a reason, or where they say different things."""
    digest = int.from_bytes(hashlib.sha256(said.encode()).digest()[:7], "little")
    found = parallel.exchange.numbers([int(bool(wrong)), digest])
    if any(bad for bad, _ in found) or len({number for _, number in found}) > 1:
        reasons = parallel.exchange.objects(wrong or f"says: {said}")
        shown = "".join(f"\n  rank {rank}: {reason}" for rank, reason in enumerate(reasons))
        raise ValueError(f"a sharded model was called wrongly{shown}")
