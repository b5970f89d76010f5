"""The kernels of decoding steps and their sizes. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.backends.hopper.config import ALIGNMENT, ELEMENT_BYTES, PLAIN, Formed, band_of, dtypes_of
from tilewise.backends.hopper.decoding.parameters import parameters
from tilewise.backends.hopper.expected import Expected
from tilewise.backends.hopper.parameters import Parameters
from tilewise.problem import Problem

BOX_ROWS = (64, 16)  # rows that one box brings, of one page; a call gets the first that divides the size of its pages
ROWS = (8, 16, 64)  # query heads of a group, by queries of a sequence: each thread of a warp has one or two of them
THREADS = 160  # a warpgroup that computes, and a warp that loads
STAGES = 3
LEAST_KEYS = 128  # of a share: fewer cost more in the merge than they save
SEGMENT_KEYS = 1024  # of a share where results may not depend on batch-mates


@dataclass(frozen=True)
class DecodingTiles:
    """The sizes of a kernel. ``width``: of keys and values, at most; ``tile_n``: keys of a block; ``rows``: how many there may be."""

    width: int
    tile_n: int
    rows: int = ROWS[0]
    stages: int = STAGES

    @property
    def width_v(self) -> int:
        """Columns of a value."""
        return self.width

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells these sizes."""
        return f"{self.rows}x{self.tile_n}_s{self.stages}"

    @property
    def block(self) -> int:
        """Elements of a block of K or of V."""
        return self.width * self.tile_n

    @property
    def own_rows(self) -> int:
        """Rows of a thread."""
        return min(self.rows // 8, 2)

    @property
    def row_warps(self) -> int:
        """Warps that have rows."""
        return max(self.rows // 16, 1)

    @property
    def fours(self) -> int:
        """How many times four numbers a thread has of a state: of each of its rows, every fourth column."""
        return self.own_rows * self.width // 16

    @property
    def barriers(self) -> int:
        """How many mbarriers there are (:class:`storage.DecodingStorage`)."""
        return 3 * self.stages

    @property
    def shared(self) -> int:
        """The bytes of shared memory."""
        barriers = -(-8 * (self.barriers + 1) // ALIGNMENT) * ALIGNMENT
        return barriers + 2 * ELEMENT_BYTES * self.block * self.stages


# Width and rows -> tiles, of which a head dim takes the first that holds it. Blocks of 128 keys are those of the forward kernels, whose
# order of sums calls that are deterministic everywhere have (docs/decisions.md#hopper-one-order).
TILES = {(d, rows): DecodingTiles(d, n, rows) for d, n in ((64, 128), (128, 128), (256, 64)) for rows in ROWS}


@dataclass(frozen=True)
class DecodingConfig(Formed):
    """The compile-time facts of one kernel. ``paged``: the rows of a page that one box brings. ``score``: none, or a softcap."""

    dtype: str
    tiles: DecodingTiles
    paged: int = BOX_ROWS[0]
    score: str = ""
    # The options of other kernels, which these have not. The ends of the band are numbers of the launch.
    form = "full"
    packed, traced, split = True, PLAIN, False

    @property
    def name(self) -> str:
        """The kernel's name: its symbol in the cubin, and its file."""
        paged = "" if self.paged == BOX_ROWS[0] else f"_paged{self.paged}"
        return f"decoding_{self.dtype}_d{self.tiles.width}{self.words}{paged}_{self.tiles.name}"

    @property
    def boxes(self) -> int:
        """Boxes that bring a block of K or of V."""
        return self.tiles.tile_n // self.paged

    @property
    def parameters(self) -> Parameters:
        """The tensors and numbers of a launch, in order."""
        return parameters(self)

    @property
    def tile_queries(self) -> int:
        """Queries of a tile, at most."""
        return self.tiles.rows

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The facts that the compiled kernel is held to."""
        return (Expected(self.name, (), self.tiles.shared, None, stores=False, gathers=True),)

    def describe(self) -> str:
        """The kernel in a sentence, as ``explain`` shows it."""
        tiles = self.tiles
        return (
            f"up to {tiles.rows} rows of a group x {tiles.tile_n} keys, shares of all keys, {tiles.stages} stages, "
            f"{tiles.shared >> 10} KiB shared"
        )

    def traffic(self, problem: Problem) -> int:
        """Bytes of the forward: Q and O once, and once for all heads of a group the K and V that some query sees, where every sequence
        is as long as it may be."""
        keys, band = problem.capacity if problem.paged else problem.seqlen_k, band_of(problem)
        if band is not None and band.lo is not None:  # over pages it counts from the row's own position
            keys = min(keys, (problem.seqlen_q if problem.paged else keys) - band.lo)
        rows = problem.batch * (problem.heads_q * problem.seqlen_q + problem.heads_k * keys)
        return ELEMENT_BYTES * rows * (problem.head_dim + problem.head_dim_v)


def shipped() -> list[DecodingConfig]:
    """Every kernel that is compiled ahead of time."""
    kinds = [(tiles, score) for tiles in TILES.values() for score in ("", "softcap") if tiles.rows in rows_of(score)]
    kinds = [
        (tiles, score, dtype) for tiles, score in kinds for dtype in dtypes_of(tiles.width, tiles.width_v, bool(score))
    ]
    return [DecodingConfig(dtype, tiles, n, score) for n in BOX_ROWS for tiles, score, dtype in kinds]


def rows_of(score: str) -> tuple[int, ...]:
    """The numbers of rows for which kernels with a score ship: models with a softcap have groups of two to six heads."""
    return ROWS if not score else ROWS[:1]
