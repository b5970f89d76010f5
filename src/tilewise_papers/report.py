"""Every algorithm at one setting: counted, compared with the closed forms, and timed by what a device could do at best.

One head is run (on a dry machine: the same program without its arithmetic) and the counts are multiplied by batch × heads.
That is exact, because heads share no number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from tilewise_papers import flash1, flash2, nested, split, standard, warps
from tilewise_papers.blocks import largest, paper_blocks
from tilewise_papers.devices import Device
from tilewise_papers.head import Blocks, Head
from tilewise_papers.machine import Counts, DoesNotFit, Level, Machine, Work

STREAMED = 16  # the short side of a streamed tile: what a tensor core takes at least


@dataclass(frozen=True)
class Setting:
    """The question: sizes of the problem, and the device whose memories hold it."""

    seqlen: int
    head_dim: int
    heads: int
    batch: int
    device: Device

    def __post_init__(self):
        for name in ("seqlen", "head_dim", "heads", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)} is below 1")

    @property
    def all_heads(self) -> int:
        return self.batch * self.heads

    def machine(self, depth: int = 2, *, roomy: bool = False) -> Machine:
        """A dry machine with the first `depth` levels of the device; roomy: all of them without end."""
        levels = self.device.levels[:depth]
        if roomy:
            levels = tuple(Level(level.name, float("inf"), level.bandwidth) for level in levels)
        return Machine(levels, word=self.device.word, dry=True)


@dataclass(frozen=True)
class Row:
    """One algorithm in the tables. forward, backward: counts of one head, or None where there is none."""

    name: str
    source: str
    forward: Counts
    backward: Counts | None
    blocks: Blocks
    backward_blocks: Blocks | None = None
    fits: bool = True

    @property
    def both(self) -> Counts:
        return self.forward + self.backward if self.backward else self.forward


@dataclass(frozen=True)
class Algorithm:
    """A program and how its blocks are shaped.

    forward(machine, head, blocks), backward(machine, head, out, do, blocks). shapes: for each of them a function of
    (size, head_dim) to the blocks whose long side is `size`. options: of Head.blank. longest: no longer side than this.
    """

    name: str
    source: str
    forward: Callable
    backward: Callable | None
    shapes: tuple[Callable[[int, int], Blocks], Callable[[int, int], Blocks]]
    options: dict = field(default_factory=dict)
    longest: int | None = None


def long_cols(size: int, head_dim: int) -> Blocks:
    """FlashAttention's shape: many keys, and min(keys, head_dim) queries."""
    return Blocks(min(size, head_dim), size)


def long_rows(size: int, head_dim: int) -> Blocks:
    """FlashAttention-2's: many queries stay on chip, keys stream."""
    return Blocks(size, min(size, head_dim))


def long_block(size: int, head_dim: int) -> Blocks:
    """A product of standard attention: one long block, thin pieces."""
    return Blocks(size, min(size, STREAMED))


MASKED = {"causal": True, "dropout": True}
PRODUCTS, KEYS_OUTSIDE, QUERIES_OUTSIDE = (long_block, long_block), (long_cols, long_cols), (long_rows, long_cols)
STANDARD = Algorithm("standard", "FA Alg. 0, 3", standard.forward, standard.backward, PRODUCTS)
SEPARATE = Algorithm("+ mask, dropout", "eager kernels", standard.forward, standard.backward, PRODUCTS, MASKED)
_FUSED = partial(standard.forward, fused=True), partial(standard.backward, fused=True)
FUSED = Algorithm("+ mask, dropout, fused", "fusion alone", *_FUSED, PRODUCTS, MASKED)
FLASH = Algorithm("FlashAttention", "FA Alg. 1, 4", flash1.forward, flash1.backward, KEYS_OUTSIDE)
FLASH2 = Algorithm("FlashAttention-2", "FA-2 Alg. 1, 2", flash2.forward, flash2.backward, QUERIES_OUTSIDE)
# The largest blocks that fit would leave nothing above the diagonal to skip.
FLASH2_CAUSAL = replace(FLASH2, name="FlashAttention-2, causal", options={"causal": True}, longest=128)


