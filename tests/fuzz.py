"""Random calls of a backend, forward and backward, judged against float64 by the project's rule (tilewise.accuracy).

    python -m tests.fuzz --seconds 600 --seed 0 --backend cpu --out out/fuzz-cpu.json
    python -m tests.fuzz --backend hopper --device cuda
    python -m tests.fuzz --ways 1000 --backend cpu --out out/ways-cpu.json
    python -m tests.fuzz --kinds mapped,strided --calls 2000 --seconds 3000 --backend triton --device cuda --out out/fuzz-triton.json
    python -m tests.fuzz --selected --calls 5000 --seconds 3000 --backend cpu --out out/fuzz-selected-cpu.json

The record has for each kind of call how many ran, were refused and failed: mapped over examples, strided (an operand is expanded, with a
stride of 0), paged, and plain.

Case n is drawn from the number seed + n alone, for what is searched: shapes, strides, offsets, dtypes, masks, scores, sinks, dropout,
packing, pages, threads, for cpu the instruction set, and for cpu and triton the tiles. Triton runs in its interpreter on the device cpu.
What lies between the elements of a strided input is NaN, and so is what a result was before it was written. Some calls are mapped over
examples (:mod:`tests.mapped`), in outputs, gradients and tangents. Each failure prints the line that runs it again.

Thousands of small cases also meet some where eager attention is exact by luck, so that the rule allows next to nothing. A
case beyond the rule therefore counts as close, not as a failure, up to FACTOR times what is allowed, or FACTOR times the error
of the portable backend, which sums in other orders.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

import tilewise as tw
from bench.testing import Call, call, paged_call, poisoned, results
from tests import ways
from tests.backends.paged import random_case
from tests.mapped import MappedCall, named
from tilewise import accuracy, dispatch
from tilewise.backends.cpu import Cpu, library
from tilewise.backends.cpu import call as cpu_call
from tilewise.backends.cpu.config import Config
from tilewise.problem import Problem

FACTOR = 4
PAGED = 0.2  # of all calls
MAPPED = 0.3  # of the others
KINDS = ("plain", "strided", "mapped", "paged")


@dataclass(frozen=True)
class Ranges:
    """What sizes and dtypes are drawn from; most lengths and head dims are listed ones, others up to the longest and widest.

    Attributes:
        heads_k: the most key heads.
        latent: head dims of k and of v where v lies in k's memory.
        tiles: sides of Triton's tiles; empty, these are its own.
    """

    lengths: tuple[int, ...]
    longest: int
    widths: tuple[int, ...]
    widest: int
    dtypes: tuple[torch.dtype, ...]
    heads_k: int = 3
    latent: tuple[tuple[int, int], ...] = ()
    tiles: tuple[int, ...] = ()


# By device, and for Triton's interpreter, which takes 5 ms for a pair of tiles. A GPU's tiles are larger than a CPU's, and Hopper's kernels
# are of half precision and few head dims.
RANGES = {
    "cpu": Ranges(
        lengths=(0, 1, 2, 15, 16, 17, 63, 64, 65, 100, 129, 200, 257),
        longest=300,
        widths=(1, 2, 3, 8, 15, 16, 17, 31, 32, 33, 64, 65, 80, 128, 130),
        widest=300,
        dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    ),
    "cuda": Ranges(
        lengths=(0, 1, 17, 64, 65, 127, 128, 129, 255, 256, 257, 384, 513),
        longest=1200,
        widths=(16, 32, 40, 64, 64, 64, 80, 96, 128, 128, 128, 192, 256, 256, 512),
        widest=512,
        dtypes=(torch.bfloat16, torch.float16, torch.bfloat16, torch.float16, torch.float32),
        latent=((576, 512), (576, 512), (576, 512)),
    ),
    "interpreter": Ranges(
        lengths=(0, 1, 17, 33, 64, 65, 100, 129),
        longest=150,
        widths=(3, 16, 24, 40),
        widest=70,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        heads_k=2,
        tiles=(16, 32),
    ),
}


@dataclass(frozen=True)
class Target:
    """The backend that is searched, on one device, and for cpu one instruction set instead of a random one for each case."""

    backend: str
    isa: str | None = None
    device: str = "cpu"
    selected: bool = False  # whether every mask selects keys

    @property
    def ranges(self) -> Ranges:
        return RANGES["interpreter" if (self.backend, self.device) == ("triton", "cpu") else self.device]

    @property
    def mapped_ranges(self) -> Ranges:
        """The ranges of a call's examples: some of them are one call, and their number tells nothing that one does not."""
        if self.ranges is RANGES["interpreter"]:
            return replace(self.ranges, lengths=(0, 1, 3, 17), longest=20, widths=(3, 16), widest=20)
        return replace(self.ranges, lengths=(0, 1, 2, 5, 16, 17, 33), longest=70)

    @property
    def arguments(self) -> str:
        """The arguments of this module that give it."""
        options = [("isa", self.isa), ("device", self.device if self.device != "cpu" else None)]
        given = [f"--{name} {value}" for name, value in options if value]
        return " ".join([f"--backend {self.backend}", *given, *(["--selected"] if self.selected else [])])


