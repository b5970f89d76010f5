"""torch's scaled_dot_product_attention by its documented behaviour, and the patch that brings a whole model to it."""

from __future__ import annotations

import inspect
import threading
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

import tilewise as tw
from tests.compat.eager import agree, attend, normal
from tilewise.compat import sdpa
from tilewise.compat.sdpa import patch, scaled_dot_product_attention

torch_sdpa = F.scaled_dot_product_attention
B, H, NQ, NK, D = 2, 4, 33, 45, 16


def qkv(nq: int = NQ, nk: int = NK, lead=(B, H), lead_k=None, dv: int = D, dtype=torch.float32) -> tuple[Tensor, ...]:
    lead_k = lead if lead_k is None else lead_k
    shapes = (*lead, nq, D), (*lead_k, nk, D), (*lead_k, nk, dv)
    return tuple(normal(*shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes, 1))


def documented(arithmetic, q, k, v, *bias, attn_mask=None, is_causal=False, scale=None, factor=None):
    """What torch documents: top-left causal, a bool mask selects, a floating one is added."""
    kept = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    kept = kept.tril() if is_causal else kept if attn_mask is None else attn_mask
    change = (lambda s: s + bias[0]) if bias else (lambda s: s)
    return attend(q, k, v, arithmetic, scale=scale, change=change, kept=kept, factor=factor)[:1]


def holds(tensors, names=("o",), **options) -> dict[str, Tensor]:
    """The function judged, with its gradients; a fourth tensor is an additive mask."""

    def run(q, k, v, *bias):
        return scaled_dot_product_attention(q, k, v, *bias, **options)

    formula = {name: x for name, x in options.items() if name != "enable_gqa"}
    return agree(run, partial(documented, **formula), tensors, names)


# -- Layout ----------------------------------------------------------------------------------------------------------

LEADS = {"2d": (), "3d": (3,), "4d": (B, H), "5d": (2, 3, 2), "6d": (2, 1, 3, 2)}


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_any_number_of_leading_dimensions(lead, is_causal):
    tensors = qkv(lead=LEADS[lead], dv=5)
    got = holds(tensors, is_causal=is_causal)["o"]
    assert got.shape == torch_sdpa(*tensors).shape


BROADCAST = {
    "one-key-head": ((B, H), (B, 1)),
    "one-key-batch": ((B, H), (1, H)),
    "one-query-batch": ((1, H), (B, H)),
    "one-query-head": ((B, 1), (B, H)),
    "fewer-dimensions": ((B, H), (H,)),
    "no-dimensions": ((B, H), ()),
    "five-and-four": ((3, B, H), (B, H)),
}


@pytest.mark.parametrize("form", BROADCAST)
def test_leading_dimensions_broadcast_and_gradients_are_summed_back(form):
    def formula(arithmetic, *qkv):
        lead = torch.broadcast_shapes(*[x.shape[:-2] for x in qkv])
        return documented(arithmetic, *[x.expand(*lead, *x.shape[-2:]) for x in qkv])

    tensors = qkv(lead=BROADCAST[form][0], lead_k=BROADCAST[form][1])
    got = agree(scaled_dot_product_attention, formula, tensors, ("o",))["o"]
    assert got.shape == torch_sdpa(*tensors).shape


@pytest.mark.parametrize("sizes", [(33, 45), (45, 33), (40, 40), (2, 45), (45, 2), (7, 300)], ids=str)
def test_causal_is_aligned_at_the_first_query_and_key(sizes):
    holds(qkv(*sizes), is_causal=True)


@pytest.mark.parametrize("lead", [(B, H), (H,), (3, B, H)], ids=["4d", "3d", "5d"])
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_enable_gqa_shares_key_heads_between_consecutive_query_heads(lead, is_causal):
    holds(qkv(lead=lead, lead_k=(*lead[:-1], 2)), is_causal=is_causal, enable_gqa=True)


