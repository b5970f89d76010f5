"""The tables of docs/huggingface.md: a Llama of 62 M parameters on a CPU by eager attention, sdpa and tilewise.

A contestant's figure is its fastest run, since other work on the machine only adds. Attention's share is the time inside the function
that transformers calls for it.
"""

from bench import records
from bench.tables import RESULTS, table

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
    """The text of the page with both tables as the results have them now."""
    found = fastest()
    for mark, made in (("table", seconds_and_memory(found)), ("shares", shares(found))):
        before, rest = text.split(f"<!-- {mark} -->\n", 1)
        text = f"{before}<!-- {mark} -->\n{made}\n<!-- /{mark} -->" + rest.split(f"<!-- /{mark} -->", 1)[1]
    return text
