"""The tables of docs/huggingface.md, and what its plot shows: whole models with sdpa and with tilewise.

On a CPU a contestant's figure is its fastest run, since other work on the machine only adds. Attention's share is the time inside the
function that transformers calls for it.
"""

from bench import records
from bench.tables import RESULTS, load, spread, table

CONTESTANTS = ("eager", "sdpa", "tilewise")
N, SHORT, NEW, WINDOW = 4096, 1024, 16, 512
# What is timed, as the page names it.
TASKS = {
    "forward": f"forward, {N} tokens",
    "train": f"forward and backward, {N} tokens",
    "padded": f"forward, two sequences of {N} and {SHORT} tokens in one padded batch",
    "window": f"forward, {N} tokens, `MistralForCausalLM` with a window of {WINDOW}",
    "prefill": f"`generate`: the prompt of {N} tokens",
    "token": f"`generate`: each of {NEW} tokens after it",
}
SHORT_TITLES = {
    "forward": "forward",
    "train": "forward and backward",
    "padded": "forward, padded batch",
    "window": f"forward, window of {WINDOW}",
    "prefill": "prompt of generate",
    "token": "a step of generate",
}


GENERATE = ("h100-generate", "h100-generate-round1", "h100-generate-round2")
"""The runs of ``bench.generate`` with today's code. The table shows the first, the ratios are of all."""
CACHES = [f"{cache}-{size}" for cache in ("dynamic", "static") for size in ("1x1024", "16x2048")]
STEPS, CONTEXTS = "b12178aa0a97", (1024, 4096, 16384)
"""The run that timed training steps of a GPT on a GPU."""


def milliseconds(run: str, cache: str, who: str) -> float:
    """A step of ``generate`` after the prompt."""
    return load("hopper-calls").value(run, f"generate-{cache}-step", who, "forward", "host") / 1e3


def paces(cache: str) -> list[float]:
    """How many times as fast as sdpa a step is, in each run."""
    return [milliseconds(run, cache, "sdpa") / milliseconds(run, cache, "tilewise") for run in GENERATE]


def generating() -> str:
    """Steps of ``generate`` on a GPU."""
    lines = []
    for cache in CACHES:
        kind, size = cache.split("-")
        both = [f"{milliseconds(GENERATE[0], cache, who):.2f}" for who in ("sdpa", "tilewise")]
        lines.append([f"{size.replace('x', ' × ')}, {kind}", *both, spread(paces(cache), 2)])
    return "\n".join(
        table(["sequences × tokens, cache", "sdpa, ms", "tilewise, ms", "sdpa / tilewise, three runs"], lines)
    )


def beside_sdpa() -> dict[str, dict[str, list[float]]]:
    """How many times as fast as with sdpa a model is: by machine and by what it does, a number for each run."""
    steps, cpu = load("hopper-calls"), fastest()

    def step(context: int) -> float:
        times = [steps.value(STEPS, f"gpt-step-n{context}", who, "step", "time") for who in ("sdpa", "hopper")]
        return times[0] / times[1]

    return {
        f"A step of generate, Llama of 12 layers, bf16, {steps.runs[GENERATE[0]]['device'].removesuffix(' 80GB HBM3')}": {
            f"{size.replace('x', ' × ')} tokens, {kind} cache": paces(f"{kind}-{size}")
            for kind, size in (cache.split("-") for cache in CACHES)
        },
        f"A training step, GPT of 6 layers, bf16, {steps.runs[STEPS]['device']}": {
            f"context {n:,}": [step(n)] for n in CONTEXTS
        },
        "Llama of 6 layers, 4,096 tokens, fp32, two CPU cores": {
            title: [cpu["sdpa"][task]["seconds"] / cpu["tilewise"][task]["seconds"]]
            for task, title in SHORT_TITLES.items()
        },
    }


def fastest() -> dict[str, dict[str, dict]]:
    """Each contestant's fastest run of each task, and its least peak of memory: kept memory is time's gain and peak's loss."""
    lines = records.read(RESULTS / "cpu-calls.jsonl")

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


def quoted(text: str) -> str:
    """The text of the page with its tables as the results have them now."""
    found = fastest()
    made_now = {"generate": generating(), "table": seconds_and_memory(found), "shares": shares(found)}
    for mark, made in made_now.items():
        before, rest = text.split(f"<!-- {mark} -->\n", 1)
        text = f"{before}<!-- {mark} -->\n{made}\n<!-- /{mark} -->" + rest.split(f"<!-- /{mark} -->", 1)[1]
    return text
