"""`tilewise show`: a mask as a picture of its tiles, in the terminal or as a PNG."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli import page


@dataclass(frozen=True)
class ShowOptions:
    """A mask, a score, and the sizes for which they are drawn."""

    mask: Annotated[str, typer.Argument(help='Like "causal() & window(256, 0)"; the names of the catalogue.')] = ""
    score: Annotated[str, typer.Option(help='Like "softcap(30) >> alibi([0.5])".')] = ""
    seqlen: Annotated[int, typer.Option(help="Queries, and keys unless --seqlen-k says otherwise.")] = 1024
    seqlen_k: Annotated[int | None, typer.Option(help="Keys.")] = None
    tile: Annotated[int, typer.Option(help="Queries of a tile, and keys unless --tile-n says otherwise.")] = 128
    tile_n: Annotated[int | None, typer.Option(help="Keys of a tile.")] = None
    head_dim: Annotated[int, typer.Option(help="Width of q, k and v, in numbers of 2 bytes.")] = 128
    batch: Annotated[int, typer.Option(help="Which batch element.")] = 0
    head: Annotated[int, typer.Option(help="Which query head.")] = 0
    png: Annotated[Path | None, typer.Option(help="Write this PNG instead.")] = None


def show(options: ShowOptions) -> int:
    """Draw a mask: its full, partial and skipped tiles, and the bytes that a kernel moves for them.

    Example: tilewise show "causal() & window(256, 0)" --seqlen 1024 --tile 128
    """
    from tilewise.masks import Mask
    from tilewise.pictures import terminal
    from tilewise.pictures.reading import read_mask, read_score
    from tilewise.pictures.view import ScoreView, mask_view

    o = options
    if not o.mask and not o.score:
        raise ValueError('what is to be shown? Give a mask, like "causal()", or a --score, like "softcap(30)"')
    if o.head_dim < 1:
        raise ValueError(f"head_dim must be at least 1, got {o.head_dim}")
    lengths = o.seqlen, o.seqlen if o.seqlen_k is None else o.seqlen_k
    tile = o.tile, o.tile if o.tile_n is None else o.tile_n
    at = o.batch, o.head
    view = mask_view(read_mask(o.mask) if o.mask else Mask(""), lengths, tile, at, o.mask)
    score = ScoreView.of(read_score(o.score), lengths, at, o.score) if o.score else None
    notes = view.summary(o.head_dim, pair_bytes=0 if score is None else score.pair_bytes)
    if o.png is not None:
        return _save(o.png, view, score, notes)
    page.heading(view.title)
    page.console().print(terminal.tiles_text(view, page.console().width))
    if score is not None:
        page.console().print(terminal.score_text(score, view, page.console().width))
    for line in notes:
        page.note(line)
    return 0


def _save(path: Path, view, score, notes: list[str]) -> int:
    from tilewise.pictures.figure import draw

    try:
        figure = draw(view, score, tuple(notes))
    except ImportError as missing:
        raise ValueError(str(missing)) from None
    figure.savefig(path, dpi=110, format="png")
    print(f"saved {path}")
    return 0
