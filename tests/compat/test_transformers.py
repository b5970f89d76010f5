"""Hugging Face models with ``attn_implementation="tilewise"``: eager's logits, gradients and tokens; refusals say why."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import itertools
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewise as tw
from tests.compat import every
from tilewise.accuracy import judge

hf = pytest.importorskip("transformers")
masking = importlib.import_module("transformers.masking_utils")
compat = importlib.import_module("tilewise.compat.transformers")
compat.register()

N = 19
ORDERS = 8  # of eager: on few numbers one order may be lucky
DECODER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LOCAL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
NO_DROPOUT = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
VISION = {"image_size": 32, "patch_size": 8, "num_labels": 10}
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0, "vocab_size": 128}


class Row(NamedTuple):
    config: str
    model: str
    arguments: dict


MODELS = {
    "llama": Row("LlamaConfig", "LlamaForCausalLM", DECODER),
    "qwen3": Row("Qwen3Config", "Qwen3ForCausalLM", DECODER),
    "mistral": Row("MistralConfig", "MistralForCausalLM", DECODER | {"sliding_window": 5}),
    "gemma2": Row("Gemma2Config", "Gemma2ForCausalLM", DECODER | LOCAL | {"attn_logit_softcapping": 2.0}),
    "gemma3": Row("Gemma3TextConfig", "Gemma3ForCausalLM", DECODER | LOCAL),
    "gpt-oss": Row(
        "GptOssConfig", "GptOssForCausalLM", DECODER | LOCAL | {"num_local_experts": 2, "num_experts_per_tok": 2}
    ),
    "t5": Row("T5Config", "T5ForConditionalGeneration", T5 | {"decoder_start_token_id": 0}),
    "bert": Row("BertConfig", "BertForMaskedLM", DECODER | NO_DROPOUT),
    "vit": Row("ViTConfig", "ViTForImageClassification", DECODER | NO_DROPOUT | VISION),
}
GENERATING = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "gpt-oss", "t5")


@pytest.fixture(autouse=True)
def _quiet():
    """What is said of matrices that models make, here T5 (one test expects it), and of names that transformers changes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the model hands over")
        warnings.filterwarnings("ignore", message="`gradient_checkpointing_enable` is deprecated")
        yield


def build(name: str, **changes) -> torch.nn.Module:
    """Random weights, large enough that attention is far from uniform; the same ones at every call."""
    row = MODELS[name]
    torch.manual_seed(0)
    model = getattr(hf, row.model)(getattr(hf, row.config)(**(row.arguments | changes))).eval()
    if name == "gpt-oss":
        model.set_experts_implementation("eager")  # the grouped product of the default knows no float64
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name or "bias" in parameter_name:
                parameter.normal_(0, 0.5)
    return model


def use(model: torch.nn.Module, implementation: str) -> torch.nn.Module:
    model.set_attn_implementation(implementation)
    return model


def tokens(length: int = N, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, 128, (batch, length), generator=torch.Generator().manual_seed(1))


def padded(side: str) -> torch.Tensor:
    kept = torch.ones(2, N, dtype=torch.int64)
    kept[1, {"left": slice(0, 7), "right": slice(-7, None), "none": slice(0, 0)}[side]] = 0
    return kept


def inputs(name: str, side: str) -> tuple[dict, torch.Tensor | None]:
    """A model's inputs, and which rows of its logits are no padding."""
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}, None
    given, kept = {"input_ids": tokens()}, padded(side)
    if side != "none":
        given["attention_mask"] = kept
    if name == "t5":
        return given | {"decoder_input_ids": tokens(11)}, None
    if side == "left" and name != "bert":
        given["position_ids"] = (kept.cumsum(-1) - 1).clamp(min=0)
    return given, kept.bool()


