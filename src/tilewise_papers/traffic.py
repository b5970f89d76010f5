"""The bytes that the counted machine counts beside what a GPU's counters say.

    python -m tilewise_papers.traffic --out FILE        (NVIDIA, with Nsight Compute)

Four orders of the loops: standard attention, whose scores go through memory; FlashAttention's, keys outside (flash1_triton.py), whole
and with a pattern of blocks; FlashAttention-2's, queries outside, which is the Triton backend's forward, whole and with a pattern. For
each there is

    counted   slow-memory bytes of the algorithm, on the counted machine, whose fast memory is one multiprocessor's
    l2        bytes between the multiprocessors and the L2 cache
    dram      bytes between the L2 cache and the memory
    least     Q, K and V read and O written once, which nothing can avoid

The model has no L2: what it counts is what leaves a multiprocessor. DRAM moves as much where no cache can help, and less, down to
``least``, where programs that run side by side read the same tiles. Each contestant is checked against float64 first, and timed.
"""

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import tilewise as tw
from bench import records
from bench.measure import in_turns
from tilewise_papers import devices, flash1, flash2, report, standard
from tilewise_papers.head import Blocks, Head

SEQLEN, HEAD_DIM = 8192, 64
HEADS = 128  # as many programs of FlashAttention's order as nearly fill a GPU, whose Q and O exceed its L2
SCORES = 16  # heads of standard attention while it is counted: 2 GiB of scores
ROWS, COLS = 64, 128  # the Triton backend's tile at head dim 64, and the blocks of the patterns
WIDTHS = (64, 128, 256)  # key blocks of FlashAttention's order
DENSITIES = (0.5, 0.25, 0.125)
MARK = "spin_kernel"
"""The kernel of torch.cuda._sleep, which is launched ahead of each contestant, so that the list of kernels falls into parts."""
COUNTERS = {
    "dram": ("dram__bytes_read.sum", "dram__bytes_write.sum"),
    "l2": ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"),
}
PEERS = {
    "counted": "tilewise_papers",
    "least": "Q, K and V read and O written once",
    "l2": "bytes between the multiprocessors and L2, by Nsight Compute",
    "dram": "bytes between L2 and memory, by Nsight Compute",
    "kernel": "the kernels of the order",
}
COMMAND = "python -m tilewise_papers.traffic"


@dataclass(frozen=True)
class Order:
    """One order of the loops.

    Attributes:
        heads: how many are counted. run: the attention of q, k, v (heads, seqlen, head_dim) with a pattern.
        count: (bytes read, bytes written) of one head by the algorithm.
        pattern: bool (seqlen / ROWS, seqlen / COLS), or None.
        passes: how often O is rounded: once but where it goes through memory for each key block.
    """

    name: str
    heads: int
    run: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    count: Callable[[], tuple[int, int]]
    pattern: Tensor | None = None
    passes: int = 1


