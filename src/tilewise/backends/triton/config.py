"""Tile sizes of the Triton kernels: a table per architecture and head dim, and the shared memory that they need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from tilewise import device as devices
from tilewise.problem import Problem

MAX_HEAD_DIM = 512
MAX_LATENT_DIM = 576  # of q and k in half precision: 512 and 64 rotary ones (multi-head latent attention)
MIN_WIDTH = 16  # of a side of tl.dot
OVERLAPPING = ("sm90", "sm100")  # what has programmatic dependent launch
OVER_KEYS = ("dkdv", "dk", "dv")  # the passes whose programs own key tiles

# Matrix units multiply no fp32. Three bf16 hold what it holds, and six of the nine products of two such sums all that fp32's product
# keeps: what is left out is below 2^-24 of it (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial Intelligence Datatype For
# Higher-Precision Computations, 2019). The smallest first, as (part of the left factor, of the right one).
# docs/decisions.md#triton-bf16x6
TERMS = 3
TERM_PRODUCTS = ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0))


@dataclass(frozen=True)
class Tiles:
    """One kernel's choice: ``tile_m`` queries by ``tile_n`` keys, warps, and stages of its loads.

    Attributes:
        tma: whole tiles are loaded through tensor descriptors (Hopper and newer) where the strides allow it.
        specialized: some warps load while others compute; needs tma.
        padded: a head dim that is no power of two is padded to one, rather than two pieces (:func:`pieces`).
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int
    tma: bool = False
    specialized: bool = False
    padded: bool = False

    @property
    def ahead(self) -> bool:
        """Whether loads are more than a tile ahead of their use: with fewer stages, what comes early is waited for early
        (docs/decisions.md#triton-v-beside-k)."""
        return self.num_stages > 2

    def describe(self) -> str:
        how = (", tma" if self.tma else "") + (", specialised" if self.specialized else "")
        how += ", padded" if self.padded else ""
        return f"{self.tile_m} x {self.tile_n}, {self.num_warps} warps, {self.num_stages} stages{how}"


