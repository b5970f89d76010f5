"""Tiles of the Triton kernels, the pieces of a head dim, and the shared memory that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

MIN_WIDTH = 16  # of a side of tl.dot
WIDEST_PIECE = 512  # columns of a head dim
OVER_KEYS = ("dkdv", "dk", "dv", "pairs")  # the passes whose programs own key tiles
OF_SHEETS = ("sheet", "kept_pairs")  # the kernels of one product of kept tiles


@dataclass(frozen=True)
class Tiles:
    """The tiles of one kernel: ``tile_m`` queries by ``tile_n`` keys, warps, and stages of its loads.

    Attributes:
        tma: whole tiles are loaded through tensor descriptors (Hopper and newer) if the strides allow it.
        padded: a head dim that is no power of two is padded to one instead of being cut in two pieces (:func:`pieces`).
        registers: the most that a thread may have, so that one more program fits; 0 leaves the choice to the compiler.
        chunk: columns of a head dim of bf16 terms that are read at a time, where they are multiplied
            (docs/decisions.md#triton-chunks); 0: all, before.
        column_parts: programs that each hold a part of the columns of a tile's sums, whole chunks, and compute all of its pairs.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    padded: bool = False
    registers: int = 0
    chunk: int = 0
    column_parts: int = 1

    @property
    def options(self) -> dict[str, int]:
        """The compiler's options."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        # a * b + c rounds once: the default of Triton up to 3.9, but not of 3.10.
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "enable_fp_fusion": True, **limit}

    @property
    def ahead(self) -> bool:
        """Whether loads run more than a tile ahead. With fewer stages, a kernel waits for an early load early
        (docs/decisions.md#triton-v-beside-k)."""
        return self.num_stages > 2

    @property
    def term_unit(self) -> int:
        """Columns of which a term of a row is a multiple, padded with zeros: a chunk for each part."""
        return max(self.chunk, 1) * self.column_parts

    def describe(self) -> str:
        how = ", tma" if self.tma else ""
        how += ", padded" if self.padded else ""
        how += f", {self.registers} registers" if self.registers else ""
        how += f", {self.chunk} columns at a time" if self.chunk else ""
        how += f", columns in {self.column_parts} parts" if self.column_parts > 1 else ""
        return f"{self.tile_m} x {self.tile_n}, {self.num_warps} warps, {self.num_stages} stages{how}"


def width(head_dim: int) -> int:
    """Return the power of two to which a head dim is padded."""
    return max(MIN_WIDTH, 1 << (head_dim - 1).bit_length())


def pieces(head_dim: int, tiles: Tiles) -> tuple[tuple[int, int, int], ...]:
    """Return ``(first column, columns, width)`` of each tile that holds a head dim.

    Unless ``tiles.padded``, these are the largest power of two and the padded rest, if that takes fewer columns than padding the whole:
    96 = 64 + 32, 72 = 64 + 8 of 16, but 112 is 112 of 128 (docs/decisions.md#triton-pieces). With ``tiles.chunk`` they are chunks.
    """
    if tiles.chunk:
        return tuple((n, min(tiles.chunk, head_dim - n), tiles.chunk) for n in range(0, head_dim, tiles.chunk))
    first = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - first
    if not tiles.padded and first >= MIN_WIDTH and rest and first + width(rest) < width(head_dim):
        return (0, first, first), (first, rest, width(rest))
    return ((0, head_dim, width(head_dim)),)


def fills_tiles(head_dim: int) -> bool:
    """Return whether a head dim fills tiles of more than MIN_WIDTH columns: 64 and 96 do, but not 24, 40 and 80."""
    return all(n == wide > MIN_WIDTH for _, n, wide in pieces(head_dim, Tiles(0, 0, 0, 0)))


def shared_pieces(head_dim: int, head_dim_v: int, tiles: Tiles) -> tuple[tuple[int, int, int], ...]:
    """Return the :func:`pieces` of a k whose first ``head_dim_v`` columns are v: those of v, then those of the rest."""
    rest = pieces(head_dim - head_dim_v, tiles) if head_dim > head_dim_v else ()
    return pieces(head_dim_v, tiles) + tuple((head_dim_v + first, n, wide) for first, n, wide in rest)


def columns(head_dim: int, tiles: Tiles) -> int:
    """Return the columns of the tiles that hold a head dim, with padding."""
    return sum(piece for _, _, piece in pieces(head_dim, tiles))


@dataclass(frozen=True)
class Streams:
    """What a problem needs in shared memory beside the tiles of its tensors.

    Attributes:
        pair_bytes: bytes per pair of the tensors that a mask or score reads at both i and j, which are streamed too.
        kept: dS may be kept in a sheet.
        plain: P and dS go from registers into the next product. Dropout and predicates may pass them through shared memory.
        line_bytes: bytes per row or column of the tensors that the score reads at i or at j. A predicate's pass through the scratch that it
            has anyway.
    """

    pair_bytes: int = 0
    plain: bool = False
    kept: bool = False
    line_bytes: int = 0


def shared_memory(
    kernel: str, tiles: Tiles, widths: tuple[int, int], itemsize: int, streams: Streams = Streams(), arch: str = "sm90"
) -> int:
    """Return the bytes that a kernel may need: its resident tiles, and ``num_stages`` of the tiles that its loop streams.

    Args:
        kernel: "forward", "paged", "latent", "merge_rows", "dkdv", "dk", "dv", "dq",
            "group_parts", "delta", "tile", "strip", "pairs", "sheet", "kept_pairs" or "sheet_strip".
        widths: :func:`columns` of q, k and of v.
    """
    w, wv = widths
    m, n, stages = tiles.tile_m, tiles.tile_n, max(tiles.num_stages, 1)
    # With fewer than 64 keys per warpgroup, not all products are wgmma, and operands are converted through shared memory.
    passed = 0 if arch == "sm90" and streams.plain and n >= 16 * tiles.num_warps else m * n
    over_keys = stages * m * (w + wv) + passed + (max(m, n) * max(w, wv) if n < 64 else 0)
    over_keys += m * (w + wv) if arch == "sm90" and itemsize == 4 else 0  # turned: wgmma takes tf32 by rows alone
    rows = {
        "forward": m * w + stages * n * (w + wv),
        "paged": m * w + stages * n * (w + wv),
        # V is in K. P changes its layout, and so do a predicate's pairs, and V where products do not read shared memory.
        "latent": m * w + stages * n * w + (m * n if streams.plain else 2 * m * n) + (0 if arch == "sm90" else n * wv),
        "dkdv": n * (w + wv) + over_keys,
        "dk": n * (w + wv) + over_keys,
        "pairs": n * (w + wv) + over_keys,
        "dv": n * w + over_keys,
        "dq": m * (w + wv) + stages * n * (w + wv),
        "delta": 0,
        "merge_rows": 8 * wv,
        "group_parts": 0,
        "terms": 0,
        "tile": stages * (m + n) * (w + wv),
        "strip": stages * (m + n) * (w + wv),
        "sheet": stages * n * (m + w) + 2 * m * n,
        "kept_pairs": stages * m * (n + max(w, wv)) + 2 * m * n,
        "sheet_strip": m * n,
    }
    statistics = 4 * 2 * m * stages if kernel in OVER_KEYS else 0
    if tiles.chunk and rows[kernel]:  # one loop at a time reads chunks of both factors
        rows[kernel] = stages * (m + n) * tiles.chunk + (0 if streams.plain and kernel not in OF_SHEETS else m * n)
    bytes_ = streams.pair_bytes if kernel not in ("delta", "terms", *OF_SHEETS) else 0
    scratch = {"sm90": 1024 if streams.plain else 2048, "sm100": 18 << 10}.get(arch, 2048)  # for changes of layout
    if streams.line_bytes:  # each row or column passes through shared memory, a number for each thread
        scratch += 64 + 32 * tiles.num_warps * streams.line_bytes
    pairs = max(stages - 1, 1) * m * n * bytes_ + (0 if arch == "sm90" else 4096) if bytes_ else 0
    pairs += (
        m * n * itemsize if (bytes_ or streams.kept) and kernel in ("dkdv", "dk") else 0
    )  # dS on its way to a sheet
    if kernel != "latent":
        scratch = max(scratch, 4096) if w & (w - 1) else scratch
        scratch += 128 if w > WIDEST_PIECE else 0
    return itemsize * rows[kernel] + statistics + pairs + scratch


def program_limit(tiles: Tiles, limit: int, arch: str, itemsize: int) -> int:
    """Return the bytes that a program may take of a multiprocessor's ``limit``.

    Two programs of four warps should run at a time, so that one computes while the other waits for its products
    (docs/decisions.md#triton-two-programs). The scratch includes the kilobyte that each program costs in addition.
    """
    return (limit + 1024) // 2 if arch == "sm90" and tiles.tma and tiles.num_warps <= 4 and itemsize == 2 else limit


def fit(kernel: str, tiles: Tiles, need: Callable[[Tiles], int], limit: int) -> Tiles:
    """Return ``tiles`` made smaller until they need no more than ``limit`` bytes.

    The order is fewer streamed rows, down to 64; then two stages; then fewer rows, down to 32; then one stage. Loads that nothing hides
    cost more than short tiles.
    """
    streamed = "tile_m" if kernel in OVER_KEYS else "tile_n"
    for rows, stages in ((64, None), (64, 2), (32, None), (32, 1), (MIN_WIDTH, None)):
        while need(tiles) > limit and getattr(tiles, streamed) > rows:
            tiles = replace(tiles, **{streamed: getattr(tiles, streamed) // 2})
        if need(tiles) > limit and stages is not None and tiles.num_stages > stages:
            tiles = replace(tiles, num_stages=stages)
    # With descriptors, passes over keys with 16 rows and three stages read unaligned addresses (docs/decisions.md#triton-descriptors).
    return replace(tiles, tma=tiles.tma and (streamed == "tile_n" or tiles.tile_m > MIN_WIDTH))
