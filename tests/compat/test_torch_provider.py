"""PyTorch's operators of flash attention while tilewise provides them: what arrives is right, and what does not is PyTorch's own."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import tilewise as tw
from tests.compat.eager import Arithmetic, agree, attend, normal
from tilewise.compat import torch_provider

B, H, NQ, NK, D = 2, 4, 33, 45, 16
aten = torch.ops.aten
sdpa = F.scaled_dot_product_attention
PLAIN = Arithmetic(torch.float32)
CALLED = (
    "attention_with_lse", "attention_varlen_with_lse", "attention_paged_with_lse", "attention_backward",
)  # fmt: skip


@pytest.fixture
def arrived(monkeypatch) -> Counter:
    """How often each of tilewise's functions was called by an operator; the provider is active."""
    count: Counter = Counter()

    def counting(name, function):
        def run(*arguments, **options):
            count[name] += 1
            return function(*arguments, **options)

        return run

    for name in CALLED:
        monkeypatch.setattr(tw, name, counting(name, getattr(tw, name)))
    activate_flash_attention_impl("tilewise")
    yield count
    restore_flash_attention_impl(_raise_warn=False)  # a test may have done so


def qkv(nq: int = NQ, nk: int = NK, heads_k: int = H, dtype=torch.float32) -> tuple[Tensor, ...]:
    """q, k and v ``(batch, heads, seqlen, head_dim)``."""
    shapes = (B, H, nq, D), (B, heads_k, nk, D), (B, heads_k, nk, D)
    return tuple(normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes, 1))


# -- The registry --------------------------------------------------------------------------------------------------


def test_it_stands_in_the_registry_and_nothing_changes_before_it_is_activated():
    assert "tilewise" in list_flash_attention_impls()
    assert current_flash_attention_impl() is None


def test_restoring_gives_pytorchs_own_kernels_back_however_often_it_was_active(arrived):
    tensors = qkv()
    sdpa(*tensors)
    for _ in range(2):
        activate_flash_attention_impl("tilewise")
    assert current_flash_attention_impl() == "tilewise"
    sdpa(*tensors)
    assert arrived["attention_with_lse"] == 2
    restore_flash_attention_impl()
    assert current_flash_attention_impl() is None
    sdpa(*tensors)
    with pytest.raises(NotImplementedError, match="CPU"):
        varlen_attn(*packed(heads_k=H), *[torch.tensor([0, NK])] * 2, NK, NK)
    assert arrived.total() == 2


# -- scaled_dot_product_attention on the CPU -----------------------------------------------------------------------


def documented(arithmetic, q, k, v, attn_mask=None, is_causal=False, scale=None, enable_gqa=False):
    """What torch documents: top-left causal, a bool mask selects, a floating one is added."""
    kept, added = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool), attn_mask
    if is_causal:
        kept = kept.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        kept, added = attn_mask, None
    change = (lambda s: s) if added is None else (lambda s: s + added.to(s.dtype))
    return attend(q, k, v, arithmetic, scale=scale, change=change, kept=kept)[:1]


