"""Attention over ranks beside one GPU on a rank's share of the heads: `python -m bench.ranks --ranks 4 --out FILE`.

A process a rank. First every mask of CHECKS, small, against the float64 oracle; a case whose check is red is not timed. Then, in the
same interleaved rounds: *parallel*, forward alone and with its backward, and *alone*, the whole sequence with ``heads / ranks`` heads
on each GPU at once, so that all are under load. A rate is per GPU, of kept pairs. `--device cpu` rehearses with gloo on small sizes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tilewise as tw
from bench import records
from tilewise.masks import Mask
from tilewise.parallel import ContextParallel, balanced
from tilewise.testing import call, normal

HEAD_DIM = 128


@dataclass(frozen=True)
class Row:
    """A case: a sequence length, query and key heads, and the mask's name."""

    seqlen: int
    heads_q: int
    heads_k: int
    mask: str = "causal"

    @property
    def name(self) -> str:
        return f"ranks-n{self.seqlen}-h{self.heads_q}-{self.heads_k}-{self.mask}"


ROWS = (
    Row(32768, 32, 8), Row(131072, 32, 8), Row(32768, 32, 8, "documents"), Row(32768, 16, 16), Row(131072, 16, 16),
)  # fmt: skip
REHEARSAL = (Row(256, 4, 4), Row(256, 4, 4, "documents"))
CHECKS = ("causal", "documents", "window")


def documents(seqlen: int, device: torch.device | str) -> Tensor:
    """int64 ``(seqlen,)``: which document each position belongs to; lengths are log-uniform, 1/256 to 1/4 of the sequence."""
    chance, ids = random.Random(0), []
    for number in range(seqlen):
        ids += [number] * max(1, round(seqlen / 256 * 64 ** chance.random()))
        if len(ids) >= seqlen:
            break
    return torch.tensor(ids[:seqlen], device=device)


