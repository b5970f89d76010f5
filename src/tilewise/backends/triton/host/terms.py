"""Operands of fp32 as three bf16 terms each, which matrix units can multiply (config.TERMS)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.backends.triton.config import TERMS
from tilewise.backends.triton.host import runtime
from tilewise.backends.triton.host.plan import Plan, operand_strides
from tilewise.backends.triton.host.runtime import KernelLaunch
from tilewise.backends.triton.tiles import Tiles

TERM_ROWS = 16  # of a program that makes terms or adds them up
WRITTEN = {"q": "dq", "k": "dk", "v": "dv", "do": "o"}
"""The field of Tensors through which the kernel writes the terms of an operand."""


def split_into_terms(plan: Plan, operands: dict[str, Tensor]) -> dict[str, Tensor]:
    """The terms of q, k, v and, in a backward, of do: an operand (.., heads, D) of fp32 becomes one of bf16, its terms side by side and
    each padded with zeros to a multiple of ``Plan.term_unit`` columns, in one buffer for all."""
    columns = {name: TERMS * -(-x.shape[-1] // plan.term_unit) * plan.term_unit for name, x in operands.items()}
    sizes = [math.prod(x.shape[:-1]) * columns[name] for name, x in operands.items()]
    each = [-(-n // 8) * 8 for n in sizes]  # so that each begins at a multiple of 16 bytes
    buffer = next(iter(operands.values())).new_empty(sum(each), dtype=torch.bfloat16)
    terms = {
        name: part[:n].view(*x.shape[:-1], columns[name])
        for (name, x), part, n in zip(operands.items(), buffer.split(each), sizes, strict=True)
    }
    key = ("terms", *[x.stride() for x in operands.values()])
    (launch,) = plan.launches.of(key, lambda: [_launch(plan, operands)])
    # One kernel, with dO and without: it reads no dO for which there are no programs.
    named = {"do": operands["q"], "o": terms["q"], "leaves": (), "grads": ()} | operands
    launch(named | {WRITTEN[name]: x for name, x in terms.items()}, runtime.aligned(operands.values()))
    return terms


def _launch(plan: Plan, operands: dict[str, Tensor]) -> KernelLaunch:
    """The launch that makes the terms of operands with these strides."""
    problem, tiles = plan.problem, Tiles(TERM_ROWS, 64, 4, 1)
    lengths = {name: getattr(problem, name) for name in ("heads_q", "heads_k", "seqlen_q", "seqlen_k")}
    strides = {name: operand_strides(x) for name, x in operands.items()}
    sizes = runtime.opaque(runtime.kernels().Sizes(batch=problem.batch_dim, dims=plan.dims, **lengths, **strides))
    programs = max(-(-x.shape[-3] // TERM_ROWS) * x.shape[-2] for x in operands.values()) * problem.batch_dim
    only = ("tile_m", "tile_n", "unit", "terms", "term_unit", "overlap")
    grid, facts = (programs, len(operands)), plan.facts(tiles, 1, only=only)
    scales = plan.scales._replace(numbers=())
    return KernelLaunch(runtime.kernels().terms, grid, tiles, sizes, scales, (), facts)
