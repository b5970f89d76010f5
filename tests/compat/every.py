"""Every architecture of the installed transformers beside its own eager attention: `python -m tests.compat.every [--cuda] [NAME ...]`.

Each is built small, with random weights in float32. Its output and the gradients of its weights, without padding and with padding on
either side, have to be those of eager attention; for causal language models also what `generate` gives, with a dynamic and with a static
cache. They may be sdpa's instead, for which rows without keys are zero too, and from which eager differs in some models. Exit code 1 if
something differs. All take minutes, so tests run only a few; hold a new version of transformers against it. `--cuda`: on a GPU.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

import tilewise.compat.transformers

SIZES = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_key_value_heads "
    "num_local_experts num_experts eos_token_id index_topk_blocks index_n_heads",
    4: "index_block_size num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads n_routed_experts",
    16: "index_head_dim head_dim d_kv q_lora_rank kv_lora_rank v_head_dim",
    96: "intermediate_size d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_dim",
    120: "vocab_size",
    128: "max_position_embeddings n_positions",
    7: "sliding_window index_topk",
    5: "attention_chunk_size",
    8: "attention_window patch_size qk_rope_head_dim qk_nope_head_dim rotary_dim",
    32: "image_size moe_intermediate_size",
    1: "bos_token_id decoder_start_token_id num_experts_per_tok n_group topk_group",
    0: "pad_token_id",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()} | {"experts_implementation": "eager"}
for _name in (
    "dropout",
    "attention_dropout",
    "hidden_dropout",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
    "attn_pdrop",
):
    SMALL[_name] = 0.0
DOUBTFUL = "head_dim", "sliding_window", "num_key_value_heads", "rotary_dim", "pad_token_id", "intermediate_size"
PADDING_COUNTS = {"minimax_m3_vl_text"}  # its indexer reads the rows before a sequence, which see no key
MOST, TOKENS, NEW, LIMIT = 30e6, 23, 9, 1e-3
DEVICE = "cuda" if "--cuda" in sys.argv else "cpu"


class NotTried(Exception):
    """A model that this module cannot make or feed."""


def config_of(name: str) -> transformers.PretrainedConfig:
    """A small configuration, by the names that it has."""
    kind = getattr(transformers, name)
    plain = kind()
    sizes = {key: size for key, size in SMALL.items() if isinstance(getattr(plain, key, None), (int, float, str))}
    if "kv_lora_rank" in sizes:  # latent attention counts the columns of its heads
        sizes.pop("head_dim", None)
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    if {"linear_attention", "mamba"} & {*(getattr(plain, "layer_types", None) or ())}:
        sizes["num_hidden_layers"] = 4  # of which one has attention
    if "index_topk_blocks" in sizes:
        sizes["layer_types"] = ["minimax_m3_sparse"] * 2
    for key in (None, *DOUBTFUL):
        sizes.pop(key, None)
        try:
            return kind(**sizes)
        except Exception as reason:
            why = reason
    raise NotTried(f"its configuration: {why}")


def model_of(config_name: str, name: str, way: str) -> nn.Module:
    """The model with that attention; all ways have the same weights."""
    make = getattr(transformers, name)._from_config
    with torch.device("meta"):
        count = sum(x.numel() for x in make(config_of(config_name), attn_implementation=way).parameters())
    if count > MOST:
        raise NotTried(f"{count / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = make(config_of(config_name), attn_implementation=way).eval().to(DEVICE)
    for x in model.parameters():
        if x.ndim > 1:
            nn.init.normal_(x, std=0.15)
    return model


def inputs(model: nn.Module, padding: str) -> dict[str, Tensor]:
    """Words with padding, or an image, or a sound, which have none."""
    names, main, config = set(inspect.signature(model.forward).parameters), model.main_input_name, model.config
    torch.manual_seed(1)
    if main == "input_ids":
        given = {"input_ids": torch.randint(3, 100, (2, TOKENS))}
        if padding != "none":
            kept = torch.ones(2, TOKENS, dtype=torch.long)
            kept[1, slice(7) if padding == "left" else slice(-7, None)] = 0
            given["attention_mask"] = kept
        if "decoder_input_ids" in names:
            given["decoder_input_ids"] = torch.randint(3, 100, (2, TOKENS - 4))
        return given
    size = getattr(config, "image_size", 32)
    if main not in ("pixel_values", "input_values", "input_features") or not isinstance(size, int):
        raise NotTried(f"its input {main}")
    sound = getattr(config, "num_mel_bins", 80), 2 * getattr(config, "max_source_positions", 1500)
    image = getattr(config, "num_channels", 3), size, size
    return {main: torch.randn(2, *{"pixel_values": image, "input_values": (3200,), "input_features": sound}[main])}


def passes(model: nn.Module, of: str) -> list[Tensor]:
    """The output where there is no padding, and the gradients of all weights."""
    given = {key: x.to(DEVICE) for key, x in inputs(model, of).items()}
    o = model(**given)[0]
    kept = given.get("attention_mask")
    o = o[kept.bool()] if kept is not None and kept.shape == o.shape[:2] else o
    weights = [x for x in model.parameters() if x.requires_grad]
    torch.manual_seed(2)
    grads = torch.autograd.grad(o, weights, torch.randn_like(o), allow_unused=True)
    return [o.detach(), *[o.new_zeros(()) if x is None else x for x in grads]]


@torch.no_grad()
def generated(model: nn.Module, of: tuple[str, str]) -> list[Tensor]:
    """The tokens, as numbers, and their logits; ``of``: the cache and the side of the padding."""
    cache, padding = of
    torch.manual_seed(1)
    kept = torch.ones(2, 13, dtype=torch.long, device=DEVICE)
    kept[1, : 5 if padding == "left" else 0] = 0
    more = {"cache_implementation": "static"} if cache == "static" else {}
    model.generation_config.eos_token_id = None
    found = model.generate(
        torch.randint(3, 100, (2, 13)).to(DEVICE), attention_mask=kept, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        return_dict_in_generate=True, output_logits=True, disable_compile=True, **more,
    )  # fmt: skip
    return [found.sequences.float(), torch.stack(found.logits)]


def difference(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest one, as a part of the largest number of each tensor; of gradients, of that of all. NaN if a number is none."""
    far = torch.stack([(x - y).abs().max() for x, y in zip(found, expected, strict=True)])
    first, *sizes = (y.abs().max().item() for y in expected)
    return torch.cat([far[:1] / max(first, 1e-9), far[1:] / max([1e-9, *sizes])]).max().item()


