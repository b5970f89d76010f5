"""The kernels of latent attention over pages: their sizes, the choice of one, and the reasons against calls that have none.

Nothing here imports the DSL.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise import device as devices
from tilewise.backends.hopper.config import ALIGNMENT, DTYPES, ELEMENT_BYTES, PLAIN, ROWS, Formed, dtypes_of
from tilewise.backends.hopper.expected import Expected
from tilewise.backends.hopper.latent.parameters import parameters
from tilewise.backends.hopper.parameters import Parameters
from tilewise.problem import Problem

WIDTH, WIDTH_V = 576, 512  # columns of a key, and of a value: the sizes of DeepSeek-V2, section 2.1
KEYS = 64  # of a key tile, which lies in one page
CHUNK = 64  # columns of 16 bits that lie side by side in shared memory: the 128 bytes of the swizzle
CHUNKS = WIDTH // CHUNK
P_CHUNK = 8  # the rotary columns are read by the scores alone: P of the tile takes their place
VALUE_GROUPS = 2  # warpgroups that hold half of O's columns each
COLUMNS = 128  # of V in one product: with more, one instruction has more registers than threads have at the launch
PRODUCTS = WIDTH_V // VALUE_GROUPS // COLUMNS  # of a warpgroup and a key tile
# The chunks of a key tile that come as one box, in the order in which their places become free: the rotary ones as soon as P is in
# registers, then those of each warpgroup's first product with V, then those of its second.
BOXES = (range(8, 9), range(2), range(4, 6), range(2, 4), range(6, 8))
PAIR = 2  # CTAs of a cluster that share the keys of a tile of rows
STAGES = 2  # key tiles in shared memory; each belongs to one of as many warpgroups that compute scores


KINDS = (False, False), (True, False), (False, True)  # whether the cache is in 8 bits, and whether keys are gathered


@dataclass(frozen=True)
class LatentTiles:
    """The sizes of a kernel: 64 rows, each a head of a query, by 64 keys.

    Attributes:
        registers, registers_score: of a thread that holds O, and of one that computes scores.
    """

    registers: int = 176
    registers_score: int = 80
    width: int = WIDTH
    width_v: int = WIDTH_V
    tile_n: int = KEYS

    @property
    def name(self) -> str:
        """The part of a kernel's name that tells these sizes."""
        return f"64x{self.tile_n}_s{STAGES}"

    @property
    def warpgroups(self) -> int:
        """Warpgroups that hold O, as the merge of split keys asks."""
        return VALUE_GROUPS

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * (STAGES + VALUE_GROUPS)

    @property
    def barriers(self) -> int:
        """How many mbarriers there are (:class:`storage.LatentStorage`)."""
        return 2 * STAGES * len(BOXES) + 2 * STAGES + 2

    @property
    def statistics(self) -> int:
        """The fp32 numbers of rows that warpgroups tell each other: a factor, m and l for each stage."""
        return 3 * 2 * 128 * STAGES

    @property
    def shared(self) -> int:
        """The bytes of shared memory."""
        barriers = -(-8 * self.barriers // ALIGNMENT) * ALIGNMENT
        return barriers + ELEMENT_BYTES * WIDTH * (ROWS + STAGES * self.tile_n) + 4 * self.statistics


@dataclass(frozen=True)
class LatentConfig(Formed):
    """The compile-time facts of one kernel.

    Attributes:
        pair: two CTAs share the keys of a tile of rows and merge what they have in shared memory.
        split: several pairs do, and a second kernel merges theirs.
        e4m3: the cache has e4m3 numbers, which are converted on their way to shared memory.
        selected: a query's keys are those of a list, which are gathered row by row.
    """

    dtype: str
    pair: bool = False
    split: bool = False
    e4m3: bool = False
    selected: bool = False
    tiles: LatentTiles = LatentTiles()
    # The options of other kernels, which these have not. The ends of rows are numbers of run time, and queries come packed.
    form = "band"
    packed, traced = True, PLAIN

    @property
    def name(self) -> str:
        """The kernel's name: its symbol in the cubin, and its file."""
        cache = "_e4m3" * self.e4m3 + "_selected" * self.selected
        shared = "_pair" * self.pair + "_split" * self.split
        return f"latent_{self.dtype}{cache}_d{WIDTH}v{WIDTH_V}{shared}_{self.tiles.name}"

    @property
    def parameters(self) -> Parameters:
        """The tensors and numbers of a launch, in order."""
        return parameters(self)

    @property
    def by_threads(self) -> bool:
        """Whether score groups bring key tiles by their own loads or copies, and not the copy engine."""
        return self.e4m3 or self.selected

    def splits(self, wished: int) -> int:
        """How many CTAs share the keys of a tile of rows, where ``wished`` are best: a number that this kernel can have."""
        if self.split:
            return max(wished, 2 * PAIR)
        return PAIR if self.pair else 1

    @property
    def tile_queries(self) -> int:
        """Rows of a tile."""
        return ROWS

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The facts that the compiled kernel is held to; the kernel that merges splits has no roles."""
        registers = self.tiles.registers, self.tiles.registers_score
        return (Expected(self.name, registers, self.tiles.shared, None, loads=not self.by_threads, stores=False),)

    def describe(self) -> str:
        """The kernel in a sentence, as ``explain`` shows it."""
        tiles = self.tiles
        has = {", e4m3 converted": self.e4m3, ", selected keys gathered": self.selected}
        has |= {", two CTAs share keys": self.pair, ", in splits": self.split}
        return (
            f"64 rows x {tiles.tile_n} keys, v in k, {STAGES} warpgroups score and {VALUE_GROUPS} hold o, "
            f"{tiles.shared >> 10} KiB shared{''.join(text for text, asked in has.items() if asked)}"
        )

    def traffic(self, problem: Problem) -> int:
        """Bytes of the forward: Q and O once, K once for all heads of a group of 128."""
        rows = problem.seqlen_q if problem.packed else problem.batch * problem.seqlen_q
        each = problem.k.shape[0] if problem.packed else problem.batch * problem.seqlen_k
        each = each if self.selected else problem.batch * problem.capacity
        keys = problem.heads_k * each * -(-problem.group // (2 * ROWS))
        key_bytes = 1 if self.e4m3 else ELEMENT_BYTES
        return ELEMENT_BYTES * rows * problem.heads_q * (WIDTH + WIDTH_V) + key_bytes * keys * WIDTH


def shipped() -> list[LatentConfig]:
    """Every kernel that is compiled ahead of time."""
    shares = ((False, False), (True, False), (True, True))
    kinds = [(dtype, *kind) for kind in KINDS for dtype in dtypes_of(WIDTH, WIDTH_V)]
    return [LatentConfig(dtype, *shared, e4m3, selected) for dtype, e4m3, selected in kinds for shared in shares]


# -- What a call gets ----------------------------------------------------------------------------------------------

LEAST_TILES = 8  # of a split: fewer keys cost more in the merge than they save
MOST_SPLITS = 32 * PAIR  # the states of 32 are what one warp merges
# The time that a CTA's beginning and end take, that a pair takes to merge, and that a second kernel takes and takes more for each
# state, in that of a key tile.
OPEN, JOIN, MERGE, MERGE_EACH = 3.0, 2.0, 4.0, 0.25


def choose(problem: Problem) -> LatentConfig:
    """The kernel for a problem that has no reasons against it."""
    splits = splits_of(problem)
    return LatentConfig(DTYPES[str(problem.dtype)], splits > 1, splits > PAIR, problem.quantised)


def tiles_of(problem: Problem) -> int:
    """How many tiles of rows a launch has; packed, at most, as only the device knows the lengths."""
    if problem.packed:
        return problem.heads_k * (problem.seqlen_q * problem.group // ROWS + problem.batch + 1)
    return problem.heads_k * problem.batch * -(-problem.seqlen_q * problem.group // ROWS)


def splits_of(problem: Problem) -> int:
    """Into how many splits keys are cut, one or an even number: as takes the least time, by a model, if every sequence has all keys
    that its pages hold.

    With ``deterministic`` they depend on one sequence's shapes: a result does not depend on its batch-mates. Packed, queries belong
    to sequences of any length, of which no host knows; a deterministic call then does not split.
    """
    deterministic = problem.spec.deterministic
    if deterministic and problem.packed:
        return 1
    tiles = problem.heads_k * -(-mean_rows(problem) // ROWS) * (1 if deterministic else problem.batch)
    return best_splits(problem, tiles, -(-problem.capacity // KEYS))


def best_splits(problem: Problem, tiles: int, blocks: int) -> int:
    """The number of splits, one or an even number, that takes the least time for so many tiles of rows with so many key tiles."""
    cores = devices.of(problem.device).cores

    def time(splits: int) -> float:
        rounds = -(-tiles * splits // cores)
        merging = (JOIN if splits > 1 else 0) + (MERGE + MERGE_EACH * splits / PAIR if splits > PAIR else 0)
        return rounds * (-(-blocks // splits) + OPEN) + merging

    return min([1, *range(PAIR, min(MOST_SPLITS, blocks // LEAST_TILES) + 1, PAIR)], key=time)


def mean_rows(problem: Problem) -> int:
    """The rows of a key head in a sequence, a row for each query and head; packed, their mean, rounded up."""
    rows = problem.seqlen_q * problem.group
    return -(-rows // max(problem.batch, 1)) if problem.packed else rows
