"""Choose the scheme of an attention over ranks, and plan the rank's part."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

from tilewise import dispatch, expr
from tilewise.device import is_captured
from tilewise.masks import Mask
from tilewise.parallel import cost, gathered, heads, joined
from tilewise.parallel.agreement import Agreed
from tilewise.parallel.balance import tile_shares
from tilewise.parallel.exchange import Exchange, Silent
from tilewise.parallel.layout import Layout
from tilewise.parallel.route import Route, key_ends
from tilewise.piece import Piece
from tilewise.planning.tiles import Grid
from tilewise.problem import Problem, TensorFacts, check
from tilewise.spec import Spec, parse_spec

if TYPE_CHECKING:
    from tilewise.parallel.context import ContextParallel

AUTO = "auto"
SCHEMES = (AUTO, *cost.COSTS, cost.COMBINED)
NOT_OVER_RANKS = ["not built over ranks"]


def planned(
    parallel: ContextParallel, call: Agreed, with_lse: bool, compiled: bool = False
) -> heads.Heads | gathered.Gathered:
    """Plan the rank's part after every input check of the whole call. All ranks see the same shapes here, and fail alike.

    Args:
        with_lse: lse is wanted.
        compiled: the call is a node of a compiled graph, so shapes of saved tensors may not depend on values.
    """
    (queries, keys), (q, k, v), machines = call.layouts, call.whole, _machines_of(parallel)
    whole = check(q, k, v, call.extras, call.seed, call.spec)
    with unset_fake_temporarily():  # lengths must be numbers here, in a graph's trace too
        costs, refused = costs_of(whole, queries, keys, machines), refusals(whole, machines)
        scheme = chosen(parallel.scheme, costs, refused, machines.memory)
        groups = cost.groups_of(whole, parallel.size, parallel.most_groups)
        neighbours = neighbours_of(whole, machines)
    silent = isinstance(call.q, FakeTensor)  # only the shapes of results are wanted, and no tensor may be read
    exchange: Exchange = Silent(parallel.rank, parallel.size) if silent else parallel.exchange
    if scheme == "gather":
        return _gathered(exchange, call, parallel.sum_leaf_gradients, compiled)
    if scheme == "heads":
        return _heads(exchange, call, groups, parallel.sum_leaf_gradients, with_lse)
    # Neighbours exchange rows for heads, and neighbourhoods gather keys.
    within, across = (exchange if silent else parallel).split(neighbours)
    group = parallel.rank // neighbours
    layouts = queries.within(neighbours, group), keys.within(neighbours, group)
    found = _heads(within, call._replace(layouts=layouts), 1, parallel.sum_leaf_gradients, with_lse)
    rows = [layouts[n].seqlen for n in (0, 1, 1)]
    q, k, v = (
        x.new_empty((1,) * x.ndim).expand(*x.shape[:-3], length, x.shape[-2] // neighbours, x.shape[-1])
        for x, length in zip((call.q, call.k, call.v), rows, strict=True)
    )
    coarse = queries.across(neighbours), keys.across(neighbours)
    local = Agreed(coarse, q, k, v, found.own(call.extras, 0), call.seed, call.text)
    return replace(found, across=_gathered(across, local, False, compiled), everyone=exchange)


def _heads(exchange: Exchange, call: Agreed, groups: int, sum_leaves: bool, with_lse: bool) -> heads.Heads:
    """Plan the rank's part if rows are exchanged for heads."""
    shapes = tuple(x.shape for x in (call.q, call.k, call.v))
    return heads.Heads(
        exchange, *call.layouts, call.text, shapes, groups, heads.head_axes(call.spec), call.spec.grad_slots,
        sum_leaves, with_lse, everyone=exchange,
    )  # fmt: skip


def _gathered(exchange: Exchange, call: Agreed, sum_leaves: bool, compiled: bool) -> gathered.Gathered:
    """Plan the rank's part if keys are gathered."""
    (queries, keys), spec, q, k, v = call.layouts, call.spec, call.q, call.k, call.v
    widths = k.shape[0] * k.shape[2] * k.shape[3], v.shape[0] * v.shape[2] * v.shape[3]
    if isinstance(q, FakeTensor):
        route = Route(keys, ((),) * exchange.size)
        return gathered.Gathered(
            exchange, route, (), (), widths, spec.grad_slots, sum_leaves, spec.max_logit, 0, keeps=False
        )
    grid = Grid.whole(spec.region, call.extras, (q.shape[0], q.shape[2], queries.seqlen, keys.seqlen), q.device)
    low, high = key_ends(grid, queries.seqlen)
    one_call = joined.route_of(low, high, queries, keys) if joined.suits(spec) else None
    route = Route.of(low, high, queries, keys) if one_call is None else one_call
    near: list[gathered.LocalPiece] = []
    far: list[gathered.LocalPiece] = []
    tables: tuple[Tensor, ...] = ()
    if route.joined:
        mask = joined.mask_of(route, exchange.rank, low, high, queries, q.device)
        tables = mask.leaves
        slots = tuple(range(len(call.extras), len(call.extras) + len(tables)))  # they follow the extras
        text = replace(spec, mask_text=mask.text, mask_slots=slots).text()
        rows, count = queries.lengths[exchange.rank], sum(b - a for a, b in route.wanted[exchange.rank])
        far += [gathered.LocalPiece(slice(0, rows), slice(0, count), text)] if rows else []
    else:
        for part in route.parts[exchange.rank]:
            text = replace(spec, piece=Piece(part.start, part.low, queries.seqlen, keys.seqlen)).text()
            own = route.near(exchange.rank, part)
            at = route.place(exchange.rank, part) if own is None else own.rows
            (far if own is None else near).append(gathered.LocalPiece(part.rows, at, text))
    return gathered.Gathered(
        exchange, route, tuple(near), tuple(far), widths, spec.grad_slots, sum_leaves, spec.max_logit,
        route.digest if _reads_tensors(spec) else 0,
        keeps=not compiled and cost.kept(route.fetched, keys.lengths, q.shape[2], k.shape[2]), tables=tables,
    )  # fmt: skip