def results(model: torch.nn.Module, given: dict, rows: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The logits that are no padding, and every parameter's gradient of a fixed weighting of them."""
    model.zero_grad()
    logits = model(**{k: x.to(model.dtype) if x.is_floating_point() else x for k, x in given.items()}).logits
    logits = logits if rows is None else logits[rows]
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
    (logits * weights.to(logits)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    for weight in [n for n, g in gradients.items() if g.ndim == 2]:
        bias = gradients.pop(weight.removesuffix("weight") + "bias", None)
        if (
            bias is not None
        ):  # one affine map, its bias a column of it: alone, that of the keys is zero but for rounding
            gradients[weight] = torch.cat([gradients[weight], bias[:, None]], 1)
    return {"logits": logits.detach()} | gradients


class Exactly(TorchFunctionMode):
    """A float64 model to the end: its code asks for float32 in softmax, norms and rotary embeddings."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        exact = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*[exact(x) for x in args], **{name: exact(x) for name, x in (kwargs or {}).items()})


class Reordered(TorchFunctionMode):
    """An equally good order of computation: the sums of matrix products, forward and backward, taken in another order."""

    def __init__(self, seed: int):
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            x, weight, bias = (*args, kwargs.get("bias"))[:3] if len(args) == 2 else args
            rows, inner = (torch.randperm(n, generator=self.generator) for n in (x.shape[:-1].numel(), x.shape[-1]))
            out = func(x.flatten(0, -2)[rows][:, inner], weight[:, inner], bias)
            return out[rows.argsort()].unflatten(0, x.shape[:-1])
        if func is torch.matmul and args[0].ndim == 4:
            inner = torch.randperm(args[0].shape[-1], generator=self.generator)
            return func(args[0][..., inner], args[1][..., inner, :])
        return func(*args, **kwargs)


def disagreements(
    model: torch.nn.Module,
    found: dict,
    given: dict,
    rows: torch.Tensor | None = None,
    of=results,
    beside: str = "eager",
) -> list[str]:
    """``found`` against eager in float64, beside eager's own error in float32; compared are the names in ``found``."""
    use(model, beside)
    eager = [of(model, given, rows)]
    for seed in range(ORDERS):
        with Reordered(seed):
            eager.append(of(model, given, rows))
    with Exactly():
        exact = of(copy.deepcopy(model).double(), given, rows)
    assert found.keys() in (exact.keys(), {"logits"})
    errors = [judge(n, x, exact[n], [e[n] for e in eager]) for n, x in found.items()]
    return [str(error) for error in errors if not error.ok]


# -- Logits and gradients ------------------------------------------------------------------------------------------


CASES = [
    (name, side, mode)
    for name, (side, mode) in itertools.product(
        MODELS, [("none", "eval"), ("left", "eval"), ("right", "eval"), ("left", "train")]
    )
    if name != "vit" or side == "none"
] + [("vit", "none", "train")]


@pytest.mark.parametrize(("name", "side", "mode"), CASES)
def test_a_model_gives_eagers_logits_and_gradients(name, side, mode):
    model = build(name).train(mode == "train")
    given, rows = inputs(name, side)
    found = results(use(model, "tilewise"), given, rows)
    assert disagreements(model, found, given, rows) == []


@pytest.mark.parametrize(
    ("name", "told"),
    # transformers' GPT-OSS hands its positions to no mask: there only cu_seq_lens tell the sequences apart.
    [("llama", False), ("llama", True), ("gemma2", False), ("gemma2", True), ("gpt-oss", True)],
)
def test_packed_positions_or_cu_seq_lens_give_each_sequence_alone(name, told):
    model = use(build(name, use_cache=False), "tilewise")  # with a cache, positions tell no sequences apart
    lengths = (7, 11, 1, 6)
    row = tokens(sum(lengths), batch=1)
    given = {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}
    if told:
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        given |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 11, "max_length_k": 11}
    packed = model(row, **given).logits.detach()
    for part, logits in zip(row.split(lengths, 1), packed.split(lengths, 1), strict=True):
        assert disagreements(model, {"logits": logits}, {"input_ids": part}) == []


def test_no_matrix_of_queries_and_keys_is_made():
    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes = [x.numel() for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
            Largest.elements = max([Largest.elements, *sizes])
            return out

    length = 512
    model, kept = use(build("mistral", max_position_embeddings=length), "tilewise"), torch.ones(2, length)
    kept[0, :100] = 0
    kept[1, 200:220] = 0  # a hole: no interval
    with Largest():
        model(tokens(length), attention_mask=kept).logits.sum().backward()
    assert Largest.elements < length * length


def test_checkpointed_layers_give_the_same_gradients():
    given, rows = inputs("mistral", "left")
    model = use(build("mistral"), "tilewise").train()
    plain = results(model, given, rows)
    model.gradient_checkpointing_enable()
    checkpointed = results(model, given, rows)
    assert all(torch.equal(plain[n], checkpointed[n]) for n in plain)


def test_dropout_of_the_configuration_is_drawn_in_training_alone():
    model, given = use(build("llama", attention_dropout=0.5), "tilewise"), inputs("llama", "none")[0]
    still = use(build("llama"), "tilewise")(**given).logits
    assert torch.equal(model(**given).logits, still)
    drawn = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(model.train()(**given).logits)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], still)


@pytest.mark.parametrize(
    ("kind", "pad", "changes"),
    [
        ("mistral", "right", {"num_hidden_layers": 1}),  # seconds a layer
        ("llama", "none", {"num_hidden_layers": 1}),
        ("gemma2", "left", {}),
        ("bert", "right", {"num_hidden_layers": 1}),
        ("t5", "right", {"num_layers": 1}),
    ],
)
def test_a_compiled_model_is_one_graph_with_eagers_logits_and_gradients(kind, pad, changes):
    model = use(build(kind, **changes), "tilewise")
    given, rows = inputs(kind, pad)
    forward, model.forward = model.forward, torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    found = results(model, given, rows)
    model.forward = forward
    assert disagreements(model, found, given, rows) == []


