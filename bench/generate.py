"""Steps of Hugging Face's `generate` a second, beside SDPA in the same process: `python -m bench.generate --out FILE`.

A Llama of 12 layers, 16 query and 4 key heads of 64, bf16, with random weights, which change no time. Each way generates from the same
prompts in turns, several rounds; the first is not counted. The time is that of the steps after the prompt, medians over all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch

from bench import records

LLAMA = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32000, "max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
WAYS = ("sdpa", "tilewise")
PROMPTS = ((1, 1024), (16, 2048))  # sequences and tokens of each
CACHES = ("dynamic", "static")
NEW, ROUNDS = 64, 3


def model(way: str, device: str) -> torch.nn.Module:
    """The model with that attention; all ways have the same weights."""
    import transformers

    import tilewise.compat.transformers

    tilewise.compat.transformers.register()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, attn_implementation=way)
    return transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def steps(made: torch.nn.Module, ids: torch.Tensor, cache: str) -> tuple[float, list[float], torch.Tensor]:
    """Seconds of the prompt, of each step after it, and the tokens."""
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
        found = made.generate(ids, **options, max_new_tokens=NEW, disable_compile=True)
    return stamps[0] - began, [b - a for a, b in pairwise(stamps)], found


def measured(device: str, batch: int, length: int, cache: str, made: dict) -> list[tuple[str, str, float]]:
    """``(way, part, seconds)``: the prompt, and a step after it."""
    ids = torch.randint(1, LLAMA["vocab_size"], (batch, length), device=device)
    prompts: dict[str, list] = {way: [] for way in WAYS}
    each: dict[str, list] = {way: [] for way in WAYS}
    for n in range(ROUNDS + 1):
        for way in WAYS:
            prompt, of_steps, _ = steps(made[way], ids, cache)
            if n:
                prompts[way].append(prompt)
                each[way] += of_steps
    parts = (("prompt", prompts), ("step", each))
    return [(way, part, statistics.median(found[way])) for part, found in parts for way in WAYS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="a file of JSON lines, which is appended to")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    import transformers

    peers = {"tilewise": 'attn_implementation="tilewise"', "sdpa": 'attn_implementation="sdpa"'}
    run = records.run("python -m bench.generate", options.device, peers)
    run["versions"]["transformers"] = transformers.__version__
    found, made = [run], {way: model(way, options.device) for way in WAYS}
    for cache in CACHES:
        for batch, length in PROMPTS:
            for way, part, seconds in measured(options.device, batch, length, cache, made):
                shape = {"batch": batch, "seqlen": length}
                case = f"generate-{cache}-{batch}x{length}-{part}"
                found.append(records.result(run["run"], case, way, "forward", "host", 1e6 * seconds, shape=shape))
                print(f"{cache:8} {batch:3} x {length:5} {part:7} {way:9} {1e3 * seconds:8.2f} ms", flush=True)
    if options.out:
        records.append(found, options.out)


if __name__ == "__main__":
    main()
