"""What is known of reads at the distance of a pair, against the indices of all pairs."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tilewise.distances import by_distance, near, visible
from tilewise.expr import lookups, parse

# The text of an index, and whether it depends on i - j alone.
INDICES = {
    "i - j": True,
    "j - i + off": True,
    "(i + off - j) * 3 + seqlen_k": True,
    "2 * i - 2 * j": True,
    "(i - j) % 7": True,
    "int(log(float(abs(i - j) + 1)) * 4)": True,
    "int0[i - j + 9]": True,
    "i * h - j * h": False,  # it does, but only products with a number are followed
    "i + j": False,
    "i - 2 * j": False,
    "i // 2 - j // 2": False,
    "float(i) - float(j)": False,
    "int(s) + i - j": False,
    "i": False,
    "h": False,
}


@pytest.mark.parametrize("text", INDICES)
def test_an_index_is_known_to_depend_on_the_distance_alone(text):
    assert by_distance(parse(text)) == INDICES[text]


def t5(distance, buckets: int = 8, far: int = 40):
    """T5's buckets of both directions (Raffel et al., 2020)."""
    half, exact = buckets // 2, buckets // 4
    back = distance.abs()
    large = exact + (torch.log(back.float() / exact) / math.log(far / exact) * (half - exact)).int()
    return torch.where(distance < 0, half, 0) + torch.where(back < exact, back, large.clamp(max=half - 1))


# An index of a table of 12 rows, the mask, and whether the index is constant far below and far above the diagonal.
CASES = {
    "clipped": (lambda d: d.clamp(-4, 5) + 4, None, True, True),
    "clipped, causal": (lambda d: d.clamp(-4, 5) + 4, tw.causal(), False, True),
    "clipped by the table": (lambda d: d, None, True, True),
    "buckets": (t5, None, True, True),
    "window": (lambda d: d.clamp(0, 9), tw.window(30, 200), True, False),
    "all": (lambda d: d % 12, None, False, False),
    "short of a run": (lambda d: d.clamp(-140, 100) // 20 + 7, None, False, False),
    "constant": (lambda d: d * 0 + 3, None, True, False),
}


@pytest.mark.parametrize("name", CASES)
def test_beyond_the_near_distances_an_index_is_constant(name):
    index, mask, below, above = CASES[name]
    nq, nk, rows = 200, 230, 12
    t = normal(rows).requires_grad_()
    c = call(
        *qkv(batch=1, nq=nq, nk=nk, hq=1, hk=1, d=8),
        mask=mask,
        score=tw.score(lambda s, b, h, i, j: s + t[index(i - j)]),
    )
    found = near(c.p, lookups(c.p.spec.score)[0])
    assert (found.below, found.above) == (below, above)
    shown = tw.show_mask(tw.key_range(0, nk) if mask is None else mask, nq, nk).splitlines()
    kept = torch.tensor([[x == "1" for x in line if x in "1."] for line in shown])
    distance = torch.arange(nq).view(-1, 1) - torch.arange(nk)
    low, high = visible(c.p)
    assert (low, high) == (int(distance[kept].min()), int(distance[kept].max()))
    value = index(distance).clamp(0, rows - 1).expand(nq, nk)
    for side in (distance < found.start, distance >= found.stop):
        assert len(value[side & (distance >= low) & (distance <= high)].unique()) <= 1


def test_a_bucket_of_each_pair_that_a_tensor_holds_is_near_everywhere():
    table, buckets = normal(4).requires_grad_(), torch.arange(60) // 15
    score = tw.score(lambda s, b, h, i, j: s + table[buckets[i - j + 29]])
    c = call(*qkv(batch=1, nq=30, nk=30, hq=1, hk=1, d=8), score=score)
    read = next(x for x in lookups(c.p.spec.score) if x.args[0][1] in c.p.spec.grad_slots)
    assert by_distance(*read.args[1:])
    assert near(c.p, read).everywhere


def test_heads_that_clip_at_their_own_distance_are_near_everywhere():
    table = normal(40).requires_grad_()
    score = tw.score(lambda s, b, h, i, j: s + table[torch.minimum(i - j, h * 3)])
    c = call(*qkv(batch=1, nq=200, nk=30, hq=1, hk=1, d=8), score=score)
    read = lookups(c.p.spec.score)[0]
    assert by_distance(*read.args[1:])
    assert near(c.p, read).everywhere
