"""Random calls: masks, scores and other options as they come together, beside the oracle.

    python -m tests.backends.random_calls {triton,cpu,portable,hopper} [--minutes 2] [--seed 1] [--longest 150] [--device cuda]

The contract has features one by one; a fault may need two of them, and tiles of one size. This is a search, not a test: of thousands of
calls some pass the rule of :mod:`tilewise.accuracy` by chance, where few numbers cancel, so it reports what is further from the oracle
than ``EXCESS`` times what that allows, with exit code 1. The same seed gives the same calls.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

import tilewise as tw
from tilewise import accuracy, dispatch
from tilewise.backends.base import Backend
from tilewise.testing import Call, call

EXCESS = 2.0
DTYPES = torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Shape:
    """The shape of a call, packed where it has ``lengths``, and what draws its tensors."""

    chance: random.Random
    device: str
    dtype: torch.dtype
    batch: int
    nq: int
    nk: int
    hq: int
    hk: int
    d: int
    dv: int
    lengths: tuple[tuple[int, int], ...] = ()

    @classmethod
    def drawn(cls, chance: random.Random, device: str, longest: int) -> Shape:
        batch, hk, group = chance.choice((1, 2, 3)), chance.choice((1, 2)), chance.choice((1, 1, 2, 3))
        nq, nk = chance.randint(1, longest), chance.randint(1, longest)
        nk, lengths = chance.choice((nk, nq)), ()
        if chance.random() < 0.2:
            lengths = tuple((chance.randint(0, longest // 3), chance.randint(0, longest // 3)) for _ in range(batch))
            nq, nk = (max(1, sum(side)) for side in zip(*lengths, strict=True))
        d = chance.choice((16, 24, 40) if device == "cpu" else (64, 80, 128, 256))
        dv = chance.choice((d, 16 if device == "cpu" else 64))
        return cls(chance, device, chance.choice(DTYPES), batch, nq, nk, hk * group, hk, d, dv, lengths)

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        seeded = torch.Generator().manual_seed(self.chance.getrandbits(32))
        return torch.randn(*size, generator=seeded).to(self.device, dtype)

    def leaf(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.normal(*size, dtype=dtype).requires_grad_()

    def any(self, *choices: int) -> int:
        return self.chance.choice(choices)

    @property
    def qkv(self) -> list[Tensor]:
        sizes = (self.nq, self.hq, self.d), (self.nk, self.hk, self.d), (self.nk, self.hk, self.dv)
        outer = () if self.lengths else (self.batch,)
        return [self.normal(*outer, *size, dtype=self.dtype) for size in sizes]


def _blocks(s: Shape) -> tw.Mask:
    side = s.any(8, 16, 32)
    return tw.keep(lambda b, h, i, j: (i // side + j // side) % 2 == 0)


def _dilated(s: Shape) -> tw.Mask:
    step = s.any(2, 3, 7)
    return tw.keep(lambda b, h, i, j: (i - j) % step == 0)


def _stripes(s: Shape) -> tw.Mask:
    step = s.any(17, 33)
    return tw.keep(lambda b, h, i, j: (j % step == 0) | (i // 16 == j // 16))


# Masks that follow from positions, of packed sequences too; and those that read tensors or the sizes of a batch.
MASKS: dict[str, Callable[[Shape], tw.Mask | None]] = {
    "none": lambda s: None,
    "causal": lambda s: tw.causal(),
    "window": lambda s: tw.window(s.chance.randint(1, 40), s.chance.randint(0, 20)),
    "prefix": lambda s: tw.prefix(s.any(1, 5, 40)),
    "window-or-first": lambda s: tw.window(s.chance.randint(2, 20), 0) | (tw.key_range(0, s.any(1, 5)) & tw.causal()),
    "blocks": _blocks,
    "causal-blocks": lambda s: _blocks(s) & tw.causal(),
    "causal-dilated": lambda s: _dilated(s) & tw.causal(),
    "stripes": _stripes,
    "causal-documents": lambda s: tw.keep(lambda b, h, i, j: i // 20 == j // 20) & tw.causal(),
    "key-range": lambda s: tw.key_range(*sorted(s.chance.randint(0, s.nk) for _ in range(2))),
}
OF_TENSORS: dict[str, Callable[[Shape], tw.Mask]] = {
    "dense": lambda s: tw.dense(s.normal(s.nq, s.nk) > 0),
    "dense-by-head": lambda s: tw.dense(s.normal(s.batch, s.hq, s.nq, s.nk) > 0),
    "key-lengths": lambda s: tw.key_lengths((s.normal(s.batch).abs() * s.nk / 2).clamp(max=s.nk).int()),
    "block-sparse": lambda s: tw.block_sparse(s.normal(-(-s.nq // 16), -(-s.nk // 16)) > 0, 16, 16),
}


def _table(s: Shape, size: int, index: Callable) -> tw.Score:
    table = s.leaf(s.hq, size)
    return tw.score(lambda x, b, h, i, j: x + table[h, index(i - j)])


def _rows(s: Shape) -> tw.Score:
    table = s.leaf(s.hq, s.nq + 1)
    return tw.score(lambda x, b, h, i, j: x * table[h, i])


def _columns(s: Shape) -> tw.Score:
    table = s.leaf(s.nk + 1)
    return tw.score(lambda x, b, h, i, j: x + table[j] * x)


SCORES: dict[str, Callable[[Shape], tw.Score | None]] = {
    "none": lambda s: None,
    "softcap": lambda s: tw.softcap(s.any(1, 5, 30)),
    "alibi": lambda s: tw.alibi(s.leaf(s.hq)),
    "near": lambda s: _table(s, 33, lambda distance: distance.clamp(-16, 16) + 16),
    "distances": lambda s: _table(s, 2 * (s.nq + s.nk), lambda distance: distance + s.nq + s.nk),
    "remainders": lambda s: _table(s, 9, lambda distance: distance % 9),
    "rows": _rows,
    "columns": _columns,
    "capped-near": lambda s: tw.softcap(8.0) >> SCORES["near"](s) >> SCORES["alibi"](s),
}
OF_PAIRS: dict[str, Callable[[Shape], tw.Score]] = {
    "bias": lambda s: tw.bias(s.leaf(s.batch, s.hq, s.nq, s.nk, dtype=s.dtype)),
    "bias-of-all": lambda s: tw.bias(s.leaf(s.nq, s.nk, dtype=s.chance.choice((s.dtype, torch.float32)))),
    "bias-by-head": lambda s: tw.bias(s.leaf(1, s.hq, s.nq, s.nk, dtype=s.dtype)),
    "bias-by-element": lambda s: tw.bias(s.leaf(s.batch, 1, s.nq, s.nk, dtype=s.dtype)),
}


def random_call(chance: random.Random, device: str, longest: int) -> tuple[str, Call]:
    """A call, and the names of its mask, its score and its options."""
    s = Shape.drawn(chance, device, longest)
    masks, scores = (MASKS, SCORES) if s.lengths else (MASKS | OF_TENSORS, SCORES | OF_PAIRS)
    mask, score = chance.choice([*masks]), chance.choice([*scores])
    options: dict[str, object] = {"mask": masks[mask](s), "score": scores[score](s)}
    if s.lengths:
        of_sides = zip(*s.lengths, strict=True)
        ends = [torch.tensor([0, *side], device=device).cumsum(0).int() for side in of_sides]
        options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    if chance.random() < 0.3:
        options["sink"] = s.normal(s.hq)
    if chance.random() < 0.25:
        options |= {"dropout_p": 0.3, "dropout_seed": chance.randint(0, 1000)}
    if chance.random() < 0.2:
        options["deterministic"] = True
    options = {name: x for name, x in options.items() if x is not None}
    return f"{mask}, {score}, {', '.join(options)}", call(*s.qkv, **options)


def faults(backend: Backend, c: Call) -> list[str]:
    """What is further from the oracle than chance explains."""
    out = backend.forward(c.p, c.t)
    results = accuracy.tensors(out, backend.backward(c.p, c.t, out, c.do, c.dlse))
    errors = accuracy.Expected.of(c.p, c.t, c.do, c.dlse).judge(results)
    within = (e.rms <= EXCESS * e.rms_allowed and e.max <= EXCESS * e.max_allowed for e in errors)  # NaN is not
    return [str(e) for e, ok in zip(errors, within, strict=True) if not ok]


def wrong_calls(backend: Backend, seed: int, device: str, longest: int) -> Iterator[str]:
    """For each supported call of an endless row "", or what is wrong with it."""
    chance = random.Random(seed)
    while True:
        names, c = random_call(chance, device, longest)
        if backend.unsupported(c.p):
            continue
        found = faults(backend, c)
        yield f"{names}: {c.p.describe()}: {'; '.join(found)}" if found else ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="random calls of a backend beside the oracle")
    parser.add_argument("backend", choices=("triton", "cpu", "portable", "hopper"))
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=int, default=150)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(arguments)
    if given.backend == "triton" and given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    backend, started, count, wrong = dispatch.backend(given.backend), time.perf_counter(), 0, 0
    for count, said in enumerate(wrong_calls(backend, given.seed, given.device, given.longest), 1):  # noqa: B007
        wrong += bool(said)
        if said:
            print(f"WRONG {said}", flush=True)
        if time.perf_counter() - started > 60 * given.minutes:
            break
    print(f"{given.backend}: {count} random calls, {wrong} wrong, {time.perf_counter() - started:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
