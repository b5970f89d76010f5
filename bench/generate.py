"""Generation by transformers, beside SDPA in the same process: `python -m bench.generate --out FILE [--parts steps,batch]`.

steps   steps of `generate` after the prompt, medians over all rounds but the first, in which transformers compiles the steps over a static
        cache; its whole time is kept too
batch   `generate_batch`, of transformers 5.24 or newer: all requests get so many tokens each, greedily. All have a cache of the same size,
        from which they share no prompt, and a call before to warm up. What does not give eager's tokens on a small model in fp32 is not
        timed, nor what leaves a request unanswered.

The models are Llamas in bf16 with random weights, which change no time. ``--device cpu`` rehearses on small ones.
"""

from __future__ import annotations

import random
import statistics
import time
from functools import partial
from itertools import pairwise, product

import torch

from bench import script
from bench.measure import interleaved

Sizes = dict[str, int | float]
SMALL: Sizes = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "max_position_embeddings": 4096, "initializer_range": 0.2,  # attention is far from uniform
}  # fmt: skip
STEPPED: Sizes = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16, "num_key_value_heads": 4,
    "vocab_size": 32000, "max_position_embeddings": 8192,
}  # fmt: skip
LLAMA_1B: Sizes = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": True,
}  # fmt: skip
WAYS = ("tilewise", "sdpa", "paged|eager")
PROMPTS = {"cuda": ((1, 1024), (16, 2048)), "cpu": ((1, 32),)}  # sequences and tokens of each
CACHES = {"dynamic": 10, "static": 3}
"""Rounds that count; static ones repeat better."""
REQUESTS = {"cuda": (64, 2000, 256), "cpu": (4, 300, 8)}  # how many, the longest prompt, and tokens that each gets
SHORTEST, NEW, ROUNDS = 100, 64, 3


def model(sizes: Sizes, way: str, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """A Llama with that attention; all ways have the same weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    made = transformers.LlamaForCausalLM(config).to(device, dtype).eval()
    made.set_attn_implementation(way)
    return made


# ---- steps of generate --------------------------------------------------------------------------------------------------


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
    made = {way: model(sizes, way, device) for way in ("sdpa", "tilewise")}
    for cache, (batch, length) in product(CACHES, PROMPTS[device]):
        ids = torch.randint(1, sizes["vocab_size"], (batch, length), device=device)
        calls = {way: partial(steps, each, ids, cache, new) for way, each in made.items()}
        for way, (first, *counted) in interleaved(calls, CACHES[cache] + 1).items():
            parts = {"prompt": [prompt for prompt, *_ in counted], "step": [t for _, each, _ in counted for t in each]}
            for part, seconds in (parts | {"first": [first[-1]]}).items():
                case, shape = f"generate-{cache}-{batch}x{length}-{part}", {"batch": batch, "seqlen": length}
                log.add(case, way, "forward", "host", 1e6 * statistics.median(seconds), shape=shape)


# ---- generate_batch -----------------------------------------------------------------------------------------------------


def prompts(count: int, longest: int, vocabulary: int) -> list[list[int]]:
    """Prompts of evenly spread lengths, in a random order; the same ones at every call."""
    draw = random.Random(0)
    lengths = torch.linspace(SHORTEST, longest, count).int().tolist()
    return [draw.choices(range(3, vocabulary), k=n) for n in draw.sample(lengths, count)]


def answered(made: torch.nn.Module, way: str, asked: list[list[int]], new: int) -> tuple[list, float]:
    """The tokens of each answer, and the seconds of the second of two calls.

    Raises:
        RuntimeError: an answer is missing, or too short.
    """
    import transformers

    made.set_attn_implementation(way)
    cache = transformers.ContinuousBatchingConfig(
        num_blocks=sum(-(-(len(prompt) + new) // 256) for prompt in asked) + len(asked),
        allow_block_sharing=False,
        auto_switch_to_flash=False,
    )
    greedy = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1)
    run = partial(made.generate_batch, asked, greedy, cache, persistent_manager=True)
    try:
        run()
        began = time.perf_counter()
        said = [answer.generated_tokens for answer in run().values()]
        seconds = time.perf_counter() - began
    finally:
        made.destroy_cached_continuous_batching_manager()
    if [len(tokens) for tokens in said] != [new] * len(asked):
        raise RuntimeError(f"{way} did not answer every request with {new} tokens")
    return said, seconds


def wrong(device: str) -> list[str]:
    """The ways that do not give eager's tokens on a small model in fp32."""
    made, asked, new = model(SMALL, "eager", device, torch.float32), prompts(4, 300, SMALL["vocab_size"]), 16
    row, how = partial(torch.tensor, device=device), {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    alone = [made.generate(row([prompt]), **how)[0, len(prompt) :].tolist() for prompt in asked]
    return [way for way in WAYS if answered(made, way, asked, new)[0] != alone]


def time_batch(log: script.Log, device: str) -> None:
    """Keep each way's milliseconds for all requests."""
    refused = dict.fromkeys(wrong(device), "its tokens are not eager's")
    (count, longest, new), sizes = REQUESTS[device], SMALL if device == "cpu" else LLAMA_1B
    asked, made = prompts(count, longest, sizes["vocab_size"]), model(sizes, "eager", device)

    def sample(way: str) -> float | None:
        try:
            return None if way in refused else 1e3 * answered(made, way, asked, new)[1]
        except RuntimeError as error:  # of one contestant
            refused[way] = str(error)
            return None

    found = interleaved({way: partial(sample, way) for way in WAYS}, ROUNDS)
    shape = {"requests": count, "prompts": f"{SHORTEST} to {longest}", "new": new, "dtype": "bfloat16"}
    keep = partial(log.add, "llama-1b-continuous", direction="step", metric="time", shape=shape)
    for way, ms in found.items():
        if way in refused:
            keep(who=way, value=None, why=[refused[way]])
        else:
            keep(who=way, value=statistics.median(ms), low=min(ms), high=max(ms))


PARTS = {"steps": time_steps, "batch": time_batch}


def main(arguments: list[str] | None = None) -> None:
    """Time the parts."""
    import tilewise.compat.transformers

    parser = script.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=["steps"], choices=PARTS)
    options = parser.parse_args(arguments)
    tilewise.compat.transformers.register()
    command = "python -m bench.generate" + (f" --parts {' '.join(options.parts)}" if options.parts != ["steps"] else "")
    peers = {way: f'attn_implementation="{way}"' for way in WAYS}
    log = script.Log.begin(command, options, peers, ("transformers",))
    for part in options.parts:
        PARTS[part](log, options.device)


if __name__ == "__main__":
    main()
