"""Shares of time beside shares of blocks: `python -m bench.shares --out FILE`, on a GPU.

Patterns of random blocks of 128 × 128 with their diagonal, one for all heads (FlashAttention, figure 2, right): milliseconds of a forward
and of a backward, beside no mask and beside a pattern that keeps every block. Results of one head are judged against float64
first.
"""

from functools import partial

import torch
from torch import Tensor

import tilewise as tw
from bench import script
from bench.measure import in_turns
from tilewise.accuracy import judge

BLOCK = 128
SHARES = (1.0, 0.5, 0.25, 0.125, 0.0625, 0.03125)
SIZES = [(8192, 16), (16384, 16), (32768, 8), (65536, 4)]
"""Tokens and heads."""
PEERS = {"hopper": "tw.attention with tw.block_sparse, backend='hopper'", "triton": "the same, backend='triton'"}


def pattern_of(n: int, share: float) -> Tensor:
    """About so many of the blocks, and the diagonal; bool `(n / BLOCK, n / BLOCK)`."""
    chance = torch.rand(n // BLOCK, n // BLOCK, generator=torch.Generator().manual_seed(0))
    return ((chance < share) | torch.eye(n // BLOCK, dtype=torch.bool)).cuda()


def made(n: int, heads: int, d: int) -> list[Tensor]:
    return [torch.randn(1, n, heads, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


def gradients(who: str, mask: tw.Mask | None, inputs: list[Tensor], do: Tensor) -> list[Tensor]:
    o = tw.attention(*inputs, mask=mask, backend=who)
    return [o, *torch.autograd.grad(o, inputs, do)]


def check(who: str, d: int) -> None:
    """Raise if results under a pattern of 4,096 tokens are wrong."""
    inputs, mask = made(4096, 1, d), tw.block_sparse(pattern_of(4096, 0.125), BLOCK, BLOCK)
    do = torch.randn_like(inputs[0])
    exact, own = (
        gradients("reference", mask, [x.detach().to(to).requires_grad_() for x in inputs], do.to(to))
        for to in (torch.float64, do.dtype)
    )
    for name, *of in zip("oqkv", gradients(who, mask, inputs, do), exact, [[x] for x in own], strict=True):
        assert judge(name, *of).ok, f"{who}, D {d}: {name} is wrong"


def measure(log: script.Log, n: int, heads: int, d: int) -> None:
    """Times of all shares of one size, in turns."""
    inputs = made(n, heads, d)
    do, calls, kept = torch.randn_like(inputs[0]), {"forward": {}, "backward": {}}, {}
    for who in PEERS:
        for share in (None, *SHARES):
            pattern = None if share is None else pattern_of(n, share)
            mask = None if pattern is None else tw.block_sparse(pattern, BLOCK, BLOCK).prepare(*inputs[:2])
            kept[share] = 1.0 if pattern is None else pattern.float().mean().item()
            call = partial(tw.attention, *inputs, mask=mask, backend=who)
            calls["forward"][who, share] = torch.no_grad()(call)
            calls["backward"][who, share] = partial(torch.autograd.grad, call(), inputs, do, retain_graph=True)
    for direction, timed in calls.items():
        for (who, share), ms in in_turns(timed, "cuda").items():
            shape = {"seqlen": n, "heads": heads, "head_dim": d, "dtype": "bfloat16", "kept": kept[share]}
            case = f"shares-d{d}-n{n}-{'whole' if share is None else f'{share:g}'}"
            log.add(case, who, direction, "time", ms, shape=shape)


def main() -> None:
    """Measure all sizes."""
    options = script.parser(__doc__, ("cuda",)).parse_args()
    torch.manual_seed(0)
    log = script.Log.begin("python -m bench.shares", options, PEERS)
    for d in (64, 128):
        for who in PEERS:
            check(who, d)
        for n, heads in SIZES:
            measure(log, n, heads, d)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