def test_the_layers_of_one_graph_share_what_is_made_of_their_mask():
    torch._dynamo.reset()
    model, graphs = use(build("llama"), "tilewise"), []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        torch.compile(model.forward, backend=backend, fullgraph=True)(**inputs("llama", "right")[0])
    calls = [node for node in graphs[0].graph.nodes if node.target is torch.ops.tilewise.attention.default]
    assert len(calls) == model.config.num_hidden_layers > 1
    assert calls[0].args[3]  # the tensors of the mask
    assert all(node.args[3] == calls[0].args[3] for node in calls)


def masked_otherwise(kind: str) -> dict:
    """Keywords of a model whose mask is not one of the two sides."""
    if kind == "holes":
        kept = torch.ones_like(tokens())
        kept[0, 3:5] = 0
        return {"attention_mask": kept}
    positions = torch.arange(N).repeat(2, 1)
    if kind == "packed":
        positions[:, 8:] -= 8
    return {"position_ids": positions}


@pytest.mark.parametrize("kind", ["one", "packed", "holes"])
def test_one_graph_has_the_masks_of_packed_sequences_and_of_padding_with_holes(kind):
    model, given = use(build("mistral", num_hidden_layers=1), "tilewise"), masked_otherwise(kind)
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    found, expected = (f(tokens(), **given, use_cache=False).logits for f in (compiled, model.forward))
    torch.testing.assert_close(found, expected)


def test_one_graph_has_chunks_beside_a_padding_mask():
    dense = {"intermediate_size_mlp": 96, "moe_layers": [], "num_local_experts": 2, "attention_chunk_size": 5}
    config = hf.Llama4TextConfig(**DECODER | dense | {"num_hidden_layers": 1}, attn_implementation="tilewise")
    model, kept = hf.Llama4ForCausalLM(config).eval(), padded("left")
    assert config.layer_types == ["chunked_attention"]
    compiled = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    found, expected = (f(tokens(), attention_mask=kept, use_cache=False).logits for f in (compiled, model.forward))
    torch.testing.assert_close(found[kept.bool()], expected[kept.bool()])


def test_chunks_beside_cu_seq_lens_are_refused_and_not_dropped():
    dense = {"intermediate_size_mlp": 96, "moe_layers": [], "num_local_experts": 2, "attention_chunk_size": 5}
    config = hf.Llama4TextConfig(**DECODER | dense | {"num_hidden_layers": 1}, attn_implementation="tilewise")
    starts = torch.tensor([0, 11], dtype=torch.int32)
    given = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 11, "max_length_k": 11}
    with pytest.raises(ValueError, match=r"chunks \(leave cu_seq_lens out, pass position_ids\)"):
        hf.Llama4ForCausalLM(config).eval()(tokens()[:1, :11], **given, use_cache=False)