def mask_of(name: str, seqlen: int, device: torch.device | str) -> Mask:
    if name == "documents":
        return tw.causal() & tw.documents(documents(seqlen, device))
    return tw.causal() & tw.window(left=seqlen // 8) if name == "window" else tw.causal()


def kept_pairs(name: str, seqlen: int) -> int:
    """How many pairs a mask keeps."""
    if name == "documents":
        return sum(n * (n + 1) // 2 for n in documents(seqlen, "cpu").bincount().tolist())
    return seqlen * (seqlen + 1) // 2


def tensors(row: Row, heads_q: int, heads_k: int, seqlen: int, device: str) -> list[Tensor]:
    """Random q, k, v and do of so many rows."""
    shapes = [(1, seqlen, heads, HEAD_DIM) for heads in (heads_q, heads_k, heads_k, heads_q)]
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes]


def steps(q: Tensor, k: Tensor, v: Tensor, do: Tensor, **options: object) -> dict[str, Callable[[], object]]:
    """The forward alone, and the forward with its backward."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> None:
        with torch.no_grad():
            tw.attention(*inputs, **options)

    def both() -> None:
        torch.autograd.grad(tw.attention(*inputs, **options), inputs, do)

    return {"forward": forward, "both": both}


def parallel_of(row: Row, size: int, mask: Mask) -> ContextParallel:
    return tw.context_parallel(layout="zigzag" if row.mask == "causal" else balanced(mask, row.seqlen, size))


def milliseconds(run: Callable[[], object], device: str, calls: int) -> float:
    """The slowest rank's mean time of a call."""
    dist.barrier()
    if device == "cpu":
        began = time.perf_counter()
        for _ in range(calls):
            run()
        took = (time.perf_counter() - began) * 1e3
    else:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            run()
        end.record()
        end.synchronize()
        took = start.elapsed_time(end)
    slowest = torch.tensor([took / calls], device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def timed(row: Row, size: int, device: str, rounds: int) -> dict[tuple[str, str], float]:
    """Median milliseconds by contestant and pass."""
    mask = mask_of(row.mask, row.seqlen, device)
    parallel = parallel_of(row, size, mask)
    held = parallel.layout_of(row.seqlen).lengths[parallel.rank]
    contestants = {
        "parallel": steps(*tensors(row, row.heads_q, row.heads_k, held, device), mask=mask, parallel=parallel),
        "alone": steps(*tensors(row, row.heads_q // size, row.heads_k // size, row.seqlen, device), mask=mask),
    }
    runs = {(who, way): run for who, ways in contestants.items() for way, run in ways.items()}
    samples: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    chance = random.Random(0)  # the same order on all ranks
    counts = {
        key: max(1, min(20, int(30 / milliseconds(run, device, 1)))) for key, run in runs.items() if run() is None
    }
    for _ in range(rounds):
        for key in chance.sample(list(runs), len(runs)):
            samples[key].append(milliseconds(runs[key], device, counts[key]))
    return {key: statistics.median(values) for key, values in samples.items()}


def checked(name: str, device: str) -> list[str]:
    """What of a small attention over all ranks is beyond the error rule of one device; every rank gets the same answer."""
    n, dtype = 1000, torch.bfloat16
    shapes = (1, n, 4, HEAD_DIM), (1, n, 2, HEAD_DIM), (1, n, 2, HEAD_DIM), (1, n, 4, HEAD_DIM)
    q, k, v, do = (normal(*shape, dtype=dtype, seed=seed) for seed, shape in enumerate(shapes))
    mask = mask_of(name, n, device)
    parallel = parallel_of(Row(n, 4, 2, name), dist.get_world_size(), mask)
    local = [parallel.shard(x).to(device).requires_grad_() for x in (q, k, v)]
    o, lse = tw.attention_with_lse(*local, mask=mask, parallel=parallel)
    grads = torch.autograd.grad(o, local, parallel.shard(do).to(device))
    found = {name: parallel.unshard(x) for name, x in zip(("o", "dq", "dk", "dv"), (o.detach(), *grads), strict=True)}
    found["lse"] = parallel.unshard(lse.detach(), 2)
    c = call(q, k, v, do, device, mask=mask)
    c.dlse.zero_()
    return [str(e) for e in c.expected().judge(found) if not e.ok]


def process(rank: int, size: int, options: argparse.Namespace, folder: str) -> None:
    """One rank: checks, then times; the first one writes the results."""
    device = "cpu" if options.device == "cpu" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", size), rank=rank, world_size=size)
    peers = {"parallel": "tilewise over all ranks, gathering keys", "alone": "tilewise on a rank's share of the heads"}
    run = records.run(f"python -m bench.ranks --ranks {size}", device, peers, gpus=size)
    lines = [run]
    red = {name: said for name in CHECKS if (said := checked(name, device))}
    for row in REHEARSAL if device == "cpu" else ROWS:
        if row.mask in red:
            continue
        ms = timed(row, size, device, options.rounds)
        flops = 4 * kept_pairs(row.mask, row.seqlen) * row.heads_q * HEAD_DIM / size
        shape = {"gpus": size, "seqlen": row.seqlen, "heads_q": row.heads_q, "heads_k": row.heads_k, "mask": row.mask}
        for (who, way), t in ms.items():
            tflops = flops * (1 if way == "forward" else 3.5) / t / 1e9
            lines.append(
                records.result(run["run"], row.name, who, way, "time", t, tflops=round(tflops, 4), shape=shape)
            )
        if rank == 0:
            share = {way: ms["alone", way] / ms["parallel", way] for way in ("forward", "both")}
            rates = {key: f"{flops * (1 if key[1] == 'forward' else 3.5) / t / 1e9:.0f}" for key, t in ms.items()}
            print(row.name, {way: f"{x:.3f}" for way, x in share.items()}, rates, flush=True)
    if rank == 0:
        print("red:", red or "nothing", flush=True)
        if options.out:
            records.append(lines, options.out)
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(process, (options.ranks, options, folder), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
