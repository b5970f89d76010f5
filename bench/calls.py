"""What is no case of `cases.py`, beside its peers: `python -m bench.calls PART --out FILE`, on a CPU with `OMP_NUM_THREADS=1`.

Contestants take turns. A time is the least of the rounds on a CPU, where it is the processor's, and the median on a GPU. Nothing is timed
whose results are further from float64 than the part allows, and a package that is not installed has no row. `--device cpu` rehearses the
parts that are meant for a GPU.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from bench import derivatives, doors, models, serving, testing
from bench.cases import Case, Inputs, draw, tagged
from bench.measure import host_microseconds
from bench.peers import flex_block_mask
from bench.records import Log, parser
from tilewise.backends.base import PerTensors
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host.padded_call import PaddedPlan
from tilewise.backends.hopper.host.plan import Plan

Rows = Iterable[tuple[str, Callable[[Log], None]]]
"""The rows of a part by name, as functions that keep their results."""


# ---- plans: how long a new mask takes until kernels know its tiles ------------------------------------------------------


def plan_for_kernels(x: Inputs, c: testing.Call, plans: Sequence[Plan]) -> None:
    """Makes a case's mask, and all that Hopper's kernels of both passes read of it, as if for the first time."""
    x.options()
    for plan in plans:
        plan.made = PerTensors()
        if isinstance(plan, PaddedPlan):
            plan.inputs(c.t)
        else:
            plan.kept(c.t.leaves)


def planned(case: Case, log: Log) -> None:
    """Keep the time of a new mask's plan, if Hopper runs the case, beside FlexAttention's, not compiled: that takes seconds a mask."""
    x = draw(case, log.device)
    c, backend = testing.call(x.q, x.k, x.v, do=x.do, **x.options()), Hopper()
    if backend.refused(c.p):
        return
    plans = backend._plan(c.p), backend._backward_plan(c.p)
    calls = {("tilewise", "forward"): partial(plan_for_kernels, x, c, plans)}
    if case.mask and not case.lengths:
        calls["flex", "forward"] = partial(flex_block_mask, x)
    log.race(case.name, calls, "plan", rounds=9, budget_ms=30.0, queued=False)


# ---- new-lengths: what a call costs the host whose lengths, or mask's tensors, are new -----------------------------------

HEADS, KEY_HEADS, DIM = 16, 4, 64
SIDES = {"tilewise": "the public call", "sdpa": "F.scaled_dot_product_attention"}
CALLS, WARM = 120, 8  # of each row; those that are not counted: the second of a structure is recorded


class Row(NamedTuple):
    """A kind of call: ``make(n)`` gives the arguments of its n-th call, ``ours`` and ``sdpa`` make it."""

    make: Callable[[int], tuple]
    ours: Callable[..., Any]
    sdpa: Callable[..., Any] | None = None


def host_rows(device: str) -> dict[str, Row]:
    """The rows by name."""
    new, on = partial(torch.randn, device=device, dtype=torch.bfloat16), {"device": device}
    int32 = {"device": device, "dtype": torch.int32}

    def qkv(batch: int, rows: int, keys: int) -> tuple:
        k = new(batch, keys, KEY_HEADS, DIM)
        return new(batch, rows, HEADS, DIM), k, k

    def packed(n: int) -> tuple:
        q = new(1024 + n, HEADS, DIM)
        return q, q[:, :KEY_HEADS], q[:, :KEY_HEADS], torch.tensor([0, 100 + n, 500 + n, 1024 + n], **int32)

    def lengths(n: int) -> tuple:
        return *qkv(2, 512, 512), tw.key_lengths(torch.tensor([500 - n, 512], **on))

    def dense(n: int) -> tuple:
        return *qkv(1, 512, 512), (torch.rand(1, 1, 512, 512, **on) < 0.9) | torch.eye(512, dtype=torch.bool, **on)

    def hidden(n: int) -> tuple:
        return *qkv(2, 512, 512), torch.arange(512, **on) < torch.tensor([500 - n, 512], **on).view(2, 1, 1, 1)

    def paged(n: int) -> tuple:
        pools, table = new(2, 64, 64, KEY_HEADS, DIM), torch.arange(64, **int32).view(4, 16)
        return new(4, 1, HEADS, DIM), pools, table, torch.full((4,), 300 + n, **int32), new(4, 1, KEY_HEADS, DIM)

    def over_pages(q: Tensor, pools: Tensor, table: Tensor, seqlens: Tensor, k: Tensor, append: bool) -> Tensor:
        cache = tw.paged(*pools, table, seqlens)
        if append:
            tw.append(cache, k, k)
        return tw.attention_paged(q, cache)

    def trainable(make: Callable[[int], tuple], n: int) -> tuple:
        q, k, v, *mask = make(n)
        return *(x.clone().requires_grad_() for x in (q, k, v)), torch.ones_like(q), *mask

    def trained(call: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, do: Tensor, *mask: Any) -> tuple:
        return torch.autograd.grad(call(q, k, v, *mask), (q, k, v), do)

    prompt, short = (lambda n: qkv(1, 200 + 3 * n, 200 + 3 * n)), (lambda n: qkv(1, 64 + n, 64 + n))
    documents = lambda n: (*qkv(1, 512, 512), tw.documents((torch.arange(512, **on) > 100 + n).int()[None]))  # noqa: E731
    causal, theirs = partial(tw.attention, causal=True), partial(_sdpa, is_causal=True)
    masked = lambda q, k, v, mask: tw.attention(q, k, v, mask=mask)  # noqa: E731
    their_mask = lambda q, k, v, mask: _sdpa(q, k, v, attn_mask=mask)  # noqa: E731
    return {
        "decode": Row(lambda n: qkv(1, 1, 700 + n), causal, _sdpa),
        "prompt": Row(prompt, causal, theirs),
        "packed": Row(packed, lambda q, k, v, cu: tw.attention_varlen(q, k, v, cu, causal=True)),
        "training": Row(partial(trainable, short), partial(trained, causal), partial(trained, theirs)),
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


def host_time(name: str, row: Row, log: Log) -> None:
    """Keep the median and the ninth decile by contestant, where all is new and where one set of tensors is repeated."""
    direction = "both" if name.startswith("training") else "forward"
    shape = {"heads": HEADS, "heads_k": KEY_HEADS, "head_dim": DIM}
    for who, call in zip(SIDES, (row.ours, row.sdpa), strict=True):
        for what, given in (
            (("new", map(row.make, range(CALLS))), ("known", repeat(row.make(7), CALLS))) if call else ()
        ):
            us = host_microseconds(call, given, log.device)[WARM:]
            case, high = f"{what}-lengths-{name.replace(' ', '-')}", statistics.quantiles(us, n=10)[-1]
            log.add(case, who, direction, "host", statistics.median(us), high=round(high, 1), shape=shape)


# ---- the parts -----------------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """Rows of a device, who takes part, and the packages whose versions a reader needs beside torch's."""

    rows: Callable[[str], Rows]
    peers: dict[str, str] | Callable[[str], dict[str, str]]
    packages: tuple[str, ...] = ()


