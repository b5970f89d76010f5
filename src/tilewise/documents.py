"""Documents as packed sequences, for ``deterministic="everywhere"``: the tiles of a row's keys then begin at its document's first key.

A packed sequence is all that a query of a document may see, as for nested tensors (:mod:`tilewise.nested`). The host reads how many
documents there are.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.masks import Mask, as_mask
from tilewise.scores import as_score, symbols_of
from tilewise.spec import DOCUMENTS, EVERYWHERE, Options
from tilewise.untraced import untraced

_HOST_READS = "documents inside torch.vmap, torch.compile or a CUDA graph: the host reads how many there are"
_RELATIVE = re.compile(r"causal\(\)|window\((None|\d+), (None|\d+)\)")


def run_packed(q: Tensor, k: Tensor, v: Tensor, o: Options) -> bool:
    """Return whether a call has documents whose order of sums must not depend on where they begin."""
    if not (
        isinstance(o.mask, Mask)
        and DOCUMENTS in o.mask.text
        and o.deterministic == EVERYWHERE
        and o.cu_seqlens_q is None
    ):
        return False
    return all(isinstance(x, Tensor) and x.ndim == 4 and x.shape[0] == q.shape[0] for x in (q, k, v))


@untraced
def packed_documents(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[tuple[Tensor, Tensor, Tensor], Options]:
    """Return q, k and v as packed rows ``(batch * seqlen, heads, head_dim)``, and the options without the documents.

    Raises:
        NotImplementedError: a part of the call reads positions in the whole sequence, or shapes may not depend on values.
    """
    if torch.compiler.is_compiling():  # Dynamo cannot trace what tells the other reasons
        raise _refused([_HOST_READS])
    others, ids = _parted(o.mask)
    reasons = [
        f"beside documents, the mask {x} reads positions in the whole sequence"
        for x in others
        if not _RELATIVE.fullmatch(x)
    ]
    if ids is None:
        reasons.append("documents stand twice in the mask, or in a union")
    elif ids.shape[-1] != k.shape[1]:
        reasons.append(f"documents of {ids.shape[-1]} keys, k has {k.shape[1]}")
    elif ids.ndim > 1 and ids.shape[0] not in (1, q.shape[0]):
        reasons.append(f"documents of {ids.shape[0]} batch elements, q has {q.shape[0]}")
    if symbols_of(as_score(o.score)) & {"b", "i", "j", "off"}:
        reasons.append("beside documents, the score reads positions in the whole sequence")
    if q.shape[1] > k.shape[1]:
        reasons.append("documents with more queries than keys")
    if _is_mapped(ids) or (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        reasons.append(_HOST_READS)
    if reasons:
        raise _refused(reasons)
    cu_q, cu_k = _cu_seqlens(ids.to(q.device), q.shape[0], q.shape[1], k.shape[1])
    kept = Mask(" & ".join(others))
    return (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)), replace(
        o, mask=kept, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k
    )


def _refused(reasons: list[str]) -> NotImplementedError:
    told = "".join([f"\n  {reason}" for reason in reasons])
    return NotImplementedError(
        f'deterministic="everywhere" runs documents as packed sequences, and cannot here{told}\n'
        "  Pass the documents as packed sequences to tilewise.attention_varlen."
    )


def _is_mapped(ids: Tensor | None) -> bool:
    """Return whether a vmap at any level holds the ids."""
    levels = torch._C._functorch
    while ids is not None and levels.is_gradtrackingtensor(ids):
        ids = levels.get_unwrapped(ids)
    return ids is not None and levels.is_batchedtensor(ids)


def in_layout_of(q: Tensor, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return a packed call's o and lse in the layout of q: ``(batch, seqlen_q, heads_q, head_dim_v)``, ``(batch, heads_q, seqlen_q)``."""
    batch, rows = q.shape[:2]
    return o.unflatten(0, (batch, rows)), lse.unflatten(1, (batch, rows)).transpose(0, 1).contiguous()


def _parted(mask: Mask) -> tuple[list[str], Tensor | None]:
    """Return the parts of a mask beside its documents, and their ids; None where there is no such one tensor."""
    mask = getattr(as_mask(mask), "of", mask)  # without lists of tiles, which are those of the whole sequence
    terms = mask.text.split(" & ")
    others = [x for x in terms if not (x.startswith(DOCUMENTS) and x.count("(") == 1)]
    sources = mask.sources
    return others, sources[0] if len(terms) - len(others) == 1 and len(sources) == 1 else None


def _cu_seqlens(ids: Tensor, batch: int, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """Return where each document begins among the queries and among the keys of the whole batch: int64."""
    begins = torch.ones((batch, seqlen_k), dtype=torch.bool, device=ids.device)
    begins[:, 1:] = ids[..., 1:] != ids[..., :-1]
    b, j = begins.nonzero(as_tuple=True)
    ends_q, ends_k = ids.new_tensor([batch * seqlen_q]).long(), ids.new_tensor([batch * seqlen_k]).long()
    first = b * seqlen_q + (j - (seqlen_k - seqlen_q)).clamp(0, seqlen_q)
    return torch.cat([first, ends_q]), torch.cat([b * seqlen_k + j, ends_k])
