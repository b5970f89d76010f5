"""Exact attention for PyTorch: ``softmax(q kᵀ) v`` with any mask, any bias and all gradients, on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tilewise import words
from tilewise.api import (
    AttentionStats,
    attention,
    attention_paged,
    attention_paged_with_lse,
    attention_varlen,
    attention_varlen_with_lse,
    attention_with_lse,
    attention_with_stats,
    dropout_mask,
    explain,
    merge,
)
from tilewise.cache import PagedCache, QuantizedCache, SharedCache, append, dense_cache, paged
from tilewise.expr import lookup
from tilewise.gradients import attention_backward
from tilewise.masks.catalogue import (
    Mask,
    block_sparse,
    causal,
    dense,
    documents,
    keep,
    key_lengths,
    key_range,
    prefix,
    selected,
    window,
)
from tilewise.masks.patterns import butterfly, local_global, strided
from tilewise.pictures.view import show_mask
from tilewise.scores.catalogue import OFF as offset
from tilewise.scores.catalogue import Score, alibi, bias, score, softcap
from tilewise.statistics import probabilities

if TYPE_CHECKING:
    import torch

    from tilewise.parallel.context import context_parallel
    from tilewise.selfcheck import Report
else:  # a type checker would take any name for one of the package's

    def __getattr__(name: str) -> object:
        """Load ``parallel`` and ``context_parallel`` when they are first named: a call on one device needs neither.

        Raises:
            AttributeError: for any other name, with where it is, or what says the same here.
        """
        if name not in ("parallel", "context_parallel"):
            raise words.missing(name, __all__)
        import tilewise.parallel

        globals()["context_parallel"] = tilewise.parallel.context_parallel
        return globals()[name]


def verify(device: torch.device | str | None = None, dtypes: tuple[torch.dtype, ...] | None = None) -> Report:
    """:func:`tilewise.selfcheck.verify`: every backend of this machine against float64. Returns a printable report."""
    from tilewise.selfcheck import verify as run  # the oracle is not needed to compute

    return run(device, dtypes)


__version__ = "0.2.0"
__all__ = [
    "AttentionStats",
    "Mask",
    "PagedCache",
    "QuantizedCache",
    "Score",
    "SharedCache",
    "alibi",
    "append",
    "attention",
    "attention_backward",
    "attention_paged",
    "attention_paged_with_lse",
    "attention_varlen",
    "attention_varlen_with_lse",
    "attention_with_lse",
    "attention_with_stats",
    "bias",
    "block_sparse",
    "butterfly",
    "causal",
    "context_parallel",
    "dense",
    "dense_cache",
    "documents",
    "dropout_mask",
    "explain",
    "keep",
    "key_lengths",
    "key_range",
    "local_global",
    "lookup",
    "merge",
    "offset",
    "paged",
    "prefix",
    "probabilities",
    "score",
    "selected",
    "show_mask",
    "softcap",
    "strided",
    "verify",
    "window",
]
