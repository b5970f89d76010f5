"""What must hold whatever the numbers: laws of attention, through the public API, on small random problems in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise as tw
from bench import testing
from tilewise import problem, state
from tilewise.backends.base import Inputs
from tilewise.dispatch import backend as backend_named
from tilewise.spec import Options, assemble, parse_spec

BACKENDS = ["portable", "reference"]
backends = pytest.mark.parametrize("backend", BACKENDS)
law = settings(max_examples=25, deadline=None, derandomize=True)


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Equal up to the order of sums in float64.

    A sum of n <= 200 terms, each of relative error u = eps / 2 times a few roundings (exp, scale, normalisation, and once
    more in a gradient), errs by at most 4 n u of the sum of its absolute terms, which the tensor's largest element and 1
    bound within a factor of 10 here (inputs are normal, P is at most 1): 8000 u = 4000 eps.
    """
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == torch.float64
    same = (got == expected) | (torch.isnan(got) & torch.isnan(expected))  # infinities
    scale = 1 + expected[torch.isfinite(expected)].abs().max().item() if torch.isfinite(expected).any() else 1.0
    torch.testing.assert_close(
        got.where(~same, 0), expected.where(~same, 0), rtol=0, atol=4000 * torch.finfo(got.dtype).eps * scale
    )


def assert_all_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, x in got.items():
        try:
            assert_same(x, expected[name])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


def assert_all_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    assert [name for name, x in got.items() if not torch.equal(x, expected[name])] == []


