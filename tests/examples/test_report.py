"""docs/training.md: its tables are what the committed results say."""

from examples import report


def test_the_page_shows_the_committed_results():
    text = (report.ROOT / "docs" / "training.md").read_text()
    results = report.ROOT / "bench" / "results"
    context, pathfinder = (report.read(results / f"{name}-cpu.json") for name in ("context", "pathfinder"))
    assert report.page(text, context, pathfinder) == text
    assert all(f"**{run['held_out_loss']:.4f}**" in text for run in context["runs"])
    assert f"{pathfinder['test_accuracy']:.1%}" in text


def step(name, at, mib):
    row = {"attention": name, "context": at, "threads": 2}
    return row | ({"seconds": at / 1000, "peak_bytes": mib << 20} if mib else {"failed": "no memory"})


def test_what_a_failed_step_would_need_is_on_the_line_through_the_two_before():
    steps = [step("standard", at, mib) for at, mib in ((512, 300), (1024, 500), (4096, 1700), (16384, None))]
    record = {"steps": steps}
    assert report.memory(record, steps[1]) == "500"
    assert report.memory(record, steps[3]) == "stops: 6,500 needed"