class Draw(random.Random):
    """Random numbers of a case, and tensors from them, on the default device."""

    ranges: Ranges
    selected: bool

    @classmethod
    def of_case(cls, number: int, target: Target) -> Draw:
        r = cls(number)
        r.ranges, r.selected = target.ranges, target.selected
        return r

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        normal = torch.randn(shape, generator=torch.Generator().manual_seed(self.getrandbits(40)), device="cpu")
        return normal.to(torch.get_default_device(), dtype)

    def likely(self, p: float) -> bool:
        return self.random() < p

    def length(self) -> int:
        return self.choice(self.ranges.lengths) if self.likely(0.7) else self.randint(1, self.ranges.longest)

    def strided(self, x: Tensor) -> Tensor:
        """The same numbers in other strides, at an offset, with NaN between them."""
        axes = list(range(x.ndim))
        if not axes:
            return x
        if self.likely(0.5):
            axes[:-1] = self.sample(axes[:-1], x.ndim - 1)
        if self.likely(0.1):
            self.shuffle(axes)  # the last axis too: backends copy
        margins = [(self.randint(0, 3), self.randint(0, 3)) if self.likely(0.3) else (0, 0) for _ in axes]
        sizes = [x.shape[a] + sum(margins[a]) for a in axes]
        between = torch.nan if x.is_floating_point() else x.dtype == torch.bool or 1 << 24
        room = torch.full(sizes, between, dtype=x.dtype)
        view = room.permute([axes.index(n) for n in range(x.ndim)])
        view = view[tuple(slice(margins[a][0], margins[a][0] + x.shape[a]) for a in range(x.ndim))]
        return view.copy_(x)

    def input(self, *shape: int, dtype: torch.dtype, draw: Callable[..., Tensor] | None = None) -> Tensor:
        """Strided, or expanded along some axes; ``draw``: what draws the numbers of a shape."""
        draw = draw or (lambda *shape: self.tensor(*shape, dtype=dtype))
        if shape and self.likely(0.15):
            once = [1 if self.likely(0.4) else n for n in shape[:-1]]
            last = 1 if len(shape) == 1 and self.likely(0.5) else shape[-1]
            return self.strided(draw(*once, last)).expand(shape)
        return self.strided(draw(*shape))


