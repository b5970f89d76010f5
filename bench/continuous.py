"""Tokens a second of transformers' continuous batching, 5.24 or newer: `python -m bench.continuous --out FILE` on a GPU.

64 prompts of 100 to 2,000 tokens get 256 tokens each, greedily, from a model of the shape of Llama 3.2 1B with random weights in bf16. All
contestants have a cache of the same size, from which they share no prompt. They run in a new order each round, first once to warm up,
CUDA graphs included, then timed. What does not give eager's tokens on a small model in fp32 is not timed, nor what leaves a request
unanswered. ``--device cpu`` rehearses it on small sizes.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from functools import partial

import torch
import transformers

import tilewise.compat.transformers
from bench import script
from bench.measure import interleaved

CONTESTANTS = ("tilewise", "sdpa", "paged|eager")
REQUESTS, SHORTEST, LONGEST, NEW, ROUNDS = 64, 100, 2000, 256, 3
LLAMA = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 4096}
SMALL = LLAMA | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "vocab_size": 512, "initializer_range": 0.2}  # attention is far from uniform


def build(shape: dict, device: str, dtype: torch.dtype) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**shape, tie_word_embeddings=True, eos_token_id=None)
    return transformers.LlamaForCausalLM(config).to(device, dtype).eval()


def prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Prompts of evenly spread lengths, in a random order; the same ones at every call."""
    draw = random.Random(0)
    lengths = torch.linspace(SHORTEST, longest, count).int().tolist()
    return [draw.choices(range(3, vocabulary), k=n) for n in draw.sample(lengths, count)]


def answered(
    model: transformers.LlamaForCausalLM, attention: str, asked: list[list[int]], new: int
) -> tuple[list, float]:
    """The tokens of each answer, and the seconds of the second of two calls.

    Raises:
        RuntimeError: an answer is missing, or too short.
    """
    model.set_attn_implementation(attention)
    cache = transformers.ContinuousBatchingConfig(
        num_blocks=sum(-(-(len(prompt) + new) // 256) for prompt in asked) + len(asked),
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    greedy = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    run = partial(model.generate_batch, asked, greedy, cache, persistent_manager=True)
    try:
        run()
        began = time.perf_counter()
        said = [answer.generated_tokens for answer in run().values()]
        seconds = time.perf_counter() - began
    finally:
        model.destroy_cached_continuous_batching_manager()
    if [len(tokens) for tokens in said] != [new] * len(asked):
        raise RuntimeError(f"{attention} did not answer every request with {new} tokens")
    return said, seconds


def wrong(device: str) -> dict[str, str]:
    """The contestants that do not give eager's tokens on a small model in fp32, and why they are not timed."""
    model, asked, new = build(SMALL, device, torch.float32), prompts(4, 300, SMALL["vocab_size"]), 16
    model.set_attn_implementation("eager")
    row = partial(torch.tensor, device=device)
    way = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    alone = [model.generate(row([prompt]), **way)[0, len(prompt) :].tolist() for prompt in asked]
    unlike = (name for name in CONTESTANTS if answered(model, name, asked, new)[0] != alone)
    return dict.fromkeys(unlike, "its tokens are not eager's")


def main() -> None:
    """Keep each contestant's milliseconds for all requests."""
    options = script.parser(__doc__).parse_args()
    device = options.device
    tilewise.compat.transformers.register()
    count, longest, new = (4, 300, 8) if device == "cpu" else (REQUESTS, LONGEST, NEW)
    shape, dtype = (SMALL, torch.float32) if device == "cpu" else (LLAMA, torch.bfloat16)
    peers = dict.fromkeys(CONTESTANTS, "the attention that transformers calls")
    log = script.Log.begin(f"python -m bench.continuous --device {device}", options, peers, ("transformers",))
    refused = wrong(device)
    asked, model = prompts(count, longest, shape["vocab_size"]), build(shape, device, dtype)

    def sample(name: str) -> float:
        if name in refused:
            return math.nan
        try:
            return 1e3 * answered(model, name, asked, new)[1]
        except RuntimeError as error:  # of one contestant
            refused[name] = str(error)
            return math.nan

    found = interleaved({name: partial(sample, name) for name in CONTESTANTS}, ROUNDS)
    said = {"requests": count, "prompts": f"{SHORTEST} to {longest}", "new": new, "dtype": str(dtype)}
    for name in CONTESTANTS:
        value, more = None, {"why": [refused.get(name)]}
        if name not in refused:
            value, more = statistics.median(found[name]), {"low": min(found[name]), "high": max(found[name])}
        log.add("llama-1b-continuous", name, "step", "time", value, shape=said, **more)


if __name__ == "__main__":
    main()
