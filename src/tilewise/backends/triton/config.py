"""Tile sizes of the kernels: tables by architecture and head dim, and how a problem chooses and adapts their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from tilewise import device as devices
from tilewise import expr
from tilewise.backends.triton.group_parts import group_parts
from tilewise.backends.triton.reads import PairReads, near_of_all, predicate_blocks
from tilewise.backends.triton.tiles import (
    OVER_KEYS,
    Streams,
    Tiles,
    columns,
    fit,
    program_limit,
    shared_memory,
)
from tilewise.distances import reads_by_distance
from tilewise.problem import Problem

# Matrix units multiply no fp32. A sum of three bf16 terms holds an fp32 exactly. Of the nine products of two factors' terms, six give
# the fp32 product; the other three are below 2^-24 of it (Henry, Tang, Heinecke: Leveraging the bfloat16 Artificial
# Intelligence Datatype For Higher-Precision Computations, 2019). The smallest products come first, as (term of the left factor, of the
# right one). docs/decisions.md#triton-bf16x6
TERMS = 3
TERM_PRODUCTS = ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0))


@dataclass(frozen=True)
class Config:
    """The passes' tiles, and how the passes run.

    Attributes:
        dv: tiles of a pass for dV alone; ``dkdv`` is then dK's alone.
        few: of a forward whose query heads share tiles, or whose keys are split (``paging.few_config``); None: it is as any other.
        group_parts: programs of the backward that share the query heads of a key tile (:mod:`group_parts`).
        beside: batch elements and heads whose programs for one tile run side by side.
        products: of fp32: "ieee" (arithmetic units), "tf32", or "bf16x6" (TERMS bf16 terms).
    """

    forward: Tiles
    dkdv: Tiles
    dq: Tiles
    dv: Tiles | None = None
    few: Config | None = None
    group_parts: int = 1
    beside: tuple[int, int] = (1, 1)
    products: str = "ieee"

    @property
    def passes(self) -> dict[str, Tiles]:
        """Tiles by the name of each pass."""
        if self.dv is None:
            return {"forward": self.forward, "dkdv": self.dkdv, "dq": self.dq}
        return {"forward": self.forward, "dk": self.dkdv, "dv": self.dv, "dq": self.dq}

    @classmethod
    def of(cls, passes: dict[str, Tiles]) -> Config:
        """Return the configuration with tiles named as in :attr:`passes`."""
        return cls(passes["forward"], passes.get("dkdv") or passes["dk"], passes["dq"], passes.get("dv"))

    def describe(self) -> str:
        titles = {"forward": "forward", "dkdv": "dK dV", "dk": "dK", "dv": "dV", "dq": "dQ"}
        split = f"; few queries {self.few.describe()}" if self.few else ""
        split += f"; query heads of a key tile in {self.group_parts} parts" if self.group_parts > 1 else ""
        split += "" if self.products == "ieee" else f"; fp32 products {self.products}"
        return "; ".join(f"{titles[name]} {tiles.describe()}" for name, tiles in self.passes.items()) + split

    def traffic(self, problem: Problem) -> int:
        """Bytes of the forward: Q and O once, K and V once per query tile (an upper bound under a mask)."""
        size = torch.empty((), dtype=problem.dtype).element_size()
        query_tiles = -(-problem.seqlen_q // self.forward.tile_m)
        width = problem.head_dim + problem.head_dim_v
        rows = problem.heads_q * problem.seqlen_q * width + query_tiles * problem.heads_k * problem.seqlen_k * width
        return size * rows * problem.batch_dim


def _padded(*row: int) -> Tiles:
    return Tiles(*row, padded=True)


def _tma(*row: int) -> Tiles:
    return Tiles(*row, tma=True)


def _chunks(*row: int, chunk: int = 64, column_parts: int = 1) -> Tiles:
    # For products of terms of wide rows: docs/decisions.md#triton-chunks
    return Tiles(*row, tma=True, chunk=chunk, column_parts=column_parts)


def _wide(column_parts: int) -> tuple[Tiles, Tiles, Tiles, Tiles]:
    # Of the forward, dK, dQ and dV.
    over_queries = _chunks(64, 64, 4, 2, column_parts=column_parts)
    over_keys = _chunks(64, 128, 8, 3, column_parts=column_parts)
    return over_queries, over_keys, over_queries, over_keys


# Tables have tiles by head dim, the larger of q's and v's: a problem takes the first row that holds its own (:func:`row_for`). The last
# rows of half precision are for multi-head latent attention: 512 and 64 rotary columns of q and k, 512 of v.
_HALF_SM90 = {
    # With at most 168 registers a third program runs, which matters beside predicates (docs/decisions.md#triton-two-programs).
    64: Config(Tiles(64, 128, 4, 2, tma=True, registers=168), _tma(64, 64, 4, 3), _tma(64, 64, 4, 3)),
    96: Config(_tma(64, 128, 4, 2), _tma(64, 64, 4, 3), _tma(64, 64, 4, 3)),
    128: Config(_tma(64, 64, 4, 3), _tma(64, 64, 4, 2), _tma(128, 64, 8, 3)),
    160: Config(
        forward=_tma(128, 64, 8, 3),
        dkdv=_tma(64, 128, 8, 3),
        dq=_tma(128, 64, 8, 3),
        dv=_tma(64, 128, 8, 3),
    ),
    192: Config(
        forward=_tma(128, 64, 8, 3),
        dkdv=_tma(64, 128, 8, 2),
        dq=_tma(64, 64, 4, 3),
        dv=_tma(64, 128, 8, 3),
    ),
    256: Config(_tma(128, 64, 8, 2), _tma(64, 64, 8, 2), _tma(128, 32, 8, 3)),
    512: Config(
        forward=_tma(64, 64, 8, 1),
        dkdv=_tma(32, 64, 8, 1),
        dq=Tiles(64, 32, 8, 1),
        dv=_tma(32, 64, 8, 1),
    ),
    576: Config(_tma(64, 32, 8, 2), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1), Tiles(32, 32, 8, 1)),
}
_HALF_SM80 = {
    64: Config(Tiles(128, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: Config(Tiles(128, 32, 4, 3), Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    # dK dV in pieces of 128 + 32 takes twice the products of 128 + 64, and ptxas runs out of registers.
    160: Config(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1, padded=True), Tiles(32, 32, 4, 1)),
    256: Config(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    512: Config(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    576: Config(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
}
_HALF_AMD = {
    64: Config(Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
    128: Config(Tiles(128, 32, 4, 1), Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    256: Config(Tiles(64, 32, 4, 1), Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    512: Config(Tiles(32, 16, 4, 1), Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    576: Config(*[Tiles(16, 16, 4, 1)] * 3),
}
_FLOAT = {
    64: Config(_padded(64, 32, 4, 2), _padded(32, 32, 4, 1), _padded(32, 32, 4, 1)),
    128: Config(_padded(32, 32, 4, 2), _padded(32, 32, 4, 1), _padded(32, 32, 4, 1)),
    256: Config(_padded(32, 16, 4, 1), _padded(16, 16, 4, 1), _padded(16, 16, 4, 1)),
    512: Config(*[Tiles(16, 16, 4, 1)] * 3),
}
_BF16X6_SM90 = {
    32: Config(*[_tma(64, 64, 4, 2)] * 3),
    # Two programs run on a multiprocessor with at most 128 registers. Triton 3.7 takes 133, 3.9 135: 11.8 ms instead of 7.9 (N 4096, H200).
    64: Config(Tiles(128, 32, 8, 2, tma=True, registers=128), _tma(32, 64, 4, 2), _tma(64, 32, 4, 2)),
    96: Config(*[_chunks(64, 64, 4, 3, chunk=32)] * 3),
    128: Config(*[_chunks(64, 64, 4, 2)] * 3),
    256: Config(*_wide(column_parts=1)),
    512: Config(*_wide(column_parts=2)),
}
_TF32_SM90 = _FLOAT | {
    64: Config(_tma(128, 32, 8, 2), _tma(64, 64, 4, 2), _tma(128, 32, 8, 2)),
    128: Config(_tma(128, 64, 8, 2), _tma(32, 128, 8, 1), _tma(128, 32, 8, 2)),
}
# By architecture, and within it "half", for fp16 and bf16, or how products of fp32 are computed (Config.products).
TABLE = {
    "sm80": {"half": _HALF_SM80, "ieee": _FLOAT},
    "sm90": {"half": _HALF_SM90, "ieee": _FLOAT, "bf16x6": _BF16X6_SM90, "tf32": _TF32_SM90},
    "sm100": {"half": _HALF_SM80, "ieee": _FLOAT},
    # Tiles of fp32 above 256 columns need more than such a device has.
    "sm120": {"half": _HALF_SM80, "ieee": {head_dim: row for head_dim, row in _FLOAT.items() if head_dim <= 256}},
    "amd": {"half": _HALF_AMD, "ieee": _FLOAT},
}
NEVER_RUN = {"sm80": "sm_80", "sm100": "sm_100", "sm120": "sm_120, whose tiles sm_86 and sm_89 share,", "amd": "AMD"}
"""Architectures whose kernels are compiled in tests and have never run, and what users call them; their tiles are not measured."""
# The bytes of shared memory that one program may have on the devices of each table.
SHARED_MEMORY = {"sm80": 163 << 10, "sm90": 227 << 10, "sm100": 227 << 10, "sm120": 99 << 10, "amd": 64 << 10}
MAX_HEAD_DIM = max(_FLOAT)  # of v
MAX_LATENT_DIM = min(max(tables["half"]) for tables in TABLE.values())  # of q and k in half precision
# The largest head dim at which tiles of three terms fit; on other devices those of _FLOAT with terms.
TERMS_HEAD_DIM = {"sm90": max(_BF16X6_SM90), "sm120": 128}
OTHER_TERMS_HEAD_DIM = 256
TF32_HEAD_DIM = {"sm90": 128}  # beyond it terms are faster than tf32, and exact
# The interpreter takes about 5 ms a step with any tile. Small problems should still have several tiles.
INTERPRETED = Config(Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1))


def table(arch: str, itemsize: int, products: str = "ieee") -> dict[int, Config]:
    """Return the rows of an architecture for elements of this size."""
    tables = TABLE[arch]
    return tables["half"] if itemsize == 2 else tables.get(products, tables["ieee"])


def _tmas(*rows: tuple[int, int, int, int]) -> tuple[Tiles, ...]:
    return tuple(_tma(*row) for row in rows)


# The tables that follow are of half precision, by architecture and head dim (:func:`special`).

# What `tilewise tune` measures and tests/judge checks, by pass. Rows that lost on an H200 are in docs/tried.md, not here.
CANDIDATES = {
    "sm90": {
        64: {
            "forward": _tmas((64, 128, 4, 2), (64, 128, 4, 3), (64, 64, 4, 4)),
            "dkdv": _tmas((64, 64, 4, 3), (64, 128, 8, 3), (32, 128, 4, 3), (32, 64, 4, 4)),
            "dk": _tmas((64, 64, 4, 3)),
            "dv": _tmas((64, 64, 4, 3)),
            "dq": _tmas((128, 64, 4, 3), (64, 64, 4, 3), (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 4, 3)),
        },
        80: {
            "forward": (*_tmas((128, 128, 8, 3), (64, 128, 4, 2), (128, 64, 4, 3)), _padded(128, 128, 8, 2)),
            "dkdv": (*_tmas((64, 64, 4, 3), (32, 64, 4, 3), (64, 128, 8, 3)), _padded(32, 64, 4, 3)),
            "dk": _tmas((64, 64, 4, 3)),
            "dv": _tmas((64, 64, 4, 3)),
            "dq": (*_tmas((128, 64, 4, 3), (64, 64, 4, 3), (128, 64, 8, 3)), _padded(128, 64, 8, 3)),
        },
        96: {
            "forward": (*_tmas((128, 128, 8, 3), (64, 128, 4, 2)), _padded(128, 128, 8, 2)),
            "dkdv": (*_tmas((32, 64, 4, 3), (64, 128, 8, 3), (64, 64, 4, 3)), _padded(32, 64, 4, 3)),
            "dk": _tmas((64, 128, 8, 3)),
            "dv": _tmas((64, 128, 8, 3)),
            "dq": (*_tmas((128, 64, 8, 3), (64, 64, 4, 3)), _padded(128, 64, 8, 3)),
        },
        128: {
            "forward": _tmas((128, 128, 8, 3), (128, 128, 8, 2), (64, 128, 4, 2), (64, 64, 4, 3)),
            "dkdv": _tmas(
                (32, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 128, 8, 2), (128, 64, 8, 2)
            ),
            "dk": _tmas((64, 128, 8, 3), (64, 64, 4, 3)),
            "dv": _tmas((64, 128, 8, 3), (64, 64, 4, 3)),
            "dq": _tmas((128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2), (64, 128, 4, 2)),
        },
        160: {
            "forward": (*_tmas((128, 128, 8, 2), (128, 64, 8, 3)), _padded(128, 64, 8, 2)),
            "dkdv": _tmas((64, 64, 4, 3)),
            "dk": (*_tmas((64, 128, 8, 3), (32, 128, 8, 3)), _padded(32, 128, 8, 3)),
            "dv": (*_tmas((64, 128, 8, 3), (64, 64, 4, 3)), _padded(64, 128, 8, 2)),
            "dq": (*_tmas((128, 64, 8, 3), (64, 64, 4, 3)), _padded(128, 32, 8, 3)),
        },
        192: {
            "forward": (*_tmas((128, 128, 8, 2), (128, 64, 8, 3)), _padded(128, 64, 8, 2)),
            "dkdv": _tmas((64, 64, 4, 3)),
            "dk": (*_tmas((64, 128, 8, 2), (64, 64, 4, 3), (32, 128, 8, 3)), _padded(32, 128, 8, 3)),
            "dv": (*_tmas((64, 128, 8, 3), (64, 64, 4, 3)), _padded(64, 128, 8, 2)),
            "dq": (*_tmas((128, 64, 8, 2), (64, 64, 4, 3), (128, 32, 8, 3)), _padded(128, 32, 8, 3)),
        },
        256: {
            "forward": _tmas((128, 64, 8, 2), (64, 64, 4, 2)),
            "dkdv": _tmas((64, 64, 8, 2), (32, 64, 8, 3)),
            "dk": _tmas((32, 128, 8, 3), (64, 64, 8, 2), (32, 64, 4, 3)),
            "dv": _tmas((32, 128, 8, 3), (64, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2)),
            "dq": _tmas((128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)),
        },
    }
}
# If a tensor is read for every pair, the first of these tiles that fits replaces the table's. With the tensor's tiles, dQ's eight warps
# have no room for a third stage. "dkdv" is for elements wider than q's, with which two programs of 64 x 64 do not fit.
# docs/decisions.md#triton-pair-tiles
_PAIRED_FORWARD = _tmas((64, 64, 4, 3), (128, 64, 8, 3))
PAIRED = {
    "sm90": {
        64: {"forward": _PAIRED_FORWARD, "dkdv": _tmas((64, 64, 4, 3)), "dq": _tmas((64, 64, 4, 3))},
        128: {"forward": _PAIRED_FORWARD, "dkdv": _tmas((32, 64, 4, 3)), "dq": _tmas((64, 64, 4, 3))},
    }
}
# Of the kernel that sums the gradient of such a tensor over the axes of its broadcast.
PAIR_SUMS = {"sm90": {128: Tiles(128, 64, 8, 2)}}
# Tiles for a tensor that is read by distance, by pass; ALL_DISTANT if no tile is far from the diagonal. dK dV at D 128 spills with tiles
# of 64 x 64, and with 128 keys the forward reads each number twice. docs/decisions.md#triton-diagonals
DISTANT = {"sm90": {64: {}, 128: {"dkdv": _tma(32, 64, 4, 3)}}}
ALL_DISTANT = {"sm90": DISTANT["sm90"] | {64: {"forward": _tma(64, 64, 4, 3)}}}
# The pairs of a batch element and head in a short sequence; longer ones have tiles enough for lists of them.
WINDOW_PAIRS = 1 << 16
# Of the forward of a predicate over short sequences, all of whose tiles are partial, beside a tensor that is read for every pair
# (docs/decisions.md#triton-windows).
WINDOWS = {"sm90": {32: _tma(64, 32, 4, 2)}}
# v is a view of k, and a tile of rows has many heads of one query (docs/decisions.md#triton-pages).
LATENT = {"sm90": {576: _tma(64, 64, 8, 2)}}
# A chunk of queries over e4m3 numbers without a scale for each key: with more rows, fewer tiles convert each key
# (docs/decisions.md#triton-pages).
E4M3 = {"sm90": {96: None, 128: _tma(128, 64, 8, 3)}}
# One query's heads share a tile: few rows, and as many loads in flight as fit.
DECODING = {"sm90": {64: _tma(64, 128, 4, 3), 128: _tma(64, 64, 4, 3), 256: _tma(64, 32, 4, 3)}}

# One query and one head in fp32: no matrix instruction has so few rows (docs/decisions.md#triton-one-row).
ONE_ROW = {128: Tiles(1, 64, 4, 1), 256: Tiles(1, 64, 8, 1), 512: Tiles(1, 32, 8, 1)}
# Queries and keys of a tile of all calls that are deterministic everywhere; on a GPU with products of 64 rows, however few count. Half
# precision. Of wide heads, 64 keys or eight warps gave other bits over pages than dense (docs/tried.md).
ONE_ORDER = {128: _tma(64, 64, 4, 3), 256: _tma(64, 32, 4, 2)}

Found = TypeVar("Found")


def row_for(rows: Mapping[int, Found], problem: Problem) -> Found | None:
    """Return the first row that holds a problem's head dims, or None."""
    widest = max(problem.head_dim, problem.head_dim_v)
    return next((found for head_dim, found in rows.items() if widest <= head_dim), None)


