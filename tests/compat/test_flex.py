"""FlexAttention's functions as they are: a catalogue of mask_mods and score_mods, each against torch's own FlexAttention and,
with the gradients of all that it captures, against plain formulas in float64. (On the CPU torch's has no backward.)"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

import tilewise as tw
from tests.compat.eager import F64, agree, attend, normal

B, H, HK, N, D = 2, 4, 2, 36, 16  # 36: a canvas of 6 by 6
W = 6
IDS = torch.tensor([0] * 10 + [1] * 3 + [2] * 15 + [3] * 8)
STARTS = torch.tensor([0, 10, 13, 28, 36])


@dataclass(frozen=True)
class Mod:
    """``make(*captured) -> (score_mod, mask_mod)``, either of them None; every floating captured tensor has a gradient."""

    make: Callable[..., tuple[Callable | None, Callable | None]]
    captured: tuple[Tensor, ...] = ()


def mask(mod: Callable) -> Mod:
    return Mod(lambda: (None, mod))


def score(mod: Callable) -> Mod:
    return Mod(lambda: (mod, None))


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(size: int) -> Callable:
    return lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() <= size


def prefix(n: int) -> Callable:
    return lambda b, h, q_idx, kv_idx: kv_idx < n


def same_document(inner: Callable) -> Callable:
    """``inner`` of positions within each document; ids and starts are captured."""

    def mod(b, h, q_idx, kv_idx):
        q_pos, kv_pos = q_idx - STARTS[IDS[q_idx]], kv_idx - STARTS[IDS[kv_idx]]
        return (IDS[q_idx] == IDS[kv_idx]) & inner(b, h, q_pos, kv_pos)

    return mod


def dilated(size: int, step: int) -> Callable:
    def mod(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= size) & (distance % step == 0)

    return mod


def row_major(n):
    return n // W, n % W


def by_tiles(n):
    """Row and column where tiles of 2 by 2 follow one another."""
    tile, inside = n // 4, n % 4
    return (tile // (W // 2)) * 2 + inside // 2, (tile % (W // 2)) * 2 + inside % 2


def by_bits(n):
    """Row and column of a Z-order curve: odd and even bits."""

    def even(x):
        x = x & 0x55555555
        x = (x | (x >> 1)) & 0x33333333
        return (x | (x >> 2)) & 0x0F0F0F0F

    return even(n >> 1), even(n)


def neighbourhood(position: Callable, size: int) -> Callable:
    """2-D: the ``size`` by ``size`` neighbours, the window pushed inside at the canvas's edge."""
    half = size // 2

    def mod(b, h, q_idx, kv_idx):
        (q_row, q_column), (row, column) = position(q_idx), position(kv_idx)
        centre = q_row.clamp(half, W - 1 - half), q_column.clamp(half, W - 1 - half)
        return ((centre[0] - row).abs() <= half) & ((centre[1] - column).abs() <= half)

    return mod


def sliding_tiles(b, h, q_idx, kv_idx):
    """Tiles of 4 see those at most one away, and the last four keys are text that all see."""
    near = torch.abs(torch.div(q_idx, 4).floor() - torch.div(kv_idx, 4).floor()) <= 1
    return near | (kv_idx >= N - 4)


def frames(b, h, q_idx, kv_idx):
    """The same token of any frame, and a prompt that sees and is seen by all."""
    prompt = 6
    same = ((q_idx - prompt) % 10 - (kv_idx - prompt) % 10).abs() < 2
    return torch.logical_or(torch.logical_or(q_idx < prompt, kv_idx < prompt), same)


def block_diffusion(b, h, q_idx, kv_idx):
    """18 noised tokens, then the 18 clean ones that they came from, in blocks of 3."""
    half, block = N // 2, 3
    noised_q, noised_k = q_idx < half, kv_idx < half
    q_block, k_block = (q_idx % half) // block, (kv_idx % half) // block
    own = (q_block == k_block) & (noised_q == noised_k)
    return own | ((q_block > k_block) & noised_q & ~noised_k) | ((q_block > k_block) & ~noised_q & ~noised_k)


def shared_prefix(b, h, q_idx, kv_idx):
    """The first document is a prompt of all the others."""
    own = (IDS[q_idx] == IDS[kv_idx]) & (q_idx >= kv_idx)
    return own | ((IDS[kv_idx] == 0) & (IDS[q_idx] != 0))


def per_batch_and_head(b, h, q_idx, kv_idx):
    lengths = torch.tensor([N, 20])
    return (kv_idx < lengths[b]) & ((kv_idx + q_idx) % (h + 1) == 0)


def never(b, h, q_idx, kv_idx):
    return q_idx.new_zeros((), dtype=torch.bool)


