"""Each program computes attention: o, lse and the gradients by the project's error rule (tilewise.accuracy)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

import tilewise as tw
from tests.papers.cases import CASES, DROPOUT_P, DROPOUT_SEED, HEADS, Case, machine
from tilewise import problem
from tilewise.accuracy import Expected
from tilewise.backends.base import Inputs
from tilewise.spec import Options, assemble, parse_spec
from tilewise_papers import flash1, flash2, nested, split, standard, warps
from tilewise_papers.head import Blocks, Dropout, Head

Results = dict[str, np.ndarray]


def oracle(case: Case, allowed: np.ndarray | None = None) -> Expected:
    """Algorithm 0 on all heads of a case, in float64 and as eager fp32; allowed: the pairs of a further mask."""
    q, k, v, do = (torch.tensor(np.stack(x)).transpose(0, 1)[None] for x in case.tensors())
    options = Options(
        causal=case.causal,
        mask=None if allowed is None else tw.dense(torch.tensor(allowed)),
        softmax_scale=case.softmax_scale,
        dropout_p=DROPOUT_P if case.dropout else 0.0,
        dropout_seed=DROPOUT_SEED if case.dropout else None,
    )
    extras, seed, text = assemble(q, k, v, options)
    p = problem.check(q, k, v, extras, seed, parse_spec(text))
    dlse = torch.zeros(1, HEADS, case.seqlen_q)
    return Expected.of(p, Inputs.of(p, q, k, v, extras, seed), do.contiguous(), dlse)


def check(case: Case, run: Callable[[Head, np.ndarray], Results], allowed: np.ndarray | None = None) -> None:
    """Every output of run(head, do), all heads of a case together: a single small head would make errors a matter of luck."""
    found = [run(case.head(h), case.do(h)) for h in range(HEADS)]
    stacked = {name: torch.tensor(np.stack([one[name] for one in found])) for name in found[0]}
    results = {n: x[None, ..., 0] if n == "lse" else x.transpose(0, 1)[None] for n, x in stacked.items()}
    wrong = [str(error) for error in oracle(case, allowed).judge(results) if not error.ok]
    assert not wrong


def gradients(g) -> dict[str, np.ndarray]:
    return {"dq": g.dq, "dk": g.dk, "dv": g.dv}


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
def test_standard_attention_agrees_with_the_oracle(case: Case, fused: bool):
    def run(head: Head, do: np.ndarray) -> dict[str, np.ndarray]:
        out = standard.forward(machine(), head, case.blocks, fused=fused)
        return {"o": out.o, **gradients(standard.backward(machine(), head, out, do, case.blocks, fused=fused))}

    check(case, run)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_fused_inference_needs_no_p_to_give_the_same_output(case: Case):
    outs = [
        standard.forward(machine(), case.head(), case.blocks, fused=fused, training=training).o
        for fused in (False, True)
        for training in (False, True)
    ]
    for o in outs[1:]:
        np.testing.assert_array_equal(o, outs[0])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention_agrees_with_the_oracle(case: Case):
    def run(head: Head, do: np.ndarray) -> dict[str, np.ndarray]:
        out = flash1.forward(machine(), head, case.blocks)
        with np.errstate(divide="ignore"):
            lse = out.m + np.log(out.l)
        return {"o": out.o, "lse": lse, **gradients(flash1.backward(machine(), head, out, do, case.blocks))}

    check(case, run)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flash_attention_2_agrees_with_the_oracle(case: Case):
    def run(head: Head, do: np.ndarray) -> dict[str, np.ndarray]:
        out = flash2.forward(machine(), head, case.blocks)
        return {"o": out.o, "lse": out.lse, **gradients(flash2.backward(machine(), head, out, do, case.blocks))}

    check(case, run)


@pytest.mark.parametrize("case", [c for c in CASES if c.seqlen_q > c.blocks.rows], ids=str)
def test_block_sparse_attention_masks_the_blocks_it_leaves_out(case: Case):
    blocks = case.blocks
    grid = -(-case.seqlen_q // blocks.rows), -(-case.seqlen_k // blocks.cols)
    pattern = np.random.default_rng(2).random(grid) < 0.5
    pattern[0, :] = False  # a row of blocks that sees nothing
    allowed = np.repeat(np.repeat(pattern, blocks.rows, 0), blocks.cols, 1)[: case.seqlen_q, : case.seqlen_k]

    def run(head: Head, do: np.ndarray) -> dict[str, np.ndarray]:
        out = flash1.forward(machine(), head, blocks, pattern)
        return {"o": out.o, **gradients(flash1.backward(machine(), head, out, do, blocks, pattern))}

    check(case, run, allowed)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("split_keys", [5, 24, 1000])
def test_split_keys_and_merge_equal_the_whole(case: Case, split_keys: int):
    check(case, lambda head, do: vars(split.forward(machine(), head, case.blocks, split_keys)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("program", [warps.split_keys, warps.split_queries])
@pytest.mark.parametrize("count", [1, 4])
def test_warps_sharing_a_query_tile_agree_with_the_oracle(case: Case, program, count: int):
    check(case, lambda head, do: vars(program(machine(3), head, case.blocks, count)))


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("levels", [2, 3, 4])
def test_nested_tiles_agree_with_the_oracle_at_every_depth(case: Case, levels: int):
    blocks = [case.blocks, Blocks(8, 6), Blocks(4, 3)][: levels - 1]
    check(case, lambda head, do: vars(nested.forward(machine(levels), head, blocks)))


def test_one_nesting_level_is_flash_attention_2_bit_for_bit():
    case = CASES[2]
    a, b = machine(), machine()
    out = nested.forward(a, case.head(), [case.blocks])
    np.testing.assert_array_equal(out.o, flash2.forward(b, case.head(), case.blocks).o)
    assert a.counts.slow == b.counts.slow


def test_the_mask_of_dropout_is_applied_after_normalisation():
    case = CASES[0]
    head = case.head()
    none = Head(head.q, head.k, head.v, dropout=Dropout(np.ones(head.sizes, bool), 2.0))
    plain, doubled = (flash2.forward(machine(), h, case.blocks) for h in (head, none))
    np.testing.assert_array_equal(doubled.lse, plain.lse)
    np.testing.assert_allclose(doubled.o, 2 * plain.o, rtol=1e-6)


@pytest.mark.parametrize("program", [flash1.forward, flash2.forward], ids=["flash1", "flash2"])
def test_scores_of_thousands_do_not_overflow(program):
    case = replace(CASES[0], softmax_scale=1000.0)
    check(case, lambda head, do: {"o": program(machine(), head, case.blocks).o})


def test_block_sparse_refuses_a_pattern_of_another_grid():
    case = CASES[0]
    with pytest.raises(ValueError, match=r"blocks of 16 × 16 make \(4, 4\)"):
        flash1.forward(machine(), case.head(), case.blocks, np.ones((4, 3), bool))


def test_nested_needs_blocks_for_each_boundary():
    with pytest.raises(ValueError, match="3 levels have 2 boundaries, got 1"):
        nested.forward(machine(3), CASES[0].head(), [Blocks(8, 8)])
