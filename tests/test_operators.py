"""The operators as PyTorch sees them: autograd, compile, export, autocast, checkpoint, and what is refused."""

import os
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import tilewise as tw
from bench.testing import normal, qkv
from tilewise.backends.cpu import Cpu
from tilewise.spec import parse_spec

F64 = torch.float64


def wanting_grad(*tensors):
    return [t.requires_grad_() for t in tensors]


FEATURES = {
    "plain": dict,
    "causal": lambda: {"causal": True},
    "window-sink": lambda: {"mask": tw.window(left=3), "sink": normal(2, dtype=F64).requires_grad_()},
    "softcap-bias": lambda: {"score": tw.softcap(2.0) >> tw.bias(normal(1, 2, 1, 6, dtype=F64).requires_grad_())},
    "alibi": lambda: {"score": tw.alibi(normal(2, dtype=F64).requires_grad_()), "causal": True},
    "keep-dropout": lambda: {"mask": lambda b, h, i, j: (i + j) % 3 != 0, "dropout_p": 0.3, "dropout_seed": 3},
}


def leaves_of(options):
    score = options.get("score")
    return [*(score.leaves if score is not None else ()), *([options["sink"]] if "sink" in options else [])]


@pytest.mark.parametrize("backend", ["portable", "reference"])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradients_agree_with_finite_differences(feature, backend):
    options = FEATURES[feature]()
    q, k, v = wanting_grad(*qkv(batch=1, nq=5, nk=6, hq=2, hk=1, d=3, dv=2, dtype=F64))
    leaves = leaves_of(options)
    run = lambda q, k, v, *_: tw.attention_with_lse(q, k, v, backend=backend, **options)  # noqa: E731
    assert torch.autograd.gradcheck(run, (q, k, v, *leaves))


def _opcheck_arguments(feature):
    from tilewise.spec import Options, assemble

    options = FEATURES[feature]()
    if "mask" in options and callable(options["mask"]):
        options["mask"] = tw.keep(options["mask"])
    q, k, v = wanting_grad(*qkv(batch=1, nq=5, nk=6, hq=2, hk=1, d=3, dv=2, dtype=F64))
    return q, k, v, *assemble(q, k, v, Options(**options))


@pytest.mark.parametrize("which", ["q", "k", "v", "do", "leaf", "sink"])
@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_views_that_are_marked_as_negative_are_read_as_such(backend, which):
    """torch marks them (``z.conj().imag``) in place of touching their memory."""
    q, k, v = qkv(hk=4)
    values = {"q": q, "k": k, "v": v, "do": normal(2, 70, 4, 16), "leaf": normal(4, 70), "sink": normal(4)}

    def results(negative):
        x = {name: (negative(t) if name == which else t.clone()).detach() for name, t in values.items()}
        wanting_grad(*(t for name, t in x.items() if name != "do"))
        leaf = x["leaf"]
        score = tw.score(lambda s, b, h, i, j: s + leaf[h, j])
        o = tw.attention(x["q"], x["k"], x["v"], score=score, sink=x["sink"], backend=backend)
        o.backward(x["do"])
        return [o, *(t.grad for name, t in x.items() if name != "do")]

    pairs = zip(results(torch._neg_view), results(torch.neg), strict=True)
    assert all(torch.equal(marked, negated) for marked, negated in pairs)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_forward_operator_passes_opcheck(feature):
    torch.library.opcheck(torch.ops.tilewise.attention.default, _opcheck_arguments(feature))


@pytest.mark.parametrize("feature", ["window-sink", "keep-dropout"])
def test_the_operator_with_the_largest_scores_passes_opcheck(feature):
    *tensors, spec = _opcheck_arguments(feature)
    spec = replace(parse_spec(spec), max_logit=True).text()
    torch.library.opcheck(torch.ops.tilewise.attention_with_stats.default, (*tensors, spec))


@pytest.mark.parametrize("feature", FEATURES)
def test_the_backward_operator_passes_opcheck(feature):
    q, k, v, extras, seed, spec = _opcheck_arguments(feature)
    tensors = [t.detach() for t in (q, k, v)]
    extras = [t.detach() for t in extras]
    o, lse = torch.ops.tilewise.attention(*tensors, extras, seed, spec)
    arguments = (torch.randn_like(o), torch.randn_like(lse), *tensors, o, lse, extras, seed, spec)
    for overload in ("default", f"flat{len(parse_spec(spec).grad_slots)}"):
        torch.library.opcheck(getattr(torch.ops.tilewise.attention_backward, overload), arguments)


