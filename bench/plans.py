"""How long a new mask takes until its tiles are known: `python -m bench.plans --out FILE [--device cuda] [--seqlen 16384]`.

Each mask is planned anew for tiles of 128 x 128: the state of every tile by rows and by columns, the lists that kernels walk over,
and the keys that some query sees, unless the mask says by itself that all are; of a mask that is intervals alone, the ends of all
rows and columns. Beside it, the same by PyTorch's operations, and FlexAttention's ``create_block_mask``, compiled.
First the plan is compared with every pair of the mask: no tile may be called empty or full that is not, and the keys seen must be the
same.

With `--cases masks` the masks of these benchmark cases are planned as the kernels of both passes on Hopper read them: made anew, with
lists and bits or ends, and the keys that are seen.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

import tilewise as tw
from bench import script, testing
from bench.cases import Inputs, draw, tagged
from bench.measure import in_turns
from tilewise.backends.base import PerTensors
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host.padded_call import PaddedPlan
from tilewise.backends.hopper.host.plan import Plan
from tilewise.masks import Mask, region
from tilewise.masks.facts import every_key_seen
from tilewise.planning import tiles

TILE, BATCH, HEADS = 128, 1, 16
PEERS = {
    "tilewise": "TileMap of a new mask",
    "torch": "the same by PyTorch's operations alone",
    "flex": "FlexAttention's create_block_mask",
    "flex-compiled": "the same, compiled",
}


def masks(n: int, device: str) -> dict[str, tuple[Callable[[], Mask], Callable]]:
    """Each mask as a function that makes it anew, and as FlexAttention's function of b, h, i and j."""
    ids = torch.arange(n, device=device) // 1024
    pattern = torch.rand(n // TILE, n // TILE, generator=torch.Generator().manual_seed(0)).to(device) < 0.1
    hashed = lambda b, h, i, j: ((i * 7919 + j * 104729) % 13 > 4) & (i >= j)  # noqa: E731
    block_causal = lambda b, h, i, j: i // 1024 >= j // 1024  # noqa: E731
    sinks = lambda b, h, i, j: (i >= j) & ((j < 4) | (i - j < 1024))  # noqa: E731
    return {
        "block-causal": (lambda: tw.keep(block_causal), block_causal),
        "causal-or-documents": (
            lambda: tw.causal() | tw.documents(ids),
            lambda b, h, i, j: (i >= j) | (ids[i] == ids[j]),
        ),
        "sinks-and-window": (lambda: tw.causal() & (tw.window(left=1023) | tw.key_range(0, 4)), sinks),
        "every-pair": (lambda: tw.keep(hashed), hashed),
        "block-sparse-90": (
            lambda: tw.block_sparse(pattern, TILE, TILE),
            lambda b, h, i, j: pattern[i // TILE, j // TILE],
        ),
        "documents-causal": (
            lambda: tw.documents(ids) & tw.causal(),
            lambda b, h, i, j: (i >= j) & (ids[i] == ids[j]),
        ),
    }


def grid_of(mask: Mask, n: int, device: str) -> tiles.Grid:
    """All pairs of n queries and n keys, with the mask over them."""
    leaves = list(mask.leaves)
    return tiles.Grid.whole(region(mask.text, tuple(range(len(leaves)))), leaves, (BATCH, HEADS, n, n), device)


def planned(mask: Mask, n: int, device: str) -> tuple[tiles.TileMap | None, Tensor | None]:
    """The tiles by rows, and the keys seen; lists of both passes are made too, or the ends of rows and columns in their place."""
    grid = grid_of(mask, n, device)
    by_rows, seen = None, None
    if grid.region.predicate is None:
        lines = torch.arange(n, device=device)
        for ends in (grid.key_interval(lines), grid.query_interval(lines)):
            [end.int() for end in ends]
    else:
        by_rows = tiles.TileMap.build(grid, TILE, TILE)
        by_rows.visits()
        tiles.TileMap.build(grid, TILE, TILE, by_columns=True).visits(transposed=True)
    if not every_key_seen(grid.region, n, n):
        seen = tiles.seen_keys(grid, 1)
    return by_rows, seen


@contextmanager
def without(*names: str):
    """Plans as if these functions of ``tiles`` had no answer."""
    known = {name: getattr(tiles, name) for name in names}
    for name in names:
        setattr(tiles, name, lambda *given: None)
    try:
        yield
    finally:
        for name, function in known.items():
            setattr(tiles, name, function)


def in_torch(mask: Mask, n: int, device: str) -> tuple[tiles.TileMap | None, Tensor | None]:
    """:func:`planned` by PyTorch's operations."""
    with without("_by_kernel", "_ends_by_kernel"):
        return planned(mask, n, device)


def agrees(mask: Mask, n: int, device: str) -> bool:
    """Whether the plan claims nothing that all pairs deny, and marks the same keys."""
    fast, seen = planned(mask, n, device)
    with without("_by_kernel", "_ends_by_kernel", "monotone_terms"):
        slow, known = planned(mask, n, device)
    if fast is None:
        return seen is None or torch.equal(seen, known)
    fast, slow = torch.broadcast_tensors(fast.status, slow.status)
    # The plan of all pairs calls a tile partial that the mask's interval and its predicate cut apart; both may be right.
    sound = (fast == slow) | (fast == tiles.PARTIAL) | (slow == tiles.PARTIAL)
    return bool(sound.all()) and (seen is None or bool((seen == known).all()))


def plan_for_kernels(x: Inputs, c: testing.Call, plans: Sequence[Plan]) -> None:
    """Makes a case's mask, and all that Hopper's kernels of both passes read of it, as if for the first time."""
    x.options()
    for plan in plans:
        plan.made = PerTensors()
        make_tensors(plan, c)


def make_tensors(plan: Plan, c: testing.Call) -> None:
    """The tensors that a plan keeps of a mask, but for its copies of keys and values."""
    if isinstance(plan, PaddedPlan):
        plan.inputs(c.t)
        return
    plan.mask_tensors(c.t, plan.kept(c.t.leaves))


def time_cases(tag: str, log: script.Log) -> None:
    """Keep the times of the plans of the cases with a tag that Hopper runs."""
    for case in tagged(tag):
        x = draw(case, "cuda")
        c = testing.call(x.q, x.k, x.v, do=x.do, **x.options())
        backend = Hopper()
        if backend.refused(c.p):
            continue
        plans = backend._plan(c.p), backend._backward_plan(c.p)
        call = partial(plan_for_kernels, x, c, plans)
        (ms,) = in_turns({"tilewise": call}, "cuda", rounds=9, budget_ms=30.0, queued=False).values()
        log.add(case.name, "tilewise", "forward", "plan", ms)


def time_masks(n: int, device: str, compiled: bool, log: script.Log) -> None:
    """Check every mask, and keep the times of those that are right."""
    for name, (make, flex) in masks(n, device).items():
        shape, case = {"what": name, "batch": BATCH, "heads_q": HEADS, "seqlen": n}, f"plan-{name}-n{n}"
        right = agrees(make(), n, device)
        log.add(case, "tilewise", "forward", "right", int(right), of=1, shape=shape)
        if not right:
            continue
        calls = {
            "tilewise": lambda make=make: planned(make(), n, device),
            "torch": lambda make=make: in_torch(make(), n, device),
        }
        if device == "cuda":
            from torch.nn.attention.flex_attention import create_block_mask

            plan = torch.compile(create_block_mask) if compiled else create_block_mask
            calls["flex-compiled" if compiled else "flex"] = partial(plan, flex, None, None, n, n, device=device)
        for who, ms in in_turns(calls, device, rounds=5, budget_ms=30.0, queued=False).items():
            log.add(case, who, "forward", "plan", ms, shape=shape)


def main() -> None:
    """Time the masks of this file, or those of cases."""
    parser = script.parser(__doc__)
    parser.add_argument("--seqlen", type=int, default=16384)
    parser.add_argument("--cases", metavar="TAG", help="the masks of these cases, as Hopper's kernels read them")
    parser.add_argument("--compiled", action="store_true", help="FlexAttention's compiled, which takes seconds a mask")
    options = parser.parse_args()
    if options.cases:
        peers = {"tilewise": "a new mask, and what Hopper's kernels read of it"}
        time_cases(options.cases, script.Log.begin(f"python -m bench.plans --cases {options.cases}", options, peers))
    else:
        log = script.Log.begin("python -m bench.plans", options, PEERS)
        time_masks(options.seqlen, options.device, options.compiled, log)


if __name__ == "__main__":
    main()
