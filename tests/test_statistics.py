"""The mass of keys and the probabilities of selected ones, beside sums of the oracle's matrix, in calls of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import tilewise as tw
from bench.testing import Call, call, normal, qkv
from tilewise import accuracy, reference
from tilewise.reference import Arithmetic, attend

BACKENDS = ["reference", "portable", "cpu", "triton"]
NUMPYS = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # in the interpreter, of infinities that are selected away
BF16, F64 = torch.bfloat16, torch.float64


def entries(*shape: int, blocks: int) -> Tensor:
    """Some of them -1, some twice."""
    return torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(0))


CASES = {
    "plain": lambda: (qkv(), {}),
    "mqa-causal-scale": lambda: (qkv(hk=1, nk=90), {"causal": True, "softmax_scale": 0.7}),
    "mask-score-sink": lambda: (
        qkv(hk=1),
        {
            "mask": tw.window(20, 5) & tw.key_lengths(torch.tensor([60, 0])),
            "score": tw.softcap(2.0) >> tw.alibi(normal(4).abs()),
            "sink": normal(4),
        },
    ),
    "selected": lambda: (qkv(), {"mask": tw.causal() & tw.selected(entries(2, 2, 70, 9, blocks=70))}),
    "bfloat16": lambda: (qkv(dtype=BF16), {"mask": tw.window(20, 5), "sink": normal(4, dtype=BF16)}),
    "float64": lambda: (qkv(dtype=F64), {"score": tw.bias(normal(1, 4, 70, 70, dtype=F64))}),
}


def matrices(c: Call, dtype: torch.dtype, orders: int) -> list[Tensor]:
    """The probabilities ``(batch, heads_q, seqlen_q, seqlen_k)``, as a backward computes them again, in a dtype and some orders."""
    return [next(attend(c.p, c.t, Arithmetic(dtype, order))).recomputed() for order in range(orders)]


def eager_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == F64 else dtype


ON_BACKENDS = [(name, backend) for name in CASES for backend in BACKENDS if (name, backend) != ("float64", "triton")]
"""Triton computes in float32."""


@NUMPYS
@pytest.mark.parametrize(("name", "backend"), ON_BACKENDS)
def test_the_mass_of_a_key_is_the_sum_of_its_column(name, backend):
    """Judged beside eager's dV of ones, in v's dtype."""
    (q, k, v), options = CASES[name]()
    found = tw.attention_with_stats(q, k, v, **options, backend=backend, stats=("key_mass",))
    o, lse = tw.attention_with_lse(q, k, v, **options, backend=backend)
    assert torch.equal(found.o, o)
    assert torch.equal(found.lse, lse)
    assert found.max_logit is None
    assert found.key_mass.dtype == lse.dtype
    c = call(q, k, v, **options)
    (oracle,) = (x.unflatten(1, (k.shape[2], -1)).sum((2, 3)) for x in matrices(c, F64, 1))
    ones, zeros = torch.ones_like(o), torch.zeros_like(lse)
    arithmetics = (Arithmetic(eager_dtype(q.dtype), order) for order in range(accuracy.ORDERS))
    eager = [reference.backward(c.p, c.t, ones, zeros, a).dv[..., 0].mT for a in arithmetics]
    error = accuracy.judge("key_mass", found.key_mass.to(v.dtype), oracle, eager)
    assert error.ok, error


def test_the_mass_is_that_before_dropout_and_carries_no_gradient():
    q, k, v = (x.requires_grad_() for x in qkv())
    with_dropout, without = (
        tw.attention_with_stats(q, k, v, causal=True, dropout_p=p, stats=("max_logit", "key_mass")) for p in (0.5, 0.0)
    )
    torch.testing.assert_close(with_dropout.key_mass, without.key_mass)
    assert torch.equal(with_dropout.max_logit, without.max_logit)
    assert not without.key_mass.requires_grad
    grads = [torch.autograd.grad(o.sum(), q) for o in (without.o, tw.attention(q, k, v, causal=True))]
    assert torch.equal(*(x for (x,) in grads))


def test_the_mass_of_packed_sequences_is_that_of_each():
    q, k, v = (x[0] for x in qkv(batch=1))
    cu = torch.tensor([0, 30, 30, 60])
    options = {"causal": True, "stats": ("key_mass",)}
    found = tw.attention_with_stats(q, k, v, cu_seqlens_q=cu, **options).key_mass
    assert found.shape == (2, 70)
    assert (found[:, 60:] == 0).all()
    for start, end in ((0, 30), (30, 60)):
        alone = tw.attention_with_stats(*(x[None, start:end] for x in (q, k, v)), **options).key_mass
        torch.testing.assert_close(found[:, start:end], alone[0])


def test_the_mass_compiles_without_graph_breaks():
    torch._dynamo.reset()
    q, k, v = qkv(nq=20, nk=20)
    run = lambda q: tw.attention_with_stats(q, k, v, causal=True, stats=("key_mass",)).key_mass  # noqa: E731
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q), run(q))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mass_inside_autocast_is_that_of_the_tensors_it_casts(dtype):
    q, k, v = qkv()
    with torch.autocast("cpu", dtype):
        found = tw.attention_with_stats(q, k, v, causal=True, stats=("key_mass",)).key_mass
    alone = tw.attention_with_stats(*(x.to(dtype) for x in (q, k, v)), causal=True, stats=("key_mass",)).key_mass
    assert torch.equal(found, alone)


def test_the_mass_of_meta_tensors_has_a_shape():
    q, k, v = (x.to("meta") for x in qkv())
    assert tw.attention_with_stats(q, k, v, stats=("key_mass",)).key_mass.shape == (2, 2, 70)


def test_what_has_no_mass_says_so():
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r'per must be "row".*\n.*stats must be a tuple of "max_logit" and "key_mass"'):
        tw.attention_with_stats(q, k, v, per="batch", stats=("mass",))
    for stats in ("key_mass", [["key_mass"]]):
        with pytest.raises(ValueError, match=r'such as \("key_mass",\); got .*key_mass'):
            tw.attention_with_stats(q, k, v, stats=stats)
    cache = tw.dense_cache(k, v, torch.tensor([70, 70], dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="key_mass of a cache"):
        tw.attention_with_stats(q, cache, stats=("key_mass",))


def by_entries(matrix: Tensor, indices: Tensor, block: int, block_q: int) -> Tensor:
    """Sum a matrix ``(batch, heads, seqlen_q, seqlen_k)`` over each entry's pairs, entry by entry."""
    batch, heads, seqlen_q, seqlen_k = matrix.shape
    rows, blocks = indices.shape[2], -(-seqlen_k // block)
    tiles = pad(matrix, (0, blocks * block - seqlen_k, 0, rows * block_q - seqlen_q))
    tiles = tiles.view(batch, heads, rows, block_q, blocks, block).sum((3, 5))
    entry = indices.expand(batch, heads, -1, -1)
    before = (entry.unsqueeze(-1) == entry.unsqueeze(-2)).tril(-1).any(-1)
    return torch.where((entry < 0) | before, 0, tiles.gather(-1, entry.clamp(min=0)))


@pytest.mark.parametrize("sizes", [(1, 1), (4, 1), (16, 8)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_probability_of_an_entry_is_the_sum_over_its_pairs(name, sizes, monkeypatch):
    monkeypatch.setattr("tilewise.statistics._CHUNK_ELEMENTS", 5000)  # a few rows at a time
    (q, k, v), options = CASES[name]()
    heads_k, (block, block_q) = k.shape[2], sizes
    lse = tw.attention_with_lse(q, k, v, **options)[1]
    given = {x: options[x] for x in options if x != "sink"}  # which lse holds
    c = call(q, k, v, **options)
    exact, rounded = matrices(c, F64, 1), matrices(c, torch.float32, accuracy.ORDERS)
    for heads, reduce in ((1, "heads"), (1, "group"), (heads_k, "group")):
        indices = entries(1, heads, -(-70 // block_q), 9, blocks=-(-k.shape[1] // block))

        groups = 1 if reduce == "heads" else heads_k
        oracle, *eager = (
            by_entries(x.unflatten(1, (groups, -1)).sum(2), indices, block, block_q) for x in (*exact, *rounded)
        )
        found = tw.probabilities(q, k, lse, indices, block=block, block_q=block_q, reduce=reduce, **given)
        error = accuracy.judge(reduce, found.view(oracle.shape), oracle, eager)
        assert error.ok, error


@NUMPYS
@pytest.mark.parametrize(("name", "backend"), ON_BACKENDS)
def test_probabilities_by_the_lse_of_a_backend_are_those_of_its_attention(name, backend):
    """All keys are entries: the sums over the keys are the rows' probabilities, and those over the queries the masses of the keys."""
    (q, k, v), options = CASES[name]()
    lse = tw.attention_with_lse(q, k, v, **options, backend=backend)[1]
    given = {x: options[x] for x in options if x != "sink"}  # which lse holds
    found = tw.probabilities(q, k, lse, torch.arange(k.shape[1]).expand(1, 1, 70, -1), reduce="group", **given)
    c = call(q, k, v, **options)
    exact, rounded = matrices(c, F64, 1), matrices(c, torch.float32, accuracy.ORDERS)
    oracle, *eager = (x.unflatten(1, (k.shape[2], -1)).sum(2) for x in (*exact, *rounded))
    for what, over in (("masses", 2), ("rows", 3)):
        error = accuracy.judge(what, found.sum(over), oracle.sum(over), [x.sum(over) for x in eager])
        assert error.ok, error


def test_probabilities_of_packed_sequences_are_those_of_each():
    q, k, v = (x[0] for x in qkv(batch=1))
    cu, indices = torch.tensor([0, 30, 30, 70]), entries(3, 1, 40, 5, blocks=30)
    indices[1] = -1  # it has no keys
    lse = tw.attention_varlen_with_lse(q, k, v, cu, causal=True)[1]
    found = tw.probabilities(q, k, lse, indices, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
    assert (found[0, 30:] == 0).all()
    assert (found[1] == 0).all()
    for n, (start, end) in ((0, (0, 30)), (2, (30, 70))):
        own = indices[n : n + 1, :, : end - start]
        alone = tw.probabilities(q[None, start:end], k[None, start:end], lse[None, :, start:end], own, causal=True)
        torch.testing.assert_close(found[n : n + 1, : end - start], alone)


@pytest.mark.parametrize(("batch", "count", "heads"), [(2, 0, 1), (2, 0, 2), (0, 0, 2), (0, 5, 1)])
def test_rows_without_entries_and_a_batch_without_elements_have_no_probabilities(batch, count, heads):
    q, k, v = qkv(batch=batch)
    lse = tw.attention_with_lse(q, k, v)[1]
    for reduce in ["group"] if heads > 1 else ["heads", "group"]:
        found = tw.probabilities(q, k, lse, entries(1, heads, 24, count, blocks=70), block_q=3, reduce=reduce)
        assert found.shape == ((batch, 24, count) if reduce == "heads" else (batch, 2, 24, count))


def test_a_key_that_no_query_was_given_touches_nothing():
    q, k, v = qkv(hk=1)
    lse = tw.attention_with_lse(q, k, v)[1]
    indices = entries(1, 1, 70, 5, blocks=40)
    expected = tw.probabilities(q, k, lse, indices)
    k[:, 41:] = torch.nan
    assert torch.equal(tw.probabilities(q, k, lse, indices), expected)
    k[:, 0] = torch.nan  # what -1 reads in its place
    indices[indices == 0] = -1
    assert tw.probabilities(q, k, lse, indices).isfinite().all()


def test_probabilities_inside_a_transform_and_beside_another_default_device_are_the_same():
    q, k, v = qkv()
    lse, indices = tw.attention_with_lse(q, k, v)[1], entries(1, 1, 70, 5, blocks=70)
    found = tw.probabilities(q, k, lse, indices)
    mapped = torch.vmap(lambda q: tw.probabilities(q, k, lse, indices))(torch.stack([q, 2 * q]))
    torch.testing.assert_close(mapped[0], found)
    assert (torch.func.grad(lambda q: tw.probabilities(q, k, lse, indices).sum())(q) == 0).all()
    with torch.device("meta"):
        assert torch.equal(tw.probabilities(q, k, lse, indices), found)


def test_wrong_calls_of_probabilities_say_all_reasons():
    q, k, v = qkv()
    lse = tw.attention_with_lse(q, k, v)[1]
    with pytest.raises(ValueError, match=r"reduce must be.*got \'mean\'\n.*lse must be torch.float32 \(2, 4, 70\)"):
        tw.probabilities(q, k, lse[:1], entries(1, 1, 70, 5, blocks=70), reduce="mean")
    with pytest.raises(ValueError, match='differ among 2 key heads; write reduce="group"'):
        tw.probabilities(q, k, lse, entries(1, 2, 70, 5, blocks=70))
    with pytest.raises(ValueError, match="an entry 70 in row"):
        tw.probabilities(q, k, lse, torch.full((1, 1, 70, 1), 70))