def _model(sink, bias):
    def forward(q, k, v):
        mask = tw.causal() & tw.window(left=5)
        o, lse = tw.attention_with_lse(q * 2, k, v, mask=mask, score=tw.softcap(20.0) >> tw.bias(bias), sink=sink)
        return (o.transpose(1, 2).reshape(-1) ** 2).sum() + lse.where(lse.isfinite(), 0.0).sum()

    return forward


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_without_graph_breaks_gives_the_same_gradients(backend):
    torch._dynamo.reset()
    sink, bias = wanting_grad(normal(4), normal(4, 20, 20))
    inputs = wanting_grad(*qkv(nq=20, nk=20))
    forward = _model(sink, bias)
    expected = torch.autograd.grad(forward(*inputs), (*inputs, sink, bias))
    compiled = torch.compile(forward, fullgraph=True, backend=backend)
    got = torch.autograd.grad(compiled(*inputs), (*inputs, sink, bias))
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


def test_compile_takes_a_traced_function_with_lookups_and_dynamic_lengths():
    torch._dynamo.reset()
    slopes = normal(4).requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def forward(q, k, v):
        score = tw.score(lambda s, b, h, i, j: s + (tw.lookup(slopes, h) + slopes[h]) / 2 * (i - j))
        return tw.attention(q, k, v, causal=True, score=score)

    for n in (17, 40, 33):
        q, k, v = wanting_grad(*qkv(nq=n, nk=n))
        got = torch.autograd.grad(forward(q, k, v).square().sum(), (q, slopes))
        o = tw.attention(q, k, v, causal=True, score=lambda s, b, h, i, j: s + slopes[h] * (i - j))
        for x, y in zip(got, torch.autograd.grad(o.square().sum(), (q, slopes)), strict=True):
            torch.testing.assert_close(x, y)


# What a score may compute of s, h, i, j, a length n, a number t and a table.
COMPILED = {
    "where": lambda s, h, i, j, n, t, table: torch.where(i >= j, s, s - 2),
    "tanh": lambda s, h, i, j, n, t, table: 20 * torch.tanh(s / 20),
    "maximum": lambda s, h, i, j, n, t, table: torch.maximum(s, t),
    "silu": lambda s, h, i, j, n, t, table: torch.nn.functional.silu(s),
    "logsigmoid": lambda s, h, i, j, n, t, table: torch.nn.functional.logsigmoid(s),
    "expit": lambda s, h, i, j, n, t, table: torch.special.expit(s),
    "rsub": lambda s, h, i, j, n, t, table: torch.rsub(s, 1.0),
    "a number divided": lambda s, h, i, j, n, t, table: s / t + t / (1 + s.abs()),
    "a table": lambda s, h, i, j, n, t, table: s + table[h, (i - j).clamp(-2, 2) + 2],
    "a changed table": lambda s, h, i, j, n, t, table: s + (2 * table)[h, i % 5],
    "a length": lambda s, h, i, j, n, t, table: torch.where(j - n // 2 < 0, s, s * (n - j) / n),
    "a compared length": lambda s, h, i, j, n, t, table: torch.where(j < n - 3, s, s - 1),
    "a scale of a length": lambda s, h, i, j, n, t, table: s * n**0.5,
}


@pytest.mark.parametrize("name", COMPILED)
def test_compile_traces_functions_of_torch_tables_and_lengths(name):
    torch._dynamo.reset()
    table, t = wanting_grad(normal(4, 5), normal())

    def forward(q):
        n = q.shape[1]
        return tw.attention(q, q, q, score=lambda s, b, h, i, j: COMPILED[name](s, h, i, j, n, t, table))

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for n in (17, 30):
        q = normal(2, n, 4, 8).requires_grad_()
        results = [
            torch.autograd.grad(f(q).square().sum(), (q, table, t), allow_unused=True) for f in (compiled, forward)
        ]
        for x, y in zip(*results, strict=True):
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y)