@pytest.mark.parametrize("form", ["heads-last", "sliced", "expanded"])
def test_strided_inputs_are_read_where_they_lie(form):
    forms = {
        "heads-last": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "sliced": lambda x: torch.cat([x, x], -1)[..., :D],
        "expanded": lambda x: x[:1, :1].expand(B, H, -1, -1),
    }
    holds([forms[form](x) for x in qkv()], is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3], ids=["default-scale", "scale"])
def test_dtypes_and_scale(dtype, scale):
    holds(qkv(dtype=dtype), scale=scale, is_causal=True)


@pytest.mark.parametrize("sizes", [(0, 9), (9, 0)], ids=["no-queries", "no-keys"])
def test_no_queries_or_no_keys_give_what_torch_gives(sizes):
    q, k, v = (x.requires_grad_() for x in qkv(*sizes))
    o = scaled_dot_product_attention(q, k, v)
    assert torch.equal(o, torch_sdpa(q, k, v))
    assert all((g == 0).all() for g in torch.autograd.grad(o.sum(), (q, k, v)))


# -- Masks -----------------------------------------------------------------------------------------------------------

SHAPES = [(NQ, NK), (1, NK), (NQ, 1), (NK,), (H, NQ, NK), (H, 1, NK), (B, 1, 1, NK), (B, 1, NQ, NK), (B, H, NQ, NK)]
SHAPES += [(1, H, NQ, 1), (B, H, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bool_mask_of_any_broadcastable_shape_selects(shape):
    holds(qkv(), attn_mask=normal(*shape, seed=5) > -0.5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_additive_mask_of_any_broadcastable_shape_has_its_gradient(shape):
    holds((*qkv(), normal(*shape, seed=5)))


FIVE = [(3, B, H, NQ, NK), (1, 1, 1, NQ, NK), (3, 1, 1, 1, NK), (1, B, 1, NQ, NK), (B, H, NQ, NK), (B, 1, 1, NK)]


@pytest.mark.parametrize("shape", FIVE, ids=str)
def test_masks_of_five_dimensional_inputs_broadcast_in_each(shape):
    holds(qkv(lead=(3, B, H)), attn_mask=normal(*shape, seed=5) > -0.5)
    holds((*qkv(lead=(3, B, H)), normal(*shape, seed=5)))


@pytest.mark.parametrize("lead_k", [(B, 2), (B, 1)], ids=["grouped", "shared"])
def test_masks_are_those_of_query_heads_where_keys_are_shared(lead_k):
    tensors = qkv(lead_k=lead_k)
    holds(tensors, attn_mask=normal(B, H, NQ, NK, seed=5) > -0.5, enable_gqa=True)
    holds((*tensors, normal(H, NQ, NK, seed=5)), enable_gqa=True)


@pytest.fixture
def passed(monkeypatch) -> list[dict]:
    """The keywords that each call hands to ``tw.attention``."""
    calls, attention = [], tw.attention
    monkeypatch.setattr(tw, "attention", lambda *qkv, **options: calls.append(options) or attention(*qkv, **options))
    return calls


@pytest.mark.parametrize("expand", [False, True], ids=["given-small", "expanded-by-the-caller"])
@pytest.mark.parametrize("additive", [False, True], ids=["bool", "additive"])
def test_padding_stays_one_element_per_key(additive, expand, passed):
    mask = normal(B, 1, 1, NK, seed=5)
    mask = mask if additive else mask > 0
    scaled_dot_product_attention(*qkv(), attn_mask=mask.expand(B, H, NQ, NK) if expand else mask)
    (options,) = passed
    (leaf,) = options["score" if additive else "mask"].leaves
    assert leaf.numel() == B * NK
    assert leaf.data_ptr() == mask.data_ptr()


def test_the_gradient_of_a_mask_that_the_caller_expanded_is_its_own():
    q, k, v = qkv()
    wide = normal(1, 1, 1, NK, seed=5).requires_grad_().expand(B, H, NQ, NK)
    (got,) = torch.autograd.grad(scaled_dot_product_attention(q, k, v, wide).square().sum(), wide)
    (expected,) = torch.autograd.grad(
        torch_sdpa(q.double(), k.double(), v.double(), wide.double()).square().sum(), wide
    )
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("additive", [False, True], ids=["bool", "minus-infinity"])
def test_a_row_without_a_key_is_zero_and_passes_on_zero_as_in_torch(additive):
    kept = normal(NQ, NK, seed=5) > 0
    kept[[0, 7, 32]] = False
    mask = torch.zeros(NQ, NK).masked_fill(~kept, -torch.inf) if additive else kept
    for function in (scaled_dot_product_attention, torch_sdpa):
        q, k, v = (x.requires_grad_() for x in qkv())
        o = function(q, k, v, mask)
        (dq,) = torch.autograd.grad(o.sum(), q)
        assert (o[:, :, [0, 7, 32]] == 0).all()
        assert (dq[:, :, [0, 7, 32]] == 0).all()


def test_the_smallest_number_in_a_mask_hides_like_torchs():
    q, k, v = qkv()
    mask = torch.where(normal(B, 1, 1, NK, seed=5) > 0, 0.0, torch.finfo(torch.float32).min)
    mask[1] = torch.finfo(torch.float32).min  # every key alike: the mean of all values
    expected = torch_sdpa(q, k, v, mask)
    torch.testing.assert_close(scaled_dot_product_attention(q, k, v, mask), expected)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=["nan", "inf"])
def test_what_a_key_holds_that_every_query_masks_does_not_matter(bad):
    q, k, v = qkv()
    mask = normal(B, 1, 1, NK, seed=5) > 0
    clean = scaled_dot_product_attention(q, k, v, mask)
    hidden = ~mask.view(B, 1, NK, 1)
    assert torch.equal(
        scaled_dot_product_attention(q, k.masked_fill(hidden, bad), v.masked_fill(hidden, bad), mask), clean
    )


@pytest.mark.parametrize("sizes", [(33, 45), (40, 40)], ids=str)
@pytest.mark.parametrize("variant", ["upper_left", "lower_right"])
def test_causal_biases_keep_their_alignment(variant, sizes):
    from torch.nn.attention import bias

    mask = getattr(bias, f"causal_{variant}")(*sizes)
    agree(
        lambda q, k, v: scaled_dot_product_attention(q, k, v, mask),
        partial(documented, attn_mask=mask._materialize()),
        qkv(*sizes),
        ("o",),
    )


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "additive"])
def test_dropout_is_the_mask_of_torchs_seed(masked):
    torch.manual_seed(11)
    kept = tw.dropout_mask(torch.randint(-(2**63), 2**63 - 1, (1,)), 0.3, B, H, NQ, NK)
    options = {} if masked else {"is_causal": True}

    def run(*tensors):
        torch.manual_seed(11)
        return scaled_dot_product_attention(*tensors, dropout_p=0.3, **options)

    tensors = (*qkv(), normal(H, NQ, NK, seed=5)) if masked else qkv()
    agree(run, partial(documented, factor=kept * (65536 / 45875), **options), tensors, ("o",))