def checks(name: str) -> Iterator[tuple[str, str, object]]:
    """What is run of an architecture: its title, the model's class, and what it is run with."""
    for kind, classes in (("model", MODEL_MAPPING_NAMES), ("generate", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)):
        found = classes.get(name)
        found = found[0] if isinstance(found, (tuple, list)) else found
        ways = [("dynamic", "none"), ("dynamic", "left"), ("static", "left")]
        if found:
            yield kind, found, ("none", "right", "left") if kind == "model" else ways


def _model_or_none(*of: str) -> nn.Module | None:
    try:
        return model_of(*of)
    except Exception:  # it has no such attention
        return None


def outcomes(name: str) -> Iterator[tuple[str, str]]:
    """``(verdict, detail)`` of each check."""
    for kind, cls, cases in checks(name):
        try:
            models = {way: model_of(CONFIG_MAPPING_NAMES[name], cls, way) for way in ("tilewise", "eager")}
        except NotImplementedError as reason:
            yield "refused", f"{kind}: {reason}".replace("\n", " ")
            continue
        except Exception as reason:
            yield "not tried", f"{kind}: {str(reason).partition(chr(10))[0]}"
            continue
        if name in PADDING_COUNTS:
            cases = [x for x in cases if "left" not in x]
        if models["eager"].main_input_name != "input_ids":
            cases = cases[:1]  # without padding
        for case in cases:
            title, run = f"{kind}, {case}", partial(passes if kind == "model" else generated, of=case)
            try:
                expected = run(models["eager"])
                if not difference(run(models["eager"]), expected) <= LIMIT:
                    raise NotTried("its numbers are random, or none")
            except Exception as reason:
                yield "not tried", f"{title}: {str(reason).partition(chr(10))[0]}"
                continue
            try:
                found = run(models["tilewise"])
                far = difference(found, expected)
                if far > LIMIT and (sdpa := _model_or_none(CONFIG_MAPPING_NAMES[name], cls, "sdpa")):
                    far = difference(found, run(sdpa))
            except (NotImplementedError, AttributeError) as reason:
                yield ("refused" if "tilewise" in str(reason) else "differs"), f"{title}: {reason}".replace("\n", " ")
            except Exception as reason:
                yield "differs", f"{title}: {reason!r}"
            else:
                yield "same" if far <= LIMIT else "differs", f"{title}: {far:.1e}"


def main() -> None:
    """Print what does not agree, and how many do."""
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    tilewise.compat.transformers.register()
    verdicts: dict[str, Counter[str]] = {"model": Counter(), "generate": Counter()}
    for name in [x for x in sys.argv[1:] if x != "--cuda"] or CONFIG_MAPPING_NAMES:
        found: dict[str, set[str]] = {}
        for verdict, detail in outcomes(name):
            found.setdefault(detail.partition(":")[0].partition(",")[0], set()).add(verdict)
            if verdict != "same":
                print(f"{verdict:9} {name}: {detail[:150]}", flush=True)
        for kind, each in found.items():  # the worst of an architecture's cases
            verdicts[kind][next(x for x in ("differs", "refused", "same", "not tried") if x in each)] += 1
    print(f"transformers {transformers.__version__}, architectures:", {kind: dict(x) for kind, x in verdicts.items()})
    sys.exit(any(x["differs"] for x in verdicts.values()))


if __name__ == "__main__":
    main()