HOLES = (normal(B, 1, NQ, NK) > 0) & (torch.arange(NQ) != 5).unsqueeze(-1)  # row 5 sees no key
SDPA = {
    "full": ({}, {}),
    "scale": ({"nq": 1}, {"scale": 0.3}),
    "causal": ({"nq": NK}, {"is_causal": True}),
    "causal-more-keys": ({}, {"is_causal": True}),
    "causal-more-queries": ({"nq": 64, "nk": 31}, {"is_causal": True}),
    "gqa": ({"heads_k": 2}, {"enable_gqa": True, "is_causal": True}),
    "bool-mask": ({}, {"attn_mask": HOLES}),
    "float-mask": ({}, {"attn_mask": normal(NQ, NK)}),
    "hiding-mask": ({"heads_k": 1}, {"attn_mask": normal(B, H, NQ, NK).where(HOLES, -torch.inf), "enable_gqa": True}),
    "padding": ({}, {"attn_mask": (torch.arange(NK) < torch.tensor([[NK], [9]])).view(B, 1, 1, NK)}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", SDPA)
def test_attention_and_its_gradients_are_right(name, dtype, arrived):
    sizes, options = SDPA[name]
    if "attn_mask" in options and options["attn_mask"].is_floating_point():
        options = options | {"attn_mask": options["attn_mask"].to(dtype)}
    tensors = qkv(**sizes, dtype=dtype)
    agree(partial(sdpa, **options), partial(documented, **options), tensors, ("o",))
    assert arrived == {"attention_with_lse": 1, "attention_backward": 1}


@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
def test_causal_biases_keep_their_alignment(variant, arrived):
    q, k, v = qkv()
    kept = torch.ones(NQ, NK, dtype=torch.bool).tril(0 if variant is causal_upper_left else NK - NQ)
    o = sdpa(q, k, v, attn_mask=variant(NQ, NK))
    torch.testing.assert_close(o, attend(q, k, v, PLAIN, kept=kept)[0])
    assert arrived["attention_with_lse"] == 1


OTHERS = {
    "dropout": lambda q, k, v: sdpa(q, k, v, dropout_p=0.5),
    "mask-with-a-gradient": lambda q, k, v: sdpa(q, k, v, attn_mask=normal(NQ, NK).requires_grad_()),
    "mask-of-three-dimensions": lambda q, k, v: sdpa(q, k, v, attn_mask=normal(H, NQ, NK)),
    "other-head-dim-of-v": lambda q, k, v: sdpa(q, k, v[..., :5]),
    "three-dimensions": lambda q, k, v: sdpa(q[0], k[0], v[0]),
    "five-dimensions": lambda q, k, v: sdpa(q[None], k[None], v[None]),
    "one-key-head": lambda q, k, v: sdpa(q, k[:, :1], v[:, :1]),
    "one-batch-element-of-keys": lambda q, k, v: sdpa(q, k[:1], v[:1]),
    "no-keys": lambda q, k, v: sdpa(q, k[:, :, :0], v[:, :, :0]),
    "other-last-stride": lambda q, k, v: sdpa(q.mT.contiguous().mT, k, v),
    "chosen-backend": lambda q, k, v: _by_the_math_backend(q, k, v),
    "weights": lambda q, k, v: _module(q.flatten(2), need_weights=True),
    "encoder-in-eval": lambda q, k, v: _encoder(q.flatten(2)),
}


def _by_the_math_backend(*tensors):
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(*tensors)


def _module(x, **options):
    torch.manual_seed(0)
    return nn.MultiheadAttention(NQ * D, 4, batch_first=True)(x, x, x, **options)[0]


def _encoder(x):
    torch.manual_seed(0)
    with torch.no_grad():
        return nn.TransformerEncoderLayer(NQ * D, 4, batch_first=True).eval()(x)


FROM_2_15 = (
    ("three-dimensions", "one-key-head") if torch.__version__ >= "2.15" else ()
)  # PyTorch gives these to a flash attention too


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_page_says_does_not_arrive_is_pytorchs_own(name, arrived):
    def results():
        torch.manual_seed(3)
        return OTHERS[name](*qkv())

    here = results()
    assert arrived.total() == (name in FROM_2_15)
    restore_flash_attention_impl()
    torch.testing.assert_close(here, results(), **({} if name in FROM_2_15 else {"rtol": 0, "atol": 0}))


def test_modules_arrive_with_their_gradients(arrived):
    x = normal(B, 9, NQ * D).requires_grad_()
    found = torch.autograd.grad(_module(x, need_weights=False).square().sum(), x)
    restore_flash_attention_impl()
    torch.testing.assert_close(found, torch.autograd.grad(_module(x, need_weights=False).square().sum(), x))
    assert arrived == {"attention_with_lse": 1, "attention_backward": 1}


def test_transforms_of_torch_func_and_autocast_arrive(arrived):
    q, k, v = qkv()
    mapped = torch.func.vmap(lambda scale: sdpa(q * scale, k, v))(torch.tensor([1.0, 2.0]))
    torch.testing.assert_close(mapped[1], sdpa(q * 2, k, v))
    wanted = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sdpa(wanted, k, v).sum(), wanted)
    torch.testing.assert_close(torch.func.grad(lambda q: sdpa(q, k, v).sum())(q), expected)
    with torch.autocast("cpu", torch.bfloat16):
        half = sdpa(wanted, k, v)
        (grad,) = torch.autograd.grad(half.float().sum(), wanted)
    assert (half.dtype, grad.dtype) == (torch.bfloat16, torch.float32)
    assert arrived == {"attention_with_lse": 6, "attention_backward": 3}  # vmap's examples one by one


# -- varlen_attn -----------------------------------------------------------------------------------------------------

CU_Q, CU_K = torch.tensor([0, 13, 13, 33], dtype=torch.int32), torch.tensor([0, 20, 27, 45], dtype=torch.int32)
USED = torch.tensor([15, 0, 18], dtype=torch.int32)
WINDOWS = {"full": (-1, -1), "causal": (-1, 0), "window": (7, 0), "both-ends": (3, 5)}


def packed(heads_k: int = 2, dtype=torch.float32) -> tuple[Tensor, ...]:
    """q, k and v ``(total, heads, head_dim)``."""
    return tuple(x.transpose(1, 2)[0] for x in qkv(heads_k=heads_k, dtype=dtype))


def by_sequences(arithmetic, q, k, v, window=(-1, -1), scale=None, used=None):
    """o and lse ``(heads, total_q)``, one sequence after the other, aligned at the last query and the last key in use."""
    found = []
    for b in range(3):
        first, last = int(CU_K[b]), int(CU_K[b + 1])
        last = last if used is None else first + int(used[b])
        rows = [q[CU_Q[b] : CU_Q[b + 1]], k[first:last], v[first:last]]
        distance = torch.arange(last - first) - torch.arange(len(rows[0])).unsqueeze(1) - (last - first - len(rows[0]))
        kept = (distance >= -window[0]) | (window[0] < 0)
        kept = kept & ((distance <= window[1]) | (window[1] < 0))
        found.append(attend(*[x.transpose(0, 1) for x in rows], arithmetic, scale=scale, kept=kept))
    o, lse = (torch.cat(x, 1) for x in zip(*found, strict=True))
    return o.transpose(0, 1), lse


def attended(q, k, v, cu_k=CU_K, **options):
    return varlen_attn(q, k, v, CU_Q, cu_k, 20, 20, enable_gqa=True, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WINDOWS)
def test_packed_attention_and_its_gradients_are_right(name, dtype, arrived):
    options = {"window_size": WINDOWS[name], "scale": 0.3}
    formula = lambda *x: by_sequences(*x, WINDOWS[name], 0.3)[:1]  # noqa: E731
    agree(partial(attended, **options), formula, packed(dtype=dtype), ("o",))
    assert arrived == {"attention_varlen_with_lse": 1, "attention_backward": 1}


def test_packed_attention_returns_its_lse(arrived):
    o, lse = attended(*packed(), return_aux=AuxRequest(lse=True))
    expected = by_sequences(PLAIN, *packed())
    torch.testing.assert_close((o, lse), expected)


@pytest.mark.parametrize("name", WINDOWS)
def test_keys_in_slots_and_in_pages_are_those_in_use(name, arrived):
    q, k, v = packed()
    expected, _ = by_sequences(PLAIN, q, k, v, WINDOWS[name], used=USED)
    options = {"window_size": WINDOWS[name], "seqused_k": USED}
    torch.testing.assert_close(attended(q, k, v, **options), expected)
    table = torch.tensor([[3, 1], [0, 0], [4, 2]], dtype=torch.int32)
    pages = [torch.full((5, 10, *x.shape[1:]), torch.nan) for x in (k, v)]
    for b, n in enumerate(USED.tolist()):
        for j in range(n):
            for pool, x in zip(pages, (k, v), strict=True):
                pool[table[b, j // 10], j % 10] = x[CU_K[b] + j]
    torch.testing.assert_close(attended(q, *pages, cu_k=None, block_table=table, **options), expected)
    assert arrived == {"attention_paged_with_lse": 2}


def test_output_is_written_into_the_tensor_that_was_given(arrived):
    q, k, v = packed()
    out = torch.empty_like(q)
    found, lse = varlen_attn_out(out, q, k, v, CU_Q, CU_K, 20, 20, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert found is out
    torch.testing.assert_close((out, lse), by_sequences(PLAIN, q, k, v))


def test_one_split_gives_results_that_do_not_depend_on_the_rest_of_the_batch(monkeypatch, arrived):
    q, k, v = packed()
    seen = []
    monkeypatch.setattr(tw, "attention_varlen_with_lse", lambda *x, **o: seen.append(o) or run(*x, **o))
    run = tw.api.attention_varlen_with_lse
    whole = attended(q, k, v, num_splits=1)
    alone = varlen_attn(
        q[13:], k[27:], v[27:], torch.tensor([0, 20]), torch.tensor([0, 18]), 20, 18, enable_gqa=True, num_splits=1
    )
    assert torch.equal(whole[13:], alone)
    attended(q, k, v)
    assert [options["deterministic"] for options in seen] == [True, True, None]


# -- CUDA's operators, on tensors of the CPU --------------------------------------------------------------------------


def test_dense_calls_have_windows_and_gradients(arrived):
    q, k, v = (x.transpose(1, 2) for x in qkv(heads_k=2))

    def run(q, k, v):
        more = {"scale": 0.3, "window_size_left": 7, "window_size_right": 2}
        return aten._flash_attention_forward(q, k, v, None, None, NQ, NK, 0.0, False, False, **more)[:1]

    def formula(arithmetic, q, k, v):
        distance = torch.arange(NK) - torch.arange(NQ).unsqueeze(1) - (NK - NQ)
        rows = [x.transpose(1, 2) for x in (q, k, v)]
        o, _ = attend(*rows, arithmetic, scale=0.3, kept=(distance >= -7) & (distance <= 2))
        return (o.transpose(1, 2),)

    agree(run, formula, (q, k, v), ("o",))
    assert arrived == {"attention_with_lse": 1, "attention_backward": 1}


def test_a_dense_cache_has_its_lengths(arrived):
    q, k, v = (x.transpose(1, 2) for x in qkv())
    used = torch.tensor([40, 21], dtype=torch.int32)
    o, *_ = aten._flash_attention_forward(q, k, v, None, None, NQ, NK, 0.0, True, False, seqused_k=used)
    for b, n in enumerate(used.tolist()):
        rows = [x[b].transpose(0, 1) for x in (q, k[:, :n], v[:, :n])]
        kept = torch.ones(NQ, n, dtype=torch.bool).tril(n - NQ)
        torch.testing.assert_close(o[b].transpose(0, 1), attend(*rows, PLAIN, kept=kept)[0])


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_sdpas_operator_is_aligned_at_the_last_key(is_causal, arrived):
    kept = torch.ones(NQ, NK, dtype=torch.bool).tril(NK - NQ) if is_causal else None
    run = lambda *x: aten._scaled_dot_product_flash_attention(*x, 0.0, is_causal, scale=0.3)[:1]  # noqa: E731
    formula = lambda a, *x: attend(*x, a, scale=0.3, kept=kept)[:1]  # noqa: E731
    agree(run, formula, qkv(), ("o",))
    assert arrived == {"attention_with_lse": 1, "attention_backward": 1}


def test_dropout_is_that_of_the_seed_in_rng_state(arrived):
    tensors = [x.requires_grad_() for x in qkv(dtype=torch.float64)]
    o, *_, rng_state, _, _ = aten._scaled_dot_product_flash_attention(*tensors, 0.3, True)
    seed = rng_state.view(torch.int64)[:1]
    expected = tw.attention(
        *[x.transpose(1, 2) for x in tensors], causal=True, dropout_p=0.3, dropout_seed=seed
    ).transpose(1, 2)
    weights = normal(*o.shape, dtype=o.dtype)
    for x, y in zip((o, *_grads(o, tensors, weights)), (expected, *_grads(expected, tensors, weights)), strict=True):
        torch.testing.assert_close(x, y)
    torch.manual_seed(1)
    first, again = (aten._scaled_dot_product_flash_attention(*tensors, 0.3)[0] for _ in range(2))
    assert not torch.equal(first, again)


def _grads(o, tensors, weights):
    return torch.autograd.grad((o * weights).sum(), tensors)


def test_packed_dropout_is_that_of_the_seed_in_rng_state(arrived):
    tensors = [x.requires_grad_() for x in packed(dtype=torch.float64)]
    o, _, rng_state, *_ = aten._flash_attention_forward(*tensors, CU_Q, CU_K, 20, 20, 0.4, False, False)
    expected = tw.attention_varlen(*tensors, CU_Q, CU_K, dropout_p=0.4, dropout_seed=rng_state.view(torch.int64)[:1])
    weights = normal(*o.shape, dtype=o.dtype)
    for x, y in zip((o, *_grads(o, tensors, weights)), (expected, *_grads(expected, tensors, weights)), strict=True):
        torch.testing.assert_close(x, y)


LAYOUTS = {
    "heads-first": lambda n, h: normal(B, h, n, D),
    "rows-first": lambda n, h: normal(B, n, h, D).transpose(1, 2),
    "of-one-tensor": lambda n, h: normal(B, n, 3, h, D)[:, :, 1].transpose(1, 2),
    "batch-inside": lambda n, h: normal(n, B, h, D).permute(1, 2, 0, 3),
    "expanded": lambda n, h: normal(1, h, n, D).expand(B, -1, -1, -1),
}


def _operators(q, k, v):
    """For tensors ``(batch, heads, seqlen, head_dim)``: each forward and backward as a function of them and of ``do``."""
    flash, cpu = aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu
    dense = aten._flash_attention_forward
    empty = torch.zeros(2, dtype=torch.uint64)
    swapped = lambda *x: [y.transpose(1, 2) for y in x]  # noqa: E731
    none = (None, None, q.shape[2], k.shape[2], 0.0, True)
    yield lambda q, k, v, do: cpu(q, k, v, 0.0, True)
    yield lambda q, k, v, do: aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, *cpu(q, k, v), 0.0, False
    )
    yield lambda q, k, v, do: flash(q, k, v, 0.0, True)[:2]
    yield lambda q, k, v, do: aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, *flash(q, k, v)[:2], *none, empty, empty
    )
    yield lambda q, k, v, do: dense(*swapped(q, k, v), *none, False)[:2]
    yield lambda q, k, v, do: aten._flash_attention_backward(
        *swapped(do, q, k, v), *dense(*swapped(q, k, v), *none, False)[:2], *none, empty, empty
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads_k", [H, 2])
def test_results_have_the_strides_of_pytorchs_meta_kernels(layout, heads_k, arrived):
    make = LAYOUTS[layout]
    tensors = make(NQ, H), make(NK, heads_k), make(NK, heads_k)
    do = normal(B, H, NQ, D)
    for run in _operators(*tensors):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:  # the seed
            expected = run(*[mode.from_tensor(x) for x in (*tensors, do)])
        found = run(*tensors, do)
        assert [_form(x) for x in found] == [_form(x) for x in expected]


def test_heads_that_lie_before_rows_need_no_copy(arrived, monkeypatch):
    copied, original = [], torch_provider._in_strides_of

    def watched(like, x):
        found = original(like, x)
        copied.append(found is not x)
        return found

    monkeypatch.setattr(torch_provider, "_in_strides_of", watched)
    q, k, v = normal(B, H, NQ, D), normal(B, H, NK, D), normal(B, H, NK, D)
    for run in list(_operators(q, k, v))[:4]:
        run(q, k, v, normal(B, NQ, H, D).transpose(1, 2))
    assert len(copied) > 4
    assert not any(copied)


def _form(x):
    return x.shape, x.stride(), x.dtype


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("layout", ["heads-first", "rows-first", "of-one-tensor"])
def test_compiled_code_gives_the_same_gradients(layout, backend, arrived):
    torch._dynamo.reset()
    make, mask = LAYOUTS[layout], normal(NQ, NK)

    def run(q, k, v):
        o = sdpa(q * 2, k, v, attn_mask=mask, enable_gqa=True) + sdpa(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2).flatten(2).square().sum()

    tensors = [x.requires_grad_() for x in (make(NQ, H), make(NK, 2), make(NK, 2))]
    expected = torch.autograd.grad(run(*tensors), tensors)
    arrived.clear()
    found = torch.autograd.grad(torch.compile(run, fullgraph=True, backend=backend)(*tensors), tensors)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)
    assert arrived == {"attention_with_lse": 2, "attention_backward": 2}


def test_a_compiled_function_follows_the_provider_in_and_out(arrived):
    torch._dynamo.reset()
    compiled = torch.compile(lambda q, k, v: sdpa(q, k, v) * 2, fullgraph=True)
    restore_flash_attention_impl()
    results = [compiled(*qkv())]
    assert arrived.total() == 0
    activate_flash_attention_impl("tilewise")
    results.append(compiled(*qkv()))
    assert arrived == {"attention_with_lse": 1}
    restore_flash_attention_impl()
    assert torch.equal(compiled(*qkv()), results[0])
    torch.testing.assert_close(*results)
    assert arrived.total() == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_packed_code_gives_the_same_gradients(backend, arrived):
    torch._dynamo.reset()
    tensors = [x.requires_grad_() for x in packed()]
    run = lambda q, k, v: attended(q * 2, k, v, window_size=(5, 0)).square().sum()  # noqa: E731
    expected = torch.autograd.grad(run(*tensors), tensors)
    found = torch.autograd.grad(torch.compile(run, fullgraph=True, backend=backend)(*tensors), tensors)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y)


# -- What is refused -------------------------------------------------------------------------------------------------

REFUSED = {
    "dropout-on-the-cpu": (
        lambda q, k, v: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v[..., :5], 0.5),
        ["dropout_p: its backward is told no seed", "value: its head_dim is 5, query's 16"],
    ),
    "debug-mask-and-slopes": (
        lambda q, k, v: aten._flash_attention_forward(
            *(x.transpose(1, 2) for x in (q, k, v)), None, None, NQ, NK, 0.0, False, True, alibi_slopes=torch.ones(H)
        ),
        ["return_debug_mask: no backend forms", "alibi_slopes: the operator's backward is not told of them"],
    ),
    "dropout-over-a-cache": (
        lambda q, k, v: aten._flash_attention_forward(
            *(x[0].transpose(0, 1) for x in (q, k, v)), CU_Q, CU_K, 20, 20, 0.5, False, False, seqused_k=USED
        ),
        ["dropout_p: over a cache"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name_and_at_once(name, arrived):
    call, reasons = REFUSED[name]
    with pytest.raises(NotImplementedError, match="cannot honour") as said:
        call(*qkv())
    assert all(reason in str(said.value) for reason in reasons)
    assert arrived.total() == 0


def test_pages_need_their_lengths(arrived):
    q, k, v = packed()
    with pytest.raises(ValueError, match="a block_table needs seqused_k or cum_seq_k"):
        attended(q, k[None], v[None], cu_k=None, block_table=torch.zeros(3, 1, dtype=torch.int32))


def test_register_may_be_called_again(arrived):
    torch_provider.register()
    assert list_flash_attention_impls().count("tilewise") == 1