@dataclass
class Call:
    """A call of the public API with every gradient asked for.

    Attributes:
        leaves: the score's tensors by name; ``score`` builds the score from them.
        cu: ``(cu_seqlens_q, cu_seqlens_k)`` of a packed call.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor
    sink: Tensor | None = None
    leaves: dict[str, Tensor] = field(default_factory=dict)
    score: Callable[[dict[str, Tensor]], object] | None = None
    mask: object = None
    cu: tuple[Tensor, Tensor] | None = None
    options: dict[str, object] = field(default_factory=dict)

    def results(self, backend: str) -> dict[str, Tensor]:
        """o, lse, and a gradient of ``sum(o * do) + sum(lse * dlse)`` for each input."""
        inputs = {"q": self.q, "k": self.k, "v": self.v, "sink": self.sink, **self.leaves}
        inputs = {name: x.clone().requires_grad_() for name, x in inputs.items() if x is not None}
        options = {"mask": self.mask, "sink": inputs.get("sink"), "backend": backend} | self.options
        if self.score is not None:
            options["score"] = self.score(inputs)
        qkv = inputs["q"], inputs["k"], inputs["v"]
        if self.cu is None:
            o, lse = tw.attention_with_lse(*qkv, **options)
        else:
            o, lse = tw.attention_varlen_with_lse(*qkv, *self.cu, **options)
        grads = torch.autograd.grad((o, lse), list(inputs.values()), (self.do, self.dlse))
        return {"o": o.detach(), "lse": lse.detach()} | {f"d{name}": g for name, g in zip(inputs, grads, strict=True)}


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dense_call(batch: int, nq: int, nk: int, hq: int, hk: int, d: int = 4, dv: int = 3, seed: int = 0, **more) -> Call:
    return Call(
        q=normal(batch, nq, hq, d, seed=seed + 1),
        k=normal(batch, nk, hk, d, seed=seed + 2),
        v=normal(batch, nk, hk, dv, seed=seed + 3),
        do=normal(batch, nq, hq, dv, seed=seed + 4),
        dlse=normal(batch, hq, nq, seed=seed + 5),
        **more,
    )


# Scores by name: leaves for heads, and the score they make. Tables are read at clamped distances, so any length fits.
SCORES = {
    "none": (lambda hq: {}, None),
    "softcap": (lambda hq: {}, lambda t: tw.softcap(2.0)),
    "alibi": (lambda hq: {"slopes": normal(hq, seed=11).abs()}, lambda t: tw.alibi(t["slopes"])),
    "relative": (
        lambda hq: {"table": normal(hq, 9, seed=12)},
        lambda t: lambda s, b, h, i, j: s + t["table"][h, i + tw.offset - j + 4],
    ),
    "chain": (
        lambda hq: {"slopes": normal(hq, seed=13).abs(), "temperature": normal(seed=14)},
        lambda t: tw.score(lambda s, b, h, i, j: s * t["temperature"]) >> tw.alibi(t["slopes"]) >> tw.softcap(3.0),
    ),
}
# Masks that mean the same on a part of the batch as on the whole, or in a sequence as in a packed one.
MASKS = {
    "none": lambda: None,
    "causal": lambda: tw.causal(),
    "window": lambda: tw.window(3, 2),
    "keep": lambda: tw.keep(lambda b, h, i, j: (i + 2 * j + h) % 3 != 0),
    "union": lambda: (tw.causal() & tw.window(left=2)) | tw.key_range(0, 2),
}


SHORT = st.integers(0, 24)


@st.composite
def calls(draw, batch: int | None = None, lengths=SHORT, rest=("sink", "dropout")) -> Call:
    """A random call; any Nq and Nk, 0 too, GQA, mask, score, sink and dropout."""
    hk, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    hq = hk * group
    make_leaves, score = SCORES[draw(st.sampled_from(sorted(SCORES)))]
    options = (
        {"dropout_p": 0.3, "dropout_seed": draw(st.integers(-9, 9))}
        if "dropout" in rest and draw(st.booleans())
        else {}
    )
    return dense_call(
        draw(st.integers(1, 3)) if batch is None else batch,
        draw(lengths),
        draw(lengths),
        hq,
        hk,
        seed=draw(st.integers(0, 99)) * 100,
        sink=normal(hq, seed=15) if "sink" in rest and draw(st.booleans()) else None,
        leaves=make_leaves(hq),
        score=score,
        mask=MASKS[draw(st.sampled_from(sorted(MASKS)))](),
        options=options,
    )


# -- Backends against each other -----------------------------------------------------------------------------------


@settings(law, max_examples=60)
@given(calls(lengths=st.integers(0, 40)))
def test_backends_agree_on_any_call(call):
    assert_all_same(call.results("portable"), call.results("reference"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
@law
@given(
    call=calls(batch=2, lengths=st.integers(30, 40))
)  # enough rows for the rule's root mean square to mean something
def test_low_precision_errs_hardly_more_than_eager(dtype, call):
    q, k, v, do = (x.to(dtype) for x in (call.q, call.k, call.v, call.do))
    leaves = {name: x.float().requires_grad_() for name, x in call.leaves.items()}
    options = Options(mask=call.mask, sink=None if call.sink is None else call.sink.float(), **call.options)
    options = replace(options, score=None if call.score is None else call.score(leaves))
    extras, seed, text = assemble(q.requires_grad_(), k, v, options)
    p = problem.check(q, k, v, extras, seed, parse_spec(text))
    with torch.no_grad():
        t = Inputs.of(p, q, k, v, [x.detach() for x in extras], seed)
        checked = testing.Call(p, t, do, call.dlse.float())
        assert testing.wrong(backend_named("portable"), checked) == []


# -- Splitting the keys --------------------------------------------------------------------------------------------


@backends
@law
@given(call=calls(), cut=st.floats(0, 1), second=st.floats(0, 1))
def test_splitting_keys_and_merging_is_the_whole(backend, call, cut, second):
    nk = call.k.shape[1]
    cuts = sorted({0, nk, int(cut * nk), int(second * nk)})
    parts = []
    for start, end in pairwise(cuts):
        mask = tw.key_range(start, end) if call.mask is None else call.mask & tw.key_range(start, end)
        parts.append(replace(call, mask=mask, sink=None).results(backend))
    if not parts:  # no keys at all
        return
    o = torch.stack([part["o"] for part in parts]).transpose(2, 3)
    o, lse = state.merge_all(o, torch.stack([part["lse"] for part in parts]), 0)
    if call.sink is not None:
        o, lse = state.add_sink(o, lse, call.sink.view(-1, 1))
    whole = call.results(backend)
    assert_same(o.transpose(1, 2), whole["o"])
    assert_same(lse, whole["lse"])


@backends
def test_gradients_of_split_keys_add_up_to_the_whole(backend):
    """With the whole's lse and delta given back through the merge, by autograd."""
    q, k, v = (
        x.requires_grad_()
        for x in (normal(2, 7, 2, 4, seed=1), normal(2, 20, 1, 4, seed=2), normal(2, 20, 1, 3, seed=3))
    )
    whole = tw.attention_with_lse(q, k, v, causal=True, backend=backend)
    masks = [tw.key_range(0, 6), tw.key_range(6, 20)]
    parts = [tw.attention_with_lse(q, k, v, causal=True, mask=mask, backend=backend) for mask in masks]
    (o_a, lse_a), (o_b, lse_b) = ((o.transpose(1, 2), lse) for o, lse in parts)
    lse = torch.logaddexp(lse_a, lse_b)
    o = o_a * torch.exp(lse_a - lse).unsqueeze(-1) + o_b * torch.exp(lse_b - lse).unsqueeze(-1)
    do, dlse = normal(2, 7, 2, 3, seed=4), normal(2, 2, 7, seed=5)
    expected = torch.autograd.grad(whole, (q, k, v), (do, dlse))
    for got, x in zip(torch.autograd.grad((o.transpose(1, 2), lse), (q, k, v), (do, dlse)), expected, strict=True):
        assert_same(got, x)


