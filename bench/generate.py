"""Steps of Hugging Face's `generate`, beside SDPA in the same process: `python -m bench.generate --out FILE`.

A Llama of 12 layers, 16 query and 4 key heads of 64, bf16, with random weights, which change no time. Each way generates from the same
prompts in turns, several rounds. The time is that of the steps after the prompt, medians over all rounds but the first. In that one
transformers compiles the steps over a static cache; its whole time is kept too. ``--device cpu`` rehearses on a small model.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import pairwise, product

import torch

from bench import script
from bench.measure import interleaved

Sizes = dict[str, int]
SMALL: Sizes = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 4096,
}  # fmt: skip
STEPPED: Sizes = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip
WAYS = ("sdpa", "tilewise")
PROMPTS = {"cuda": ((1, 1024), (16, 2048)), "cpu": ((1, 32),)}  # sequences and tokens of each
CACHES = {"dynamic": 10, "static": 3}
"""Rounds that count; static ones repeat better."""
NEW = 64


def model(sizes: Sizes, way: str, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A Llama with that attention; all ways have the same weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    made = transformers.LlamaForCausalLM(config).to(device, dtype).eval()
    made.set_attn_implementation(way)
    return made


def steps(made: torch.nn.Module, ids: torch.Tensor, cache: str, new: int) -> tuple[float, list[float], float]:
    """Seconds of the prompt, of each step after it, and of all."""
    stamps: list[float] = []

    def stamp(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        stamps.append(time.perf_counter())
        return scores

    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "logits_processor": [stamp]}
    if cache == "static":
        options["cache_implementation"] = "static"
    began = time.perf_counter()
    with torch.no_grad():
        made.generate(ids, **options, max_new_tokens=new)
    return stamps[0] - began, [b - a for a, b in pairwise(stamps)], time.perf_counter() - began


def time_steps(log: script.Log, device: str) -> None:
    """Keep the medians of the prompt, and of a step after it."""
    sizes, new = (SMALL, 3) if device == "cpu" else (STEPPED, NEW)
    made = {way: model(sizes, way, device) for way in WAYS}
    for cache, (batch, length) in product(CACHES, PROMPTS[device]):
        ids = torch.randint(1, sizes["vocab_size"], (batch, length), device=device)
        calls = {way: partial(steps, each, ids, cache, new) for way, each in made.items()}
        for way, (first, *counted) in interleaved(calls, CACHES[cache] + 1).items():
            parts = {"prompt": [prompt for prompt, *_ in counted], "step": [t for _, each, _ in counted for t in each]}
            for part, seconds in (parts | {"first": [first[-1]]}).items():
                case, shape = f"generate-{cache}-{batch}x{length}-{part}", {"batch": batch, "seqlen": length}
                log.add(case, way, "forward", "host", 1e6 * statistics.median(seconds), shape=shape)


def main(arguments: list[str] | None = None) -> None:
    """Time the steps with both caches."""
    import tilewise.compat.transformers

    options = script.parser(__doc__).parse_args(arguments)
    tilewise.compat.transformers.register()
    peers = {way: f'attn_implementation="{way}"' for way in WAYS}
    log = script.Log.begin("python -m bench.generate", options, peers, ("transformers",))
    time_steps(log, options.device)


if __name__ == "__main__":
    main()
