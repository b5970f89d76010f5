"""The Triton backend's kernels: mixtures of the candidates of its tiles, each compiled by the first call that needs it."""

from functools import partial

import torch

from bench import cases
from bench.testing import call, of_case
from tests.judge.subject import Kernel, Named, Scale, Subject
from tilewise.backends.triton import Triton
from tilewise.backends.triton.config import CANDIDATES, Config
from tilewise.backends.triton.tiles import Tiles

PASSES = ("forward", "dq", "dkdv", "dk", "dv")
# Calls beside the contract's: batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v; dtype, mask, score.
EXTRA = {
    "bf16-n1000-d64": ((2, 1000, 1000, 4, 2, 64, 64), "bfloat16", "causal", None),
    "bf16-n1000-d128": ((1, 1000, 1000, 4, 4, 128, 128), "bfloat16", "causal", None),
    "fp16-d256": ((1, 515, 700, 2, 2, 256, 256), "float16", "causal", None),
    "bf16-d512": ((1, 200, 300, 2, 2, 512, 512), "bfloat16", "causal", None),
    "bf16-d72": ((1, 515, 515, 2, 2, 72, 72), "bfloat16", "causal", None),
    "bf16-d80": ((1, 515, 515, 2, 2, 80, 80), "bfloat16", "causal", None),
    "bf16-d96": ((2, 515, 600, 4, 2, 96, 96), "bfloat16", "causal", None),
    "fp16-d160": ((1, 515, 515, 2, 2, 160, 160), "float16", None, None),
    "bf16-d192": ((1, 515, 515, 2, 1, 192, 192), "bfloat16", "causal", None),
    "bf16-d192-dv128": ((1, 515, 515, 2, 2, 192, 128), "bfloat16", "causal", None),
    "fp32-d96": ((1, 260, 260, 2, 2, 96, 96), "float32", "causal", None),
    "bf16-d8": ((1, 515, 515, 2, 2, 8, 8), "bfloat16", None, None),
    "fp32-d128": ((1, 515, 515, 2, 2, 128, 128), "float32", "causal", None),
    "fp32-d256": ((1, 260, 260, 2, 2, 256, 256), "float32", None, None),
    "bf16-window": ((1, 3000, 3000, 2, 1, 64, 64), "bfloat16", "window-512", "softcap-30"),
    "bf16-documents": ((2, 1500, 1500, 2, 2, 128, 128), "bfloat16", "documents", "alibi"),
    "bf16-sparse": ((1, 2000, 2000, 2, 2, 128, 128), "bfloat16", "sparse-90", "bias"),
    "bf16-decode": ((2, 1, 8000, 8, 2, 128, 128), "bfloat16", "causal", None),
    "bf16-one-head": ((1, 4096, 4096, 1, 1, 128, 128), "bfloat16", None, None),
    "bf16-decode-32k": ((2, 1, 32768, 16, 2, 128, 128), "bfloat16", "causal", None),
    "bf16-decode-d64": ((3, 1, 5000, 8, 1, 64, 64), "bfloat16", None, None),
    "bf16-decode-d96": ((3, 1, 5000, 8, 1, 96, 96), "bfloat16", None, None),
    "bf16-d256-bias": ((1, 515, 515, 2, 2, 256, 256), "bfloat16", "causal", "bias"),
    "bf16-softcap": ((2, 515, 515, 4, 2, 128, 128), "bfloat16", "causal", "softcap-30"),
    "fp16-softcap": ((2, 515, 600, 4, 2, 64, 64), "float16", "causal", "softcap-2"),
    "bf16-bias": ((2, 500, 504, 4, 2, 128, 128), "bfloat16", "causal", "bias"),  # rows of whole 16 bytes: by descriptor
    "bf16-bias-odd": ((2, 515, 515, 4, 2, 128, 128), "bfloat16", "causal", "bias"),
    "bf16-d256-gqa": ((2, 700, 700, 4, 1, 256, 256), "bfloat16", "causal", "softcap-30"),
}


def extra(name: str) -> cases.Case:
    shape, dtype, mask, score = EXTRA[name]
    options = {"dtype": dtype, "mask": mask, "score": score}
    return cases.Case(name=f"extra-{name}", source="GPU", **options, **dict(zip(cases.SIZES, shape, strict=True)))


def rows_of(kernel: str, head_dim: int) -> tuple[Tiles, ...]:
    """The candidates of one pass for a head dim."""
    return next(row[kernel] for widest, row in CANDIDATES["sm90"].items() if widest >= head_dim)


class TritonSubject(Subject):
    """`tilewise tune` times the candidates of its tiles; here they are checked."""

    compiles = True

    def __init__(self, scale: Scale):
        super().__init__("triton", scale)

    def kernels(self) -> list[Kernel]:
        """The n-th candidate of every pass at once, dK and dV in one pass and in two: so all of them are compiled."""
        head_dims = (*self.scale.head_dims, 96) if self.device == "cuda" else self.scale.head_dims
        return [kernel for d in head_dims for kernel in self._mixtures(d)]

    def _mixtures(self, d: int) -> list[Kernel]:
        found = []
        for n in range(max(len(rows_of(name, d)) for name in PASSES) if self.device == "cuda" else 1):
            for over_keys in (("dkdv",), ("dk", "dv")):
                rows = {name: rows_of(name, d) for name in ("forward", "dq", *over_keys)}
                mixed = Config.of({name: tiles[n % len(tiles)] for name, tiles in rows.items()})
                name, backend = f"d{d} {n} {'+'.join(over_keys)}", partial(Triton, mixed)
                found.append(Kernel(name, "both", d, backend, partial(self._calls, d)))
        return found

    def _calls(self, d: int) -> Named:
        generator = torch.Generator().manual_seed(0)
        q = torch.randn(1, 300 if self.device == "cuda" else 40, 2, d, generator=generator)
        q = q.to(self.device, torch.bfloat16)
        for mask in ("full", "causal"):
            yield mask, call(q, q.flip(1), q.flip(2), causal=mask == "causal")

    def contract(self) -> Named:
        yield from super().contract()
        for case in map(extra, EXTRA if self.device == "cuda" else ()):
            yield case.name, of_case(case, self.device)