# -- Packed sequences ----------------------------------------------------------------------------------------------


@st.composite
def packed_calls(draw) -> Call:
    """Up to 4 sequences, some of length zero, and up to 3 rows after the last one."""
    one = draw(calls(batch=1))
    pair = st.tuples(st.integers(0, 12), st.integers(0, 12))
    lengths = draw(st.lists(pair, min_size=1, max_size=4))
    tail_q, tail_k = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    cu = tuple(torch.tensor([0, *n], dtype=dtype).cumsum(0, dtype=dtype) for n in zip(*lengths, strict=True))
    hq, hk = one.q.shape[2], one.k.shape[2]
    total_q, total_k = int(cu[0][-1]) + tail_q, int(cu[1][-1]) + tail_k
    call = dense_call(1, total_q, total_k, hq, hk, seed=50, sink=one.sink, leaves=one.leaves, score=one.score)
    return replace(flat(call), mask=one.mask, options=one.options, cu=cu)


def flat(call: Call) -> Call:
    return replace(call, q=call.q[0], k=call.k[0], v=call.v[0], do=call.do[0], dlse=call.dlse[0])


def sequence(call: Call, b: int) -> Call:
    """Sequence b of a packed call as a call of its own, without dropout: its head numbers would differ."""
    (q0, q1), (k0, k1) = ((int(cu[b]), int(cu[b + 1])) for cu in call.cu)
    rows, keys = slice(q0, q1), slice(k0, k1)
    return replace(
        call, q=call.q[None, rows], k=call.k[None, keys], v=call.v[None, keys],
        do=call.do[None, rows], dlse=call.dlse[None, :, rows], cu=None,
    )  # fmt: skip


@backends
@settings(law, max_examples=40)
@given(call=packed_calls())
def test_packed_sequences_are_a_loop_over_sequences(backend, call):
    call = replace(call, options={})
    got = call.results(backend)
    expected = {name: torch.zeros_like(x) for name, x in got.items()}
    expected["lse"].fill_(-torch.inf)  # rows past the last sequence
    for b in range(len(call.cu[0]) - 1):
        (q0, q1), (k0, k1) = ((int(cu[b]), int(cu[b + 1])) for cu in call.cu)
        one = sequence(call, b).results(backend)
        for name, x in one.items():
            if name == "lse":
                expected[name][:, q0:q1] = x[0]
            elif name in ("o", "dq", "dk", "dv"):
                expected[name][slice(k0, k1) if name in ("dk", "dv") else slice(q0, q1)] = x[0]
            else:  # sink and leaves serve all sequences
                expected[name] += x
    assert_all_same(got, expected)


@backends
@law
@given(call=packed_calls())
def test_packed_dropout_counts_within_the_sequence(backend, call):
    """Padded to one batch, sequence b keeps the same pairs: the map sees (b, h) and positions in the sequence."""
    call = replace(call, options={"dropout_p": 0.4, "dropout_seed": 5}, mask=None, score=None, leaves={})
    got = call.results(backend)
    lengths = torch.stack([cu.diff() for cu in call.cu], 1).tolist()
    for b, (nq, nk) in enumerate(lengths):
        alone = sequence(call, b)
        pad = [alone.q, alone.k, alone.v]
        padded = [torch.cat([x.new_zeros(b, *x.shape[1:]), x]) for x in pad]  # so that it is batch element b
        o = tw.attention(*padded, sink=call.sink, backend=backend, **call.options)[b]
        assert_same(o, got["o"][int(call.cu[0][b]) : int(call.cu[0][b]) + nq])
        assert nk == alone.k.shape[1]


