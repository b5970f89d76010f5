"""The kernels of the gradients of latent attention over selected keys: their sizes and parameters. Nothing here imports the DSL."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.backends.hopper.config import ELEMENT_BYTES, PLAIN, ROWS, Formed, dtypes_of
from tilewise.backends.hopper.expected import Expected
from tilewise.backends.hopper.latent.config import CHUNK, KEYS, PAIR, WIDTH, WIDTH_V, LatentTiles
from tilewise.backends.hopper.parameters import FP32, LISTS, Parameter, Parameters, numbers, tiled

HEADS = 2 * ROWS  # of a tile: those of a warpgroup by two
GROUPS = 2  # warpgroups
VALUE_CHUNKS = WIDTH_V // CHUNK // PAIR  # of a CTA's columns of V, in chunks of 64
BARRIERS = 5  # of the kernel of dK and dV
STAGES = 4  # of the kernel of dQ: tiles of K and dS in shared memory
KEY_CHUNKS = VALUE_CHUNKS + 1  # of its K: the last one has the rotary columns, in every other CTA


@dataclass(frozen=True)
class GradientsConfig(Formed):
    """The compile-time facts of one kernel. ``queries``: it makes dQ, of dS; else dK, dV and dS."""

    dtype: str
    queries: bool = False
    # The options of other kernels, which these have not.
    form = "band"
    packed, traced, selected, tiles = True, PLAIN, True, LatentTiles()

    @property
    def name(self) -> str:
        """The kernel's name: its symbol in the cubin, and its file."""
        return f"latent_{'dq' if self.queries else 'dk_dv'}_{self.dtype}_d{WIDTH}v{WIDTH_V}_{HEADS}x{KEYS}"

    @property
    def parameters(self) -> Parameters:
        """The tensors and numbers of a launch, in order.

        q, o, do (1, row of q, query head, column); k as in a forward; lse, dlse, delta (batch, query head, query); ds (query and key head,
        query head of the key head, place), dk and dv (row of k, key head, column).
        """
        ds, k = tiled("ds", "lines", "group", "places"), tiled("k", "keys", 1, "heads_k", WIDTH)
        if self.queries:
            return ds, k, tiled("dq", 1, "rows", "heads_q", WIDTH), LISTS, numbers("first")
        statistics = (Parameter(name, FP32, ("batch", "heads_q", "queries"), 0) for name in ("lse", "dlse", "delta"))
        sums = (
            Parameter(name, FP32, ("keys", "heads_k", width), 4, 16) for name, width in (("dk", WIDTH), ("dv", WIDTH_V))
        )
        return (
            tiled("q", 1, "rows", "heads_q", WIDTH), k,
            *(tiled(name, 1, "rows", "heads_q", WIDTH_V) for name in ("o", "do")),
            tuple(statistics), ds, tuple(sums), LISTS,
            (*numbers("first", "joint"), *(Parameter(name, FP32) for name in ("scale", "scale2"))),
        )  # fmt: skip

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 128 * GROUPS

    @property
    def shared(self) -> int:
        """The bytes of shared memory: K and dS; or Q and dO, K, P and dS, the parts of delta and of S, and barriers."""
        if self.queries:
            return ELEMENT_BYTES * STAGES * (KEYS * CHUNK * KEY_CHUNKS + HEADS * KEYS)
        columns = WIDTH // PAIR
        elements = HEADS * (columns + WIDTH_V // PAIR) + KEYS * columns + 2 * HEADS * KEYS
        return ELEMENT_BYTES * elements + 4 * PAIR * HEADS + 4 * HEADS * KEYS // PAIR + 8 * BARRIERS

    @property
    def expected(self) -> tuple[Expected, ...]:
        """The facts that the compiled kernel is held to."""
        return (Expected(self.name, (), self.shared, None, loads=False, stores=False),)

    def describe(self) -> str:
        """The kernel in a sentence, as ``explain`` shows it."""
        what = "dq" if self.queries else "dk, dv"
        return f"{what}: {HEADS} heads x {KEYS} keys, two CTAs share columns, {self.shared >> 10} KiB shared"


def shipped() -> list[GradientsConfig]:
    """Every kernel that is compiled ahead of time."""
    return [GradientsConfig(dtype, queries) for dtype in dtypes_of(WIDTH, WIDTH_V) for queries in (False, True)]
