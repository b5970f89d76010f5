"""Numbers that change from call to call of a compiled function: Dynamo holds a second value as a symbol, and so it does lengths."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise as tw
from tilewise import spec

Q = torch.randn(2, 16, 2, 8, generator=torch.Generator().manual_seed(1))
WHOLE, FLOATS = (3, 5, 7, 9), (3.0, 5.5, 7.25, 0.1)
CALLS = {
    "key_lengths": (lambda q, n: tw.attention(q, q, q, mask=tw.key_lengths(n)), WHOLE),
    "key_range": (lambda q, n: tw.attention(q, q, q, mask=tw.key_range(n - 2, 2 * n)), WHOLE),
    "prefix": (lambda q, n: tw.attention(q, q, q, mask=tw.prefix(n)), WHOLE),
    "window": (lambda q, n: tw.attention(q, q, q, mask=tw.window(n, 0)), WHOLE),
    "softcap": (lambda q, c: tw.attention(q, q, q, score=tw.softcap(c)), FLOATS),
    "a float that a score captures": (lambda q, c: tw.attention(q, q, q, score=lambda s, b, h, i, j: c * s - s / c), FLOATS),
    "a whole number that a mask captures": (
        lambda q, n: tw.attention(q, q, q, mask=lambda b, h, i, j: i // n >= j // n),
        WHOLE,
    ),
    "block_sparse": (
        lambda q, n: tw.attention(q, q, q, mask=tw.block_sparse(torch.ones(-(-16 // n), -(-16 // n)).tril() > 0, n, n)),
        WHOLE,
    ),
    "selected": (
        lambda q, n: tw.attention(q, q, q, mask=tw.selected(torch.arange(16).view(1, 1, 16, 1) // n, n)),
        WHOLE,
    ),
    "softmax_scale": (lambda q, c: tw.attention(q, q, q, softmax_scale=c), FLOATS),
    "dropout_p": (lambda q, c: tw.attention(q, q, q, dropout_p=c / 20, dropout_seed=1), FLOATS),
    "dropout_seed": (lambda q, n: tw.attention(q, q, q, dropout_p=0.3, dropout_seed=n), WHOLE),
}  # fmt: skip
LENGTHS = {
    "key_lengths": lambda q: tw.attention(q, q, q, mask=tw.key_lengths(q.shape[1] - 2)),
    "prefix": lambda q: tw.attention(q, q, q, mask=tw.prefix(q.shape[1] // 2)),
    "window": lambda q: tw.attention(q, q, q, mask=tw.window(q.shape[1] // 4, 0)),
    "softcap": lambda q: tw.attention(q, q, q, score=tw.softcap(q.shape[1] * 1.5)),
    "a score": lambda q: tw.attention(q, q, q, score=lambda s, b, h, i, j: s * q.shape[1] ** 0.5),
    "a comparison": lambda q: tw.attention(q, q, q, mask=lambda b, h, i, j: (q.shape[1] - 3 > j) | (i == j)),
}
COMPARISONS = {
    "j < n": lambda i, j, n: j < n,
    "n > j": lambda i, j, n: n > j,
    "i - j <= n": lambda i, j, n: i - j <= n,
    "n >= i - j": lambda i, j, n: n >= i - j,
    "j > n": lambda i, j, n: (j > n) | (i == j),
    "n < j": lambda i, j, n: (n < j) | (i == j),
    "j >= n": lambda i, j, n: (j >= n) | (i == j),
    "n <= j": lambda i, j, n: (n <= j) | (i == j),
    "j == n": lambda i, j, n: (j == n) | (i == j),
    "n == j": lambda i, j, n: (n == j) | (i == j),
    "j != n": lambda i, j, n: j != n,
    "n != j": lambda i, j, n: n != j,
    "j < 1.5 * n": lambda i, j, n: j < 1.5 * n,
    "1.5 * n > j": lambda i, j, n: 1.5 * n > j,
    "n < 6 and j < 9": lambda i, j, n: (j < 9) & (n < 6) | (i >= j),
}
# One graph for all values: what the graph reads when it runs.
ARGUMENTS = {
    "key_lengths": lambda q, n: tw.attention(q, q, q, mask=tw.key_lengths(n)),
    "key_range": lambda q, n: tw.attention(q, q, q, mask=tw.key_range(n - 2, 2 * n)),
    "prefix": lambda q, n: tw.attention(q, q, q, mask=tw.prefix(n)),
    "a length": lambda q, n: tw.attention(q, q[:, :n], q[:, :n], mask=tw.key_lengths(q[:, :n].shape[1] - 1)),
    "a comparison": lambda q, n: tw.attention(q, q, q, mask=lambda b, h, i, j: i - j < n),
    "a score": lambda q, n: tw.attention(q, q, q, score=lambda s, b, h, i, j: s * n),
    "a float made a tensor": lambda q, n: tw.attention(q, q, q, score=lambda s, b, h, i, j: s * torch.tensor(n / 2)),
    "dropout_seed": lambda q, n: tw.attention(q, q, q, dropout_p=0.3, dropout_seed=n),
}


@pytest.mark.parametrize("name", CALLS)
def test_another_value_of_a_number_has_another_result(name):
    call, values = CALLS[name]
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for value in (*values, values[0]):
        torch.testing.assert_close(compiled(Q, value), call(Q, value), rtol=0, atol=0)


@pytest.mark.parametrize("name", LENGTHS)
def test_a_number_of_a_dynamic_length_has_its_value(name):
    torch.compiler.reset()
    compiled = torch.compile(LENGTHS[name], fullgraph=True, backend="eager", dynamic=True)
    for length in (16, 12, 9):
        torch.testing.assert_close(compiled(Q[:, :length]), LENGTHS[name](Q[:, :length]), rtol=0, atol=0)


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_traced_value_is_compared_with_a_number_that_changes(name):
    def call(q, n):
        return tw.attention(q, q, q, mask=lambda b, h, i, j: COMPARISONS[name](i, j, n))

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for n in (3, 5, 7):
        torch.testing.assert_close(compiled(Q, n), call(Q, n), rtol=0, atol=0)


def test_other_classes_keep_the_answers_that_dynamo_gives_for_them():
    class Other:
        pass

    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, n: (tw.attention(q, q, q, mask=lambda b, h, i, j: j < n), Other() == n), backend="eager"
    )
    for n in (3, 5):
        assert compiled(Q, n)[1] is False


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_whole_number_is_an_argument_of_one_graph(name):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(ARGUMENTS[name], fullgraph=True, backend=backend, dynamic=True)
    for n in range(3, 13):
        torch.testing.assert_close(compiled(Q, n), ARGUMENTS[name](Q, n), rtol=0, atol=0)
    assert len(graphs) == 1


def _marked(call, q):
    torch.compiler.reset()
    torch._dynamo.mark_dynamic(q, 1, min=4, max=64)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    compiled(q)
    return compiled


def _exported(call, q, strict):
    class Layer(torch.nn.Module):
        def forward(self, q):
            return call(q)

    lengths = torch.export.Dim("length", min=4, max=64)
    return torch.export.export(Layer(), (q,), dynamic_shapes=({1: lengths},), strict=strict).module()


TRACERS = {
    "mark_dynamic": _marked,
    "export": lambda call, q: _exported(call, q, strict=False),
    "strict export": lambda call, q: _exported(call, q, strict=True),
    "make_fx": lambda call, q: make_fx(call, tracing_mode="symbolic")(q),
}


@pytest.mark.filterwarnings(
    "ignore:While compiling, we found certain side effects"
)  # the mode in which a function is traced
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("name", [name for name in LENGTHS if name in ("key_lengths", "prefix", "a comparison")])
def test_a_length_with_known_ends_stays_a_length(name, tracer):
    """Those of ``Dim(min=, max=)`` were read as the first call's: exports failed, and ``make_fx`` masked other lengths by it."""
    traced = TRACERS[tracer](LENGTHS[name], Q.clone())
    for length in (16, 9, 5):
        torch.testing.assert_close(traced(Q[:, :length]), LENGTHS[name](Q[:, :length]), rtol=0, atol=0)


def test_a_scale_that_changes_with_a_length_is_refused_in_words():
    def scaled(q):
        return tw.attention(q, q, q, softmax_scale=q.shape[1] ** -0.5)

    def instead(q):
        return tw.attention(q * q.shape[1] ** -0.5, q, q, softmax_scale=1.0)

    with pytest.raises(ValueError, match=r"pass q \* scale and softmax_scale=1\.0"):
        make_fx(scaled, tracing_mode="symbolic")(Q)
    traced = make_fx(instead, tracing_mode="symbolic")(Q)
    torch.testing.assert_close(traced(Q[:, :9]), scaled(Q[:, :9]))


def _compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    return nullcontext()


@pytest.mark.parametrize("trace", [_compiling, lambda _: FakeTensorMode()], ids=["compile", "fake tensors"])
def test_a_number_of_a_traced_function_goes_where_q_is(trace, monkeypatch):
    table, other = torch.zeros(3), Q.to("meta")
    with trace(monkeypatch):
        there = spec._there([torch.tensor(3), table], other)
    assert there[0].device.type == "meta"
    assert there[1] is table  # a table elsewhere is refused in words