def tabled(problem: Problem, products: str) -> Config:
    """Return :data:`TABLE`'s row for a problem; the last one for head dims that are refused."""
    rows = table(architecture(problem.device), problem.dtype.itemsize, products)
    return row_for(rows, problem) or rows[max(rows)]


def special(table: Mapping[str, Mapping[int, Found]], problem: Problem) -> Found | None:
    """Return the row of a table of half precision for a problem on its device, or None."""
    rows = table.get(architecture(problem.device), {}) if problem.dtype.itemsize == 2 else {}
    return row_for(rows, problem)


def tf32_allowed() -> bool:
    """Return whether PyTorch is set to multiply fp32 as tf32.

    PyTorch 2.9 renamed the setting. Reading the old name may raise if the new one was used.
    """
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)
    return matmul.allow_tf32 if precision is None else precision == "tf32"


def float_products(head_dim: int, arch: str) -> str:
    """Return :attr:`Config.products` of fp32 on a GPU, as PyTorch's setting allows."""
    if tf32_allowed() and head_dim <= TF32_HEAD_DIM.get(arch, head_dim):
        return "tf32"
    return "bf16x6" if head_dim <= TERMS_HEAD_DIM.get(arch, OTHER_TERMS_HEAD_DIM) else "ieee"


def may_round(problem: Problem) -> bool:
    """Return whether PyTorch allows a problem's products of fp32 to be rounded to tf32."""
    return problem.dtype == torch.float32 and problem.device.type != "cpu" and tf32_allowed()


