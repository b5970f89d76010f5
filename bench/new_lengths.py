"""Microseconds of the host a call where its lengths, or its mask's tensors, are new: `python -m bench.new_lengths --out FILE`.

A step of generation, a prompt, a batch of packed sequences: what they cost the host is not what a repeated call costs. Each row makes its
tensors first, waits for the device, and times the call alone, once for each set of tensors; *known* repeats one set. Beside each stands
`F.scaled_dot_product_attention` where it has such a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from bench import script

HEADS, KEY_HEADS, DIM = 16, 4, 64
PEERS = {"tilewise": "the public call", "sdpa": "F.scaled_dot_product_attention"}
CALLS, WARM = 120, 8  # of each row; those that are not counted: the second of a structure is recorded


class Row(NamedTuple):
    """A kind of call: ``make(n)`` gives the arguments of its n-th call, ``ours`` and ``sdpa`` make it."""

    make: Callable[[int], tuple]
    ours: Callable[..., Any]
    sdpa: Callable[..., Any] | None = None


def rows(device: str, dtype: torch.dtype) -> dict[str, Row]:
    """The rows by name."""
    new = partial(torch.randn, device=device, dtype=dtype)

    def decode(n: int) -> tuple:
        k = new(1, 700 + n, KEY_HEADS, DIM)
        return new(1, 1, HEADS, DIM), k, k

    def prompt(n: int) -> tuple:
        k = new(1, 200 + 3 * n, KEY_HEADS, DIM)
        return new(1, 200 + 3 * n, HEADS, DIM), k, k

    def packed(n: int) -> tuple:
        q, lengths = new(1024 + n, HEADS, DIM), torch.tensor([0, 100 + n, 500 + n, 1024 + n], dtype=torch.int32)
        return q, q[:, :KEY_HEADS], q[:, :KEY_HEADS], lengths.to(device)

    def training(n: int) -> tuple:
        q, k, v = (new(1, 64 + n, h, DIM).requires_grad_() for h in (HEADS, KEY_HEADS, KEY_HEADS))
        return q, k, v, torch.ones_like(q)

    def documents(n: int) -> tuple:
        k = new(1, 512, KEY_HEADS, DIM)
        return new(1, 512, HEADS, DIM), k, k, tw.documents((torch.arange(512, device=device) > 100 + n).int()[None])

    def lengths(n: int) -> tuple:
        k = new(2, 512, KEY_HEADS, DIM)
        return new(2, 512, HEADS, DIM), k, k, tw.key_lengths(torch.tensor([500 - n, 512], device=device))

    def dense(n: int) -> tuple:
        k, kept = new(1, 512, KEY_HEADS, DIM), torch.rand(1, 1, 512, 512, device=device) < 0.9
        return new(1, 512, HEADS, DIM), k, k, kept | torch.eye(512, dtype=torch.bool, device=device)

    def hidden(n: int) -> tuple:
        k = new(2, 512, KEY_HEADS, DIM)
        ends = torch.tensor([500 - n, 512], device=device).view(2, 1, 1, 1)
        return new(2, 512, HEADS, DIM), k, k, torch.arange(512, device=device) < ends

    def paged(n: int) -> tuple:
        pools, table = new(2, 64, 64, KEY_HEADS, DIM), torch.arange(64, device=device, dtype=torch.int32).view(4, 16)
        seqlens = torch.full((4,), 300 + n, device=device, dtype=torch.int32)
        return new(4, 1, HEADS, DIM), pools, table, seqlens, new(4, 1, KEY_HEADS, DIM)

    def over_pages(q: Tensor, pools: Tensor, table: Tensor, seqlens: Tensor, k: Tensor, append: bool) -> Tensor:
        cache = tw.paged(*pools, table, seqlens)
        if append:
            tw.append(cache, k, k)
        return tw.attention_paged(q, cache)

    def trainable(make: Callable[[int], tuple], n: int) -> tuple:
        q, k, v, mask = make(n)
        return *(x.clone().requires_grad_() for x in (q, k, v)), torch.ones_like(q), mask

    def trained(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, *mask: Any) -> tuple:
        return torch.autograd.grad(call(q, k, v, *mask), (q, k, v), do)

    causal, theirs = partial(tw.attention, causal=True), partial(_sdpa, is_causal=True)
    masked = lambda q, k, v, mask: tw.attention(q, k, v, mask=mask)  # noqa: E731
    their_mask = lambda q, k, v, mask: _sdpa(q, k, v, attn_mask=mask)  # noqa: E731
    return {
        "decode": Row(decode, causal, _sdpa),
        "prompt": Row(prompt, causal, theirs),
        "packed": Row(packed, lambda q, k, v, cu: tw.attention_varlen(q, k, v, cu, causal=True)),
        "training": Row(training, partial(trained, causal), partial(trained, theirs)),
        "documents": Row(documents, masked),
        "key_lengths": Row(lengths, masked),
        "dense mask": Row(dense, masked, their_mask),
        "training key_lengths": Row(partial(trainable, lengths), partial(trained, masked)),
        "training hidden keys": Row(partial(trainable, hidden), partial(trained, masked), partial(trained, their_mask)),
        "paged decode": Row(paged, partial(over_pages, append=False)),
        "append and paged decode": Row(paged, partial(over_pages, append=True)),
    }


def _sdpa(q: Tensor, k: Tensor, v: Tensor, **words: object) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **words).transpose(1, 2)


def microseconds(call: Callable[..., Any], given: Iterator[tuple], device: str) -> list[float]:
    """The host's time of each call; the device has done all that went before."""
    found = []
    for arguments in given:
        if device == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter_ns()
        call(*arguments)
        found.append((time.perf_counter_ns() - began) / 1e3)
    return found[WARM:]


def main() -> None:
    """Keep the median and the ninth decile of each row, by contestant, and by whether all is new or known."""
    parser = script.parser(__doc__)
    parser.add_argument("--only", nargs="*", help="names of rows")
    options = parser.parse_args()
    log = script.Log.begin("python -m bench.new_lengths", options, PEERS)
    shape = {"heads": HEADS, "heads_k": KEY_HEADS, "head_dim": DIM}
    for name, row in rows(options.device, torch.bfloat16).items():
        if options.only and name not in options.only:
            continue
        direction = "both" if name.startswith("training") else "forward"
        for who, call in zip(PEERS, (row.ours, row.sdpa), strict=True):
            if call is None:
                continue
            same = row.make(7)
            for what, given in (("new", map(row.make, range(CALLS))), ("known", repeat(same, CALLS))):
                us = microseconds(call, given, options.device)
                case, high = f"{what}-lengths-{name.replace(' ', '-')}", statistics.quantiles(us, n=10)[-1]
                log.add(case, who, direction, "host", statistics.median(us), high=round(high, 1), shape=shape)


if __name__ == "__main__":
    main()
