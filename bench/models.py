"""Whole models and blocks beside their own attention: the parts `models`, `generate` and `triangles` of `bench.calls`."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import pairwise, product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.measure import PeakMemory, interleaved
from bench.records import MIB, Log

Rows = Iterator[tuple[str, Callable[[Log], None]]]


# ---- models of transformers: three layers of each with heads of 64 (Swin: four of 32) and random weights, which change no time ----

LAYERS, HEAD_DIM, WORDS = 3, 64, 512
WAYS = {"own": None, "tilewise": "tilewise"}
PEERS = {"own": "what transformers chooses: SDPA or eager attention", "tilewise": 'attn_implementation="tilewise"'}


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


WINDOW = {"head_dim": HEAD_DIM, "sliding_window": 256}
MODELS = {
    "Llama": _of("Llama", decoder, words),
    "Llama, padded": _of("Llama", decoder, padded),
    "Llama, packed": _of("Llama", decoder, packed, use_cache=False),
    "Qwen3": _of("Qwen3", decoder, words, head_dim=HEAD_DIM),
    "Mistral, window 256": _of("Mistral", decoder, words, sliding_window=256),
    "Gemma 2": _of("Gemma2", decoder, words, **WINDOW),
    "GPT-OSS": _of("GptOss", decoder, words, **WINDOW, num_local_experts=4, experts_implementation="eager"),
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


def measure(name: str, x: Architecture, size: Size, log: Log) -> None:
    """Keep the times of a model, unless its output and gradients, of a batch of two sequences or of as many pixels, are further from
    float64 than twice what they are with its own attention."""
    import tilewise.compat.transformers

    tilewise.compat.transformers.register()
    given, few = (
        {key: t.to(log.device) for key, t in x.inputs(size._replace(batch=batch), log.device).items()}
        for batch in (size.batch, 2)
    )
    shape, calls = {"model": x.model, "inputs": list(next(iter(given.values())).shape)}, {}
    models = {way: made(x, size, asked).to(log.device, size.dtype) for way, asked in WAYS.items()}
    exactly = {key: t.double() if t.is_floating_point() else t for key, t in few.items()}
    exact = step(made(x, size, None).to(log.device, torch.float64), exactly)
    errors = {way: error(step(model, few), exact) for way, model in models.items()}
    if not errors["tilewise"] <= 2 * errors["own"]:
        log.without(name, "tilewise", "both", "time", f"relative errors {errors}", shape=shape)
        return
    for way, model in models.items():
        try:
            step(model, given)
        except torch.OutOfMemoryError:
            log.without(name, way, "both", "time", "out of memory", shape=shape)
            continue
        calls[way, "forward"] = torch.no_grad()(partial(forward, model, given))
        calls[way, "both"] = partial(step, model, given)
    log.race(name, calls, shape=shape, budget_ms=0.0)


def rows(device: str) -> Rows:
    """The models by name."""
    return ((name, partial(measure, name, x, SIZES[device])) for name, x in MODELS.items())


# ---- generate: a Llama of 12 layers, its steps from the same prompts in turns ---------------------------------------------
#
# The time of the steps after the prompt is the median over all rounds but the first. In that one transformers compiles the steps over a
# static cache; its whole time is kept too.

LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip
SMALL = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}
GENERATE_PEERS = {way: f'attn_implementation="{way}"' for way in ("sdpa", "tilewise")}
PROMPTS = {"cuda": ((1, 1024), (16, 2048)), "cpu": ((1, 32),)}  # sequences and tokens of each
CACHES = {"dynamic": 10, "static": 3}
"""Rounds that count; static ones repeat better."""
NEW = {"cuda": 64, "cpu": 3}  # tokens


def llama(way: str, device: str) -> nn.Module:
    """A Llama with that attention; all ways have the same weights."""
    import transformers

    import tilewise.compat.transformers

    tilewise.compat.transformers.register()
    torch.manual_seed(0)
    sizes = LLAMA | (SMALL if device == "cpu" else {})
    config = transformers.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    model.set_attn_implementation(way)
    return model


def steps(model: nn.Module, ids: Tensor, cache: str, new: int) -> tuple[float, list[float], float]:
    """Seconds of the prompt, of each step after it, and of all."""
    stamps: list[float] = []

    def stamp(ids: Tensor, scores: Tensor) -> Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        stamps.append(time.perf_counter())
        return scores

    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "logits_processor": [stamp]}
    if cache == "static":
        options["cache_implementation"] = "static"
    began = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, **options, max_new_tokens=new)
    return stamps[0] - began, [b - a for a, b in pairwise(stamps)], time.perf_counter() - began


def generated(cache: str, batch: int, length: int, log: Log) -> None:
    """Keep the medians of the prompt, and of a step after it."""
    made = {way: llama(way, log.device) for way in GENERATE_PEERS}
    ids = torch.randint(1, SMALL["vocab_size"], (batch, length), device=log.device)
    calls = {way: partial(steps, model, ids, cache, NEW[log.device]) for way, model in made.items()}
    for way, (first, *counted) in interleaved(calls, CACHES[cache] + 1).items():
        parts = {"prompt": [prompt for prompt, *_ in counted], "step": [t for _, each, _ in counted for t in each]}
        for part, seconds in (parts | {"first": [first[-1]]}).items():
            case, shape = f"generate-{cache}-{batch}x{length}-{part}", {"batch": batch, "seqlen": length}
            log.add(case, way, "forward", "host", 1e6 * statistics.median(seconds), shape=shape)


def generate_rows(device: str) -> Rows:
    """Each cache with each prompt."""
    for cache, (batch, length) in product(CACHES, PROMPTS[device]):
        yield f"generate-{cache}-{batch}x{length}", partial(generated, cache, batch, length)


# ---- triangles: both nodes of a block of AlphaFold 3, with projections, gates and a mask, forward and backward ------------
#
# `tilewise bench --tag triangles` times the attention alone.

HEADS, CHANNELS = 4, 128
HIDDEN = -1e9  # AlphaFold's score of a masked pair: a row without keys is no NaN
BLOCKS = {"cuda": (384, 768), "cpu": (16,)}
BLOCK_PEERS = {
    "tilewise": "tilewise.compat.cuequivariance.triangle_attention",
    "cuequivariance": "cuequivariance_torch.triangle_attention",
    "sdpa": "F.scaled_dot_product_attention with the bias as its float mask",
    "eager": "PyTorch's operators",
}
Attend = Callable[..., Tensor]


def eager_block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    return s.masked_fill(~mask, HIDDEN).softmax(-1) @ v


def sdpa_block(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    added = bias.masked_fill(~mask, HIDDEN).expand(*q.shape[:4], k.shape[3])
    return F.scaled_dot_product_attention(*[x[0] for x in (q, k, v)], attn_mask=added[0])[None]


def contestants() -> Iterator[tuple[str, Attend]]:
    """Contestants by name."""
    from tilewise.compat import cuequivariance as ours

    yield "tilewise", ours.triangle_attention
    if find_spec("cuequivariance_torch"):
        from cuequivariance_torch import triangle_attention

        yield "cuequivariance", triangle_attention
    yield "sdpa", sdpa_block
    yield "eager", eager_block


class Node(nn.Module):
    """Triangle attention around one node (AlphaFold 3, algorithms 14 and 15)."""

    def __init__(self, attend: Attend, ending: bool):
        super().__init__()
        self.attend, self.ending = attend, ending
        self.norm, self.bias = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, HEADS, bias=False)
        self.qkvg, self.out = nn.Linear(CHANNELS, 4 * CHANNELS, bias=False), nn.Linear(CHANNELS, CHANNELS, bias=False)

    def forward(self, pair: Tensor, mask: Tensor) -> Tensor:
        """pair `(n, n, channels)`, mask `(n, n)`: True keeps."""
        z = self.norm(pair.transpose(0, 1) if self.ending else pair)
        mask = (mask.T if self.ending else mask)[None, :, None, None]
        q, k, v, gate = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2)[None] for x in self.qkvg(z).chunk(4, -1))
        o = self.attend(q, k, v, self.bias(z).permute(2, 0, 1)[None, None], mask=mask) * gate.sigmoid()
        o = self.out(o[0].transpose(1, 2).flatten(2))
        return pair + (o.transpose(0, 1) if self.ending else o)


def trained(nodes: nn.Sequential, pair: Tensor, mask: Tensor) -> None:
    found = pair
    for node in nodes:
        found = node(found, mask)
    found.sum().backward()


def block(n: int, log: Log) -> None:
    """Keep milliseconds and memory of a block of both nodes."""
    case, shape, calls = f"triangle-block-n{n}", {"seqlen": n, "channels": CHANNELS, "heads": HEADS}, {}
    there = torch.arange(n, device=log.device) < n - n // 10
    pair = torch.randn(n, n, CHANNELS, device=log.device, dtype=torch.bfloat16, requires_grad=True)
    for who, attend in contestants():
        nodes = nn.Sequential(Node(attend, ending=False), Node(attend, ending=True)).to(log.device, torch.bfloat16)
        call = partial(trained, nodes, pair, there[:, None] & there)
        try:
            call()
            with PeakMemory(log.device) as peak:
                call()
        except (RuntimeError, ValueError) as error:
            log.without(case, who, "both", "memory", error, shape=shape)
            continue
        calls[who, "both"] = call
        log.add(case, who, "both", "memory", peak.bytes / MIB, shape=shape)
    log.race(case, calls, shape=shape)


def block_rows(device: str) -> Rows:
    """The blocks by their size."""
    return ((f"triangle-block-n{n}", partial(block, n)) for n in BLOCKS[device])
