"""The CPU's goals as a picture: `python -m bench.figure bench/results/cpu-goals.jsonl docs/img/cpu-goals.png`."""

import argparse
from pathlib import Path

from bench import records
from bench.compare import Verdict, judge, load_goals

COLOURS = {"forward": "#0b6e8f", "backward": "#c8553d"}
PEERS = {
    "sdpa": "times as fast as PyTorch's SDPA",
    "cpu": "times as fast as without a mask",
    "read": "share of the pace at which K and V are read",
}


def draw(verdicts: list[Verdict], where: str, path: Path) -> None:
    """One panel a peer: a bar for each case and direction, and a black line at its goal."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = {peer: [v for v in verdicts if v.goal.peer == peer] for peer in PEERS}
    panels = {peer: rows for peer, rows in panels.items() if rows}
    heights = [len({v.goal.case for v in rows}) + 1.5 for rows in panels.values()]
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(9, 0.34 * sum(heights) + 1), layout="constrained", height_ratios=heights, squeeze=False
    )
    for (peer, rows), panel in zip(panels.items(), axes[:, 0], strict=True):
        _bars(panel, rows)
        panel.set_xlabel(PEERS[peer])
    figure.suptitle(where, fontsize=9, color="#555555")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _bars(panel, verdicts: list[Verdict]) -> None:
    cases = list(dict.fromkeys(v.goal.case for v in verdicts))
    for direction, colour in COLOURS.items():
        rows = [v for v in verdicts if v.goal.direction == direction]
        at = [cases.index(v.goal.case) + (0.2 if direction == "backward" else -0.2) for v in rows]
        panel.barh(at, [v.measured for v in rows], 0.36, color=colour, label=direction if rows else None)
        for y, v in zip(at, rows, strict=True):
            panel.plot([v.goal.ratio] * 2, [y - 0.2, y + 0.2], color="black", linewidth=1.5)
            panel.annotate(
                f"{v.measured:.2f}", (v.measured, y), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
    panel.set_yticks(range(len(cases)), [case.removeprefix("cpu-") for case in cases])
    panel.set_ylim(len(cases) - 0.4, -0.6)
    panel.margins(x=0.08)
    panel.legend(frameon=False, loc="lower right", fontsize=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0])
    parser.add_argument("results", type=Path, help="what `tilewise bench --device cpu` wrote")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    found = records.read(options.results)
    goals = [g for g in load_goals() if g.contestant == "cpu" and g.peer]
    measured = [v for v in judge(goals, records.entries(found)) if v.measured is not None]
    run = next(iter(records.runs(found).values()))
    where = f"{run['device']}, {run['threads']} threads, torch {run['versions']['torch']}   ·   black: the goal"
    draw(measured, where, options.picture)


if __name__ == "__main__":
    main()