def test_a_batch_element_number_reaches_masks_and_scores_of_packed_sequences():
    q = normal(12, 1, 4, seed=1)
    cu, n, t = torch.tensor([0, 5, 12]), torch.tensor([2, 6]), normal(2, seed=2)
    got = tw.attention_varlen(q, q, q, cu, mask=tw.key_lengths(n), score=lambda s, b, h, i, j: s * t[b])
    for b, rows in enumerate((slice(0, 5), slice(5, 12))):
        x = q[None, rows]
        assert_same(
            got[rows], tw.attention(x, x, x, mask=tw.key_lengths(int(n[b])), softmax_scale=0.5 * t[b].item())[0]
        )


# -- Neighbours and determinism ------------------------------------------------------------------------------------


@backends
@law
@given(call=calls(batch=3))
def test_a_batch_element_does_not_depend_on_its_neighbours_bit_for_bit(backend, call):
    """The first one: its index is the same alone, so that dropout draws the same."""
    call = replace(call, options=call.options | {"deterministic": True})
    whole = call.results(backend)
    first = {name: getattr(call, name)[:1] for name in ("q", "k", "v", "do", "dlse")}
    alone = replace(call, **first).results(backend)
    for name in ("o", "lse", "dq", "dk", "dv"):
        assert torch.equal(whole[name][:1], alone[name]), name


@backends
@law
@given(call=packed_calls())
def test_a_packed_sequence_does_not_depend_on_its_neighbours_bit_for_bit(backend, call):
    call = replace(call, options=call.options | {"deterministic": True})
    whole = call.results(backend)
    end_q, end_k = (int(cu[1]) for cu in call.cu)
    alone = replace(
        call, q=call.q[:end_q], k=call.k[:end_k], v=call.v[:end_k], do=call.do[:end_q], dlse=call.dlse[:, :end_q],
        cu=tuple(cu[:2] for cu in call.cu),
    ).results(backend)  # fmt: skip
    for name, end in {"o": end_q, "dq": end_q, "dk": end_k, "dv": end_k}.items():
        assert torch.equal(whole[name][:end], alone[name]), name
    assert torch.equal(whole["lse"][:, :end_q], alone["lse"])


@backends
@law
@given(call=calls())
def test_deterministic_runs_are_bitwise_equal(backend, call):
    call = replace(call, options=call.options | {"deterministic": True})
    assert_all_equal(call.results(backend), call.results(backend))


# -- Heads ---------------------------------------------------------------------------------------------------------


@backends
@law
@given(call=calls(rest=("sink",)), order=st.permutations([0, 1]))
def test_permuting_heads_permutes_results(backend, call, order):
    """Key heads, each with its group of query heads; a mask or a table that names heads would change its meaning."""
    hk, group = call.k.shape[2], call.q.shape[2] // call.k.shape[2]
    order = torch.tensor([h for h in order if h < hk])
    heads = (order.view(-1, 1) * group + torch.arange(group)).flatten()
    mask = None if call.mask is not None and "keep" in call.mask.text else call.mask
    call = replace(call, mask=mask)
    permuted = replace(
        call, q=call.q[:, :, heads], k=call.k[:, :, order], v=call.v[:, :, order], do=call.do[:, :, heads],
        dlse=call.dlse[:, heads], sink=None if call.sink is None else call.sink[heads],
        leaves={name: x[heads] if x.ndim else x for name, x in call.leaves.items()},
    )  # fmt: skip
    expected = call.results(backend)
    for name, x in permuted.results(backend).items():
        axis = 2 if name in ("o", "dq", "dk", "dv") else 1 if name == "lse" else 0
        by = order if name in ("dk", "dv") else heads
        assert_same(x, expected[name].index_select(axis, by) if expected[name].ndim else expected[name])


@backends
@law
@given(call=calls())
def test_grouped_heads_equal_repeated_keys_and_values(backend, call):
    hk, group = call.k.shape[2], call.q.shape[2] // call.k.shape[2]
    repeat = lambda x: x.repeat_interleave(group, 2)  # noqa: E731
    got, expected = call.results(backend), replace(call, k=repeat(call.k), v=repeat(call.v)).results(backend)
    for name in ("dk", "dv"):
        expected[name] = expected[name].unflatten(2, (hk, group)).sum(3)
    assert_all_same(got, expected)


# -- What is hidden ------------------------------------------------------------------------------------------------

