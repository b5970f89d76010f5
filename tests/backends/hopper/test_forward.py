"""The Hopper forward's source on the emulated machine (:mod:`tests.backends.hopper.emulated`), against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewise as tw
from bench import cases
from tests.backends.contract import HIDING, Call, call, normal, of_case
from tests.backends.contract import qkv as contract_qkv
from tests.backends.hopper import emulated
from tests.backends.hopper.launches import stand_in, values_of
from tilewise import accuracy
from tilewise.backends.base import Output
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper import config as shared
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.forward.reasons import reasons
from tilewise.backends.hopper.forward.tiles import TABLE, Tiles
from tilewise.backends.hopper.host import forward_call as hopper
from tilewise.backends.hopper.host.draft import Draft
from tilewise.planning.tiles import Grid, seen_keys

SMALL = Tiles(64, 64, 2, 64, 3, 1, 240)  # many key blocks of few keys, the smallest ring


def without_gradient(c: Call) -> Call:
    return replace(c, p=replace(c.p, spec=replace(c.p.spec, needs_grad=False)))


def emulate(c: Call, tiles: Tiles | None, ctas: int, **flags) -> Output:
    """``flags``: of the Config, other than chosen."""
    chosen = replace(config.choose(c.p), **flags)
    tiles = tiles or chosen.tiles
    if chosen.form == "bits":  # of tiles of two warpgroups
        tiles = replace(tiles, warpgroups=2)
    tiles = replace(tiles, bias_stages=chosen.tiles.bias_stages)
    return emulate_kernel(c, replace(chosen, tiles=tiles), ctas)


def emulate_kernel(c: Call, x: config.Config, ctas: int) -> Output:
    plan, draft = hopper.ForwardPlan(c.p, x), Draft()
    given = plan.tensors(c.t)
    numbers = values_of(x.parameters[-1], plan.beside(draft), given, draft) | {"ctas": min(ctas, plan.grid.tiles)}
    keys = slice(plan.band.start, plan.band.stop)
    tensors = (given["q"], given["k"][:, keys], given["v"][:, keys])
    if c.p.packed:
        tensors = (x[None] for x in (c.t.q, c.t.k, c.t.v))
    q, k, v = (x.float().numpy() for x in tensors)
    sink = torch.full((c.p.heads_q,), torch.nan) if c.t.sink is None else c.t.sink.float()
    o, lse = emulated.run(plan.config, q, k, v, sink.numpy(), numbers)
    o, lse = torch.from_numpy(o).to(c.p.dtype), torch.from_numpy(lse)
    return Output(o[0], lse[0]) if c.p.packed else Output(o, lse)


def qkv(nq, nk, d=64, dv=None, heads=(4, 2), dtype=torch.bfloat16, batch=1):
    shapes = (batch, nq, heads[0], d), (batch, nk, heads[1], d), (batch, nk, heads[1], dv or d)
    return [normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes, 1)]


BUCKETS, TEMPERATURE = normal(4, 33), torch.tensor(1.5)
WORDS = normal(33, 4, dtype=torch.bfloat16, seed=9)  # biases as an embedding of distances has them
STEEP = torch.tensor([1.0, 0.1, -0.3, 0.0])  # ALiBi's slopes; one of them favours what is far away
RUNS = torch.tensor([0] * 70 + [1] + [2] * 199 + [3] * 30)
BIAS = normal(2, 4, 300, 400, dtype=torch.bfloat16, seed=7)  # of pairs, in q's dtype
LEAST = torch.finfo(torch.bfloat16).min


def pair_bias(shape: tuple[int, ...], *places: tuple, value: float = -torch.inf, dtype: torch.dtype = torch.bfloat16):
    """A bias by pair; ``value`` at these places."""
    bias = BIAS[tuple(slice(n) for n in shape)].to(dtype, copy=True)
    for place in places:
        bias[..., *place] = value
    return tw.bias(bias)


ODD, FEW, LATE, ALL = slice(None, None, 3), slice(5, 70), slice(90, None), slice(None)  # rows or keys
WIDE = normal(333, dtype=torch.float64).round(decimals=1)
CASES = {
    "full": (qkv(200, 333), {}),
    "one": (qkv(1, 1), {}),
    "decode": (qkv(1, 300, batch=2), {"causal": True}),
    "causal": (qkv(300, 300), {"causal": True}),
    "causal-wide": (qkv(150, 400), {"causal": True}),
    "causal-empty-rows": (qkv(400, 150), {"causal": True}),
    "window": (qkv(300, 300), {"mask": tw.window(70, 3)}),
    "window-left": (qkv(300, 420), {"mask": tw.window(100)}),
    "window-narrow": (qkv(200, 500), {"mask": tw.window(0, 0)}),
    "keys": (qkv(130, 300), {"mask": tw.key_range(37, 170) & tw.causal()}),
    "prefix": (qkv(200, 300), {"mask": tw.prefix(150)}),
    "prefix-lengths": (qkv(200, 200, batch=2), {"mask": tw.prefix(torch.tensor([3, 130]))}),
    "documents": (qkv(300, 300), {"mask": tw.documents(RUNS) & tw.causal()}),
    "documents-whole": (qkv(300, 300), {"mask": tw.documents(RUNS)}),  # ends that jump by several blocks within a tile
    "documents-wide": (qkv(150, 300), {"mask": tw.documents(RUNS)}),
    "documents-empty-rows": (qkv(400, 300), {"mask": tw.documents(RUNS)}),
    "lengths": (qkv(130, 300, batch=3), {"mask": tw.key_lengths(torch.tensor([170, 0, 300])) & tw.causal()}),
    "ranges-per-head": (qkv(130, 200), {"mask": tw.key_range(torch.tensor([[0, 9, 150, 70]]), 190)}),
    "keep": (qkv(200, 300), {"mask": tw.keep(lambda b, h, i, j: (i + 2 * j + h) % 5 < 2)}),
    "keep-causal": (qkv(300, 300), {"mask": tw.causal() & tw.keep(lambda b, h, i, j: (j // 70) % 2 == 0)}),
    "dense": (qkv(200, 333, batch=2), {"mask": normal(2, 1, 200, 333) > 0.5}),
    # Kernels read bits, whatever the numbers are of which these were made.
    "float64": (qkv(200, 333), {"mask": tw.keep(lambda b, h, i, j: WIDE[j] > 0.5 + 1e-12)}),
    "large-numbers": (qkv(130, 200), {"mask": tw.keep(lambda b, h, i, j: (i * 3_000_000_000 + j) % 7 < 5)}),
    "dense-empty": (qkv(130, 200), {"mask": torch.zeros(4, 130, 200, dtype=torch.bool)}),
    "block-sparse": (qkv(300, 300), {"mask": tw.block_sparse(tw.butterfly(5), 64, 64)}),
    "block-sparse-odd": (qkv(300, 200), {"mask": tw.block_sparse(normal(4, 8, 9) > 0.6, 38, 23)}),
    "union": (qkv(200, 200), {"mask": tw.window(30, 0) | tw.keep(lambda b, h, i, j: j < 9)}),
    "alibi": (qkv(300, 300), {"score": tw.alibi(torch.rand(4)), "causal": True}),
    "alibi-wide": (qkv(150, 400), {"score": tw.alibi(STEEP), "causal": True}),
    "bias": (qkv(130, 200, batch=2), {"score": tw.bias(normal(2, 4, 130, 200))}),
    "bias-keys": (qkv(130, 200), {"score": tw.bias(normal(1, 1, 1, 200).bfloat16()) >> tw.softcap(2.0)}),
    "buckets": (qkv(130, 200), {"score": lambda s, b, h, i, j: s + BUCKETS[h, (i - j).clamp(-16, 16) + 16]}),
    "table": (qkv(400, 400), {"score": lambda s, b, h, i, j: s + BUCKETS[h, (i - j).clamp(0, 32)], "causal": True}),
    "table-wide": (
        qkv(150, 500),
        {"score": lambda s, b, h, i, j: WORDS[(i + 350 - j) // 9 % 30, h] + s, "causal": True},
    ),
    "table-empty-rows": (
        qkv(400, 150),
        {"score": lambda s, b, h, i, j: s + BUCKETS[1, (i - j).clamp(260, 290) - 260], "causal": True},
    ),
    "table-both-ways": (
        qkv(260, 400, batch=2),
        {"score": lambda s, b, h, i, j: s + WORDS[(i - j).clamp(-16, 16) + 16, h]},
    ),
    "table-before": (qkv(130, 420), {"score": lambda s, b, h, i, j: s + BUCKETS[h, (i + 270 - j).clamp(0, 32)]}),
    "table-behind": (qkv(420, 130), {"score": lambda s, b, h, i, j: s + BUCKETS[h, (i - 270 - j).clamp(0, 32)]}),
    "table-outside": (qkv(200, 300), {"score": lambda s, b, h, i, j: s + BUCKETS[h, (i - 700 - j).clamp(0, 32)]}),
    "pair": (qkv(130, 200, batch=2), {"score": pair_bias((2, 4, 130, 200))}),
    "pair-shared": (qkv(300, 304, batch=2), {"score": pair_bias((1, 1, 300, 304)), "causal": True}),
    "pair-by-head": (qkv(130, 200, batch=2), {"score": lambda s, b, h, i, j: s + BIAS[1, h, i, j]}),
    "pair-by-batch": (qkv(130, 200, batch=2), {"score": lambda s, b, h, i, j: BIAS[b, 3, i, j] + s, "causal": True}),
    "pair-hides": (qkv(130, 400), {"score": pair_bias((1, 4, 130, 400), (ODD, FEW), (FEW, LATE), (slice(9, 12), ALL))}),
    "pair-hides-causal": (
        qkv(300, 304),
        {"score": pair_bias((1, 1, 300, 304), (ODD, FEW), (FEW, ALL)), "causal": True},
    ),
    "pair-least": (qkv(130, 400), {"score": pair_bias((1, 1, 130, 400), (ODD, FEW), (FEW, LATE), value=LEAST)}),
    "pair-least-rows": (qkv(200, 400), {"score": pair_bias((1, 1, 200, 400), (FEW, ALL), value=LEAST)}),
    "pair-and-mask": (qkv(130, 200), {"mask": normal(130, 200) > 0, "score": pair_bias((1, 4, 130, 200))}),
    "pair-and-window": (
        qkv(300, 304),
        {"mask": tw.window(70, 3) & tw.keep(lambda b, h, i, j: j % 7 < 5), "score": pair_bias((1, 4, 300, 304))},
    ),
    "pair-nan-above": (
        qkv(64, 64),
        {"score": pair_bias((1, 1, 64, 64), (0, slice(1, None)), value=torch.nan), "causal": True},
    ),
    "pair-fp16": (
        qkv(130, 200, dtype=torch.float16),
        {"score": pair_bias((1, 4, 130, 200), (ODD, FEW), dtype=torch.float16), "sink": normal(4, seed=8)},
    ),
    "pair-grows": (qkv(130, 400), {"score": tw.bias((BIAS[:1, :, :130] * torch.linspace(40, 1, 400)).bfloat16())}),
    "score-hides": (qkv(130, 200), {"score": lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, s, -torch.inf)}),
    "score-ignores-s": (qkv(130, 200), {"score": lambda s, b, h, i, j: BUCKETS[h, j % 33] * TEMPERATURE}),
    "scale": (qkv(130, 200), {"score": lambda s, b, h, i, j: -s, "softmax_scale": -0.3}),
    "keys-and-alibi": (qkv(130, 300), {"mask": tw.key_range(37, 170), "score": tw.alibi(torch.rand(4))}),
    "dropout": (qkv(150, 200, batch=2), {"dropout_p": 0.3, "dropout_seed": 2**63 + 12345, "causal": True}),
    "dropout-keys": (qkv(130, 200), {"dropout_p": 0.5, "dropout_seed": 7, "mask": tw.key_range(37, 170)}),
    "dropout-bias": (qkv(130, 200), {"dropout_p": 0.1, "dropout_seed": 1, "score": tw.bias(normal(4, 130, 200))}),
    "softcap": (qkv(130, 200), {"score": tw.softcap(2.0), "causal": True}),
    "sink": (qkv(130, 100), {"sink": normal(4, seed=8), "causal": True}),
    "narrow": (qkv(130, 200, d=40, dv=24), {"causal": True}),
    "fp16": (qkv(130, 200, dtype=torch.float16), {"causal": True}),
    "large-scores": (qkv(130, 400), {"softmax_scale": 5.0}),
}


def form_of(name: str) -> str:
    tensors, options = CASES[name]
    return config.keys_of(call(*tensors, **options).p)[0]


VARIANTS = {
    "one-q": SMALL,
    "two-q": replace(SMALL, q_stages=2, stages=4),
    "steady": replace(SMALL, warpgroups=3, stages=4, pingpong=True, steady=True),
}


@pytest.mark.parametrize("tiles", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("name", CASES)
def test_the_source_computes_attention(name, tiles):
    tensors, options = CASES[name]
    c = without_gradient(call(*tensors, **options))
    out = emulate(c, tiles, ctas=3)
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]


PLAIN_CASES = [
    name for name in CASES if form_of(name) in config.SHIPPED and not {"score", "dropout_p"} & set(CASES[name][1])
]
# Blocks of four stages and of two, O in two pieces: small, for head dims up to 64, and as it ships.
WIDE = {
    "small": replace(SMALL, stages=6, pieces=2, k_stages=4, v_stages=2),
    "turns": replace(SMALL, stages=6, pieces=2, k_stages=4, v_stages=2, pingpong=True),
    "shipped": TABLE[512, 512].full,
}


SEGMENTS = {
    "segments-of-one-block": replace(SMALL, segment=1),
    "segments-in-turns": replace(SMALL, warpgroups=3, stages=4, q_stages=2, pingpong=True, segment=2),
}


@pytest.mark.parametrize("tiles", (WIDE | SEGMENTS).values(), ids=WIDE | SEGMENTS)
@pytest.mark.parametrize("name", PLAIN_CASES)
def test_pieces_of_columns_parts_of_blocks_and_segments_of_keys_compute_attention(name, tiles):
    tensors, options = CASES[name]
    c = without_gradient(call(*tensors, **options))
    out = emulate(c, tiles, ctas=3, form=form_of(name), split=False)
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]


@pytest.mark.parametrize("window", [70, 128, 200])
@pytest.mark.parametrize("tiles", SEGMENTS.values(), ids=SEGMENTS)
def test_the_last_rows_have_the_bits_of_all_and_no_nan_of_keys_before_their_window(tiles, window):
    q, k, v = qkv(333, 333)
    options = {"mask": tw.causal() & tw.window(left=window), "deterministic": "everywhere"}
    whole = emulate(without_gradient(call(q, k, v, **options)), tiles, ctas=3)
    first = 333 - 90
    k, v = (torch.cat([torch.full_like(x[:, : first - window], torch.nan), x[:, first - window :]], 1) for x in (k, v))
    few = emulate(without_gradient(call(q[:, first:], k, v, **options)), tiles, ctas=3)
    cu_q, cu_k = torch.tensor([0, 2, 92]), torch.tensor([0, 40, 373])
    packed = [torch.cat([x[0, :n], x[0]]) for x, n in ((q[:, first:], 2), (k.nan_to_num(), 40), (v.nan_to_num(), 40))]
    packed[1][40:], packed[2][40:] = k[0], v[0]
    beside = emulate(without_gradient(call(*packed, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)), tiles, ctas=3)
    for o, lse in ((few.o[0], few.lse[0]), (beside.o[2:], beside.lse[:, 2:])):
        assert torch.equal(o, whole.o[0, first:])
        assert torch.equal(lse, whole.lse[0, :, first:])


@pytest.mark.parametrize("dims", [(512, 512), (320, 272), (264, 504)])
def test_wide_heads(dims):
    c = without_gradient(call(*qkv(200, 150, *dims, heads=(2, 1)), causal=True))
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(emulate(c, None, ctas=3), None))
    assert not [str(e) for e in errors if not e.ok]


TABLES = [name for name in CASES if name.startswith(("table", "buckets"))]
PAIRS = [name for name in CASES if name.startswith("pair")]


@pytest.mark.parametrize("name", PAIRS)
def test_a_bias_by_pair_has_kernels(name):
    tensors, options = CASES[name]
    chosen = config.choose(without_gradient(call(*tensors, **options)).p)
    assert chosen.score == "bias"
    assert (chosen in config.shipped()) == (
        chosen.dtype in shared.dtypes_of(chosen.tiles.width, chosen.tiles.width_v, "bias")
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_table_by_distance_is_read_from_a_line(name):
    tensors, options = CASES[name]
    chosen = config.choose(without_gradient(call(*tensors, **options)).p)
    assert chosen.score == "table"
    assert chosen in config.shipped()


STEADY = replace(SMALL, steady=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_maximum_that_falls_behind_is_noticed(causal, dtype):
    q, k, v = qkv(200, 500, dtype=dtype)
    q, k = q.abs(), k.abs() * torch.linspace(30, 0.1, 500)[:, None, None]  # scores grow from block to block, to 10**3
    c = without_gradient(call(q, k.to(dtype), v, causal=causal))
    out, lazy = (emulate(c, tiles, ctas=2) for tiles in (STEADY, SMALL))
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]
    assert (out.lse - lazy.lse).abs().max() < 1e-3


def judge_capped(sizes: str) -> None:
    """A softcap of 30 over blocks of keys whose scores have these sizes, a digit each, as they are visited."""
    q, k, v = qkv(64, 64 * len(sizes), heads=(1, 1))
    by_key = 0.1 + torch.tensor([float(n) for n in reversed(sizes)]).repeat_interleave(64)
    c = without_gradient(call(q, (k * by_key[:, None, None]).to(k.dtype), v, score=tw.softcap(30.0)))
    out = emulate(c, replace(STEADY, warpgroups=1), ctas=1)
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]


# Sizes of scores, of a digit for each block as they are visited; how each block but the first is computed where a polynomial is tried again
# after 3 blocks and votes end after 2: by the polynomial of that degree, v by votes, ! once more.
LEVELS = {
    "0000000000": "222222222",
    "0000220000": "2222!33322",
    "0004400000": "222!555333",
    "9990000000": "vvvv55533",
    "0000990000": "2222!vvv55",
}


@pytest.mark.parametrize("sizes", LEVELS)
def test_capped_scores_that_are_taken_to_be_small_and_are_not_are_computed_once_more(sizes, monkeypatch):
    done, load_kernel = [], emulated.load_kernel

    def watched():
        kernel = load_kernel()
        softmax, once_more = kernel.compute.softmax, kernel.compute.once_more
        shortly, softcap = softmax.cap_shortly, softmax.softcap
        softmax.PATIENCE, softmax.CARE = 3, 2

        def watched_shortly(s, tanh, below):
            done.append(str(len(tanh.coefficients) - 1))
            return shortly(s, tanh, below)

        def watched_softcap(s, cap2, scale2, together, below=None, beyond=None):
            if below is not None:
                done.append("v")
            softcap(s, cap2, scale2, together, below, beyond)

        def watched_once_more(served, *rest):
            if not served:
                done.append("!")
            once_more(served, *rest)

        softmax.cap_shortly, softmax.softcap = watched_shortly, watched_softcap
        kernel.compute.once_more = watched_once_more
        return kernel

    monkeypatch.setattr(emulated, "load_kernel", watched)
    judge_capped(sizes)
    assert "".join(done) == LEVELS[sizes]


def test_infinite_sums_of_a_block_are_taken_for_what_they_are():
    q, k, v = qkv(64, 200)
    k[:, :100] *= 1e4  # of the blocks that come last: 2**(their scores) overflows beside the first block's maxima
    c = without_gradient(call(q, k, v))
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(emulate(c, STEADY, ctas=1), None))
    assert not [str(e) for e in errors if not e.ok]


# Sizes of scores, of a digit for each block of keys as they are visited; of each but the first, whether it is computed once more.
OUTGROWN = {"00900": ".!..", "9900": "...", "0999": "!.."}


@pytest.mark.parametrize("sizes", OUTGROWN)
def test_capped_scores_beyond_the_maxima_are_computed_once_more(sizes, monkeypatch):
    done, load_kernel = [], emulated.load_kernel

    def watched():
        kernel = load_kernel()
        once_more = kernel.compute.once_more

        def watched_once_more(served, *rest):
            done.append("." if served else "!")
            once_more(served, *rest)

        kernel.compute.once_more = watched_once_more
        return kernel

    monkeypatch.setattr(emulated, "load_kernel", watched)
    judge_capped(sizes)
    assert "".join(done) == OUTGROWN[sizes]


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_keys_that_no_query_sees_never_touch_a_result(hiding, bad):
    tensors = [x.bfloat16() for x in contract_qkv()]
    clean = without_gradient(call(*tensors, mask=HIDING[hiding]()))
    shape = clean.p.batch, clean.p.heads_q, clean.p.seqlen_q, clean.p.seqlen_k
    grid = Grid.whole(clean.p.spec.region, clean.t.leaves, shape, torch.device("cpu"))
    hidden = ~seen_keys(grid, clean.p.group).mT.unsqueeze(-1)
    assert hidden.any()
    k, v = (x.masked_fill(hidden, bad) for x in tensors[1:])
    dirty = without_gradient(call(tensors[0], k, v, mask=HIDING[hiding]()))
    good, got = (emulate(c, SMALL, ctas=3) for c in (clean, dirty))
    assert torch.equal(got.o, good.o)
    assert torch.equal(got.lse, good.lse)


def entries(*shape: int, blocks: int) -> torch.Tensor:
    """Entries of selections, some of them none, some twice."""
    return torch.randint(-1, blocks, shape, generator=torch.Generator().manual_seed(1))


# What a call of 200 queries and 333 keys, of four heads on two, shows by bits.
SELECTED = {
    "tokens": lambda: tw.causal() & tw.selected(entries(1, 2, 200, 30, blocks=333)),
    "blocks-or-window": lambda: tw.causal() & (tw.selected(entries(1, 1, 7, 2, blocks=11), 32, 32) | tw.window(left=9)),
    "tiles": lambda: tw.selected(entries(1, 2, 2, 2, blocks=3), 128, 128),
}


@pytest.mark.parametrize("name", SELECTED)
def test_selected_keys_are_told_by_bits(name):
    c = without_gradient(call(*qkv(200, 333, heads=(4, 2)), mask=SELECTED[name]()))
    assert Hopper().refused(c.p) == []
    assert config.choose(c.p).form == "bits"
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(emulate(c, None, ctas=2), None))
    assert not [str(e) for e in errors if not e.ok]


# What else a call has, and a word of the reason.
UNSELECTED = {
    "a softcap": ({"score": tw.softcap(2.0)}, "this score"),
    "dropout": ({"dropout_p": 0.1, "dropout_seed": 1}, "dropout"),
    "deterministic gradients": ({"deterministic": True}, "deterministic"),
    "wide heads": ({}, "head_dim 256"),
}


@pytest.mark.parametrize("name", UNSELECTED)
def test_selected_keys_without_bits_are_refused_by_name(name):
    options, word = UNSELECTED[name]
    c = call(*qkv(200, 333, d=256 if name == "wide heads" else 64), mask=SELECTED["tokens"](), **options)
    (reason,) = Hopper().refused(c.p)
    assert reason.startswith("selected keys beside ")
    assert word in reason


BF16 = [replace(case, dtype="bfloat16") for case in cases.tagged("contract")]
RUN = {case.name: c for case in BF16 for c in [without_gradient(of_case(case))] if not reasons(c.p)}
RUN = {name: c for name, c in RUN.items() if not Hopper().refused(c.p)}


@pytest.mark.parametrize("name", [name for name, c in RUN.items() if c.p.batch * c.p.seqlen_q * c.p.seqlen_k])
def test_the_contract_s_cases_are_right(name):
    out = emulate(RUN[name], None, ctas=2)
    errors = accuracy.Expected.of(RUN[name].p, RUN[name].t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]


@pytest.mark.parametrize("dims", TABLE, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_shipped_tiles_compute_attention(dims, causal):
    c = without_gradient(call(*qkv(200, 420, *dims, heads=(2, 1)), causal=causal))
    out = emulate(c, None, ctas=2)
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]


@pytest.fixture
def small_splits(monkeypatch):
    monkeypatch.setattr(config, "MIN_SPLIT_KEYS", 64)


@pytest.mark.parametrize("name", [name for name in CASES if form_of(name) != "bits" and name not in TABLES + PAIRS])
def test_splits_of_keys_merge_into_attention(name, small_splits):
    tensors, options = CASES[name]
    c = without_gradient(call(*tensors, **options))
    out = emulate(c, SMALL, ctas=3, split=True, form=form_of(name))  # kernels that read bits do not split
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]


# Lengths of q, of k; rows past the last sequence of each; options. No queries, no keys, neither, and one of each.
PACKED = {
    "full": ([70, 1, 0, 130, 64], [300, 5, 9, 0, 64], (0, 0), {}),
    "causal": ([130, 1, 0, 65], [130, 1, 7, 200], (40, 3), {"causal": True}),
    "empty-rows": ([100, 33], [20, 0], (5, 0), {"causal": True, "sink": normal(4, seed=8)}),
    "window": ([10, 200, 3], [300, 150, 3], (0, 10), {"mask": tw.window(50, 3)}),
    "keys": ([90, 5], [200, 100], (0, 0), {"mask": tw.key_range(37, 120) & tw.causal()}),
    "no-keys-at-all": ([9, 70], [0, 0], (3, 0), {"sink": normal(4, seed=8)}),
    "many": ([3] * 40, [11] * 40, (0, 0), {"causal": True}),
    "softcap": ([70, 0, 33], [90, 4, 20], (1, 1), {"score": tw.softcap(2.0), "causal": True}),
    "alibi": ([130, 1, 0, 65], [130, 1, 7, 200], (40, 3), {"score": tw.alibi(STEEP), "causal": True}),
    "alibi-empty-rows": (
        [100, 33],
        [20, 0],
        (5, 0),
        {"score": tw.alibi(STEEP), "causal": True, "sink": normal(4, seed=8)},
    ),
    "alibi-keys": (
        [90, 5],
        [200, 100],
        (0, 0),
        {"score": tw.alibi(STEEP), "mask": tw.key_range(37, 120) & tw.causal()},
    ),
    "dropout": ([70, 0, 33], [90, 4, 20], (1, 1), {"dropout_p": 0.3, "dropout_seed": 2**63 + 5}),
    "dropout-causal": ([100, 33], [20, 90], (5, 0), {"dropout_p": 0.2, "dropout_seed": 9, "causal": True}),
}


def packed_call(name: str, **more) -> Call:
    """With rows of NaN past the last sequence."""
    lengths_q, lengths_k, rest, options = PACKED[name]
    q, k, v = qkv(sum(lengths_q) + rest[0], sum(lengths_k) + rest[1])
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0) for n in (lengths_q, lengths_k))
    q[:, cu_q[-1] :], k[:, cu_k[-1] :], v[:, cu_k[-1] :] = (torch.nan,) * 3
    return call(q[0], k[0], v[0], cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options, **more)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_are_each_by_itself(name):
    c = without_gradient(packed_call(name))
    out = emulate(c, SMALL, ctas=3)
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(out, None))
    assert not [str(e) for e in errors if not e.ok]


@pytest.mark.parametrize("tiles", WIDE.values(), ids=WIDE)
@pytest.mark.parametrize("name", [name for name, x in PACKED.items() if not {"score", "dropout_p"} & set(x[3])])
def test_packed_columns_are_computed_in_pieces(name, tiles):
    c = without_gradient(packed_call(name))
    errors = accuracy.Expected.of(c.p, c.t).judge(accuracy.tensors(emulate(c, tiles, ctas=3), None))
    assert not [str(e) for e in errors if not e.ok]


def test_a_sequence_never_touches_its_neighbour():
    q, k, v = (x[0] for x in qkv(150, 150))
    cu = torch.tensor([0, 33, 33, 140])
    k[33:], v[33:] = torch.nan, torch.nan
    out = emulate(without_gradient(call(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu)), SMALL, ctas=2)
    assert torch.isfinite(out.o[:33]).all()
    assert torch.isfinite(out.lse[:, :33]).all()
    assert (out.o[140:] == 0).all()
    assert (out.lse[:, 140:] == -torch.inf).all()


def test_results_are_the_same_bits_whatever_the_number_of_ctas():
    c = without_gradient(call(*qkv(300, 300), causal=True))
    one, many = (emulate(c, SMALL, ctas) for ctas in (1, 5))
    assert torch.equal(one.o, many.o)
    assert torch.equal(one.lse, many.lse)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_each_launch_gets_the_tensors_of_its_call(split, monkeypatch):
    launches, c = [], call(*qkv(130, 200), causal=True)
    stand_in(monkeypatch, lambda config, given: launches.append([x for x in given if isinstance(x, torch.Tensor)]))
    plan = hopper.ForwardPlan(c.p, replace(config.choose(c.p), split=split))
    outputs = [plan.forward(c.t) for _ in range(2)]
    for launch, out in zip(launches, outputs, strict=True):
        tensors = c.t.q, c.t.k, c.t.v, out.o, out.lse
        assert [x.data_ptr() for x in launch[:5]] == [x.data_ptr() for x in tensors]
        assert len(launch) == 6 + 2 * split
    facts = [[(x.shape, x.stride(), x.dtype) for x in (out.o, out.lse)] for out in outputs]
    assert facts[0] == facts[1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_launch_of_a_packed_call_reads_its_own_starts_and_a_new_zero(dtype, monkeypatch):
    read, c = [], call(*(x[0] for x in qkv(130, 130)), cu_seqlens_q=torch.tensor([0, 40, 130], dtype=dtype))
    starts_of = lambda config, given: read.append([x.tolist() for x in given if getattr(x, "ndim", 0) == 1][1:])  # noqa: E731
    stand_in(monkeypatch, starts_of)  # the first is the sink
    plan = hopper.ForwardPlan(c.p, config.choose(c.p))
    for starts in ([0, 40, 130], [0, 7, 129]):
        cu = torch.tensor(starts, dtype=dtype)
        out = plan.forward(replace(c.t, leaves=(cu, cu), cu_seqlens_q=cu, cu_seqlens_k=cu))
        assert read[-1] == [starts, starts, [0]]
        assert (out.o.shape, out.lse.shape) == ((130, *c.t.q.shape[1:]), (c.p.heads_q, 130))
    assert len(read) == 2


def test_tensors_that_the_copy_engine_cannot_read_where_they_lie_are_copied(monkeypatch):
    launches, (q, k, v) = [], qkv(130, 200)
    stand_in(
        monkeypatch,
        lambda config, given: launches.append([x.clone() for x in given[:3]] + [x.data_ptr() for x in given[:3]]),
    )
    beside = (
        torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    )  # begins between multiples of 16 bytes
    apart = k.repeat_interleave(3, -1)[..., ::3]  # no unit stride
    for given in ((q, k, v), (beside, k, v), (q, apart, v), (q, k, v[:, :1].expand_as(v))):
        c = call(*given, causal=True)
        hopper.ForwardPlan(c.p, config.choose(c.p)).forward(c.t)
        assert all(torch.equal(x, y) for x, y in zip(launches[-1], given, strict=False))
        assert not any(address % 16 for address in launches[-1][3:])