def test_a_mask_function_that_says_what_made_it_keeps_the_same_pairs():
    place = torch.arange(12)
    asked = torch.tensor(0), torch.tensor(0), place[:, None], place
    ids = (place // 5)[None]
    for make, *given in (
        (masking.sliding_window_causal_mask_function, 4),
        (masking.packed_sequence_mask_function, ids),
        (masking.chunked_causal_mask_function, 3, torch.tensor([2])),
        (masking.and_masks, masking.causal_mask_function, masking.sliding_window_overlay(2)),
    ):
        found = make(*given)
        assert isinstance(found, compat.masks.Described)
        assert len(inspect.signature(found).parameters) == 4, "FlexAttention counts them"
        assert torch.equal(found(*asked), found.function(*asked))
    assert not compat.masks.is_told({"q_length": 4, "kv_length": 4, "mask_function": lambda b, h, q, kv: kv <= q})
    counted = {"q_length": 4, "kv_length": 8, "mask_function": masking.causal_mask_function}
    assert compat.masks.is_told(counted)
    assert not compat.masks.is_told(counted | {"q_offset": torch.tensor(4)})


def loss(model: torch.nn.Module, given: dict, _: None) -> dict[str, torch.Tensor]:
    """The loss, and every parameter's gradient."""
    model.zero_grad()
    found = model(**given).loss
    found.backward()
    return {"loss": found.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


def test_a_left_padded_text_has_sdpas_loss_which_is_not_eagers():
    """Its first token is predicted from a row of padding, which sees no key: zero in SDPA and here, the mean of all values in eager."""
    model, kept = build("llama"), padded("left")
    given = {"input_ids": tokens(), "attention_mask": kept, "labels": tokens().masked_fill(kept == 0, -100)}
    found = loss(use(model, "tilewise"), given, None)
    assert disagreements(model, given=given, found=found, of=loss, beside="sdpa") == []
    assert "loss" in " ".join(disagreements(model, given=given, found=found, of=loss))


# -- Probabilities -------------------------------------------------------------------------------------------------

GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64, "initializer_range": 0.2}
GPT |= {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
OPT |= {"word_embed_proj_dim": 64, "max_position_embeddings": 64, "init_std": 0.2, "dropout": 0.0}
# Models whose code hands output_attentions over, and models that leave it to transformers' hooks.
WATCHED = {
    "llama": MODELS["llama"],
    "gpt-oss": MODELS["gpt-oss"],
    "t5": MODELS["t5"],
    "gpt2": Row("GPT2Config", "GPT2LMHeadModel", GPT),
    "gpt-bigcode": Row("GPTBigCodeConfig", "GPTBigCodeForCausalLM", GPT),
    "opt": Row("OPTConfig", "OPTForCausalLM", OPT),
    "stablelm": Row("StableLmConfig", "StableLmForCausalLM", DECODER),
    "nemotron": Row("NemotronConfig", "NemotronForCausalLM", DECODER),
    "siglip": Row("SiglipVisionConfig", "SiglipVisionModel", {k: v for k, v in (DECODER | VISION).items() if k != "num_labels"}),
}  # fmt: skip


def watched(model: torch.nn.Module, given: dict, rows: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The probabilities of every layer in the rows that are no padding, and the gradients of a fixed weighting of them."""
    model.zero_grad()
    outputs = model(
        **{k: x.to(model.dtype) if x.is_floating_point() else x for k, x in given.items()}, output_attentions=True
    )
    found, loss = {}, 0.0
    for kind in [name for name in outputs if name.endswith("attentions")]:
        for layer, x in enumerate(outputs[kind]):
            found[f"{kind} {layer}"] = x = x if rows is None else x.transpose(1, 2)[rows]
            loss = loss + (x * torch.randn(x.shape, generator=torch.Generator().manual_seed(layer)).to(x)).sum()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None and n.endswith("weight")}
    return {n: x.detach() for n, x in found.items()} | gradients


@pytest.mark.parametrize("name", WATCHED)
def test_output_attentions_are_eagers(name, monkeypatch):
    monkeypatch.setitem(MODELS, name, WATCHED[name])
    model = build(name)
    vision = {"pixel_values": torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))}
    given, rows = (vision, None) if name == "siglip" else inputs(name, "none" if name == "t5" else "right")
    found = watched(use(model, "tilewise"), given, rows)
    assert sum("attentions" in n for n in found) == (6 if name == "t5" else 2)
    assert disagreements(model, found, given, rows, of=watched) == []


# -- Families that never ask the interface -------------------------------------------------------------------------

FALCON = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "initializer_range": 0.2,
}
FALCON |= {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "parallel_attn": False,
}
NEO = {
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "window_size": 5,
}
NEO |= {"attention_types": [[["global", "local"], 1]], "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2}
NEO |= {"attention_dropout": 0.0, "resid_dropout": 0.0, "embed_dropout": 0.0}
BLOOM = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "initializer_range": 0.2, "bos_token_id": 1}
FAMILIES = {
    "gptj": Row("GPTJConfig", "GPTJForCausalLM", GPT | {"rotary_dim": 8}),
    "gpt-neo": Row("GPTNeoConfig", "GPTNeoForCausalLM", NEO),
    "bloom": Row("BloomConfig", "BloomForCausalLM", BLOOM | {"eos_token_id": 2, "pad_token_id": 0}),
    "falcon": Row("FalconConfig", "FalconForCausalLM", FALCON | {"multi_query": True, "new_decoder_architecture": False}),
    "falcon-new": Row("FalconConfig", "FalconForCausalLM", FALCON | {"num_kv_heads": 2, "parallel_attn": True}),
}  # fmt: skip


def both(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A family's model with tilewise and the same with eager attention."""
    models = []
    for implementation in ("tilewise", "eager"):
        torch.manual_seed(0)
        row = FAMILIES[name]
        model = getattr(hf, row.model)._from_config(
            getattr(hf, row.config)(**row.arguments), attn_implementation=implementation
        )
        assert model.config._attn_implementation == implementation
        models.append(model.eval())
    return tuple(models)


def of_eager(eager: torch.nn.Module, found: dict, given: dict, rows: torch.Tensor | None, of=results) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return disagreements(eager, found, given, rows, of=of)


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_without_the_interface_gives_eagers_logits_and_gradients(name, side):
    model, eager = both(name)
    given, rows = inputs(name, side)
    found = results(model, given, rows)
    assert of_eager(eager, found, given, rows) == []
    if not name.startswith("falcon"):
        found = watched(model, given, rows)
        assert of_eager(eager, found, given, rows, of=watched) == []


@pytest.mark.parametrize("name", ["gptj", "gpt-neo", "bloom", "falcon"])
def test_a_family_without_the_interface_generates_eagers_tokens(name):
    said = [
        m.generate(
            tokens()[:, -9:],
            attention_mask=padded("left")[:, 5:14],
            max_new_tokens=9,
            min_new_tokens=9,
            do_sample=False,
        )
        for m in both(name)
    ]
    assert said[0].tolist() == said[1].tolist()


def test_what_these_families_cannot_do_is_refused():
    model, _ = both("falcon")
    with pytest.raises(NotImplementedError, match="computes with its attention mask"):
        model(tokens(), output_attentions=True)
    alibi = hf.FalconConfig(**FALCON | {"alibi": True, "new_decoder_architecture": False})
    with pytest.raises(AttributeError, match="computes with its attention mask"):
        hf.FalconForCausalLM._from_config(alibi, attn_implementation="tilewise")(tokens())
    neo, _ = both("gpt-neo")
    with pytest.raises(NotImplementedError, match="a local layer of GPT-Neo with an attention mask of your own"):
        neo(tokens(), attention_mask=torch.ones(2, 1, N, N).tril() > 0)
    with pytest.raises(NotImplementedError, match=r"attention_mask.to\(torch.bool\)"):
        compat.mask(batch_size=2, q_length=6, kv_length=6).to(torch.bool)


# -- Generation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", GENERATING)
def test_generation_gives_eagers_tokens(name, cache):
    model, ways = build(name), ({}, {"num_beams": 2})
    for side, way in itertools.product(("none", "left"), ways if cache == "dynamic" else ways[:1]):
        said = [
            use(model, implementation).generate(
                tokens()[:, -9:],
                attention_mask=padded(side)[:, 5:14],
                max_new_tokens=9,  # beyond the window of 5
                min_new_tokens=9,
                do_sample=False,
                cache_implementation=cache,
                **way,
            )
            for implementation in ("eager", "tilewise")
        ]
        assert said[0].tolist() == said[1].tolist()


@pytest.mark.parametrize("word", ["past_key_values", "cache"])
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_prompt_read_in_parts_continues_the_cache(word):
    """transformers 5.24 renames the word, and takes the old one until 5.40."""
    model, row = build("mistral"), tokens(batch=1)
    with torch.no_grad():
        first = use(model, "tilewise")(row[:, :8], use_cache=True)
        if word not in first:
            pytest.skip(f"transformers {hf.__version__} has no {word}")
        second = model(row[:, 8:], **{word: first[word]})
    found = {"logits": torch.cat([first.logits, second.logits], 1)}
    assert disagreements(model, found, {"input_ids": row}) == []


# -- Masks ---------------------------------------------------------------------------------------------------------

POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]])
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 4 + [2] * 5, [3] * 2 + [4] * 5 + [6] * 7])
IMAGES = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1, -1, -1, -1, -1, -1, -1]] * 2)


