"""How long a new mask takes until its tiles are known: `python -m bench.plans --out FILE [--device cuda] [--seqlen 16384]`.

Each mask is planned anew for tiles of 128 x 128: the state of every tile by rows and by columns, the lists that kernels walk over,
and the keys that some query sees, unless the mask says by itself that all are. The same is timed with every pair evaluated, and
beside FlexAttention's ``create_block_mask``.
First the two plans of tilewise are compared: no tile may be called empty or full that is not, and the keys seen must be the same.
"""

import argparse
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

import tilewise as tw
from bench import records
from bench.measure import in_turns
from tilewise import tiles
from tilewise.masks import Mask, region
from tilewise.masks.facts import every_key_seen

TILE, BATCH, HEADS = 128, 1, 16
PEERS = {
    "tilewise": "TileMap of a new mask",
    "pairs": "the same, every pair evaluated",
    "flex": "FlexAttention's create_block_mask, not compiled",
}


def masks(n: int, device: str) -> dict[str, tuple[Callable[[], Mask], Callable]]:
    """Each mask as a function that makes it anew, and as FlexAttention's function of b, h, i and j."""
    ids = torch.arange(n, device=device) // 1024
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
    }


def planned(mask: Mask, n: int, device: str) -> tuple[tiles.TileMap, Tensor | None]:
    """The tiles by rows, and the keys seen; lists of both passes are made too."""
    leaves = list(mask.leaves)
    grid = tiles.Grid.whole(region(mask.text, tuple(range(len(leaves)))), leaves, (BATCH, HEADS, n, n), device)
    by_rows = tiles.TileMap.build(grid, TILE, TILE)
    by_rows.visits()
    tiles.TileMap.build(grid, TILE, TILE, by_columns=True).visits(transposed=True)
    return by_rows, None if every_key_seen(grid.region, n, n) else tiles.seen_keys(grid, 1)


@contextmanager
def pair_by_pair():
    """Plans as if no predicate rose or fell."""
    known, tiles.monotone_terms = tiles.monotone_terms, lambda kept: None
    try:
        yield
    finally:
        tiles.monotone_terms = known


def in_pairs(mask: Mask, n: int, device: str) -> tuple[tiles.TileMap, Tensor | None]:
    """:func:`planned` with every pair evaluated."""
    with pair_by_pair():
        return planned(mask, n, device)


def agrees(mask: Mask, n: int, device: str) -> bool:
    """Whether the plan claims nothing that the plan of all pairs denies, and marks the same keys."""
    (fast, seen), (slow, known) = planned(mask, n, device), in_pairs(mask, n, device)
    fast, slow = torch.broadcast_tensors(fast.status, slow.status)
    sound = (fast == slow) | (fast == tiles.PARTIAL)
    return bool(sound.all()) and (seen is None or bool((seen == known).all()))


def main() -> None:
    """Checks, times and writes every mask."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seqlen", type=int, default=16384)
    options = parser.parse_args()
    n, device = options.seqlen, options.device
    run = records.run("python -m bench.plans", device, PEERS)
    lines = [run]
    for name, (make, flex) in masks(n, device).items():
        shape, case = {"what": name, "batch": BATCH, "heads_q": HEADS, "seqlen": n}, f"plan-{name}-n{n}"
        right = agrees(make(), n, device)
        lines.append(records.result(run["run"], case, "tilewise", "forward", "right", int(right), of=1, shape=shape))
        print(f"{case}: {'right' if right else 'WRONG'}", flush=True)
        if not right:
            continue
        calls = {
            "tilewise": lambda make=make: planned(make(), n, device),
            "pairs": lambda make=make: in_pairs(make(), n, device),
        }
        if device.startswith("cuda"):
            from torch.nn.attention.flex_attention import create_block_mask

            calls["flex"] = lambda flex=flex: create_block_mask(flex, None, None, n, n, device=device)
        for who, ms in in_turns(calls, device, rounds=5, budget_ms=30.0).items():
            lines.append(records.result(run["run"], case, who, "forward", "plan", round(ms, 4), shape=shape))
            print(f"  {who}: {ms:.2f} ms", flush=True)
    records.append(lines, options.out)


if __name__ == "__main__":
    main()
