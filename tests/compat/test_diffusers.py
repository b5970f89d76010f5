"""diffusers' backend: the dispatcher's calls against the formula in float64, and tiny models beside the native backend."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("diffusers", reason="the package diffusers is not installed")
import diffusers as df
from diffusers.models import attention_dispatch as dispatch

from tests.compat.eager import agree, attend, normal
from tilewise.accuracy import judge
from tilewise.compat import diffusers as door
from tilewise.compat.sdpa import patch

B, NQ, NK, H, D = 2, 21, 34, 4, 16


@pytest.fixture(autouse=True)
def _registered():
    """The backend is there for every test, and none leaves it active."""
    door.register()
    active = dispatch._AttentionBackendRegistry._active_backend
    yield
    dispatch._AttentionBackendRegistry.set_active_backend(active)


@pytest.fixture
def calls(monkeypatch) -> list[Tensor | None]:
    """The masks of the calls that arrive."""
    arrived = []

    def counting(*, attn_mask, **call):
        arrived.append(attn_mask)
        return door.attention(attn_mask=attn_mask, **call)

    monkeypatch.setitem(
        dispatch._AttentionBackendRegistry._backends, dispatch.AttentionBackendName("tilewise"), counting
    )
    return arrived


# -- The dispatcher ----------------------------------------------------------------------------------------------------


def qkv(keys: int = NK, heads_k: int = H, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    q = normal(B, NQ, H, D, dtype=dtype, seed=1)
    return q, *(normal(B, keys, heads_k, D, dtype=dtype, seed=seed) for seed in (2, 3))


def lengths(keys: int = NK) -> Tensor:
    return torch.arange(keys) < torch.tensor([[keys], [keys // 2]])


HOLES = torch.rand(B, NK, generator=torch.Generator().manual_seed(5)) < 0.6
FIRST = torch.arange(NK) <= torch.arange(NQ).view(-1, 1)
MASKS = {  # what is passed, and what is kept
    "none": (None, None),
    "lengths": (lengths(), lengths()[:, None, None]),
    "lengths of 4 dimensions": (lengths()[:, None, None], lengths()[:, None, None]),
    "one for the batch": (lengths()[1:, None, None], lengths()[1:, None, None]),
    "no key": (
        lengths() & torch.tensor([[True], [False]]),
        (lengths() & torch.tensor([[True], [False]]))[:, None, None],
    ),
    "everything": (torch.ones(B, NK, dtype=torch.bool), None),
    "holes": (HOLES, HOLES[:, None, None]),
    "pairs": (FIRST, FIRST),
    "pairs of heads": (FIRST.expand(1, H, -1, -1), FIRST),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MASKS)
def test_a_bool_mask_keeps_what_it_says(name, dtype):
    mask, kept = MASKS[name]
    run = partial(
        dispatch.dispatch_attention_fn,
        attn_mask=mask,
        scale=0.3,
        backend="tilewise",
        attention_kwargs={"return_lse": True},
    )
    agree(lambda *x: _lse_like_o(*run(*x)), lambda a, *x: _heads_first(a, *x, scale=0.3, kept=kept), qkv(dtype=dtype))


def _lse_like_o(o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    return o.transpose(1, 2), lse


def _heads_first(arithmetic, q, k, v, **options) -> tuple[Tensor, Tensor]:
    return attend(*(x.transpose(1, 2) for x in (q, k, v)), arithmetic, **options)


@pytest.mark.parametrize("shape", [(B, NK), (B, 1, 1, NK), (1, H, NQ, NK)], ids=str)
def test_a_float_mask_is_added_and_has_its_gradient(shape):
    def formula(arithmetic, q, k, v, added):
        added = added[:, None, None] if added.ndim == 2 else added
        return _heads_first(arithmetic, q, k, v, change=lambda s: s + added)

    def run(q, k, v, added):
        return _lse_like_o(
            *dispatch.dispatch_attention_fn(q, k, v, added, backend="tilewise", attention_kwargs={"return_lse": True})
        )

    agree(run, formula, (*qkv(), normal(*shape, seed=4)))


@pytest.mark.parametrize("keys", [NQ, NK])
def test_causal_is_aligned_at_the_first_query_and_heads_may_be_grouped(keys):
    kept = torch.arange(keys) <= torch.arange(NQ).view(-1, 1)
    with dispatch.attention_backend("tilewise"):
        run = partial(dispatch.dispatch_attention_fn, is_causal=True, enable_gqa=True)
        agree(
            lambda *x: run(*x).transpose(1, 2), lambda a, *x: _heads_first(a, *x, kept=kept)[:1], qkv(keys, 2), ("o",)
        )


def test_dropout_drops_by_the_torch_seed():
    q, k, v = qkv()
    drop = partial(dispatch.dispatch_attention_fn, q, k, v, dropout_p=0.5, backend="tilewise")
    torch.manual_seed(0)
    first, second = drop(), drop()
    torch.manual_seed(0)
    assert torch.equal(drop(), first)
    assert not torch.equal(second, first)


@pytest.mark.parametrize("name", ["none", "lengths", "holes"])
def test_a_compiled_call_is_one_graph(name):
    compiled = torch.compile(dispatch.dispatch_attention_fn, backend="aot_eager", fullgraph=True)
    q, k, v = qkv()
    with dispatch.attention_backend("tilewise"):
        expected = dispatch.dispatch_attention_fn(q, k, v, attn_mask=MASKS[name][0])
        torch.testing.assert_close(compiled(q, k, v, attn_mask=MASKS[name][0]), expected)


WRONG = {
    "heads": (
        lambda q, k, v: door.attention(q, k[:, :, :2], v[:, :, :2]),
        ValueError,
        "grouped ones need enable_gqa=True",
    ),
    "causal and mask": (
        lambda q, k, v: door.attention(q, k, v, lengths(), is_causal=True),
        ValueError,
        "exclude each other",
    ),
    "mask of other keys": (
        lambda q, k, v: door.attention(q, k, v, lengths(9)),
        ValueError,
        "must be bool or floating and broadcast",
    ),
    "everything dropped": (
        lambda q, k, v: door.attention(q, k, v, dropout_p=1.0),
        NotImplementedError,
        "drops everything",
    ),
    "no tensor, and ranks": (
        lambda q, k, v: door.attention(q, k, v, "blocks", _parallel_config=object()),
        NotImplementedError,
        r"cannot honour\n  attn_mask: .*BlockMask\n  _parallel_config: .*context_parallel",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_honoured_says_why(name):
    call, error, says = WRONG[name]
    with pytest.raises(error, match=says):
        call(*qkv())


def test_the_name_is_a_member_of_the_enumeration():
    name = dispatch.AttentionBackendName
    assert name.TILEWISE is name("tilewise") is name["TILEWISE"] is list(name)[-1]
    assert dispatch._AttentionBackendRegistry._backends["tilewise"] is door.attention
    before = len(name), df.ModelMixin.set_attention_backend
    door.register()
    assert before == (len(name), df.ModelMixin.set_attention_backend)


def test_an_older_diffusers_is_refused(monkeypatch):
    monkeypatch.setattr(door.importlib.metadata, "version", lambda _: "0.36.1")
    with pytest.raises(ImportError, match=r"needs diffusers >= 0\.42, here is 0\.36\.1"):
        door.register()


# -- Models that ask ---------------------------------------------------------------------------------------------------

TEXT, IMAGE = 7, 12
CAPTIONS = torch.tensor([[True] * TEXT, [True] * 4 + [False] * 3])
TIMES = torch.tensor([10, 500])


def flux():
    sizes = {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "in_channels": 8,
    }
    model = df.FluxTransformer2DModel(
        **sizes, joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8)
    )
    positions = {"img_ids": normal(IMAGE, 3, seed=3).abs() * 9, "txt_ids": torch.zeros(TEXT, 3)}
    pooled = {"pooled_projections": normal(B, 16, seed=4), "timestep": TIMES / 1000}
    return model, (normal(B, IMAGE, 8, seed=1), normal(B, TEXT, 16, seed=2)), positions | pooled


def chroma():
    sizes = {
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "in_channels": 8,
    }
    approximator = {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1}
    model = df.ChromaTransformer2DModel(**sizes, **approximator, joint_attention_dim=16, axes_dims_rope=(4, 4, 8))
    positions = {"img_ids": normal(IMAGE, 3, seed=3).abs() * 9, "txt_ids": torch.zeros(TEXT, 3)}
    seen = torch.cat([CAPTIONS, torch.ones(B, IMAGE, dtype=torch.bool)], 1)
    return (
        model,
        (normal(B, IMAGE, 8, seed=1), normal(B, TEXT, 16, seed=2)),
        positions | {"timestep": TIMES / 1000, "attention_mask": seen},
    )


def qwen_image():
    sizes = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 8, "out_channels": 2}
    model = df.QwenImageTransformer2DModel(**sizes, joint_attention_dim=16, axes_dims_rope=(4, 6, 6))
    options = {"encoder_hidden_states_mask": CAPTIONS, "timestep": TIMES / 1000, "img_shapes": [[(1, 3, 4)]] * B}
    return model, (normal(B, IMAGE, 8, seed=1), normal(B, TEXT, 16, seed=2)), options


def wan():
    sizes = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 4, "out_channels": 4}
    model = df.WanTransformer3DModel(**sizes, text_dim=16, freq_dim=16, ffn_dim=32, rope_max_seq_len=32)
    return model, (normal(B, 4, 2, 6, 8, seed=1), normal(B, TEXT, 16, seed=2)), {"timestep": TIMES}


def ltx():
    sizes = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 8, "out_channels": 8}
    model = df.LTXVideoTransformer3DModel(**sizes, cross_attention_dim=32, caption_channels=16)
    options = {"timestep": TIMES, "encoder_attention_mask": CAPTIONS.long(), "num_frames": 1, "height": 3, "width": 4}
    return model, (normal(B, IMAGE, 8, seed=1), normal(B, TEXT, 16, seed=2)), options


def hunyuan_video():
    sizes = {
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
    }
    text = {"text_embed_dim": 16, "pooled_projection_dim": 8}
    model = df.HunyuanVideoTransformer3DModel(**sizes, **text, in_channels=4, out_channels=4, rope_axes_dim=(2, 4, 10))
    options = {"timestep": TIMES, "encoder_attention_mask": CAPTIONS.long(), "pooled_projections": normal(B, 8, seed=4)}
    return (
        model,
        (normal(B, 4, 1, 6, 8, seed=1), normal(B, TEXT, 16, seed=2)),
        options | {"guidance": torch.tensor([1000.0, 2000.0])},
    )


def cosmos():
    sizes = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "in_channels": 4, "out_channels": 4}
    model = df.CosmosTransformer3DModel(
        **sizes,
        text_embed_dim=16,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        concat_padding_mask=False,
        extra_pos_embed_type=None,
    )
    options = {"timestep": TIMES, "attention_mask": CAPTIONS, "fps": 30}
    return model, (normal(B, 4, 1, 6, 8, seed=1), normal(B, TEXT, 16, seed=2)), options


def z_image():
    sizes = {
        "n_layers": 1,
        "n_refiner_layers": 1,
        "dim": 32,
        "n_heads": 2,
        "n_kv_heads": 2,
        "in_channels": 4,
        "cap_feat_dim": 16,
    }
    model = df.ZImageTransformer2DModel(**sizes, axes_dims=[4, 4, 8], axes_lens=[128, 32, 32])
    return model, (normal(B, 4, 1, 6, 8, seed=1), normal(B, 40, 16, seed=2)), {"t": TIMES / 1000}


UNMASKED = {"flux", "wan"}  # their captions are of one length
MODELS = {f.__name__: f for f in (flux, chroma, qwen_image, wan, ltx, hunyuan_video, cosmos, z_image)}


def derived(model, latents: Tensor, text: Tensor, options: dict, dtype: torch.dtype) -> dict[str, Tensor]:
    """A model's output, and the gradients of its inputs and of the weights of its attention."""
    model = model.to(dtype)
    latents, text = (x.to(dtype).requires_grad_() for x in (latents, text))
    options = {
        name: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in options.items()
    }
    if isinstance(model, df.ZImageTransformer2DModel):
        found = model(list(latents), cap_feats=[text[0], text[1, :9]], **options, return_dict=False)[0]
        o = torch.stack(found)
    else:
        o = model(latents, encoder_hidden_states=text, **options, return_dict=False)[0]
    weights = {n: w for n, w in model.named_parameters() if ("attn" in n or "attention.to_" in n) and w.ndim > 1}
    weighted = (o * normal(*o.shape, seed=9).to(dtype)).sum()
    grads = torch.autograd.grad(weighted, [latents, text, *weights.values()], allow_unused=True)
    named = zip(("latents", "text", *weights), grads, strict=True)
    return {"o": o.detach()} | {name: g for name, g in named if g is not None}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_asks_gives_what_it_gives_natively(name, calls):
    torch.manual_seed(0)
    stays = {"hunyuan_video": "AttnProcessor2_0"}.get(name)  # in the refiner of its captions
    model, inputs, options = MODELS[name]()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)  # nothing is zero at the start, as some layers would be
    run = partial(derived, model.eval(), *inputs, options)
    model.set_attention_backend("native")
    eager, oracle = run(torch.float32), run(torch.float64)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.set_attention_backend("tilewise")
    assert [f"does not reach {stays}:" in str(w.message) for w in said] == [True] * bool(stays)
    ours = run(torch.float32)
    assert any(mask is not None for mask in calls) == (name not in UNMASKED)
    assert calls
    errors = [judge(n, x, oracle[n], [eager[n]]) for n, x in ours.items()]
    wrong = [str(e) for e in errors if not e.ok]
    assert len(errors) > 5
    assert not wrong, wrong


