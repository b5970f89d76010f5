"""A padding mask as an interval of keys, where it is one. The host reads one or two truth values, none in torch.compile and torch.func."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.expr import lookup
from tilewise.masks.catalogue import Mask, keep, key_range


def padding(kept: Tensor, start: int, keys: int, room: int | None = None) -> Mask | None:
    """Return keys ``j < keys`` with ``kept[b, start + j]``; None: all. One run of keys per sequence is an interval, if it may be looked at.

    Args:
        kept: ``(batch, n)``, bool or 0 and 1; what lies behind n is hidden.
        room: how many keys the attention has, if more than ``keys``; the caller hides the others where all of ``keys`` are kept.
    """
    kept = kept[:, start : start + keys].bool()
    # A graph waits for no number, and a vmap has one for each example.
    asked = not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())
    if asked and kept.shape[1] == keys and kept.all():  # mostly, and one number to wait for
        return None
    keys = keys if room is None else room
    kept = torch.nn.functional.pad(kept, (0, keys - kept.shape[1]))
    position = torch.arange(keys, device=kept.device)
    begin = torch.where(kept, position, keys).amin(-1)
    end = torch.where(kept, position + 1, 0).amax(-1)
    begin = torch.minimum(begin, end)
    run = key_range(begin, end)
    return run if asked and (end - begin == kept.sum(-1)).all() else run & keep(lambda b, h, i, j: lookup(kept, b, j))
