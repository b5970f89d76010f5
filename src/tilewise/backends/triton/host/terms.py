"""Operands of fp32 as three bf16 terms each, which matrix units can multiply (config.TERMS)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tilewise.backends.triton.config import TERMS
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.launched import Launched
from tilewise.backends.triton.host.plan import Plan, operand_strides
from tilewise.backends.triton.tiles import Tiles

TERM_ROWS = 16  # of a program that makes terms or adds them up
WRITTEN = {"q": "dq", "k": "dk", "v": "dv", "do": "o"}
"""The field of Tensors through which the kernel writes the terms of an operand."""


@dataclass
class TermsLaunch:
    """The launch that makes the terms of q, k, v and, in a backward, of do.

    An operand (.., heads, D) of fp32 becomes (.., heads, 3 D) of bf16, its terms side by side.

    Attributes:
        starts: the terms of each operand in one buffer for all, in bytes, multiples of 16.
        elements: of the buffer.
    """

    launched: Launched
    starts: dict[str, int]
    elements: int

    def relaunch(self, addresses: dict[str, int], like: Tensor) -> tuple[dict[str, int], Tensor]:
        """Makes the terms of the operands at these addresses.

        Returns:
            The addresses of the terms, by the operands' names; and the buffer that holds them, to be kept until they are read.
        """
        buffer = like.new_empty(self.elements, dtype=torch.bfloat16)
        begin = buffer.data_ptr()
        terms = {name: begin + start for name, start in self.starts.items()}
        self.launched(addresses | {WRITTEN[name]: x for name, x in terms.items()})
        return terms, buffer


def split_into_terms(plan: Plan, operands: dict[str, Tensor], steady: bool) -> tuple[dict[str, Tensor], TermsLaunch]:
    """The terms of each operand, and the launch that made them.

    Args:
        steady: whether every operand begins at a multiple of 16 bytes.
    """
    problem, tiles = plan.problem, Tiles(TERM_ROWS, TERM_ROWS, 4, 1, padded=True)
    terms = {
        name: x.new_empty((*x.shape[:-1], TERMS * x.shape[-1]), dtype=torch.bfloat16) for name, x in operands.items()
    }
    batch = problem.batch_dim

    def new_sizes():
        lengths = {name: getattr(problem, name) for name in ("heads_q", "heads_k", "seqlen_q", "seqlen_k")}
        strides = {name: operand_strides(x) for name, x in operands.items()}
        return runtime.opaque(runtime.kernels().Sizes(batch=batch, **lengths, **strides))

    key = ("terms", *[x.stride() for x in operands.values()])
    sizes = plan.sizes.of(key, new_sizes) if steady else new_sizes()
    programs = max(-(-x.shape[-3] // TERM_ROWS) * x.shape[-2] for x in operands.values()) * batch
    grid = (programs, len(operands))
    tensors = runtime.kernels().Tensors(**operands, **{WRITTEN[name]: x for name, x in terms.items()})
    bundles, facts = (tensors, sizes, plan.scales), plan.facts(tiles, 1)
    compiled = plan.start(runtime.kernels().terms, grid, tiles, *bundles, facts)
    *starts, elements = accumulate([-(-x.numel() // 8) * 8 for x in terms.values()], initial=0)
    size = torch.bfloat16.itemsize
    in_bytes = {name: size * start for name, start in zip(terms, starts, strict=True)}
    return terms, TermsLaunch(Launched.of(compiled, grid, bundles, (), facts), in_bytes, elements)
