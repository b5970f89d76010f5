"""docs/catalogue.md: every mask and score of the catalogue as a picture with its code, and docs/explorer.html's cases.

``python -m bench.page --write`` writes them; tests hold them equal to what it would write.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

from bench.explorer import with_cases
from bench.svg import mask_svg, score_svg
from tilewise.pictures.reading import MASKS, PATTERNS, SCORES, read_mask, read_score
from tilewise.pictures.view import ScoreView, mask_view

SIZE, TILE = 64, 8
FOLDER = "img/catalogue"


class Entry(NamedTuple):
    """One picture: its heading, what it draws, and what is said of it (else the first sentence of the function of that name)."""

    heading: str
    code: str
    said: str = ""
    lengths: tuple[int, int] = (SIZE, SIZE)

    @property
    def file(self) -> str:
        return re.sub(r"[^a-z0-9]+", "-", self.heading.lower()).strip("-") + ".svg"


MASK_ENTRIES = (
    Entry("causal", "tw.causal()"),
    Entry(
        "causal, more keys than queries", "tw.causal()",
        "The 32 queries are the last ones of 64 positions, as in a prompt that continues a cache.", (32, 64),
    ),
    Entry(
        "causal, aligned at the first key", 'tw.causal(align="first")',
        "Like `is_causal` in PyTorch's SDPA. `tw.window` takes `align` too.", (32, 64),
    ),
    Entry("window", "tw.window(left=20, right=4)"),
    Entry("prefix", "tw.prefix(20)"),
    Entry("key_range", "tw.key_range(10, 50)"),
    Entry("key_lengths", "tw.key_lengths(44)"),
    Entry("documents", "tw.documents(torch.arange(64) // 20)"),
    Entry("dense", "tw.dense(torch.arange(64) % 16 < 12)"),
    Entry("keep", "tw.keep(lambda b, h, i, j: (i - j) % 6 == 0)"),
    Entry("butterfly", "tw.block_sparse(tw.butterfly(8), 8, 8)"),
    Entry("strided", "tw.block_sparse(tw.strided(8, 8, stride=3, local=2), 8, 8)"),
    Entry("local_global", "tw.block_sparse(tw.local_global(8, 8), 8, 8)"),
    Entry(
        "block_sparse", "tw.block_sparse(tw.butterfly(6), 12, 12) & tw.causal()",
        "Blocks of a pattern need not match the tiles: these have 12 pairs on a side, the tiles 8.",
    ),
    Entry(
        "selected", "tw.selected(torch.tensor([[[[0, 0], [0, 1], [1, 2], [0, 3]]]]), 16, 16)",
        "Each block of 16 queries sees the blocks of 16 keys in its row. An entry that appears twice counts once.",
    ),
    Entry(
        "Selected tokens", "tw.causal() & tw.selected(torch.tensor([[[[0, 9], [3, 20], [9, 41]]]]), 1, 22)",
        "As in DeepSeek's sparse attention, except that 22 queries share a row here. Few tiles are full.",
    ),
    Entry(
        "Selected blocks and a window", "tw.selected(torch.tensor([[[[-1], [0], [1], [0]]]]), 16, 16) | tw.window(16, 0)",
        "As in NSA: blocks of the past, and the nearest keys.",
    ),
    Entry(
        "Selected blocks of the past",
        "tw.causal() & tw.selected(torch.tensor([[[[0, 0], [1, 0], [2, 0]]]]), 24, 24)",
        "As in MoBA: a query sees its own block up to itself, and whole blocks of the past. Here 24 queries share their choice.",
    ),
    Entry(
        "Both of two masks", "tw.causal() & tw.window(left=20) & tw.documents(torch.arange(64) // 36)",
        "`&` keeps the pairs that all of the masks keep: a sliding window within documents.",
    ),
    Entry(
        "Either of two masks", "tw.window(6, 6) | tw.key_range(0, 5) | tw.keep(lambda b, h, i, j: i < 5)",
        "`|` keeps the pairs that any of the masks keeps: a window, and five positions that see all and are seen by all (Longformer).",
    ),
    Entry(
        "A window with first keys", "tw.causal() & (tw.window(left=16) | tw.key_lengths(4))",
        "The first keys stay visible while the window moves on (StreamingLLM).",
    ),
)  # fmt: skip
SCORE_ENTRIES = (
    Entry("softcap", "tw.softcap(30.0)"),
    Entry("alibi", "tw.alibi(torch.tensor([0.25]))"),
    Entry("bias", "tw.bias((torch.arange(64) % 24) / 8)"),
    Entry("score", "tw.score(lambda s, b, h, i, j: s + torch.where(i > j, (i - j) // 8, 0))"),
    Entry(
        "One score, then another", "tw.alibi(torch.tensor([1.0])) >> tw.softcap(20.0)",
        "`>>` means \"then\": the penalty is added first, and the sum is capped.",
    ),
)  # fmt: skip

PAGE = """# Masks and scores to look at

