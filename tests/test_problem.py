"""Problems: every wrong call is refused with every reason, and kernels are compiled for no number of a call."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import inf, nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import tilewise as tw
from bench.testing import normal, qkv
from tilewise import dispatch, dropout, expr, problem, spec
from tilewise.backends.base import Backend
from tilewise.backends.portable import Portable
from tilewise.problem import Problem
from tilewise.reference import ReferenceConfig
from tilewise.spec import Options, Spec, assemble, parse_spec


def inputs(**sizes) -> dict:
    """A small call that is right: batch 2, seqlen 8, 4 query heads, 2 key heads, head_dim 16."""
    return dict(zip("qkv", qkv(**({"nq": 8, "nk": 8} | sizes)), strict=True))


def packed(**sizes) -> dict:
    """Two sequences of eight."""
    x = {name: t.flatten(0, 1) for name, t in inputs(**sizes).items()}
    return x | {"cu_seqlens_q": torch.tensor([0, 8, 16])}


def attend(q, k, v, **options):
    if "cu_seqlens_q" in options:
        return tw.attention_varlen(q, k, v, options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k", None), **options)
    return tw.attention(q, k, v, **options)


def problem_of(q, k, v, **options) -> Problem:
    extras, seed, text = assemble(q, k, v, Options(**options))
    return problem.check(q, k, v, extras, seed, parse_spec(text))


# -- Wrong calls ---------------------------------------------------------------------------------------------------


@dataclass
class Wrong:
    """A wrong call and what its message must say: what came, what is allowed, what to do."""

    options: Callable[[], dict]
    says: tuple[str, ...]


def wrong(says: tuple[str, ...] | str, **changes: Callable[[dict], object]) -> Wrong:
    """The small right call with some arguments replaced by a function of it."""
    says = (says,) if isinstance(says, str) else says
    return Wrong(lambda: (x := inputs()) | {name: change(x) for name, change in changes.items()}, says)


def wrong_packed(says: tuple[str, ...] | str, **changes: Callable[[dict], object]) -> Wrong:
    says = (says,) if isinstance(says, str) else says
    return Wrong(lambda: (x := packed()) | {name: change(x) for name, change in changes.items()}, says)


def meta(t: Tensor) -> Tensor:
    return t.to("meta")


def option(**values) -> dict[str, Callable[[dict], object]]:
    return {name: lambda x, value=value: value for name, value in values.items()}


WANTS_GRAD, SEVEN, NONE = normal(8).requires_grad_(), normal(7), normal(0)


WRONG = {
    # q, k, v
    "q-of-3-dimensions": wrong("q has 3 dimensions, (batch, seqlen, heads, head_dim) has 4", q=lambda x: x["q"][0]),
    "v-of-5-dimensions": wrong("v has 5 dimensions, (batch, seqlen, heads, head_dim) has 4", v=lambda x: x["v"][None]),
    "mixed-dtypes": wrong(
        ("k (2, 8, 2, 16) float64 cpu", "q, k and v have different dtypes; convert them to one: k.to(q.dtype)"),
        k=lambda x: x["k"].double(),
    ),
    "integer-dtype": wrong(
        "dtype torch.int32 is not float16, bfloat16, float32 or float64; convert: q.to(torch.bfloat16)",
        q=lambda x: x["q"].int(), k=lambda x: x["k"].int(), v=lambda x: x["v"].int(),
    ),
    "mixed-devices": wrong(
        ("v (2, 8, 2, 16) float32 meta", "q, k and v are on different devices; move them to one: k.to(q.device)"),
        v=lambda x: meta(x["v"]),
    ),
    "batch-differs": wrong("batch differs: q 2, k 1, v 2", k=lambda x: x["k"][:1]),
    "seqlen-of-k-and-v": wrong("seqlen of k (8) and v (5) differ", v=lambda x: x["v"][:, :5]),
    "heads-of-k-and-v": wrong("heads of k (2) and v (1) differ", v=lambda x: x["v"][:, :, :1]),
    "heads-no-multiple": wrong(
        "heads of q (3) must be a positive multiple of heads of k (2)", q=lambda x: x["q"][:, :, :3]
    ),
    "no-query-heads": wrong("heads of q (0) must be a positive multiple", q=lambda x: x["q"][:, :, :0]),
    "no-key-heads": wrong("positive multiple of heads of k (0)", k=lambda x: x["k"][:, :, :0], v=lambda x: x["v"][:, :, :0]),
    "head-dim-differs": wrong("head_dim of q (16) and k (12) differ", k=lambda x: x["k"][..., :12]),
    "head-dim-0": wrong("head_dim is 0", q=lambda x: x["q"][..., :0], k=lambda x: x["k"][..., :0]),
    "head-dim-v-0": wrong("head_dim is 0", v=lambda x: x["v"][..., :0]),
    # sink
    "sink-of-one-head": wrong(
        ("sink must be a floating tensor (4,), one logit per query head", "got (2,) torch.float32 cpu"),
        sink=lambda x: normal(2),
    ),
    "sink-0-dim": wrong("sink must be a floating tensor (4,)", sink=lambda x: torch.tensor(1.0)),
    "sink-of-integers": wrong("got (4,) torch.int64 cpu", sink=lambda x: torch.ones(4, dtype=torch.int64)),
    "sink-elsewhere": wrong(("on cpu", "got (4,) torch.float32 meta"), sink=lambda x: meta(normal(4))),
    # numbers
    "scale-nan": wrong("softmax_scale is nan", **option(softmax_scale=nan)),
    "scale-inf": wrong("softmax_scale is -inf", **option(softmax_scale=-inf)),
    "dropout-1": wrong("dropout_p 1.0 must be 0, or round to between 1/65536 and 65535/65536: the probability", **option(dropout_p=1.0)),
    "dropout-negative": wrong("dropout_p -0.1 must be 0", **option(dropout_p=-0.1)),
    "dropout-above-1": wrong("dropout_p 1.5 must be 0", **option(dropout_p=1.5)),
    "dropout-rounds-to-0": wrong("dropout_p 1e-06 must be 0", **option(dropout_p=1e-6)),
    "dropout-rounds-to-1": wrong("dropout_p 0.999999 must be 0", **option(dropout_p=0.999999)),
    "dropout-nan": wrong("dropout_p nan must be 0", **option(dropout_p=nan)),
    "dropout-inf": wrong("dropout_p inf must be 0", **option(dropout_p=inf)),
    "seed-of-two": wrong(
        "dropout_seed must be one int64 on cpu, got torch.int64 (2,) cpu",
        dropout_p=lambda x: 0.5, dropout_seed=lambda x: torch.tensor([1, 2]),
    ),
    "seed-int32": wrong(
        "got torch.int32 (1,) cpu", dropout_p=lambda x: 0.5, dropout_seed=lambda x: torch.tensor([1], dtype=torch.int32)
    ),
    "seed-elsewhere": wrong(
        "got torch.int64 (1,) meta", dropout_p=lambda x: 0.5, dropout_seed=lambda x: torch.tensor([1], device="meta")
    ),
    # masks and scores
    "mask-requires-grad": wrong(
        "a tensor of the mask requires grad; a mask has no gradient: detach it, or make it a score",
        mask=lambda x: tw.keep(lambda b, h, i, j: WANTS_GRAD[j] > 0),
    ),
    "mask-elsewhere": wrong(
        "a mask or score tensor is on meta, q on cpu; move it there: x.to(q.device)",
        mask=lambda x: torch.ones(8, 8, dtype=torch.bool, device="meta"),
    ),
    "bias-elsewhere": wrong("a mask or score tensor is on meta", score=lambda x: tw.bias(meta(normal(8, 8)))),
    "mask-rows": wrong(
        "a mask or score tensor (7, 8) is read at [i, j]: axis 0 must be seqlen_q = 8",
        mask=lambda x: torch.ones(7, 8, dtype=torch.bool),
    ),
    "bias-columns": wrong("axis 1 must be seqlen_k = 8", score=lambda x: normal(8, 9)),
    "bias-heads": wrong("(3, 1, 8) is read at [h, 0, j]: axis 0 must be heads_q = 4", score=lambda x: normal(3, 1, 8)),
    "padding-without-axes": wrong(
        "axis 0 must be seqlen_q = 8; if it is the batch, axes of size 1 go behind it: x[:, None, None]",
        mask=lambda x: torch.ones(2, 8, dtype=torch.bool),
    ),
    "mask-of-batch-without-heads": wrong(
        "axis 0 must be heads_q = 4; if it is the batch, axes of size 1 go behind it: x[:, None]",
        mask=lambda x: torch.ones(2, 8, 8, dtype=torch.bool),
    ),
    "padding-of-another-length": wrong(
        "(2, 1, 1, 9) is read at [b, 0, 0, j]: axis 3 must be seqlen_k = 8",
        mask=lambda x: torch.ones(2, 1, 1, 9, dtype=torch.bool),
    ),
    "table-of-too-few-positions": wrong(
        "axis 0 must be at least seqlen_k = 8",
        score=lambda x: tw.score(lambda s, b, h, i, j: s + SEVEN[j]),
    ),
    "alibi-slopes": wrong("axis 0 must be heads_q = 4", score=lambda x: tw.alibi(normal(2))),
    "key-lengths-of-3": wrong("axis 0 must be batch = 2", mask=lambda x: tw.key_lengths(torch.tensor([1, 2, 3]))),
    "documents-of-other-length": wrong("axis 0 must be seqlen_k = 8", mask=lambda x: tw.documents(torch.tensor([0, 0, 1]))),
    "too-few-blocks": wrong(
        "axis 1 must be ceil(seqlen_k / 2) = 4",
        mask=lambda x: tw.block_sparse(torch.ones(2, 2, dtype=torch.bool), 4, 2),
    ),
    "empty-leaf": wrong(
        "a mask or score tensor (0,) is empty and cannot be read",
        score=lambda x: tw.score(lambda s, b, h, i, j: s + NONE[i % 2]),
    ),
    # packed
    "packed-q-of-4-dimensions": wrong_packed("q has 4 dimensions, (total, heads, head_dim) has 3", q=lambda x: x["q"][None]),
    "cu-of-floats": wrong_packed(
        "cu_seqlens_q must be int32 or int64 of shape (batch + 1,), got torch.float32 (2,)",
        cu_seqlens_q=lambda x: torch.tensor([0.0, 16.0]),
    ),
    "cu-int16": wrong_packed(
        "cu_seqlens_k must be int32 or int64",
        cu_seqlens_k=lambda x: torch.tensor([0, 8, 16], dtype=torch.int16),
    ),
    "cu-2-dim": wrong_packed("got torch.int64 (1, 2)", cu_seqlens_q=lambda x: torch.tensor([[0, 16]])),
    "cu-0-dim": wrong_packed("got torch.int64 ()", cu_seqlens_q=lambda x: torch.tensor(16)),
    "cu-empty": wrong_packed("got torch.int64 (0,)", cu_seqlens_q=lambda x: torch.tensor([], dtype=torch.int64)),
    "cu-counts": wrong_packed(
        "cu_seqlens_q has 2 sequences, cu_seqlens_k 1", cu_seqlens_k=lambda x: torch.tensor([0, 16])
    ),
    "cu-elsewhere": wrong_packed(
        "\n  cu_seqlens_q is on meta, q on cpu; move it there: x.to(q.device)", cu_seqlens_q=lambda x: meta(torch.tensor([0, 16]))
    ),
    "cu-for-k-is-missing": wrong_packed(
        "q has 12 rows and k 16, but one cu_seqlens for both; give cu_seqlens_k",
        q=lambda x: x["q"][:12], cu_seqlens_q=lambda x: torch.tensor([0, 12]),
    ),
    "packed-key-lengths-of-3": wrong_packed(
        "axis 0 must be batch = 2", mask=lambda x: tw.key_lengths(torch.tensor([1, 2, 3]))
    ),
}  # fmt: skip


def in_fake_mode(options: dict) -> None:
    """As torch.compile sees the call; leaves of masks and scores stay as they are, the mode lifts them."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        attend(**tree_map_only(Tensor, mode.from_tensor, options))