def in_sequences(function):
    sequences = masking.find_packed_sequence_indices(POSITIONS)
    counted = getattr(masking, "remap_positions_for_packed_sequence", lambda f, positions: f)  # 5.17 has it not
    return masking.and_masks(masking.packed_sequence_mask_function(sequences), counted(function, POSITIONS))


FUNCTIONS = {
    "causal": lambda: masking.causal_mask_function,
    "bidirectional": lambda: masking.bidirectional_mask_function,
    "window": lambda: masking.sliding_window_causal_mask_function(3),
    "window-of-one": lambda: masking.sliding_window_causal_mask_function(1),
    "bidirectional-window": lambda: masking.sliding_window_bidirectional_mask_function(2),
    "chunks": lambda: masking.chunked_causal_mask_function(4, torch.tensor([0, 3])),
    "images": lambda: masking.or_masks(masking.causal_mask_function, masking.blockwise_overlay(IMAGES)),
    "users": lambda: masking.and_masks(masking.causal_mask_function, lambda b, h, q, k: (q - k) % 3 != 1),
    "users-or-all": lambda: masking.or_masks(masking.causal_mask_function, lambda *_: torch.tensor(True)),
    "documents": lambda: masking.and_masks(
        masking.packed_sequence_mask_function(DOCUMENTS), masking.causal_mask_function
    ),
    "a-document-again": lambda: masking.and_masks(
        masking.packed_sequence_mask_function(DOCUMENTS % 2), masking.causal_mask_function
    ),
    "packed": lambda: in_sequences(masking.causal_mask_function),
    "packed-window": lambda: in_sequences(masking.sliding_window_causal_mask_function(2)),
    "packed-users": lambda: in_sequences(masking.or_masks(masking.causal_mask_function, lambda b, h, q, k: k < 2)),
}
PADDINGS = {
    "none": None,
    "left": torch.tensor([[1] * 14, [0] * 3 + [1] * 11]).bool(),
    "right": torch.tensor([[1] * 7 + [0] * 7, [1] * 14]).bool(),
    "holes": torch.tensor([[1, 0] * 7, [1, 1, 0, 1, 1] + [1] * 9]).bool(),
    "shorter-than-the-keys": torch.ones(2, 8).bool(),
    "shorter-with-holes": torch.tensor([[1, 0] * 4, [1, 1, 0, 1] * 2]).bool(),
    "nothing-left": torch.tensor([[0] * 14, [1] * 14]).bool(),
}
# (q_length, kv_length, q_offset, kv_offset): prefill, with a cache, a static cache, one token, sliding caches, queries ahead.
PLACES = (
    (10, 10, 0, 0),
    (5, 12, 7, 0),
    (5, 12, 4, 0),
    (1, 12, 7, 0),
    (1, 12, 11, 0),
    (4, 6, 5, 3),
    (1, 6, 5, 3),
    (2, 4, 7, 0),
)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_mask_keeps_what_transformers_own_matrix_keeps(function):
    places = PLACES[:1] if function.startswith("packed") else PLACES
    for place, kept, in_a_tensor in itertools.product(places, PADDINGS.values(), (False, True)):
        call = dict(zip(("q_length", "kv_length", "q_offset", "kv_offset"), place, strict=True))
        call |= {"batch_size": 2, "mask_function": FUNCTIONS[function](), "attention_mask": kept}
        matrix = masking.sdpa_mask(**call, allow_is_causal_skip=False, use_vmap="users" in function)[:, 0]
        made = compat.mask(**call | ({"q_offset": torch.tensor(place[2])} if in_a_tensor else {}))
        shown = [tw.show_mask(made.mask, place[0], made.keys, batch=b).split("\n") for b in range(2)]
        mine = torch.tensor([[[cell == "1" for cell in line.split(" ")] for line in lines] for lines in shown])
        assert torch.equal(torch.nn.functional.pad(mine, (0, place[1] - made.keys)), matrix), (place, kept)


