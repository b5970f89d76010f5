"""A picture shows what :mod:`tilewise.planning.tiles` says, and the bytes that a counted machine moves."""

import math
import re
import sys

import pytest
import torch

import tilewise as tw
from tilewise.pictures.terminal import coarsened, score_text, tiles_text
from tilewise.pictures.view import ScoreView, mask_view
from tilewise.planning.tiles import EMPTY, FULL, PARTIAL
from tilewise_papers import flash2
from tilewise_papers.head import Blocks, Head
from tilewise_papers.machine import Level, Machine


def drawn(mask, lengths, tile, width=80):
    return tiles_text(mask_view(mask, lengths, tile), width).plain.splitlines()


def test_the_terminal_shows_each_tile():
    *lines, legend = drawn(tw.causal() & tw.window(left=4), (10, 14), (4, 4))
    assert lines == ["▒▒▒▒····", "··▒▒▒▒··", "····▒▒▒▒"]
    assert legend.endswith("a cell is a tile")
    assert drawn(tw.causal(), (12, 12), (4, 4))[:3] == ["▒▒····", "██▒▒··", "████▒▒"]


def test_many_tiles_share_a_cell_that_is_full_or_skipped_where_all_of_them_are():
    status = torch.tensor([[FULL, FULL, PARTIAL], [FULL, FULL, EMPTY], [EMPTY, EMPTY, EMPTY]], dtype=torch.uint8)
    assert coarsened(status, (2, 2))[0].tolist() == [[FULL, PARTIAL], [EMPTY, EMPTY]]
    lines = drawn(tw.causal(), (4096, 4096), (16, 16))
    assert len(lines) <= 50
    assert "a cell is 7 x 7 tiles" in lines[-1]


@pytest.mark.parametrize("causal", [False, True])
def test_the_bytes_are_those_that_the_counted_machine_moves(causal):
    view = mask_view(tw.causal() if causal else tw.window(), (37, 37), (8, 12))
    counted = Machine((Level("HBM", math.inf, 1.0), Level("SRAM", math.inf, 1.0)), dry=True)
    flash2.forward(counted, Head.blank(37, 16, causal=causal), Blocks(8, 12))
    moved = counted.counts.slow
    assert view.bytes_moved(16, 2) == moved.bytes
    assert view.bytes_moved(16, 2, masked=False) >= view.bytes_moved(16, 2)


def test_a_bias_is_read_for_each_pair_of_a_visited_tile_and_slopes_are_not():
    view = mask_view(tw.causal(), (16, 16), (8, 8))
    bias, slopes = (ScoreView.of(x, (16, 16)) for x in (tw.bias(torch.zeros(16, 16)), tw.alibi(torch.ones(1))))
    assert (bias.pair_bytes, slopes.pair_bytes) == (4, 0)
    assert view.bytes_moved(8, 2, pair_bytes=4) - view.bytes_moved(8, 2) == 4 * 3 * 64


def test_a_score_is_shown_by_place_or_as_a_curve():
    view = mask_view(tw.causal(), (8, 8), (4, 4))
    by_place = score_text(ScoreView.of(tw.alibi(torch.tensor([0.5])), (8, 8)), view, 80).plain.splitlines()
    assert by_place[0].endswith("at s = 0: from -2 (blank) to 0 (full)")
    assert by_place[1:] == ["██··", "  ██"]
    assert "50 → 27.93" in score_text(ScoreView.of(tw.softcap(30), (8, 8)), view, 80).plain


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: mask_view(tw.causal(), (8, 8), (0, 4)), "at least one query"),
        (lambda: mask_view(tw.causal(), (1 << 20, 1 << 20), (1, 1)), "larger tiles"),
        (lambda: mask_view(tw.documents(torch.zeros(9).long()), (8, 8), (4, 4)), "must be seqlen_k = 8"),
        (lambda: mask_view(tw.key_lengths(torch.tensor([3, 4])), (8, 8), (4, 4), (2, 0)), "batch 2 is out of range"),
        (lambda: ScoreView.of(tw.alibi(torch.ones(3)), (8, 8), (0, 3)), "head 3 is out of range"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()


# -- explain(...).plot() -------------------------------------------------------------------------------------------


def titles(figure):
    return [axes.get_title() for axes in figure.axes if axes.get_title()]


def test_explain_plots_the_tiles_of_the_backend_that_runs(tmp_path):
    q, k = torch.randn(2, 100, 4, 16), torch.randn(2, 130, 2, 16)
    mask, score = tw.causal() & tw.key_lengths(torch.tensor([130, 40])), tw.alibi(torch.rand(4, requires_grad=True))
    for backend in ("cpu", "portable"):
        found = tw.explain(q, k, k, mask=mask, score=score, backend=backend)
        assert re.match(rf".*tiles {found.tile[0]} (of \d+ heads )?x {found.tile[1]}\b", found.tiles)
        figure = found.plot(batch=1, head=3)
        assert "key_range" in titles(figure)[0]
        assert len(titles(figure)) == 2
    figure.savefig(tmp_path / "call.png")
    with pytest.raises(ValueError, match="batch 2 is out of range: the call has 2"):
        found.plot(batch=2)


def test_explain_plots_a_sequence_of_a_packed_call_and_of_a_cache():
    q, ends = torch.randn(90, 2, 16), torch.tensor([0, 30, 90])
    figure = tw.explain(q, q, q, cu_seqlens_q=ends, causal=True).plot(batch=1)
    assert figure.axes[0].get_xlim() == (0, 60)
    cache = tw.dense_cache(torch.randn(2, 50, 2, 16), torch.randn(2, 50, 2, 16), torch.tensor([20, 50]).int())
    figure = tw.explain(torch.randn(2, 4, 2, 16), cache, causal=True).plot(batch=0)
    assert (figure.axes[0].get_xlim(), figure.axes[0].get_ylim()) == ((0, 20), (4, 0))


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    q = torch.randn(1, 8, 1, 8)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        tw.explain(q, q, q).plot()


@pytest.mark.parametrize(
    "mask",
    [
        tw.keep(lambda b, h, i, j: False),
        tw.dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
        tw.block_sparse(torch.zeros(1, 1, dtype=torch.bool), 64, 64),
    ],
    ids=["keep", "dense", "block_sparse"],
)
def test_a_constant_mask_is_shown(mask):
    assert torch.equal(mask_view(mask, (3, 3), (2, 2)).status, torch.full((2, 2), EMPTY))
