"""Peers are given the very masks that the cases name."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench import check, peers
from bench.cases import MASKS, draw, named

N = 200


def kept(ends: Tensor) -> Tensor:
    """The pairs that lie in the intervals [0, e0), [e1, e2) and so on of each query, (queries, keys)."""
    j = torch.arange(N)
    found = j < ends[0, :, None]
    for begin, end in zip(ends[1::2], ends[2::2], strict=True):
        found |= (j >= begin[:, None]) & (j < end[:, None])
    return found


@pytest.mark.parametrize(
    "mask",
    [
        "causal",
        "window-8",
        "window-or-first",
        "key-lengths",
        "texts-window-512",
        "block-causal-1024",
        "sparse-16",
        "nothing",
        None,
    ],
)
def test_the_intervals_that_cudnn_flex_is_given_hold_the_pairs_of_the_mask(mask):
    sizes = {"batch": 2, "seqlen_q": N, "seqlen_k": N, "heads_q": 1, "heads_k": 1, "head_dim": 8, "head_dim_v": 8}
    x = draw(replace(named("h200-causal-d128-h16-16-n16384"), mask=mask, **sizes))
    (ends,) = peers.interval_ends(x, rows=64)
    keep = MASKS[mask].keep(x) if mask else lambda b, h, i, j: (i >= 0) & (j >= 0)
    i, j = torch.arange(N)[:, None], torch.arange(N)
    want = [keep(torch.tensor(b), torch.tensor(0), i, j).expand(N, N) for b in range(2)]
    assert torch.equal(kept(ends), torch.cat(want))


@pytest.mark.parametrize("name", ["windows-n49", "triangle-n384-d16-bfloat16"])
def test_sdpa_is_given_a_bias_with_its_mask(name):
    case = named(name)
    x = draw(replace(case, batch=8, seqlen_q=49, seqlen_k=49, dtype="float32"))
    want, sdpa = check.expected(x), peers.all_contestants()["sdpa"]
    assert sdpa.unsupported(case, "cuda") == []
    assert check.verdict(check.compare(check.results(sdpa.prepare(x), x, want.do), want), ours=False) == "green"
    assert "mask documents" in sdpa.unsupported(replace(case, mask="documents", score=None), "cuda")


def test_flex_attention_is_told_of_every_mask_that_reads_the_batch_or_the_head():
    sizes = {"batch": 2, "seqlen_q": 67, "seqlen_k": 67, "heads_q": 2, "heads_k": 2}
    i, j, reading = torch.arange(67)[:, None], torch.arange(67), set()
    for mask in MASKS:
        keep = MASKS[mask].keep(draw(replace(named("contract-n129-causal"), mask=mask, **sizes)))
        first, *others = (keep(torch.tensor(b), torch.tensor(h), i, j).expand(67, 67) for b in (0, 1) for h in (0, 1))
        reading |= {mask for other in others if not torch.equal(first, other)}
    assert reading == set(peers.BY_HEAD)