def tree() -> Callable:
    ancestors = torch.eye(N, dtype=torch.bool)
    for node in range(1, N):
        ancestors[node] |= ancestors[(node - 1) // 2]
    return lambda b, h, q_idx, kv_idx: ancestors[q_idx, kv_idx]


MASKS = {
    "causal": causal,
    "causal-in-torch": lambda b, h, q_idx, kv_idx: torch.ge(q_idx, kv_idx),
    "sliding-window": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 7),
    "prefix-lm": torch_flex.or_masks(prefix(9), causal),
    "global-and-window": torch_flex.or_masks(prefix(2), window(4), lambda b, h, q_idx, kv_idx: q_idx < 2),
    "document": lambda b, h, q_idx, kv_idx: IDS[q_idx] == IDS[kv_idx],
    "document-causal": same_document(causal),
    "document-window": same_document(torch_flex.and_masks(causal, window(5))),
    "dilated": dilated(12, 3),
    "dilated-causal": torch_flex.and_masks(dilated(12, 3), causal),
    "natten": neighbourhood(row_major, 3),
    "natten-tiled": neighbourhood(by_tiles, 3),
    "natten-morton": neighbourhood(by_bits, 3),
    "natten-5-and-causal": torch_flex.and_masks(neighbourhood(row_major, 5), causal),
    "sliding-tiles": sliding_tiles,
    "frames": frames,
    "block-diffusion": block_diffusion,
    "shared-prefix": shared_prefix,
    "per-batch-and-head": per_batch_and_head,
    "tree": tree(),
    "noop": torch_flex.noop_mask,
    "or-of-nothing-and-one": torch_flex.or_masks(never, causal),
    "nested-and-or": torch_flex.and_masks(torch_flex.or_masks(prefix(5), window(6)), torch_flex.or_masks(causal, prefix(3))),
}  # fmt: skip


def alibi(score, b, h, q_idx, kv_idx):
    return score + torch.exp2(-((h + 1) * 8.0 / H)) * (kv_idx - q_idx)


def softcap(cap: float) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap)


def then(*mods: Callable) -> Callable:
    def mod(score, b, h, q_idx, kv_idx):
        for one in mods:
            score = one(score, b, h, q_idx, kv_idx)
        return score

    return mod


class Capped(torch.autograd.Function):
    """``cap * tanh(score / cap)`` with a backward of its own, as FlexAttention's users write their softcaps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(score, cap):
        return cap * torch.tanh(score / cap)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        score, cap = ctx.saved_tensors
        t = torch.tanh(score / cap)
        dcap = grad * (t - score / cap * (1 - t * t))
        return (grad * (1 - t * t)).sum_to_size(score.shape), dcap.sum_to_size(cap.shape)


def relative_table(table: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score + table[h, (q_idx - kv_idx).clamp(-8, 8) + 8]


def buckets(table: Tensor) -> Callable:
    """T5's: exact up to 8, then logarithmic."""

    def mod(score, b, h, q_idx, kv_idx):
        distance = torch.clamp(q_idx - kv_idx, min=0)
        large = 8 + (torch.log(torch.clamp(distance, min=1) / 8) / math.log(4) * 8).to(torch.int64)
        return score + table[torch.where(distance < 8, distance, torch.clamp(large, max=15)), h]

    return mod


def graph(table: Tensor, distances: Tensor) -> Callable:
    return lambda score, b, h, q_idx, kv_idx: score + table[h, distances[b, q_idx, kv_idx]]


def edges(table: Tensor, types: Tensor, lengths: Tensor) -> Callable:
    """The mean of one number per edge of a path, unrolled."""

    def mod(score, b, h, q_idx, kv_idx):
        length = lengths[b, q_idx, kv_idx]
        total = 0.0
        for n in range(types.shape[-1]):
            total = total + torch.where(length > n, table[h, n, types[b, q_idx, kv_idx, n]], 0.0)
        return score + total / torch.clamp(length, min=1)

    return mod


def whole(n: int, *shape: int) -> Tensor:
    return torch.randint(n, shape, generator=torch.Generator().manual_seed(9))