HIDING = {
    "key-lengths": lambda nk: tw.key_lengths(torch.tensor([nk // 2, nk - 1])),
    "key-range": lambda nk: tw.key_range(3, nk - 3),
    "causal-window-more-keys": lambda nk: tw.causal() & tw.window(left=2),
    "documents": lambda nk: tw.documents((torch.arange(nk) >= nk - 9).int()) & tw.causal() & tw.key_range(nk - 4, nk),
    "keep": lambda nk: tw.keep(lambda b, h, i, j: (j + i // 100 + h // 2 + b) % 3 == 0),
    "dense": lambda nk: tw.dense((torch.arange(2 * nk) % 5 == 0).view(2, 1, 1, nk)),
    "block-sparse": lambda nk: tw.block_sparse(torch.tensor([[True, False, True, False, True]]), 100, -(-nk // 5)),
    "union": lambda nk: tw.key_range(0, 2) | tw.key_range(nk - 2, nk),
}


def seen_by_group(mask: tw.Mask, call: Call) -> Tensor:
    """(batch, nk, heads_k): some query of the group sees the key."""
    (batch, nq, hq, _), nk, hk = call.q.shape, call.k.shape[1], call.k.shape[2]
    rows = [[tw.show_mask(mask, nq, nk, batch=b, head=h).split("\n") for h in range(hq)] for b in range(batch)]
    kept = torch.tensor([[[[c == "1" for c in r.split(" ")] for r in head] for head in element] for element in rows])
    return kept.any(2).unflatten(1, (hk, hq // hk)).any(2).transpose(1, 2)


@backends
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=["nan", "inf", "minus-inf"])
@pytest.mark.parametrize("name", HIDING)
@pytest.mark.parametrize("score", ["none", "relative", "chain"])
def test_keys_that_no_query_sees_change_nothing_whatever_they_hold(backend, bad, name, score):
    make_leaves, build = SCORES[score]
    call = dense_call(2, 20, 40, 4, 2, mask=HIDING[name](40), leaves=make_leaves(4), score=build)
    hidden = ~seen_by_group(call.mask, call).unsqueeze(-1)
    assert bool(hidden.any())
    dirty = replace(call, k=call.k.masked_fill(hidden, bad), v=call.v.masked_fill(hidden, bad))
    expected, got = call.results(backend), dirty.results(backend)
    assert_all_equal(got, expected)
    assert bool((got["dk"].masked_select(hidden) == 0).all())
    assert bool((got["dv"].masked_select(hidden) == 0).all())


@backends
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
@law
@given(call=packed_calls(), which=st.integers(0, 3))
def test_other_sequences_and_rows_past_the_last_change_nothing_whatever_they_hold(backend, bad, call, which):
    """All but one sequence is bad: that one's results are as before, and rows past the end are zero."""
    call = replace(call, options={"deterministic": True})
    b = which % (len(call.cu[0]) - 1)
    keep_q, keep_k = (slice(int(cu[b]), int(cu[b + 1])) for cu in call.cu)
    spoil = lambda x, part: x.new_full(x.shape, bad).index_copy(0, torch.arange(len(x))[part], x[part])  # noqa: E731
    dirty = replace(
        call, q=spoil(call.q, keep_q), k=spoil(call.k, keep_k), v=spoil(call.v, keep_k), do=spoil(call.do, keep_q),
        dlse=spoil(call.dlse.T, keep_q).T,
    )  # fmt: skip
    expected, got = call.results(backend), dirty.results(backend)
    for name, part in {"o": keep_q, "dq": keep_q, "dk": keep_k, "dv": keep_k}.items():
        assert torch.equal(got[name][part], expected[name][part]), name
    assert torch.equal(got["lse"][:, keep_q], expected["lse"][:, keep_q])
    for name, end in {"o": call.cu[0][-1], "dq": call.cu[0][-1], "dk": call.cu[1][-1], "dv": call.cu[1][-1]}.items():
        assert bool((got[name][int(end) :] == 0).all()), name
    assert bool((got["lse"][:, int(call.cu[0][-1]) :] == -torch.inf).all())


@backends
@law
@given(call=packed_calls())
def test_rows_past_the_last_sequence_change_no_gradient_of_sink_or_leaves(backend, call):
    call = replace(call, options={})
    end_q, end_k = (int(cu[-1]) for cu in call.cu)
    nan_after = lambda x, end: torch.cat([x[:end], torch.full_like(x[end:], torch.nan)])  # noqa: E731
    dirty = replace(
        call, q=nan_after(call.q, end_q), k=nan_after(call.k, end_k), v=nan_after(call.v, end_k), do=nan_after(call.do, end_q),
        dlse=nan_after(call.dlse.T, end_q).T,
    )  # fmt: skip
    assert_all_equal(dirty.results(backend), call.results(backend))


EMPTY_ROWS = {
    "causal-more-queries": lambda: (tw.causal(), torch.arange(30) < 12),
    "window-more-queries": lambda: (tw.window(2, 0), torch.arange(30) < 12),
    "key-range-none": lambda: (tw.key_range(5, 5), torch.ones(30).bool()),
    "keep-some": lambda: (tw.keep(lambda b, h, i, j: i % 3 == 0), torch.arange(30) % 3 != 0),
    "score-of-minus-infinity": lambda: (None, torch.arange(30) % 3 != 0),
}


@backends
@pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4], ids=["", "dropout"])
@pytest.mark.parametrize("name", EMPTY_ROWS)
def test_rows_without_keys_are_zero_and_pass_exactly_nothing_on(backend, name, dropout_p, sink):
    mask, empty = EMPTY_ROWS[name]()
    hide = lambda t: lambda s, b, h, i, j: torch.where(i % 3 == 0, s * t["temperature"][h], -torch.inf)  # noqa: E731
    call = dense_call(
        2, 30, 18, 4, 2, mask=mask, sink=normal(4, seed=20) if sink else None,
        leaves={"temperature": normal(4, seed=21)} if mask is None else {}, score=hide if mask is None else None,
        options={"dropout_p": dropout_p, "dropout_seed": 3},
    )  # fmt: skip
    got = call.results(backend)
    assert bool((got["o"][:, empty] == 0).all())
    assert bool((got["dq"][:, empty] == 0).all())
    lse = call.sink.view(1, -1, 1) if sink else torch.tensor(-torch.inf, dtype=torch.float64)
    assert torch.equal(got["lse"][..., empty], lse.expand(2, 4, int(empty.sum())))
    loud = replace(call, do=call.do.clone(), dlse=call.dlse.clone())
    loud.do[:, empty] = 1e6  # only the sink hears of rows without keys, and of their dlse alone
    after = loud.results(backend)
    assert_all_equal(after, got)
    loud.dlse[..., empty] = 0
    quiet = loud.results(backend)
    for key in got:
        assert key == "dsink" or torch.equal(quiet[key], got[key]), key
    if sink:
        assert_same(got["dsink"] - quiet["dsink"], call.dlse[..., empty].sum((0, 2)))


@backends
@pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
def test_attention_to_no_keys_at_all_is_zero(backend, sink):
    call = dense_call(
        2, 5, 0, 4, 2, sink=normal(4, seed=1) if sink else None, options={"dropout_p": 0.5, "dropout_seed": 1}
    )
    got = call.results(backend)
    assert bool((got["o"] == 0).all())
    assert bool((got["dq"] == 0).all())
    if sink:
        assert torch.equal(got["lse"], call.sink.view(1, -1, 1).expand(2, 4, 5))
        assert_same(got["dsink"], call.dlse.sum((0, 2)))
    else:
        assert bool((got["lse"] == -torch.inf).all())


# -- Equivalences --------------------------------------------------------------------------------------------------


@backends
@law
@given(call=calls())
def test_a_mask_is_a_score_of_minus_infinity(backend, call):
    """Where pairs are hidden by the interval or the predicate, all results are those of hiding them by the score."""
    nq, nk = call.q.shape[1], call.k.shape[1]
    mask = tw.causal() & tw.window(left=5)
    hidden = lambda s, b, h, i, j: torch.where((j <= i + tw.offset) & (j >= i + tw.offset - 5), s, -torch.inf)  # noqa: E731
    if nq == 0:
        return
    by_mask = replace(call, mask=mask, score=None, leaves={})
    by_score = replace(call, mask=None, score=lambda t: hidden, leaves={})
    by_keep = replace(
        call, mask=tw.keep(lambda b, h, i, j: (j <= i + (nk - nq)) & (j >= i + (nk - nq) - 5)), score=None, leaves={}
    )
    expected = by_mask.results(backend)
    assert_all_same(by_score.results(backend), expected)
    assert_all_same(by_keep.results(backend), expected)


@backends
@law
@given(call=calls(rest=("dropout",)))
def test_a_sink_is_one_more_key_of_value_zero(backend, call):
    """Key 0 reads its logit from a table by the score; everything else moves up by one."""
    if call.q.shape[1] == 0:
        return
    hq = call.q.shape[2]
    sink = normal(hq, seed=33)
    nothing = lambda x: torch.cat([torch.zeros_like(x[:, :1]), x], 1)  # noqa: E731
    with_key = Call(
        call.q, nothing(call.k) if call.k.shape[1] else call.k.new_zeros(call.k.shape[0], 1, *call.k.shape[2:]),
        nothing(call.v) if call.v.shape[1] else call.v.new_zeros(call.v.shape[0], 1, *call.v.shape[2:]),
        call.do, call.dlse, leaves={"logit": sink},
        score=lambda t: lambda s, b, h, i, j: torch.where(j == 0, t["logit"][h], s),
    )  # fmt: skip
    expected = with_key.results(backend)
    expected["dk"], expected["dv"] = expected["dk"][:, 1:], expected["dv"][:, 1:]
    expected["dsink"] = expected.pop("dlogit")
    plain = Call(call.q, call.k, call.v, call.do, call.dlse, sink=sink)
    assert_all_same(plain.results(backend), expected)


STRIDES = {
    "transposed": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "expanded": lambda x: x[..., :1].expand(x.shape),
    "sliced": lambda x: torch.stack([x, x], -1)[..., 0],
}
READS = {
    "scattered": ((2, 9), lambda t: lambda s, b, h, i, j: s * t[h, (i - j).clamp(0, 8)]),
    "by-row": ((2, 12), lambda t: lambda s, b, h, i, j: s * t[h, i]),
    "bias": ((12, 12), lambda t: tw.bias(t)),
}


@backends
@pytest.mark.parametrize("form", STRIDES)
@pytest.mark.parametrize("read", READS)
def test_strides_of_leaves_and_sink_do_not_matter(backend, read, form):
    shape, score = READS[read]
    leaf, sink = (STRIDES[form](normal(*n, seed=30)) for n in (shape, (2,)))
    call = dense_call(
        2, 12, 12, 2, 1, sink=sink.contiguous(), leaves={"t": leaf.contiguous()}, score=lambda t: score(t["t"])
    )
    expected = call.results(backend)
    leaf, sink = leaf.requires_grad_(), sink.requires_grad_()
    o, lse = tw.attention_with_lse(call.q, call.k, call.v, score=score(leaf), sink=sink, backend=backend)
    dleaf, dsink = torch.autograd.grad((o, lse), (leaf, sink), (call.do, call.dlse))
    assert_all_equal({"dt": dleaf, "dsink": dsink}, {name: expected[name] for name in ("dt", "dsink")})
    assert dleaf.is_contiguous()
    assert dsink.is_contiguous()


@backends
@law
@given(call=calls(rest=()), shift=st.floats(-50, 50))
def test_a_constant_added_to_all_scores_moves_lse_alone(backend, call, shift):
    call = replace(call, score=None, leaves={})
    moved = replace(call, score=lambda t: lambda s, b, h, i, j: s + shift)
    got, expected = moved.results(backend), call.results(backend)
    expected["lse"] = expected["lse"] + shift
    assert_all_same(got, expected)


@backends
def test_results_do_not_depend_on_the_numbers_of_queries_asked_at_once(backend):
    """Queries one by one, each with the keys it sees, are the causal whole."""
    call = dense_call(1, 13, 17, 2, 1)
    whole = tw.attention(call.q, call.k, call.v, causal=True, backend=backend)
    for i in range(13):
        n = i + 5
        one = tw.attention(call.q[:, i : i + 1], call.k[:, :n], call.v[:, :n], causal=True, backend=backend)
        assert_same(one, whole[:, i : i + 1])


def test_predicates_mean_the_same_in_every_precision():
    """0.1 i + 0.1 j and 0.1 (i + j) differ by rounding: fp32 decides, also for float64 inputs and partial tiles."""
    q = normal(1, 64, 1, 8, seed=1)
    mask = tw.keep(lambda b, h, i, j: (i * 0.1 + j * 0.1) * 10 == (i + j))
    shown = torch.tensor([[c == "1" for c in row.split(" ")] for row in tw.show_mask(mask, 64).split("\n")])
    for backend in BACKENDS:
        expected = tw.attention(q, q, q, mask=shown, backend=backend)
        assert_same(tw.attention(q, q, q, mask=mask, backend=backend), expected)