# -- What is wrong, and what is refused ------------------------------------------------------------------------------

WRONG = {
    "mask-and-causal": (lambda f: f(*qkv(dv=5), torch.ones(NQ, NK), is_causal=True), "exclude each other"),
    "mask-shape": (lambda f: f(*qkv(), torch.ones(NQ, NK + 1)), r"broadcast to \(2, 4, 33, 45\)"),
    "mask-dtype": (lambda f: f(*qkv(), torch.ones(NQ, NK, dtype=torch.int64)), "bool or floating"),
    "heads": (lambda f: f(*qkv(lead_k=(B, 2))), "enable_gqa=True"),
    "grouped": (lambda f: f(*qkv(lead_k=(B, 3)), enable_gqa=True), "multiple of heads of k"),
    "batch": (lambda f: f(*qkv(lead_k=(3, H))), "do not broadcast"),
    "one-dimension": (lambda f: f(*(x[0, 0, 0] for x in qkv())), "2 dimensions"),
    "causal-bias": (lambda f: f(*qkv(), causal_lower_right(NQ, NK + 1)), "CausalBias of 33 queries and 46 keys"),
    "dtypes": (lambda f: f(qkv()[0].double(), *qkv()[1:]), "different dtypes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_calls_that_torch_finds_wrong_are_wrong_here_and_say_why(name):
    call, says = WRONG[name]
    with pytest.raises((RuntimeError, IndexError)):
        call(torch_sdpa)
    with pytest.raises(ValueError, match=says):
        call(scaled_dot_product_attention)


def _nested():
    return [torch.nested.nested_tensor([normal(H, n, D), normal(H, 5, D)]) for n in (7, 7, 7)]


pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:There is a performance drop because we have not yet implemented"
)
REFUSED = {
    "nested": (lambda f: f(*_nested()), "attention_varlen"),
    "all-dropped": (lambda f: f(*qkv(), dropout_p=1.0), "zeros"),
    "heads-of-value": (lambda f: f(qkv()[0], normal(B, 2, NK, D), normal(B, 1, NK, D), enable_gqa=True), "repeat"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_runs_and_this_does_not_is_refused_with_the_reason(name):
    call, says = REFUSED[name]
    call(torch_sdpa)
    with pytest.raises(NotImplementedError, match=says):
        call(scaled_dot_product_attention)


def test_vmap_is_torchs():
    x = normal(3, B, H, 9, D)
    ours, theirs = (
        torch.vmap(lambda q, f=f: f(q, q, q, is_causal=True))(x) for f in (scaled_dot_product_attention, torch_sdpa)
    )
    torch.testing.assert_close(ours, theirs)


def test_a_scale_with_a_derivative_is_refused():
    q, one = normal(2, 5, 4), torch.tensor(1.0)

    def attend(scale):
        return scaled_dot_product_attention(q, q, q, scale=scale)

    calls = {
        "requires_grad": lambda: attend(torch.tensor(0.3, requires_grad=True)),
        "jvp": lambda: torch.func.jvp(attend, (one,), (one,)),
        "grad in jvp": lambda: torch.func.jvp(
            lambda s: torch.func.grad(lambda x: (x * attend(s)).sum())(one), (one,), (one,)
        ),
        "vmap": lambda: torch.vmap(attend)(torch.ones(2)),
    }
    for call in calls.values():
        with pytest.raises(NotImplementedError, match="scale is a tensor that has"):
            call()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="tangent"):
        attend(torch.autograd.forward_ad.make_dual(one, one))
    torch.testing.assert_close(torch.vmap(lambda x: attend(one) * x)(torch.ones(1))[0], attend(1.0))


@pytest.mark.parametrize("transform", ["backward of a vmap", "grad of a vmap"])
def test_the_gradient_of_an_expanded_mask_that_is_mapped_over_is_its_own(transform):
    q, narrow = normal(2, 5, 4), normal(3, 2, 1, 5, seed=5)

    def gradient(bias):
        loss = lambda x: torch.vmap(lambda b: scaled_dot_product_attention(q, q, q, b))(x).square().sum()  # noqa: E731
        if transform == "grad of a vmap":
            return torch.func.grad(loss)(bias)
        return torch.autograd.grad(loss(bias.requires_grad_()), bias)[0]

    wide = narrow.expand(-1, -1, 5, -1)
    torch.testing.assert_close(gradient(wide.detach()), gradient(wide.contiguous()))


def test_the_signature_is_torchs():
    p = inspect.signature(scaled_dot_product_attention).parameters
    positional = [n for n, x in p.items() if x.kind is x.POSITIONAL_OR_KEYWORD]
    assert positional == ["query", "key", "value", "attn_mask", "dropout_p", "is_causal"]
    assert {n: x.default for n, x in p.items() if x.kind is x.KEYWORD_ONLY} == {"scale": None, "enable_gqa": False}
    assert [p[n].default for n in positional[3:]] == [None, 0.0, False]


MASKED = {
    "causal": lambda: {"is_causal": True},
    "padding": lambda: {"attn_mask": normal(B, 1, 1, NK, seed=5) > 0},
    "additive": lambda: {"attn_mask": normal(H, NQ, NK, seed=5)},
}


@pytest.mark.parametrize("options", MASKED)
def test_compiled_without_graph_breaks_it_gives_the_same(options):
    torch._dynamo.reset()
    made, tensors = MASKED[options](), [x.requires_grad_() for x in qkv()]
    call = lambda q, k, v: scaled_dot_product_attention(q * 2, k, v, **made).square().sum()  # noqa: E731
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for x, y in zip(*(torch.autograd.grad(f(*tensors), tensors) for f in (compiled, call)), strict=True):
        torch.testing.assert_close(x, y)


# -- patch -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def counted(monkeypatch) -> list[int]:
    """Grows by one with every call that arrives here through the patch and wants no probabilities."""
    calls, function, packed = [], scaled_dot_product_attention, tw.attention_varlen
    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", lambda *a, **o: calls.append(1) or function(*a, **o))
    monkeypatch.setattr(tw, "attention_varlen", lambda *a, **o: calls.append(1) or packed(*a, **o))
    return calls


def encoder(layer=nn.TransformerEncoderLayer, norm_first=False, **options) -> nn.Module:
    torch.manual_seed(0)
    return nn.TransformerEncoder(layer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=norm_first), 2, **options)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluating"])
@pytest.mark.parametrize("masked", ["plain", "padding", "causal"])
def test_a_transformer_encoder_comes_here_with_every_layer(training, masked, counted):
    model, x = encoder().train(training), normal(2, 11, 32)
    padding = torch.arange(11) >= torch.tensor([[11], [7]])
    options = {
        "plain": {},
        "padding": {"src_key_padding_mask": padding},
        "causal": {"mask": nn.Transformer.generate_square_subsequent_mask(11), "is_causal": True},
    }[masked]
    with torch.set_grad_enabled(training):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, of nested tensors
            expected = model(x, **options)
        with patch():
            got = model(x, **options)
    assert len(counted) == 2
    torch.testing.assert_close(got, expected)


ROWS = torch.arange(11) >= torch.tensor([[11], [3]])  # padding
PACKED = {  # the encoder, its padding, and the tokens that a layer should see: fewer than 2 * 11 where rows are packed
    "bool": (lambda: encoder(), ROWS, 14),
    "floating": (lambda: encoder(), torch.zeros(2, 11).masked_fill(ROWS, -torch.inf), 14),
    "an-empty-row": (lambda: encoder(), torch.stack([ROWS[0], torch.ones(11, dtype=torch.bool)]), 11),
    "a-last-norm": (lambda: encoder(norm=nn.LayerNorm(32, bias=True)), ROWS, 14),
    "a-norm-first": (lambda: encoder(norm_first=True), ROWS, 22),
    "told-not-to": (lambda: encoder(enable_nested_tensor=False), ROWS, 22),
    "in-the-middle": (lambda: encoder(), torch.arange(11) == 4 * torch.ones(2, 1), 22),
    "no-token": (lambda: encoder(), torch.ones(2, 11, dtype=torch.bool), 22),
    "a-layer-of-their-own": (lambda: encoder(layer=OwnLayer), ROWS, 22),
}


class OwnLayer(nn.TransformerEncoderLayer):
    """It may look at neighbours of a token, which packing changes."""


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", PACKED)
def test_rows_are_packed_without_their_padding_where_torch_packs_them(name, counted):
    make, padding, tokens = PACKED[name]
    model, x, seen = make().eval(), normal(2, 11, 32), []
    with torch.no_grad():
        torch.backends.mha.set_fastpath_enabled(tokens < 22)
        try:
            expected = model(x, src_key_padding_mask=padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        for layer in model.layers:
            attend = layer.self_attn.forward
            layer.self_attn.forward = lambda q, *a, attend=attend, **o: (
                seen.append(q[..., 0].numel()) or attend(q, *a, **o)
            )
        with patch():
            got = model(x, src_key_padding_mask=padding)
    assert (len(counted), seen) == (2, [tokens] * 2)
    torch.testing.assert_close(got, expected)


def test_hooks_and_gradients_see_the_rows_as_they_came(counted):
    model, x, shapes = encoder().eval(), normal(2, 11, 32), []
    with patch():
        model(x, src_key_padding_mask=ROWS).sum().backward()
        with torch.no_grad():
            model.layers[1].linear1.register_forward_hook(lambda module, given, out: shapes.append(out.shape))
            model(x, src_key_padding_mask=ROWS)
    assert (len(counted), shapes) == (4, [(2, 11, 64)])
    assert model.layers[0].linear1.weight.grad.abs().sum() > 0


def test_gradients_of_a_patched_model_are_its_own():
    model, x = encoder(), normal(2, 11, 32)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    with patch():
        got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def _state() -> tuple:
    return F.scaled_dot_product_attention, F.multi_head_attention_forward, torch.backends.mha.get_fastpath_enabled()


def test_the_originals_are_back_after_any_nesting_and_after_an_exception(counted):
    before, q = _state(), normal(1, 1, 3, 8)
    once = patch()
    with once, patch("warn"), once:
        F.scaled_dot_product_attention(q, q, q)
        assert not torch.backends.mha.get_fastpath_enabled()
    assert _state() == before
    with pytest.raises(KeyError), patch(), patch():
        raise KeyError
    assert _state() == before
    F.scaled_dot_product_attention(q, q, q)
    assert len(counted) == 1


def test_a_patch_counts_the_calls_that_arrive():
    q = normal(1, 1, 3, 8)
    with patch() as outer:
        F.scaled_dot_product_attention(q, q, q)
        with patch() as inner, outer:
            F.scaled_dot_product_attention(q, q, q)
            encoder().eval()(normal(2, 11, 32))
        assert (outer.calls, inner.calls) == (4, 3)
    with outer:
        assert outer.calls == 0
        F.scaled_dot_product_attention(q, q, q)
    assert outer.calls == 1


def test_a_patch_where_nothing_arrives_warns_at_its_end():
    q = normal(1, 1, 3, 8)
    with (
        pytest.warns(RuntimeWarning, match="no call of scaled_dot_product_attention arrived inside patch") as said,
        patch(),
    ):
        torch_sdpa(q, q, q)  # a name of before
    assert [x.filename for x in said] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with patch() as p, p:
            F.scaled_dot_product_attention(q, q, q)
        with pytest.raises(KeyError), patch():
            raise KeyError


def test_compiled_code_counts_as_arrived_and_compiles_once():
    torch._dynamo.reset()
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(3):
            with patch() as p:
                compiled(normal(1, 2, 9, 8))
                compiled(normal(1, 2, 9, 8))
            assert (p.calls, p.compiled) == (0, True)


@pytest.mark.filterwarnings("ignore:no call of scaled")
def test_a_fast_path_that_was_off_stays_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with patch():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_it_decorates_a_function(counted):
    q = normal(1, 1, 3, 8)

    @patch()
    def step():
        return F.scaled_dot_product_attention(q, q, q)

    torch.testing.assert_close(step(), torch_sdpa(q, q, q))
    step()
    assert len(counted) == 2


@pytest.mark.filterwarnings("ignore:no call of scaled")
def test_threads_may_enter_and_leave_in_any_order():
    before, steps = _state(), [threading.Event() for _ in range(3)]

    def other():
        with patch():
            steps[0].set()
            steps[1].wait(10)
        steps[2].set()

    thread = threading.Thread(target=other)
    thread.start()
    steps[0].wait(10)
    with patch():
        steps[1].set()
        steps[2].wait(10)
        assert F.scaled_dot_product_attention is not torch_sdpa  # the other has left, this one has not
    thread.join()
    assert _state() == before


@pytest.mark.filterwarnings("ignore:no call of scaled")
def test_a_name_taken_inside_works_outside():
    with patch():
        taken = F.scaled_dot_product_attention
    q = normal(1, 1, 3, 8)
    assert torch.equal(taken(q, q, q), torch_sdpa(q, q, q))


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_raises_or_warns_and_never_runs_silently(name):
    call, says = REFUSED[name]
    with patch(), pytest.raises(NotImplementedError, match=says):
        call(F.scaled_dot_product_attention)
    with patch("warn"), pytest.warns(RuntimeWarning, match=r"torch's own function runs") as said:
        got = call(F.scaled_dot_product_attention)
    assert said[0].filename == __file__
    if name != "nested":
        torch.testing.assert_close(got, call(torch_sdpa))


TAKEN_BY_TORCH = {
    "head-dim-0": (lambda f: f(*(x[..., :0] for x in qkv()[:2]), qkv()[2]), "head_dim is 0"),
    "rare-dropout": (lambda f: f(*qkv(), dropout_p=1e-9), "dropout_p 1e-09"),
}


@pytest.mark.parametrize("name", TAKEN_BY_TORCH)
def test_what_is_wrong_here_and_right_for_torch_raises_or_warns(name):
    call, says = TAKEN_BY_TORCH[name]
    with patch(), pytest.raises(ValueError, match=says):
        call(F.scaled_dot_product_attention)
    with patch("warn"), pytest.warns(RuntimeWarning, match=says) as said:
        got = call(F.scaled_dot_product_attention)
    assert said[0].filename == __file__
    torch.testing.assert_close(got, call(torch_sdpa))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_raises_our_reason_where_torch_would_be_asked(name):
    call, says = WRONG[name]
    with patch("warn"), pytest.raises(ValueError, match=says):
        call(F.scaled_dot_product_attention)


def test_a_wrong_call_is_wrong_however_the_patch_was_asked():
    with patch("warn"), pytest.raises(ValueError, match="enable_gqa"):
        WRONG["heads"][0](F.scaled_dot_product_attention)


F64 = torch.float64
HIDDEN = torch.arange(11) >= torch.tensor([[11], [7]])
WATCHED = {
    "plain": ({}, {}),
    "per-head": ({}, {"average_attn_weights": False}),
    "padding": ({}, {"key_padding_mask": HIDDEN}),
    "causal": ({}, {"attn_mask": nn.Transformer.generate_square_subsequent_mask(11, dtype=F64), "is_causal": True}),
    "both": (
        {},
        {"attn_mask": torch.ones(11, 11).triu(3) > 0, "key_padding_mask": HIDDEN, "average_attn_weights": False},
    ),
    "more-keys": ({"add_bias_kv": True, "add_zero_attn": True}, {}),
    "other-widths": ({"kdim": 32, "vdim": 32, "batch_first": True}, {"average_attn_weights": False}),
}


@pytest.mark.filterwarnings("ignore:need_weights=True")
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "alone"])
@pytest.mark.parametrize("name", WATCHED)
def test_attention_weights_are_torchs_with_their_gradients(name, batched):
    made, options = WATCHED[name]
    torch.manual_seed(0)
    model = nn.MultiheadAttention(32, 4, **({"batch_first": True} | made), dtype=F64)
    x = normal(2, 11, 32, dtype=F64)
    x = x.requires_grad_() if batched else x[0].requires_grad_()
    options = {n: m if batched or n != "key_padding_mask" else m[1] for n, m in options.items()}

    def results() -> list[Tensor]:
        o, weights = model(x, x, x, **options)
        loss = o.square().sum() + weights.square().sum()
        return [o, weights, *torch.autograd.grad(loss, [x, *model.parameters()])]

    expected = results()
    with patch():
        got = results()
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_attention_weights_are_said_to_take_memory_and_have_the_outputs_dropout():
    model, x = nn.MultiheadAttention(32, 4, dropout=0.4, batch_first=True), normal(2, 11, 32)
    with patch(), pytest.warns(UserWarning, match=r"\(2, 4, 11, 11\), in O\(N²\) memory; pass need_weights=False"):
        o, weights = model(x, x, x, average_attn_weights=False)
    assert 0.3 < (weights == 0).float().mean() < 0.5
    values = F.linear(x, model.in_proj_weight[64:], model.in_proj_bias[64:]).unflatten(-1, (4, 8)).transpose(1, 2)
    torch.testing.assert_close(o, model.out_proj((weights @ values).transpose(1, 2).flatten(2)))