def count(algorithm: Algorithm, setting: Setting, blocks: tuple[Blocks, Blocks], *, roomy: bool = False) -> Row:
    """Run an algorithm on one head with blocks for its forward and its backward.

    Raises DoesNotFit if a tile finds no room, unless roomy.
    """
    head = Head.blank(setting.seqlen, setting.head_dim, **algorithm.options)
    machine = setting.machine(roomy=roomy)
    out = algorithm.forward(machine, head, blocks[0])
    if algorithm.backward is None:
        return Row(algorithm.name, algorithm.source, machine.counts, None, blocks[0])
    later = setting.machine(roomy=roomy)
    algorithm.backward(later, head, out, head.q, blocks[1])
    return Row(algorithm.name, algorithm.source, machine.counts, later.counts, *blocks)


def fitting_blocks(algorithm: Algorithm, setting: Setting) -> tuple[Blocks, Blocks]:
    """The largest blocks of the algorithm's shapes that the device's SRAM accepts, for its forward and its backward.

    Mask and dropout need no tile of their own, so the trials leave them out.
    """

    def forward_tile(size: int) -> None:
        blocks = algorithm.shapes[0](size, setting.head_dim)
        head = Head.blank(max(blocks.rows, blocks.cols), setting.head_dim)
        algorithm.forward(setting.machine(), head, blocks)

    def backward_tile(size: int) -> None:
        blocks = algorithm.shapes[1](size, setting.head_dim)
        head = Head.blank(max(blocks.rows, blocks.cols), setting.head_dim)
        out = algorithm.forward(setting.machine(roomy=True), head, blocks)
        algorithm.backward(setting.machine(), head, out, head.q, blocks)

    probes = (forward_tile, backward_tile) if algorithm.backward else (forward_tile, forward_tile)
    limit = min(setting.seqlen, algorithm.longest or setting.seqlen)
    sizes = (largest(probe, limit) for probe in probes)
    return tuple(shape(size, setting.head_dim) for shape, size in zip(algorithm.shapes, sizes, strict=True))


def best(algorithm: Algorithm, setting: Setting) -> Row:
    """The algorithm with the largest blocks that fit.

    A tile that no block size makes smaller (a whole row of scores, in the softmax of standard attention) may still find no
    room; then it is counted on a larger SRAM, and marked.
    """
    blocks = fitting_blocks(algorithm, setting)
    try:
        return count(algorithm, setting, blocks)
    except DoesNotFit:
        return replace(count(algorithm, setting, blocks, roomy=True), fits=False)


def flash_with_paper_blocks(setting: Setting) -> Row:
    """FlashAttention with Bc = ⌈M / 4d⌉ as written. Where these blocks do not fit the SRAM, a roomier one counts them."""
    blocks = paper_blocks(setting.device.sram_elements, setting.head_dim)
    blocks = Blocks(min(blocks.rows, setting.seqlen), min(blocks.cols, setting.seqlen))
    row = count(FLASH, setting, (blocks, blocks), roomy=True)
    peak = max(row.forward.peak_bytes[1], row.backward.peak_bytes[1])
    fits = peak <= setting.device.levels[1].bytes
    return replace(row, name="FlashAttention, paper's Bc", fits=fits)


def table(setting: Setting) -> list[Row]:
    """All algorithms whose traffic with slow memory matters; each but one with its own largest blocks."""
    rows = [best(a, setting) for a in (STANDARD, SEPARATE, FUSED)]
    rows.append(flash_with_paper_blocks(setting))
    return rows + [best(a, setting) for a in (FLASH, sparse(0.25), FLASH2, FLASH2_CAUSAL, splitting(4, setting.seqlen))]


