"""Calls of other packages by themselves and through tilewise's doors: `OMP_NUM_THREADS=1 python -m bench.doors --out FILE`.

Each is judged against the package's own in float64 first. On a CPU a time is the processor's, which other processes disturb least, and the
least of rounds in turns; on a GPU it is the GPU's, and the median. A package that is not installed has no row. JAX's door has
`bench.jax_door`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import call
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.varlen import varlen_attn

from bench import script
from bench.measure import interleaved, seconds_per_call, steadiest
from tilewise.accuracy import judge
from tilewise.compat import flex_attention as our_flex
from tilewise.compat import torch_provider  # noqa: F401  registers the name
from tilewise.compat.sdpa import patch

SHAPES: dict[str, dict[str, Any]] = {
    "cpu": {"batch": 2, "heads_q": 8, "heads_k": 8, "seqlen": 1024, "head_dim": 64, "dtype": "float32"},
    "cuda": {"batch": 2, "heads_q": 16, "heads_k": 16, "seqlen": 4096, "head_dim": 128, "dtype": "bfloat16"},
}
PEERS, ROUNDS, CALLS = {"own": "the package's own attention", "door": "the same call through tilewise"}, 15, 5


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


def milliseconds(work: Callable[[], object], device: str) -> float:
    if device != "cpu":
        return 1e3 * seconds_per_call(work, CALLS, device)
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


def measured(case: str, row: Row, log: script.Log, device: str = "cpu") -> None:
    """Judge a row, and keep its times."""
    *sizes, dtype = (SHAPES[device][name] for name in ("batch", "seqlen", "heads_q", "head_dim", "dtype"))
    made = (torch.randn(sizes, device=device, dtype=getattr(torch, dtype)).transpose(1, 2) for _ in "qkv")
    inputs = [(x.contiguous() if row.heads_first else x).requires_grad_(row.trains) for x in made]

    def run(door: bool, use: Callable[[Callable[[], Any]], Any], gradients: bool) -> Any:
        with row.around() if door else nullcontext():
            return use(partial(results, row.door if door else row.own, inputs, gradients))

    for training in (False, True)[: 1 + row.trains]:
        with torch.compiler.set_stance("force_eager"):  # the error rule is beside eager
            doubles = [x.detach().double().requires_grad_(row.trains) for x in inputs]
            exact = results(row.exact or row.own, doubles, training)
            own = run(False, call, training)
        ours = run(True, call, training)
        wrong = [str(e) for e in (judge(case, x, y, [z]) for x, y, z in zip(ours, exact, own, strict=True)) if not e.ok]
        if wrong:
            raise SystemExit("\n".join(wrong))
        clock = partial(milliseconds, device=device)
        samples = {who: partial(run, who == "door", clock, training) for who in PEERS}
        for who, found in interleaved(samples, ROUNDS).items():
            log.add(
                case, who, "both" if training else "forward", "time", steadiest(found, device), shape=SHAPES[device]
            )


def main() -> None:
    """Measure all rows."""
    options = script.parser(__doc__).parse_args()
    torch.manual_seed(0)
    said = f"{'Least' if options.device == 'cpu' else 'Median'} of {ROUNDS} rounds in turns."
    log = script.Log.begin("python -m bench.doors", options, PEERS, ("transformers", "diffusers"), statistic=said)
    for case, row in (*of_torch(options.device), *of_others()):
        measured(case, row, log, options.device)


if __name__ == "__main__":
    main()
