"""A Hugging Face model end to end on this machine: eager, sdpa and tilewise, time and memory.

    python -m bench.huggingface --attention tilewise     one contestant in this process; its results are appended
    python -m bench.huggingface --write                  docs/huggingface.md's table from the records

The model is Llama's architecture at 62 M parameters, 6 layers of 12 query and 4 key heads of 64, fp32, with random weights:
time and memory do not depend on their values. Every task runs once for its peak of memory, then once for its time; where a
contestant is run several times, the page takes its fastest, since other work on the machine only adds. Attention's share is the
time inside the function that transformers calls for it, its layout copies included. Started with `MALLOC_MMAP_MAX_=0` and
`MALLOC_TRIM_THRESHOLD_=100000000000` glibc keeps freed memory: page faults else cost more than the arithmetic where they are slow.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from bench import measure, records
from bench.page import table

RESULTS = measure.ROOT / "bench" / "results" / "cpu-calls.jsonl"
PAGE = measure.ROOT / "docs" / "huggingface.md"
CONTESTANTS = ("eager", "sdpa", "tilewise")
N, SHORT, NEW, WINDOW = 4096, 1024, 16, 512
LLAMA = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2 * N,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
# What is timed, as the page names it.
TASKS = {
    "forward": f"forward, {N} tokens",
    "train": f"forward and backward, {N} tokens",
    "padded": f"forward, two sequences of {N} and {SHORT} tokens in one padded batch",
    "window": f"forward, {N} tokens, `MistralForCausalLM` with a window of {WINDOW}",
    "prefill": f"`generate`: the prompt of {N} tokens",
    "token": f"`generate`: each of {NEW} tokens after it",
}


class Stopwatch:
    """Seconds inside one function, over all its calls."""

    def __init__(self, function: Callable):
        self.function = function
        self.seconds = 0.0

    def __call__(self, *arguments, **keywords):
        began = time.perf_counter()
        out = self.function(*arguments, **keywords)
        self.seconds += time.perf_counter() - began
        return out


def models(attention: str) -> tuple[dict[str, torch.nn.Module], Stopwatch]:
    """Llama and Mistral over one set of weights, and the watch around the attention that both call."""
    import transformers
    from transformers.models.llama.modeling_llama import eager_attention_forward

    import tilewise.compat.transformers

    tilewise.compat.transformers.register()
    functions = transformers.AttentionInterface()
    watch = Stopwatch(eager_attention_forward if attention == "eager" else functions[attention])
    transformers.AttentionInterface.register(attention, watch)
    torch.manual_seed(0)
    made = {}
    for name, window in (("Llama", {}), ("Mistral", {"sliding_window": WINDOW})):
        config = getattr(transformers, f"{name}Config")(**LLAMA, **window)
        made[name] = getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation=attention)
    made["Mistral"].load_state_dict(made["Llama"].state_dict(), assign=True)
    return made, watch


def tasks(made: dict[str, torch.nn.Module]) -> dict[str, Callable[[int], object]]:
    """The tasks as functions of a length: the full one, and a short one to warm up."""
    llama, mistral = made["Llama"], made["Mistral"]
    row = torch.randint(1, LLAMA["vocab_size"], (2, N), generator=torch.Generator().manual_seed(0))

    def train(n: int) -> None:
        llama(row[:1, :n], labels=row[:1, :n], use_cache=False).loss.backward()
        llama.zero_grad()

    @torch.no_grad()
    def padded(n: int) -> None:
        kept = torch.ones(2, n, dtype=torch.int64)
        kept[1, : n - n * SHORT // N] = 0
        llama(row[:, :n], attention_mask=kept, use_cache=False)

    forward = lambda model: torch.no_grad()(lambda n: model(row[:1, :n], use_cache=False))  # noqa: E731
    return {"forward": forward(llama), "train": train, "padded": padded, "window": forward(mistral)}


def generation(model: torch.nn.Module) -> dict[str, dict]:
    """The prompt, and each token after it: seconds between the moments at which logits are there."""
    row = torch.randint(1, LLAMA["vocab_size"], (1, N), generator=torch.Generator().manual_seed(0))
    stamps: list[float] = []

    def stamp(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        stamps.append(time.perf_counter())
        return scores

    options = {"attention_mask": torch.ones_like(row), "do_sample": False, "logits_processor": [stamp]}
    with measure.PeakMemory("cpu") as peak:
        model.generate(row, **options, max_new_tokens=2)
    stamps.clear()
    began = time.perf_counter()
    model.generate(row, **options, max_new_tokens=NEW + 1)
    steps = [b - a for a, b in itertools.pairwise(stamps)]
    return {
        "prefill": {"seconds": stamps[0] - began, "peak_bytes": peak.bytes},
        "token": {"seconds": statistics.median(steps), "peak_bytes": peak.bytes},
    }


def run(attention: str) -> list[dict]:
    """One contestant's run and its results: a task's time and peak of memory, and the time inside its attention."""
    import transformers

    made, watch = models(attention)
    parameters = sum(p.numel() for p in made["Llama"].parameters())
    command = f"python -m bench.huggingface --attention {attention}"
    peers = {attention: "the attention that transformers calls"}
    head = records.run(command, "cpu", peers, parameters=parameters)
    head["versions"]["transformers"] = transformers.__version__
    found: dict[str, dict] = {}
    for name, task in tasks(made).items():
        task(64)
        with measure.PeakMemory("cpu") as peak:
            task(N)
        watch.seconds, began = 0.0, time.perf_counter()
        task(N)
        found[name] = {"seconds": time.perf_counter() - began, "peak_bytes": peak.bytes}
        if name != "train":  # the backward passes the watch by
            found[name]["attention_seconds"] = watch.seconds
    return [head, *results(head["run"], attention, found | generation(made["Llama"]))]


def results(run: str, attention: str, tasks: dict[str, dict]) -> Iterator[dict]:
    """A contestant's tasks as results."""
    for task, measured in tasks.items():
        case, shape = f"llama-{task}", {"model": "llama-62m", "task": task}
        yield records.result(run, case, attention, "step", "time", measured["seconds"] * 1e3, shape=shape)
        yield records.result(run, case, attention, "step", "memory", measured["peak_bytes"] / records.MIB, shape=shape)
        if "attention_seconds" in measured:
            inside = measured["attention_seconds"] * 1e3
            yield records.result(run, f"{case}-attention", attention, "step", "time", inside, shape=shape)


