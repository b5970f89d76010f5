"""The CPU's AMX kernels on a machine that has them: are they right there, and what do the tile registers give.

    PYTHONPATH=src:. python3 bench/cpu_amx.py --out DIR [--parts tiles,contract,bits,time,tune,decode] [--minutes 9] [--built]

Needs cmake and a C++ compiler (or, with --built, a build/native from elsewhere), no network. Builds the library and, for
tests, the one with AMX in software; compares the emulated instructions with the hardware's; runs the contract, in bf16 with
AMX forced and on the other instruction sets as it is; holds AMX's results against the emulation's, bit by bit; times it beside
AVX-512's bf16 dot products and PyTorch's SDPA (oneDNN, which uses AMX too); and tries other tiles. Writes DIR/cpu_amx.jsonl, a
line a result, and prints a short table. Where the machine has no AMX the parts say so, and the other contestants are timed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from bench import cases
from bench.measure import ROOT, in_turns, limits, machine
from tilewise import testing
from tilewise.backends.cpu import Cpu, library
from tilewise.testing import Call, call, of_case

AMX, EMULATED, DOTS = "amxbf16", "amxbf16_emulated", "avx512bf16"
BUILD = ROOT / "build/native"
CONTRACTS = ("TestAmx", "TestCpu", "TestAvx512", "TestAvx2")
FLOPS = {"forward": 4, "backward": 10}  # a pair and a channel
SHAPES = [
    # batch, heads, N, D, causal
    (1, 8, 2048, 64, False), (1, 8, 2048, 64, True), (1, 8, 2048, 128, False), (1, 8, 2048, 128, True),
    (1, 8, 8192, 64, False), (1, 8, 8192, 64, True), (1, 8, 8192, 128, False), (1, 8, 8192, 128, True),
    (16, 8, 128, 64, False), (16, 8, 256, 64, False), (1, 2, 16384, 64, False), (1, 8, 4096, 80, True),
]  # fmt: skip
TUNED = [(1, 8, 4096, 64, False), (1, 8, 4096, 128, True)]
FORWARD_TILES = [(128, 128), (128, 256), (256, 128), (256, 256), (512, 128), (512, 192), (512, 256)]
BACKWARD_TILES = [(64, 128), (96, 128), (96, 256), (128, 128), (128, 256), (192, 256), (256, 256)]


class Results:
    def __init__(self, folder: Path, minutes: float):
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "cpu_amx.jsonl").open("a", encoding="utf-8")
        self.end = time.monotonic() + 60 * minutes

    def add(self, line: str, **row: object) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()
        print(line, flush=True)

    @property
    def late(self) -> bool:
        return time.monotonic() > self.end


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


# -- Right? --------------------------------------------------------------------------------------------------------


def tiles(results: Results) -> None:
    """The emulated instructions against the definition and the hardware."""
    code, said = command(BUILD / "tiles", "--steps", "200000")
    results.add(f"tiles: {said.strip()}", part="tiles", ok=code == 0, said=said.strip())


def contract(results: Results) -> None:
    several = ("-n", "auto") if find_spec("xdist") else ()
    for name in CONTRACTS:
        words = ("-m", "pytest", "-p", "no:cacheprovider", *several, "tests/backends/test_cpu.py", "-k", name)
        code, said = command(sys.executable, *words, OMP_NUM_THREADS="1")
        last = next((line for line in said.splitlines()[::-1] if " in " in line and line[:1].isdigit()), "nothing")
        results.add(
            f"contract {name}: {last}",
            part="contract",
            name=name,
            ok=code == 0,
            last=last,
            said=said[-6000:] if code else "",
        )


def bits(results: Results) -> None:
    """Calls of the contract in bf16 whose results are not those of the emulation, bit by bit."""
    other = library.Library(BUILD / "libtilewise_cpu_emulated.so")
    if not {AMX, EMULATED} <= {*library.load().isas, *other.isas}:
        return results.add("bits: no AMX here", part="bits", ok=None)
    differ, named = [], [x for x in cases.tagged("contract") if x.dtype in ("float32", "bfloat16")]
    for case in named:
        c = of_case(replace(case, dtype="bfloat16"))
        found = testing.results(Cpu(isa=AMX), c)
        expected = with_library(other, c)
        differ += [f"{case.name} {name}" for name in found if not torch.equal(found[name], expected[name])]
    return results.add(
        f"bits: {len(named)} calls, {len(differ)} results differ from the emulation's {differ[:5]}",
        part="bits", ok=not differ, calls=len(named), differ=differ,
    )  # fmt: skip


def with_library(loaded: library.Library, c: Call) -> dict[str, torch.Tensor]:
    before, library.load = library.load, lambda: loaded
    try:
        return testing.results(Cpu(isa=EMULATED), c)
    finally:
        library.load = before


# -- How fast? -----------------------------------------------------------------------------------------------------


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
        "forward": lambda: backend.forward(c.p, c.t),
        "backward": lambda: backend.backward(c.p, c.t, out, c.do, c.dlse),
    }


def drawn(shape: tuple) -> Call:
    batch, heads, n, d, causal = shape
    return call(*(torch.randn(batch, n, heads, d).bfloat16() for _ in range(3)), causal=causal)


def named(shape: tuple) -> str:
    return "B{} H{} N{} D{}".format(*shape) + (" causal" if shape[-1] else "")


def timed(results: Results) -> None:
    sets = [isa for isa in (AMX, DOTS) if isa in library.load().isas]
    every = torch.get_num_threads()
    for threads in sorted({min(2, every), every}, reverse=True):
        torch.set_num_threads(threads)
        results.add(f"time: {threads} threads", part="limits", threads=threads, **limits("cpu", torch.bfloat16))
        for shape in SHAPES:
            batch, heads, n, d, causal = shape
            if threads < every and n > 2048:
                continue
            if results.late:
                return results.add("time: out of time", part="time", ok=None)
            c = drawn(shape)
            calls = {isa: ours(c, Cpu(isa=isa)) for isa in sets} | {"sdpa": sdpa(c, causal)}
            work = batch * heads * d * (n * (n + 1) / 2 if causal else n * n)
            for direction, flops in FLOPS.items():
                ms = in_turns({name: x[direction] for name, x in calls.items()}, "cpu", 5, 100.0)
                text = "   ".join(f"{name} {x:.2f} ms {flops * work / x / 1e6:.0f}" for name, x in ms.items())
                row = {
                    "threads": threads,
                    "shape": named(shape),
                    "direction": direction,
                    "ms": ms,
                    "flops": flops * work,
                }
                results.add(f"{named(shape)} {direction}: {text} GFLOP/s", part="time", **row)
    return torch.set_num_threads(every)


def tune(results: Results) -> None:
    """Tiles other than config's, on all threads."""
    isa = AMX if AMX in library.load().isas else DOTS
    for shape in TUNED:
        c = drawn(shape)
        chosen = Cpu(isa=isa).config(c.p)
        forward = {f"{m}x{n}": replace(chosen, tile_m=m, tile_n=n) for m, n in FORWARD_TILES}
        backward = {f"{m}x{n}": replace(chosen, backward_m=m, backward_n=n) for m, n in BACKWARD_TILES}
        for direction, tried in (("forward", forward), ("backward", backward)):
            if results.late:
                return results.add("tune: out of time", part="tune", ok=None)
            calls = {
                name: ours(c, Cpu(override=config))[direction] for name, config in {"chosen": chosen, **tried}.items()
            }
            ms = in_turns(calls, "cpu", 5, 30.0)
            text = "   ".join(f"{name} {x:.2f}" for name, x in ms.items())
            row = {"shape": named(shape), "isa": isa, "direction": direction, "chosen": chosen.describe(), "ms": ms}
            results.add(f"tune {named(shape)} {direction}, ms: {text}", part="tune", **row)
    return None


