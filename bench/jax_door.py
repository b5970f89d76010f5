"""`tilewise.jax` beside `jax.nn.dot_product_attention` on this machine's CPU, in one process and with one thread each:

export OMP_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
python -m bench.jax_door [N ...]

Each row is first judged against float64. A time is the processor's, which other processes disturb least, and the least of rounds that
alternate between the two. Memory is the largest that a call adds to the process while it runs, operands and results left out.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp

import tilewise.jax as tw
from bench.measure import PeakMemory, interleaved
from bench.records import MIB

HEADS, DIM, ROUNDS = 8, 64, 40  # rounds of N 2,048; longer ones have fewer
Call = Callable[..., object]


def calls(causal: bool, gradients: bool) -> list[Call]:
    """Ours and JAX's, compiled."""

    def attend(function: Call, word: str) -> Call:
        def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return function(q, k, v, **{word: causal})

        return jax.jit(jax.grad(lambda *x: jnp.sin(run(*x)).sum(), (0, 1, 2)) if gradients else run)

    return [attend(tw.attention, "causal"), attend(jax.nn.dot_product_attention, "is_causal")]


def milliseconds(call: Call, operands: list[jax.Array]) -> float:
    start = time.process_time()
    jax.block_until_ready(call(*operands))
    return 1e3 * (time.process_time() - start)


def mebibytes(call: Call, operands: list[jax.Array]) -> float:
    with PeakMemory("cpu") as peak:
        results = jax.block_until_ready(call(*operands))
    return (peak.bytes - sum(x.nbytes for x in jax.tree.leaves(results))) / MIB


def errors(pair: list[Call], operands: list[jax.Array]) -> list[float]:
    """The largest error of ours and of JAX's against JAX's in float64."""
    with jax.enable_x64(True):
        exact = jax.tree.leaves(pair[1](*[x.astype(jnp.float64) for x in operands]))
        found = [jax.tree.leaves(f(*operands)) for f in pair]
        return [max(float(jnp.abs(x - y).max()) for x, y in zip(each, exact, strict=True)) for each in found]


def row(seqlen: int, causal: bool, gradients: bool) -> str:
    operands = [jax.random.normal(key, (1, seqlen, HEADS, DIM)) for key in jax.random.split(jax.random.key(0), 3)]
    pair = calls(causal, gradients)
    ours, theirs = errors(pair, operands)
    if not ours <= 2 * theirs:
        raise SystemExit(f"N {seqlen}: the largest error is {ours:.3g}, JAX's is {theirs:.3g}")
    rounds = max(3, ROUNDS * 2048**2 // seqlen**2)
    memory = [mebibytes(f, operands) for f in pair]
    samples = {n: partial(milliseconds, f, operands) for n, f in enumerate(pair)}
    times = [min(x) for x in interleaved(samples, rounds).values()]
    what = ("causal" if causal else "full") + (", forward and gradients" if gradients else ", forward")
    return f"| {seqlen:,} | {what} | {times[0]:.1f} | {times[1]:.1f} | {times[1] / times[0]:.1f} | {memory[0]:.0f} | {memory[1]:.0f} |"


def main(lengths: list[int]) -> None:
    print("| N | call | ours, ms | JAX's, ms | ratio | ours, MiB | JAX's, MiB |\n|---:|---|---:|---:|---:|---:|---:|")
    for case in product(lengths, (False, True), (False, True)):
        print(row(*case), flush=True)


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [2048])