# ---- the page -----------------------------------------------------------------------------------------------------


def fastest() -> dict[str, dict[str, dict]]:
    """Each contestant's fastest run of each task, and its least peak of memory: kept memory is time's gain and peak's loss."""
    lines = records.read(RESULTS)

    def values(case: str, name: str, metric: str) -> dict[str, float]:
        return {r["run"]: r["value"] for r in records.select(lines, case=case, contestant=name, metric=metric)}

    def best(name: str, task: str) -> dict:
        times, inside = (values(case, name, "time") for case in (f"llama-{task}", f"llama-{task}-attention"))
        run = min(times, key=times.get)
        found = {"seconds": times[run] / 1e3, "gib": min(values(f"llama-{task}", name, "memory").values()) / 1024}
        return found | ({"attention_seconds": inside[run] / 1e3} if run in inside else {})

    return {name: {task: best(name, task) for task in TASKS} for name in CONTESTANTS}


def seconds_and_memory(found: dict[str, dict[str, dict]]) -> str:
    """Seconds, peak memory above the weights, and tilewise's gain."""
    titles = [f"{name}, {unit}" for unit in ("s", "GiB") for name in CONTESTANTS]
    lines = []
    for task, title in TASKS.items():
        seconds = {name: found[name][task]["seconds"] for name in CONTESTANTS}
        cells = [f"{seconds[name]:#.3g}" for name in CONTESTANTS]
        cells += [f"{found[name][task]['gib']:.2f}" for name in CONTESTANTS]
        lines.append([title, *cells, *[f"{seconds[name] / seconds['tilewise']:.2f}" for name in ("eager", "sdpa")]])
    return "\n".join(table(["", *titles, "× eager", "× sdpa"], lines))


def shares(found: dict[str, dict[str, dict]]) -> str:
    """The share of attention in the time of the forward tasks."""
    lines = []
    for task, title in TASKS.items():
        parts = [found[name][task] for name in CONTESTANTS]
        if "attention_seconds" in parts[0]:
            lines.append([title, *[f"{100 * part['attention_seconds'] / part['seconds']:.0f} %" for part in parts]])
    return "\n".join(table(["attention's share of the time", *CONTESTANTS], lines))


def page(text: str, found: dict[str, dict]) -> str:
    """The page with both tables between their marks."""
    for mark, made in (("table", seconds_and_memory(found)), ("shares", shares(found))):
        before, rest = text.split(f"<!-- {mark} -->\n", 1)
        text = f"{before}<!-- {mark} -->\n{made}\n<!-- /{mark} -->" + rest.split(f"<!-- /{mark} -->", 1)[1]
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--attention", choices=CONTESTANTS, help="measure this one")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file that the record is appended to")
    parser.add_argument("--write", action="store_true", help="write the page's tables from the records")
    options = parser.parse_args()
    if options.attention:
        found = records.append(run(options.attention), options.out)
        print(options.attention, {r["case"]: round(r["value"] / 1e3, 3) for r in records.select(found, metric="time")})
    if options.write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), fastest()), encoding="utf-8")


if __name__ == "__main__":
    main()