def decode(results: Results) -> None:
    """One query, eight heads: chunks of keys other than config's, beside a sum over K and V."""
    for threads in sorted({min(2, torch.get_num_threads()), torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            for heads_k, n in ((1, 32768), (8, 4096), (8, 32768)):
                q, k, v = (torch.randn(1, m, h, 64).to(dtype) for m, h in ((1, 8), (n, heads_k), (n, heads_k)))
                c = call(q, k, v)
                chosen = Cpu().config(c.p)
                tried = {f"{split}": replace(chosen, split=split) for split in (0, 512, 1024, 2048, 4096)}
                tried |= {"dots": replace(chosen, isa=DOTS)} if chosen.isa == AMX else {}
                calls = {name: ours(c, Cpu(override=x))["forward"] for name, x in {"chosen": chosen, **tried}.items()}
                calls["read"] = lambda k=k, v=v: (k.sum(), v.sum())
                ms = in_turns(calls, "cpu", 7, 10.0)
                gigabytes = {name: 2 * n * heads_k * 64 * dtype.itemsize / x / 1e6 for name, x in ms.items()}
                text = "   ".join(f"{name} {x:.0f}" for name, x in gigabytes.items())
                shape = f"{threads} threads Hk{heads_k} Nk{n} {dtype}"
                results.add(f"decode {shape}, GB/s: {text}", part="decode", shape=shape, isa=chosen.isa, ms=ms)


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
    results = Results(options.out, options.minutes)
    loaded = library.load()
    if isinstance(loaded, str):
        raise SystemExit(loaded)
    results.add(f"instruction sets: {', '.join(loaded.isas)}", part="machine", isas=loaded.isas, machine=machine("cpu"))
    for name in options.parts.split(","):
        PARTS[name](results)


if __name__ == "__main__":
    main()
