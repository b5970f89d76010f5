"""What every backend must do: run a case right, or refuse it with reasons. One suite, subclassed once per backend.

class TestPortable(Contract):
    backend = Portable()
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench import cases, testing
from bench.testing import HIDING, Call, call, normal, of_case, paged_call, poisoned, qkv
from tests import pieces
from tilewise import accuracy, expr
from tilewise.backends.base import Backend, Grads, Output, OutputGrads


def run(backend: Backend, c: Call) -> dict[str, Tensor]:
    """Results by name; skips, with the reasons, what the backend refuses."""
    skip_refused(backend, c)
    with poisoned():
        out = backend.forward(c.p, c.t)
        given = OutputGrads.of(c.do, c.dlse)
        grads = backend.backward(c.p, c.t, out, given.do, given.dlse)
    check_form(c, out, grads)
    return accuracy.tensors(out, grads)


def skip_refused(backend: Backend, c: Call) -> None:
    reasons = backend.unsupported(c.p)
    if reasons:
        pytest.skip(f"{backend.name} refuses: {'; '.join(reasons)}")


def check_form(c: Call, out: Output, grads: Grads) -> None:
    """Shapes, dtypes, and that everything is contiguous."""
    p, t = c.p, c.t
    assert out.o.shape == (*t.q.shape[:-1], t.v.shape[-1])
    assert out.lse.dtype == p.compute_dtype
    pairs = [(out.o, p.dtype), *((g, p.dtype) for g in (grads.dq, grads.dk, grads.dv))]
    assert all(x.is_contiguous() and x.dtype == dtype for x, dtype in pairs)
    assert (grads.dq.shape, grads.dk.shape, grads.dv.shape) == (t.q.shape, t.k.shape, t.v.shape)
    for slot, grad in grads.leaves.items():
        assert (grad.shape, grad.dtype) == (t.leaves[slot].shape, t.leaves[slot].dtype)
    assert set(grads.leaves) == {slot for slot in p.spec.grad_slots if slot in p.spec.score_slots}


def agree(backend: Backend, c: Call) -> None:
    """Runs and is judged, or refuses."""
    results = run(backend, c)
    errors = accuracy.Expected.of(c.p, c.t, c.do, c.dlse).judge(results)
    wrong = [str(e) for e in errors if not e.ok]
    assert not wrong, "; ".join(wrong)


ASINH = expr.Operation(
    torch.asinh, "float", None, (lambda x, r: expr.apply("rsqrt", x * x + expr.ONE),), float_args=True
)
NEW_OPERATION = {
    "mask": lambda f: lambda b, h, i, j: f(0.1 * (i - j)) < 0.5,
    "score": lambda f: lambda s, b, h, i, j: 3.0 * f(s / 3.0),
}


# Rows without keys, a sink, which does not count, and a score in log2; bounded scores, which need no maximum; a predicate, dropout and
# a score that hides; packed sequences, an empty one too; one query, whose keys may be split or whose heads may share a tile.
STATS = {
    "causal-sink": lambda: (qkv(nq=40, nk=30), {"causal": True, "sink": 9 * normal(4), "score": tw.softcap(30.0)}),
    "bounded": lambda: (qkv(batch=1, dtype=torch.bfloat16), {"mask": tw.window(9, 3), "score": tw.softcap(2.0)}),
    "keep-dropout": lambda: (
        qkv(batch=1),
        {"mask": lambda b, h, i, j: (i * j) % 3 != 1, "score": _hiding(), "dropout_p": 0.4, "dropout_seed": 2},
    ),
    "packed": lambda: (
        [x.flatten(0, 1) for x in qkv(batch=1, nq=90, nk=90)],
        {"cu_seqlens_q": torch.tensor([0, 33, 33, 80]), "causal": True, "sink": normal(4)},
    ),
    "one-query": lambda: (qkv(nq=1, nk=200, hq=4, hk=1, dtype=torch.bfloat16), {}),
    "float64": lambda: (qkv(dtype=torch.float64), {"causal": True, "softmax_scale": -0.7}),
}


FIRST = {
    "more-keys": lambda: (qkv(nq=40, nk=90), {"mask": tw.causal(align="first")}),
    "more-queries": lambda: (qkv(nq=90, nk=40), {"mask": tw.window(9, 3, align="first")}),
    "packed": lambda: (
        [x.flatten(0, 1) for x in qkv(batch=1, nq=70, nk=90)],
        {
            "cu_seqlens_q": torch.tensor([0, 40, 40, 70]),
            "cu_seqlens_k": torch.tensor([0, 9, 30, 90]),
            "mask": tw.causal(align="first"),
        },
    ),
}


def _hiding() -> tw.Score:
    return tw.score(lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s, -torch.inf)) >> tw.alibi(normal(4))


# No composition of other operations is right for these in every dtype, so kernels refuse them by name until one emits them.
IN_NO_KERNEL = {"acos", "asin", "atan", "atan2", "erfc"}
ELEMENTARY = {
    "tangents": lambda t: lambda s, b, h, i, j: torch.tan(s / 9) + torch.fmod(s, 1.7) + torch.fmod(i - j, 3),
    "hyperbolic": lambda t: lambda s, b, h, i, j: torch.sinh(s / 3) + torch.cosh(s / 9) * t[h] + torch.hypot(s, t[h]),
    "sums": lambda t: lambda s, b, h, i, j: torch.logaddexp(s, t[h]) + torch.lerp(s, t[h], 0.3),
    "finite": lambda t: (
        lambda s, b, h, i, j: torch.where(torch.isfinite(t[h] / (i - j)) & ~torch.isnan(s), s * t[h], 0)
    ),
    "arcs": lambda t: lambda s, b, h, i, j: torch.atan2(s, t[h] + 3) + torch.erfc(s) + torch.asin(s.clamp(-9, 9) / 10),
}


LARGE = {
    "number": lambda b, h, i, j: j < 2**40 + 0 * i,
    "product": lambda b, h, i, j: (j * 2654435761) % 7 != 3,
    "sum": lambda b, h, i, j: (j << 30) + (i << 30) > (1 << 33),
    "power": lambda b, h, i, j: ((i + 5000) ** 2 + j) % 7 != 3,
    "power-of-index": lambda b, h, i, j: (-3) ** (j % 5) < i - 20,
}


class Contract:
    """Subclasses set ``backend`` and may set ``device``."""

    backend: Backend
    device = "cpu"

    def call(self, *tensors: Tensor, **options: object) -> Call:
        return call(*tensors, device=self.device, **options)

    def output_under(self, mask: tw.Mask) -> Tensor:
        """o of a call without gradients, which the interpreter computes in a fourth of the time."""
        c = self.call(*qkv(batch=1), mask=mask).forward_only()
        skip_refused(self.backend, c)
        return self.backend.forward(c.p, c.t).o

    def of_case(self, case: cases.Case) -> Call:
        return of_case(case, self.device)

    @pytest.mark.parametrize("case", cases.tagged("contract"), ids=lambda case: case.name.removeprefix("contract-"))
    def test_agrees_with_the_oracle(self, case):
        agree(self.backend, self.of_case(case))

    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16], ids=str)
    def test_narrow_whole_numbers_of_a_mask_do_not_wrap(self, dtype):
        most = torch.iinfo(dtype).max
        x = torch.tensor([0, 1, most // 2, most - 1, most]).repeat(14)
        narrow, device = x.to(dtype).to(self.device), self.device
        kept = {
            "sum": lambda t: lambda b, h, i, j: t[i] + t[j] > most,
            "difference": lambda t: lambda b, h, i, j: t[i] - t[j] >= 0,
            "product": lambda t: lambda b, h, i, j: t[i] * t[j] > most,
            "opposite": lambda t: lambda b, h, i, j: -t[i] - 2 < t[j] - most,
        }
        i, j = torch.arange(70).view(-1, 1), torch.arange(70)
        for name, mask in kept.items():
            told, shown = (self.output_under(m) for m in (mask(narrow), tw.dense(mask(x)(0, 0, i, j).to(device))))
            torch.testing.assert_close(told, shown, msg=name)

    @pytest.mark.parametrize("beyond", [2**31 - 1, 2**31 + 5, 3 * 10**9, 2**40], ids=str)
    def test_a_bound_beyond_32_bits_is_beyond_all_keys(self, beyond):
        same = [
            (tw.window(3, beyond), tw.window(3)),
            (tw.window(beyond, 3), tw.window(None, 3)),
            (tw.key_range(-beyond, beyond), tw.key_range(0, 70)),
            (tw.key_lengths(beyond), tw.key_lengths(70)),
            (tw.prefix(beyond), tw.prefix(70)),
            (tw.prefix(-beyond), tw.prefix(0)),
        ]
        for far, near in same:
            found, wanted = (self.output_under(m) for m in (far, near))
            torch.testing.assert_close(found, wanted, msg=f"{far}")

    @pytest.mark.parametrize("name", LARGE)
    def test_large_whole_numbers_are_exact_or_refused(self, name):
        mask = LARGE[name]
        told = self.call(*qkv(), mask=mask)
        refused = any("more than 32 bits" in reason for reason in self.backend.unsupported(told.p))
        assert refused == (self.backend.name == "triton" and not name.startswith("power"))
        if not refused:
            dense = mask(0, 0, torch.arange(70).view(-1, 1), torch.arange(70)).expand(70, 70).to(self.device)
            found, wanted = (run(self.backend, c) for c in (told, self.call(*qkv(), mask=tw.dense(dense))))
            torch.testing.assert_close(found["o"], wanted["o"])

    def test_a_mask_tells_float64_numbers_apart_or_is_refused(self):
        times = (1.7e9 + torch.arange(70, dtype=torch.float64) / 8).to(
            self.device
        )  # fp32 has one number for all of them
        told = self.call(*qkv(), mask=lambda b, h, i, j: (times[i] - times[j]).abs() < 1)
        refused = any("reads float64" in reason for reason in self.backend.unsupported(told.p))
        assert refused == (self.backend.name == "triton")
        if not refused:
            shown = run(self.backend, self.call(*qkv(), mask=tw.window(7, 7)))
            for name, x in run(self.backend, told).items():
                torch.testing.assert_close(x, shown[name], msg=name)

    @pytest.mark.parametrize("hiding", HIDING)
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
    def test_keys_that_no_query_sees_never_touch_a_result(self, hiding, bad):
        q, k, v = qkv()
        clean = self.call(q, k, v, mask=HIDING[hiding]())
        kept = tw.show_mask  # every (batch, head) decides for its own group
        hidden = torch.stack(
            [torch.stack([_columns_unseen(kept, HIDING[hiding](), b, h) for h in (0, 2)], 1) for b in (0, 1)]
        )
        assert hidden.any()
        dirty_k, dirty_v = (x.masked_fill(hidden.unsqueeze(-1), bad) for x in (k, v))
        dirty = self.call(q, dirty_k, dirty_v, mask=HIDING[hiding]())
        for name, x in run(self.backend, dirty).items():
            assert torch.equal(x, run(self.backend, clean)[name]), name

    def test_neighbouring_sequences_never_touch_a_result(self):
        q, k, v = (x.flatten(0, 1) for x in qkv(batch=1, nq=90, nk=90))
        cu = torch.tensor([0, 33, 33, 80])
        good = run(self.backend, self.call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True))
        do = normal(90, 4, 16, seed=9)
        k[33:80], v[33:80], q[80:], k[80:], v[80:], do[80:] = (torch.nan,) * 6
        bad = run(self.backend, self.call(q, k, v, do, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True))
        assert torch.equal(bad["o"][:33], good["o"][:33])
        assert torch.equal(bad["lse"][:, :33], good["lse"][:, :33])
        for name in ("o", "dq", "dk", "dv"):
            assert torch.isfinite(bad[name][:33]).all(), name
            assert (bad[name][80:] == 0).all(), name
        assert (bad["lse"][:, 80:] == -torch.inf).all()

    @pytest.mark.parametrize("sink", [False, True], ids=["no-sink", "sink"])
    def test_rows_without_keys_are_zero(self, sink):
        q, k, v = qkv(nq=70, nk=30)
        sinks = normal(4) if sink else None
        got = run(self.backend, self.call(q, k, v, causal=True, sink=sinks))
        assert (got["o"][:, :40] == 0).all()
        assert (got["dq"][:, :40] == 0).all()
        expected = sinks.view(1, 4, 1).expand(2, 4, 40) if sink else torch.full((2, 4, 40), -torch.inf)
        assert torch.equal(got["lse"][..., :40].cpu(), expected)

    def test_without_any_key_only_rows_of_a_sequence_see_the_sink(self):
        q, k, v = (x[0] for x in qkv(batch=1, nq=9, nk=0))
        sink = torch.tensor([0.5, -torch.inf, -2.0, 0.0], requires_grad=True)
        cu_q, cu_k = torch.tensor([0, 2, 6]), torch.zeros(3, dtype=torch.int64)
        c = self.call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, sink=sink)
        got = {name: x.cpu() for name, x in run(self.backend, c).items()}
        logits = sink.detach().view(4, 1)
        assert torch.equal(got["lse"], torch.where(torch.arange(9) < 6, logits, -torch.inf))
        by_row = torch.where(logits == -torch.inf, 0, c.dlse.cpu())
        torch.testing.assert_close(got["dsink"], by_row[:, :6].sum(1))
        assert (got["o"] == 0).all()
        assert (got["dq"] == 0).all()

    @pytest.mark.parametrize("form", ["transposed", "expanded", "sliced", "reversed-do"])
    def test_strides_do_not_matter(self, form):
        q, k, v = qkv(hq=4, hk=4)
        do = normal(2, 70, 4, 16, seed=5)
        forms = {
            "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            "expanded": lambda x: x[:1, :, :1].expand(2, -1, 4, -1),
            "sliced": lambda x: torch.cat([x, x], -1)[..., :16],
            "reversed-do": lambda x: x,
        }
        strided = [forms[form](x) for x in (q, k, v)]
        strided_do = do.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) if form == "reversed-do" else do
        agree(self.backend, self.call(*strided, strided_do, causal=True))

    def test_one_leaf_read_twice_and_a_zero_dimensional_leaf(self):
        table, temperature = normal(4, 4).requires_grad_(), torch.tensor(1.3, requires_grad=True)
        score = tw.score(lambda s, b, h, i, j: s * temperature + table[h, i % 4] + table[h, j % 4] * temperature)
        agree(self.backend, self.call(*qkv(), score=score))

    @pytest.mark.parametrize("name", ELEMENTARY)
    def test_elementary_functions_are_right_or_refused(self, name):
        score = tw.score(ELEMENTARY[name](normal(4, seed=6).requires_grad_()))
        agree(self.backend, self.call(*qkv(nq=20, nk=25), score=score))

    def test_a_score_that_ignores_s_still_gives_leaves_their_gradients(self):
        t = normal(70).requires_grad_()
        agree(self.backend, self.call(*qkv(), score=lambda s, b, h, i, j: t[j]))

    def test_a_score_of_minus_infinity_hides_the_pair(self):
        score = tw.score(lambda s, b, h, i, j: torch.where((i + j) % 2 == 0, s, -torch.inf))
        hidden = run(self.backend, self.call(*qkv(), score=score))
        masked = self.call(*qkv(), mask=lambda b, h, i, j: (i + j) % 2 == 0)
        errors = accuracy.Expected.of(masked.p, masked.t, masked.do, masked.dlse).judge(hidden)
        assert not [str(e) for e in errors if not e.ok]

    @pytest.mark.parametrize("name", FIRST)
    def test_masks_aligned_at_the_first_key(self, name):
        tensors, options = FIRST[name]()
        agree(self.backend, self.call(*tensors, **options))

    @pytest.mark.parametrize("name", STATS)
    def test_the_largest_scores_agree_with_the_oracle(self, name):
        """The backward is that of a call without them."""
        tensors, options = STATS[name]()
        c = self.call(*tensors, **options, max_logit=True).forward_only()
        if reasons := self.backend.unsupported(c.p):
            pytest.skip(f"{self.backend.name} refuses: {'; '.join(reasons)}")
        assert not testing.wrong(self.backend, c)

    def test_the_largest_scores_of_a_paged_call_agree_with_the_oracle(self):
        q, k, v = qkv(nq=3, nk=64)
        cache = tw.paged(k, v, torch.tensor([[1], [0]], dtype=torch.int32), torch.tensor([50, 2], dtype=torch.int32))
        c = paged_call(q, cache, self.device, causal=True, max_logit=True)
        if reasons := self.backend.unsupported(c.p):
            pytest.skip(f"{self.backend.name} refuses: {'; '.join(reasons)}")
        assert not testing.wrong(self.backend, c)

    def test_the_largest_score_is_nan_where_o_is_and_minus_infinity_without_keys(self):
        bad = torch.zeros(70).index_fill(0, torch.tensor([3, 4]), torch.nan)
        bad[5], bad[69] = torch.inf, -torch.inf
        score = tw.score(lambda s, b, h, i, j: s + bad[i])
        c = self.call(*qkv(batch=1), score=score, max_logit=True)
        if self.backend.unsupported(c.p):
            pytest.skip(f"{self.backend.name} refuses")
        out = self.backend.forward(c.p, c.t)
        assert torch.equal(out.max_logit.isnan(), out.o.isnan().any(-1).transpose(1, 2))
        assert out.max_logit[0, :, 3:6].isnan().all()
        assert (out.max_logit[0, :, 69] == -torch.inf).all()
        assert out.max_logit[0, :, [0, 1, 2, 6, 68]].isfinite().all()

    def test_a_sequence_does_not_depend_on_the_rest_of_its_batch_when_deterministic(self):
        q, k, v = qkv(batch=3)
        do = normal(3, 70, 4, 16, seed=5)
        whole, alone = (
            self.call(q[b], k[b], v[b], do[b], causal=True, deterministic=True) for b in (slice(None), slice(1, 2))
        )
        whole.dlse, alone.dlse = torch.zeros_like(whole.dlse), torch.zeros_like(alone.dlse)
        results, expected = run(self.backend, whole), run(self.backend, alone)
        assert all(torch.equal(results[name][1:2], expected[name]) for name in expected)

    @pytest.mark.parametrize("part", ["mask", "score"])
    def test_a_new_operation_is_refused_by_name_or_right(self, part, monkeypatch):
        known = self.call(*qkv(), **{part: NEW_OPERATION[part](torch.tanh)})
        if not self.backend.unsupported(known.p):  # else it refuses every such mask or score
            monkeypatch.setitem(expr.OPERATIONS, "asinh", ASINH)
            new = self.call(*qkv(), **{part: NEW_OPERATION[part](torch.asinh)})
            reasons = self.backend.unsupported(new.p)
            assert all("asinh" in reason for reason in reasons)
            if not reasons:
                agree(self.backend, new)

    @pytest.mark.parametrize("name", pieces.OPTIONS)
    def test_pieces_of_an_attention_are_the_whole(self, name):
        reasons = pieces.refusals(self.backend, name, self.device)
        if reasons:
            pytest.skip(f"{self.backend.name} refuses: {'; '.join(reasons)}")
        assert not pieces.wrong(self.backend, name, self.device)

    def test_repeated_runs_are_bitwise_equal_when_deterministic(self):
        c = self.call(*qkv(), causal=True, score=tw.bias(normal(1, 4, 70, 70).requires_grad_()), deterministic=True)
        first, second = run(self.backend, c), run(self.backend, c)
        assert all(torch.equal(first[name], second[name]) for name in first)


def _columns_unseen(show, mask, b: int, h: int) -> Tensor:
    """Keys of one head group (query heads h and h + 1) that no query sees: bool (70,)."""
    rows = "\n".join(show(mask, 70, batch=b, head=head) for head in (h, h + 1)).split("\n")
    return torch.tensor([all(row.split(" ")[j] == "." for row in rows) for j in range(70)])
