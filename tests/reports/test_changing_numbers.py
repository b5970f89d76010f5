"""Numbers that change from call to call of a compiled function: Dynamo holds a second value as a symbol, and so it does lengths."""

import pytest
import torch

import tilewise as tw

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
