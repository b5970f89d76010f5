"""The CPU's AMX kernels on a machine that has them: are they right there, and what do the tile registers give.

    python -m bench.cpu_amx --out FILE.jsonl [--parts tiles,contract,bits,time,tune,decode] [--minutes 9] [--built]

Needs cmake and a C++ compiler (or, with --built, a build/native from elsewhere), no network. Builds the library and, for
tests, the one with AMX in software; compares the emulated instructions with the hardware's; runs the contract, in bf16 with
AMX forced and on the other instruction sets as it is; holds AMX's results against the emulation's, bit by bit; times it beside
AVX-512's bf16 dot products and PyTorch's SDPA (oneDNN, which uses AMX too); and tries other tiles. Where the machine has no AMX
the parts say so, and the other contestants are timed.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bench import cases, records
from bench.measure import ROOT, in_turns, limits
from tilewise import testing
from tilewise.backends.cpu import Cpu, library
from tilewise.testing import Call, call, of_case

AMX, EMULATED, DOTS = "amxbf16", "amxbf16_emulated", "avx512bf16"
BUILD = ROOT / "build/native"
CONTRACTS = ("TestAmx", "TestCpu", "TestAvx512", "TestAvx2")
FLOPS = {"forward": 4, "backward": 10}  # a pair and a channel
PEERS = {
    AMX: "the cpu backend with AMX",
    DOTS: "the cpu backend with AVX-512's bf16 dot products",
    "sdpa": "F.scaled_dot_product_attention (oneDNN)",
    "chosen": "the cpu backend as configured",
    "read": "K and V summed once",
}


class Shape(NamedTuple):
    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"b{self.batch}-h{self.heads}-n{self.seqlen}-d{self.head_dim}-{mask}"

    @property
    def pairs(self) -> float:
        return self.seqlen * (self.seqlen + 1) / 2 if self.causal else self.seqlen**2


SHAPES = [
    (1, 8, 2048, 64, False), (1, 8, 2048, 64, True), (1, 8, 2048, 128, False), (1, 8, 2048, 128, True),
    (1, 8, 8192, 64, False), (1, 8, 8192, 64, True), (1, 8, 8192, 128, False), (1, 8, 8192, 128, True),
    (16, 8, 128, 64, False), (16, 8, 256, 64, False), (1, 2, 16384, 64, False), (1, 8, 4096, 80, True),
]  # fmt: skip
TUNED = [(1, 8, 4096, 64, False), (1, 8, 4096, 128, True)]
FORWARD_TILES = [(128, 128), (128, 256), (256, 128), (256, 256), (512, 128), (512, 192), (512, 256)]
CHUNKS = (0, 512, 1024, 2048, 4096)  # keys; 0: whole rows
BACKWARD_TILES = [(64, 128), (96, 128), (96, 256), (128, 128), (128, 256), (192, 256), (256, 256)]


class Results:
    """A file of results and the time that is left; every row is written, and said, as soon as it is there."""

    def __init__(self, path: Path, minutes: float, isas: list[str]):
        self.path, self.end = path, time.monotonic() + 60 * minutes
        self.run = records.run("python -m bench.cpu_amx", "cpu", PEERS | tried(), isas=isas)
        records.append([self.run], path)

    def add(self, case: str, who: str, direction: str, metric: str, value: float, **more: object) -> None:
        row = records.result(self.run["run"], case, who, direction, metric, value, **more)
        records.append([row], self.path)
        speed = f" ({row['tflops']:.3f} TFLOP/s)" if "tflops" in row else ""
        print(f"{case} {who} {direction}: {value:.4g} {row['unit']}{speed}", flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.end


def tried() -> dict[str, str]:
    """The contestants that are the cpu backend with other tiles or chunks."""
    found = {f"{m}x{n}": "the cpu backend with such tiles" for m, n in (*FORWARD_TILES, *BACKWARD_TILES)}
    return found | {f"chunks of {n}": "the cpu backend with such chunks of keys" for n in CHUNKS}


def command(*words: str | Path, **environment: str) -> tuple[int, str]:
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ | environment)
    return run.returncode, run.stdout + run.stderr


def build() -> None:
    for words in (
        ("cmake", "-S", ".", "-B", BUILD, "-DTILEWISE_INPLACE=ON"),
        ("cmake", "--build", BUILD, "--parallel", "--target", "tilewise_cpu", "tilewise_cpu_emulated", "tiles"),
    ):
        code, said = command(*words)
        if code:
            raise SystemExit(said[-4000:])


# ---- is it right? -----------------------------------------------------------------------------------------------------


def tiles(results: Results) -> None:
    """The emulated instructions against the definition and the hardware."""
    code, said = command(BUILD / "tiles", "--steps", "200000")
    results.add("amx-instructions", AMX, "forward", "right", int(code == 0), of=1, shape={"what": said.strip()})


def contract(results: Results) -> None:
    several = ("-n", "auto") if find_spec("xdist") else ()
    for name in CONTRACTS:
        words = ("-m", "pytest", "-p", "no:cacheprovider", *several, "tests/backends/test_cpu.py", "-k", name)
        code, said = command(sys.executable, *words, OMP_NUM_THREADS="1")
        last = next((line for line in said.splitlines()[::-1] if " in " in line and line[:1].isdigit()), "nothing")
        shape = {"what": f"tests/backends/test_cpu.py -k {name}: {last}"}
        results.add(f"amx-contract-{name}", "chosen", "both", "right", int(code == 0), of=1, shape=shape)
        print(said[-6000:] if code else "", end="")


def bits(results: Results) -> None:
    """The contract's calls in bf16 whose results are those of the emulation, bit by bit."""
    other = library.Library(BUILD / "libtilewise_cpu_emulated.so")
    if not {AMX, EMULATED} <= {*library.load().isas, *other.isas}:
        print("bits: no AMX here")
        return
    differ, named = [], [x for x in cases.tagged("contract") if x.dtype in ("float32", "bfloat16")]
    for case in named:
        c = of_case(replace(case, dtype="bfloat16"))
        found = testing.results(Cpu(isa=AMX), c)
        differ += [f"{case.name} {name}" for name in testing.other_bits(found, with_library(other, c))]
    right, shape = len(named) - len({text.split()[0] for text in differ}), {"what": "the contract in bf16, bit by bit"}
    results.add("amx-equals-its-emulation", AMX, "both", "right", right, of=len(named), shape=shape, why=differ[:5])