def products(problem: Problem) -> str:
    """Return :attr:`Config.products` of a problem under PyTorch's present setting."""
    if problem.dtype != torch.float32 or problem.device.type == "cpu":
        return "ieee"
    return float_products(max(problem.head_dim, problem.head_dim_v), architecture(problem.device))


def operand_bytes(itemsize: int, products: str) -> int:
    """Return the bytes of an element as kernels read it, with all its terms."""
    return 2 * TERMS if itemsize == 4 and products == "bf16x6" else itemsize


def architecture(device: torch.device) -> str:
    """Return the key of a device in :data:`TABLE`.

    "sm120" is every graphics card from Ampere on (sm_86, sm_89, sm_120): they multiply as an A100 does, with less shared memory.
    """
    if torch.version.hip or devices.of(device).type == "hip":
        return "amd"
    major, minor = devices.of(device).capability
    if major >= 12 or (major, minor) in ((8, 6), (8, 9)):
        return "sm120"
    return "sm90" if major == 9 else "sm100" if major >= 10 else "sm80"


UNLIMITED = 1 << 30  # bytes: more than any tiles need


def memory_limit(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a device; more than any needs, if that is not known."""
    return devices.of(device).shared_memory or UNLIMITED


def room(problem: Problem, tiles: Tiles) -> int:
    """Return the bytes of shared memory that a program with these tiles may take (:func:`program_limit`)."""
    device = problem.device
    return program_limit(tiles, memory_limit(device), architecture(device), problem.dtype.itemsize)


def preceded(passes: dict[str, Tiles], measured: dict[str, Tiles]) -> dict[str, Tiles]:
    """Return ``passes`` with measured tiles instead of the table's; dK and dV are one pass or two, as measured."""
    over_keys = [name for name in measured if name in OVER_KEYS]
    return {name: x for name, x in passes.items() if not over_keys or name not in OVER_KEYS} | measured


BESIDE = 4  # programs that read one tile of a pair tensor while it is in the L2: docs/decisions.md#triton-beside


def beside(problem: Problem) -> tuple[int, int]:
    """Return the batch elements and the key heads, at most BESIDE, whose programs run side by side.

    They share a tensor that is read for every pair, so that it comes from DRAM once.
    """
    shared = PairReads.of(problem).shared
    some_b = divisor(problem.batch, BESIDE) if "b" in shared and not problem.packed else 1
    return some_b, divisor(problem.heads_k, BESIDE // some_b) if "h" in shared else 1


def divisor(n: int, most: int) -> int:
    """Return the largest divisor of n that is at most ``most``."""
    return max(d for d in range(1, most + 1) if n % d == 0)


def of_one_order(problem: Problem) -> Tiles:
    """Return the forward's tiles of a call that is deterministic everywhere."""
    return INTERPRETED.forward if problem.device.type == "cpu" else row_for(ONE_ORDER, problem)


def choose(problem: Problem, measured: dict[str, Tiles] | None = None) -> Config:
    """Choose the configuration of a problem by head dim and dtype, and by what its mask and score read.

    Args:
        measured: tiles that ``tilewise tune`` measured on this device, by pass.
    """
    together = beside(problem)
    if problem.device.type == "cpu":
        return replace(Config.of(preceded(INTERPRETED.passes, measured or {})), beside=together)
    fp32 = products(problem)
    passes = tabled(problem, fp32).passes
    passes |= {name: x for name, x in (paired(problem) | distant(problem)).items() if name in passes}
    blocks = predicate_blocks(problem)
    passes = {name: within_blocks(name, x, blocks) for name, x in preceded(passes, measured or {}).items()}
    if problem.spec.everywhere:
        passes["forward"] = of_one_order(problem)
    chosen = Config.of(fit_all(problem, passes))
    parts = group_parts(problem, chosen.dkdv, devices.of(problem.device).cores)
    return replace(chosen, group_parts=parts, beside=together, products=fp32)


# Return the least rows of a tile that a program owns, and of one that it streams. Smaller ones take other instructions.
WHOLE_OWNED, WHOLE_STREAMED = 64, 32


def within_blocks(kernel: str, tiles: Tiles, blocks: tuple[int, int]) -> Tiles:
    """Return ``tiles`` no larger than the blocks on which a predicate is constant, if these are large enough.

    A tile in several blocks is partial, and takes two to five times as long as a full one (docs/decisions.md#triton-block-tiles).

    Args:
        blocks: their rows and keys; 0 means any size.
    """
    i, j = (n & -n or 1 << 30 for n in blocks)
    own, streamed = (("tile_n", j), ("tile_m", i)) if kernel in OVER_KEYS else (("tile_m", i), ("tile_n", j))
    if own[1] < WHOLE_OWNED or streamed[1] < WHOLE_STREAMED:
        return tiles
    while getattr(tiles, own[0]) > own[1]:
        tiles = replace(tiles, **{own[0]: getattr(tiles, own[0]) // 2}, num_warps=max(tiles.num_warps // 2, 4))
    while getattr(tiles, streamed[0]) > streamed[1]:
        tiles = replace(tiles, **{streamed[0]: getattr(tiles, streamed[0]) // 2}, num_stages=tiles.num_stages + 1)
    return tiles


def candidates(problem: Problem) -> dict[str, tuple[Tiles, ...]]:
    """Return the tiles to try on the problem's device, by pass: the configured ones first, none twice."""
    found = {name: (x,) for name, x in choose(problem).passes.items()}
    for name, choices in (special(CANDIDATES, problem) or {}).items():
        fitted = [fit_all(problem, {name: x})[name] for x in choices]
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), *fitted)))
    return found


def paired(problem: Problem) -> dict[str, Tiles]:
    """Return :data:`PAIRED`'s or :data:`WINDOWS`' tiles of a problem, by pass."""
    pair_bytes, found = PairReads.of(problem).bytes, {}
    if not pair_bytes:
        return found
    for name, choices in (special(PAIRED, problem) or {}).items():
        if name != "dkdv" or pair_bytes > problem.dtype.itemsize:
            fitting = (x for x in choices if needed(problem, name, x, pair_bytes) <= room(problem, x))
            found[name] = next(fitting, choices[-1])
    windows = special(WINDOWS, problem)
    if windows is not None and problem.spec.region.predicate is not None and is_short(problem):
        found["forward"] = windows
    return found


def is_short(problem: Problem) -> bool:
    """Return whether sequences are as short as in windows of an image."""
    return problem.seqlen_q * problem.seqlen_k <= WINDOW_PAIRS


def distant(problem: Problem) -> dict[str, Tiles]:
    """Return :data:`DISTANT`'s or :data:`ALL_DISTANT`'s tiles of a problem, by pass."""
    if not reads_by_distance(problem):
        return {}
    return special(ALL_DISTANT if near_of_all(problem) is None else DISTANT, problem) or {}


def pair_sum_tiles(problem: Problem, tiles: Tiles) -> Tiles:
    """Return the tiles for the gradient of a broadcast pair bias, whose loop streams all four tensors: PAIR_SUMS' or dQ's ``tiles``."""
    return with_stages(problem, "tile", special(PAIR_SUMS, problem) or tiles)


def strip_tiles(problem: Problem, tiles: Tiles) -> Tiles:
    """Return the tiles for the gradient of a tensor read by distance: squares, from dQ's ``tiles``. Their loop streams all four tensors."""
    side = min(tiles.tile_m, tiles.tile_n)
    return with_stages(problem, "strip", replace(tiles, tile_m=side, tile_n=side, num_warps=4, num_stages=2, tma=False))


def with_stages(problem: Problem, kernel: str, tiles: Tiles) -> Tiles:
    """Return ``tiles`` with as many of their stages as fit."""
    while needed(problem, kernel, tiles) > memory_limit(problem.device) and tiles.num_stages > 1:
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    return tiles


def needed(problem: Problem, kernel: str, tiles: Tiles, pair_bytes: int = 0) -> int:
    """Return :func:`shared_memory` of a kernel of a problem whose tensors take so many bytes a pair."""
    plain = not problem.spec.dropout_p and problem.spec.region.predicate is None
    widths = columns(problem.head_dim, tiles), columns(problem.head_dim_v, tiles)
    itemsize = operand_bytes(problem.dtype.itemsize, products(problem))
    streams = Streams(pair_bytes, plain, reads_by_distance(problem), _line_bytes(problem))
    return shared_memory(kernel, tiles, widths, itemsize, streams, architecture(problem.device))


def _line_bytes(problem: Problem) -> int:
    reads = [] if problem.spec.score is None else expr.lookups(problem.spec.score)
    lines = [x for x in reads if len({"i", "j"} & expr.depends_on(*x.args[1:])) == 1]
    return sum(problem.extras[x.args[0][1]].dtype.itemsize for x in lines)


def fit_all(problem: Problem, passes: dict[str, Tiles]) -> dict[str, Tiles]:
    """Return each pass's tiles as :func:`fit` leaves them on the problem's device."""
    need = partial(partial, needed, problem, pair_bytes=PairReads.of(problem).bytes)
    return {name: fit(name, tiles, need(name), room(problem, tiles)) for name, tiles in passes.items()}
