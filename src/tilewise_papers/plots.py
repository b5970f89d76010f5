"""Sweeps: the counted twins of Figure 2 of the FlashAttention paper and of its memory figure, and the law of the SRAM.

Every point is a counted run of a program (dry: without its arithmetic) on the setting's device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tilewise_papers.flash1 import band_pattern
from tilewise_papers.head import Blocks
from tilewise_papers.machine import DoesNotFit
from tilewise_papers.report import FLASH, FLASH2, SEPARATE, STANDARD, Row, Setting, best, count, forecast, sparse
from tilewise_papers.tables import seconds

COLOURS = {"standard": "#8a8f98", "FlashAttention": "#c2185b", "FlashAttention-2": "#1565c0", "bound": "#2e7d32"}


def save(sweep: str, setting: Setting, folder: Path) -> Path:
    """Draw one sweep and save it as io-<sweep>.png in the folder; returns its path.

    Raises ValueError for an unknown sweep, listing the known ones.
    """
    if sweep not in SWEEPS:
        raise ValueError(f"unknown sweep {sweep!r}; known are {', '.join(SWEEPS)}")
    figure = SWEEPS[sweep](setting)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"io-{sweep}.png"
    figure.savefig(path, dpi=90)
    return path


def slow_gigabytes(row: Row, setting: Setting, *, forward_only: bool = False) -> float:
    counts = row.forward if forward_only else row.both
    return counts.slow.bytes * setting.all_heads / 1e9


def block_sweep(setting: Setting) -> Figure:
    """Figure 2, left and middle: totals of standard and FlashAttention; forward traffic and time over the key block."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    *totals, axes = figure.subplots(1, 4, width_ratios=(1, 1, 1, 4))
    draw_totals(totals, setting)
    sizes = [size for size in (64, 128, 256, 512, 1024) if size <= max(setting.seqlen, 64)]
    rows = []
    for size in sizes:
        blocks = Blocks(min(64, setting.seqlen), min(size, setting.seqlen))
        rows.append(count(FLASH, setting, (blocks, blocks), roomy=True).forward)
    fits = [row.peak_bytes[1] <= setting.device.levels[1].bytes for row in rows]
    labels = [f"{size}" + ("" if ok else "\ndoes not fit") for size, ok in zip(sizes, fits, strict=True)]
    traffic = [row.slow.bytes * setting.all_heads / 1e9 for row in rows]
    bars = axes.bar(labels, traffic, color=COLOURS["FlashAttention"], width=0.6, alpha=0.75)
    for bar, ok in zip(bars, fits, strict=True):
        bar.set_hatch("" if ok else "//")
    slow = setting.device.levels[0].name
    axes.set(
        xlabel="keys in a block (Bc), 64 queries", title=f"forward: {slow} traffic in GB (bars), predicted ms (line)"
    )
    times = [1e3 * forecast(row.of_heads(setting.all_heads), setting.device).seconds for row in rows]
    axes.plot(labels, times, "o-", color="black")
    return figure


def draw_totals(panels: list[Axes], setting: Setting) -> None:
    """Three small bar charts: GFLOPs, slow memory traffic, predicted time, forward + backward."""
    rows = {"standard": best(SEPARATE, setting), "FlashAttention": best(FLASH, setting)}
    quantities = {
        "GFLOP": lambda row: (row.both.matmul_flops + row.both.other_flops) * setting.all_heads / 1e9,
        f"{setting.device.levels[0].name} GB": lambda row: slow_gigabytes(row, setting),
        "predicted ms": lambda row: 1e3 * seconds(setting, row),
    }
    for axes, (title, value) in zip(panels, quantities.items(), strict=True):
        values = [value(row) for row in rows.values()]
        bars = axes.bar(["standard", "Flash"], values, color=[COLOURS[name] for name in rows])
        axes.bar_label(bars, [f"{v:,.3g}" for v in values])
        axes.set_title(title, fontsize=10)
        axes.set_yticks([])
        axes.tick_params(axis="x", labelrotation=60)
        for side in ("left", "right", "top"):
            axes.spines[side].set_visible(False)