def with_library(loaded: library.Library, c: Call) -> dict[str, torch.Tensor]:
    before, library.load = library.load, lambda: loaded
    try:
        return testing.results(Cpu(isa=EMULATED), c)
    finally:
        library.load = before


# ---- how fast is it? --------------------------------------------------------------------------------------------------


def sdpa(c: Call, causal: bool) -> dict:
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in (c.t.q, c.t.k, c.t.v))
    o, do = F.scaled_dot_product_attention(q, k, v, is_causal=causal), c.do.transpose(1, 2)
    return {
        "forward": lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), is_causal=causal),
        "backward": lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
    }


def ours(c: Call, backend: Cpu) -> dict:
    out = backend.forward(c.p, c.t)
    return {
        "forward": partial(backend.forward, c.p, c.t),
        "backward": partial(backend.backward, c.p, c.t, out, c.do, c.dlse),
    }


def drawn(shape: Shape) -> Call:
    size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    return call(*(torch.randn(size).bfloat16() for _ in range(3)), causal=shape.causal)


def in_threads() -> Iterator[int]:
    """All threads, then two where there are more."""
    every = torch.get_num_threads()
    for threads in sorted({min(2, every), every}, reverse=True):
        torch.set_num_threads(threads)
        yield threads
    torch.set_num_threads(every)


