"""The cost of other busy processes on a CPU, by how long OpenMP's threads spin: `python -m bench.busy --out FILE`.

Each setting is a process of its own, since OpenMP reads it when torch loads it: PyTorch's small operations (40 products of
256 x 1,024 with gelu), and tilewise's forward and backward (N 1,024, 8 heads of 64, fp32), first alone, then beside processes
that compute without end. Settings take turns, so that a change of the machine meets them all.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

from bench import records
from bench.measure import in_turns

SPINS = ("default", "100000", "1000", "0")


def workloads() -> dict:
    """The three calls that are timed, by the name of their case."""
    import torch
    import torch.nn.functional as F

    import tilewise as tw

    x, weights = torch.randn(256, 1024), torch.randn(4, 1024, 1024) / 32
    q, k, v = (torch.randn(1, 1024, 8, 64, requires_grad=True) for _ in range(3))

    def small_operations() -> None:
        y = x
        for n in range(40):
            y = F.gelu(y @ weights[n % 4])

    def forward() -> None:
        with torch.no_grad():
            tw.attention(q, k, v)

    def both() -> None:
        torch.autograd.grad(tw.attention(q, k, v).sum(), (q, k, v))

    return {"small-operations": small_operations, "busy-forward": forward, "busy-both": both}


@contextmanager
def busy(processes: int):
    """Runs so many processes that compute without end."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: sum(range(10**6))"]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def measured(spin: str) -> dict[str, float]:
    """Milliseconds of each workload in a new process with this setting."""
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {} if spin == "default" else {"GOMP_SPINCOUNT": spin}
    child = [sys.executable, "-m", "bench.busy", "--child"]
    return json.loads(subprocess.run(child, env=environment, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    """Measures every setting, quiet and busy, and prints or writes the medians."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--others", type=int, nargs="*", default=[0, 1, 2], help="numbers of busy processes")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(in_turns(workloads(), "cpu", options.rounds)))
        return
    peers = {"tilewise": "the public call", "torch": "a chain of small operations"}
    run = records.run("python -m bench.busy", "cpu", peers)
    lines: list[dict] = [run]
    for others in options.others:
        with busy(others):
            samples = [{spin: measured(spin) for spin in SPINS} for _ in range(options.rounds)]
        for spin in SPINS:
            ms = {case: statistics.median(sample[spin][case] for sample in samples) for case in samples[0][spin]}
            print(
                f"{others} others, GOMP_SPINCOUNT {spin:8}", "  ".join(f"{case} {t:.1f} ms" for case, t in ms.items())
            )
            for case, t in ms.items():
                who = "torch" if case == "small-operations" else "tilewise"
                way = "forward" if case == "busy-forward" else "both" if case == "busy-both" else "step"
                shape = {"others": others, "spin": spin}
                name = f"{case}-beside-{others}-spin-{spin}"
                lines.append(records.result(run["run"], name, who, way, "time", t, shape=shape))
    if options.out:
        records.append(lines, options.out)


if __name__ == "__main__":
    main()