def test_compile_draws_dropout_and_varlen_works():
    torch._dynamo.reset()
    q, k, v = (x.flatten(0, 1) for x in qkv(nq=30, nk=30))
    cu = torch.tensor([0, 25, 60])
    compiled = torch.compile(
        lambda q, k, v: tw.attention_varlen(q, k, v, cu, dropout_p=0.5), fullgraph=True, backend="aot_eager"
    )
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert not torch.equal(first, second)
    assert torch.isfinite(first).all()


def test_a_compiled_function_sees_what_the_tensor_of_its_mask_holds():
    torch._dynamo.reset()
    q, k, v = qkv(nq=40, nk=40)
    ids = torch.arange(40) // 7
    mask = tw.causal() & tw.documents(ids)  # made outside
    prepared = mask.prepare(q, k)

    def compiled(mask):
        return torch.compile(lambda q, k, v: tw.attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager")

    plain = compiled(mask)
    for forward in (plain, compiled(prepared)):
        torch.testing.assert_close(forward(q, k, v), tw.attention(q, k, v, mask=mask))
    ids.copy_(torch.arange(40) // 13)
    expected = tw.attention(q, k, v, mask=tw.causal() & tw.documents(torch.arange(40) // 13))
    torch.testing.assert_close(plain(q, k, v), expected)


def test_compiled_autograd_traces_the_backward_of_an_eager_call():
    torch._dynamo.reset()
    q, k, v = wanting_grad(*qkv(nq=20, nk=20))
    table, sink = wanting_grad(normal(4, 9), normal(4))

    def loss():
        score = tw.score(lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 8)])
        o, lse = tw.attention_with_lse(q, k, v, causal=True, score=score, sink=sink)
        return o.square().sum() + lse.square().sum()

    wanted = (q, k, v, table, sink)
    expected = torch.autograd.grad(loss(), wanted)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss().backward()
    for x, y in zip(wanted, expected, strict=True):
        torch.testing.assert_close(x.grad, y)


def _backward(q, attend):
    return torch.autograd.grad(attend(q).square().sum(), q)[0]


def _checkpointed_backward(q, attend):
    return _backward(q, partial(checkpoint, attend, use_reentrant=False))


def _second_derivative(q, attend):
    dq = torch.autograd.grad(attend(q).square().sum(), q, create_graph=True)[0]
    return torch.autograd.grad(dq.square().sum(), q)[0]


@pytest.mark.parametrize("step", [_backward, _checkpointed_backward, _second_derivative])
def test_a_compiled_step_that_calls_eager_attention_compiles_none_of_its_insides(step, monkeypatch):
    """PyTorch calls kernels and backwards from C++, where Dynamo takes each for a function of the user's."""
    torch._dynamo.reset()
    (q,), ids, files = wanting_grad(normal(1, 20, 2, 8)), torch.arange(20) // 6, []
    attend = torch.compiler.disable(lambda q: tw.attention(q, q, q, mask=tw.documents(ids), score=tw.softcap(3.0)))
    original = torch._dynamo.convert_frame._compile

    def compiled(code, *given, **named):
        files.append(code.co_filename)
        return original(code, *given, **named)

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", compiled)
    found = torch.compile(lambda q: step(q, attend), backend="eager")(q)
    torch.testing.assert_close(found, step(q, attend))
    assert __file__ in files
    assert not [name for name in files if name.startswith(os.path.dirname(tw.__file__))]


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_traced_function_and_a_checkpoint_are_one_compiled_graph(place):
    """Made inside, Dynamo counts its mode of functions as a side effect, which that setting allows (docs/switching.md)."""
    torch._dynamo.reset()
    q, table = wanting_grad(normal(1, 20, 2, 8), normal(2, 20, 20))

    def learned(table):
        return tw.score(lambda s, b, h, i, j: s + table[h, i, j])

    def outside(q, table):
        score = learned(table)
        return checkpoint(lambda q: tw.attention(q, q, q, score=score), q, use_reentrant=False)

    def inside(q, table):
        return checkpoint(lambda q, table: tw.attention(q, q, q, score=learned(table)), q, table, use_reentrant=False)

    run = {"outside": outside, "inside": inside}[place]
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=place == "inside"):
        o = torch.compile(run, fullgraph=True, backend="aot_eager")(q, table)
    found = [o, *torch.autograd.grad(o.square().sum(), (q, table))]
    o = tw.attention(q, q, q, score=learned(table))
    for x, y in zip(found, [o, *torch.autograd.grad(o.square().sum(), (q, table))], strict=True):
        torch.testing.assert_close(x, y)


def test_what_symbolic_trace_gives_is_refused_by_name():
    with pytest.raises(ValueError, match=r"q must be a tensor, got Proxy; torch\.fx\.symbolic_trace has none"):
        torch.fx.symbolic_trace(lambda q: tw.attention(q, q, q))


def test_export_keeps_the_operator():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(normal(4, 20, 20))

        def forward(self, q, k, v):
            return tw.attention(q, k, v, causal=True, score=tw.bias(self.bias))

    q, k, v = qkv(nq=20, nk=20)
    exported = torch.export.export(Layer(), (q, k, v))
    assert any(n.target is torch.ops.tilewise.attention.default for n in exported.graph.nodes)
    torch.testing.assert_close(exported.module()(q, k, v), Layer()(q, k, v))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.filterwarnings(
    "ignore:While compiling, we found certain side effects"
)  # the mode in which a function is traced
def test_export_traces_a_function_that_reads_a_table_and_a_length(strict):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(normal(4, 9))

        def forward(self, q):
            n = q.shape[1] // 2
            score = lambda s, b, h, i, j: torch.tanh(s) + self.table[h, (i - j).clamp(-4, 4) + 4] * (j - n)  # noqa: E731
            return tw.attention(q, q, q, score=score)

    q = normal(2, 20, 4, 8)
    batch = torch.export.Dim("batch", min=2, max=8)
    layer = Layer()
    exported = torch.export.export(layer, (q,), strict=strict, dynamic_shapes=({0: batch},)).module()
    other = normal(3, 20, 4, 8)
    torch.testing.assert_close(exported(other), layer(other))


def test_a_length_that_is_a_symbol_is_a_number_of_a_traced_function():
    def forward(q):
        n = q.shape[1] // 2
        return tw.attention(q, q, q, mask=lambda b, h, i, j: (j < n) | (i == n), score=lambda s, b, h, i, j: s * n**0.5)

    q = normal(2, 20, 4, 8)
    traced = make_fx(forward, tracing_mode="symbolic")(q)
    torch.testing.assert_close(traced(q), forward(q))


def test_checkpoint_repeats_the_dropout_of_the_forward():
    q, k, v = wanting_grad(*qkv())
    run = lambda q, k, v: tw.attention(q, k, v, dropout_p=0.4, causal=True)  # noqa: E731
    torch.manual_seed(3)
    expected = torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v))
    torch.manual_seed(3)
    got = torch.autograd.grad(checkpoint(run, q, k, v, use_reentrant=False).square().sum(), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


def test_autocast_runs_in_its_dtype_and_returns_gradients_in_the_inputs():
    q, k, v = wanting_grad(*qkv())
    with torch.autocast("cpu", torch.bfloat16):
        o, lse = tw.attention_with_lse(q, k, v, causal=True)
    assert (o.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    expected = tw.attention(*(x.bfloat16() for x in (q, k, v)), causal=True)
    assert torch.equal(o, expected)
    (dq,) = torch.autograd.grad(o.float().sum(), q)
    assert dq.dtype == torch.float32


def test_explain_tells_of_the_dtype_that_autocast_hands_on():
    q = torch.randn(1, 40, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert tw.explain(q, q, q).problem.dtype == tw.attention(q, q, q).dtype == torch.bfloat16
        double = q.double()
        assert tw.explain(double, double, double).problem.dtype == torch.float64
    assert tw.explain(q, q, q).problem.dtype == torch.float32


def test_backwards_that_are_called_inside_autocast_give_the_bits_of_those_outside():
    q, k, v = wanting_grad(*qkv())
    o = tw.attention(q, k, v, causal=True, backend="portable")

    def derivatives():
        first = torch.autograd.grad(o, (q, k, v), normal(*o.shape), create_graph=True)
        return *first, *torch.autograd.grad(first, (q, k, v), [x.detach() for x in (q, k, v)], retain_graph=True)

    expected = derivatives()
    with torch.autocast("cpu", torch.bfloat16):
        found = derivatives()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


def test_no_grad_and_detached_inputs_give_no_graph():
    q, k, v = wanting_grad(*qkv())
    with torch.no_grad():
        assert not tw.attention(q, k, v).requires_grad
    assert not tw.attention(q.detach(), k.detach(), v.detach()).requires_grad


class _Names(TorchFunctionMode):
    """A mode that notes the functions it sees."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen = [*getattr(self, "seen", []), str(function)]
        return function(*args, **(kwargs or {}))


def test_who_observes_operators_sees_the_public_call():
    """A plain call goes past the dispatcher; with a profiler, a mode or a trace it does not."""
    q, k, v = qkv()
    with torch.profiler.profile() as profiled:
        tw.attention(q, k, v)
    assert "tilewise::attention" in {event.key for event in profiled.key_averages()}
    with _Names() as names:
        tw.attention(q, k, v)
    assert "tilewise.attention.default" in names.seen
    with FlopCounterMode(display=False), FakeTensorMode(allow_non_fake_inputs=True) as fake:
        assert isinstance(tw.attention(*map(fake.from_tensor, (q, k, v))), FakeTensor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trace is deprecated, and works
        traced = torch.jit.trace(lambda q: tw.attention(q, k, v), (q,))
    torch.testing.assert_close(traced(2 * q), tw.attention(2 * q, k, v))


def test_a_checkpoint_that_keeps_the_operator_does_not_run_it_again(monkeypatch):
    (q, k, v), runs, forward = wanting_grad(*qkv()), [], Cpu.forward
    monkeypatch.setattr(Cpu, "forward", lambda *arguments: runs.append(arguments) or forward(*arguments))
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.tilewise.attention.default])
    o = checkpoint(lambda q: tw.attention(2 * q, k, v, causal=True), q, use_reentrant=False, context_fn=keep)
    o.sum().backward()
    assert len(runs) == 1


def test_below_autograd_nothing_is_recorded_and_zeros_without_memory_are_read():
    q, k, v = wanting_grad(*qkv())
    with torch._C._AutoDispatchBelowAutograd():
        assert not tw.attention(q, k, v).requires_grad
    zeros = torch._efficientzerotensor(q.shape)
    torch.testing.assert_close(tw.attention(zeros, k, v), tw.attention(torch.zeros_like(q), k, v))


def test_a_tensor_that_outlives_its_transform_is_differentiated_as_what_it_holds():
    q, k, v = wanting_grad(*qkv(1, 5, 7, 2, 2, 8, dtype=F64))
    outlived = []
    torch.func.grad(lambda x: (outlived.append(x), x.sum())[1])(q)
    (expected,) = torch.autograd.grad(tw.attention(q, k, v).sin().sum(), q)
    (found,) = torch.autograd.grad(tw.attention(outlived[0], k, v).sin().sum(), q)
    assert torch.equal(found, expected)


def test_only_the_inputs_that_want_a_gradient_get_one():
    q, k, v = qkv()
    bias = normal(4, 70, 70).requires_grad_()
    tw.attention(q, k, v, score=tw.bias(bias)).sum().backward()
    assert bias.grad is not None
    assert q.grad is None


def test_a_backward_through_lse_alone():
    q, k, v = wanting_grad(*qkv())
    _, lse = tw.attention_with_lse(q, k, v)
    dq, dv = torch.autograd.grad(lse.sum(), (q, v), retain_graph=True)
    assert dq.abs().sum() > 0
    assert dv.abs().sum() == 0


def test_a_non_contiguous_output_gradient_is_honoured():
    q, k, v = wanting_grad(*qkv())
    do = normal(16, 4, 70, 2).permute(3, 2, 1, 0)
    got = torch.autograd.grad(tw.attention(q, k, v), q, do)[0]
    assert torch.equal(got, torch.autograd.grad(tw.attention(q, k, v), q, do.contiguous())[0])


@pytest.mark.parametrize("feature", ["window-sink", "softcap-bias"])
def test_the_largest_scores_cost_the_other_results_nothing(feature):
    """They carry no gradient; o, lse and their gradients are those of a call without them."""
    results = []
    for run in (tw.attention_with_lse, tw.attention_with_stats):
        options = FEATURES[feature]()
        q, k, v = wanting_grad(*qkv(batch=2, nq=5, nk=6, hq=2, hk=1, d=3, dv=2, dtype=F64))
        o, lse, *max_logit = run(q, k, v, backend="portable", **options)
        assert not any(x.requires_grad for x in max_logit if x is not None)
        grads = torch.autograd.grad(o.square().sum() + lse.sum(), (q, k, v, *leaves_of(options)))
        results.append((o, lse, *grads))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


def test_the_largest_score_of_a_head_is_that_of_all_its_rows():
    q, k, v = qkv()
    rows, heads = (tw.attention_with_stats(q, k, v, per=per, backend="portable").max_logit for per in ("row", "head"))
    assert torch.equal(heads, rows.amax((0, 2)))
    assert torch.equal(tw.attention_with_stats(q[:, :0], k, v, per="head").max_logit, torch.full((4,), -torch.inf))
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    cu = torch.tensor([0, 70, 140])
    found = tw.attention_with_stats(*packed, per="head", cu_seqlens_q=cu, backend="portable").max_logit
    torch.testing.assert_close(found, heads)
    with pytest.raises(ValueError, match='per must be "row" or "head"'):
        tw.attention_with_stats(q, k, v, per="batch")


def test_the_largest_scores_compile_without_graph_breaks():
    torch._dynamo.reset()
    q, k, v = wanting_grad(*qkv(nq=20, nk=20))

    def step(q, k, v):
        out = tw.attention_with_stats(q, k, v, causal=True, score=tw.softcap(2.0), per="head")
        return out.o.square().sum(), out.max_logit

    (loss, largest), (same_loss, same) = (
        step(q, k, v),
        torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v),
    )
    assert torch.equal(largest, same)
    torch.testing.assert_close(torch.autograd.grad(same_loss, q), torch.autograd.grad(loss, q))


def test_the_largest_scores_of_differentiated_calls():
    """Inside torch.func and beside dual tensors they are what they are, and have no tangent."""
    q, k, v = qkv(nq=9, nk=9)
    alone = tw.attention_with_stats(q, k, v, causal=True, backend="portable")

    def run(q):
        out = tw.attention_with_stats(q, k, v, causal=True, backend="portable")
        return out.o.sum(), out.max_logit

    _, largest = torch.func.grad(run, has_aux=True)(q)
    assert torch.equal(largest, alone.max_logit)
    with forward_ad.dual_level():
        out = tw.attention_with_stats(forward_ad.make_dual(q, q), k, v, causal=True, backend="portable")
        moved = [forward_ad.unpack_dual(x) for x in out[:3]]
    assert torch.equal(moved[2].primal, alone.max_logit)
    assert moved[2].tangent is None
    assert moved[0].tangent is not None


class Sharded(torch.Tensor):
    """What a call takes for a DTensor."""

    device_mesh = None


def test_the_largest_scores_of_sharded_tensors_are_refused():
    q, k, v = (x.as_subclass(Sharded) for x in qkv())
    with pytest.raises(NotImplementedError, match=r"attention_with_stats does not support DTensors.*to_local"):
        tw.attention_with_stats(q, k, v)


def test_who_does_not_keep_the_largest_scores_says_so():
    q, k, v = (x.bfloat16() for x in qkv(d=64, dv=64))
    assert "largest score" in str(tw.explain(q, k, v, max_logit=True).refused["hopper"])
    assert "largest score" not in str(tw.explain(q, k, v).refused["hopper"])


def test_the_dropout_seed_may_be_an_int_or_a_tensor_and_is_drawn_by_torch():
    q, k, v = qkv()
    run = lambda seed: tw.attention(q, k, v, dropout_p=0.5, dropout_seed=seed)  # noqa: E731
    assert torch.equal(run(11), run(torch.tensor([11])))
    assert not torch.equal(run(11), run(12))
    torch.manual_seed(0)
    first = run(None)
    torch.manual_seed(0)
    assert torch.equal(first, run(None))


def test_nothing_warns():
    q, k, v = wanting_grad(*qkv())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tw.attention(q, k, v, causal=True, dropout_p=0.1).sum().backward()
