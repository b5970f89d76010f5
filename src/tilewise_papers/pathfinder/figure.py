"""The picture of a climb: images of each difficulty, and the accuracy on each batch before it was learnt from."""

from pathlib import Path

from tilewise_papers.pathfinder.paths import PathfinderConfig, draw

RED, BLUE = "#c8553d", "#0b6e8f"


def draw_ladder(head: dict, rungs: list[dict], path: Path):
    """Writes a PNG of what ladder.py trained: an image of each difficulty above, the accuracy over the seconds of training below.

    head, rungs: a run's record and the results of rungs, as ``ladder.newest`` returns them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure = plt.figure(figsize=(11, 5.5), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 4))
    shown = list(dict.fromkeys(_images_of(rung) for rung in rungs))
    for place, images in zip(above.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        place.imshow(draw(images, 1, seed=2).pixels[0], cmap="gray")
        place.set_title(f"{images.side}²", fontsize=8)
        place.set_axis_off()
    axes = below.subplots()
    axes.set_xlim(0, rungs[-1]["ended_s"])
    for number, rung in enumerate(rungs):
        _rung(axes, rung, shade=0.05 * (number % 2))
    axes.axhline(0.5, color="#777777", linewidth=1, linestyle=":")
    axes.set(xlabel=f"seconds of training, {head['device']}", ylabel="accuracy on new images", ylim=(0.4, 1.02))
    axes.grid(True, axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _images_of(rung: dict) -> PathfinderConfig:
    """The difficulty of a rung's images."""
    return PathfinderConfig(**{name: rung["shape"][name] for name in PathfinderConfig.__dataclass_fields__})


def _rung(axes, rung: dict, shade: float):
    """A rung's accuracy, means over a few steps each, and what it answers in its test if it has one."""
    began, ended, curve = rung["began_s"], rung["ended_s"], rung["curve"]
    axes.axvspan(began, ended, color="#000000", alpha=shade, linewidth=0)
    seconds = [began + (ended - began) * (n + 0.5) / len(curve) for n in range(len(curve))]
    axes.plot(seconds, curve, color=BLUE, linewidth=1.4)
    if rung["tested_images"]:
        axes.plot(ended, rung["value"], marker="o", color=RED, clip_on=False)
        side, left = rung["shape"]["side"], ended < axes.get_xlim()[1] / 4
        said = f"{side} × {side}, all pixels read:\n{rung['value']:.1%} of {rung['tested_images']:,} test images"
        axes.annotate(said, (ended, 0.42), ha="left" if left else "right", fontsize=9, color=RED)
        axes.vlines(ended, 0.4, rung["value"], color=RED, linewidth=0.8, linestyle=":")