PARTS = {
    "plans": Part(
        lambda device: [(case.name, partial(planned, case)) for case in tagged("masks")],
        {"tilewise": "a new mask, and what Hopper's kernels read of it", "flex": "FlexAttention's create_block_mask"},
    ),
    "new_lengths": Part(
        lambda device: [(name, partial(host_time, name, row)) for name, row in host_rows(device).items()], SIDES
    ),
    "doors": Part(doors.rows, doors.PEERS, ("transformers", "diffusers")),
    "jax": Part(doors.jax_rows, doors.JAX_PEERS, ("jax",)),
    "models": Part(models.rows, models.PEERS, ("transformers",)),
    "generate": Part(models.generate_rows, models.GENERATE_PEERS, ("transformers",)),
    "triangles": Part(models.block_rows, models.BLOCK_PEERS, ("cuequivariance-torch",)),
    "derivatives": Part(derivatives.rows, derivatives.contestants),
    **{part: Part(partial(serving.rows, part), serving.PEERS) for part in serving.PARTS},
}


def main(arguments: list[str] | None = None) -> None:
    """Keep the results of a part's rows."""
    found = parser(__doc__)
    found.add_argument("part", choices=PARTS)
    found.add_argument("--only", nargs="*", metavar="ROW", help="some rows, by name")
    options = found.parse_args(arguments)
    torch.manual_seed(0)
    part = PARTS[options.part]
    peers = part.peers(options.device) if callable(part.peers) else part.peers
    log = Log.begin(f"python -m bench.calls {options.part}", options, peers, part.packages)
    for name, measure in part.rows(options.device):
        if not options.only or name in options.only:
            measure(log)
            if options.device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