def _machines_of(parallel: ContextParallel) -> cost.Machines:
    return cost.Machines(parallel.size, parallel.exchange.nodes, parallel.memory, parallel.neighbours)


CAPTURED = (
    "a CUDA graph is captured, and the mask has tensors: which keys travel is read on the host, where a replay would not follow them; "
    "where they keep what they hold, call prepare(mask) of the group, then attention once as it is captured, on every rank; "
    'scheme="heads" reads nothing there'
)


def refusals(whole: Problem, machines: cost.Machines) -> dict[str, list[str]]:
    """Return why each scheme cannot compute a whole attention, or nothing if it can."""
    ranks, pieces = machines.ranks, gathered.reasons(whole.spec)
    if is_captured() and whole.spec.mask_slots:
        pieces = [*pieces, CAPTURED]
    found = {"gather": pieces, "heads": heads.reasons(whole.spec, whole.heads_k, ranks)}
    if machines.neighbours:
        found = {name: ["the mesh has two dimensions"] for name in found}
    if neighbours := neighbours_of(whole, machines):
        both = heads.reasons(whole.spec, whole.heads_k, neighbours)
    else:
        both = [f"{ranks} ranks have no neighbourhoods that {whole.heads_k} key heads can be dealt in"]
    return found | {cost.COMBINED: [*both, *pieces]}


def neighbours_of(whole: Problem, machines: cost.Machines) -> int:
    """Return how many neighbouring ranks exchange heads in combined schemes, or 0 if none can."""
    ranks, nodes = machines.ranks, machines.nodes
    if machines.neighbours:
        return machines.neighbours
    each = ranks // nodes if ranks % nodes == 0 else 1
    able = [n for n in range(2, ranks) if ranks % n == 0 and each % n == 0 and whole.heads_k % n == 0]
    return max(able, default=0)


def costs_of(whole: Problem, queries: Layout, keys: Layout, machines: cost.Machines) -> dict[str, cost.Cost]:
    """Return the cost of each scheme."""
    ranks, neighbours = machines.ranks, neighbours_of(whole, machines)
    travel = travelling(whole, queries, keys)
    found = {name: find(whole, ranks, travel, machines.per_second) for name, find in cost.COSTS.items()}
    if neighbours and whole.heads_k % neighbours == 0:
        travel = travelling(whole, queries.across(neighbours), keys.across(neighbours))
        found[cost.COMBINED] = cost.combining(whole, neighbours, travel, machines)
    return found


def _reads_tensors(spec: Spec) -> bool:
    """Return whether tensors tell which keys a query sees, such as documents or lengths."""
    return bool(expr.lookups(*[end for end in spec.whole_region.ends if end is not None]))


def travelling(whole: Problem, queries: Layout, keys: Layout) -> cost.Keys:
    """Return how many keys are sent when they are gathered, as all ranks know without reading tensors.

    If tensors decide, a layout that was made for a mask tells it; otherwise all keys count.
    """
    heads_of = whole.heads_q, whole.heads_k
    if not _reads_tensors(whole.spec):
        shape = 1, 1, queries.seqlen, keys.seqlen  # a predicate moves no end, and its tensors are not at hand
        grid = Grid.whole(whole.spec.whole_region.interval, (), shape, torch.device("cpu"))
        route = Route.of(*key_ends(grid, queries.seqlen), queries, keys)
        return cost.Keys(route.fetched, route.lent, cost.kept(route.fetched, keys.lengths, *heads_of))
    one = joined.suits(whole.spec)
    if keys.fetched is None:
        return cost.Keys.all(whole, keys.ranks)._replace(joined=one)
    lent = keys.fetched if keys.lent is None else keys.lent
    return cost.Keys(keys.fetched, lent, cost.kept(keys.fetched, keys.lengths, *heads_of), one)