DENSE = r"attention mask of shape \(2, 1, 19, 19\): it is honoured, but .* O\(N²\)"


@pytest.mark.parametrize("kind", ["bool", "float", "2-D"])
def test_a_mask_of_the_users_own_is_honoured_and_said_to_be_dense(kind):
    model, kept = build("llama"), padded("right").bool()
    pairs = (torch.ones(N, N).tril().bool() & kept[:, None])[:, None]
    added = torch.zeros(pairs.shape).masked_fill(~pairs, torch.finfo(torch.float32).min)
    given = {"bool": pairs, "float": added, "2-D": kept}[kind]
    said = contextlib.nullcontext() if kind == "2-D" else pytest.warns(UserWarning, match=DENSE)
    with said:
        found = results(use(model, "tilewise"), {"input_ids": tokens(), "attention_mask": given}, kept)
    assert disagreements(model, found, {"input_ids": tokens(), "attention_mask": added}, kept) == []


# -- A layer called by itself --------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


def call(mask=None, queries=6, keys=6, **handed):
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, heads, n, 8, generator=g) for heads, n in ((4, queries), (2, keys), (2, keys)))
    return compat.attention(Layer(), q, k, v, mask, **handed), (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))


@pytest.mark.parametrize(
    ("handed", "mask"),
    [
        ({}, tw.causal()),
        ({"is_causal": False}, None),
        ({"sliding_window": 3}, tw.window(2, 0)),
        ({"sliding_window": 3, "is_causal": False}, tw.window(2, 2)),
    ],
)
def test_without_a_mask_the_layer_says_what_is_seen(handed, mask):
    (o, probabilities), (q, k, v) = call(**handed)
    assert probabilities is None
    assert torch.equal(o, tw.attention(q, k, v, mask=mask))
    kept = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]])
    (o, _), _ = call(kept, **handed)
    some = tw.key_range(torch.tensor([0, 2]), torch.tensor([4, 6]))
    assert torch.equal(o, tw.attention(q, k, v, mask=some if mask is None else mask & some))


def test_a_padding_mask_that_is_mapped_over_hides_each_examples_keys():
    kept = torch.tensor([[[1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]], [[1, 0, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1]]])
    found = torch.vmap(lambda kept: call(kept)[0][0], randomness="same")(kept)
    model = use(build("llama"), "tilewise")
    row = tokens(6)
    logits = torch.vmap(lambda kept: model(row, kept, use_cache=False).logits)(kept)
    for n, one in enumerate(kept):
        torch.testing.assert_close(found[n], call(one)[0][0])
        torch.testing.assert_close(logits[n], model(row, one).logits)


