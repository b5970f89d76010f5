"""flash-attn's ``bert_padding``: a padded batch to packed sequences and back, differentiable, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Return ``input[indices]``: rows of the first axis; ``indices`` integer, ``(n,)``."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return ``(first_axis_dim, ...)`` with ``values[n]`` in row ``indices[n]`` and zeros elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the rows of a padded batch that a mask selects, one sequence after another.

    Args:
        hidden_states: ``(batch, seqlen, ...)``.
        attention_mask: ``(batch, seqlen)``, bool or integer; nonzero is a token.
        unused_mask: ``(batch, seqlen)``; nonzero is a row that is kept in the packed tensor but is no token.

    Returns:
        ``(total, ...)``; the rows' indices in the flattened batch, ``(total,)``; cu_seqlens int32 ``(batch + 1,)``; the
        longest sequence, read by the host; and each sequence's tokens, those of ``attention_mask`` alone, ``(batch,)``.
    """
    tokens = attention_mask != 0  # numbers of sequences are masks too
    selected = tokens if unused_mask is None else tokens | (unused_mask != 0)
    lengths = selected.sum(-1, dtype=torch.int32)
    indices = selected.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if lengths.numel() else 0
    packed = index_first_axis(hidden_states.flatten(0, 1), indices)
    return packed, indices, cu_seqlens, longest, tokens.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Return ``(batch, seqlen, ...)`` of packed rows ``(total, ...)``, zeros where there was none: undoes :func:`unpad_input`."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
