"""A prefix common to all sequences of a cache, attended once for the batch if that takes less time.

The queries of all sequences over the prefix are those of one sequence; each one's own keys come apart, and the two states are merged
(docs/algorithm.md#5-merging). That is the same attention where every query lies behind the prefix and no score depends on where it
lies; elsewhere, and where it would save no time, each sequence reads the prefix for itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise import masks, pages, repeated, settings, state
from tilewise.cache import PagedCache, QuantizedCache, SharedCache, cache_as_options
from tilewise.scores import as_score, symbols_of
from tilewise.spec import Options, not_tensors
from tilewise.words import raise_wrong

POSITIONS = {"b", "h", "i", "j", "off"}

# What decides, of an H200 (docs/serving.md#shared-prefixes): the bytes of one prefix that many sequences read in a second, most of them
# from L2, and what the second attention and the merge of the two take at most.
READ_PER_SECOND = 7.8e12
SECONDS_MORE = 110e-6


@dataclass(frozen=True)
class Saving:
    """The seconds saved by reading a prefix once, and the seconds that this costs."""

    saved: float
    more: float

    @classmethod
    def of(cls, q: Tensor, shared: SharedCache) -> Saving:
        k, v = shared.cache[:2]
        row = k.shape[2] * k.element_size() * (k.shape[-1] + (0 if pages.lies_in(v, k) else v.shape[-1]))
        return cls((q.shape[0] - 1) * shared.keys * row / READ_PER_SECOND, SECONDS_MORE)

    def __str__(self) -> str:
        return f"reading it once saves {1e6 * self.saved:.0f} us and costs {1e6 * self.more:.0f} us"


def why_apart(q: Tensor, shared: SharedCache, o: Options) -> list[str]:
    """Return every reason why each sequence reads the prefix for itself; empty: it is attended once."""
    has = {
        "packed queries": o.cu_seqlens_q is not None,
        "deterministic: the queries of other sequences would decide how its keys are split": _deterministic(o),
        "the mask reads positions": masks.as_mask(o.mask, False).text not in ("", masks.as_mask(None, True).text),
        "the score reads positions": bool(symbols_of(as_score(o.score)) & POSITIONS),
        "the largest scores are asked for": o.max_logit,
        "each sequence has scales of its own": isinstance(shared.cache, QuantizedCache)
        and any(x.ndim == 2 for x in shared.cache[4:]),
        f"no cost is known on {q.device.type}": q.device.type != "cuda",
    }
    found = [reason for reason, applies in has.items() if applies]
    saving = None if found else Saving.of(q, shared)
    return found if saving is None or saving.saved > saving.more else [str(saving)]


def described(q: Tensor, shared: SharedCache, o: Options) -> str:
    """Return how the prefix is read, and why."""
    why = why_apart(q, shared, o)
    return f"read by each sequence: {'; '.join(why)}" if why else f"read once: {Saving.of(q, shared)}"


def _deterministic(o: Options) -> bool:
    return torch.are_deterministic_algorithms_enabled() if o.deterministic is None else o.deterministic


def attend(q: Tensor, shared: SharedCache, o: Options) -> state.State:
    """Return the attention of q over a shared cache.

    Raises:
        ValueError: a prefix that is no part of every row of the table, or behind which some query does not lie; the latter, and other
            pages, are looked for on the CPU, and on an accelerator with ``TILEWISE_CHECK=1``.
    """
    raise_wrong("attention_paged", reasons(q, shared))
    return over(q, shared.cache, o) if why_apart(q, shared, o) else attend_once(q, shared, o)


def attend_once(q: Tensor, shared: SharedCache, o: Options) -> state.State:
    """Return the attention of q ``(batch, rows, heads, head_dim)`` with the prefix as one sequence of ``batch * rows`` queries."""
    (batch, rows), cache, n = q.shape[:2], shared.cache, shared.prefix_pages
    length = torch.full((1,), shared.keys, dtype=torch.int32, device=q.device)
    prefix = cache._replace(block_table=cache.block_table[:1, :n], seqlens_k=length)
    own = cache._replace(block_table=cache.block_table[:, n:], seqlens_k=(cache.seqlens_k - shared.keys).clamp(min=0))
    # A sink belongs to one part alone; every query sees all of the prefix.
    flat, lse = over(q.reshape(1, batch * rows, *q.shape[2:]), prefix, replace(o, sink=None, causal=False, mask=None))
    first = flat.view(batch, rows, *flat.shape[2:]), lse.unflatten(2, (batch, rows))[0].transpose(0, 1)
    return state.merge_parts([first, over(q, own, replace(o))])


def over(q: Tensor, cache: PagedCache | QuantizedCache, o: Options, lse: bool = True) -> state.State:
    """Return the attention of q over a cache; ``lse``: whether it is read."""
    k, v = cache_as_options(cache, o)
    return repeated.over(q, k, v, o, lse)


def reasons(q: Tensor, shared: SharedCache) -> list[str]:
    """Return the reasons against the prefix, or against what is no tensor."""
    (_, _, table, lengths), n = shared.cache[:4], shared.prefix_pages
    named = [("q", q), *zip(shared.cache._fields, shared.cache, strict=True)]
    if wrong := not_tensors(named, [name for name, _ in named]):
        return wrong
    if not isinstance(n, int) or table.ndim != 2 or not 0 < n < table.shape[1]:
        return [f"prefix_pages must be above 0 and below the {table.shape[-1]} pages of a row of the table, got {n!r}"]
    if torch.compiler.is_compiling() or not settings.checks_values(q.device):
        return []
    found = []
    if not bool((table[:, :n] == table[:1, :n]).all()):
        found.append(f"the first {n} pages of the sequences differ; share names pages that all of them begin with")
    rows = q.shape[1] if q.ndim == 4 else 1
    if not bool((lengths - rows >= shared.keys).all()):
        found.append(f"a sequence has queries before the end of the prefix of {shared.keys} keys")
    return found
