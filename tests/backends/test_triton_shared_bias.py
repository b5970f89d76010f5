"""A bias that the batch shares: dQ and its gradient in one pass, some batch elements at a time (kernels.shared_bias)."""

import pytest
import torch

pytest.importorskip("triton", reason="the package triton is not installed")

import tilewise as tw
from tests.backends.contract import agree, call, normal, qkv, run
from tilewise.backends.triton import Triton, interpreting, shared_bias
from tilewise.backends.triton.config import INTERPRETED, Config
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.tiles import Tiles

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="kernels are not interpreted (tests/conftest.py)"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of infinities that the mathematics selects away
]

HALF = torch.bfloat16
TILES = {"interpreted": INTERPRETED, "tma": Config(*[Tiles(32, 32, 4, 3, tma=True)] * 3)}


def triangle(batch, nq, nk, *, index=None, shape=None, dtype=HALF, hq=4, hk=2, d=16, **options):
    """The call of a bias ``(h, i, j)`` that wants its gradient; ``index`` reads one of another ``shape``."""
    t = normal(*(shape or (hq, nq, nk)), dtype=dtype).requires_grad_()
    score = tw.bias(t) if index is None else tw.score(lambda s, b, h, i, j: s + index(t, h, i, j))
    return call(*qkv(batch=batch, nq=nq, nk=nk, hq=hq, hk=hk, d=d, dv=d, dtype=dtype), score=score, **options)


def lengths(*keys):
    return tw.key_lengths(torch.tensor(keys, dtype=torch.int32))


CALLS = {
    "even": lambda: triangle(4, 64, 64),
    "odd": lambda: triangle(3, 65, 67),
    "by-descriptor": lambda: triangle(5, 66, 72),
    "one-group-and-a-half": lambda: triangle(6, 40, 72, d=32),
    "two-at-a-time": lambda: triangle(3, 40, 72, d=64, hk=4),
    "float16": lambda: triangle(2, 70, 72, dtype=torch.float16),
    "one-head": lambda: triangle(3, 40, 72, hq=1, hk=1, shape=(40, 72)),
    "causal": lambda: triangle(3, 70, 72, causal=True),
    "window": lambda: triangle(3, 130, 136, mask=tw.window(20, 5)),
    "lengths": lambda: triangle(5, 70, 72, mask=lengths(72, 65, 1, 0, 33)),
    "lengths-odd": lambda: triangle(3, 33, 67, mask=lengths(67, 5, 0)),
    "no-keys": lambda: triangle(2, 40, 72, mask=lengths(0, 0)),
    "rows-without-keys": lambda: triangle(3, 90, 40, causal=True),
    "dropout": lambda: triangle(3, 40, 72, dropout_p=0.3, dropout_seed=3),
    "one-head-of-larger-axes": lambda: triangle(
        3, 40, 66, hq=1, hk=1, index=lambda t, h, i, j: t[1, i, j], shape=(2, 41, 72)
    ),
    "larger-axes": lambda: triangle(3, 40, 66, index=lambda t, h, i, j: t[1, h, i, j], shape=(2, 5, 41, 72)),
}


@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("name", CALLS)
def test_dq_and_the_bias_gradient_agree(name, tiles):
    c = CALLS[name]()
    assert Plan(c.p, TILES[tiles]).shared
    agree(Triton(TILES[tiles]), c)


def test_copies_of_some_elements_each_add_up(monkeypatch):
    monkeypatch.setattr(shared_bias, "RESIDENT", 10**6)  # as if there were room for all programs at once
    c = triangle(11, 40, 72)
    sums = Plan(c.p, INTERPRETED).shared
    assert (sums.batches, sums.of_copy, sums.copies) == (4, 4, 3)
    agree(Triton(INTERPRETED), c)


def test_copies_have_a_most_of_memory(monkeypatch):
    monkeypatch.setattr(shared_bias, "RESIDENT", 10**6)
    tile = 4 * 64 * 64
    monkeypatch.setattr(shared_bias, "COPIES_BYTES", 2 * 4 * 2 * tile)
    sums = Plan(triangle(11, 40, 72).p, INTERPRETED).shared
    assert (sums.of_copy, sums.copies) == (8, 2)


def test_nan_in_keys_past_their_length_reaches_no_gradient():
    c = triangle(3, 40, 72, mask=lengths(72, 30, 0))
    clean = run(Triton(INTERPRETED), c)
    with torch.no_grad():
        for x in (c.t.k, c.t.v):
            x[1, 30:], x[2] = torch.nan, torch.nan
    found = run(Triton(INTERPRETED), c)
    assert all(torch.equal(clean[name], found[name]) for name in clean)


def test_the_same_call_has_the_same_bits():
    c = triangle(6, 66, 72, deterministic=True)
    first, second = run(Triton(INTERPRETED), c), run(Triton(INTERPRETED), c)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_no_such_bias_is_summed_otherwise():
    shared = lambda c: Plan(c.p, INTERPRETED).shared  # noqa: E731
    assert shared(triangle(2, 40, 40))
    assert not shared(triangle(1, 40, 40))  # each pair has an element of its own
    assert not shared(triangle(2, 40, 40, shape=(40, 40)))  # heads share it too
    assert not shared(triangle(2, 40, 40, d=80))
    assert not shared(triangle(2, 40, 40, dtype=torch.float32))
    assert not shared(triangle(2, 40, 40, index=lambda t, h, i, j: t[h, j, i]))
    assert not shared(triangle(2, 40, 40, index=lambda t, h, i, j: t[h, i, j].sin()))
    assert not shared(triangle(2, 40, 40, mask=tw.keep(lambda b, h, i, j: (i + j) % 3 > 0)))  # tiles come as lists