SCORES = {
    "identity": score(torch_flex._identity),
    "alibi": score(alibi),
    "alibi-of-captured-slopes": Mod(
        lambda slopes: (lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs(), None),
        (normal(H, seed=5).abs(),),
    ),
    "softcap": score(softcap(2.0)),
    "relative-position": score(lambda score, b, h, q_idx, kv_idx: score + (q_idx - kv_idx) / 8),
    "relative-table": Mod(lambda t: (relative_table(t), None), (normal(H, 17, seed=5),)),
    "buckets": Mod(lambda t: (buckets(t), causal), (normal(16, H, seed=5),)),
    "bias-of-all": Mod(
        lambda t: (lambda score, b, h, q_idx, kv_idx: score + t[b, h, q_idx, kv_idx], None),
        (normal(B, H, N, N, seed=5),),
    ),
    "bias-per-head": Mod(
        lambda t: (lambda score, b, h, q_idx, kv_idx: score + t[h, q_idx, kv_idx], None), (normal(H, N, N, seed=5),)
    ),
    "temperature-per-head": Mod(
        lambda t: (lambda score, b, h, q_idx, kv_idx: score * torch.exp(t[h]), causal), (normal(H, seed=5),)
    ),
    "gates": Mod(
        lambda a, c: (lambda score, b, h, q_idx, kv_idx: score * a[b, q_idx].sigmoid() + F.silu(c[kv_idx]), None),
        (normal(B, N, seed=5), normal(N, seed=6)),
    ),
    "two-tables": Mod(
        lambda a, c: (then(relative_table(a), relative_table(c), softcap(3.0)), causal),
        (normal(H, 17, seed=5), normal(H, 17, seed=6)),
    ),
    "sandwich": Mod(
        lambda t, ratio: (lambda score, b, h, q_idx, kv_idx: score + t[q_idx - kv_idx + N - 1] * ratio[h], None),
        (normal(2 * N - 1, seed=5), normal(H, seed=6)),
    ),
    "packed-table": Mod(
        lambda t, starts: (
            lambda score, b, h, q_idx, kv_idx: score + t[starts[b] + q_idx] * t[starts[b] + kv_idx],
            None,
        ),
        (normal(B * N, seed=5), torch.arange(B + 1) * N),
    ),
    "table-of-the-longest": Mod(
        lambda t: (lambda score, b, h, q_idx, kv_idx: score + t[h, q_idx, kv_idx], causal),
        (normal(H, N + 4, N + 7, seed=5),),
    ),
    "graph-distances": Mod(lambda t, d: (graph(t, d), None), (normal(H, 6, seed=5), whole(6, B, N, N))),
    "graph-edges": Mod(
        lambda t, types, lengths: (edges(t, types, lengths), None),
        (normal(H, 3, 5, seed=5), whole(5, B, N, N, 3), whole(4, B, N, N)),
    ),
    "activation-gelu": score(lambda score, b, h, q_idx, kv_idx: torch.log(F.gelu(score) + 1)),
    "activation-relu": score(lambda score, b, h, q_idx, kv_idx: torch.log(F.relu(score) + 1)),
    "activation-softplus": score(lambda score, b, h, q_idx, kv_idx: F.softplus(score) - F.logsigmoid(score)),
    "causal-by-score": score(lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -float("inf"))),
    "masked-fill": score(lambda score, b, h, q_idx, kv_idx: score.masked_fill(q_idx < kv_idx, -math.inf)),
    "checkerboard": score(
        lambda score, b, h, q_idx, kv_idx: torch.where((q_idx - kv_idx) % 2 == 0, score * 0.5, torch.zeros_like(score))
    ),
    "autograd-function": Mod(
        lambda t: (lambda score, b, h, q_idx, kv_idx: Capped.apply(score, 1 + t[h].abs()), causal),
        (normal(H, seed=5),),
    ),
    "alibi-softcap-causal": Mod(lambda: (then(softcap(2.0), alibi), causal)),
    "table-natten": Mod(lambda t: (relative_table(t), neighbourhood(row_major, 3)), (normal(H, 17, seed=5),)),
    "bias-documents": Mod(
        lambda t: (lambda score, b, h, q_idx, kv_idx: score + t[h, q_idx, kv_idx], same_document(causal)),
        (normal(H, N, N, seed=5),),
    ),
}
CATALOGUE = {f"mask-{name}": mask(mod) for name, mod in MASKS.items()} | {f"score-{n}": m for n, m in SCORES.items()}


def qkv() -> tuple[Tensor, ...]:
    return tuple(normal(B, N, h, D, seed=n) for n, h in enumerate((H, HK, HK), 1))


def indices() -> list[Tensor]:
    sizes = (B, H, N, N)
    return [torch.arange(n).view([n if a == axis else 1 for a in range(4)]) for axis, n in enumerate(sizes)]


def evaluated(mod: Mod, arithmetic, q, k, v, *captured):
    """The mod called on tensors of indices."""
    score_mod, mask_mod = mod.make(*captured)
    kept = None if mask_mod is None else mask_mod(*indices())
    change = (lambda s: s) if score_mod is None else lambda s: score_mod(s, *indices())
    o, lse = attend(*(x.transpose(1, 2) for x in (q, k, v)), arithmetic, change=change, kept=kept)
    return o.transpose(1, 2), lse


