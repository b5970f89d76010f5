"""`tilewise.jax` on a GPU beside XLA's cuDNN attention, in one process:

python -m bench.jax_gpu [N ...]

A program calls attention several times, each on the result of the one before. Its time over the number of calls is what a call takes: the
GPU's time of a large one, and the host's of a small one. Bfloat16, 16,384 rows in all, 16 heads, causal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import product

import jax
import jax.numpy as jnp

import tilewise.jax as tw
from tilewise.jax import gpu

ROWS, HEADS, ROUNDS, CALLS = 16_384, 16, 5, 16
Attend = Callable[..., jax.Array]


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return tw.attention(q, k, v, causal=True)


def program(attend: Attend, gradients: bool, calls: int) -> Callable[..., object]:
    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> object:
        for _ in range(calls):
            q = attend(q, k, v)
        return q

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> object:
        for _ in range(calls):
            o, pull = jax.vjp(attend, q, k, v)
            q, k, v = pull(o)
        return q, k, v

    return jax.jit(both if gradients else forward)


def microseconds(run: Callable[..., object], operands: list[jax.Array], calls: int) -> float:
    jax.block_until_ready(run(*operands))
    jax.block_until_ready(run(*operands))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(*operands))
        times.append(time.perf_counter() - start)
    return 1e6 * min(times) / calls


def operands(batch: int, seqlen: int, heads: int, dim: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(key, (batch, seqlen, heads, dim), jnp.bfloat16) for key in keys]


def row(seqlen: int, dim: int, gradients: bool) -> str:
    given = operands(ROWS // seqlen, seqlen, HEADS, dim)
    times = [microseconds(program(f, gradients, CALLS), given, CALLS) for f in (ours, cudnn)]
    what = "forward and gradients" if gradients else "forward"
    return f"| {seqlen:,} | {dim} | {what} | {times[0]:,.1f} | {times[1]:,.1f} | {times[0] - times[1]:+,.1f} |"


def small(gradients: bool) -> str:
    """The host's time of a call of 128 rows and one head: bound, through PyTorch, and cuDNN's."""
    calls, bind = 64, gpu._bound
    times = [microseconds(program(f, gradients, calls), operands(1, 128, 1, 64), calls) for f in (ours, cudnn)]
    gpu._bound = lambda *x: None  # another size, of which nothing is bound yet
    times.append(microseconds(program(ours, gradients, calls), operands(1, 192, 1, 64), calls))
    gpu._bound = bind
    what = "forward and gradients" if gradients else "forward"
    return f"host, {what}: bound {times[0]:.1f} us, cuDNN {times[1]:.1f} us, through PyTorch {times[2]:.1f} us"


def main(lengths: list[int]) -> None:
    print(jax.devices()[0].device_kind, jax.__version__, flush=True)
    for gradients in (False, True):
        print(small(gradients), flush=True)
    print("| N | head_dim | call | ours, us | cuDNN's, us | difference, us |\n|---:|---:|---|---:|---:|---:|")
    for dim, seqlen, gradients in product((128, 64), lengths, (False, True)):
        print(row(seqlen, dim, gradients), flush=True)


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:]] or [1024, 4096, 16_384])