def sparsity_sweep(setting: Setting, seqlen: int = 4096) -> Figure:
    """Figure 2, right: block-sparse FlashAttention at the paper's 4,096 tokens, over the share of blocks that are not zero.

    The batch is made smaller, so that the number of tokens is the setting's.
    """
    setting = replace(setting, seqlen=seqlen, batch=max(1, setting.batch * setting.seqlen // seqlen))
    blocks = (Blocks(64, 64), Blocks(64, 64))
    side = -(-seqlen // 64)
    wanted = [0.05, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0]
    rows = [count(sparse(share), setting, blocks, roomy=True) for share in wanted]
    shares = [band_pattern(side, side, share).mean() for share in wanted]
    dense = count(FLASH, setting, blocks, roomy=True)
    figure = Figure(figsize=(8, 4), layout="constrained")
    slow = setting.device.levels[0].name
    panels = ((f"{slow} traffic, GB", slow_gigabytes), ("predicted time, ms", lambda row, s: 1e3 * seconds(s, row)))
    for i, (title, value) in enumerate(panels):
        axes = figure.add_subplot(1, 2, i + 1)
        values = [value(row, setting) for row in rows]
        axes.plot([100 * s for s in shares], values, "o-", color=COLOURS["FlashAttention"], label="block-sparse")
        axes.axhline(value(dense, setting), ls="--", color=COLOURS["standard"], label="FlashAttention, all blocks")
        axes.set(xlabel="blocks that are not zero, %", title=title, xlim=(0, 103))
        axes.set_ylim(bottom=0)
        axes.legend()
    sizes = f"N {seqlen:,}, d {setting.head_dim}, {setting.heads} heads, batch {setting.batch}"
    figure.suptitle(f"{sizes}, blocks 64 × 64, forward + backward")
    return figure


def seqlen_sweep(setting: Setting, longest: int = 2**16) -> Figure:
    """The memory figure: what a forward and backward hold in slow memory at their peak, and move, over the length."""
    lengths = [2**p for p in range(8, longest.bit_length())]
    setting = replace(setting, batch=1)
    figure = Figure(figsize=(9, 4), layout="constrained")
    slow = setting.device.levels[0]
    memory, traffic = figure.subplots(1, 2)
    for algorithm in (SEPARATE, FLASH, FLASH2):
        rows = [best(algorithm, replace(setting, seqlen=n)) for n in lengths]
        name = "standard" if algorithm is SEPARATE else algorithm.name
        label = "standard, mask and dropout" if algorithm is SEPARATE else name
        style = {"color": COLOURS[name], "label": label, "marker": "o", "ls": "--" if algorithm is FLASH2 else "-"}
        memory.loglog(lengths, [row.both.peak_bytes[0] * setting.all_heads / 2**30 for row in rows], **style)
        traffic.loglog(lengths, [slow_gigabytes(row, setting) for row in rows], **style)
    memory.axhline(slow.bytes / 2**30, ls=":", color="black")
    memory.annotate(f"{slow.name} of {setting.device.name}", (lengths[0], slow.bytes / 2**30), va="bottom")
    memory.set_ylim(top=20 * slow.bytes / 2**30)
    memory.set(xlabel="sequence length", title=f"peak {slow.name}, GiB")
    traffic.set(xlabel="sequence length", title=f"{slow.name} traffic, GB")
    for axes in (memory, traffic):
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths], rotation=45, minor=False)
    traffic.legend(fontsize=8)
    figure.suptitle(f"d {setting.head_dim}, {setting.heads} heads, batch 1, forward + backward")
    return figure


def sram_sweep(setting: Setting) -> Figure:
    """Theorem 2: forward traffic over the size of SRAM, with the largest blocks that fit, beside N² d² / M and 4 N d."""
    sizes = [2**p for p in range(14, 21)]
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    axes = figure.subplots()
    for algorithm in (STANDARD, FLASH, FLASH2):
        points = sram_points(algorithm, setting, sizes)
        label = "FlashAttention" if algorithm is FLASH else algorithm.name
        axes.loglog(*zip(*points, strict=True), "o-", color=COLOURS[algorithm.name], label=label)
    scale = setting.device.word * setting.all_heads / 1e9
    n, d = setting.seqlen, setting.head_dim
    law = [scale * n * n * d * d / (size // setting.device.word) for size in sizes]
    axes.loglog([s / 1024 for s in sizes], law, ":", color="black", label="N² d² / M, constant 1")
    axes.axhline(scale * 4 * n * d, ls="--", color=COLOURS["bound"], label="Q, K, V read and O written once")
    axes.set_xticks([s / 1024 for s in sizes], [f"{s // 1024}" for s in sizes], minor=False)
    slow = setting.device.levels[0].name
    axes.set(xlabel=f"{setting.device.levels[1].name}, KiB", ylabel=f"{slow} traffic, forward, GB")
    axes.set_title(f"N {n:,}, d {d}, {setting.heads} heads, batch {setting.batch}")
    axes.legend(fontsize=8)
    return figure


def sram_points(algorithm, setting: Setting, sizes: list[int]) -> list[tuple[float, float]]:
    """(KiB, GB) for each SRAM in which the algorithm runs at all."""
    points = []
    for size in sizes:
        small = replace(setting, device=setting.device.with_sram(size))
        try:
            points.append((size / 1024, slow_gigabytes(best(algorithm, small), small, forward_only=True)))
        except DoesNotFit:
            continue
    return points


SWEEPS: dict[str, Callable[[Setting], Figure]] = {
    "block": block_sweep,
    "sparsity": sparsity_sweep,
    "seqlen": seqlen_sweep,
    "sram": sram_sweep,
}
