"""Calls that the table of cases does not hold: one feature each at a size of its own, and random ones."""

import random
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import tilewise as tw
from tilewise.testing import Call, call

Shape = tuple[int, int, int, int, int]
DROPOUT = {"dropout_p": 0.2, "dropout_seed": 2**40 + 7}
# The options of a call of a shape (batch, seqlen_q, seqlen_k, heads_q, heads_k), made on the device.
FEATURES: dict[str, Callable[[Shape, str], dict]] = {
    "lengths": lambda n, device: {"mask": tw.key_lengths(torch.tensor([n[2] // 2, n[2] - 5], device=device)[: n[0]])},
    "documents": lambda n, device: {
        "mask": tw.documents(torch.arange(n[2], device=device) // (n[2] // 4)) & tw.causal()
    },
    "prefix": lambda n, device: {"mask": tw.prefix(n[2] // 3)},
    "ranges": lambda n, device: {
        "mask": tw.key_range(torch.arange(n[3], device=device)[None] * (n[2] // 12), n[2] - 9)
    },
    "dropout": lambda n, device: DROPOUT,
    "dropout-causal": lambda n, device: DROPOUT | {"causal": True},
    "dropout-lengths": lambda n, device: DROPOUT | FEATURES["lengths"](n, device),
    "alibi": lambda n, device: {"score": tw.alibi(torch.rand(n[3], device=device)), "causal": True},
    "alibi-softcap": lambda n, device: {"score": tw.alibi(torch.rand(n[3], device=device)) >> tw.softcap(5.0)},
    "bias": lambda n, device: {"score": tw.bias(torch.randn(1, n[3], n[1], n[2], device=device, dtype=torch.bfloat16))},
    "relative": lambda n, device: {"score": _relative(torch.randn(n[3], 65, device=device))},
    "dense": lambda n, device: {"mask": torch.rand(n[1], n[2], device=device) > 0.5},
    "sparse": lambda n, device: {
        "mask": tw.block_sparse(tw.local_global(-(-n[1] // 128), -(-n[2] // 128), 1, 1), 128, 128)
    },
    "sparse-bias-dropout": lambda n, device: DROPOUT | FEATURES["sparse"](n, device) | FEATURES["bias"](n, device),
}
FEW = ("lengths", "dropout-causal", "dropout-lengths", "alibi-softcap", "relative", "sparse-bias-dropout")
"""Features that are checked at every head dim; the others at the first alone."""
TIMED = ("lengths", "documents", "dropout", "alibi", "bias", "sparse", "relative", "dense")
CAUSAL = ("documents", "alibi")
"""Timed features whose calls are causal: so is the plain call beside them."""


def _relative(table: Tensor) -> Callable:
    return lambda s, b, h, i, j: s + table[h, (i - j).clamp(-32, 32) + 32]


def with_feature(name: str, shape: Shape, head_dim: int, device: str, **more: object) -> Call:
    """A call of bf16 with one feature; an empty name: none."""
    generator = torch.Generator(device).manual_seed(head_dim)
    batch, nq, nk, hq, hk = shape
    sizes = (nq, hq), (nk, hk), (nk, hk)
    q, k, v = (torch.randn((batch, n, h, head_dim), generator=generator, device=device).bfloat16() for n, h in sizes)
    options = FEATURES[name](shape, device) if name else {}
    return call(q, k, v, **options, **more)


def features(shape: Shape, head_dims: tuple[int, ...], device: str) -> Iterator[tuple[str, Call]]:
    """Every feature at the first head dim, and a few at the others."""
    for d in head_dims:
        for name in FEATURES if d == head_dims[0] else FEW:
            yield f"{name}-{d}", with_feature(name, shape, d, device)


def random_call(chance: random.Random, device: str, longest: int = 3000) -> Call:
    """A call of random lengths, groups, head dims and masks of numbers; sometimes one query of many keys, sometimes packed."""
    d, group, heads = chance.choice((64, 96, 128, 192, 256)), chance.choice((1, 2, 4, 8)), chance.randrange(1, 6)
    window = tw.window(chance.randrange(500), chance.randrange(50))
    options = chance.choice(({}, {"causal": True}, {"mask": window}))

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    if chance.random() < 0.3:
        lengths = [(_length(chance, longest), _length(chance, longest)) for _ in range(chance.randrange(1, 50))]
        cu_q, cu_k = (torch.tensor([0, *x, 1], device=device).cumsum(0).int() for x in zip(*lengths, strict=True))
        q, k, v = (new(int(cu[-1]), h, d) for cu, h in ((cu_q, heads * group), (cu_k, heads), (cu_k, heads)))
        return call(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, deterministic=True, **options)
    batch, nq = chance.choice((1, 2)), chance.choice((1, 5, 128, chance.randrange(1, longest)))
    nk = chance.choice((1, 128, chance.randrange(1, longest), 7 * longest if nq < 6 else longest // 4))
    sizes = (nq, heads * group), (nk, heads), (nk, heads)
    return call(*(new(batch, n, h, d) for n, h in sizes), deterministic=True, **options)


def _length(chance: random.Random, longest: int) -> int:
    return chance.choice((0, 1, 17, 128, chance.randrange(1, longest // 2)))
