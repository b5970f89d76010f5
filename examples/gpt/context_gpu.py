"""Longer context, better model? The study of context.py at a size for one GPU, up to a context of 65,536 bytes.

    python -m examples.gpt.context_gpu --out FILE.jsonl                            # about three minutes on an H200
    python -m examples.gpt.context_gpu --out FILE.jsonl --draw docs/img/context-h200.png   # the file's last such run, on any machine

The recipe is that of context.py: most steps at a short context, once for all runs, then the last ones at the long context, once for
each, where every run reads the same bytes in the same order and is cut into rows of its own context. The text is Python's standard
library, sorted by path so that the files of a package lie together, and its end is held out. The loss by position says whether
a model uses what lies far back: of a model that does, it falls to the end of the row.
"""

import argparse
import copy
import time
from dataclasses import asdict
from pathlib import Path

from bench import records
from examples.gpt.context import Reader, evaluate, means
from examples.gpt.model import GPTConfig
from examples.gpt.train import TrainConfig, standard_library_sources, train

CONTEXTS = (1024, 4096, 16384, 65536)
LONGEST = CONTEXTS[-1]
SIZES = GPTConfig(layers=6, d_model=512, heads_q=4, heads_k=4, d_hidden=1408, context=CONTEXTS[0])
SHORT = TrainConfig(steps=800, context=1024, batch_size=64, learning_rate=2e-3, warmup_steps=100)
LONG = TrainConfig(steps=120, context=LONGEST, batch_size=2, learning_rate=6e-4, warmup_steps=10, seed=1)
HELD_OUT = 16 * LONGEST
POSITIONS = (0, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Where the held-out loss by position is cut."""
CASE, COMMAND = "gpt-context", "python -m examples.gpt.context_gpu"


def texts() -> tuple[bytes, bytes]:
    """The standard library's sources, all of them: (to train on, held out)."""
    text = standard_library_sources(limit=None)
    return text[:-HELD_OUT], text[-HELD_OUT:]


def run(reader: Reader, text: bytes, config: TrainConfig, until: float) -> list[float]:
    """The losses of a model's training; fewer than the config's steps where the time ``until`` came first."""
    losses = []
    for record in train(reader, text, config):
        losses.append(record.loss)
        if time.perf_counter() > until:
            break
    return losses


def study(device: str, until: float):
    """Yields the run's record and then its results: for each context the held-out loss, whole and by position."""
    text, held_out = texts()
    short = Reader(SHORT.context, "tilewise", SIZES).to(device)
    weights = sum(weight.numel() for weight in short.parameters())
    training = {"short": asdict(SHORT), "long": asdict(LONG), "text_bytes": len(text), "held_out_bytes": HELD_OUT}
    head = records.run(COMMAND, device, {"tilewise": "the public call"}, weights=weights, training=training)
    yield head
    began = time.perf_counter()
    losses = run(short, text, SHORT, until)
    print(f"short: {len(losses)} steps, loss {losses[-1]:.4f}, {time.perf_counter() - began:.0f} s", flush=True)
    for context in CONTEXTS:
        began = time.perf_counter()
        reader = Reader(context, "tilewise", SIZES).to(device)
        reader.load_state_dict(copy.deepcopy(short.state_dict()))
        losses = run(reader, text, LONG, until)
        by_position = evaluate(reader, held_out, context)
        shape = {"context": context, "layers": SIZES.layers, "d_model": SIZES.d_model, "heads": SIZES.heads_q}
        more = {
            "shape": shape,
            "steps": len(losses),
            "by_position": means(by_position, POSITIONS),
            "seconds": round(time.perf_counter() - began, 1),
            "train_loss": [round(loss, 4) for loss in losses[::10]],
        }
        loss = by_position.mean().item()
        print(
            f"{context}: {len(losses)} steps, held-out {loss:.4f}, {more['seconds']} s, {more['by_position']}",
            flush=True,
        )
        yield records.result(head["run"], f"{CASE}-{context}", "tilewise", "step", "loss", loss, **more)


def found(path: Path) -> tuple[dict, list[dict]]:
    """The last study of a file of results: its run and its results in the order of their contexts."""
    everything = records.read(path)
    results = [r for r in everything if r.get("case", "").startswith(f"{CASE}-")]
    last = results[-1]["run"]
    return records.runs(everything)[last], [r for r in results if r["run"] == last]


def draw(path: Path, picture: Path) -> None:
    """Held-out loss over the context, and by position for each context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    head, results = found(path)
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (whole, parts) = plt.subplots(1, 2, figsize=(10, 3.6), width_ratios=(1, 1.6), layout="constrained")
    contexts = [r["shape"]["context"] for r in results]
    whole.plot(contexts, [r["value"] for r in results], marker="o", color="#0b6e8f")
    whole.set_xscale("log", base=2)
    whole.set_xticks(contexts, [f"{n:,}" for n in contexts])
    whole.set(xlabel="context, bytes", ylabel="held-out loss, nats a byte")
    longest = list(results[-1]["by_position"])
    for n, r in enumerate(results, 1):
        losses = list(r["by_position"].values())
        label = f"context {r['shape']['context']:,}"
        parts.plot(
            range(len(losses)), losses, marker="o", markersize=4, color="#0b6e8f", alpha=n / len(results), label=label
        )
    parts.set_xticks(range(len(longest)), [span.replace("-", "–") for span in longest], rotation=30)
    parts.set(xlabel="position in the row")
    parts.legend(frameon=False)
    where = f"{head['device']}, {head['weights'] / 1e6:.0f} million weights, bf16"
    figure.suptitle(where, fontsize=9, color="#555555")
    figure.savefig(picture, dpi=130)
    plt.close(figure)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="results are appended here")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=600.0, help="training stops after so long")
    parser.add_argument("--draw", type=Path, help="draw the file's last study here and run nothing")
    options = parser.parse_args()
    if options.draw:
        draw(options.out, options.draw)
        return
    records.append(study(options.device, time.perf_counter() + options.seconds), options.out)


if __name__ == "__main__":
    main()