# -- Models that never ask ---------------------------------------------------------------------------------------------


def dit():
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 1,
        "sample_size": 8,
    }
    model = df.DiTTransformer2DModel(**sizes, num_embeds_ada_norm=10, norm_type="ada_norm_zero")
    return model, (normal(B, 4, 8, 8),), {"timestep": TIMES % 10, "class_labels": torch.tensor([1, 2])}


def sd3():
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "sample_size": 8,
    }
    text = {
        "joint_attention_dim": 16,
        "caption_projection_dim": 16,
        "pooled_projection_dim": 8,
        "pos_embed_max_size": 8,
    }
    options = {"encoder_hidden_states": normal(B, TEXT, 16), "pooled_projections": normal(B, 8), "timestep": TIMES}
    return df.SD3Transformer2DModel(**sizes, **text), (normal(B, 4, 8, 8),), options


def pixart():
    sizes = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 1,
        "sample_size": 8,
    }
    model = df.PixArtTransformer2DModel(
        **sizes, cross_attention_dim=16, caption_channels=16, use_additional_conditions=False
    )
    options = {
        "encoder_hidden_states": normal(B, TEXT, 16),
        "timestep": TIMES,
        "encoder_attention_mask": CAPTIONS.long(),
    }
    return model, (normal(B, 4, 8, 8),), options


