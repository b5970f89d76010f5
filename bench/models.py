"""Hugging Face models with tilewise beside their own attention: `OMP_NUM_THREADS=1 python -m bench.models --out FILE`.

Three layers of each with heads of 64 (Swin: four of 32) and random weights, which change no time. A forward, and a forward with its
backward, are timed in turns; on a CPU a time is the least of the rounds, on a GPU the median. A model has no times if its output and
gradients, of a batch of two sequences or of as many pixels, are further from the same model in float64 than twice what they are with its
own attention.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bench import script
from bench.measure import interleaved, seconds_per_call, steadiest

LAYERS, HEAD_DIM, WORDS = 3, 64, 512
WAYS = {"own": None, "tilewise": "tilewise"}
PEERS = {
    "own": "what transformers chooses: SDPA or eager attention",
    "tilewise": 'attn_implementation="tilewise"',
}
ROUNDS = 5


class Size(NamedTuple):
    """Heads of a model, tokens of a sequence and sequences of a batch; short ones are a quarter as long and four times as many."""

    heads: int
    tokens: int
    batch: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return self.heads * HEAD_DIM


SIZES = {"cpu": Size(4, 1024, 2, torch.float32), "cuda": Size(16, 4096, 8, torch.bfloat16)}
Inputs = Callable[[Size, str], dict[str, Tensor]]


def words(s: Size, device: str, parts: int = 1) -> dict[str, Tensor]:
    shape = (s.batch * parts, s.tokens // parts)
    return {"input_ids": torch.randint(3, WORDS, shape, device=device), "attention_mask": torch.ones(shape, dtype=int)}


def padded(s: Size, device: str, parts: int = 1) -> dict[str, Tensor]:
    """Sequences of which each is shorter than the one before, the last about half as long, and of an odd length."""
    ids = words(s, device, parts)["input_ids"][:, 3:]
    ends = torch.linspace(ids.shape[1], ids.shape[1] // 2, len(ids), device=device)
    return {"input_ids": ids, "attention_mask": (torch.arange(ids.shape[1], device=device) < ends[:, None]).long()}


def packed(s: Size, device: str) -> dict[str, Tensor]:
    """Eight documents in each sequence."""
    ids = words(s, device)["input_ids"]
    return {"input_ids": ids, "position_ids": torch.arange(s.tokens // 8, device=device).repeat(len(ids), 8)}


def pixels(s: Size, device: str) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(max(1, s.batch * s.tokens // 256), 3, 224, 224, device=device, dtype=s.dtype)}


def sounds(s: Size, device: str) -> dict[str, Tensor]:
    return {"input_features": torch.randn(max(1, s.batch * s.tokens // 1024), 80, 3000, device=device, dtype=s.dtype)}


def decoder(s: Size) -> dict[str, object]:
    more = {"num_key_value_heads": s.heads // 2, "max_position_embeddings": 2 * s.tokens}
    return encoder(s) | {"vocab_size": WORDS} | more


def encoder(s: Size) -> dict[str, object]:
    names = {"hidden_size": s.width, "num_hidden_layers": LAYERS, "num_attention_heads": s.heads}
    return names | {"intermediate_size": 2 * s.width}


def bert(s: Size) -> dict[str, object]:
    return encoder(s) | {"vocab_size": WORDS, "pad_token_id": 0, "max_position_embeddings": s.tokens}


def old(s: Size) -> dict[str, object]:
    """By the names of GPT-2 and BLOOM."""
    return {"hidden_size": s.width, "n_layer": LAYERS, "n_head": s.heads, "vocab_size": WORDS}


def t5(s: Size) -> dict[str, object]:
    names = {"d_model": s.width, "d_kv": HEAD_DIM, "d_ff": 2 * s.width, "num_layers": LAYERS, "num_heads": s.heads}
    return names | {"vocab_size": WORDS}


def whisper(s: Size) -> dict[str, object]:
    names = {"d_model": s.width, "encoder_layers": LAYERS, "encoder_attention_heads": s.heads}
    return names | {"encoder_ffn_dim": 2 * s.width}


def latent(s: Size) -> dict[str, object]:
    """DeepSeek's heads have 32 columns more, which are turned by position."""
    ranks = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_rope_head_dim": 32, "qk_nope_head_dim": HEAD_DIM}
    dense = {"v_head_dim": HEAD_DIM, "first_k_dense_replace": LAYERS, "num_key_value_heads": s.heads}
    return decoder(s) | ranks | dense


class Architecture(NamedTuple):
    """The names of a model and of its configuration in transformers, what the configuration is made of, and the model's inputs."""

    model: str
    config: str
    options: Callable[[Size], dict[str, object]]
    inputs: Inputs
    more: dict[str, object]


def _of(name: str, options: Callable, inputs: Callable, model: str = "Model", **more: object) -> Architecture:
    return Architecture(name + model, name + "Config", options, inputs, more)


def short(inputs: Callable) -> Inputs:
    return partial(inputs, parts=4)


