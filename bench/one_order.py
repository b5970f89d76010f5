"""What `deterministic="everywhere"` costs on a GPU, beside `True` and a free choice: `python -m bench.one_order --out FILE`.

Milliseconds of training with 16,384 tokens and a hidden size of 2,048, and of prompts and decoding over pages of 64 keys, in the same
rounds, bf16. Before a case is timed, a part of it is computed another way, and has to have the same bits.
"""

from functools import partial

import torch
from torch import Tensor

import tilewise as tw
from bench import script
from bench.measure import in_turns

WAYS = {"free": False, "deterministic": True, "everywhere": "everywhere"}
PEERS = {name: f"deterministic={value!r}" for name, value in WAYS.items()}
TOKENS, HIDDEN, PAGE, ROUNDS = 16_384, 2048, 64, 9
TRAINING = [(d, n, None) for d in (128, 64) for n in (2048, 4096, 16_384)]
TRAINING += [(d, 8192, window) for d in (128, 64) for window in (127, 1023, 4095)]
TRAINING += [(d, n, None) for d in (256, 192, 96) for n in (2048, 4096, 16_384)]
PAGED = {
    "prefill": [(1, 8192, 8192), (1, 2048, 8192)],
    "decode": [(64, 1, 1024), (8, 1, 4096), (64, 1, 4096), (1, 1, 4096), (1, 1, 16_384), (1, 1, 65_536), (8, 4, 4096)],
    "wide": [(64, 1, 4096), (8, 1, 4096)],
    "window": [(4, 2048, 8192), (64, 1, 4096), (8, 1, 16_384), (1, 1, 16_384)],
}
"""Sequences, queries of each, and keys; ``wide``: over tables with room for WIDE keys; ``window``: a query sees WINDOW keys before its
own."""
D256 = [(1, 8192, 8192), (1, 2048, 8192), (64, 1, 4096), (8, 1, 4096), (1, 1, 16_384)]  # the same, of head dim 256
WIDE, WINDOW = 131_072, 1023
HEADS = 32, 8


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=grad)


def times(log: script.Log, case: str, calls: dict, direction: str, shape: dict) -> None:
    for who, ms in in_turns(calls, "cuda", ROUNDS).items():
        log.add(case, who, direction, "time", ms, shape=shape)


def training(log: script.Log, d: int, n: int, window: int | None) -> None:
    batch, heads = TOKENS // n, HIDDEN // d  # 21 heads of 96, 10 of 192
    q, k, v = (randn(batch, n, heads, d, grad=True) for _ in range(3))
    do, forward, backward, mask = randn(batch, n, heads, d), {}, {}, tw.causal() & tw.window(left=window)
    for who, how in WAYS.items():
        attend = partial(tw.attention, q, k, v, mask=mask, deterministic=how)
        forward[who] = torch.no_grad()(attend)
        backward[who] = partial(torch.autograd.grad, attend(), (q, k, v), do, retain_graph=True)
    few = slice(n - 100, n)
    part = tw.attention(q[:1, few], k[:1], v[:1], mask=mask, deterministic="everywhere")
    assert torch.equal(part, forward["everywhere"]()[:1, few])
    case = f"one-order-d{d}-n{n}" + ("" if window is None else f"-window-{window}")
    shape = {"batch": batch, "seqlen": n, "heads": heads, "head_dim": d}
    times(log, case, forward, "forward", shape)
    times(log, case, backward, "backward", shape)


@torch.no_grad()
def paged(log: script.Log, kind: str, batch: int, queries: int, keys: int, d: int = 128) -> None:
    heads_q, heads_k = HEADS
    count = keys // PAGE
    k, v = (randn(batch * count, PAGE, heads_k, d) for _ in range(2))
    table = torch.randperm(batch * count, device="cuda").int().view(batch, count)
    room = torch.nn.functional.pad(table, (0, WIDE // PAGE - count)) if kind == "wide" else table
    cache = tw.PagedCache(k, v, room, torch.full((batch,), keys, device="cuda", dtype=torch.int32))
    q = randn(batch, queries, heads_q, d)
    mask = tw.causal() & tw.window(left=WINDOW if kind == "window" else None)
    calls = {who: partial(tw.attention_paged, q, cache, mask=mask, deterministic=how) for who, how in WAYS.items()}
    dense = (x[table[:1].long()].flatten(1, 2) for x in (k, v))
    prompt = torch.cat([randn(1, max(0, 200 - queries), heads_q, d), q[:1]], 1)  # in the kernels of prompts
    whole = tw.attention(prompt, *dense, mask=mask, deterministic="everywhere")
    assert torch.equal(whole[:, -queries:], calls["everywhere"]()[:1])
    shape = {
        "batch": batch,
        "seqlen_q": queries,
        "seqlen_k": keys,
        "heads_q": heads_q,
        "heads_k": heads_k,
        "head_dim": d,
    }
    times(log, f"one-order-{kind}-{batch}x{keys}-{queries}", calls, "forward", shape)


def main() -> None:
    """Measure all cases."""
    options = script.parser(__doc__, ("cuda",)).parse_args()
    torch.manual_seed(0)
    log = script.Log.begin("python -m bench.one_order", options, PEERS)
    for case in TRAINING:
        training(log, *case)
    for kind, cases in PAGED.items():
        for case in cases:
            paged(log, kind, *case)
    for case in D256:
        paged(log, "d256", *case, d=256)


if __name__ == "__main__":
    main()
