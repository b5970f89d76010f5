"""Every row of examples/architectures.py against the textbook: s as a matrix, the mask and the bias filled in pair by pair.

The textbook of a row shares nothing with the row's call but its arguments. In float64 it is the oracle, in fp32, in
several orders of computation, it is eager attention; the error rule of tilewise.accuracy compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewise as tw
from bench.peers import FromLse
from tests import support
from tilewise import accuracy, dispatch

ROWS = {row.name: row for row in support.architectures.ROWS}
ORDERS = 8


def textbook(q, k, v, order=0, *, keep=None, bias=None, cap=None, sink=None, scale=None) -> Tensor:
    """Standard attention, every matrix stored. ``keep`` and ``bias`` broadcast to (batch, heads_q, seqlen_q, seqlen_k).

    Args:
        order: any but 0 shuffles queries, keys and channels, and with them all sums, and differentiates from lse, as whatever
            does not keep P must.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    shape = batch, heads, seqlen_q, k.shape[1]
    generator = torch.Generator().manual_seed(order)
    i, j, d, d_v = (
        torch.randperm(n, generator=generator) if order else torch.arange(n) for n in (*shape[2:], head_dim, v.shape[3])
    )
    cut = lambda x: x.expand(shape)[:, :, i][..., j]  # noqa: E731
    k, v = (x.repeat_interleave(heads // x.shape[2], 2)[:, j] for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q[:, i][..., d] * (head_dim**-0.5 if scale is None else scale), k[..., d])
    s = s if cap is None else cap * torch.tanh(s / cap)
    s = s if bias is None else s + cut(bias)
    s = s if keep is None else s.masked_fill(~cut(keep), -math.inf)
    v = v[..., d_v].transpose(1, 2)
    if order:
        return FromLse.apply(s, v, sink, None).transpose(1, 2)[:, i.argsort()][..., d_v.argsort()]
    if sink is not None:
        s = torch.cat([s, sink.view(1, heads, 1, 1).expand(*s.shape[:3], 1)], -1)
    return (torch.softmax(s, -1)[..., : len(j)] @ v).transpose(1, 2)


def pairs(size_q: int, size_k: int, of: Callable[[int, int], object]) -> Tensor:
    """The matrix of ``of(i, j)``, i the query's key position."""
    return torch.tensor([[of(i + size_k - size_q, j) for j in range(size_k)] for i in range(size_q)])


def square(x: SimpleNamespace, of: Callable[[int, int], object]) -> Tensor:
    return pairs(x.q.shape[1], x.k.shape[1], of)


def causal(x: SimpleNamespace) -> Tensor:
    return square(x, lambda i, j: j <= i)


def window(x: SimpleNamespace) -> Tensor:
    return square(x, lambda i, j: i - x.window < j <= i)


def padding(x: SimpleNamespace) -> Tensor:
    return torch.tensor([[[[j < n for j in range(x.k.shape[1])]]] for n in x.lengths.tolist()])


def bucket(distance: int, both_ways: bool) -> int:
    """T5's, in Python: 32 buckets, logarithmic up to 128."""
    buckets = 16 if both_ways else 32
    first = 16 if both_ways and distance > 0 else 0
    n = abs(distance) if both_ways else max(-distance, 0)
    if n < buckets // 2:
        return first + n
    octaves = math.log2(n / (buckets // 2)) / math.log2(128 / (buckets // 2))
    return first + min(buckets - 1, buckets // 2 + int(octaves * (buckets // 2) + 1e-9))


def t5(x: SimpleNamespace, both_ways: bool) -> Tensor:
    return x.table[square(x, lambda i, j: bucket(j - i, both_ways))].permute(2, 0, 1)


def mla_absorbed(x: SimpleNamespace, order: int) -> Tensor:
    """The keys and values of every head, made from the cache."""
    rank, heads = x.w_k.shape[-1], x.w_k.shape[0]
    latent, rotated = x.cache[:, :, 0, :rank], x.cache[..., rank:].expand(-1, -1, heads, -1)
    k = torch.cat([torch.einsum("bjc,hdc->bjhd", latent, x.w_k), rotated], -1)
    v = torch.einsum("bjc,hcd->bjhd", latent, x.w_v)
    q = torch.cat([x.q_nope, x.q_rope], -1)
    return textbook(q, k, v, order, keep=pairs(q.shape[1], k.shape[1], lambda i, j: j <= i))


def packed(x: SimpleNamespace, order: int) -> Tensor:
    """One document at a time."""
    o = torch.zeros_like(x.q)
    ends = x.cu_seqlens.tolist()
    for start, end in pairwise(ends):
        q, k, v = (t[None, start:end] for t in (x.q, x.k, x.v))
        if end > start:
            o[start:end] = textbook(q, k, v, order, keep=pairs(end - start, end - start, lambda i, j: j <= i))[0]
    return o


def packed_ids(x: SimpleNamespace) -> Tensor:
    return torch.stack([square(x, lambda i, j, ids=ids: j <= i and ids[i] == ids[j]) for ids in x.ids]).unsqueeze(1)


def bigbird(x: SimpleNamespace) -> Tensor:
    last = x.random.shape[-1] - 1

    def sees(head: int, i: int, j: int) -> bool:
        r, c = i // x.block, j // x.block
        return abs(r - c) <= 1 or bool({0, last} & {r, c}) or x.random[head, r, c].item()

    return torch.stack([square(x, lambda i, j, h=h: sees(h, i, j)) for h in range(len(x.random))]) & padding(x)


def given(entries: Tensor, x: SimpleNamespace, block: int = 1, block_q: int = 1) -> Tensor:
    """The pairs of the blocks that rows of entries name, for each query head."""
    rows = entries.repeat_interleave(x.q.shape[2] // entries.shape[1], 1).repeat_interleave(block_q, 2)
    return (rows.unsqueeze(-2) == (torch.arange(x.q.shape[1]) // block).unsqueeze(-1)).any(-1)


def sparse_latent(x: SimpleNamespace, order: int) -> Tensor:
    keep = given(x.tokens, x)
    keep &= pairs(*keep.shape[2:], lambda i, j: j <= i)
    return textbook(x.q, x.latent, x.latent[..., : x.head_dim_v], order, keep=keep, scale=192**-0.5)


def swin(x: SimpleNamespace, order: int) -> Tensor:
    """Over the whole image: pixel i sees pixel j if both lie in one shifted window and the shift wrapped both or neither."""
    rows, columns = x.q.shape[1:3]
    pixels = [(y, c) for y in range(rows) for c in range(columns)]
    seen, dy, dx = (torch.zeros(len(pixels), len(pixels), dtype=torch.long) for _ in range(3))
    for a, (y1, x1) in enumerate(pixels):
        for b, (y2, x2) in enumerate(pixels):
            along = [
                ((p - x.shift) % n // x.window, p < x.shift) == ((other - x.shift) % n // x.window, other < x.shift)
                for p, other, n in ((y1, y2, rows), (x1, x2, columns))
            ]
            seen[a, b] = all(along)
            dy[a, b], dx[a, b] = (y1 - y2, x1 - x2) if all(along) else (0, 0)
    bias = x.table[:, dy + x.window - 1, dx + x.window - 1]
    flat = (t.flatten(1, 2) for t in (x.q, x.k, x.v))
    return textbook(*flat, order, keep=seen.bool(), bias=bias).view(x.q.shape)


def triangle(x: SimpleNamespace, order: int) -> Tensor:
    """o_ij = sum_k softmax_k(q_ij · k_ik + b_jk) v_ik around the starting node i, q_ij · k_kj + b_ki around the ending j."""
    n = range(x.q.shape[0])
    if not x.ending:
        bias = torch.stack([x.bias[j].T for j in n], 1)  # (heads, j, k)
        return torch.cat([textbook(x.q[[i]], x.k[[i]], x.v[[i]], order, bias=bias) for i in n])
    bias = torch.stack([x.bias[:, i].T for i in n], 1)  # (heads, i, k)
    columns = [textbook(x.q[None, :, j], x.k[None, :, j], x.v[None, :, j], order, bias=bias)[0] for j in n]
    return torch.stack(columns, 1)


def standard(**options: Callable) -> Callable:
    """The textbook with keywords made of the row's arguments."""
    return lambda x, order: textbook(x.q, x.k, x.v, order, **{name: make(x) for name, make in options.items()})


def distance(x: SimpleNamespace) -> Tensor:
    return square(x, lambda i, j: abs(i - j))


TEXTBOOK: dict[str, Callable[[SimpleNamespace, int], Tensor]] = {
    "causal-lm": standard(keep=causal),
    "encoder": standard(keep=padding),
    "t5-encoder": standard(keep=padding, bias=lambda x: t5(x, True), scale=lambda x: 1.0),
    "t5-decoder": standard(keep=causal, bias=lambda x: t5(x, False), scale=lambda x: 1.0),
    "t5-cross": standard(keep=padding, scale=lambda x: 1.0),
    "prefix-lm": standard(
        keep=lambda x: torch.stack([square(x, lambda i, j, n=n: j <= i or j < n) for n in x.prefix.tolist()]).unsqueeze(
            1
        )
    ),
    "mistral": standard(keep=window),
    "gemma2": standard(keep=window, cap=lambda x: x.cap),
    "gpt-oss": standard(keep=window, sink=lambda x: x.sink),
    "alibi": standard(keep=causal, bias=lambda x: -x.slopes.view(-1, 1, 1) * distance(x)),
    "grouped": standard(keep=causal),
    "multi-query": standard(keep=causal),
    "mla": standard(keep=causal),
    "mla-absorbed": mla_absorbed,
    "packed": packed,
    "packed-ids": standard(keep=packed_ids),
    "bigbird": standard(keep=bigbird),
    "sparse-latent": sparse_latent,
    "native-sparse": standard(keep=lambda x: given(x.blocks, x, x.block) & causal(x)),
    "moba": standard(keep=lambda x: given(x.blocks, x, x.block) & causal(x)),
    "video-sparse": standard(keep=lambda x: given(x.cubes, x, x.cube, x.cube)),
    "vit": standard(),
    "swin": swin,
    "msa-row": standard(keep=lambda x: x.seen[:, None, None], bias=lambda x: x.pair_bias),
    "triangle": triangle,
}


def results(x: dict, o: Tensor) -> dict[str, Tensor]:
    """o and the gradient of each argument that wants one, by name."""
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).to(o.dtype)
    wanted = {name: t for name, t in x.items() if isinstance(t, Tensor) and t.requires_grad}
    grads = torch.autograd.grad(o, list(wanted.values()), do)
    return {"o": o.detach(), **{f"d{name}": g for name, g in zip(wanted, grads, strict=True)}}


@cache
def expected(name: str, **other: object) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The oracle's results and eager's, in each order."""

    def run(dtype: torch.dtype, order: int) -> dict[str, Tensor]:
        x = support.architectures.arguments(ROWS[name].small | other)
        x = {n: t.detach().to(dtype).requires_grad_() if is_float(t) else t for n, t in x.items()}
        return results(x, TEXTBOOK[name](SimpleNamespace(**x), order))

    return run(torch.float64, 0), [run(torch.float32, order) for order in range(ORDERS)]


def is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def agrees(name: str, backend: str | None = None, **other: object) -> None:
    """The row's call, on that backend and no other, judged by the error rule. ``other``: arguments in place of the row's."""
    x = support.architectures.arguments(ROWS[name].small | other)
    with pytest.MonkeyPatch.context() as patch:
        if backend:
            patch.setattr(dispatch, "candidates", lambda p: [backend])
            patch.setattr(dispatch, "_plans", {})
        got = results(x, ROWS[name].call(**x))
    oracle, eager = expected(name, **other)
    assert got.keys() == oracle.keys()
    errors = [accuracy.judge(n, got[n], oracle[n], [e[n] for e in eager]) for n in got]
    assert not [str(error) for error in errors if not error.ok]


@pytest.mark.parametrize("backend", ["cpu", "portable"])
@pytest.mark.parametrize("name", ROWS)
def test_the_call_and_all_its_gradients_are_the_textbooks(name, backend):
    agrees(name, backend)


@pytest.mark.parametrize(("name", "other"), [("triangle", {"ending": False}), ("swin", {"shift": 0})], ids=str)
def test_what_a_call_does_by_argument_is_the_textbooks(name, other):
    agrees(name, **other)


@pytest.mark.parametrize("backend", ["cpu", "portable"])
def test_a_table_of_windows_may_be_read_where_it_lies(backend):
    table, w, place = torch.randn(2, 13, 13).requires_grad_(), 7, torch.arange(49)
    q, k, v = (torch.randn(3, 49, 2, 8).requires_grad_() for _ in range(3))
    down, right = (x[:, None] - x + w - 1 for x in (place // w, place % w))

    def read(s, b, h, i, j):
        return s + tw.lookup(table, h, i // w - j // w + w - 1, i % w - j % w + w - 1)

    def results(score):
        o = tw.attention(q, k, v, score=score, backend=backend)
        return o, *torch.autograd.grad(o.square().sum(), (q, k, v, table))

    torch.testing.assert_close(results(read), results(table[:, down, right]))


# The rows whose functions are traced, and one of the catalogue: the others do less.
@pytest.mark.parametrize("name", ["t5-decoder", "swin", "bigbird"])
def test_the_call_compiles_into_one_graph(name):
    x = support.architectures.arguments(ROWS[name].small)
    compiled = torch.compile(ROWS[name].call, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(**x), ROWS[name].call(**x))


def test_every_row_has_a_textbook():
    assert TEXTBOOK.keys() == ROWS.keys()


def test_the_page_is_the_one_that_the_rows_make():
    assert support.ARCHITECTURES.read_text(encoding="utf-8") == support.architectures_page(support.current()), (
        "run: python -m tests.support --write"
    )