def test_attention_weights_of_what_cannot_run_are_torchs_or_refused():
    model, x = nn.MultiheadAttention(32, 4, dropout=1.0, batch_first=True), normal(2, 11, 32)
    with patch(), pytest.raises(NotImplementedError, match="zeros"):
        model(x, x, x)
    with patch("warn"), pytest.warns(RuntimeWarning, match="zeros"):
        o, weights = model(x, x, x)
    assert weights.shape == (2, 11, 11)
    torch.testing.assert_close(o, model.out_proj(torch.zeros_like(x)))


# -- TorchScript, which torch calls deprecated and libraries still use -------------------------------------------------


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        o = F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.25)
        y, weights = self.layer(o, o, o)
        assert weights is not None
        return y, weights


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:need_weights=True")
def test_what_is_scripted_inside_follows_the_patch_and_spoils_nothing(counted):
    model, x = Scripted().eval(), normal(2, 11, 32)
    expected = model(x)
    with patch():
        scripted = torch.jit.script(model)
        torch.testing.assert_close(scripted(x), expected)
    assert len(counted) == 1  # the module's attention, which wants probabilities, is not counted
    torch.testing.assert_close(scripted(x), expected)
    torch.testing.assert_close(torch.jit.script(Scripted().eval())(x), expected)
    assert len(counted) == 1


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:no call of scaled", "ignore:The PyTorch API of"
)
def test_an_encoder_is_scripted_as_torch_wrote_it():
    model, x = encoder().eval(), normal(2, 11, 32)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=ROWS)
        with patch():
            scripted = torch.jit.script(model)
            torch.testing.assert_close(scripted(x, src_key_padding_mask=ROWS), expected)
        torch.testing.assert_close(torch.jit.script(model)(x, src_key_padding_mask=ROWS), expected)


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match=r'"raise" or "warn"'):
        patch("ignore")


