"""The CPU's AMX kernels on a machine that has them: are they right there, and what do the tile registers give.

    PYTHONPATH=src:. python3 bench/cpu_amx.py --out DIR [--parts tiles,contract,bits,time] [--minutes 9]

Needs cmake and a C++ compiler, no network. Builds the library and, for tests, the one with AMX in software; compares the
emulated instructions with the hardware's; runs the contract in bf16 with AMX forced; holds its results against the
emulation's, bit by bit; and times it beside AVX-512's bf16 dot products and PyTorch's SDPA (oneDNN, which uses AMX too). Writes
DIR/cpu_amx.jsonl, a line a result, and prints a short table. Where the machine has no AMX the parts say so, and the other
contestants are timed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from bench import cases
from bench.measure import ROOT, in_turns, limits, machine
from tests.backends.contract import Call, call, of_case, run
from tilewise.backends.cpu import Cpu, library

AMX, EMULATED, DOTS = "amxbf16", "amxbf16_emulated", "avx512bf16"
BUILD = ROOT / "build/native"
FLOPS = {"forward": 4, "backward": 10}  # a pair and a channel
SHAPES = [
    # batch, heads, N, D, causal
    (1, 8, 2048, 64, False), (1, 8, 2048, 64, True), (1, 8, 2048, 128, False), (1, 8, 2048, 128, True),
    (1, 8, 8192, 64, False), (1, 8, 8192, 64, True), (1, 8, 8192, 128, False), (1, 8, 8192, 128, True),
    (16, 8, 128, 64, False), (16, 8, 256, 64, False), (1, 2, 16384, 64, False), (1, 8, 4096, 80, True),
]  # fmt: skip


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
    words = ("-m", "pytest", "-p", "no:cacheprovider", "tests/backends/test_cpu.py", "-k", "TestAmx")
    code, said = command(sys.executable, *words)
    last = said.strip().splitlines()[-1] if said.strip() else "nothing"
    results.add(f"contract: {last}", part="contract", ok=code == 0, last=last, said=said[-6000:] if code else "")


def bits(results: Results) -> None:
    """Calls of the contract in bf16 whose results are not those of the emulation, bit by bit."""
    other = library.Library(BUILD / "libtilewise_cpu_emulated.so")
    if not {AMX, EMULATED} <= {*library.load().isas, *other.isas}:
        return results.add("bits: no AMX here", part="bits", ok=None)
    differ, named = [], [x for x in cases.tagged("contract") if x.dtype in ("float32", "bfloat16")]
    for case in named:
        c = of_case(replace(case, dtype="bfloat16"))
        found = run(Cpu(isa=AMX), c)
        expected = with_library(other, c)
        differ += [f"{case.name} {name}" for name in found if not torch.equal(found[name], expected[name])]
    return results.add(
        f"bits: {len(named)} calls, {len(differ)} results differ from the emulation's {differ[:5]}",
        part="bits", ok=not differ, calls=len(named), differ=differ,
    )  # fmt: skip


def with_library(loaded: library.Library, c: Call) -> dict[str, torch.Tensor]:
    before, library.load = library.load, lambda: loaded
    try:
        return run(Cpu(isa=EMULATED), c)
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


def ours(c: Call, isa: str) -> dict:
    backend = Cpu(isa=isa)
    out = backend.forward(c.p, c.t)
    return {
        "forward": lambda: backend.forward(c.p, c.t),
        "backward": lambda: backend.backward(c.p, c.t, out, c.do, c.dlse),
    }


def timed(results: Results) -> None:
    sets = [isa for isa in (AMX, DOTS) if isa in library.load().isas]
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        results.add(f"time: {threads} threads", part="limits", threads=threads, **limits("cpu", torch.bfloat16))
        for batch, heads, n, d, causal in SHAPES:
            if threads == 1 and n > 2048:
                continue
            if results.late:
                return results.add("time: out of time", part="time", ok=None)
            q, k, v = (torch.randn(batch, n, heads, d).bfloat16() for _ in range(3))
            c = call(q, k, v, causal=causal)
            calls = {isa: ours(c, isa) for isa in sets} | {"sdpa": sdpa(c, causal)}
            work = batch * heads * d * (n * (n + 1) / 2 if causal else n * n)
            for direction, flops in FLOPS.items():
                ms = in_turns({name: x[direction] for name, x in calls.items()}, "cpu", 5, 200.0)
                text = "   ".join(f"{name} {x:.2f} ms {flops * work / x / 1e6:.0f} GFLOP/s" for name, x in ms.items())
                shape = f"B{batch} H{heads} N{n} D{d}{' causal' if causal else ''}"
                row = {"threads": threads, "shape": shape, "direction": direction, "ms": ms, "flops": flops * work}
                results.add(f"{shape} {direction}: {text}", part="time", **row)
    return None


PARTS = {"tiles": tiles, "contract": contract, "bits": bits, "time": timed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--minutes", type=float, default=9)
    options = parser.parse_args()
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
