"""Calls under ``torch.set_default_device`` of another device than their tensors', as scripts for a GPU set it at their top."""

import pytest
import torch

import tilewise as tw
from tilewise import selfcheck
from tilewise.compat import xformers
from tilewise.pictures import terminal
from tilewise.pictures.view import ScoreView, mask_view

IDS = torch.arange(40) // 7
Q = torch.randn(1, 40, 2, 16, generator=torch.Generator().manual_seed(1))
CPU = torch.device("cpu")


def blocks():
    bias = xformers.attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([10, 30], [0, 5, 40], [5, 30], device=CPU)
    return xformers.memory_efficient_attention(Q, Q, Q, bias).tolist(), bias.materialize((40, 40)).tolist()


def drawn_score():
    view = mask_view(tw.documents(IDS), (40, 40), (8, 8))
    shown = (ScoreView.of(s, (40, 40)) for s in (tw.alibi(SLOPES), tw.softcap(5.0)))
    return [str(terminal.score_text(s, view, 40)) for s in shown], str(terminal.tiles_text(view, 40)), view.summary()


def verified():
    rows = selfcheck.verify("cpu", (torch.float32,), ("causal", "softcap")).rows
    return [(row.backend, row.ok) for row in rows]


SLOPES = torch.tensor([0.5, 0.25])
CALLS = {
    "a mask without tensors is shown": lambda: tw.show_mask(tw.causal() & tw.window(2), 5, 8),
    "documents are shown": lambda: tw.show_mask(tw.documents(IDS), 40),
    "a function of a tensor is shown": lambda: tw.show_mask(lambda b, h, i, j: j < IDS[i] * 7, 40),
    "selected keys are shown": lambda: tw.show_mask(tw.selected(IDS.view(1, 1, 40, 1)), 40),
    "tiles and scores are drawn": drawn_score,
    "a call is explained": lambda: str(tw.explain(Q, Q, Q, mask=tw.documents(IDS), score=tw.alibi(SLOPES))),
    "blocks of xformers": blocks,
    "the machine is verified": verified,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_on_the_cpu_is_the_same_under_another_default_device(name):
    expected = CALLS[name]()
    with torch.device("meta"):  # which holds no numbers: whatever is made there cannot be read
        assert CALLS[name]() == expected


def test_a_machine_is_verified_inside_autocast_as_outside():
    expected = verified()
    assert all(ok for _, ok in expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert verified() == expected