@pytest.mark.filterwarnings("ignore:need_weights=True")
def test_a_compiled_module_gives_its_weights_without_graph_breaks():
    torch._dynamo.reset()
    model, x = nn.MultiheadAttention(32, 4, batch_first=True), normal(2, 11, 32)
    expected = model(x, x, x)
    with patch():
        got = torch.compile(model, fullgraph=True, backend="aot_eager")(x, x, x)
    torch.testing.assert_close(got, expected)


def test_a_compiled_model_follows_the_patch_in_and_out(counted):
    torch._dynamo.reset()
    call = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), backend="aot_eager")
    q = normal(1, 2, 9, 8)
    expected = call(q)
    with patch():
        inside = call(q)
        seen = len(counted)
    assert seen >= 1
    torch.testing.assert_close(inside, expected)
    assert torch.equal(call(q), expected)
    assert len(counted) == seen


def test_an_expanded_mask_that_no_transform_holds_is_read_once_inside_one():
    mask, seen = torch.zeros(1, 1, 1, 5).expand(1, 2, 5, 5), []

    def asked(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        seen.append([sdpa.is_repeated(y, 1) for y in (mask, held)])
        return x.sum() + held.sum()

    torch.func.grad(lambda x: asked(x, x[None, None].expand(1, 2, 5, 5)))(torch.zeros(5, 5))
    assert seen == [[True, False]]


def test_sizes_that_become_symbols_of_a_compiled_function_still_broadcast():
    """For Dynamo of PyTorch 2.13 a number is in no tuple of symbols: the second call was refused, its mask for a shape that it has."""

    def attend(q, k, mask):
        return scaled_dot_product_attention(q, k, k, attn_mask=mask)

    torch.compiler.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    for heads_k, rows in ((1, 1), (2, 6), (2, 6)):
        q, k, mask = normal(1, 2, 6, D), normal(1, heads_k, 6, D), normal(heads_k, rows, 6)
        torch.testing.assert_close(compiled(q, k, mask), attend(q, k, mask))
