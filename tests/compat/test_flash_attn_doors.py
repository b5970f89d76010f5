"""flash-attn's other doors: its private functions, the modules of its generations 3 and 4, and standing in under their names."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from functools import partial

import pytest
import torch
from torch import Tensor

import tilewise as tw
from tests.compat.eager import agree, normal
from tests.compat.test_flash_attn import (
    LENGTHS_K,
    LENGTHS_Q,
    B,
    D,
    H,
    documented,
    each_sequence,
    offsets,
    packed,
    qkv,
    slopes,
)
from tilewise.compat import flash_attn as fa
from tilewise.compat import stand_in
from tilewise.compat.flash_attn import bert_padding, cute, interface_3, private

# -- Private functions -------------------------------------------------------------------------------------------------


class Assembled(torch.autograd.Function):
    """Attention put together of the private forward and backward, as libraries for context parallelism do it."""

    @staticmethod
    def forward(ctx, q, k, v, cu, options):
        ctx.cu, ctx.options = cu, options
        forward = private._wrapped_flash_attn_varlen_forward if cu else private._wrapped_flash_attn_forward
        out, lse, _, rng_state = forward(q, k, v, *cu, **options, return_softmax=False)
        ctx.save_for_backward(q, k, v, out, lse, rng_state)
        ctx.mark_non_differentiable(lse, rng_state)
        return out, lse, rng_state

    @staticmethod
    def backward(ctx, dout, *_):
        q, k, v, out, lse, rng_state = ctx.saved_tensors
        grads = [torch.full_like(x, torch.nan) for x in (q, k, v)]
        backward = private._wrapped_flash_attn_varlen_backward if ctx.cu else private._wrapped_flash_attn_backward
        lse = lse.where(lse != -torch.inf, torch.inf)  # as the original marks a row without keys
        softmax_d = backward(
            dout, q, k, v, out, lse, *grads, *ctx.cu, **ctx.options, deterministic=False, rng_state=rng_state
        )
        torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(-1, -2))
        return *grads, None, None


def asked(p: float = 0.0, alibi: Tensor | None = None, **options) -> dict:
    left, right = options.get("window_size", (-1, -1))
    given = {
        "dropout_p": p,
        "softmax_scale": 0.3,
        "causal": options.get("causal", False),
        "softcap": options.get("softcap", 0.0),
    }
    return given | {"window_size_left": left, "window_size_right": right, "alibi_slopes": alibi}


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "everything": {"softcap": 1.5, "causal": True, "window_size": (20, 0)},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_private_forward_and_backward_make_the_documented_attention(options):
    given = OPTIONS[options]
    run = lambda q, k, v: Assembled.apply(q, k, v, (), asked(**given))[:1]  # noqa: E731
    agree(run, lambda a, *x: documented(a, *x, softmax_scale=0.3, **given)[:1], qkv(45, 33), ("o",))


@pytest.mark.parametrize("options", OPTIONS)
def test_private_varlen_functions_make_a_loop_over_sequences(options):
    given, cu = OPTIONS[options], (offsets(LENGTHS_Q), offsets(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K))
    alibi = slopes(H)
    run = lambda q, k, v: Assembled.apply(q, k, v, cu, asked(alibi=alibi, **given))[:1]  # noqa: E731
    formula = lambda a, q, k, v: each_sequence(a, q, k, v, alibi, softmax_scale=0.3, **given)[:1]  # noqa: E731
    agree(run, formula, packed(LENGTHS_Q, LENGTHS_K), ("o",))


def test_the_rng_state_is_the_seed_of_the_dropout():
    torch.manual_seed(3)
    q, k, v = qkv()
    *_, signs, rng_state = private._flash_attn_forward(q, k, v, **asked(0.3), return_softmax=True)
    kept = tw.dropout_mask(rng_state[:1], 0.3, B, H, 33, 45)
    assert torch.equal(signs > 0, kept)

    def run(*x):
        torch.manual_seed(3)
        return Assembled.apply(*x, (), asked(0.3))[:1]

    agree(run, lambda a, *x: documented(a, *x, softmax_scale=0.3, signs=signs, p=0.3)[:1], (q, k, v), ("o",))
    with pytest.raises(ValueError, match="rng_state"):
        private._flash_attn_backward(q, q, k, v, q, q[..., 0], None, None, None, **asked(0.3), deterministic=False)


def test_backwards_of_pieces_of_the_keys_add_up_to_the_whole():
    q, k, v = (x.double() for x in qkv(33, 48))
    dout = normal(B, 33, H, D, dtype=torch.float64, seed=9)
    parts = [
        private._flash_attn_forward(q, *(x[:, c : c + 16] for x in (k, v)), **asked(), return_softmax=False)
        for c in (0, 16, 32)
    ]
    out, lse = tw.merge([part[:2] for part in parts])
    dq, dk, dv = torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)
    for c in (0, 16, 32):
        piece, some = [x[:, c : c + 16] for x in (k, v)], torch.empty_like(q)
        grads = (some, dk[:, c : c + 16], dv[:, c : c + 16])
        private._flash_attn_backward(dout, q, *piece, out, lse, *grads, **asked(), deterministic=False)
        dq += some
    whole = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(tw.attention(*whole, softmax_scale=0.3), whole, dout)
    torch.testing.assert_close((dq, dk, dv), expected)


def test_private_functions_refuse_pages_and_padding_by_name():
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K), 20, 31
    with pytest.raises(NotImplementedError, match=r"cannot honour\n  block_table: .*\n  seqused_k: "):
        private._flash_attn_varlen_forward(
            *packed(LENGTHS_Q, LENGTHS_K), *cu, 0.0, 0.3, False, block_table=offsets([1]), seqused_k=cu[0]
        )


# -- FlashAttention-3 and 4 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
def test_generation_3_gives_the_documented_attention(options):
    given = OPTIONS[options] | {"softmax_scale": 0.3}
    free = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8, "return_attn_probs": True}
    agree(lambda *x: interface_3.flash_attn_func(*x, **given, **free), partial(documented, **given), qkv())
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K), 20, 31
    run = lambda *x: interface_3.flash_attn_varlen_func(*x, *cu, **given, **free)  # noqa: E731
    agree(run, partial(each_sequence, **given), packed(LENGTHS_Q, LENGTHS_K))


def test_generation_3_packs_in_two_ways():
    q, k, v = qkv(39, 39)
    expected = fa.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(
        interface_3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), causal=True, num_heads_q=H), expected
    )
    five = torch.stack(qkv(39, 39, H), 2)
    assert torch.equal(
        interface_3.flash_attn_qkvpacked_func(five, causal=True), fa.flash_attn_qkvpacked_func(five, causal=True)
    )
    with pytest.raises(ValueError, match="num_heads_q=3"):
        interface_3.flash_attn_qkvpacked_func(torch.cat([q, k, v], 2), num_heads_q=3)


def test_generation_3_chunks_are_counted_from_the_last_key():
    q, k, v = qkv()
    got = interface_3.flash_attn_func(q, k, v, causal=True, attention_chunk=8)
    i, j = torch.arange(33).view(-1, 1) + 12, torch.arange(45)
    torch.testing.assert_close(got, tw.attention(q, k, v, mask=(i // 8 == j // 8) & (j <= i)))


def test_generation_3_combines_parts_as_merge_does():
    q, k, v = qkv()
    parts = [tw.attention_with_lse(q, k[:, s], v[:, s]) for s in (slice(0, 20), slice(20, 45))]
    o, lse = interface_3.flash_attn_combine(
        torch.stack([o for o, _ in parts]), torch.stack([x.transpose(1, 2) for _, x in parts])
    )
    torch.testing.assert_close((o, lse.transpose(1, 2)), tw.attention_with_lse(q, k, v))


ONES = torch.ones(2, B, 33, H, D)
WRONG = {
    "negative-chunk": (lambda: interface_3.flash_attn_func(*qkv(), attention_chunk=-3), "attention_chunk .* got -3"),
    "half-a-chunk": (lambda: interface_3.flash_attn_func(*qkv(), attention_chunk=2.5), "attention_chunk takes whole"),
    "packed-in-a-list": (lambda: interface_3.flash_attn_qkvpacked_func([1]), "qkv must be a tensor, got list"),
    "parts": (
        lambda: interface_3.flash_attn_combine(ONES, ONES[:1, ..., 0]),
        r"got \(2, 2, 33, 4, 16\) and \(1, 2, 33, 4\)",
    ),
    "one-part": (lambda: interface_3.flash_attn_combine(ONES[0], ONES[0, ..., 0]), r"must be \(parts, batch"),
    "parts-in-a-list": (lambda: interface_3.flash_attn_combine([1], [2]), "lse_partial must be a tensor, got list"),
    "no-window": (lambda: cute.flash_attn_func(*qkv(), window_size=None), r"\(left, right\), None unbounded, got None"),
    "one-bound": (lambda: cute.flash_attn_func(*qkv(), window_size=3), r"\(left, right\), None unbounded, got 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_of_a_later_generation_says_what_is_wrong(name):
    call, says = WRONG[name]
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize("options", OPTIONS)
def test_generation_4_gives_the_documented_attention(options):
    given = OPTIONS[options] | {"softmax_scale": 0.3}
    mine = given | {"window_size": tuple(None if n == -1 else n for n in given.get("window_size", (-1, -1)))}
    run = lambda *x: cute.flash_attn_func(*x, **mine, pack_gqa=True, return_lse=True)  # noqa: E731
    agree(run, partial(documented, **given), qkv())
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    run = lambda *x: cute.flash_attn_varlen_func(*x, *cu, **mine, return_lse=True)  # noqa: E731
    agree(run, partial(each_sequence, **given), packed(LENGTHS_Q, LENGTHS_K))
    assert cute.flash_attn_func(*qkv(), **mine)[1] is None


def test_generation_4_learns_its_sink():
    q, k, v = qkv()
    sink = normal(H, seed=5).requires_grad_()
    (got,) = torch.autograd.grad(cute.flash_attn_func(q, k, v, learnable_sink=sink)[0].square().sum(), sink)
    (expected,) = torch.autograd.grad(tw.attention(q, k, v, sink=sink).square().sum(), sink)
    assert torch.equal(got, expected)
    o, _ = cute.flash_attn_varlen_func(q, k, v, learnable_sink=sink, causal=True)  # without offsets: not packed
    assert torch.equal(o, tw.attention(q, k, v, sink=sink, causal=True))


@pytest.mark.parametrize("bounds", [(-1, None), (None, -1), (5, -1), (-1, 0), (-1, 5), (-2, None)], ids=str)
def test_generation_4_has_no_number_for_unbounded(bounds):
    """A negative bound is a bound there, as in its tests: -1 is not "unbounded", as in generations 2 and 3."""
    with pytest.raises(NotImplementedError, match="one negative bound hides keys beside a query"):
        cute.flash_attn_func(*qkv(), window_size=bounds)


@pytest.mark.parametrize(
    ("bounds", "causal"), [((-1, -1), False), ((-1, -1), True), ((-1, 5), True), ((-1, None), True)], ids=str
)
def test_generation_4_drops_a_window_that_leaves_out_every_key(bounds, causal):
    found, expected = (cute.flash_attn_func(*qkv(), causal=causal, window_size=x)[0] for x in (bounds, (None, None)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("function", "reasons"), [(interface_3.flash_attn_varlen_func, interface_3.REFUSED), (cute.flash_attn_varlen_func, cute.REFUSED)]
)  # fmt: skip
def test_what_the_generations_cannot_honour_is_refused_by_name_with_what_to_do(function, reasons):
    cu = offsets(LENGTHS_Q), offsets(LENGTHS_K), 20, 31
    for name, instead in reasons.items():
        with pytest.raises(NotImplementedError) as error:
            function(*packed(LENGTHS_Q, LENGTHS_K), *cu, **{name: torch.ones(5)})
        assert str(error.value) == f"flash_attn_varlen_func cannot honour\n  {name}: {instead}"
    with pytest.raises(TypeError, match="unexpected keyword argument 'spiral'"):
        function(*packed(LENGTHS_Q, LENGTHS_K), *cu, spiral=1)


NAMES = {
    interface_3.flash_attn_func: "q k v softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap "
    "num_splits pack_gqa deterministic sm_margin return_attn_probs",
    interface_3.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k "
    "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits pack_gqa deterministic "
    "sm_margin return_attn_probs",
    cute.flash_attn_func: "q k v softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic",
    private._flash_attn_forward: "q k v dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes "
    "return_softmax",
    private._flash_attn_backward: "dout q k v out softmax_lse dq dk dv dropout_p softmax_scale causal window_size_left "
    "window_size_right softcap alibi_slopes deterministic rng_state",
}


@pytest.mark.parametrize("function", NAMES, ids=lambda f: f"{f.__module__.rpartition('.')[2]}.{f.__name__}")
def test_positional_arguments_have_the_originals_names_and_order(function):
    parameters = inspect.signature(function).parameters.values()
    assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == NAMES[function].split()


# -- Under their own names ---------------------------------------------------------------------------------------------


@pytest.fixture
def imported(monkeypatch):
    """``import flash_attn`` may find something for one test."""

    def forget():
        for name in [n for n in sys.modules if n.partition(".")[0] in ("flash_attn", "flash_attn_interface")]:
            del sys.modules[name]

    before = dict(sys.modules)
    forget()
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(stand_in.Distributions, "standing", {})
    yield monkeypatch
    forget()
    sys.modules.update(
        {n: m for n, m in before.items() if n.partition(".")[0] in ("flash_attn", "flash_attn_interface")}
    )


nothing_there = pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash_attn is installed")


@nothing_there
def test_installed_under_its_name_it_is_what_libraries_import(imported):
    with pytest.raises(ImportError):
        import flash_attn
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    fa.install_as_flash_attn()
    fa.install_as_flash_attn()  # twice is once
    import flash_attn
    import flash_attn.bert_padding as padding
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, flash_attn_varlen_func

    assert flash_attn.flash_attn_func is fa.flash_attn_func
    assert flash_attn_varlen_func is fa.flash_attn_varlen_func
    assert _wrapped_flash_attn_forward is private._flash_attn_forward
    assert padding.pad_input is bert_padding.pad_input
    assert flash_attn.__version__.split("+") == ["2.8.3", "tilewise"]
    assert importlib.util.find_spec("flash_attn").origin == stand_in.__file__
    for name in ("flash-attn", "flash_attn"):  # what transformers asks, besides who holds the module
        assert importlib.metadata.version(name) == flash_attn.__version__
    assert importlib.metadata.packages_distributions()["flash_attn"] == ["flash-attn"]
    with pytest.raises(ImportError):
        import flash_attn.layers.rotary
    with pytest.raises(ImportError):
        import flash_attn.cute  # not asked for


@nothing_there
def test_every_generation_has_its_own_modules_and_distribution(imported):
    fa.install_as_flash_attn(4)
    fa.install_as_flash_attn(3)
    import flash_attn
    import flash_attn_interface
    from flash_attn.cute import flash_attn_func

    assert not hasattr(flash_attn, "flash_attn_func")
    assert flash_attn_func is cute.flash_attn_func
    assert flash_attn_interface.flash_attn_varlen_func is interface_3.flash_attn_varlen_func
    assert importlib.metadata.version("flash-attn-3").startswith("3.")
    fa.install_as_flash_attn()
    assert flash_attn.flash_attn_func is fa.flash_attn_func
    assert sorted(importlib.metadata.packages_distributions()["flash_attn"]) == ["flash-attn", "flash-attn-4"]
    assert importlib.metadata.version("torch")  # other distributions are found as before
    with pytest.raises(ValueError, match="2, 3 or 4, got 1"):
        fa.install_as_flash_attn(1)


def test_where_flash_attn_is_already_there_it_is_left_alone(imported, tmp_path):
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("__version__ = '2.8.3'\n")
    imported.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"flash_attn is already there .*uninstall it"):
        fa.install_as_flash_attn()
    import flash_attn

    assert flash_attn.__file__ == str(tmp_path / "flash_attn" / "__init__.py")
    with pytest.raises(ValueError, match=r"already there"):
        fa.install_as_flash_attn()