def chosen(scheme: str, costs: dict[str, cost.Cost], refused: dict[str, list[str]], memory: int = 0) -> str:
    """Return a call's scheme from facts that all ranks share: the wanted one, or the cheapest possible one.

    A scheme that needs more than ``cost.MOST_MEMORY`` of a rank's memory is chosen only if no other needs less.

    Args:
        costs: the cost of each scheme.
        refused: why each scheme cannot, or nothing if it can.
        memory: bytes of the rank with the least, or 0 if unknown.

    Raises:
        NotImplementedError: the wanted scheme, or every scheme, cannot.
    """
    asked = [name for name in refused if scheme in (AUTO, name)]
    able = [name for name in asked if not refused[name]]
    if not able:
        lines = [f"  {name}: {reason}" for name in asked for reason in refused[name]]
        raise NotImplementedError("\n".join(["no scheme can compute this attention over ranks", *lines]))
    most = max(cost.MOST_MEMORY * memory, min(costs[name].memory for name in able))
    fitting = [name for name in able if not memory or costs[name].memory <= most]
    return min(fitting, key=lambda name: costs[name].milliseconds)


# -- Explaining ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation(dispatch.Explanation):
    """How ranks share an attention, and which backend runs this rank's first call. ``print`` it.

    Attributes:
        scheme: the chosen one.
        costs: of each scheme that can.
        refused_schemes: why the others cannot.
        shares: each rank's share of the visited tiles, if known.
        carrier: the transport of rows between ranks, and why no faster one is used.
    """

    scheme: str
    costs: dict[str, cost.Cost]
    refused_schemes: dict[str, list[str]]
    shares: tuple[float, ...]
    carrier: str

    def _lines(self) -> list[str]:
        lines = [f"scheme    {self.scheme}: {self.costs[self.scheme]}"]
        lines += [f"not       {name}: {found}" for name, found in self.costs.items() if name != self.scheme]
        lines += [f"not       {name}: {'; '.join(said)}" for name, said in self.refused_schemes.items()]
        shares = ", ".join(f"{100 * share:.1f} %" for share in self.shares)
        lines += [f"shares    {shares} of the visited tiles, by rank"] if self.shares else []
        return [*lines, f"carrier   {self.carrier}", *super()._lines()]

    def as_dict(self) -> dict:
        costs = {name: asdict(found) | {"milliseconds": found.milliseconds} for name, found in self.costs.items()}
        more = {"scheme": self.scheme, "costs": costs, "refused_schemes": self.refused_schemes, "shares": self.shares}
        return super().as_dict() | more | {"carrier": self.carrier}


def explained(parallel: ContextParallel, call: Agreed) -> Explanation:
    """Explain how the ranks would share a call."""
    extras, spec, (queries, keys), (q, k, v) = call.extras, call.spec, call.layouts, call.whole
    machines, whole, plan = (
        _machines_of(parallel),
        check(q, k, v, extras, call.seed, spec),
        planned(parallel, call, False),
    )
    every = refusals(whole, machines)
    refused = {name: said for name, said in every.items() if said}
    costs = {name: found for name, found in costs_of(whole, queries, keys, machines).items() if name not in refused}
    scheme = chosen(parallel.scheme, costs, every, machines.memory)
    local = dispatch.explained(_first_call(plan, whole, extras))
    found = {x.name: getattr(local, x.name) for x in fields(local)}
    for what in ("tangents", "second"):
        found |= {what: None, f"{what}_refused": dict.fromkeys([row.name for row in dispatch.every()], NOT_OVER_RANKS)}
    found |= {"scheme": scheme, "costs": costs, "refused_schemes": refused, "carrier": parallel.exchange.carrier}
    if scheme == "heads":
        return Explanation(**found, shares=(1 / parallel.size,) * parallel.size)
    mask = Mask(spec.mask_text, tuple(extras[n] for n in spec.mask_slots))
    return Explanation(**found, shares=tile_shares(mask, queries) if queries.seqlen == keys.seqlen else ())


def _first_call(call: heads.Heads | gathered.Gathered, whole: Problem, extras: list[Tensor]) -> Problem:
    """Return a rank's first call of the operator: that of its first group of heads, or of its first piece."""
    if isinstance(call, heads.Heads) and call.across is not None:
        return _first_call(call.across, cost.with_fewer_heads(whole, call.exchange.size), call.own(extras, 0))
    if isinstance(call, heads.Heads):
        parts = call.exchange.size * call.groups
        shapes = [(*x.shape[:-2], x.shape[-2] // parts, x.shape[-1]) for x in (whole.q, whole.k, whole.v)]
        text, extras = call.spec, call.own(extras, 0)
    elif call.pieces:
        piece, extras = call.pieces[0], [*extras, *call.tables]
        lengths = [part.stop - part.start for part in (piece.rows, piece.keys, piece.keys)]
        shapes = [(x.shape[0], n, *x.shape[2:]) for x, n in zip((whole.q, whole.k, whole.v), lengths, strict=True)]
        text = piece.spec
    else:
        return whole
    q, k, v = (TensorFacts(shape, _contiguous(shape), whole.dtype) for shape in shapes)
    return replace(whole, q=q, k=k, v=v, extras=tuple(TensorFacts.of(x) for x in extras), spec=parse_spec(text))


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    return tuple(accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1]
