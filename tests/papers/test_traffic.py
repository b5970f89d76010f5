"""The orders of the loops are right and counted as the closed forms say, and a profiler's table is read kernel by kernel."""

import pytest
import torch

from tests.papers import bounds
from tilewise.backends.triton import interpreting
from tilewise_papers import traffic

SIZES = bounds.Sizes(256, 256, 64, 64)


@pytest.fixture
def orders(monkeypatch):
    """The orders at a size for Triton's interpreter, by name."""
    monkeypatch.setattr(traffic, "SEQLEN", 256)
    monkeypatch.setattr(traffic, "WIDTHS", (64, 128))
    return {order.name: order for order in traffic.orders()}


@pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)")
@pytest.mark.parametrize("name", ["flash1-64", "flash1-sparse-50%", "flash2-sparse-12.5%"])
def test_an_order_computes_attention(orders, name):
    assert traffic.share(orders[name], "cpu") <= 1
    order, qkv = orders[name], traffic.tensors(2, "cpu")
    pattern = None if order.pattern is None else order.pattern.to(torch.int8)
    assert torch.equal(order.run(*qkv, pattern)[:1], order.run(*(x[:1].contiguous() for x in qkv), pattern))


def test_blocks_that_do_not_divide_the_sequence_are_refused():
    flash1 = pytest.importorskip("tilewise_papers.flash1_triton")
    q = torch.zeros(1, 100, 16)
    with pytest.raises(ValueError, match="blocks of 64 queries and 128 keys do not divide a sequence of 100"):
        flash1.forward(q, q, q, 64, 128)


def test_an_order_is_counted_as_the_closed_forms_say(orders):
    def both(exact):
        return exact.reads.bytes(2), exact.writes.bytes(2)

    assert orders["flash1-64"].count() == both(bounds.flash1_forward(SIZES, 64, 64))
    assert orders["flash2"].count() == both(bounds.flash2_forward(SIZES, 64, 128))
    half = orders["flash1-sparse-50%"]
    assert half.count() == both(bounds.flash1_forward(SIZES, 64, 128, half.pattern.numpy()))
    whole, kept = orders["flash2"].count()[0], orders["flash2-sparse-50%"].count()[0]
    q = 256 * 64 * 2
    assert (kept - q) / (whole - q) == pytest.approx(half.pattern.float().mean().item())


def test_kernels_are_summed_between_marks():
    names = [metric for pair in traffic.COUNTERS.values() for metric in pair]
    head = ",".join(f'"{name}"' for name in ("ID", "Kernel Name", *names))
    rows = [
        ("", "", *["byte"] * 4),
        (0, traffic.MARK, *[9] * 4),
        (1, "fill", 1, 2, 3, 4),
        (2, "forward", "1,000", 20, 30, 40),
    ]
    rows += [(3, traffic.MARK, *[9] * 4), (4, "other", 5, 6, 7, 8)]
    lines = ["==PROF== Connected", head, *(",".join(f'"{cell}"' for cell in row) for row in rows)]
    assert traffic.sums("\n".join(lines)) == [
        {"dram": (1001.0, 22.0), "l2": (33.0, 44.0)},
        {"dram": (5.0, 6.0), "l2": (7.0, 8.0)},
    ]