@dataclass(frozen=True)
class Config:
    """The passes' tiles, and the keys of a chunk where keys are split.

    Attributes:
        dv: of a pass of its own for dV; ``dkdv`` is then dK's alone.
        beside: batch elements and heads whose programs of one tile run side by side.
        overlapping: whether a kernel may begin while the one before it in the stream has yet to end (:class:`launch.Role`).
        products: of fp32: "ieee", as its arithmetic units compute them, "tf32", or "bf16x6", those of TERMS.
    """

    forward: Tiles
    dkdv: Tiles
    dq: Tiles
    dv: Tiles | None = None
    split: int | None = None
    beside: tuple[int, int] = (1, 1)
    overlapping: bool = False
    products: str = "ieee"

    @property
    def passes(self) -> dict[str, Tiles]:
        """Tiles by the name of each pass."""
        if self.dv is None:
            return {"forward": self.forward, "dkdv": self.dkdv, "dq": self.dq}
        return {"forward": self.forward, "dk": self.dkdv, "dv": self.dv, "dq": self.dq}

    @classmethod
    def of(cls, passes: dict[str, Tiles], split: int | None = None) -> Config:
        """From tiles named as in ``passes``."""
        return cls(passes["forward"], passes.get("dkdv") or passes["dk"], passes["dq"], passes.get("dv"), split)

    def describe(self) -> str:
        titles = {"forward": "forward", "dkdv": "dK dV", "dk": "dK", "dv": "dV", "dq": "dQ"}
        split = f"; keys split by {self.split}" if self.split else ""
        split += "" if self.products == "ieee" else f"; fp32 products {self.products}"
        return "; ".join(f"{titles[name]} {tiles.describe()}" for name, tiles in self.passes.items()) + split

    def traffic(self, p: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once per query tile (an upper bound under a mask)."""
        size = torch.empty((), dtype=p.dtype).element_size()
        query_tiles = -(-p.seqlen_q // self.forward.tile_m)
        width = p.head_dim + p.head_dim_v
        rows = p.heads_q * p.seqlen_q * width + query_tiles * p.heads_k * p.seqlen_k * width
        return size * rows * (1 if p.packed else p.batch)


def width(head_dim: int) -> int:
    """The power of two that a head dim is padded to."""
    return max(MIN_WIDTH, 1 << (head_dim - 1).bit_length())


def pieces(head_dim: int, tiles: Tiles) -> tuple[tuple[int, int, int], ...]:
    """``(first column, columns, width)`` of each tile that holds a head dim.

    Unless ``tiles.padded``, these are the largest power of two in it and the rest, padded, where that takes fewer columns than
    padding the whole: 96 = 64 + 32, 72 = 64 + 8 of 16, but 112 is 112 of 128 (docs/decisions.md#triton-pieces).
    """
    first = 1 << (head_dim.bit_length() - 1)
    rest = head_dim - first
    if not tiles.padded and first >= MIN_WIDTH and rest and first + width(rest) < width(head_dim):
        return (0, first, first), (first, rest, width(rest))
    return ((0, head_dim, width(head_dim)),)


def columns(head_dim: int, tiles: Tiles) -> int:
    """That the tiles of a head dim have, padding included."""
    return sum(piece for _, _, piece in pieces(head_dim, tiles))


@dataclass(frozen=True)
class Streams:
    """What a problem brings into shared memory beside the tiles of its tensors.

    Attributes:
        pair_bytes: of the tensors that a mask or score reads at both i and j: they are streamed too.
        plain: P and dS go from registers into the next product; dropout and predicates may pass them through shared memory.
    """

    pair_bytes: int = 0
    plain: bool = False


def shared_memory(
    kernel: str, tiles: Tiles, widths: tuple[int, int], itemsize: int, streams: Streams = Streams(), arch: str = "sm90"
) -> int:
    """Bytes that a kernel may need: its resident tiles, and ``num_stages`` of what its loop streams.

    Args:
        kernel: "forward", "merge", "dkdv", "dk", "dv", "dq", "delta" or "tile".
        widths: :func:`columns` of q, k and of v.
    """
    w, wv = widths
    m, n, stages = tiles.tile_m, tiles.tile_n, max(tiles.num_stages, 1)
    # With fewer than 64 keys a warp group the products are not wgmma's alone: operands are converted through shared memory.
    passed = 0 if arch == "sm90" and streams.plain and n >= 16 * tiles.num_warps else m * n
    over_keys = stages * m * (w + wv) + passed + (max(m, n) * max(w, wv) if n < 64 else 0)
    over_keys += m * (w + wv) if arch == "sm90" and itemsize == 4 else 0  # turned: wgmma takes tf32 by rows alone
    rows = {
        "forward": m * w + stages * n * (w + wv),
        "dkdv": n * (w + wv) + over_keys,
        "dk": n * (w + wv) + over_keys,
        "dv": n * w + over_keys,
        "dq": m * (w + wv) + stages * n * (w + wv),
        "delta": 0,
        "merge": 0,
        "terms": 0,
        "tile": stages * (m + n) * (w + wv),
        "sheet": stages * n * (m + w) + 2 * m * n,
    }
    statistics = 4 * 2 * m * stages if kernel in OVER_KEYS else 0
    bytes_ = streams.pair_bytes if kernel not in ("delta", "merge", "terms", "sheet") else 0
    scratch = {"sm90": 1024 if streams.plain else 2048, "sm100": 18 << 10}.get(arch, 2048)  # for changes of layout
    pairs = max(stages - 1, 1) * m * n * bytes_ + (0 if arch == "sm90" else 4096) if bytes_ else 0
    pairs += m * n * itemsize if bytes_ and kernel in ("dkdv", "dk") else 0  # dS on its way to a sheet
    scratch = max(scratch, 4096) if w & (w - 1) else scratch
    scratch += 128 if w > MAX_HEAD_DIM else 0
    return itemsize * rows[kernel] + statistics + pairs + scratch


def room(tiles: Tiles, limit: int, arch: str, itemsize: int) -> int:
    """Bytes that a program may take of a multiprocessor's ``limit``: of four warps, two should run at a time, so that one computes
    while the other waits for its products (docs/decisions.md#triton-two-programs).
    The kilobyte that each costs besides is in the scratch."""
    return (limit + 1024) // 2 if arch == "sm90" and tiles.tma and tiles.num_warps <= 4 and itemsize == 2 else limit


def fit(kernel: str, tiles: Tiles, need: Callable[[Tiles], int], limit: int) -> Tiles:
    """``tiles``, smaller until they need no more than ``limit``: of what is streamed fewer rows, down to 64, then two stages,
    still fewer rows, down to 32, and one stage: loads that nothing hides cost more than short tiles."""
    streamed = "tile_m" if kernel in OVER_KEYS else "tile_n"
    for rows, stages in ((64, None), (64, 2), (32, None), (32, 1), (MIN_WIDTH, None)):
        while need(tiles) > limit and getattr(tiles, streamed) > rows:
            tiles = replace(tiles, **{streamed: getattr(tiles, streamed) // 2})
        if need(tiles) > limit and stages is not None and tiles.num_stages > stages:
            tiles = replace(tiles, num_stages=stages)
    # By descriptor, passes over keys with 16 rows and three stages read what is not aligned (docs/decisions.md#triton-descriptors).
    return replace(tiles, tma=tiles.tma and (streamed == "tile_n" or tiles.tile_m > MIN_WIDTH))


def _padded(*row: int) -> Tiles:
    return Tiles(*row, padded=True)


# (largest head dim) -> tiles of (forward, dkdv, dq), or of (forward, dk, dq, dv). The first row that holds the head dim
# is taken.
_HALF_SM90 = {
    64: (Tiles(64, 128, 4, 2, True), Tiles(64, 64, 4, 3, True), Tiles(64, 64, 4, 3, True)),
    96: (Tiles(64, 128, 4, 2, True), Tiles(64, 64, 4, 3, True), Tiles(64, 64, 4, 3, True)),
    128: (Tiles(64, 64, 4, 3, True), Tiles(64, 64, 4, 2, True), Tiles(128, 64, 8, 3, True)),
    160: (
        Tiles(128, 64, 8, 3, True),
        Tiles(64, 128, 8, 3, True),
        Tiles(128, 64, 8, 3, True),
        Tiles(64, 128, 8, 3, True),
    ),
    192: (
        Tiles(128, 64, 8, 3, True),
        Tiles(64, 128, 8, 2, True),
        Tiles(64, 64, 4, 3, True),
        Tiles(64, 128, 8, 3, True),
    ),
    256: (Tiles(128, 64, 8, 2, True), Tiles(64, 64, 8, 2, True), Tiles(128, 32, 8, 3, True)),
    512: (Tiles(64, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
}
_HALF_SM80 = {
    64: (Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: (Tiles(128, 32, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    # dK dV in pieces of 128 + 32 takes twice the products of 128 + 64, and ptxas runs out of registers.
    160: (Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1, padded=True), Tiles(32, 32, 4, 1)),
    256: (Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    512: (Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
_HALF_AMD = {
    64: (Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
    128: (Tiles(128, 32, 4, 1), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: (Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    512: (Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
_FLOAT = {
    64: (_padded(64, 32, 4, 2), _padded(32, 32, 4, 1), _padded(32, 32, 4, 1)),
    128: (_padded(32, 32, 4, 2), _padded(32, 32, 4, 1), _padded(32, 32, 4, 1)),
    256: (_padded(32, 16, 4, 1), _padded(16, 16, 4, 1), _padded(16, 16, 4, 1)),
    512: (Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
# The interpreter takes about 5 ms a step, whatever the tile; small problems should still have several tiles.
INTERPRETED = Config(Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1))


def _tma(*rows: tuple[int, int, int, int]) -> tuple[Tiles, ...]:
    return tuple(Tiles(*row, tma=True) for row in rows)


# What `tilewise tune` measures and bench/gpu checks, by architecture, pass and largest head dim; half precision. Rows that
# lost on an H200 are in docs/tried.md, not here.
CANDIDATES = {
    "sm90": {
        "forward": {
            64: _tma((64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 4)),
            80: (*_tma((128, 128, 8, 3), (64, 128, 4, 2), (128, 64, 4, 3)), _padded(128, 128, 8, 2)),
            96: (*_tma((128, 128, 8, 3), (64, 128, 4, 2)), _padded(128, 128, 8, 2)),
            128: _tma((128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3)),
            160: (*_tma((128, 128, 8, 2), (128, 64, 8, 3)), _padded(128, 64, 8, 2)),
            192: (*_tma((128, 128, 8, 2), (128, 64, 8, 3)), _padded(128, 64, 8, 2)),
            256: _tma((128, 64, 8, 2), (64, 64, 4, 2)),
        },
        "dkdv": {
            64: _tma((64, 64, 4, 3), (64, 128, 8, 3), (32, 128, 4, 3), (32, 64, 4, 4)),
            80: (*_tma((64, 64, 4, 3), (32, 64, 4, 3), (64, 128, 8, 3)), _padded(32, 64, 4, 3)),
            96: (*_tma((32, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 3)), _padded(32, 64, 4, 3)),
            128: _tma(
                (32, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2)
            ),
            160: _tma((64, 64, 4, 3)),
            192: _tma((64, 64, 4, 3)),
            256: _tma((64, 64, 8, 2), (32, 64, 8, 3)),
        },
        "dk": {
            64: _tma((64, 64, 4, 3)),
            80: _tma((64, 64, 4, 3)),
            96: _tma((64, 128, 8, 3)),
            128: _tma((64, 128, 8, 3), (64, 64, 4, 3)),
            160: (*_tma((64, 128, 8, 3), (32, 128, 8, 3)), _padded(32, 128, 8, 3)),
            192: (*_tma((64, 128, 8, 2), (64, 64, 4, 3), (32, 128, 8, 3)), _padded(32, 128, 8, 3)),
            256: _tma((32, 128, 8, 3), (64, 64, 8, 2), (32, 64, 4, 3)),
        },
        "dv": {
            64: _tma((64, 64, 4, 3)),
            80: _tma((64, 64, 4, 3)),
            96: _tma((64, 128, 8, 3)),
            128: _tma((64, 128, 8, 3), (64, 64, 4, 3)),
            160: (*_tma((64, 128, 8, 3), (64, 64, 4, 3)), _padded(64, 128, 8, 2)),
            192: (*_tma((64, 128, 8, 3), (64, 64, 4, 3)), _padded(64, 128, 8, 2)),
            256: _tma((32, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)),
        },
        "dq": {
            64: _tma((128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 3)),
            80: (*_tma((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)), _padded(128, 64, 8, 3)),
            96: (*_tma((128, 64, 8, 3), (64, 64, 4, 3)), _padded(128, 64, 8, 3)),
            128: _tma((128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 2)),
            160: (*_tma((128, 64, 8, 3), (64, 64, 4, 3)), _padded(128, 32, 8, 3)),
            192: (*_tma((128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3)), _padded(128, 32, 8, 3)),
            256: _tma((128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
        },
    },
}

# Where q and k are wider than MAX_HEAD_DIM.
LATENT = {
    "sm80": (Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    "sm90": (Tiles(64, 32, 8, 2, True), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
    "sm100": (Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    "amd": (Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}

TABLE = {"sm80": _HALF_SM80, "sm90": _HALF_SM90, "sm100": _HALF_SM80, "amd": _HALF_AMD}


# Products of fp32 on Hopper's matrix units, by how they are computed.
_FLOAT_SM90 = {
    "bf16x6": {
        64: (Tiles(128, 32, 8, 2, True), Tiles(32, 64, 4, 2, True), Tiles(64, 32, 4, 2, True)),
        128: (Tiles(64, 64, 4, 1, True), Tiles(32, 64, 4, 2, True), Tiles(64, 32, 4, 2, True)),
        256: (Tiles(64, 32, 4, 1, True), *[_padded(32, 32, 4, 1)] * 3),
    },
    "tf32": _FLOAT
    | {
        64: (Tiles(128, 32, 8, 2, True), Tiles(64, 64, 4, 2, True), Tiles(128, 32, 8, 2, True)),
        128: (Tiles(128, 64, 8, 2, True), Tiles(32, 128, 8, 1, True), Tiles(128, 32, 8, 2, True)),
    },
}


def table(arch: str, itemsize: int, products: str = "ieee") -> dict[int, tuple[Tiles, ...]]:
    if itemsize == 4:
        return _FLOAT_SM90.get(products, _FLOAT) if arch == "sm90" else _FLOAT
    return TABLE[arch]


TERMS_HEAD_DIM = 256  # up to it tiles of three terms fit


def tf32_allowed() -> bool:
    """As PyTorch is set: since 2.9 by another name, beside which reading the older one may raise."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


def float_products(head_dim: int) -> str:
    """:attr:`Config.products` of fp32 on a GPU, as PyTorch's setting allows them."""
    if tf32_allowed():
        return "tf32"
    return "bf16x6" if head_dim <= TERMS_HEAD_DIM else "ieee"


def products(p: Problem) -> str:
    """:attr:`Config.products` of p, as PyTorch's setting is now."""
    if p.dtype != torch.float32 or p.device.type == "cpu":
        return "ieee"
    return float_products(max(p.head_dim, p.head_dim_v))


def operand_bytes(itemsize: int, products: str) -> int:
    """Of an element as kernels read it."""
    return 2 * TERMS if itemsize == 4 and products == "bf16x6" else itemsize


def architecture(device: torch.device) -> str:
    if torch.version.hip:
        return "amd"
    major = devices.of(device).capability[0]
    return "sm90" if major == 9 else "sm100" if major >= 10 else "sm80"


SPLIT_KEYS = 1024  # a chunk's size may depend on nothing but seqlen_k: docs/decisions.md#triton-split
MERGE_KEYS = (
    512  # a second launch and the merge take as long as about so many keys of a query tile; predicted, not measured
)


def of_width(rows: dict[int, tuple], p: Problem) -> tuple:
    """The first row that holds p's head dims; empty where none does."""
    return next((row for limit, row in rows.items() if max(p.head_dim, p.head_dim_v) <= limit), ())


def preceded(passes: dict[str, Tiles], measured: dict[str, Tiles]) -> dict[str, Tiles]:
    """``passes`` with those that were measured in their place; dK and dV are one pass or two, as measured."""
    over_keys = [name for name in measured if name in OVER_KEYS]
    return {name: x for name, x in passes.items() if not over_keys or name not in OVER_KEYS} | measured


BESIDE = 4  # programs that read one tile of a pair tensor while it is in the L2: docs/decisions.md#triton-beside


def beside(p: Problem, shared: frozenset[str]) -> tuple[int, int]:
    """Batch elements and key heads, at most BESIDE, whose programs run side by side, where they are ``shared`` by what is read
    for every pair: it then comes from slow memory once."""
    divisor = lambda n, most: max(d for d in range(1, most + 1) if n % d == 0)  # noqa: E731
    some_b = divisor(p.batch, BESIDE) if "b" in shared and not p.packed else 1
    return some_b, divisor(p.heads_k, BESIDE // some_b) if "h" in shared else 1


def choose(
    p: Problem,
    pair_bytes: int = 0,
    measured: dict[str, Tiles] | None = None,
    shared: frozenset[str] = frozenset(),
    blocks: tuple[int, int] = (0, 0),
) -> Config:
    """By head dim and dtype; ``pair_bytes`` as in :class:`Streams`, ``measured``: what :mod:`tuned` has of this device,
    ``shared`` as in :func:`beside`, ``blocks`` as in :func:`within_blocks`.

    Keys are split where one sequence's query tiles leave most of the machine idle.
    """
    together = beside(p, shared)
    if p.device.type == "cpu":
        return replace(Config.of(preceded(INTERPRETED.passes, measured or {})), beside=together)
    arch = architecture(p.device)
    row = of_width(table(arch, p.dtype.itemsize, products(p)), p) or LATENT[arch]
    passes = Config(*row).passes
    limit = devices.of(p.device).shared_memory or 1 << 30
    passes |= {name: x for name, x in paired(arch, p, pair_bytes, limit).items() if name in passes}
    passes = {name: within_blocks(name, x, blocks) for name, x in preceded(passes, measured or {}).items()}
    fitted = fit_all(p, passes, pair_bytes)
    split = _split(p, fitted["forward"].tile_m, devices.of(p.device).cores)
    return replace(Config.of(fitted, split), beside=together, overlapping=arch in OVERLAPPING, products=products(p))


# Of a tile that a program owns, of one that it streams: smaller ones take other instructions.
WHOLE_OWNED, WHOLE_STREAMED = 64, 32


def within_blocks(kernel: str, tiles: Tiles, blocks: tuple[int, int]) -> Tiles:
    """``tiles``, none larger than the blocks, (rows, keys), on which a predicate is constant, where these are large enough: a tile that
    lies in more than one is partial, and takes eight times as long as a full one (docs/decisions.md#triton-block-tiles). 0: any size."""
    i, j = (n & -n or 1 << 30 for n in blocks)
    own, streamed = (("tile_n", j), ("tile_m", i)) if kernel in OVER_KEYS else (("tile_m", i), ("tile_n", j))
    if own[1] < WHOLE_OWNED or streamed[1] < WHOLE_STREAMED:
        return tiles
    while getattr(tiles, own[0]) > own[1]:
        tiles = replace(tiles, **{own[0]: getattr(tiles, own[0]) // 2}, num_warps=max(tiles.num_warps // 2, 4))
    while getattr(tiles, streamed[0]) > streamed[1]:
        tiles = replace(tiles, **{streamed[0]: getattr(tiles, streamed[0]) // 2}, num_stages=tiles.num_stages + 1)
    return tiles


def candidates(p: Problem) -> dict[str, tuple[Tiles, ...]]:
    """What may be tried on p's device, by pass; the configured tiles first, none twice."""
    arch = "interpreted" if p.device.type == "cpu" else architecture(p.device)
    rows = {name: of_width(by_width, p) for name, by_width in CANDIDATES.get(arch, {}).items()}
    configured = {name: (x,) for name, x in choose(p).passes.items()}
    if p.dtype.itemsize != 2:
        return configured
    fitted = lambda name, x: x if p.device.type == "cpu" else fit_all(p, {name: x})[name]  # noqa: E731
    names = dict.fromkeys((*configured, *rows))
    return {
        name: tuple(dict.fromkeys((*configured.get(name, ()), *[fitted(name, x) for x in rows.get(name, ())])))
        for name in names
    }


# In place of the table's rows up to a head dim where a tensor is read for every pair, the first that fits: beside its tiles dQ's eight
# warps have no room for a third stage. "dkdv": where its elements are wider than q's, beside which two programs of 64 x 64 do not fit;
# "tile": of the gradient that is summed over what such a tensor is broadcast over. docs/decisions.md#triton-pair-tiles
PAIRED = {
    "sm90": {
        "forward": {128: _tma((64, 64, 4, 3), (128, 64, 8, 3))},
        "dkdv": {64: _tma((64, 64, 4, 3)), 128: _tma((32, 64, 4, 3))},
        "dq": {128: _tma((64, 64, 4, 3))},
        "tile": {128: (Tiles(128, 64, 8, 2),)},
    }
}


def paired(arch: str, p: Problem, pair_bytes: int, limit: int) -> dict[str, Tiles]:
    """PAIRED's rows of p beside tensors of so many bytes a pair, by kernel; ``limit``: bytes of shared memory of a multiprocessor."""
    size = p.dtype.itemsize
    rows = PAIRED.get(arch, {}) if p.device.type != "cpu" and size == 2 and pair_bytes else {}
    found = {name: of_width(row, p) for name, row in rows.items() if name != "dkdv" or pair_bytes > size}
    fits = lambda name, x: needed(p, name, x, arch, pair_bytes) <= room(x, limit, arch, size)  # noqa: E731
    return {name: next((x for x in some if fits(name, x)), some[-1]) for name, some in found.items() if some}


SHEET_STRIP = 64  # queries that lie side by side in a sheet of dS: docs/decisions.md#triton-kept-ds
SHEET_UNIT = 128  # its rows and columns are whole tiles of so many


def sheet_room(p: Problem) -> int:
    """Bytes of dS that a backward keeps at a time: a part of its device's memory."""
    return devices.of(p.device).memory // 64 or 2 << 30


def sheet_heads(p: Problem, together: int, gradient: int) -> int:
    """The key heads whose dS is kept at a time: a divisor of them all, a multiple of those that run side by side, and no more memory
    than ``gradient``, that of the bias whose gradient it is, or :func:`sheet_room`; the fewest may take twice that. 0 where they
    take more, or where its kernels were not seen on a GPU."""
    up = lambda n: -(-n // SHEET_UNIT) * SHEET_UNIT  # noqa: E731
    head = p.batch * p.group * up(p.seqlen_q) * up(p.seqlen_k) * p.dtype.itemsize
    most = max(gradient, sheet_room(p))
    if max(p.head_dim, p.head_dim_v) > 256 or together * head > 2 * most:
        return 0
    return max(
        [n for n in range(together, p.heads_k + 1, together) if p.heads_k % n == 0 and n * head <= most] or [together]
    )


def of_sheet(p: Problem, config: Config) -> Tiles:
    """For dQ from a sheet of dS, and the sum of that over what a bias is broadcast over."""
    stages = 3 if max(p.head_dim, p.head_dim_v) <= 128 else 2
    tiles = Tiles(64, 64, 4, stages, True) if config.dkdv.tma else config.dq
    tiles = replace(tiles, tile_m=min(tiles.tile_m, SHEET_STRIP), tile_n=min(tiles.tile_n, config.dkdv.tile_n))
    return with_stages(p, "sheet", tiles)


def of_pairs(p: Problem, tiles: Tiles) -> Tiles:
    """For the gradient of a broadcast pair bias, whose loop streams all four tensors: PAIRED's or dQ's ``tiles``."""
    limit = devices.of(p.device).shared_memory or 227 << 10
    return with_stages(p, "tile", paired(architecture(p.device), p, 1, limit).get("tile", tiles))


def with_stages(p: Problem, kernel: str, tiles: Tiles) -> Tiles:
    """``tiles`` with the stages that fit."""
    arch, limit = architecture(p.device), devices.of(p.device).shared_memory or 227 << 10
    while needed(p, kernel, tiles, arch) > limit and tiles.num_stages > 1:
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def needed(p: Problem, kernel: str, tiles: Tiles, arch: str, pair_bytes: int = 0) -> int:
    """:func:`shared_memory` of a kernel of p, beside tensors of so many bytes a pair."""
    plain = not p.spec.dropout_p and p.spec.region.predicate is None
    widths = columns(p.head_dim, tiles), columns(p.head_dim_v, tiles)
    itemsize = operand_bytes(p.dtype.itemsize, products(p))
    return shared_memory(kernel, tiles, widths, itemsize, Streams(pair_bytes, plain), arch)


def fit_all(p: Problem, passes: dict[str, Tiles], pair_bytes: int = 0) -> dict[str, Tiles]:
    """Each pass's tiles as :func:`fit` leaves them on p's device."""
    arch, limit = architecture(p.device), devices.of(p.device).shared_memory or 1 << 30
    need = partial(needed, p, pair_bytes=pair_bytes, arch=arch)
    size = p.dtype.itemsize
    return {k: fit(k, tiles, partial(need, k), room(tiles, limit, arch, size)) for k, tiles in passes.items()}


# Where one query's heads share a tile: few rows, and as many loads in flight as fit.
_DECODING_SM90 = {
    64: (Tiles(64, 128, 4, 3, True),),
    128: (Tiles(64, 64, 4, 3, True),),
    256: (Tiles(64, 32, 4, 3, True),),
}


def decoding(p: Problem, config: Config) -> Config:
    """For a decoding step whose rows are the heads of a group (launch.grouped)."""
    if p.device.type == "cpu":
        return config
    cores, fast = devices.of(p.device).cores, architecture(p.device) == "sm90" and p.dtype.itemsize == 2
    row = of_width(_DECODING_SM90, p) if fast else ()
    forward = fit_all(p, {"forward": row[0]})["forward"] if row else config.forward
    return replace(config, forward=forward, split=_split(p, forward.tile_m, cores))


def _split(p: Problem, tile_m: int, cores: int) -> int | None:
    """The keys of a chunk, or None where whole rows keep the machine as busy.

    The time of either is counted in keys that the busiest multiprocessor walks; splitting must save a third of it.
    """
    if p.packed or p.spec.region.predicate is not None:
        return None
    # Deterministic results do not depend on batch-mates: the choice then looks at one sequence.
    batch = 1 if p.spec.deterministic else p.batch
    programs = batch * p.heads_q * -(-p.seqlen_q // tile_m)
    chunks = -(-p.seqlen_k // SPLIT_KEYS)
    whole = -(-programs // cores) * p.seqlen_k
    parts = -(-programs * chunks // cores) * SPLIT_KEYS + MERGE_KEYS
    return SPLIT_KEYS if 3 * parts <= 2 * whole else None
