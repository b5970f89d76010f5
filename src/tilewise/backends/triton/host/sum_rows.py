"""The launch that sums the rows of each query in a gathered call."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.tiles import Tiles

ELEMENTS = 1024  # of a program's sums: eight a thread


def sum_rows(rows: Tensor, place: Tensor, own: tuple[Tensor, Tensor] | None, share: Tensor | None) -> Tensor:
    """Return the sums (query, group, width) in the dtype of rows. Arguments as of the kernel, contiguous; ``own``: also whose."""
    (count, group, width), queries = rows.shape, len(place)
    out, columns = rows.new_empty(queries, group, width), 1 << (width - 1).bit_length()
    lines = max(ELEMENTS // columns, 1)
    grid = (-(-queries * group // lines),)
    sizes = queries * group, count, place.shape[1]
    given = rows, place, *(own or (None, None)), share, out, sizes, width, group, lines, columns
    with runtime.on_device(rows):
        runtime.run(runtime.kernels().sum_rows, grid, Tiles(lines, columns, 4, 3), *given)
    return out