def ours(mod: Mod, q, k, v, *captured):
    score_mod, mask_mod = mod.make(*captured)
    return tw.attention_with_lse(q, k, v, score=score_mod and tw.score(score_mod), mask=mask_mod and tw.keep(mask_mod))


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_mod_and_the_gradients_of_what_it_captures_agree_with_float64(name):
    mod = CATALOGUE[name]
    agree(lambda *x: ours(mod, *x), lambda a, *x: evaluated(mod, a, *x), (*qkv(), *mod.captured))


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_mod_gives_what_torchs_flex_attention_gives(name, monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # eager, by its own switch
    mod = CATALOGUE[name]
    q, k, v = (x.double() for x in qkv())
    captured = [x.double() if x.is_floating_point() else x for x in mod.captured]
    score_mod, mask_mod = mod.make(*captured)
    blocks = None if mask_mod is None else torch_flex.create_block_mask(mask_mod, B, H, N, N, device="cpu")
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o, aux = torch_flex.flex_attention(
        *heads_first,
        score_mod=score_mod,
        block_mask=blocks,
        enable_gqa=True,
        return_aux=torch_flex.AuxRequest(lse=True),
    )
    got, got_lse = ours(mod, q, k, v, *captured)
    visible = got_lse.isfinite()
    torch.testing.assert_close(
        got, o.transpose(1, 2).where(visible.transpose(1, 2).unsqueeze(-1), 0), rtol=1e-6, atol=1e-6
    )
    torch.testing.assert_close(got_lse[visible], aux.lse[visible], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [(20, 36), (36, 20)], ids=["more-keys", "more-queries"])
def test_indices_count_from_the_first_query_and_key_as_in_flex_attention(sizes, monkeypatch):
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    nq, nk = sizes
    q, k, v = normal(1, nq, 2, D, dtype=F64), normal(1, nk, 2, D, dtype=F64), normal(1, nk, 2, D, dtype=F64)
    blocks = torch_flex.create_block_mask(causal, 1, 1, nq, nk, device="cpu")
    expected = torch_flex.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=blocks, score_mod=alibi)
    got = tw.attention(q, k, v, mask=causal, score=alibi)
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=1e-6, atol=1e-6)


def test_mods_compose_with_the_catalogue():
    q, k, v = qkv()
    table = normal(H, 17, seed=5)
    mixed = {"mask": tw.keep(window(5)) & tw.causal(), "score": tw.score(relative_table(table)) >> tw.softcap(2.0)}
    mod = Mod(lambda t: (then(relative_table(t), softcap(2.0)), torch_flex.and_masks(window(5), causal)), (table,))
    torch.testing.assert_close(tw.attention(q, k, v, **mixed), ours(mod, q, k, v, table)[0])


def test_a_parameter_that_is_captured_trains():
    table = torch.nn.Parameter(normal(H, 17, seed=5))
    ours(SCORES["relative-table"], *qkv(), table)[0].square().sum().backward()
    assert table.grad.abs().min() > 0


def test_a_block_mask_is_refused_with_where_its_function_is():
    blocks = torch_flex.create_block_mask(causal, 1, 1, N, N, device="cpu")
    with pytest.raises(ValueError, match=r"BlockMask; give its \.mask_mod"):
        tw.attention(*qkv(), mask=blocks)
    torch.testing.assert_close(tw.attention(*qkv(), mask=blocks.mask_mod), tw.attention(*qkv(), causal=True))


def test_a_dot_product_inside_a_mod_names_head_dim_as_its_place():
    rows = normal(B, H, N, 4)
    mod = lambda score, b, h, q_idx, kv_idx: score + torch.dot(rows[b, h, q_idx], rows[b, h, kv_idx])  # noqa: E731
    with pytest.raises(NotImplementedError, match="append them to q and k"):
        tw.score(mod)


def test_an_autograd_function_that_cannot_be_traced_is_refused_by_what_it_does():
    cap = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"autograd\.Function that saves.*tw\.lookup\(tensor\)"):
        tw.score(lambda score, b, h, q_idx, kv_idx: Capped.apply(score, cap))
    q, k, v = qkv()
    o = tw.attention(q, k, v, score=lambda score, b, h, q_idx, kv_idx: Capped.apply(score, tw.lookup(cap)))
    (got,) = torch.autograd.grad(o.square().sum(), cap)
    (expected,) = torch.autograd.grad(
        tw.attention(q, k, v, score=lambda s, *_: cap * torch.tanh(s / cap)).square().sum(), cap
    )
    torch.testing.assert_close(got, expected)

    class Special(torch.autograd.Function):
        @staticmethod
        def forward(ctx, score):
            return torch.special.i0(score)

    with pytest.raises(NotImplementedError, match="special_i0"):
        tw.score(lambda score, b, h, q_idx, kv_idx: Special.apply(score))