def test_softcap_then_position_bias_then_sink_and_dropout():
    added, sink = torch.randn(1, 4, 6, 6), torch.randn(4)
    torch.manual_seed(5)
    (o, _), (q, k, v) = call(scaling=0.3, softcap=2.0, position_bias=added, s_aux=sink, dropout=0.25)
    torch.manual_seed(5)
    score = tw.softcap(2.0) >> tw.bias(added)
    expected = tw.attention(q, k, v, causal=True, softmax_scale=0.3, score=score, sink=sink, dropout_p=0.25)
    assert torch.equal(o, expected)


def test_probabilities_are_those_that_made_the_output_dropout_included():
    added, sink = torch.randn(1, 4, 6, 6), torch.randn(4)
    made = compat.mask(batch_size=2, q_length=6, kv_length=9, q_offset=0)  # no query sees the last three keys
    handed = {"position_bias": added, "s_aux": sink, "dropout": 0.25, "output_attentions": True}
    (o, weights), (_, _, v) = call(made, keys=9, **handed)
    assert weights.shape == (2, 4, 6, 9)
    assert 0 < (weights[..., 0] == 0).sum() < weights[..., 0].numel()  # dropped pairs
    expected = weights @ v.transpose(1, 2).repeat_interleave(2, 1)
    torch.testing.assert_close(o.transpose(1, 2), expected)


STARTS = torch.tensor([0, 6], dtype=torch.int32)
REFUSED = {
    "packed-probabilities": (
        {"cu_seq_lens_q": STARTS, "output_attentions": True},
        ValueError,
        "output_attentions: ask for it one sequence at a time",
    ),
    "head-mask": ({"head_mask": torch.ones(4)}, NotImplementedError, "head_mask scales the probabilities"),
    "paged-cache": ({"cache": object()}, NotImplementedError, "cache is a paged cache"),
    "unknown": ({"tree_mask": 1}, NotImplementedError, "tree_mask is not known.*IGNORED"),
    "no-place": ({"queries": 3}, ValueError, "3 queries and 6 keys was handed no mask"),
    "3-d": ({"mask": torch.ones(2, 6, 6)}, ValueError, r"attention_mask is \(2, 6, 6\); allowed are \(batch, 6\)"),
    "other-length": ({"mask": torch.ones(2, 5)}, ValueError, r"attention_mask is \(2, 5\)"),
    "packed-indices": ({"cu_seq_lens_q": STARTS, "indices": torch.ones(2, 6, 1)}, ValueError, "that an indexer chose"),
    "packed-batch": ({"cu_seq_lens_q": STARTS}, ValueError, "a batch of 2: pack all sequences into one row"),
    "packed-mask": ({"cu_seq_lens_q": STARTS, "mask": torch.ones(2, 6)}, ValueError, "an attention mask: leave it out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_honoured_is_refused_with_the_reason(case):
    handed, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        call(**handed)


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3_vl_text"])
def test_what_an_indexer_chooses_is_seen_and_nothing_else(name):
    """Of 23 keys 7, or two blocks of four."""
    found = [*every.outcomes(name)]
    assert len(found) > 2
    assert [x for x in found if x[0] != "same"] == []


@torch.no_grad()
def test_an_indexer_is_part_of_a_graph():
    model = every.model_of("DeepseekV32Config", "DeepseekV32Model", "tilewise")
    given = every.inputs(model, "left")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given)[0], model(**given)[0])


def test_what_an_indexer_chooses_past_the_end_does_not_count():
    made = compat.mask(batch_size=2, q_length=6, kv_length=9, q_offset=0)  # no query sees the last three keys
    chosen = torch.randint(0, 9, (2, 6, 4))
    (o, _), (q, k, v) = call(made, keys=9, indices=chosen.int())
    kept = torch.zeros(2, 6, 9, dtype=torch.bool).scatter(2, chosen, True) & (
        torch.arange(9) <= torch.arange(6)[:, None]
    )
    torch.testing.assert_close(made[:, 0], (torch.arange(9) <= torch.arange(6)[:, None]).expand(2, 6, 9))
    torch.testing.assert_close(o, tw.attention(q, k, v, mask=tw.dense(kept[:, None])))
    for other in (slice(None), (slice(None), torch.tensor([0])), (slice(None), False), (slice(None), 0, slice(1))):
        with pytest.raises(NotImplementedError, match="computes with its attention mask"):
            made[other]


