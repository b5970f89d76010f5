"""docs/explorer.html: one file to choose a mask, a score and sizes, and to see their tiles and the bytes moved.

Its script computes them by the rules of :mod:`tilewise.planning.tiles` for any size, so that it needs no server. The cases below,
worked out here and written into the page as JSON, hold the script to this: the page compares itself with them when it is opened, and a
test does so under node with many more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import torch

from tilewise.masks import Mask
from tilewise.masks.catalogue import block_sparse, causal, documents, keep, key_lengths, key_range, prefix, window
from tilewise.masks.patterns import butterfly, local_global, strided
from tilewise.pictures.view import ScoreView, mask_view
from tilewise.scores import Score
from tilewise.scores.catalogue import alibi, bias, softcap

MARK = re.compile(r'(<script type="application/json" id="cases">\n).*?(\n</script>)', re.DOTALL)
Lengths = tuple[int, int]


def _blocks(lengths: Lengths, block: int) -> Lengths:
    return -(-lengths[0] // block), -(-lengths[1] // block)


def _butterfly(lengths: Lengths, block: int) -> Mask:
    queries, keys = _blocks(lengths, block)
    return block_sparse(butterfly(max(queries, keys))[:queries, :keys], block, block)


# The masks that the page offers, by the name that its script has for them, of the lengths and of the page's numbers.
OFFERED: dict[str, Callable[..., Mask]] = {
    "everything": lambda lengths: window(),
    "causal": lambda lengths: causal(),
    "window": lambda lengths, left, right: window(left, right),
    "prefix": lambda lengths, n: prefix(n),
    "key_range": lambda lengths, start, end: key_range(start, end),
    "key_lengths": lambda lengths, n: key_lengths(n),
    "documents": lambda lengths, size: documents(torch.arange(lengths[1]) // size),
    "dilated": lambda lengths, step: keep(lambda b, h, i, j: (i - j) % step == 0),
    "butterfly": _butterfly,
    "strided": lambda lengths, block, stride, local: block_sparse(
        strided(*_blocks(lengths, block), stride, local), block, block
    ),
    "local_global": lambda lengths, block, local, globals_: block_sparse(
        local_global(*_blocks(lengths, block), local, globals_), block, block
    ),
}
SCORES: dict[str, Callable[..., Score]] = {
    "none": lambda lengths: Score(""),
    "softcap": lambda lengths, cap: softcap(cap),
    "alibi": lambda lengths, slope: alibi(torch.tensor([slope])),
    "bias": lambda lengths: bias(torch.zeros(lengths, dtype=torch.bfloat16)),
}

Chosen = tuple[str, tuple[int, ...]]  # a name of OFFERED, and the numbers that it takes


def case(first: Chosen, op: str, second: Chosen, lengths: Lengths, tile: Lengths, score: tuple = ("none", ())) -> dict:
    """Return a choice on the page with what it has to show: the status of each tile, in rows, and the bytes of a head."""
    masks = [OFFERED[name](lengths, *numbers) for name, numbers in (first, second)]
    mask = masks[0] & masks[1] if op == "&" else masks[0] | masks[1] if op == "|" else masks[0]
    view = mask_view(mask, lengths, tile)
    shown = ScoreView.of(SCORES[score[0]](lengths, *score[1]), lengths)
    last = torch.tensor([lengths[0] - 1])
    return {
        "first": [first[0], *first[1]],
        "op": op,
        "second": [second[0], *second[1]],
        "score": [score[0], *score[1]],
        "lengths": lengths,
        "tile": tile,
        "head_dim": 64,
        "status": "".join(map(str, view.status.flatten().tolist())),
        "bytes": view.bytes_moved(64, 2, pair_bytes=shown.pair_bytes),
        "corner": round(
            shown.places(last, torch.tensor([0]), lengths).item(), 3
        ),  # of the last query and the first key
    }


NUMBERS: dict[str, tuple[int, ...]] = {
    "everything": (), "causal": (), "window": (20, 3), "prefix": (37,), "key_range": (9, 70), "key_lengths": (50,),
    "documents": (30,), "dilated": (3,), "butterfly": (12,), "strided": (12, 3, 2), "local_global": (12, 1, 1),
}  # fmt: skip


def cases() -> list[dict]:
    """Return each mask alone and joined with another one, for more keys than queries and the other way round."""
    alone = [((name, numbers), "", ("everything", ())) for name, numbers in NUMBERS.items()]
    names = list(NUMBERS)
    pairs = [
        (names[n], op, names[(n + step) % len(names)]) for n in range(len(names)) for op, step in (("&", 3), ("|", 4))
    ]
    joined = [((a, NUMBERS[a]), op, (b, NUMBERS[b])) for a, op, b in pairs]
    sizes = (((96, 96), (16, 16)), ((50, 90), (16, 8)), ((90, 50), (12, 20)))
    scores = (("none", ()), ("softcap", (30.0,)), ("alibi", (0.5,)), ("bias", ()))
    every = [*alone, *joined]
    return [case(*chosen, *sizes[n % len(sizes)], scores[n % len(scores)]) for n, chosen in enumerate(every)]


def with_cases(page: str) -> str:
    """Return the page with the cases written into it, a line each."""
    lines = ",\n".join(json.dumps(x, separators=(",", ":")) for x in cases())
    return MARK.sub(lambda found: f"{found[1]}[\n{lines}\n]{found[2]}", page)