@dataclass(frozen=True)
class Sizes:
    batch: int
    nq: int
    nk: int
    hq: int
    hk: int
    d: int
    dv: int
    lengths: tuple[tuple[int, int], ...] = ()

    @classmethod
    def draw(cls, r: Draw) -> Sizes:
        hk, group = r.randint(1, r.ranges.heads_k), r.choice((1, 1, 2, 3, 4))
        d = r.choice(r.ranges.widths) if r.likely(0.8) else r.randint(1, r.ranges.widest)
        batch, nq, nk = r.choice((0, 1, 1, 2, 2, 3)), r.length(), r.length()
        nk = nq if r.likely(0.4) else nk
        lengths = ()
        if r.likely(0.2):
            lengths = tuple((r.length() // 2, r.length() // 2) for _ in range(r.randint(1, 4)))
            batch, nq, nk = len(lengths), *(sum(n[side] for n in lengths) for side in (0, 1))
        return cls(batch, nq, nk, hk * group, hk, d, d if r.likely(0.6) else r.choice(r.ranges.widths), lengths)


# -- Masks and scores --------------------------------------------------------------------------------------------------


def interval_mask(r: Draw, s: Sizes) -> tw.Mask:
    side = lambda: None if r.likely(0.2) else r.randint(0, 80)  # noqa: E731
    start = r.randint(0, 40)
    kinds = [
        tw.causal,
        lambda: tw.window(left=side(), right=side()),
        lambda: tw.prefix(r.randint(0, 90)),
        lambda: tw.key_range(start, start + r.randint(0, 200)),
        lambda: tw.key_lengths(torch.tensor([r.randint(0, s.nk + 1) for _ in range(s.batch)], dtype=torch.int64)),
    ]
    if not s.lengths:
        kinds.append(lambda: tw.causal() & tw.documents((torch.arange(s.nk) + r.randint(0, 30)) // r.randint(1, 60)))
    return r.choice(kinds)()


def pair_mask(r: Draw, s: Sizes) -> tw.Mask:
    m, n, c = r.randint(2, 9), r.randint(1, 9), r.randint(1, 5)
    side, step = r.choice((8, 16, 32, 64)), r.choice((17, 33))
    blocks = tw.keep(lambda b, h, i, j: (i // side + j // side) % 2 == 0)
    kinds = [
        lambda: blocks,
        lambda: blocks & tw.causal(),
        lambda: tw.keep(lambda b, h, i, j: (j % step == 0) | (i // side == j // side)),
        lambda: tw.keep(lambda b, h, i, j: (i - j) % m == 0),
        lambda: tw.keep(lambda b, h, i, j: (i * n + j * 3 + h) % m < c),
        lambda: tw.keep(lambda b, h, i, j: (i - j).abs() <= n * (h + 1)),
        lambda: tw.keep(lambda b, h, i, j: torch.where(b % 2 == 0, j % m != 0, i // 16 >= j // 16)),
    ]
    if not s.lengths:
        some = lambda *shape: r.tensor(*shape) > r.choice((-1.0, 0.0, 1.0))  # noqa: E731
        batch, heads = r.choice((1, s.batch)), r.choice((1, s.hq))
        block = r.choice((16, 32, 40, 64, 128))
        counts = -(-s.nq // block), -(-s.nk // block)
        kinds += [
            lambda: tw.dense(some(batch, heads, s.nq, s.nk)),
            lambda: tw.block_sparse(some(*counts), block, block),
        ]
    return r.choice(kinds)()


def selected_keys(r: Draw, s: Sizes) -> tw.Mask:
    block, block_q = r.choice((1, 1, 3, 16, 64)), r.choice((1, 1, 2, 16, 64))
    lengths = s.lengths or [(s.nq, s.nk)] * s.batch
    heads, rows, count = (
        r.choice((1, s.hk)),
        max(-(-max([n for n, _ in lengths], default=s.nq) // block_q), 1 if s.lengths else 0),
        r.choice((0, 1, 4, 30)),
    )
    generator = torch.Generator().manual_seed(r.getrandbits(40))
    entries = [
        torch.randint(-1, -(-nk // block), (heads, rows, count), generator=generator, device="cpu") for _, nk in lengths
    ]
    shared = len({nk for _, nk in lengths}) == 1 and r.likely(0.3)
    indices = (
        torch.stack(entries[:1] if shared else entries)
        if entries
        else torch.zeros(0, heads, rows, count, dtype=torch.int64)
    )
    dtype = r.choice((torch.int32, torch.int64))
    return tw.selected(r.strided(indices.to(torch.get_default_device(), dtype)), block, block_q)


def draw_mask(r: Draw, s: Sizes) -> tw.Mask | None:
    kind = 1.0 if r.selected else r.random()
    if kind < 0.3:
        return None
    mask = interval_mask(r, s) if kind < 0.6 else pair_mask(r, s) if kind < 0.85 else selected_keys(r, s)
    if r.likely(0.5):
        other = interval_mask(r, s) if r.likely(0.6) else pair_mask(r, s)
        mask = mask & other if r.likely(0.6) else mask | other
    return mask


def one_score(r: Draw, s: Sizes, dtype: torch.dtype) -> tw.Score:
    half = lambda *shape: 0.5 * r.tensor(*shape, dtype=dtype)  # noqa: E731
    leaf = lambda *shape: r.input(*shape, dtype=dtype, draw=half).requires_grad_(r.likely(0.8))  # noqa: E731
    table, temperature, distances = leaf(s.hq, 32), leaf(), leaf(s.hq, s.nq + s.nk + 1)
    by_row, by_key = (leaf(max(n, 1)) for n in (s.nq, s.nk))
    # Factors are positive: another one would make +inf of the -inf of a score before, and NaN of the row.
    kinds = [
        lambda: tw.softcap(r.choice((2.0, 20.0))),
        lambda: tw.alibi(leaf(*r.choice(((s.hq,), (s.batch, s.hq))))),
        lambda: tw.score(lambda z, b, h, i, j: z + table[h, (i - j).clamp(-16, 15) + 16]),
        lambda: tw.score(lambda z, b, h, i, j: z + distances[h, i - j + s.nk]),
        lambda: tw.score(lambda z, b, h, i, j: z + table[h, (i - j) % 9]),
        lambda: tw.score(lambda z, b, h, i, j: z * torch.exp(temperature) + by_key[j]),
        lambda: tw.score(lambda z, b, h, i, j: z * torch.exp(by_row[i]) + torch.exp(by_key[j]) * z),
        lambda: tw.score(lambda z, b, h, i, j: torch.where((i + 2 * j) % 5 == 0, -torch.inf, z)),
        lambda: tw.score(lambda z, b, h, i, j: torch.tanh(z) * torch.sigmoid(table[h, j % 32]) - 0.01 * (i - j).abs()),
    ]
    if not s.lengths:
        shape = [r.choice((1, n)) for n in (s.batch, s.hq, s.nq, s.nk)]
        kinds.append(lambda: tw.bias(leaf(*shape)))
    return r.choice(kinds)()


def draw_score(r: Draw, s: Sizes, dtype: torch.dtype) -> tw.Score | None:
    if r.likely(0.5):
        return None
    score = one_score(r, s, dtype)
    return score >> one_score(r, s, dtype) if r.likely(0.3) else score


# -- Calls ---------------------------------------------------------------------------------------------------------------


def draw_call(r: Draw) -> tuple[Call, str]:
    """A call and its description."""
    s, dtype = Sizes.draw(r), r.choice(r.ranges.dtypes)
    lead_q, lead_k = ((s.nq,), (s.nk,)) if s.lengths else ((s.batch, s.nq), (s.batch, s.nk))
    q, k = r.input(*lead_q, s.hq, s.d, dtype=dtype), r.input(*lead_k, s.hk, s.d, dtype=dtype)
    v, do = r.input(*lead_k, s.hk, s.dv, dtype=dtype), r.input(*lead_q, s.hq, s.dv, dtype=dtype)
    leaves = torch.float64 if dtype == torch.float64 else torch.float32
    options: dict[str, object] = {"mask": draw_mask(r, s), "score": draw_score(r, s, leaves)}
    options["sink"] = r.input(s.hq, dtype=leaves) if r.likely(0.2) else None
    options["deterministic"] = r.likely(0.3)
    if r.likely(0.15):
        options |= {"dropout_p": r.choice((0.1, 0.5)), "dropout_seed": r.getrandbits(62)}
    if r.likely(0.2):
        options["softmax_scale"] = r.choice((0.05, 1.0, 0.0, -0.3))
    if s.lengths:
        for name, side in (("cu_seqlens_q", 0), ("cu_seqlens_k", 1)):
            options[name] = r.strided(torch.tensor([0, *(n[side] for n in s.lengths)]).cumsum(0))
    c = call(q, k, v, do, **options)
    return c, f"{c.p.describe()}    strides {q.stride()} {k.stride()} {v.stride()} {do.stride()}"


def draw_paged(r: Draw, device: str) -> tuple[Call, str]:
    """A call over a cache in pages, and its description."""
    d, dv = r.choice(r.ranges.widths), r.choice(r.ranges.widths)
    latent = tuple((2 * n, n) for n in r.ranges.widths if 2 * n <= r.ranges.widest)
    dtypes = tuple(x for x in r.ranges.dtypes if x != torch.float64)
    case = random_case(r, ((d, d), (d, d), (d, dv)), (*latent, *r.ranges.latent), dtypes)
    q, cache, options = case.draw()
    if r.selected:
        rows = case.rows if isinstance(case.rows, tuple) else (case.rows,) * len(case.lengths)
        lengths = tuple(zip(rows, case.lengths, strict=True))
        mask, other = (
            selected_keys(r, Sizes(len(rows), max(rows), 0, *case.heads, *case.dims, lengths)),
            options["mask"],
        )
        options["mask"] = mask if other is None else mask & other if r.likely(0.6) else mask | other
    c = paged_call(q, cache, device, **options)
    return c, f"{c.p.describe()}    {case}"


def draw_backend(r: Draw, target: Target, p: Problem):
    """The backend, how many threads it gets, and its description."""
    threads = r.choice((1, 1, 2, 3))
    backend = dispatch.backend(target.backend)
    if target.backend == "cpu":
        isa = target.isa or r.choice(library.load().isas)
        backend = Cpu(cpu_config(r, isa, p)) if r.likely(0.5) and not p.paged else Cpu(isa=isa)
    elif target.backend == "triton" and not p.paged and not (p.spec.region.selections and r.likely(0.5)):
        # Of itself it may read selected keys alone, or by block.
        backend = type(backend)(triton_config(r, backend.config(p), p))
    return backend, threads, f"{backend.config(p)}"


def cpu_config(r: Draw, isa: str, p: Problem) -> Config:
    tile_n = r.choice((64, 128, 192, 256))
    return Config(
        isa=isa,
        tile_m=r.choice((1, 5, 6, 16, 33, 64, 96)),
        tile_n=tile_n,
        heads=1 if p.packed else r.randint(1, p.group),
        backward_m=r.choice((1, 6, 7, 16, 64, 96)),
        backward_n=r.choice((64, 128, 256)),
        split=0 if p.packed else tile_n * r.choice((0, 0, 1, 2)),
        shares=1 if p.packed else r.randint(1, 3),
    )


def triton_config(r: Draw, own, p: Problem):
    """Triton's own configuration with random parts of a group; in the interpreter, which has room for all, with random tiles and splits."""
    from tilewise.backends.triton.paging import PagedConfig, takes_dense

    parts = r.choice([n for n in range(1, p.group + 1) if p.group % n == 0])
    if sides := r.ranges.tiles:
        tma = r.likely(0.5)
        terms = p.dtype == torch.float32 and r.likely(0.5)
        alike = {"chunk": 16, "column_parts": r.randint(1, 2)} if terms and r.likely(0.5) else {}
        sizes = {n: {"tile_m": r.choice(sides), "tile_n": r.choice(sides)} for n in own.passes}
        drawn = {n: replace(x, tma=tma, **sizes[n], **alike) for n, x in own.passes.items()}
        own = replace(type(own).of(drawn), products="bf16x6" if terms else "ieee")
        if takes_dense(p) and r.likely(0.4):
            rows = sides if p.dtype.itemsize == 2 else (1, *sides)
            few = [replace(own.forward, tile_m=r.choice(rows), tile_n=r.choice(sides), chunk=0, column_parts=1)] * 3
            own = replace(own, few=PagedConfig(*few, splits=r.choice((1, 2, 4)), split=r.choice((0, 16, 64))))
    return replace(own, group_parts=parts)


def judged(name: str, c: Call, found: dict[str, Tensor]) -> tuple[list[str], list[str]]:
    """Tensors that are wrong, and those beyond the rule that only come close."""
    expected = accuracy.Expected.of(c.p, c.t, c.do, c.dlse)
    beyond = [e for e in expected.judge(found) if not e.ok]
    if not beyond:
        return [], []
    others = (
        {} if name == "portable" else {e.tensor: e for e in expected.judge(results(dispatch.backend("portable"), c))}
    )
    wrong, close = [], []
    for e in beyond:
        other = others.get(e.tensor, e)
        near = [
            error <= FACTOR * max(allowed, same if others else 0.0)
            for error, allowed, same in ((e.rms, e.rms_allowed, other.rms), (e.max, e.max_allowed, other.max))
        ]
        text = f"{e}; portable: rms {other.rms:.3g}, max {other.max:.3g}"
        (close if all(near) else wrong).append(text)
    return wrong, close


Outcome = tuple[list[str], list[str], dict[str, str]]
"""What is wrong with a case, what comes close, and what it was."""


def draw_case(number: int, target: Target) -> tuple[str, Callable[[], Outcome]]:
    """The kind of a case, and what runs it."""
    r = Draw.of_case(number, target)
    if r.likely(PAGED):
        return "paged", lambda: run_call(r, target, *draw_paged(r, target.device))
    if r.likely(MAPPED):
        return "mapped", lambda: run_mapped(r, target)
    with torch.device(target.device):
        c, text = draw_call(r)
    expanded = any(is_expanded(x) for x in (c.t.q, c.t.k, c.t.v, c.do, *c.t.leaves))
    return "strided" if expanded else "plain", lambda: run_call(r, target, c, text)


def is_expanded(x: Tensor) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True))


def run_call(r: Draw, target: Target, c: Call, text: str) -> Outcome:
    name = target.backend
    refused = dispatch.backend(name).unsupported(c.p)
    if refused:
        return [], [], {"refused": refused[0]}
    backend, threads, how = draw_backend(r, target, c.p)
    torch.set_num_threads(threads)
    with mock.patch.object(cpu_call, "PRIVATE_ELEMENTS", r.choice((0, cpu_call.PRIVATE_ELEMENTS))):
        found = results(backend, c)
    torch.set_num_threads(1)
    wrong, close = judged(name, c, found)
    facts = {"dtype": str(c.p.dtype).removeprefix("torch."), "isa": getattr(backend.config(c.p), "isa", name)}
    return ([text, how, f"{threads} threads", *wrong] if wrong else []), close, facts


def run_mapped(r: Draw, target: Target) -> Outcome:
    """:func:`run_call` of one that is mapped over examples."""
    r.ranges, name = target.mapped_ranges, target.backend
    with torch.device(target.device):
        c, _ = draw_call(r)
        while c.p.packed or c.p.spec.dropout_p:
            c, _ = draw_call(r)
        mapped = MappedCall.draw(r, named(c, name))
    way, wrong, close = r.choice(mapped.ways), [], []
    facts = {"mapped": way.__name__, "dtype": str(c.p.dtype).removeprefix("torch."), "isa": name}
    torch.set_num_threads(r.choice((1, 1, 2, 3)))
    try:
        with poisoned():
            found = way()
        moves = c.p.dtype == torch.float32 and r.likely(0.5)
        if moves and not dispatch.backend(name).without_tangents(mapped.calls[0].p, second=False):
            facts["mapped"] += " and tangents"
            wrong += mapped.worse_tangents(dispatch.backend(name), FACTOR)
    except NotImplementedError as error:
        return [], [], {"refused": str(error).splitlines()[-1].strip()}
    finally:
        torch.set_num_threads(1)
    for each, results_of_each in zip(mapped.calls, found, strict=True):
        beyond, near = judged(name, each, results_of_each)
        wrong, close = [*wrong, *beyond], [*close, *near]
    return ([mapped.describe(), way.__name__, *wrong] if wrong else []), close, facts


def lost(target: Target) -> bool:
    """Whether a fault has taken the GPU from this process: every later case would raise."""
    try:
        if target.device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def fuzz(target: Target, numbers, seconds: float, kinds: Sequence[str] = KINDS, calls: float = math.inf) -> dict:
    """Cases of these kinds until the time is up, so many calls ran or the GPU is lost; counts by kind, dtype and instruction set, what came
    close, and the failures."""
    start, counts, failures, near = time.monotonic(), Counter(), {}, {}
    of_kind = {kind: Counter(calls=0, refused=0, failed=0) for kind in kinds}
    for number in numbers:
        enough = sum(n["calls"] for n in of_kind.values()) >= calls
        if enough or time.monotonic() - start > seconds or (failures and lost(target)):
            break
        kind, run = draw_case(number, target)
        if kind not in kinds:
            continue
        try:
            wrong, close, facts = run()
        except Exception as error:
            wrong, close, facts = [f"{type(error).__name__}: {error}"], [], {"raised": type(error).__name__}
        of_kind[kind].update(["refused" if "refused" in facts else "calls", *(["failed"] if wrong else [])])
        counts.update(f"{key} {value}" for key, value in facts.items())
        near |= {number: close} if close else {}
        if wrong:
            failures[number] = wrong
            again = f"python -m tests.fuzz {target.arguments} --case {number}"
            print("\n  ".join([again, *wrong]), flush=True)
    return {
        "cases": sum(n["calls"] + n["refused"] for n in of_kind.values()),
        "seconds": round(time.monotonic() - start),
        "kinds": of_kind,
        "counts": dict(sorted(counts.items())),
        "close": near,
        "failures": failures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--isa", help="one instruction set of cpu, instead of a random one for each case")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--case", type=int, help="one case again")
    parser.add_argument(
        "--kinds", default=",".join(KINDS), help="the kinds of calls that run, the others being passed over"
    )
    parser.add_argument("--calls", type=float, default=math.inf, help="stop after so many")
    parser.add_argument("--selected", action="store_true", help="every mask selects keys, alone or beside others")
    parser.add_argument("--ways", type=int, help="compare so many pairs of ways of one sequence instead (tests.ways)")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    numbers = range(a.seed, a.seed + (1 << 40)) if a.case is None else [a.case]
    if a.backend == "triton" and a.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, at the first case
    if a.ways:
        result = ways.pairs(a.ways, ways.of_backend(a.backend, a.device), a.device, a.backend, a.seed)
    else:
        result = fuzz(Target(a.backend, a.isa, a.device, a.selected), numbers, a.seconds, a.kinds.split(","), a.calls)
    record = {
        "backend": a.backend,
        "device": a.device,
        "seed": a.seed,
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
    record |= result
    print(json.dumps(record, indent=1))
    if a.out:
        a.out.write_text(json.dumps(record, indent=1) + "\n")
    raise SystemExit(1 if result["failures"] else 0)


if __name__ == "__main__":
    main()
