"""docs/performance.md and the quotations of it say what bench/results say."""

import re

import pytest

from bench import page, plots, quotations, tables

WRITE = "python -m bench.page --write"


def sections() -> list[str]:
    return re.split(r"^## ", page.page(), flags=re.MULTILINE)[1:]


def test_the_page_is_what_the_results_say():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), f"run {WRITE}"


MARKS = {
    "README.md": ("speed",),
    "switching.md": ("speed", "times"),
    "derivatives.md": ("measured",),
    "huggingface.md": ("generate", "table", "shares"),
}


@pytest.mark.parametrize("path", page.QUOTING, ids=lambda path: path.name)
def test_a_quotation_is_what_the_results_say(path):
    text = path.read_text(encoding="utf-8")
    assert all(text.count(f"<!-- {mark} -->") == 1 for mark in MARKS[path.name])
    assert text == page.quoted(text), f"run {WRITE}"


@pytest.mark.parametrize("text", sections(), ids=lambda text: text.partition("\n")[0])
def test_a_section_says_machine_date_and_command(text):
    said = " ".join(text.split())
    assert "otherwise as above" in said or re.search(
        r"(NVIDIA|AMD|Intel) .*, 20\d\d-\d\d-\d\d, torch .*; measured by ", said
    )


def test_means_and_numbers():
    assert tables.geometric_mean([2, 8]) == pytest.approx(4)
    assert [tables.number(x) for x in (None, 0.84, 12.6, 1234.5)] == ["—", "0.8", "13", "1,234"]
    assert tables.number(0.5, 2) == "0.50"
    assert [tables.pair(x) for x in ([None, None], [12, None])] == ["—", "12 / —"]
    assert [tables.spread(x) for x in ([None], [9.6, 10.4], [8.2, None, 12])] == ["—", "10", "8 to 12"]


def test_a_peer_is_behind_or_ahead_by_its_own_row():
    case = page.square(64, 512, "full")
    best = max(page.H200.over_cudnn(peer, case, "forward") for peer in page.H200.peers)
    assert page.H200.over_best(case, "forward") == pytest.approx(
        page.H200.over_cudnn("tilewise", case, "forward") / best
    )


def test_the_plot_of_models_shows_a_bar_for_each_row_of_the_tables():
    found = quotations.beside_sdpa()
    drawn = plots.models()
    for (title, bars), axes in zip(found.items(), drawn.axes, strict=True):
        assert axes.get_title(loc="left") == title
        widths = [bar.get_width() for bar in axes.patches]
        assert widths == [*bars.values()]
    generate, steps, cpu = found.values()
    assert len(generate) == len(quotations.CACHES)
    assert list(cpu) == [title for title, _ in quotations.TASKS.values()]
    assert len(steps) == len(quotations.CONTEXTS)
    assert tables.spread([0.876, None, 1.001], 2) == "0.88 to 1.00"


def test_a_recorded_command_has_the_names_of_today_or_says_that_it_is_of_its_commit():
    assert tables.today("python -m bench.traffic --out FILE") == "python -m tilewise_papers.traffic --out FILE"
    assert tables.runs_today("`tilewise bench`, then `python -m bench.run`")
    assert not tables.runs_today("python -m bench.gpu host")
    assert all(tables.runs_today(f"python -m {module}") for module in tables.MOVED.values())
    assert "`python -m bench.cpu_amx` of that commit" in " ".join(page.page().split())