def lumina2():
    sizes = {
        "hidden_size": 24,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 2,
        "num_kv_heads": 1,
        "in_channels": 4,
    }
    model = df.Lumina2Transformer2DModel(
        **sizes, axes_dim_rope=(4, 4, 4), axes_lens=(64, 32, 32), cap_feat_dim=16, sample_size=8
    )
    options = {
        "encoder_hidden_states": normal(B, TEXT, 16),
        "timestep": TIMES / 1000,
        "encoder_attention_mask": CAPTIONS,
    }
    return model, (normal(B, 4, 8, 8),), options


def unet():
    blocks = {
        "down_block_types": ("CrossAttnDownBlock2D",),
        "up_block_types": ("CrossAttnUpBlock2D",),
        "block_out_channels": (8,),
    }
    model = df.UNet2DConditionModel(
        **blocks, layers_per_block=1, norm_num_groups=2, cross_attention_dim=16, attention_head_dim=4
    )
    return model, (normal(B, 4, 8, 8),), {"encoder_hidden_states": normal(B, TEXT, 16), "timestep": TIMES}


NEVER = {
    dit: "AttnProcessor2_0",
    sd3: "JointAttnProcessor2_0",
    pixart: "AttnProcessor2_0",
    lumina2: "Lumina2AttnProcessor2_0",
    unet: "AttnProcessor2_0",
}


