"""The kernels of decoding steps and their sizes. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.backends.hopper.config import ALIGNMENT, DTYPES, ELEMENT_BYTES, PLAIN, Formed
from tilewise.backends.hopper.expected import Expected
from tilewise.problem import Problem

PART = 64  # rows that one box brings, of one page
MOST_HEADS = 8  # of a group: rows of which each thread of one warp has one
THREADS = 160  # a warpgroup that computes, and a warp that loads
STAGES = 3
LEAST_KEYS = 128  # of a share: fewer cost more in the merge than they save


@dataclass(frozen=True)
class DecodingTiles:
    """The sizes of a kernel. ``width``: of keys and values; ``tile_n``: keys of a block, a multiple of PART."""

    width: int
    tile_n: int
    stages: int = STAGES

    @property
    def width_v(self) -> int:
        """Columns of a value."""
        return self.width

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells these sizes."""
        return f"8x{self.tile_n}_s{self.stages}"

    @property
    def block(self) -> int:
        """Elements of a block of K or of V."""
        return self.width * self.tile_n

    @property
    def parts(self) -> int:
        """Boxes that bring a block of K or of V."""
        return self.tile_n // PART

    @property
    def barriers(self) -> int:
        """How many mbarriers there are (:class:`storage.DecodingStorage`)."""
        return 3 * self.stages

    @property
    def shared(self) -> int:
        """The bytes of shared memory."""
        barriers = -(-8 * (self.barriers + 1) // ALIGNMENT) * ALIGNMENT
        return barriers + 2 * ELEMENT_BYTES * self.block * self.stages


# Head dim -> tiles: blocks of 16 KiB.
TILES = {64: DecodingTiles(64, 128), 128: DecodingTiles(128, 64)}


@dataclass(frozen=True)
class DecodingConfig(Formed):
    """The compile-time facts of one kernel."""

    dtype: str
    tiles: DecodingTiles
    paged: int = PART
    # The options of other kernels, which these have not. A query sees every key.
    form = "full"
    packed, softcap, dropout, traced, split, alibi, table = True, False, False, PLAIN, False, False, False

    @property
    def name(self) -> str:
        """The kernel's name: its symbol in the cubin, and its file."""
        return f"decoding_{self.dtype}_d{self.tiles.width}_{self.tiles.name}"

    @property
    def extra(self) -> tuple[str, ...]:
        """The values that follow a launch's numbers, in order: fields of OptionalParams."""
        return "seqlens_k", "block_table", "part_o", "part_lse", "counts", "num_pages", "page_rows"

    @property
    def tile_queries(self) -> int:
        """Queries of a tile."""
        return 1

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The facts that the compiled kernel is held to."""
        return (Expected(self.name, (), self.tiles.shared, None, stores=False),)

    def describe(self) -> str:
        """The kernel in a sentence, as ``explain`` shows it."""
        tiles = self.tiles
        return (
            f"the heads of a group x {tiles.tile_n} keys, even shares of all keys, {tiles.stages} stages, "
            f"{tiles.shared >> 10} KiB shared"
        )

    def traffic(self, problem: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once for all heads of a group, where every sequence is as long as it may be."""
        keys = problem.capacity if problem.paged else problem.seqlen_k
        rows = problem.batch * (problem.heads_q + problem.heads_k * keys)
        return ELEMENT_BYTES * rows * (problem.head_dim + problem.head_dim_v)


def shipped() -> list[DecodingConfig]:
    """Every kernel that is compiled ahead of time."""
    return [DecodingConfig(dtype, tiles) for tiles in TILES.values() for dtype in DTYPES.values()]