def test_a_mask_of_another_length_is_refused():
    made = compat.mask(batch_size=2, q_length=5, kv_length=6)
    with pytest.raises(ValueError, match=r"made for \(Nq, Nk\) = \(5, 6\), this layer has \(6, 6\)"):
        call(made)


def test_an_encoder_s_mask_that_hides_nothing_serves_the_keys_of_a_cache_too():
    both = masking.bidirectional_mask_function
    made = compat.mask(batch_size=2, q_length=1, kv_length=1, mask_function=both)
    q, k, v = (torch.randn(2, 4, n, 8) for n in (1, 9, 9))
    encoder = torch.nn.Module()
    expected = compat.attention(encoder, q, k, v, None)[0]
    torch.testing.assert_close(compat.attention(encoder, q, k, v, made)[0], expected)
    # A causal layer without a mask has as many queries as keys, or one query.
    causal = compat.mask(batch_size=2, q_length=1, kv_length=1)
    torch.testing.assert_close(call(causal)[0][0], call(None)[0][0])
    with pytest.raises(ValueError, match="3 queries and 6 keys was handed no mask"):
        call(causal, queries=3)


def test_padding_beside_cu_seq_lens_is_refused():
    made = compat.mask(batch_size=2, q_length=6, kv_length=6, attention_mask=torch.tensor([[1] * 5 + [0], [1] * 6]) > 0)
    with pytest.raises(ValueError, match="padding, or a mask of its own"):
        call(made, cu_seq_lens_q=STARTS)


def test_a_mask_that_a_model_computes_with_is_refused_with_the_reason():
    made = compat.mask(batch_size=2, q_length=6, kv_length=6)
    for compute in (lambda: made[:, :, :, :3], lambda: torch.where(made, 0, 1), lambda: torch.ones(6) + made):
        with pytest.raises(NotImplementedError, match=r"computes with its attention mask .*sdpa"):
            compute()
    with pytest.raises(AttributeError, match=r"computes with its attention mask \(attention_mask.masked_fill\)"):
        made.masked_fill(made, 0)


def test_a_mask_with_an_unknown_keyword_is_refused():
    with pytest.raises(NotImplementedError, match="asks for a mask with spiral, which tilewise does not know"):
        compat.mask(batch_size=2, q_length=6, kv_length=6, spiral=True)


def test_a_model_with_attention_classes_of_its_own_is_refused_with_their_names():
    config = hf.GitConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=64
    )
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="classes of its own, eager; load it"):
            hf.GitForCausalLM._from_config(config, attn_implementation="tilewise")
    elsewhere = type("Elsewhere", (hf.LlamaForCausalLM,), {"__module__": "no_module_of_this_name"})
    assert elsewhere._from_config(build("llama").config, attn_implementation="tilewise")
    assert hf.GitForCausalLM._from_config(config, attn_implementation="eager")


def test_a_model_that_never_asks_the_interface_is_refused_by_name():
    config = hf.MptConfig(d_model=32, n_layers=1, n_heads=2, vocab_size=16)
    with pytest.raises(NotImplementedError, match=r"MptForCausalLM cannot use .*computes attention itself"):
        hf.MptForCausalLM._from_config(config, attn_implementation="tilewise")
    hf.MptForCausalLM._from_config(config, attn_implementation="eager")


# -- The package ---------------------------------------------------------------------------------------------------


def test_without_transformers_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "tilewise.compat.transformers")
    with pytest.raises(ImportError, match=r"needs Hugging Face's transformers.*pip install 'tilewise\[transformers\]'"):
        importlib.import_module("tilewise.compat.transformers")


def test_a_transformers_too_old_is_named(monkeypatch):
    monkeypatch.setattr(hf, "__version__", "4.57.1")
    with pytest.raises(ImportError, match=r"needs transformers >= 5.17, here is 4.57.1"):
        compat.register()


def test_registering_twice_changes_nothing():
    check = hf.PreTrainedModel.get_correct_attn_implementation
    compat.register()
    assert hf.PreTrainedModel.get_correct_attn_implementation is check


# -- The page and the example --------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


def test_the_examples_of_the_page_run(capsys):
    page = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    shown = ["torch.Size([2, 45])", "[5, 5]"]
    for code in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if "generate_batch" not in code or compat.version() >= compat.CONTINUOUS:
            exec(compile(code, "docs/huggingface.md", "exec"), {})
            assert capsys.readouterr().out.strip() == shown.pop(0)


def test_the_example_script_trains_and_agrees():
    example = importlib.util.spec_from_file_location("example", ROOT / "examples" / "huggingface.py")
    module = importlib.util.module_from_spec(example)
    example.loader.exec_module(module)
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**module.SMALL, **module.HEADS)).eval()
    assert module.padded_batch(model, (40, 12)) < 0.01
    losses = module.packed_training(model, (20, 9))
    assert losses[-1] < losses[0]