MODELS = {
    "Llama": _of("Llama", decoder, words),
    "Llama, padded": _of("Llama", decoder, padded),
    "Llama, packed": _of("Llama", decoder, packed, use_cache=False),
    "Qwen3": _of("Qwen3", decoder, words, head_dim=HEAD_DIM),
    "Mistral, window 256": _of("Mistral", decoder, words, sliding_window=256),
    "Gemma 2": _of("Gemma2", decoder, words, head_dim=HEAD_DIM, sliding_window=256),
    "GPT-OSS": _of(
        "GptOss",
        decoder,
        words,
        head_dim=HEAD_DIM,
        sliding_window=256,
        num_local_experts=4,
        experts_implementation="eager",
    ),
    "DeepSeek-V3": _of("DeepseekV3", latent, words),
    "GPT-2": _of("GPT2", old, words, n_positions=8192),
    "BLOOM": _of("Bloom", old, words),
    "Falcon": _of("Falcon", encoder, words, vocab_size=WORDS),
    "BERT": _of("Bert", bert, short(words)),
    "BERT, padded": _of("Bert", bert, short(padded)),
    "ModernBERT, padded": _of("ModernBert", bert, short(padded)),
    "T5, encoder": _of("T5", t5, short(words), "EncoderModel"),
    "T5, encoder, padded": _of("T5", t5, short(padded), "EncoderModel"),
    "ViT, 196 patches": _of("ViT", encoder, pixels),
    "DINOv2, 256 patches": _of("Dinov2", encoder, pixels, image_size=224),
    "SigLIP, 196 patches": _of("SiglipVision", encoder, pixels),
    "Swin, windows of 49": _of("Swin", lambda s: {}, pixels, embed_dim=96, depths=[2, 2], num_heads=[3, 6]),
    "Whisper, encoder": _of("Whisper", whisper, sounds),
}


def made(x: Architecture, size: Size, way: str | None) -> nn.Module:
    """The model with that attention; all ways have the same weights."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, x.config)(**x.options(size), **x.more, attn_implementation=way)
    if x.config == "WhisperConfig":
        return transformers.models.whisper.modeling_whisper.WhisperEncoder(config).eval()
    return getattr(transformers, x.model)(config).eval()


def forward(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    o = model(**given)[0]
    mask = given.get("attention_mask")  # what stands in the place of padding is nobody's
    return o if mask is None or mask.shape != o.shape[:2] else o * mask[..., None]


def step(model: nn.Module, given: dict[str, Tensor]) -> list[Tensor]:
    """The output and the gradients of all weights."""
    o = forward(model, given)
    weights = [x for x in model.parameters() if x.requires_grad]
    return [o, *torch.autograd.grad(o.float().square().mean(), weights, allow_unused=True)]


def error(found: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """The root mean square of the relative errors of all tensors."""
    pairs = [(x.detach().double(), y.detach()) for x, y in zip(found, exact, strict=True) if y is not None]
    return (sum(float((x - y).norm() / y.norm().clamp(min=1e-30)) ** 2 for x, y in pairs) / len(pairs)) ** 0.5


def measure(log: script.Log, name: str, x: Architecture, size: Size, device: str) -> None:
    given, few = (
        {key: t.to(device) for key, t in x.inputs(size._replace(batch=batch), device).items()}
        for batch in (size.batch, 2)
    )
    shape = {"model": x.model, "inputs": list(next(iter(given.values())).shape)}
    models = {way: made(x, size, asked).to(device, size.dtype) for way, asked in WAYS.items()}
    exactly = {key: t.double() if t.is_floating_point() else t for key, t in few.items()}
    exact = step(made(x, size, None).to(device, torch.float64), exactly)
    errors = {way: error(step(model, few), exact) for way, model in models.items()}
    if not errors["tilewise"] <= 2 * errors["own"]:
        log.add(name, "tilewise", "both", "time", None, why=[f"relative errors {errors}"], shape=shape)
        return
    calls = {}
    for way, model in models.items():
        try:
            step(model, given)
        except torch.OutOfMemoryError:
            log.add(name, way, "both", "time", None, why=["out of memory"], shape=shape)
            continue
        calls[way, "forward"] = torch.no_grad()(partial(forward, model, given))
        calls[way, "both"] = partial(step, model, given)
    timed = interleaved({key: partial(seconds_per_call, call, 1, device) for key, call in calls.items()}, ROUNDS)
    for (way, direction), seconds in timed.items():
        value = steadiest(seconds, device)
        log.add(name, way, direction, "time", value * 1e3, shape=shape)


def main() -> None:
    """Measure all models."""
    import tilewise.compat.transformers

    tilewise.compat.transformers.register()
    options = script.parser(__doc__, tuple(SIZES)).parse_args()
    log = script.Log.begin("python -m bench.models", options, PEERS, ("transformers",))
    for name, x in MODELS.items():
        measure(log, name, x, SIZES[options.device], options.device)
        if options.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
