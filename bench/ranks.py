"""Attention over ranks beside one GPU on a rank's share of the heads: `python -m bench.ranks --ranks 4 --out FILE`.

A process a rank. First every mask of CHECKS, small, against the float64 oracle, for each contestant; what is red is not timed. Then, in
the same interleaved rounds, forward alone and with its backward: the contestants of CONTESTANTS over all ranks, and *alone*, the whole
sequence with ``heads / ranks`` heads on each GPU at once, so that all are under load. A rate is per GPU, of kept pairs. What a contestant
cannot compute, or was red in, its row says, and the others are timed. At last a step
of each contestant under the profiler: milliseconds of attention kernels, of the exchange, of all other kernels, and of the host; and
the bytes that a rank receives in it, counted, beside those of the cost model. PyTorch's context parallelism (:mod:`bench.ranks_torch`)
takes part where it can. `--device cpu` rehearses with gloo on small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

import tilewise as tw
from bench import measure, ranks_torch
from bench.check import verdict
from bench.records import Log, parser
from bench.testing import call
from tilewise.masks import Mask
from tilewise.parallel import ContextParallel, balanced
from tilewise.parallel.exchange import Group

HEAD_DIM = 128
SAMPLE_MS = 150
"""How long a sample runs: several short steps, so that the first one's launches, which find idle GPUs, count little."""
LONG_MS = 1000
"""A step that takes longer needs no second call to warm up, and is not profiled."""


@dataclass(frozen=True)
class Contestant:
    """A way to compute attention over all ranks.

    Attributes:
        engines: copy engines carry the rows, not NCCL. graph: a step is captured once, and replayed.
    """

    scheme: str
    engines: bool = False
    graph: bool = False


CONTESTANTS = {
    "gather": Contestant("gather"),
    "gather-graph": Contestant("gather", graph=True),
    "auto": Contestant("auto", engines=True),
    "nccl": Contestant("heads"),
    "engines": Contestant("heads", engines=True),
    "engines-graph": Contestant("heads", engines=True, graph=True),
    "heads+gather": Contestant("heads+gather"),
}


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
MANY = (Row(65536, 32, 8, "documents"), Row(262144, 32, 8), Row(524288, 32, 8), Row(1048576, 32, 8))
"""Rows for eight GPUs; fewer take longer than a step is worth, or do not hold them."""
REHEARSAL = (Row(256, 8, 8), Row(256, 8, 8, "documents"))
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


def tensors(heads_q: int, heads_k: int, seqlen: int, device: str, seed: int | None = None) -> list[Tensor]:
    """Random q, k, v and do of so many rows; with a seed the same on every rank."""
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    shapes = [(1, seqlen, heads, HEAD_DIM) for heads in (heads_q, heads_k, heads_k, heads_q)]
    return [torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16) for shape in shapes]