@pytest.mark.parametrize("make", NEVER, ids=lambda f: f.__name__)
def test_a_model_that_never_asks_warns_by_name_and_is_reached_by_the_patch(make, calls):
    torch.manual_seed(0)
    model, inputs, options = make()
    model.eval()
    with torch.no_grad():
        eager = model(*inputs, **options).sample
        with pytest.warns(
            UserWarning, match=rf"{type(model).__name__}: .* does not reach {NEVER[make]}: .*sdpa\.patch\(\)"
        ):
            model.set_attention_backend("tilewise")
        assert door.never_ask(model) == [NEVER[make]]
        assert torch.equal(model(*inputs, **options).sample, eager)
        with patch():
            ours = model(*inputs, **options).sample
        doubled = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in options.items()}
        oracle = model.double()(*[x.double() for x in inputs], **doubled).sample
    assert calls == []
    error = judge("o", ours, oracle, [eager])
    assert error.ok, error


def test_a_model_of_both_kinds_names_the_ones_that_stay():
    class Both(df.ModelMixin):
        def __init__(self):
            super().__init__()
            self.asks, self.stays = flux()[0], sd3()[0]

    with pytest.warns(UserWarning, match="does not reach JointAttnProcessor2_0: nothing there asks"):
        Both().set_attention_backend("tilewise")
    assert door.never_ask(flux()[0]) == []
