"""How the gradients of a score's tensors are summed, against autograd."""

from __future__ import annotations

import pytest
import torch

import tilewise as tw
from bench.testing import call, normal, qkv
from tests.test_expr import COMPUTED_INDEX, NAMES, SHAPE, environment
from tilewise.expr import evaluate, parse, trace
from tilewise.leaf_gradients import COLUMNS, DIAGONALS, ROWS, SCATTER, STORE, TILES, classify, read_adjoint

# Shape, score, how its gradient is summed, the indices over which it is broadcast.
CLASSES = {
    "rows": ((4, 70), lambda t: lambda s, b, h, i, j: s * t[h, i], ROWS, ()),
    "heads": ((4,), lambda t: lambda s, b, h, i, j: s * t[h], ROWS, ()),
    "columns": ((70,), lambda t: lambda s, b, h, i, j: s + t[j] * s, COLUMNS, ()),
    "pairs": ((2, 4, 70, 70), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j], STORE, ()),
    "broadcast-pairs": ((70, 70), lambda t: lambda s, b, h, i, j: s + t[j, i], TILES, ("b", "h")),
    "relative": ((4, 9), lambda t: lambda s, b, h, i, j: s + t[h, (i - j) % 9], DIAGONALS, ()),
    "computed": ((4, 9), lambda t: lambda s, b, h, i, j: s + t[h, (i + j) % 9], SCATTER, ()),
    "diagonal": ((70, 70), lambda t: lambda s, b, h, i, j: s + t[i, i] + t[i, j], SCATTER, ()),
}


@pytest.mark.parametrize("name", CLASSES)
def test_how_a_gradient_is_summed_follows_from_its_index(name):
    shape, build, how, loops = CLASSES[name]
    read = classify(call(*qkv(), score=tw.score(build(normal(*shape).requires_grad_()))).p)[-1]
    assert (read.how, read.loops) == (how, loops)


def test_pairs_are_apart_in_what_is_an_index_by_itself():
    t = normal(4, 9, 70).requires_grad_()
    (read,) = classify(call(*qkv(), score=tw.score(lambda s, b, h, i, j: s + t[h, (i - j) % 9, j])).p)
    assert read.apart == {"h", "j"}


READS = {
    "scalar": ((), "float0[()]"),
    "head": ((3,), "float0[h]"),
    "row": ((4,), "float0[i]"),
    "column": ((5,), "float0[j]"),
    "pair": ((4, 5), "float0[i, j]"),
    "pair-swapped": ((5, 4), "float0[j, i]"),
    "all": (SHAPE, "float0[b, h, i, j]"),
    "all-reversed": (SHAPE[::-1], "float0[j, i, h, b]"),
    "broadcast-heads": ((2, 1, 4, 5), "float0[b, 0, i, j]"),
    "constant-inside": ((3, 7, 4), "float0[h, 6, i]"),
    "only-constants": ((2, 3), "float0[1, 2]"),
    "larger-than-the-range": ((3, 9), "float0[h, i]"),
    "smaller-than-the-range": ((3, 2), "float0[h, i]"),
    "of-size-one": ((1, 4), "float0[h, i]"),
    "diagonal": ((4, 4), "float0[i, i]"),
    "relative": ((3, 11), "float0[h, i - j + 5]"),
    "relative-clamped": ((3, 4), "float0[h, i - j + 1]"),
    "far-out-of-range": ((3, 4), "float0[h, i + 100]"),
    "buckets": ((3, 2), "float0[h, (i * 5 + j) // 10]"),
    "modulo": ((2, 2), "float0[i % 2, j % 2]"),
    "through-a-table": ((3, 4), "float0[h, int1[j]]"),
    "through-the-score": ((5,), "float0[int(s) + 2]"),
    "offset": ((3, 6), "float0[off, i]"),
}


@pytest.mark.parametrize("starts", [(0, 0, 0, 0), (0, 0, 3, 2)], ids=["whole", "a-tile"])
@pytest.mark.parametrize(("shape", "text"), READS.values(), ids=READS)
def test_the_adjoint_of_a_read_is_autograds(shape, text, starts):
    leaf = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
    tables = [leaf, torch.tensor([2, 0, 3, 1, 0, 7])]
    env = environment(starts=starts) | {"off": torch.tensor(1)}
    e = parse(text)
    g = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    value = evaluate([e], env, tables, torch.float64)[0].expand(SHAPE)
    (expected,) = torch.autograd.grad((value * g).sum(), leaf)
    got = torch.ones(shape, dtype=torch.float64)
    read_adjoint(got, e, env, tables, g)
    torch.testing.assert_close(got - 1, expected, rtol=1e-12, atol=1e-12)


def test_the_adjoint_of_a_computed_index_goes_to_the_element_that_was_read():
    leaf = torch.zeros(400, dtype=torch.float64, requires_grad=True)
    e = parse(f"float0[{trace(COMPUTED_INDEX, NAMES)}]")
    env = {"i": torch.arange(130).view(1, 1, -1, 1)}
    (expected,) = torch.autograd.grad(evaluate([e], env, [leaf], torch.float64)[0].sum(), leaf)
    got = torch.zeros(400, dtype=torch.float64)
    read_adjoint(got, e, env, [leaf], torch.ones(1, 1, 130, 1, dtype=torch.float64))
    assert torch.equal(got, expected)


def test_the_adjoint_of_a_scattered_read_repeats_bit_for_bit():
    """With two threads or more (OMP_NUM_THREADS), ``index_put_`` would add in any order."""
    e = parse("float0[h, (i + j) % 2]")
    env = {"h": torch.zeros(1, 1).long(), "i": torch.arange(512).view(-1, 1), "j": torch.arange(512).view(1, -1)}
    g = torch.randn(512, 512, generator=torch.Generator().manual_seed(4))
    runs = [torch.zeros(1, 2) for _ in range(8)]
    for run in runs:
        read_adjoint(run, e, env, runs, g)
    assert all(torch.equal(run, runs[0]) for run in runs)


def test_the_adjoint_of_a_sequence_without_keys_is_zero():
    grad = torch.zeros(3, 4)
    env = environment() | {"j": torch.arange(0).view(1, 1, 1, 0)}
    for text in ("float0[h, i]", "float0[h, j]", "float0[h, i - j]"):
        read_adjoint(grad, parse(text), env, [grad], torch.zeros(2, 3, 4, 0))
    assert torch.equal(grad, torch.zeros(3, 4))