def orders() -> list[Order]:
    """All that are compared."""
    found = [Order("standard", SCORES, materialised, count_standard)]
    for cols in WIDTHS:
        run, count = partial(keys_outside, cols), partial(count_flash1, cols, None)
        found.append(Order(f"flash1-{cols}", HEADS, run, count, passes=SEQLEN // cols))
    found.append(Order("flash2", HEADS, queries_outside, partial(count_flash2, None)))
    for density in DENSITIES:
        kept, name, passes = pattern(density), percent(density), SEQLEN // COLS
        run, count = partial(keys_outside, COLS), partial(count_flash1, COLS, kept)
        found.append(Order(f"flash1-sparse-{name}", HEADS, run, count, kept, passes))
        found.append(Order(f"flash2-sparse-{name}", HEADS, queries_outside, partial(count_flash2, kept), kept))
    return found


def pattern(density: float) -> Tensor:
    """Bands of about so many of the blocks of ROWS queries and COLS keys, bool (seqlen / ROWS, seqlen / COLS)."""
    return torch.from_numpy(flash1.band_pattern(SEQLEN // ROWS, SEQLEN // COLS, density))


def percent(share: float) -> str:
    """A share as text: 12.5%, 50%."""
    return f"{share:.1%}".replace(".0", "")


# ---- how each runs --------------------------------------------------------------------------------------------------


def materialised(q: Tensor, k: Tensor, v: Tensor, pattern: Tensor | None) -> Tensor:
    """Algorithm 0: S, P and O, each by a kernel of its own."""
    s = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=HEAD_DIM**-0.5)
    return s.softmax(-1) @ v


def keys_outside(cols: int, q: Tensor, k: Tensor, v: Tensor, pattern: Tensor | None) -> Tensor:
    """FlashAttention's order."""
    from tilewise_papers import flash1_triton as kernels

    return kernels.forward(q, k, v, ROWS, cols, pattern)


def queries_outside(q: Tensor, k: Tensor, v: Tensor, pattern: Tensor | None) -> Tensor:
    """FlashAttention-2's order: the Triton backend, to which these are (1, seqlen, heads, head_dim)."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return tw.attention(q, k, v, mask=mask_of(q, k, pattern), backend="triton")[0].transpose(0, 1)


_masks: dict[tuple[int, int], tuple[Tensor, tw.Mask]] = {}


def mask_of(q: Tensor, k: Tensor, pattern: Tensor | None) -> tw.Mask | None:
    """The mask of a pattern, whose tiles are listed at the first call with so many heads, as for all layers of a model."""
    if pattern is None:
        return None
    key = id(pattern), q.shape[2]  # the pattern is kept, so that no other has its id
    if key not in _masks:
        _masks[key] = pattern, tw.block_sparse(pattern.bool(), ROWS, COLS).prepare(q, k)
    return _masks[key][1]


# ---- what each counts -----------------------------------------------------------------------------------------------


def setting() -> report.Setting:
    """One head on the machine whose fast memory is that of an H200's multiprocessor."""
    return report.Setting(SEQLEN, HEAD_DIM, 1, 1, devices.DEVICES["h200"])


def slow(program: Callable, *arguments: object) -> tuple[int, int]:
    """(Bytes read, bytes written) of a program's forward of one head."""
    machine = setting().machine(roomy=True)
    program(machine, Head.blank(SEQLEN, HEAD_DIM), *arguments)
    return machine.counts.slow.read_bytes, machine.counts.slow.write_bytes


def count_standard() -> tuple[int, int]:
    """Algorithm 0 with the largest blocks that fit."""
    return slow(standard.forward, report.fitting_blocks(report.STANDARD, setting())[0])


def count_flash1(cols: int, pattern: Tensor | None) -> tuple[int, int]:
    """Algorithm 1, or 5 with a pattern."""
    return slow(flash1.forward, Blocks(ROWS, cols), None if pattern is None else pattern.numpy())


def count_flash2(pattern: Tensor | None) -> tuple[int, int]:
    """FlashAttention-2's Algorithm 1; with a pattern its key blocks that take part."""
    if pattern is None:
        return slow(flash2.forward, Blocks(ROWS, COLS))
    keys = int(pattern.sum()) * COLS
    return 2 * HEAD_DIM * (SEQLEN + 2 * keys), 2 * HEAD_DIM * SEQLEN + 4 * SEQLEN


# ---- right, fast, counted -------------------------------------------------------------------------------------------


def tensors(heads: int, device: str) -> list[Tensor]:
    """q, k, v (heads, seqlen, head_dim) fp16, normal."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (heads, SEQLEN, HEAD_DIM)
    return [torch.randn(shape, generator=generator, device=device).half() for _ in range(3)]


def share(order: Order, device: str) -> float:
    """The largest error over the allowed one: twice that of standard attention in fp16, and a rounding of O for each pass."""
    q, k, v = tensors(1, device)
    pattern = None if order.pattern is None else order.pattern.to(device, torch.int8)
    scores = q.double() @ k.double().mT * HEAD_DIM**-0.5
    eager = (q @ k.mT).float() * HEAD_DIM**-0.5
    if pattern is not None:
        hidden = ~pattern.bool().repeat_interleave(ROWS, 0).repeat_interleave(COLS, 1)
        scores, eager = (x.masked_fill(hidden, float("-inf")) for x in (scores, eager))
    exact = scores.softmax(-1).nan_to_num() @ v.double()
    rough = (eager.softmax(-1).nan_to_num().half() @ v - exact).abs().max()
    allowed = 2 * rough + order.passes * 2.0**-12 * exact.abs().max()
    return ((order.run(q, k, v, pattern) - exact).abs().max() / allowed).item()


def milliseconds(heads: int, names: list[str], device: str) -> dict[str, float]:
    """The time of each of some orders on so many heads, in turns."""
    qkv = tensors(heads, device)
    calls = {}
    for order in orders():
        if order.name in names:
            pattern = None if order.pattern is None else order.pattern.to(device, torch.int8)
            calls[order.name] = partial(order.run, *qkv, pattern)
    return in_turns(calls, device)


def worker(device: str = "cuda") -> None:
    """Runs each order once between marks, where the profiler sees it."""
    for order in orders():
        qkv = tensors(order.heads, device)
        pattern = None if order.pattern is None else order.pattern.to(device, torch.int8)
        order.run(*qkv, pattern)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(100)
        order.run(*qkv, pattern)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counters() -> list[dict[str, tuple[float, float]]]:
    """(Bytes read, bytes written) of each order by the counters' names, in the order of :func:`orders`."""
    metrics = ",".join(name for pair in COUNTERS.values() for name in pair)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "kernels.csv"
        profiler = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log)]
        profiler += ["--clock-control", "none", "--profile-from-start", "off", "--metrics", metrics]
        subprocess.run([*profiler, sys.executable, "-m", "tilewise_papers.traffic", "--worker"], check=True)
        return sums(log.read_text())


def sums(text: str) -> list[dict[str, tuple[float, float]]]:
    """The kernels of a profiler's table, summed between the marks."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: list[dict[str, list[float]]] = []
    for row in csv.DictReader(lines):
        if not row["ID"]:  # the line of units
            continue
        if MARK in row["Kernel Name"]:
            found.append({name: [0.0, 0.0] for name in COUNTERS})
            continue
        for name, pair in COUNTERS.items():
            for n, metric in enumerate(pair):
                found[-1][name][n] += float(row[metric].replace(",", ""))
    return [{name: tuple(values) for name, values in each.items()} for each in found]


def study(device: str) -> Iterator[dict]:
    """Yields the run's record, then errors, times and bytes."""
    head = records.run(
        COMMAND, device, PEERS, statistic="Medians over rounds in turns; counters of one launch, caches flushed first."
    )
    yield head

    def made(name: str, who: str, metric: str, value: float, heads: int, **more: object) -> dict:
        shape = {"seqlen": SEQLEN, "head_dim": HEAD_DIM, "heads": heads, "order": name}
        return records.result(
            head["run"], f"traffic-{name}-h{heads}", who, "forward", metric, value, shape=shape, **more
        )

    wrong = {order.name: share(order, device) for order in orders()}
    for name, value in wrong.items():
        yield made(name, "kernel", "error", value, 1, status="green" if value <= 1 else "red")
    right = [name for name, value in wrong.items() if value <= 1]
    print("errors", {name: round(value, 3) for name, value in wrong.items()}, flush=True)
    for heads, names in ((HEADS, right), (1, [name for name in right if "sparse" not in name])):
        for name, ms in milliseconds(heads, names, device).items():
            print(f"{heads} heads, {name}: {ms:.3f} ms", flush=True)
            yield made(name, "kernel", "time", ms, heads)
    for order, measured in zip(orders(), counters(), strict=True):
        least = (3 * SEQLEN * HEAD_DIM * 2, SEQLEN * HEAD_DIM * 2)
        each = {
            "counted": order.count(),
            "least": least,
            **{n: tuple(x / order.heads for x in b) for n, b in measured.items()},
        }
        print(order.name, {name: f"{sum(both) / 1e6:.1f} MB" for name, both in each.items()}, flush=True)
        for name, (read, write) in each.items():
            more = {"read": read / 1e6, "write": write / 1e6}
            yield made(order.name, name, "traffic", (read + write) / 1e6, order.heads, **more)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, help="results are appended here")
    parser.add_argument("--worker", action="store_true", help="what the profiler starts")
    options = parser.parse_args()
    if options.worker:
        worker()
        return
    if not options.out:
        parser.error("--out FILE is missing")
    records.append(study("cuda"), options.out)


if __name__ == "__main__":
    main()