ENTRIES = {
    "attention": lambda options: attend(**options),
    "explain": lambda options: tw.explain(**options),
    "fake": in_fake_mode,
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_a_value_error_that_says_what_came_and_what_to_do(name, entry, monkeypatch):
    def not_reached(p):
        raise AssertionError("a backend was looked for")

    monkeypatch.setattr(dispatch, "select", not_reached)
    options = WRONG[name].options()
    called = "attention_varlen" if "cu_seqlens_q" in options else "attention"
    with pytest.raises(ValueError, match=f"^{called} was called wrongly\n    q ") as error:
        ENTRIES[entry](options)
    assert not [said for said in WRONG[name].says if said not in str(error.value)], str(error.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q, cache: tw.attention(q[0], q, q), "one sequence is q.unsqueeze(0)"),
        (lambda q, cache: tw.attention(q, q, q, mask="causal"), "mask=tw.causal()"),
        (lambda q, cache: tw.attention(q, q, q, score=30.0), "score=tw.softcap(30.0)"),
        (lambda q, cache: tw.attention(q, q, q, parallel="cp"), "tw.context_parallel(...)"),
        (lambda q, cache: tw.attention_with_stats(q, q, q, parallel="cp"), "tw.context_parallel(...)"),
        (lambda q, cache: tw.explain(q, q, q, parallel=4), "tw.context_parallel(...)"),
        (lambda q, cache: tw.attention_varlen(q, q, q, torch.tensor([0, 8])), "q.flatten(0, 1)"),
        (lambda q, cache: tw.attention_varlen(q[0], q[0], q[0], [0, 8]), "torch.tensor(cu_seqlens_q, dtype=torch.int32"),
        (lambda q, cache: tw.attention_varlen(q[0], q[0], q[0], torch.tensor([0.0])), "cu_seqlens_q.to(torch.int32)"),
        (lambda q, cache: tw.attention_paged(q[:, 0], cache), "one query a sequence is q.unsqueeze(1)"),
        (lambda q, cache: tw.attention_paged(q[..., :3], cache), "attention_paged was called wrongly\n    q (2, 8, 4, 3)"),
        (lambda q, cache: tw.attention_paged(q, cache._replace(seqlens_k=torch.tensor([8, 8]))), "seqlens_k.to(torch.int32)"),
        (lambda q, cache: tw.attention_paged(q, (q, q)), "what tw.paged(...) or tw.dense_cache(...) returns, got tuple"),
        (lambda q, cache: tw.append(cache, q[:, 0], q[:, 0]), "one row a sequence is k.unsqueeze(1)"),
        (lambda q, cache: tw.attention(q, q, q, sink=0.0), "torch.tensor(sink, dtype=torch.float32, device=q.device)"),
        (lambda q, cache: tw.append((q, q), q, q), "what tw.paged(...) or tw.dense_cache(...) returns, got tuple"),
    ],
    ids=[
        "no-batch", "mask-by-name", "softcap-number", "no-ranks", "no-ranks-stats", "no-ranks-explain", "not-packed", "cu-list",
        "cu-float", "no-rows", "head-dim", "long-lengths", "paged-tuple", "append-rows", "sink-number", "append-tuple",
    ],
)  # fmt: skip
def test_an_error_says_the_way_to_the_call_that_was_likely_meant(call, says):
    q = normal(2, 8, 4, 16)
    with pytest.raises(ValueError, match=re.escape(says)):
        call(q, tw.dense_cache(q, q.clone(), torch.tensor([8, 8], dtype=torch.int32)))