This page shows every mask and score of the catalogue with its code. You can draw your own:

```
tilewise show "causal() & (window(300, 0) | key_range(0, 40))" --png mask.png
```

![Tiles of a window with first keys: full ones, the pairs of partial ones, and those that are skipped](img/mask-tiles.png)

| color | tile | a kernel |
|---|---|---|
| blue | full | computes it without reading the mask |
| orange (kept), pale (hidden) | partial | reads the mask for every pair |
| grey | empty | skips it and never loads its keys |

The pictures below have {size} queries (rows, from the top) and {size} keys (columns) in tiles of {tile} x {tile}.
[The explorer](explorer.html), one file for a browser, and `tilewise show` draw other sizes. A mask like the one above has several
intervals per row. Hopper's kernels read it as lists of tiles and one bit for each pair of a partial tile
([decisions.md](decisions.md#hopper-list-tiles)).

## Masks

{masks}
## Scores

A score changes `s = softmax_scale · q·k` before the mask. The pictures show its value for s = 0 at each pair, the largest darkest.
If the position does not matter, they show the curve from s = -100 to 100, beside the identity.

{scores}
## A call

`tw.explain(q, k, v, ...).plot()` draws the tiles that the chosen backend visits, the score, and the text of `explain`. This call has a
causal window of 1,024 keys within documents, and linear biases.

![The tiles of a call, its score, and what explain says of it](img/explain-plot.png)

## The explorer

[explorer.html](explorer.html) needs no server: choose masks, a score and sizes, and see the tiles, the bytes that they move and the code.

![The explorer: causal and documents, 2,048 queries and 3,072 keys](img/explorer.png)
"""


def first_sentence(heading: str) -> str:
    """Return the first sentence of the function of that name, without Sphinx's roles."""
    function = {**MASKS, **SCORES, **PATTERNS}[heading]
    said = " ".join(inspect.getdoc(function).split("\n\n")[0].split())
    said = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", said).replace("``", "`").removesuffix("::")
    return said if said.endswith(".") else said + "."


def section(entry: Entry) -> str:
    """Return the picture, the sentence and the code of an entry."""
    heading = f"`{entry.heading}`" if entry.heading in {**MASKS, **SCORES, **PATTERNS} else entry.heading
    said = entry.said or first_sentence(entry.heading)
    picture = f"![{entry.heading}]({FOLDER}/{entry.file})"
    return f"### {heading}\n\n{said}\n\n{picture}\n\n```python\n{entry.code}\n```\n"


def page() -> str:
    """Return the text of docs/catalogue.md."""
    masks, scores = ("\n".join(map(section, entries)) for entries in (MASK_ENTRIES, SCORE_ENTRIES))
    return PAGE.format(size=SIZE, tile=TILE, masks=masks, scores=scores)


def pictures() -> dict[str, str]:
    """Return the SVG of every entry, by its file."""
    drawn = {
        x.file: mask_svg(mask_view(read_mask(x.code), x.lengths, (TILE, TILE), title=x.code)) for x in MASK_ENTRIES
    }
    shown = ((x, ScoreView.of(read_score(x.code), x.lengths, title=x.code)) for x in SCORE_ENTRIES)
    return drawn | {x.file: score_svg(view, x.lengths) for x, view in shown}


def files(docs: Path) -> dict[Path, str]:
    """Return the generated files of the folder of documents: the page, its pictures and the explorer, whose text stands there."""
    explorer = docs / "explorer.html"
    found = {docs / "catalogue.md": page(), explorer: with_cases(explorer.read_text(encoding="utf-8"))}
    return found | {docs / FOLDER / name: text for name, text in pictures().items()}
