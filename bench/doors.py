"""Calls of other packages by themselves and through tilewise's doors: the parts `doors` and `jax` of `bench.calls`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import varlen_attn

from bench.measure import PeakMemory, in_turns
from bench.records import MIB, Log
from tilewise.accuracy import judge
from tilewise.compat import flex_attention as our_flex
from tilewise.compat import torch_provider  # noqa: F401  registers the name
from tilewise.compat.sdpa import patch

SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"batch": 2, "heads_q": 8, "heads_k": 8, "seqlen": 1024, "head_dim": 64, "dtype": "float32"},
    "cuda": {"batch": 2, "heads_q": 16, "heads_k": 16, "seqlen": 4096, "head_dim": 128, "dtype": "bfloat16"},
}
PEERS, ROUNDS = {"own": "the package's own attention", "door": "the same call through tilewise"}, 15


class Row(NamedTuple):
    """Two calls of q, k, v `(batch, heads, seqlen, head_dim)`.

    Attributes:
        around: what the door needs around both passes.
        exact: what computes the same in float64, if `own` cannot.
        heads_first: heads lie before rows in memory, not behind them, as models' projections leave them.
    """

    own: Callable[..., Tensor]
    door: Callable[..., Tensor]
    around: Callable[[], Any] = nullcontext
    trains: bool = True
    exact: Callable[..., Tensor] | None = None
    heads_first: bool = False


@contextmanager
def provided() -> Iterator[None]:
    attention.activate_flash_attention_impl("tilewise")
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):  # on a GPU SDPA may choose others
        yield
    attention.restore_flash_attention_impl()


def attend(*qkv: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(*qkv, **options)


def of_torch(device: str) -> Iterator[tuple[str, Row]]:
    def encode(*qkv: Tensor, padding: Tensor) -> Tensor:
        return models[qkv[0].dtype](qkv[0].transpose(1, 2).flatten(2), src_key_padding_mask=padding)

    heads, n, dim, dtype = (SHAPES[device][name] for name in ("heads_q", "seqlen", "head_dim", "dtype"))
    layer = nn.TransformerEncoderLayer(heads * dim, heads, dropout=0.0, batch_first=True, device=device)
    models = {x: nn.TransformerEncoder(layer, 2).to(x).eval() for x in (torch.float64, getattr(torch, dtype))}
    short, long = (n // 4, n // 6), (n, 2 * n // 3)
    padding = {x: torch.arange(n, device=device) >= torch.tensor(x, device=device)[:, None] for x in (short, long)}
    window = lambda b, h, i, j: (i >= j) & (i - j < n // 4)  # noqa: E731
    blocks, our_blocks = (x.create_block_mask(window, None, None, n, n, device=device) for x in (flex, our_flex))
    compiled = partial(torch.compile(flex.flex_attention), block_mask=blocks)
    ours = partial(our_flex.flex_attention, block_mask=our_blocks)
    on_gpu = device != "cpu"  # where varlen_attn runs, and FlexAttention has gradients
    causal = partial(attend, is_causal=True)
    yield "SDPA, causal: the provider", Row(causal, causal, provided)
    yield "SDPA, causal, heads before rows: the provider", Row(causal, causal, provided, heads_first=True)
    if on_gpu:
        yield "`varlen_attn`, causal: the provider", Row(packed, packed, provided, exact=causal)
    padded = partial(attend, attn_mask=~padding[long][:, None, None])
    yield "SDPA, padded keys: `patch()`", Row(padded, padded, patch)
    for lengths, mask in padding.items():
        encoder = partial(encode, padding=mask)
        title = "two encoder layers, rows of {:,} and {:,}: `patch()`".format(*lengths)
        yield title, Row(encoder, encoder, patch, trains=False)
    yield f"FlexAttention, compiled, causal window of {n // 4:,}", Row(compiled, ours, trains=on_gpu)


def packed(*qkv: Tensor) -> Tensor:
    """Causal attention of sequences of one length, one behind the other."""
    batch, _, n, _ = qkv[0].shape
    cu = torch.arange(0, n * (batch + 1), n, device=qkv[0].device, dtype=torch.int32)
    o = varlen_attn(*[x.transpose(1, 2).flatten(0, 1) for x in qkv], cu, cu, n, n, window_size=(-1, 0))
    return o.unflatten(0, (batch, n)).transpose(1, 2)


def of_others() -> Iterator[tuple[str, Row]]:
    if find_spec("transformers"):
        import_module("tilewise.compat.transformers").register()
        named = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        module = nn.Module()
        module.is_causal, module.num_key_value_groups = True, 1
        calls = [lambda *x, f=named[name]: f(module, *x, None)[0].transpose(1, 2) for name in ("sdpa", "tilewise")]
        yield "transformers' `sdpa`, causal", Row(*calls)
    if find_spec("diffusers"):
        import_module("tilewise.compat.diffusers").register()
        theirs = import_module("diffusers.models.attention_dispatch")
        attention_of = lambda *x: theirs.dispatch_attention_fn(*[y.transpose(1, 2) for y in x]).transpose(1, 2)  # noqa: E731
        yield "diffusers' `native`", Row(attention_of, attention_of, lambda: theirs.attention_backend("tilewise"))


def results(attend: Callable[..., Tensor], inputs: list[Tensor], gradients: bool) -> list[Tensor]:
    """o, and with `gradients` those of half of its square."""
    with torch.set_grad_enabled(gradients):
        o = attend(*inputs)
        return [o, *torch.autograd.grad(o, inputs, o.detach())] if gradients else [o]


def measured(case: str, row: Row, log: Log) -> None:
    """Judge a row beside the package's own attention, which the error rule takes for eager, and keep its times."""
    shape, calls = SHAPES[log.device], {}
    *sizes, dtype = (shape[name] for name in ("batch", "seqlen", "heads_q", "head_dim", "dtype"))
    made = (torch.randn(sizes, device=log.device, dtype=getattr(torch, dtype)).transpose(1, 2) for _ in "qkv")
    inputs = [(x.contiguous() if row.heads_first else x).requires_grad_(row.trains) for x in made]
    doubles = [x.detach().double().requires_grad_(row.trains) for x in inputs]
    for training in (False, True)[: 1 + row.trains]:
        with torch.compiler.set_stance("force_eager"):
            exact = results(row.exact or row.own, doubles, training)
            own = results(row.own, inputs, training)
        with row.around():
            ours = results(row.door, inputs, training)
        wrong = [str(e) for e in (judge(case, x, y, [z]) for x, y, z in zip(ours, exact, own, strict=True)) if not e.ok]
        if wrong:
            raise SystemExit("\n".join(wrong))
        for who, attend in (("own", row.own), ("door", row.door)):
            calls[who, "both" if training else "forward"] = partial(results, attend, inputs, training)
    around = lambda of: row.around() if of[0] == "door" else nullcontext()  # noqa: E731
    log.race(case, calls, shape=shape, rounds=ROUNDS, around=around, clock=time.process_time)