def test_the_call_that_wrong_ones_are_made_of_is_right():
    assert torch.isfinite(attend(**inputs())).all()
    assert torch.isfinite(attend(**packed())).all()
    shorter = packed() | {"q": packed()["q"][:12], "cu_seqlens_q": torch.tensor([0, 3, 12])}
    assert torch.isfinite(attend(**shorter, cu_seqlens_k=torch.tensor([0, 8, 16]))).all()


LONGER = {
    "batch": ((3,), lambda t, b, h, i, j: t[b]),
    "heads": ((5,), lambda t, b, h, i, j: t[h]),
    "queries": ((9,), lambda t, b, h, i, j: t[i]),
    "pairs": ((5, 10, 9), lambda t, b, h, i, j: t[h, i, j]),
    "pairs-of-one-head": ((2, 3, 10, 9), lambda t, b, h, i, j: t[b, 0, i, j]),
    "blocks": ((3, 9), lambda t, b, h, i, j: t[i // 4, j]),
}
FITTING = {
    "batch": (2,),
    "heads": (4,),
    "queries": (8,),
    "pairs": (4, 8, 8),
    "pairs-of-one-head": (2, 1, 8, 8),
    "blocks": (2, 8),
}


@pytest.mark.parametrize("name", LONGER)
def test_a_tensor_that_a_function_reads_may_be_longer_than_the_axis_and_never_shorter(name):
    shape, read = LONGER[name]
    x, t = inputs(), normal(*shape)
    whole = attend(**x, score=lambda s, b, h, i, j: s + read(t, b, h, i, j))
    cut = t[tuple(slice(0, size) for size in FITTING[name])]
    assert torch.equal(whole, attend(**x, score=lambda s, b, h, i, j: s + read(cut, b, h, i, j)))
    for axis, size in enumerate(FITTING[name]):
        if (name, axis) != ("pairs-of-one-head", 1):
            short = cut.narrow(axis, 0, size - 1)
            with pytest.raises(ValueError, match=f"axis {axis} must be at least .* = {size}"):
                attend(**x, score=lambda s, b, h, i, j, short=short: s + read(short, b, h, i, j))


def test_tables_of_positions_within_a_packed_sequence_need_not_span_all_sequences():
    assert torch.isfinite(attend(**packed(), score=tw.bias(normal(4, 8, 8)))).all()


CU = torch.tensor([0, 40, 100])
PADDING = torch.ones(2, 60, dtype=torch.bool)
BIAS = torch.zeros(2, 50, 60)
OF_POSITIONS = {
    "padding": (
        {"mask": PADDING},
        r"axis 0 has the batch's 2 elements, too few for 100 packed rows; if it is the batch.*x\[:, None, None\]",
    ),
    "ids-of-all-rows": (
        {"mask": tw.documents(torch.arange(100) // 30)},
        "from each sequence's first row, not over all packed rows",
    ),
    "short-ids": ({"mask": tw.documents(torch.arange(59) // 30)}, "axis 0 must be at least the longest seqlen_k = 60$"),
    "bias": (
        {"score": BIAS},
        r"\(2, 50, 60\) is read at \[h, i, j\]: axis 1 must be at least the longest seqlen_q = 60$",
    ),
    "blocks": (
        {"mask": lambda b, h, i, j: PADDING[0, :29][j // 2]},
        r"axis 0 must be at least ceil\(the longest seqlen_k / 2\) = 30",
    ),
}


@pytest.mark.parametrize("name", OF_POSITIONS)
def test_tensors_that_a_packed_sequence_runs_past_are_refused(name):
    options, says = OF_POSITIONS[name]
    q = torch.randn(100, 2, 8)
    with pytest.raises(ValueError, match=f"(?m){says}"):
        tw.attention_varlen(q, q, q, CU, **options)
    nested = torch.nested.nested_tensor(list(q.split([40, 60])), layout=torch.jagged)
    with pytest.raises(ValueError, match=f"(?m){says}"):
        tw.attention(nested, nested, nested, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"mask": PADDING[:, None, None]},
        {"mask": tw.documents(torch.arange(80) // 30)},
        {"mask": tw.documents(torch.arange(60).expand(2, -1) // 30)},
        {"mask": tw.documents(torch.arange(60) // 30)},
        {"score": torch.zeros(2, 60, 100).requires_grad_()},
    ],
    ids=["of-each", "longer-ids", "ids-of-each", "ids", "longer-bias"],
)
def test_tensors_as_long_as_the_longest_packed_sequence_or_longer_are_read(options):
    q = torch.randn(100, 2, 8)
    o, exact = (tw.attention_varlen(q, q, q, CU, **options, backend=name) for name in ("cpu", "reference"))
    assert (o - exact).abs().max() < 1e-5


def test_a_mask_shorter_than_the_keys_of_a_cache_is_refused():
    k, v = torch.randn(2, 2, 16, 2, 8)
    cache, q = tw.dense_cache(k, v, torch.tensor([10, 7], dtype=torch.int32)), torch.randn(2, 1, 2, 8)
    with pytest.raises(ValueError, match="axis 3 must be at least the longest seqlen_k = 10"):
        tw.attention_paged(q, cache, mask=tw.dense(torch.ones(2, 1, 1, 9, dtype=torch.bool)))
    shown = tw.attention_paged(q, cache, mask=tw.dense(torch.ones(2, 1, 1, 10, dtype=torch.bool)))
    assert torch.equal(shown, tw.attention_paged(q, cache, mask=tw.dense(torch.ones(2, 1, 1, 16, dtype=torch.bool))))


@pytest.mark.parametrize("kind", ["mask", "score"])
def test_an_empty_leaf_is_refused_once_its_structure_is_known_too(kind):
    q, k, v = qkv(nq=40, nk=40)
    dispatch.forget()

    def attend(count: int, keys: int) -> torch.Tensor:
        t = torch.ones(count, dtype=torch.bool if kind == "mask" else torch.float32)
        read = lambda i, j: t[(i - j).clamp(0, 3)]  # noqa: E731
        given = {"mask": lambda b, h, i, j: read(i, j), "score": lambda s, b, h, i, j: s + read(i, j)}
        return tw.attention(q, k[:, :keys], v[:, :keys], **{kind: given[kind]})

    for count in (4, 5, 6):
        attend(count, 30 + count)
    with pytest.raises(ValueError, match=r"a mask or score tensor \(0,\) is empty"):
        attend(0, 40)


@pytest.mark.parametrize("lengths", [(0, 8), (8, 0)], ids=["no-queries", "no-keys"])
def test_an_empty_leaf_is_right_where_nothing_is_to_be_read(lengths):
    nq, nk = lengths
    o = attend(**inputs(nq=nq, nk=nk), score=normal(nq, nk), mask=normal(nq, nk) > 0)
    assert torch.equal(o, torch.zeros(2, nq, 4, 16))


def test_all_reasons_come_at_once():
    q, k, v = qkv(nq=8, nk=8)
    with pytest.raises(ValueError, match="called wrongly") as error:
        tw.attention(q, k[:1, :, :, :3], v[:, :5, :1].double())
    assert str(error.value).splitlines() == [
        "attention was called wrongly",
        "    q (2, 8, 4, 16) float32 cpu    k (1, 8, 2, 3) float32 cpu    v (2, 5, 1, 16) float64 cpu",
        "  q, k and v have different dtypes; convert them to one: k.to(q.dtype)",
        "  batch differs: q 2, k 1, v 2; k and v have q's, or both 1",
        "  seqlen of k (8) and v (5) differ; each key has one row of v",
        "  heads of k (2) and v (1) differ",
        "  head_dim of q (16) and k (3) differ; v alone may have another one",
    ]


def test_all_reasons_of_the_other_tensors_and_the_numbers_come_at_once():
    with pytest.raises(ValueError, match="called wrongly") as error:
        tw.attention(
            **inputs(), sink=normal(3), softmax_scale=nan, dropout_p=2.0, score=normal(8, 9), mask=normal(7, 8) > 0
        )
    for said in (
        "sink must be",
        "softmax_scale is nan",
        "dropout_p 2.0",
        "axis 1 must be seqlen_k",
        "axis 0 must be seqlen_q",
    ):
        assert said in str(error.value)


@pytest.mark.parametrize("p", [1 / 65536, 0.5, 65535 / 65536])
def test_the_smallest_and_the_largest_dropout_are_allowed(p):
    assert problem_of(**inputs(), dropout_p=p).spec.dropout_p == p
    assert 0 < dropout.threshold(p) < 65536


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_a_seed_is_any_64_bit_number(seed):
    x = inputs()
    by_int = attend(**x, dropout_p=0.5, dropout_seed=seed)
    assert torch.equal(by_int, attend(**x, dropout_p=0.5, dropout_seed=torch.tensor(seed)))
    assert not torch.equal(by_int, attend(**x, dropout_p=0.5, dropout_seed=12345))
    assert torch.equal(by_int, attend(**x, dropout_p=0.5, dropout_seed=seed % 2**64))  # the same bits, unsigned


def test_the_operator_refuses_dropout_without_a_seed():
    with pytest.raises(ValueError, match="seed"):
        torch.ops.tilewise.attention(*inputs().values(), [], None, Spec(dropout_p=0.5).text())


# -- Prepared masks ------------------------------------------------------------------------------------------------

PREPARED = {
    "more-tiles": (lambda b, h, i, j: i != j, {}, {"nq": 100, "nk": 100}),
    "more-queries-in-the-same-tile": (lambda b, h, i, j: i < 8, {}, {"nq": 9}),
    "fewer-queries-in-the-same-tile": (lambda b, h, i, j: (i + j) % 2 == 0, {}, {"nq": 7}),
    "more-keys-in-the-same-tile": (lambda b, h, i, j: j < 8, {}, {"nk": 9}),
    "one-sequence-for-two": (lambda b, h, i, j: (b == 0) | (j < 3), {"batch": 1}, {}),
    "one-head-for-four": (lambda b, h, i, j: (h == 0) | (j < 3), {"hq": 1, "hk": 1}, {}),
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_mask_prepared_for_other_shapes_is_refused(name):
    fn, made_for, used_for = PREPARED[name]
    x = inputs(**made_for)
    mask = tw.keep(fn).prepare(x["q"], x["k"])
    assert torch.equal(attend(**x, mask=mask), attend(**x, mask=fn))
    with pytest.raises(ValueError, match=r"the mask was prepared for .*prepare it again"):
        attend(**inputs(**used_for), mask=mask)


def test_a_prepared_mask_does_not_serve_packed_sequences():
    x = inputs()
    mask = tw.keep(lambda b, h, i, j: i != j).prepare(x["q"], x["k"])
    with pytest.raises(ValueError, match="serves attention, not attention_varlen; pass the mask as it was before"):
        attend(**packed(), mask=mask)


# -- Values of cu_seqlens ------------------------------------------------------------------------------------------

BAD_CU = {
    "starts-late": ([1, 8, 16], "cu_seqlens_q starts at 1, it must start at 0"),
    "starts-below": ([-1, 8, 16], "cu_seqlens_q starts at -1, it must start at 0"),
    "decreases": ([0, 9, 8], "cu_seqlens_q decreases at position 2: 9 -> 8"),
    "ends-late": ([0, 8, 17], "cu_seqlens_q ends at 17, past the 16 rows of the packed tensor"),
    "leaves-and-returns": ([0, 17, 16], "cu_seqlens_q decreases at position 2: 17 -> 16"),
}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("name", BAD_CU)
def test_on_the_cpu_wrong_cu_seqlens_are_refused_at_every_call(name, dtype, monkeypatch):
    values, says = BAD_CU[name]
    x, good = packed(), torch.tensor([0, 8, 16], dtype=dtype)
    attend(**x | {"cu_seqlens_q": good})
    planned = len(dispatch._plans)

    def not_reached(*_):
        raise AssertionError("the backend ran")

    monkeypatch.setattr(Portable, "forward", not_reached)
    with pytest.raises(ValueError, match="called wrongly") as error:
        attend(**x | {"cu_seqlens_q": torch.tensor(values, dtype=dtype)})
    assert says in str(error.value)
    assert len(dispatch._plans) == planned  # the plan was cached; values are looked at nevertheless


def test_values_of_both_cu_seqlens_are_reported_together():
    x = packed() | {"cu_seqlens_q": torch.tensor([1, 20]), "cu_seqlens_k": torch.tensor([0, 5, 4])[1:]}
    with pytest.raises(ValueError, match="called wrongly") as error:
        attend(**x)
    for said in ("q starts at 1", "q ends at 20", "k starts at 5", "k decreases at position 1: 5 -> 4"):
        assert f"cu_seqlens_{said}" in str(error.value)


def test_cu_seqlens_changed_between_forward_and_backward_are_refused():
    x = packed()
    o = attend(**x | {"q": x["q"].requires_grad_()})
    x["cu_seqlens_q"].data[1] = 99
    with pytest.raises(ValueError, match="decreases at position 2"):
        o.sum().backward()


# -- Backends asked for --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda", "Portable", "portable ", "", "portable\nreference", "portable\n"])
@pytest.mark.parametrize("entry", ["attention", "explain"])
def test_an_unknown_backend_is_refused_naming_the_known(name, entry):
    known = ", ".join(row.name for row in dispatch.every())
    with pytest.raises(ValueError, match=f"there are {known}"):
        ENTRIES[entry](inputs() | {"backend": name})


class Picky(Backend):
    """A backend that refuses with two reasons."""

    name = "picky"

    def unsupported(self, p: Problem) -> list[str]:
        return [f"head_dim {p.head_dim} is above 8", "sinks are not built"]

    def config(self, p: Problem) -> ReferenceConfig:
        return ReferenceConfig()


@pytest.fixture
def picky(monkeypatch):
    """Picky ahead of portable, and no other; no plan of other tests is in the way, none of this one stays."""
    real = dispatch.backend
    monkeypatch.setattr(dispatch, "backend", lambda name: Picky() if name == "picky" else real(name))
    monkeypatch.setattr(dispatch, "BACKENDS", (dispatch.Row("picky", "", None), dispatch.BACKENDS[-1]))
    monkeypatch.setattr(dispatch, "_plans", {})


def test_a_backend_asked_for_refuses_with_every_reason_and_never_falls_back(picky):
    with pytest.raises(NotImplementedError) as error:
        tw.attention(**inputs(), mask=tw.window(left=128, right=0), backend="picky")
    assert str(error.value).splitlines() == [
        'backend="picky" cannot run this attention',
        "    q (2, 8, 4, 16) float32 cpu    k (2, 8, 2, 16) float32    v (2, 8, 2, 16) float32    mask window(128, 0)",
        "  head_dim 16 is above 8",
        "  sinks are not built",
        "  Drop backend= and portable runs it.",
    ]


def test_without_a_name_the_next_backend_runs_and_explain_says_why_not_the_first(picky):
    torch.testing.assert_close(tw.attention(**inputs()), tw.attention(**inputs(), backend="reference"))
    explained = tw.explain(**inputs())
    assert explained.chosen == "portable"
    assert "picky: head_dim 16 is above 8; sinks are not built" in str(explained)


def test_a_backend_that_would_be_slow_is_tried_last_unless_it_is_named(picky, monkeypatch):
    monkeypatch.setattr(Picky, "unsupported", lambda self, p: [])
    assert tw.explain(**inputs()).chosen == "picky"
    say = lambda self, p: "dislikes masks" if p.spec.mask_text else ""  # noqa: E731
    monkeypatch.setattr(Picky, "slow", say)
    masked = inputs() | {"causal": True}
    assert tw.explain(**masked).chosen == "picky"  # portable is always slow
    monkeypatch.setattr(Portable, "slow", lambda self, p: "")
    explained = tw.explain(**masked)
    assert explained.chosen == "portable"
    assert explained.refused["picky"] == ["comes after portable: it dislikes masks"]
    torch.testing.assert_close(tw.attention(**masked), tw.attention(**masked, backend="reference"))
    assert tw.explain(**masked, backend="picky").chosen == "picky"
    assert tw.explain(**inputs()).chosen == "picky"


def test_a_backend_that_is_slow_without_gradients_leaves_the_forward_of_a_call_with_them(picky, monkeypatch):
    monkeypatch.setattr(Picky, "unsupported", lambda self, p: [])
    monkeypatch.setattr(Picky, "tile", lambda self, p: (1, 2))
    monkeypatch.setattr(Picky, "slow", lambda self, p: "" if p.spec.needs_grad else "has half a kernel")
    monkeypatch.setattr(Portable, "slow", lambda self, p: "")
    ran: list[tuple[str, str]] = []
    real = Portable()
    passes = {"forward": real.forward, "backward": real.backward}

    def told(run):
        def compute(self, *given):
            ran.append((self.name, run))
            return passes[run](*given)

        return compute

    for kind, run in itertools.product((Picky, Portable), passes):
        monkeypatch.setattr(kind, run, told(run))
    given = inputs()
    leaves = [given[name].requires_grad_() for name in "qkv"]
    found = torch.autograd.grad(tw.attention(**given).sum(), leaves)
    assert ran == [("portable", "forward"), ("picky", "backward")]
    explained = tw.explain(**given)
    assert (explained.chosen, explained.forward[0]) == ("picky", "portable")
    assert explained.tile == Portable().tile(explained.problem)
    ran.clear()
    expected = torch.autograd.grad(tw.attention(**given, backend="picky").sum(), leaves)
    assert ran == [("picky", "forward"), ("picky", "backward")]
    assert tw.explain(**given, backend="picky").forward is None
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_where_no_backend_can_each_says_why(picky, monkeypatch):
    monkeypatch.setattr(Portable, "unsupported", lambda self, p: ["it is closed"])
    with pytest.raises(NotImplementedError, match="no backend can run this attention") as error:
        tw.attention(**inputs())
    assert str(error.value).splitlines()[2:] == [
        "  picky: head_dim 16 is above 8",
        "  picky: sinks are not built",
        "  portable: it is closed",
    ]
    assert tw.explain(**inputs()).chosen is None


def test_no_backend_of_another_device_is_proposed(picky, monkeypatch):
    elsewhere = dispatch.Row("portable", "tilewise.backends.portable:Portable", ("xpu",))
    monkeypatch.setattr(dispatch, "BACKENDS", (dispatch.BACKENDS[0], elsewhere))
    with pytest.raises(NotImplementedError, match="sinks are not built") as error:
        tw.attention(**inputs(), backend="picky")
    assert "Drop backend=" not in str(error.value)


# -- What kernels are compiled of ----------------------------------------------------------------------------------


def forms(sizes: dict | None = None, **options) -> list[str]:
    """The mask's parts and the score of a call, with names in the place of numbers."""
    spec = problem_of(**inputs(**(sizes or {})), **{name: make() for name, make in options.items()}).spec
    numbers: list[float] = []
    return [
        "" if e is None else str(expr.abstract(e, numbers))
        for e in (*spec.region.ends, spec.region.predicate, spec.score)
    ]


# Calls that one kernel serves.
SAME = {
    "softcap": ({"score": lambda: tw.softcap(30.0)}, {"score": lambda: tw.softcap(50.0)}),
    "numbers-of-a-function": (
        {"score": lambda: tw.score(lambda s, b, h, i, j: s * 0.5 + 2.0)},
        {"score": lambda: tw.score(lambda s, b, h, i, j: s * -3.0 + inf)},
    ),
    "window": ({"mask": lambda: tw.window(1, 0)}, {"mask": lambda: tw.window(100, 7)}),
    "causal-window": ({"mask": lambda: tw.causal() & tw.window(4)}, {"mask": lambda: tw.window(0, 0)}),
    "prefix": ({"mask": lambda: tw.prefix(3)}, {"mask": lambda: tw.prefix(0)}),
    "key-range": ({"mask": lambda: tw.key_range(0, 5)}, {"mask": lambda: tw.key_range(3, 4)}),
    "equal-and-other-starts": (
        {"mask": lambda: tw.key_range(0, 5) & tw.key_range(0, 7)},
        {"mask": lambda: tw.key_range(1, 5) & tw.key_range(0, 7)},
    ),
    "equal-and-other-prefixes": (
        {"mask": lambda: tw.prefix(3) & tw.prefix(3)},
        {"mask": lambda: tw.prefix(3) & tw.prefix(4)},
    ),
    "block-size": (
        {"mask": lambda: tw.block_sparse(torch.ones(4, 4, dtype=torch.bool), 2, 2)},
        {"mask": lambda: tw.block_sparse(torch.ones(2, 1, dtype=torch.bool).expand(2, 2), 4, 4)},
    ),
    "lengths": ({}, {"sizes": {"nq": 300, "nk": 1000}}),
    "batch": ({}, {"sizes": {"batch": 7}}),
    "heads": ({}, {"sizes": {"hq": 32, "hk": 8}}),
    "softmax-scale": ({}, {"softmax_scale": lambda: 0.3}),
    "dropout-p": ({"dropout_p": lambda: 0.1}, {"dropout_p": lambda: 0.2}),
    "seed": ({"dropout_p": lambda: 0.1}, {"dropout_p": lambda: 0.1, "dropout_seed": lambda: 3}),
    "backend-named": ({}, {"backend": lambda: "portable"}),
}


@pytest.mark.parametrize("name", SAME)
def test_numbers_and_lengths_are_no_part_of_what_kernels_are_compiled_of(name):
    a, b = SAME[name]
    assert forms(**a) == forms(**b)


def test_a_hundred_equal_lambdas_give_one_form():
    table = normal(4, 15)
    make = lambda: tw.score(lambda s, b, h, i, j: s + table[h, (i - j).clamp(-7, 7) + 7])  # noqa: E731
    keep = lambda n: lambda: tw.keep(lambda b, h, i, j: (i - j) % 3 != n)  # noqa: E731
    assert len({tuple(forms(score=make, mask=keep(n))) for n in range(100)}) == 1


def test_a_problem_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem_of(**inputs()).device = "cuda"


# -- The problem ---------------------------------------------------------------------------------------------------


def test_a_problem_names_its_sizes():
    p = problem_of(**inputs(batch=3, nq=5, nk=7, hq=6, hk=2, d=8, dv=12))
    assert (p.batch, p.seqlen_q, p.seqlen_k, p.heads_q, p.heads_k, p.group) == (3, 5, 7, 6, 2, 3)
    assert (p.head_dim, p.head_dim_v, p.packed) == (8, 12, False)
    assert p.softmax_scale == pytest.approx(8**-0.5)


def test_a_packed_problem_counts_sequences_and_rows():
    p = problem_of(**packed())
    assert (p.packed, p.batch, p.seqlen_q, p.seqlen_k) == (True, 2, 16, 16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scores_are_fp32_and_fp64_for_fp64(dtype):
    p = problem_of(**{name: t.to(dtype) for name, t in inputs().items()})
    assert p.compute_dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_problem_describes_all_that_was_asked_for():
    x = packed()
    said = problem_of(
        **x, mask=tw.window(3), score=tw.softcap(2.0), sink=normal(4), dropout_p=0.25, deterministic=True
    ).describe()
    for part in (
        "q (16, 4, 16) float32 cpu",
        "window(3, None)",
        "tanh(s / 2.0)",
        "sink",
        "0.25",
        "2 sequences",
        "deterministic",
    ):
        assert part in said


# -- The text of a call --------------------------------------------------------------------------------------------

MASKS = st.recursive(
    st.sampled_from([tw.causal(), tw.window(3), tw.window(0, 2), tw.prefix(5), tw.key_range(1, 9)])
    | st.builds(tw.window, st.none() | st.integers(0, 2**40), st.none() | st.integers(0, 9))
    | st.just(tw.keep(lambda b, h, i, j: (i - j) % 3 != 0)),
    lambda inner: st.builds(lambda a, b: a & b, inner, inner) | st.builds(lambda a, b: a | b, inner, inner),
    max_leaves=5,
)
SCORES = st.builds(tw.softcap, st.floats(1e-30, 1e30)) | st.just(tw.alibi(normal(4)) >> tw.bias(normal(8)))
SLOTS = st.lists(st.integers(0, 12), max_size=4).map(tuple)
SPECS = st.builds(
    Spec,
    mask_text=st.just("") | MASKS.map(lambda m: m.text),
    score_text=st.just("") | SCORES.map(lambda s: s.text),
    softmax_scale=st.none() | st.floats(allow_nan=False),
    dropout_p=st.floats(allow_nan=False),
    deterministic=st.booleans(),
    needs_grad=st.booleans(),
    grad_slots=SLOTS,
    sink_slot=st.none() | st.integers(0, 12),
    cu_slots=st.just(()) | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    mask_slots=SLOTS,
    score_slots=SLOTS,
    backend=st.none() | st.sampled_from(["portable", "reference", "a name", "ü"]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(SPECS)
def test_a_spec_is_read_back_from_its_text(spec):
    assert parse_spec(spec.text()) == spec
    assert parse_spec(spec.text()).text() == spec.text()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MASKS, SCORES, st.none() | st.floats(-10, 10), st.booleans(), st.booleans())
def test_the_text_that_a_call_is_assembled_into_says_what_was_asked_for(mask, score, scale, causal, deterministic):
    x = inputs()
    o = Options(causal, mask, score, scale, None, 0.0, None, deterministic, "portable")
    extras, seed, text = assemble(**x, o=o)
    spec = parse_spec(text)
    assert (spec.softmax_scale, spec.deterministic, spec.backend, spec.needs_grad) == (
        scale,
        deterministic,
        "portable",
        False,
    )
    assert [extras[n] for n in spec.score_slots] == list(score.leaves)
    assert spec.mask_text == (mask & tw.causal() if causal else mask).text
    assert seed is None


IDS, LEARNED = torch.tensor([0, 0, 1]), torch.zeros(8, requires_grad=True)
BRIEF = {
    "nothing": {},
    "causal": {"causal": True},
    "numbers": {"softmax_scale": 0.5, "deterministic": True, "max_logit": True},
    "backend": {"backend": "portable", "causal": True, "softmax_scale": -0.0},
    "mask": {"mask": tw.window(5), "max_logit": True},
    "two masks": {"mask": tw.window(5) | tw.prefix(2), "causal": True},
    "score": {"score": tw.softcap(9) >> tw.score(lambda s, b, h, i, j: s - i), "causal": True},
    "tensors": {"mask": tw.documents(IDS), "score": tw.bias(torch.zeros(8)), "causal": True},
    "a learned tensor": {"score": tw.bias(LEARNED), "mask": tw.window(5)},
    "a tensor twice": {"score": tw.alibi(LEARNED) >> tw.bias(torch.zeros(3)) >> tw.alibi(LEARNED)},
    "a tensor of both": {
        "score": tw.score(lambda s, b, h, i, j: s + IDS[j]),
        "mask": tw.keep(lambda b, h, i, j: IDS[j] < 1),
    },
    "prepared": {
        "mask": tw.documents(torch.tensor([0, 0, 1, 1])).prepare(torch.ones(1, 4, 1, 1), torch.ones(1, 4, 1, 1))
    },
    "prepared, then causal": {
        "mask": tw.window(2).prepare(torch.ones(1, 4, 1, 1), torch.ones(1, 4, 1, 1)),
        "causal": True,
    },
}


@pytest.mark.parametrize("options", BRIEF.values(), ids=BRIEF)
@pytest.mark.parametrize("watched", [None, "q", "v"])
@pytest.mark.parametrize("grads", [True, False], ids=["grad", "no-grad"])
def test_a_brief_call_has_the_tensors_and_the_text_that_assembling_it_gives(options, watched, grads, monkeypatch):
    x = inputs()
    if watched:
        x[watched].requires_grad_()
    with torch.set_grad_enabled(grads):
        tensors, *found = assemble(**x, o=Options(**options))
        monkeypatch.setattr(spec, "_is_brief", lambda *_: False)
        assembled, *expected = assemble(**x, o=Options(**options))
    assert found == expected
    assert [id(t) for t in tensors] == [id(t) for t in assembled]


def test_each_tensor_travels_once():
    x, t = inputs(), normal(4)
    extras, _, text = assemble(**x, o=Options(sink=t, score=tw.alibi(t) >> tw.alibi(t)))
    assert len(extras) == 1
    assert parse_spec(text).score_slots == (0, 0)
    assert parse_spec(text).sink_slot == 0


def leaves_of(q, bias, **options):
    return assemble(q, q, q, Options(score=tw.bias(bias), **options))[0]


@pytest.mark.parametrize("sink", [False, True], ids=["brief", "sink"])
def test_a_bias_of_pairs_is_read_in_rows_of_unit_stride_at_multiples_of_16_bytes(sink, monkeypatch):
    monkeypatch.setattr(spec, "IN_PLACE", ("cpu",))  # tensors without memory stand for those of a GPU
    q = torch.empty(2, 37, 4, 16, device="meta", dtype=torch.bfloat16)
    more = {"sink": torch.empty(4, device="meta")} if sink else {}
    z = torch.empty(37, 37, 4, device="meta", dtype=torch.bfloat16)
    for bias in (z.permute(2, 0, 1), z.view(4, 37, 37), z.permute(2, 0, 1)[None]):
        found = leaves_of(q, bias, **more)[-1]
        assert (found.shape, found.stride()[-2:]) == (bias.shape, (40, 1))
    assert leaves_of(q, z.permute(2, 0, 1).float(), **more)[-1].stride() == (37 * 40, 40, 1)
    wide = torch.empty(4, 37, 48, device="meta", dtype=torch.bfloat16)[..., :37]
    for bias in (wide, z[:, 0, 0].expand(37, 37), z[:, :1, 0], torch.empty(4, 50, 50, device="meta")):
        assert leaves_of(q, bias, **more)[-1] is bias
    behind = torch.empty(5 * 37 * 48 + 1, device="meta", dtype=torch.bfloat16)[1:].view(5, 37, 48)[..., :37]
    assert leaves_of(q, behind, **more)[-1].storage_offset() == 0
    bias = z.permute(2, 0, 1)
    assert leaves_of(q, bias, **more, wrt=(bias,))[-1] is bias, "its gradient is found by it"
    there = torch.empty(2, 37, 4, 16)
    bias = torch.empty(37, 37, 4).permute(2, 0, 1)
    assert leaves_of(there, bias)[-1] is bias, "a CPU reads it as it lies"
    one = z[:1, :1].permute(2, 0, 1)
    assert leaves_of(q[:, :1], one, **more)[-1] is one


def test_no_gradient_is_asked_for_without_autograd():
    x = inputs()
    x["q"].requires_grad_()
    assert parse_spec(assemble(**x, o=Options())[2]).needs_grad
    with torch.no_grad():
        assert not parse_spec(assemble(**x, o=Options())[2]).needs_grad
