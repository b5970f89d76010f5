"""Calls of other packages by themselves and through tilewise's doors: `OMP_NUM_THREADS=1 python -m bench.doors --out FILE`.

Each is judged against the package's own in float64 first. A time is the processor's, which other processes disturb least, and the least of
rounds in turns. A package that is not installed has no row. JAX's door has `bench.jax_door`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import flex_attention as flex

from bench import script
from bench.measure import interleaved
from tilewise.accuracy import judge
from tilewise.compat import flex_attention as our_flex
from tilewise.compat import torch_provider  # noqa: F401  registers the name
from tilewise.compat.sdpa import patch

SHAPE = {"batch": 2, "heads_q": 8, "heads_k": 8, "seqlen": 1024, "head_dim": 64, "dtype": "float32"}
PEERS, ROUNDS = {"own": "the package's own attention", "door": "the same call through tilewise"}, 15


class Row(NamedTuple):
    """Two calls of q, k, v `(batch, heads, seqlen, head_dim)`; `around` is what the door needs around both passes."""

    own: Callable[..., Tensor]
    door: Callable[..., Tensor]
    around: Callable[[], Any] = nullcontext
    trains: bool = True


@contextmanager
def provided() -> Iterator[None]:
    attention.activate_flash_attention_impl("tilewise")
    yield
    attention.restore_flash_attention_impl()


def of_torch() -> Iterator[tuple[str, Row]]:
    def attend(*qkv: Tensor, **options: Any) -> Tensor:
        return F.scaled_dot_product_attention(*qkv, **options)

    def encode(*qkv: Tensor, padding: Tensor) -> Tensor:
        return models[qkv[0].dtype](qkv[0].transpose(1, 2).flatten(2), src_key_padding_mask=padding)

    layer = nn.TransformerEncoderLayer(512, 8, dropout=0.0, batch_first=True)
    models = {dtype: nn.TransformerEncoder(layer, 2).to(dtype).eval() for dtype in (torch.float64, torch.float32)}
    short, long = (torch.arange(1024) >= torch.tensor(lengths)[:, None] for lengths in ((256, 170), (1024, 682)))
    window = lambda b, h, i, j: (i >= j) & (i - j < 256)  # noqa: E731
    blocks, our_blocks = (x.create_block_mask(window, None, None, 1024, 1024, device="cpu") for x in (flex, our_flex))
    compiled = partial(torch.compile(flex.flex_attention), block_mask=blocks)
    ours = partial(our_flex.flex_attention, block_mask=our_blocks)
    for title, own, door, around in (
        ("SDPA, causal: the provider", partial(attend, is_causal=True), None, provided),
        ("SDPA, padded keys: `patch()`", partial(attend, attn_mask=~long[:, None, None]), None, patch),
        ("two encoder layers, rows of 256 and 170: `patch()`", partial(encode, padding=short), None, patch),
        ("two encoder layers, rows of 1,024 and 682: `patch()`", partial(encode, padding=long), None, patch),
        ("FlexAttention, compiled, causal window of 256", compiled, ours, nullcontext),
    ):
        yield title, Row(own, door or own, around, own.func is attend)


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
        call = lambda *x: theirs.dispatch_attention_fn(*[y.transpose(1, 2) for y in x]).transpose(1, 2)  # noqa: E731
        yield "diffusers' `native`", Row(call, call, lambda: theirs.attention_backend("tilewise"))


def run(row: Row, door: bool, inputs: list[Tensor], gradients: bool) -> tuple[float, list[Tensor]]:
    """The milliseconds of a call, and o with its gradients."""
    start = time.process_time()
    with row.around() if door else nullcontext(), torch.set_grad_enabled(gradients):
        o = (row.door if door else row.own)(*inputs)
        results = [o, *torch.autograd.grad(o.square().sum(), inputs)] if gradients else [o]
    return 1e3 * (time.process_time() - start), results


def measured(case: str, row: Row, log: script.Log) -> None:
    """Judge a row, and keep its times."""
    inputs = [torch.randn(2, 8, 1024, 64).requires_grad_(row.trains) for _ in range(3)]
    for training in (False, True)[: 1 + row.trains]:
        with torch.compiler.set_stance("force_eager"):  # the error rule is beside eager
            exact = run(row, False, [x.detach().double().requires_grad_(row.trains) for x in inputs], training)[1]
            own = run(row, False, inputs, training)[1]
        ours = run(row, True, inputs, training)[1]
        wrong = [str(e) for e in (judge(case, x, y, [z]) for x, y, z in zip(ours, exact, own, strict=True)) if not e.ok]
        if wrong:
            raise SystemExit("\n".join(wrong))
        samples = {who: partial(run, row, who == "door", inputs, training) for who in PEERS}
        for who, found in interleaved(samples, ROUNDS).items():
            log.add(case, who, "both" if training else "forward", "time", min(ms for ms, _ in found), shape=SHAPE)


def main() -> None:
    """Measure all rows."""
    options = script.parser(__doc__).parse_args()
    torch.manual_seed(0)
    options.device, said = "cpu", f"Least of {ROUNDS} rounds in turns."
    log = script.Log.begin("python -m bench.doors", options, PEERS, ("transformers", "diffusers"), statistic=said)
    for case, row in (*of_torch(), *of_others()):
        measured(case, row, log)


if __name__ == "__main__":
    main()
