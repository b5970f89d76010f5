"""`tilewise.jax` beside `jax.nn.dot_product_attention`: `python -m bench.jax_door --out FILE`, with `--device cuda` beside XLA's cuDNN.

Both are compiled, and first judged against float64. On the CPU each has one thread, set before the start:

export OMP_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

A time there is the processor's, which other processes disturb least. On a GPU a program calls attention several times, each on the result
of the one before; its time over the number of calls is the GPU's of a large call, and the host's of one of a head of 128 rows. Times are
the least of rounds in turns. Memory is the largest that a call adds to a CPU's process while it runs, without its results.
"""

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import tilewise.jax as tw
from bench import script
from bench.measure import PeakMemory, interleaved
from bench.records import MIB

PEERS = {"tilewise": "tilewise.jax.attention", "jax": "jax.nn.dot_product_attention"}
Call = Callable[..., Any]


class Row(NamedTuple):
    """A causal or full call, and how many of them a program has."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool = True
    calls: int = 1


ROWS = {
    "cpu": [Row(1, n, 8, 64, causal) for n, causal in product((2048, 4096), (False, True))],
    "cuda": [Row(16_384 // n, n, 16, d, calls=16) for d, n in product((128, 64), (1024, 4096, 16_384))]
    + [Row(1, 128, 1, 64, calls=64)],
}


def program(attend: Call, gradients: bool, calls: int) -> Call:
    """So many calls, forward or with their gradients."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        for _ in range(calls):
            q = attend(q, k, v)
        return q

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        for _ in range(calls):
            o, pull = jax.vjp(attend, q, k, v)
            q, k, v = pull(o)
        return q, k, v

    return jax.jit(both if gradients else forward)


def pair(row: Row, device: str) -> dict[str, Call]:
    """Attention of both contestants."""
    implementation = "cudnn" if device == "cuda" else None
    theirs = partial(jax.nn.dot_product_attention, is_causal=row.causal, implementation=implementation)
    return {"tilewise": partial(tw.attention, causal=row.causal), "jax": theirs}


def operands(row: Row, device: str) -> list[jax.Array]:
    shape, dtype = row[:4], jnp.bfloat16 if device == "cuda" else jnp.float32
    return [jax.random.normal(key, shape, dtype) for key in jax.random.split(jax.random.key(0), 3)]


def judge(row: Row, gradients: bool, device: str) -> None:
    """Raise if the largest error of ours in a short call is more than twice JAX's."""
    row = row._replace(batch=1, seqlen=min(row.seqlen, 512))
    given, calls = operands(row, device), {who: program(f, gradients, 1) for who, f in pair(row, device).items()}
    with jax.enable_x64(True):
        plain = program(partial(jax.nn.dot_product_attention, is_causal=row.causal), gradients, 1)
        exact = jax.tree.leaves(plain(*[x.astype(jnp.float64) for x in given]))
        found = {who: jax.tree.leaves(call(*given)) for who, call in calls.items()}
        errors = {
            who: max(float(jnp.abs(x - y).max()) for x, y in zip(each, exact, strict=True))
            for who, each in found.items()
        }
    if not errors["tilewise"] <= 2 * errors["jax"]:
        raise SystemExit(f"{row}: largest errors {errors}")


def milliseconds(call: Call, given: list[jax.Array], calls: int, device: str) -> float:
    clock = time.perf_counter if device == "cuda" else time.process_time
    start = clock()
    jax.block_until_ready(call(*given))
    return 1e3 * (clock() - start) / calls


def mebibytes(call: Call, given: list[jax.Array]) -> float:
    with PeakMemory("cpu") as peak:
        results = jax.block_until_ready(call(*given))
    return (peak.bytes - sum(x.nbytes for x in jax.tree.leaves(results))) / MIB


def measured(log: script.Log, row: Row, gradients: bool, device: str) -> None:
    """Judge a row, and keep its times, and on a CPU its memory."""
    judge(row, gradients, device)
    given, calls = operands(row, device), {w: program(f, gradients, row.calls) for w, f in pair(row, device).items()}
    keep = partial(log.add, f"jax-n{row.seqlen}-d{row.head_dim}-{'causal' if row.causal else 'full'}")
    keep = partial(keep, direction="both" if gradients else "forward", shape=row._asdict())
    for who, call in calls.items():
        jax.block_until_ready(call(*given))
        if device == "cpu":
            keep(who=who, metric="memory", value=mebibytes(call, given))
    samples = {who: partial(milliseconds, call, given, row.calls, device) for who, call in calls.items()}
    rounds = 5 if device == "cuda" else max(3, 40 * 2048**2 // row.seqlen**2)
    for who, found in interleaved(samples, rounds).items():
        keep(who=who, metric="time", value=min(found))


def main() -> None:
    """Measure all rows."""
    options = script.parser(__doc__).parse_args()
    log = script.Log.begin("python -m bench.jax_door", options, PEERS, ("jax",), statistic="Least of rounds in turns.")
    for row, gradients in product(ROWS[options.device], (False, True)):
        measured(log, row, gradients, options.device)


if __name__ == "__main__":
    main()