def rows(device: str) -> Iterator[tuple[str, Callable[[Log], None]]]:
    """A row for each call of a package that is installed."""
    for case, row in (*of_torch(device), *of_others()):
        yield case, partial(measured, case, row)


# ---- JAX: `tilewise.jax` beside `jax.nn.dot_product_attention`, on a GPU beside XLA's cuDNN -------------------------------
#
# On one core: XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1". A GPU's program calls attention several
# times, each on the result of the one before: its time over their number is the GPU's of a large call, the host's of one of 128 rows.
# Memory is the largest that a call adds to a CPU's process while it runs, without its results.

JAX_PEERS = {"tilewise": "tilewise.jax.attention", "jax": "jax.nn.dot_product_attention"}


class JaxRow(NamedTuple):
    """A causal or full call, and how many of them a program has."""

    batch: int
    seqlen: int
    heads: int
    head_dim: int
    causal: bool = True
    calls: int = 1


JAX_ROWS = {
    "cpu": [JaxRow(1, n, 8, 64, causal) for n, causal in product((2048, 4096), (False, True))],
    "cuda": [JaxRow(16_384 // n, n, 16, d, calls=16) for d, n in product((128, 64), (1024, 4096, 16_384))]
    + [JaxRow(1, 128, 1, 64, calls=64)],
}


def program(attend: Callable, gradients: bool, calls: int = 1) -> Callable:
    """So many calls, forward or with their gradients."""
    import jax

    def forward(q: Any, k: Any, v: Any) -> Any:
        for _ in range(calls):
            q = attend(q, k, v)
        return q

    def both(q: Any, k: Any, v: Any) -> Any:
        for _ in range(calls):
            o, pull = jax.vjp(attend, q, k, v)
            q, k, v = pull(o)
        return q, k, v

    return jax.jit(both if gradients else forward)


def jax_pair(row: JaxRow, device: str) -> tuple[dict[str, Callable], list]:
    """Attention of both contestants, and their operands."""
    import jax
    import jax.numpy as jnp

    import tilewise.jax as ours

    implementation = "cudnn" if device == "cuda" else None
    theirs = partial(jax.nn.dot_product_attention, is_causal=row.causal, implementation=implementation)
    dtype, keys = jnp.bfloat16 if device == "cuda" else jnp.float32, jax.random.split(jax.random.key(0), 3)
    contestants = {"tilewise": partial(ours.attention, causal=row.causal), "jax": theirs}
    return contestants, [jax.random.normal(key, row[:4], dtype) for key in keys]


def jax_judged(row: JaxRow, gradients: bool, device: str) -> None:
    """Raise if the largest error of ours in a short call is more than twice JAX's."""
    import jax
    import jax.numpy as jnp

    contestants, given = jax_pair(row._replace(batch=1, seqlen=min(row.seqlen, 512)), device)
    found = {who: jax.tree.leaves(program(attend, gradients)(*given)) for who, attend in contestants.items()}
    with jax.enable_x64(True):
        plain = program(partial(jax.nn.dot_product_attention, is_causal=row.causal), gradients)
        exact = jax.tree.leaves(plain(*[x.astype(jnp.float64) for x in given]))
        errors = {
            who: max(float(jnp.abs(x - y).max()) for x, y in zip(o, exact, strict=True)) for who, o in found.items()
        }
    if not errors["tilewise"] <= 2 * errors["jax"]:
        raise SystemExit(f"{row}: largest errors {errors}")


def jax_measured(case: str, row: JaxRow, gradients: bool, log: Log) -> None:
    """Judge a row, and keep its times, and on a CPU its memory."""
    import jax

    jax_judged(row, gradients, log.device)
    contestants, given = jax_pair(row, log.device)
    keep = partial(log.add, case, direction="both" if gradients else "forward", shape=row._asdict())
    programs = {who: program(attend, gradients, row.calls) for who, attend in contestants.items()}
    calls = {who: lambda f=f: jax.block_until_ready(f(*given)) for who, f in programs.items()}
    for who, call in calls.items() if log.device == "cpu" else ():
        call()
        with PeakMemory("cpu") as peak:
            made = call()
        keep(who, metric="memory", value=(peak.bytes - sum(x.nbytes for x in jax.tree.leaves(made))) / MIB)
    rounds, clock = (
        (5, time.perf_counter) if log.device == "cuda" else (max(3, 40 * 2048**2 // row.seqlen**2), time.process_time)
    )
    for who, ms in in_turns(calls, "cpu", rounds, budget_ms=0.0, clock=clock).items():  # it waits for a GPU itself
        keep(who, metric="time", value=ms / row.calls)


def jax_rows(device: str) -> Iterator[tuple[str, Callable[[Log], None]]]:
    """The rows forward and with their gradients."""
    for row, gradients in product(JAX_ROWS[device], (False, True)):
        case = f"jax-n{row.seqlen}-d{row.head_dim}-{'causal' if row.causal else 'full'}"
        yield case, partial(jax_measured, case, row, gradients)
