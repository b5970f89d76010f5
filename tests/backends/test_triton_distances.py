"""Tensors that a score reads at the distance of a pair, in Triton's kernels, by its interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.backends.contract import agree, run
from tests.test_distances import t5
from tilewise.backends.triton import Triton, interpreting, sheet
from tilewise.backends.triton.config import INTERPRETED
from tilewise.backends.triton.host import leaf_sums
from tilewise.backends.triton.host.leaf_sums import Strips
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.tiles import Tiles
from tilewise.leaf_gradients import DIAGONALS, ROWS

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities that the mathematics selects away
]


def clipped(t, low: int, high: int):
    return tw.score(lambda s, b, h, i, j: s + t[h, (i - j).clamp(low, high) - low])


def sums(c) -> list[tuple[str, tuple[int | None, int | None]]]:
    return [(read.how, read.distances) for read in Plan(c.p, INTERPRETED).emitted.reads]


def test_far_from_the_diagonal_a_table_is_read_once_and_summed_by_rows():
    t = normal(2, 9).requires_grad_()
    c = call(*qkv(batch=1, nq=200, nk=200, hq=2, hk=1), causal=True, deterministic=True, score=clipped(t, 0, 8))
    assert sums(c) == [(DIAGONALS, (0, 8)), (ROWS, (8, None))]
    assert "near" in Plan(c.p, INTERPRETED).emitted.functions
    agree(Triton(), c)


def test_a_table_of_all_distances_composes_with_scores_dropout_windows_and_sinks(monkeypatch):
    monkeypatch.setattr(leaf_sums, "LEAST_SLOTS", 1)
    monkeypatch.setattr(leaf_sums, "BUSY", 1000)
    t = normal(2, 400).requires_grad_()
    score = tw.softcap(3.0) >> tw.score(lambda s, b, h, i, j: s * t[h, i - j + 200].tanh() + t[h, 5] * s)
    c = call(
        *qkv(batch=1, nq=130, nk=150, hq=2, hk=1), mask=tw.window(70, 40), score=score, dropout_p=0.3, dropout_seed=3, sink=normal(2)
    )  # fmt: skip
    (strips,) = (
        Strips.of(Plan(c.p, INTERPRETED), x) for x in Plan(c.p, INTERPRETED).emitted.reads if x.how == DIAGONALS
    )
    assert strips.number > 2
    assert strips.parts > 1
    assert "near" not in Plan(c.p, INTERPRETED).emitted.functions
    agree(Triton(), c)


def test_a_far_tile_reads_what_its_kept_pairs_read_though_its_corner_is_hidden():
    # The index turns back where the window ends: of the tile at (192, 0), with distances 129 to 255, the corner reads another element.
    t = normal(9).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + t[torch.where(i - j < 180, (i - j).clamp(0, 8), 3)])
    c = call(*qkv(batch=1, nq=320, nk=320, hq=1, hk=1), mask=tw.window(left=179, right=0), score=score)
    assert sums(c) == [(DIAGONALS, (0, 8)), (ROWS, (8, None))]
    agree(Triton(), c)


def test_buckets_of_packed_sequences_are_summed_over_all_of_them():
    t = normal(8, 2).requires_grad_()
    cu = torch.tensor([0, 70, 70, 190, 230], dtype=torch.int32)
    q, k, v = (x[0] for x in qkv(batch=1, nq=240, nk=240, hq=2, hk=2))
    score = tw.score(lambda s, b, h, i, j: s + t[t5(i - j), h])
    agree(Triton(), call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True, score=score))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_table_of_all_distances_is_summed_from_the_sheet_of_ds_that_dq_is_made_of(dtype, monkeypatch):
    monkeypatch.setattr(sheet, "sheet_memory", lambda p: 2 * 128 * 128 * dtype.itemsize)  # one head's
    monkeypatch.setattr(leaf_sums, "LEAST_SLOTS", 1)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda x, *size, **more: empty(x, *size, **more).fill_(torch.nan))
    t = normal(2, 260).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + t[h, i - j + 130])
    c = call(*qkv(batch=2, nq=110, nk=80, hq=2, hk=2, d=8, dv=8, dtype=dtype), mask=tw.window(90, 30), score=score)
    assert len(Plan(c.p, INTERPRETED).sheet) == 2
    assert [how for how, _ in sums(c)] == [DIAGONALS]
    agree(Triton(replace(INTERPRETED, dkdv=Tiles(64, 32, 4, 1))), c)


def test_keys_that_no_query_sees_never_touch_the_gradient_of_a_table():
    t, mask = normal(2, 9).requires_grad_(), tw.key_range(5, 60) & tw.keep(lambda b, h, i, j: j % 3 != 0)
    q, k, v = qkv(batch=1, nq=70, nk=70, hq=2, hk=1)
    hidden = (torch.arange(70) < 5) | (torch.arange(70) >= 60) | (torch.arange(70) % 3 == 0)
    dirty = (x.masked_fill(hidden.view(1, -1, 1, 1), torch.nan) for x in (k, v))
    clean, bad = (run(Triton(), call(q, *x, mask=mask, score=clipped(t, -4, 4))) for x in ((k, v), dirty))
    assert all(torch.equal(bad[name], x) for name, x in clean.items())


def test_second_derivatives_of_a_table_are_refused_when_deterministic():
    t = normal(2, 9).requires_grad_()
    c = call(*qkv(batch=1, hq=2, hk=1), causal=True, deterministic=True, score=clipped(t, 0, 8))
    assert any("read by distance" in reason for reason in Triton().without_tangents(c.p, second=True))
    assert not Triton().unsupported(c.p)
