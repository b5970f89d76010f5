"""An attention computed as pieces: two of the queries, two of the keys, each with its gradients, put together again."""

from __future__ import annotations

import torch
from torch import Tensor

import tilewise as tw
from bench.testing import Call, call, normal, poisoned, qkv
from tilewise import accuracy, state
from tilewise.backends.base import Backend, Output
from tilewise.piece import Piece

TOTAL_Q, TOTAL_K = 37, 50
ALL = (0, None)
CUTS = (((0, 20), (20, TOTAL_Q)), ((0, 23), (23, TOTAL_K)))
ALIGNED = (((0, 16), (16, TOTAL_Q)), ((0, 32), (32, TOTAL_K)))
"""The pieces' queries and keys. Backends whose kernels draw a tile's dropout at once want starts that are multiples of 16."""
IDS = torch.tensor([0] * 9 + [4] + [2] * 20 + [3] * 20)

MASKS = {
    "causal": tw.causal,
    "window": lambda: tw.window(9, 3),
    "window-left": lambda: tw.window(left=5),
    "prefix": lambda: tw.prefix(torch.tensor([30, 4])),
    "key-range": lambda: tw.key_range(5, 40) & tw.causal(),
    "key-lengths": lambda: tw.key_lengths(torch.tensor([40, 11])),
    "documents": lambda: tw.documents(IDS) & tw.causal(),
    "keep": lambda: tw.keep(lambda b, h, i, j: (i * 3 + j + h) % 5 != 1),
    "blocks": lambda: tw.block_sparse(normal(2, 4, 5, 7) > 0, 8, 8),
    "dense": lambda: tw.dense(normal(TOTAL_Q, TOTAL_K) > -0.5),
    "selected": lambda: (
        tw.causal() & tw.selected(torch.randint(-1, 50, (2, 2, TOTAL_Q, 9), generator=torch.Generator().manual_seed(0)))
    ),
    "selected-blocks": lambda: (
        tw.selected(torch.randint(-1, 4, (2, 1, 10, 2), generator=torch.Generator().manual_seed(0)), 16, 4)
        | tw.window(3, 0)
    ),
    "either": lambda: tw.window(3, 0) | tw.key_range(5, 9),
}
SCORES = {
    "softcap": lambda: tw.softcap(2.0),
    "alibi": lambda: tw.alibi(normal(4).requires_grad_()),
    "bias": lambda: tw.bias(normal(1, 4, TOTAL_Q, TOTAL_K).requires_grad_()),
    "rows-and-columns": lambda: _rows_and_columns(
        normal(4, TOTAL_Q).requires_grad_(), normal(TOTAL_K).requires_grad_()
    ),
    "relative": lambda: _relative(normal(4, 9).requires_grad_()),
    "length": lambda: tw.score(lambda s, b, h, i, j: s * (tw.offset + j - i + 50) / 60),
}


def _rows_and_columns(rows: Tensor, columns: Tensor) -> tw.Score:
    return tw.score(lambda s, b, h, i, j: s * rows[h, i] + columns[j])


def _relative(table: Tensor) -> tw.Score:
    return tw.score(lambda s, b, h, i, j: s + table[h, torch.clamp(i - j + 4, 0, 8)])


# Every mask and every score; their products would take a minute, and these meet in no line of code.
OPTIONS = {"full": dict}
OPTIONS |= {name: lambda build=build: {"mask": build()} for name, build in MASKS.items()}
OPTIONS |= {f"causal-{name}": lambda build=build: {"causal": True, "score": build()} for name, build in SCORES.items()}
OPTIONS |= {
    "dropout": lambda: {"dropout_p": 0.25, "dropout_seed": 9},
    "dropout-window-alibi": lambda: (
        OPTIONS["causal-alibi"]() | {"mask": tw.window(30), "dropout_p": 0.25, "dropout_seed": 9}
    ),
}


def wrong(backend: Backend, name: str, device: str = "cpu") -> list[str]:
    """What of an attention that was put together from pieces is beyond the error rule of the whole."""
    options, cuts = OPTIONS[name](), _cuts(name)
    found = _results(backend, cuts, options, device)
    return [str(e) for e in _call(ALL, ALL, options, device).expected().judge(found) if not e.ok]


def refusals(backend: Backend, name: str, device: str = "cpu") -> list[str]:
    """Why a backend does not run the pieces."""
    queries, keys = _cuts(name)
    return backend.unsupported(_call(queries[1], keys[1], OPTIONS[name](), device).p)


def _cuts(name: str):
    return ALIGNED if name == "dropout" else CUTS


def _merged(backend: Backend, calls: list[Call]) -> Output:
    with poisoned():
        states = [backend.forward(c.p, c.t) for c in calls]
    o, lse = states[0].o.transpose(1, 2), states[0].lse
    for other in states[1:]:
        o, lse = state.merge(o, lse, other.o.transpose(1, 2), other.lse)
    return Output(o.transpose(1, 2).contiguous(), lse)


def _results(backend: Backend, cuts: tuple, options: dict, device: str) -> dict[str, Tensor]:
    """o and lse: the states of pieces of the keys merged, those of pieces of the queries one after the other. And the gradients: each
    piece's from the merged o and lse, added up where pieces share a tensor."""
    queries, keys = cuts
    outputs, by_rows = [], []
    for q in queries:
        calls = [_call(q, k, options, device) for k in keys]
        out = _merged(backend, calls)
        with poisoned():
            grads = [backend.backward(c.p, c.t, out, c.do, c.dlse) for c in calls]
        outputs.append(out)
        by_rows.append([accuracy.tensors(out, g) for g in grads])
    found = {"o": torch.cat([out.o for out in outputs], 1), "lse": torch.cat([out.lse for out in outputs], 2)}
    found["dq"] = torch.cat([sum(g["dq"] for g in grads) for grads in by_rows], 1)
    for name in ("dk", "dv"):
        found[name] = torch.cat([sum(grads[n][name] for grads in by_rows) for n in range(len(keys))], 1)
    leaves = by_rows[0][0].keys() - found.keys()
    return found | {name: sum(g[name] for grads in by_rows for g in grads) for name in leaves}


def _call(rows: tuple[int, int], keys: tuple[int, int], options: dict, device: str) -> Call:
    """The call of these queries and keys; a piece, unless it has all of them."""
    q, k, v = qkv(nq=TOTAL_Q, nk=TOTAL_K)
    do, dlse = normal(*q.shape, seed=5), normal(2, 4, TOTAL_Q, seed=6)
    i, j = slice(*rows), slice(*keys)
    piece = None if rows == keys == ALL else Piece(rows[0], keys[0], TOTAL_Q, TOTAL_K)
    c = call(q[:, i], k[:, j], v[:, j], do[:, i], device, piece=piece, **options)
    c.dlse = dlse[..., i].contiguous().to(device)
    return c