def sparse(density: float) -> Algorithm:
    """Block-sparse FlashAttention in which about this share of the blocks is not zero."""

    def pattern(head: Head, blocks: Blocks) -> np.ndarray:
        seqlen_q, seqlen_k = head.sizes
        return flash1.band_pattern(-(-seqlen_q // blocks.rows), -(-seqlen_k // blocks.cols), density)

    return Algorithm(
        f"block-sparse, {density:.0%}",
        "FA Alg. 5",
        lambda machine, head, blocks: flash1.forward(machine, head, blocks, pattern(head, blocks)),
        lambda machine, head, out, do, b: flash1.backward(machine, head, out, do, b, pattern(head, b)),
        KEYS_OUTSIDE,
    )


def splitting(num_splits: int, seqlen: int) -> Algorithm:
    """FlashAttention-2's forward with seqlen keys split among num_splits work items."""

    def forward(machine: Machine, head: Head, blocks: Blocks):
        return split.forward(machine, head, blocks, -(-seqlen // num_splits))

    return Algorithm(f"{num_splits} key splits + merge", "split keys", forward, None, QUERIES_OUTSIDE)


def inner_table(setting: Setting) -> tuple[Blocks, list[Row]]:
    """Programs with a level below SRAM, at the same tiles: warps that split keys or queries, and nested tiles.

    The tile is 128 queries × 64 keys, or half as large, and so on, until every program fits the device's fastest level.
    """
    blocks = Blocks(min(128, setting.seqlen), min(64, setting.seqlen))
    while True:
        try:
            return blocks, inner_rows(setting, blocks)
        except DoesNotFit:
            if blocks.rows == blocks.cols == 1:
                raise
            blocks = Blocks(max(1, blocks.rows // 2), max(1, blocks.cols // 2))


def inner_rows(setting: Setting, blocks: Blocks) -> list[Row]:
    """The programs of inner_table with one size of tile."""
    head = Head.blank(setting.seqlen, setting.head_dim)
    piece = Blocks(max(1, blocks.rows // warps.WARPS), blocks.cols)
    programs = (
        ("4 warps, keys split", lambda m: warps.split_keys(m, head, blocks)),
        ("4 warps, queries split", lambda m: warps.split_queries(m, head, blocks)),
        ("nested tiles", lambda m: nested.forward(m, head, [blocks, piece])),
    )
    rows = []
    for name, program in programs:
        machine = setting.machine(depth=3)
        program(machine)
        rows.append(Row(name, "inside a core", machine.counts, None, blocks))
    return rows


@dataclass(frozen=True)
class Prediction:
    """The least time of one launch: seconds that each limit allows (the largest binds), and the share of cores it fills."""

    limits: dict[str, float]
    items: int
    share: float

    @property
    def binding(self) -> str:
        return max(self.limits, key=self.limits.__getitem__)

    @property
    def seconds(self) -> float:
        return self.limits[self.binding]


def predict(work: Work, device: Device) -> Prediction:
    """The roofline of a device for one launch.

    Work items go to the cores in waves, so that the last wave may leave cores idle; arithmetic and on-chip traffic slow
    down by that share, slow memory does not.
    """
    share = work.items / (device.cores * -(-work.items // device.cores)) if work.items else 1.0
    limits = {
        "matmul": work.matmul_flops / device.matmul_flops / share,
        "other": work.other_flops / device.other_flops / share,
    }
    for b, traffic in enumerate(work.boundaries):
        limits[device.levels[b].name] = traffic.bytes / device.levels[b].bandwidth / (share if b else 1)
    return Prediction(limits, work.items, share)


@dataclass(frozen=True)
class Forecast:
    """A program's least time: its launches run one after the other."""

    launches: list[Prediction]

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.launches)

    @property
    def binding(self) -> str:
        """The limit that binds for most of the time."""
        total = {}
        for p in self.launches:
            total[p.binding] = total.get(p.binding, 0.0) + p.seconds
        return max(total, key=total.__getitem__)

    @property
    def longest(self) -> Prediction:
        return max(self.launches, key=lambda p: p.seconds)


def forecast(counts: Counts, device: Device) -> Forecast:
    """counts: of all heads."""
    return Forecast([predict(work, device) for work in counts.launches.values()])


def intensity(counts: Counts) -> float:
    """FLOPs for each byte of slow memory traffic."""
    return (counts.matmul_flops + counts.other_flops) / counts.slow.bytes