def timed(results: Results) -> None:
    sets = [isa for isa in (AMX, DOTS) if isa in library.load().isas]
    every = torch.get_num_threads()
    for threads in in_threads():
        pace = limits("cpu", torch.bfloat16)
        print(f"{threads} threads: {pace['matmul_flops'] / 1e9:.0f} GFLOP/s, {pace['copy_bytes'] / 1e9:.0f} GB/s")
        for shape in map(Shape._make, SHAPES):
            if results.late or (threads < every and shape.seqlen > 2048):
                continue
            c = drawn(shape)
            calls = {isa: ours(c, Cpu(isa=isa)) for isa in sets} | {"sdpa": sdpa(c, shape.causal)}
            about = {"shape": shape._asdict() | {"dtype": "bfloat16", "threads": threads}}
            for direction, flops in FLOPS.items():
                work = flops * shape.batch * shape.heads * shape.head_dim * shape.pairs
                for who, ms in in_turns({name: x[direction] for name, x in calls.items()}, "cpu", 5, 100.0).items():
                    speed = round(work / ms / 1e9, 4)
                    results.add(f"amx-t{threads}-{shape}", who, direction, "time", ms, tflops=speed, **about)


def tune(results: Results) -> None:
    """Tiles other than those that config chooses, on all threads; each is a contestant by its size."""
    isa = AMX if AMX in library.load().isas else DOTS
    for shape in map(Shape._make, TUNED):
        c = drawn(shape)
        chosen = Cpu(isa=isa).config(c.p)
        forward = {f"{m}x{n}": replace(chosen, tile_m=m, tile_n=n) for m, n in FORWARD_TILES}
        backward = {f"{m}x{n}": replace(chosen, backward_m=m, backward_n=n) for m, n in BACKWARD_TILES}
        for direction, others in (("forward", forward), ("backward", backward)):
            if results.late:
                return
            calls = {name: ours(c, Cpu(override=x))[direction] for name, x in {"chosen": chosen, **others}.items()}
            for who, ms in in_turns(calls, "cpu", 5, 30.0).items():
                results.add(f"amx-tiles-{shape}", who, direction, "time", ms, shape=shape._asdict())


def decode(results: Results) -> None:
    """One query, eight heads: chunks of keys other than those that config chooses, beside a sum over K and V."""
    for threads in in_threads():
        for dtype in (torch.float32, torch.bfloat16):
            for heads_k, n in ((1, 32768), (8, 4096), (8, 32768)):
                q, k, v = (torch.randn(1, m, h, 64).to(dtype) for m, h in ((1, 8), (n, heads_k), (n, heads_k)))
                c = call(q, k, v).forward_only()
                chosen = Cpu().config(c.p)
                others = {f"chunks of {split}": replace(chosen, split=split) for split in CHUNKS}
                others |= {DOTS: replace(chosen, isa=DOTS)} if chosen.isa == AMX else {}
                backends = {"chosen": chosen, **others}.items()
                calls = {name: partial(Cpu(override=x).forward, c.p, c.t) for name, x in backends}
                calls["read"] = lambda k=k, v=v: (k.sum(), v.sum())
                name = str(dtype).removeprefix("torch.")
                shape = {"heads_q": 8, "heads_k": heads_k, "seqlen_k": n, "head_dim": 64, "dtype": name}
                for who, ms in in_turns(calls, "cpu", 7, 10.0).items():
                    case = f"amx-decode-t{threads}-hk{heads_k}-n{n}-{name}"
                    results.add(case, who, "forward", "time", ms, shape=shape | {"threads": threads})


PARTS = {"tiles": tiles, "contract": contract, "bits": bits, "time": timed, "tune": tune, "decode": decode}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--built", action="store_true", help="take build/native as it is")
    options = parser.parse_args()
    if not options.built:
        build()
    loaded = library.load()
    if isinstance(loaded, str):
        raise SystemExit(loaded)
    results = Results(options.out, options.minutes, list(loaded.isas))
    for name in options.parts.split(","):
        PARTS[name](results)


if __name__ == "__main__":
    main()