def steps(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> dict[str, Callable]:
    """The forward alone, and the forward with its backward."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]

    def both() -> None:
        torch.autograd.grad(attend(*inputs), inputs, do)

    return {"forward": torch.no_grad()(partial(attend, *inputs)), "both": both}


def together() -> None:
    """Waits until all ranks have come here, and their GPUs have nothing to do."""
    torch.cuda.synchronize()
    dist.barrier()


def captured(run: Callable[[], object]) -> tuple[Callable[[], None], object]:
    """:func:`measure.captured` on all ranks, which agree on the call before: NCCL's watchdog asks for events from a thread of its own."""
    return measure.captured(run, together, "thread_local")


def parallel_of(row: Row, way: Contestant, mask: Mask, groups: dict[bool, Group]) -> ContextParallel:
    group = groups[way.engines]
    layout = "zigzag" if row.mask == "causal" else balanced(mask, row.seqlen, group.size)
    parallel = tw.context_parallel(group, layout=layout, scheme=way.scheme)
    if way.graph:
        parallel.prepare(mask)
    return parallel


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


def tried(run: Callable[[], Any], ranks: Group) -> tuple[Any, str]:
    """The result of a function on this rank, and why it gave nothing on some rank, which all ranks then know; empty: it did on all."""
    found, said = None, ""
    try:
        found = run()
    except Exception as error:  # a contestant fails in its own way, and the others are still to be timed
        said = f"{type(error).__name__}: {error}"
    return found, next(filter(None, ranks.objects(said)), "")


def contests(
    row: Row, names: list[str], groups: dict[bool, Group], device: str, whys: dict[str, list[str]]
) -> tuple[dict[str, dict[str, Callable]], dict[str, dict]]:
    """The forward, and the forward with its backward, of each contestant and of one GPU alone; and the bytes that each exchanges.

    Args:
        whys: of those that cannot take part, why; others are added.
    """
    mask, size = mask_of(row.mask, row.seqlen, device), dist.get_world_size()
    found, moved = {}, {}
    for name in [name for name in names if name not in whys]:
        told("plans", name)
        made, why = tried(partial(contest, row, CONTESTANTS[name], mask, groups, device), groups[False])
        if why:
            whys[name] = [why]
        else:
            found[name], moved[name] = made
    share = tensors(row.heads_q // size, row.heads_k // size, row.seqlen, device)
    return found | {"alone": steps(partial(tw.attention, mask=mask), *share)}, moved


def contest(
    row: Row, way: Contestant, mask: Mask, groups: dict[bool, Group], device: str
) -> tuple[dict[str, Callable], dict]:
    """The forward, and the forward with its backward, of one contestant; and the bytes that it exchanges."""
    parallel = parallel_of(row, way, mask, groups)
    local = tensors(row.heads_q, row.heads_k, parallel.layout_of(row.seqlen).lengths[dist.get_rank()], device)
    found = steps(partial(tw.attention, mask=mask, parallel=parallel), *local)
    moved = received(parallel, found, local[:3], mask)
    return {name: captured(run)[0] for name, run in found.items()} if way.graph else found, moved


def torch_contests(row: Row, peers: dict[str, bool], size: int, contestants: dict[str, dict[str, Callable]]) -> None:
    """Adds those of PyTorch's contestants that run a row; ``peers``: whether shared key heads are repeated for each."""
    if row.mask == "causal" and row.seqlen <= ranks_torch.LONGEST:
        local = tensors(row.heads_q, row.heads_k, row.seqlen // size, "cuda")
        local = [ranks_torch.heads_first(x) for x in local]
        for name, repeat in peers.items():
            contestants[name] = steps(partial(ranks_torch.attend, name, repeat), *local)


def received(
    parallel: ContextParallel, ways: dict[str, Callable[[], object]], inputs: list[Tensor], mask: Mask
) -> dict[str, float | str | None]:
    """MiB that ranks receive in a step, counted, and by the cost model, the most of all ranks, in the forward and in the backward; and
    the model's peak of memory and milliseconds of a step beside its products; and what runs the rank's first call."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    plan, exchange = tw.explain(*inputs, mask=mask, parallel=parallel), parallel.exchange
    before = parallel.received
    ways["forward"]()
    forward = parallel.received - before
    ways["both"]()
    backward = parallel.received - before - 2 * forward
    most = sum(map(max, zip(*exchange.numbers([forward, backward]), strict=True)))
    model = plan.costs[plan.scheme]
    counts = {"received_mib": most, "predicted_received_mib": model.all_received, "predicted_mib": model.memory}
    return {name: round(count / 2**20, 3) for name, count in counts.items()} | {
        "predicted_ms": round(model.milliseconds, 3),
        "backend": plan.chosen,
    }


def timed(contestants: dict[str, dict[str, Callable]], device: str, rounds: int) -> dict[tuple[str, str], float]:
    """Median milliseconds by contestant and pass."""
    samples = {}
    for key, run in {(who, way): run for who, ways in contestants.items() for way, run in ways.items()}.items():
        told("warms", *key)
        took = milliseconds(run, device, 1)
        if took <= LONG_MS:
            took = milliseconds(run, device, 1)
        samples[key] = partial(milliseconds, run, device, max(1, min(20, int(SAMPLE_MS / took))))
    return {key: statistics.median(found) for key, found in measure.interleaved(samples, rounds).items()}


def told(*what: object) -> None:
    """Says on the first rank what begins, so that a run that stops says where."""
    if dist.get_rank() == 0:
        print(time.strftime("%T"), *what, flush=True)


def peak(run: Callable[[], object]) -> float:
    """The most memory that a step takes beside what lies there before it: MiB of the rank that takes the most, without symmetric memory."""
    with measure.PeakMemory("cuda") as memory:
        run()
    most = torch.tensor([memory.bytes], device="cuda")
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return int(most) / 2**20


EXCHANGE, PLAIN = ("nccl", "memcpy", "barrier"), ("at::", "cub::", "memset")


def breakdown(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of a step's kernels by what they do, from its first to its last, and of the host until it had launched them.

    The smallest of STEPS steps: in the first, ranks wait for each other, which the kernels of the exchange count as their own time.
    """
    run()
    host = []
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            torch.cuda.synchronize()
            dist.barrier(device_ids=[torch.cuda.current_device()])
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            host.append((time.perf_counter() - began) * 1e3)
        torch.cuda.synchronize()
    events = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    count = len(events) // STEPS
    steps = [events[n * count + 1 : (n + 1) * count] for n in range(STEPS)]  # without the barrier's kernel
    found = {what: min(sum(e.device_time_total for e in s if _does(e.name) == what) for s in steps) for what in PARTS}
    found["span"] = min(max(e.time_range.end for e in s) - s[0].time_range.start for s in steps)
    return {what: round(us / 1e3, 3) for what, us in found.items()} | {"host": round(min(host), 3)}


STEPS = 4
PARTS = ("attention", "exchange", "rest")


def _does(kernel: str) -> str:
    name = kernel.lower()
    return "exchange" if any(x in name for x in EXCHANGE) else "rest" if any(x in name for x in PLAIN) else "attention"


def attended(inputs: list[Tensor], do: Tensor, **options: object) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """o, lse, and the gradients of the inputs."""
    o, lse = tw.attention_with_lse(*inputs, **options)
    return o.detach(), lse.detach(), torch.autograd.grad(o, inputs, do)


def checked(mask_name: str, names: list[str], groups: dict[bool, Group], device: str) -> dict[str, list[str]]:
    """The errors of a small attention over all ranks beyond the error rule of one device, by contestant; alike on every rank."""
    n, heads_k = 96 if device == "cpu" else 1000, 2 * dist.get_world_size()
    q, k, v, do = tensors(2 * heads_k, heads_k, n, "cpu", seed=0)
    mask = mask_of(mask_name, n, device)
    c = call(q, k, v, do, device, mask=mask)
    c.dlse.zero_()
    expected, red = c.expected(), {}

    def judged(name: str) -> list[str]:
        parallel = parallel_of(Row(n, 2 * heads_k, heads_k, mask_name), CONTESTANTS[name], mask, groups)
        local = [parallel.shard(x).to(device).requires_grad_() for x in (q, k, v)]
        local_do = parallel.shard(do).to(device)

        attend = partial(attended, local, local_do, mask=mask, parallel=parallel)
        if CONTESTANTS[name].graph:
            right = [x.detach().clone() for x in (*local, local_do)]
            for x in (*local, local_do):
                x.detach().normal_()  # the capture computes with other numbers than the replay
            replay, (o, lse, grads) = captured(attend)
            for x, old in zip((*local, local_do), right, strict=True):
                x.detach().copy_(old)
            replay()
        else:
            o, lse, grads = attend()
        found = {x: parallel.unshard(t) for x, t in zip(("o", "dq", "dk", "dv"), (o, *grads), strict=True)}
        found["lse"] = parallel.unshard(lse, 2)
        return [str(e) for e in expected.judge(found) if not e.ok]

    for name in names:
        said, why = tried(partial(judged, name), groups[False])
        if said or why:
            red[name] = [why] if why else said
    return red


def checked_peers(names: list[str], size: int) -> dict[str, bool]:
    """PyTorch's contestants that are right under a causal mask, and whether shared key heads are repeated for them."""
    n, found = 256 * size, {}
    q, k, v, do = tensors(4, 2, n, "cpu", seed=0)
    expected = call(q, k, v, do, "cuda", mask=tw.causal()).expected()
    for name, repeat in [(name, repeat) for name in names for repeat in (False, True)]:
        if name in found:
            continue
        try:
            parts = ranks_torch.found(name, repeat, q, k, v, do)
            said = verdict(expected.judge(parts), ours=False)
        except Exception as error:  # an experimental part of torch fails in many ways
            said = f"{type(error).__name__}: {error}"[:300]
        if said in ("green", "loose"):
            found[name] = repeat
        told(name, "with repeated key heads:" if repeat else "with shared key heads:", said)
    return found


def ways(device: str, only: list[str]) -> tuple[list[str], dict[bool, Group]]:
    """The contestants that this machine can run, and the groups of ranks that they need."""
    groups = {False: Group()}
    if device != "cpu":
        from tilewise.parallel import symmetric

        symmetric.TIMEOUT_MS = 20_000
        try:
            groups[True] = symmetric.SymmetricGroup()
            groups[True].room("try", (16,), torch.zeros(1, device=device), 16)
        except RuntimeError as error:
            print("no symmetric memory:", error, flush=True)
            del groups[True]
    size = dist.get_world_size()
    divides = any(size % n == 0 for n in range(2, size))
    able = [n for n, way in CONTESTANTS.items() if way.engines in groups and (divides or "+" not in way.scheme)]
    wanted = [name for name in able if name in (only or CONTESTANTS)]
    return [name for name in wanted if device != "cpu" or not CONTESTANTS[name].graph], groups


def process(options: argparse.Namespace, device: str) -> None:
    """One rank: checks, then times; the first one writes the results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names, groups = ways(device, options.only)
    asked = [name for name in ranks_torch.KERNELS if device != "cpu" and name in (options.only or ranks_torch.KERNELS)]
    with ranks_torch.entered(init_device_mesh("cuda", (size,))) if asked else contextlib.nullcontext():
        peers = checked_peers(asked, size) if asked else {}
        described = {name: str(CONTESTANTS[name]) for name in names} | {x: ranks_torch.DESCRIBED[x] for x in peers}
        described |= {"alone": "tilewise on a rank's share of the heads"}
        log = Log.begin(f"python -m bench.ranks --ranks {size}", options, described, gpus=size) if rank == 0 else None
        red = {}
        for name in CHECKS:
            told("checks", name)
            red |= {name: said} if (said := checked(name, names, groups, device)) else {}
        told("red:", red or "nothing")
        wanted = [row for row in (*ROWS, *MANY) if row.name in options.rows] or ROWS
        for row in REHEARSAL if device == "cpu" else wanted:
            told(row.name)
            whys = dict(red.get(row.mask, {}))
            contestants, parts = contests(row, names, groups, device, whys)
            if peers:
                torch_contests(row, peers, size, contestants)
            ms = timed(contestants, device, options.rounds)
            for who, ways_of in contestants.items() if device != "cpu" else ():
                parts[who] = parts.get(who, {}) | looked_at(who, ways_of["both"], ms[who, "both"])
            if log:
                keep(log, row, ms, parts, whys)


def looked_at(who: str, step: Callable[[], object], ms: float) -> dict[str, float]:
    """Where a step's time goes, if it is a short one of ours, and its peak of memory."""
    told("looks at", who)
    parts = breakdown(step) if who not in ranks_torch.KERNELS and ms < LONG_MS else {}
    return parts | {"peak_mib": round(peak(step))}


def keep(log: Log, row: Row, ms: dict[tuple[str, str], float], parts: dict[str, dict], whys: dict[str, list]) -> None:
    """Keep a row's times, each as a rate and as a share of one GPU's pace too; and who is not timed, and why."""
    size = dist.get_world_size()
    flops = 4 * kept_pairs(row.mask, row.seqlen) * row.heads_q * HEAD_DIM / size
    shape = {"gpus": size, "seqlen": row.seqlen, "heads_q": row.heads_q, "heads_k": row.heads_k, "mask": row.mask}
    for name, why in whys.items():
        log.add(row.name, name, "both", "time", None, why=why, shape=shape)
    for (who, way), t in ms.items():
        more = {"tflops": round(flops * (1 if way == "forward" else 3.5) / t / 1e9, 4)}
        more |= {"share": round(ms["alone", way] / t, 4), "shape": shape}
        more |= {"parts": parts[who]} if way == "both" and who in parts else {}
        log.add(row.name, who, way, "time", t, **more)


def parser_of(doc: str, rounds: int) -> argparse.ArgumentParser:
    """The options of every benchmark over ranks."""
    found = parser(doc)
    found.add_argument("--ranks", type=int, required=True)
    found.add_argument("--rounds", type=int, default=rounds)
    return found


def start(process: Callable[[argparse.Namespace, str], None], options: argparse.Namespace) -> None:
    """Runs ``process(options, device)`` in a process for each rank, within their group."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(entered, (process, options, folder), nprocs=options.ranks, start_method="spawn")


def entered(rank: int, process: Callable, options: argparse.Namespace, folder: str) -> None:
    """A rank's process: joins the others in the folder."""
    cpu = options.device == "cpu"
    if not cpu:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("gloo" if cpu else "nccl", store=store, rank=rank, world_size=options.ranks)
    process(options, "cpu" if cpu else f"cuda:{rank}")
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    found = parser_of(__doc__, 5)
    found.add_argument("--only", nargs="*", choices=[*CONTESTANTS, *ranks_torch.KERNELS], help="some contestants")
    found.add_argument("--rows", nargs="*", default=(), choices=[row.name for row in (*ROWS, *MANY)], help="some rows")
    start(process, found.parse_args())


if __name__ == "__main__":
    main()
