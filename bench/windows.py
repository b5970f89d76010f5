"""Shifted windows of images beside PyTorch on a GPU: `python -m bench.windows --out FILE`.

Attention in each window, with the bias of relative positions, which is trained, and the mask of regions (Liu et al. 2021, figure 4):
milliseconds of a forward, and of both passes. tilewise is judged on eight windows against float64 first.
"""

import math
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import tilewise as tw
from bench import script
from bench.triangles import Attend, eager, gradients, keep_times, runs

WINDOWS = [(2048, 49, 3, 32), (512, 144, 6, 32), (256, 256, 8, 32)]
"""How many, pixels, heads, head dim: of 32, 8 and 4 images."""
PEERS = {
    "tilewise": "tw.attention with a function of the regions as mask",
    "flex": "compiled flex_attention with bias and mask as its score_mod",
    "sdpa": "F.scaled_dot_product_attention with the sum of bias and mask, which is made in the call",
    "eager": "PyTorch's operators, with that sum",
}


def region_of(n: int) -> Tensor:
    """The region that each pixel of the four kinds of shifted windows comes from, int32 `(4, n)`."""
    side, place = math.isqrt(n), torch.arange(n, device="cuda")
    right, below = place % side >= side // 2, place // side >= side // 2
    return torch.stack([0 * place, right, 2 * below, right + 2 * below]).int()


def contestants(region: Tensor, count: int, dtype: torch.dtype) -> Iterator[tuple[str, Attend]]:
    """Contestants by name, of q, k, v `(windows, heads, n, d)` and a bias `(heads, n, n)`. The mask is made before the call."""
    same = tw.keep(lambda b, h, i, j: region[b % 4, i] == region[b % 4, j])
    hidden = (region[:, :, None] != region[:, None]).repeat(count // 4, 1, 1)[:, None]
    added = torch.zeros(hidden.shape, device="cuda", dtype=dtype).masked_fill(hidden, -math.inf)

    def flexible(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        kept = lambda s, b, h, i, j: torch.where(region[b % 4, i] == region[b % 4, j], s + bias[h, i, j], -math.inf)  # noqa: E731
        return flex_attention(q, k, v, score_mod=kept)

    def tiled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return tw.attention(q, k, v, mask=same, score=tw.bias(bias)).transpose(1, 2)

    torch._dynamo.reset()
    yield "tilewise", tiled
    yield "flex", torch.compile(flexible, dynamic=False)
    yield "sdpa", lambda q, k, v, bias: F.scaled_dot_product_attention(q, k, v, attn_mask=bias + added)
    yield "eager", lambda q, k, v, bias: eager(q, k, v, bias + added.to(bias.dtype))


def windows(log: script.Log, count: int, n: int, heads: int, d: int) -> None:
    dtype, region = torch.bfloat16, region_of(n)
    case, shape = f"windows-n{n}", {"windows": count, "seqlen": n, "heads": heads, "head_dim": d, "dtype": "bfloat16"}

    def inputs(count: int) -> list[Tensor]:
        qkv = (torch.randn(count, n, heads, d, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3))
        return [x.requires_grad_() for x in (*qkv, torch.randn(heads, n, n, device="cuda", dtype=dtype))]

    few = dict(contestants(region, 8, dtype))
    forward, both, given = {}, {}, inputs(count)
    do = torch.randn_like(given[0])
    for who, attend in contestants(region, count, dtype):
        if why := runs(few[who], inputs(8), few["eager"], who == "tilewise"):
            log.add(case, who, "both", "time", None, why=why, shape=shape)
            continue
        forward[who], both[who] = torch.no_grad()(partial(attend, *given)), partial(gradients, attend, given, do)
    keep_times(log, case, forward, "forward", None, shape)
    keep_times(log, case, both, "both", None, shape)


def main() -> None:
    """Measure all cases."""
    options = script.parser(__doc__, ("cuda",)).parse_args()
    torch.manual_seed(0)
    log = script.Log.begin("python -m bench.windows", options, PEERS)
    for case in WINDOWS:
        windows(log, *case)


if __name__ == "__main__":
    main()
