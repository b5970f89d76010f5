"""Unpadding inside a compiled function: "Could not guard on data-dependent expression" of a length that a bool index gives."""

import pytest
import torch

import tilewise as tw

X = torch.randn(2, 20, 2, 8, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(40) // 7


def packed(x, kept):
    rows = x[kept]
    return tw.attention_varlen(rows, rows, rows, torch.nn.functional.pad(kept.sum(1).cumsum(0), (1, 0)), causal=True)


def one_row(x, kept, **options):
    rows = x[kept][None]
    return tw.attention(rows, rows, rows, **options)


CALLS = {
    "packed": packed,
    "causal": lambda x, kept: one_row(x, kept, causal=True),
    "a window and a softcap": lambda x, kept: one_row(x, kept, mask=tw.window(3), score=tw.softcap(3.0)),
    "lengths": lambda x, kept: one_row(x, kept, mask=tw.key_lengths(kept.sum().view(1) // 2)),
    "documents": lambda x, kept: one_row(x, kept, mask=tw.documents(IDS.view(2, 20)[kept])),
    "a function of a tensor": lambda x, kept: one_row(x, kept, mask=lambda b, h, i, j: IDS[i] == IDS[j]),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_that_a_mask_keeps_are_attended_in_one_graph(name):
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        run = torch.compile(CALLS[name], fullgraph=True, backend="aot_eager")
        for share in (0.5, 0.2, 0.9, 2.0):  # of the last, nothing is kept
            x, kept = X.clone().requires_grad_(), torch.rand(2, 20) > share
            got, expected = (f(x, kept) for f in (run, CALLS[name]))
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(*[torch.autograd.grad(o.square().sum(), x)[0] for o in (got, expected)])
