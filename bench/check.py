"""Is a contestant right? Its o and gradients against float64, by the error rule of `tilewise.accuracy`.

The rule binds tilewise. A peer is only asked whether it computes the same function: PEER_FACTOR times as much is allowed.
Oracle and eager attention are those of bench/peers.py: they know nothing of tilewise's masks and scores.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.cases import Case, Inputs
from bench.peers import Call, eager_call
from tilewise.accuracy import ORDERS, Error, judge

PEER_FACTOR = 16.0
"""How many times the rule's allowance a peer may use and still be timed; its errors are in the record."""

PAIRS_CHECKED = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Scores (batch × heads × rows × keys) that the float64 oracle may hold, by device: 32 MB and 1 GB a matrix."""


@dataclass(frozen=True)
class Expected:
    """The float64 oracle's results on the rows that are checked, and eager's in each order; do is zero in other rows."""

    rows: Tensor | None
    do: Tensor
    oracle: dict[str, Tensor]
    eager: list[dict[str, Tensor]]
    says: str


def checked_rows(case: Case, device: str) -> Tensor | None:
    """The queries that the oracle computes: all (None) while the float64 matrices stay small, else a sample.

    A sample holds the first and the last rows and random ones between. With do zero elsewhere it checks o and dq in those
    rows, and dk, dv and every leaf's gradient in full, at the case's own shape.
    """
    limit = PAIRS_CHECKED["cuda" if device.startswith("cuda") else "cpu"]
    keys = max(1, case.batch * case.heads_q * case.seqlen_k)
    count = max(32, limit // keys)
    if case.lengths or count >= case.seqlen_q:
        return None
    inner = 8 + torch.randperm(case.seqlen_q - 16, generator=torch.Generator().manual_seed(0))[: count - 16]
    edges = torch.cat([torch.arange(8), torch.arange(case.seqlen_q - 8, case.seqlen_q)])
    return torch.cat([edges, inner]).sort().values.to(device)


def results(call: Call, x: Inputs, do: Tensor) -> dict[str, Tensor]:
    """o and, where the case has a backward, every wanted gradient."""
    o = call()
    found = {"o": o.detach()}
    if x.case.backward:
        gradients = torch.autograd.grad(o, list(x.wanted.values()), do)
        found.update(zip(x.wanted, (g.detach() for g in gradients), strict=True))
    return found


def expected(x: Inputs) -> Expected:
    """Runs the oracle and eager attention on the rows to check; for float64 eager runs in float32, as the rule asks."""
    rows = checked_rows(x.case, str(x.q.device))
    do = x.do
    if rows is not None:
        do = torch.zeros_like(x.do)
        do[:, rows] = x.do[:, rows]
    double, coarse = x.to(torch.float64), x.to(torch.float32) if x.q.dtype == torch.float64 else x
    part = do if rows is None else do[:, rows]
    oracle = results(eager_call(double, rows), double, part.double())
    eager = [results(eager_call(coarse, rows, order), coarse, part.to(coarse.q.dtype)) for order in range(ORDERS)]
    count = "every query" if rows is None else f"{len(rows)} of {x.case.seqlen_q} queries (first, last, random)"
    gradients = ", gradients of a do that is zero elsewhere" if rows is not None and x.case.backward else ""
    return Expected(rows, do, oracle, eager, f"{count} and every key of every head{gradients}")


def compare(found: dict[str, Tensor], want: Expected) -> list[Error]:
    """The errors of a contestant's o and gradients, one a tensor. Raises ValueError for an output of a wrong shape."""
    errors = []
    for name, oracle in want.oracle.items():
        x, eager = found[name], [e[name] for e in want.eager]
        if want.rows is not None and name == "o":
            x = x[:, want.rows]
        if want.rows is not None and name == "dq":
            x, oracle, *eager = (t[:, want.rows] for t in (x, oracle, *eager))
        if x.shape != oracle.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, the oracle's is {tuple(oracle.shape)}")
        errors.append(judge(name, x, oracle, eager))
    return errors


def share(error: Error) -> float:
    """How much of what the rule allows an error uses: up to 1 is right, NaN never is."""
    used = [_ratio(error.rms, error.rms_allowed), _ratio(error.max, error.max_allowed)]
    return max(used) if all(u == u for u in used) else float("inf")


def _ratio(error: float, allowed: float) -> float:
    return error / allowed if allowed else 0.0 if error == 0.0 else float("inf")


def verdict(errors: list[Error], ours: bool) -> str:
    """green: within the rule. loose: a peer that computes the same function less exactly. red: wrong."""
    if errors and all(e.ok for e in errors):
        return "green"
    if errors and not ours and all(share(e) <= PEER_FACTOR for e in errors):
        return "loose"
    return "red"
