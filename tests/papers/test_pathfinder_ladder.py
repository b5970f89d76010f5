"""The ladder up to Path-X, at a size for a CPU: when a rung is left, what a run records, and what pixels are told of their paths."""

import math
from dataclasses import replace

import torch
import torch.nn.functional as F

from bench import records
from tilewise_papers.pathfinder import ladder
from tilewise_papers.pathfinder.figure import draw_ladder
from tilewise_papers.pathfinder.ladder import Recipe, Rung
from tilewise_papers.pathfinder.model import EncoderConfig, pixel_angles
from tilewise_papers.pathfinder.paths import PathfinderConfig, draw

SMALL = PathfinderConfig(side=12, dashes=2, distractors=0)
LARGER = PathfinderConfig(side=16, dashes=3, distractors=1)
RECIPE = Recipe(6.0, tokens=8 * 144, pool=90, warmup_steps=2, good=0.0, window=10, test_images=16)
ENCODER = EncoderConfig(layers=1, d_model=16, heads=1, d_hidden=16)


def test_a_rung_is_left_when_it_is_learnt_and_the_last_when_its_time_is_over(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(ladder.time, "perf_counter", lambda: 0.1 * next(now))
    rungs = (Rung(SMALL, 0.9), Rung(SMALL, 0.2), Rung(SMALL, 1.0))
    recipe = replace(RECIPE, seconds=4.0, tokens=2 * 144)
    first, second, third = ladder.climb(ladder.Student(ENCODER, 0), rungs, recipe, "cpu")
    assert len(first.accuracy) == 10  # any accuracy is good enough here
    assert len(second.accuracy) == 10  # it is past its time when it begins
    assert third.ended >= 4.0
    assert [first.told, second.told, third.told] == [False] * 3


def test_pixels_are_told_of_their_paths_from_the_start_or_where_labels_do_not_do(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(ladder.time, "perf_counter", lambda: 0.1 * next(now))
    rungs = (Rung(SMALL, 0.1), Rung(SMALL, 1.0))
    recipe = replace(RECIPE, seconds=3.0, tokens=2 * 144, paths=1.0, good=2.0, lost=1.1, window=5)
    assert [x.told for x in ladder.climb(ladder.Student(ENCODER, 0), rungs, recipe, "cpu")] == [True, True]
    late = replace(recipe, late=True, lost=-1.0)
    assert [x.told for x in ladder.climb(ladder.Student(ENCODER, 0), rungs, late, "cpu")] == [False, False]
    late = replace(recipe, late=True)
    assert [x.told for x in ladder.climb(ladder.Student(ENCODER, 0), rungs, late, "cpu")] == [True, True]


def test_a_run_records_every_rung_and_is_drawn_with_what_follows_it(tmp_path):
    path, recipe = tmp_path / "ladder.jsonl", replace(RECIPE, seconds=0.5, paths=1.0)
    for rungs in (Rung(SMALL, 0.5, read=100), Rung(SMALL, 1.0)), (Rung(LARGER, 0.5), Rung(LARGER, 1.0)):
        records.append(ladder.study(ladder.Student(ENCODER, 0), rungs, recipe), path)
    head, rungs = ladder.found(path)
    assert head["encoder"]["d_model"] == 16
    assert [(r["shape"]["side"], r["tested_images"]) for r in rungs] == [(12, 0), (12, 16), (16, 0), (16, 16)]
    assert all(len(r["curve"]) == r["steps"] // 10 and 0 <= r["value"] <= 1 for r in rungs)
    assert rungs[0]["images_seen"] == 11 * rungs[0]["steps"]  # 8 · 144 pixels, 100 of each image
    assert rungs[2]["began_s"] == rungs[1]["ended_s"]
    draw_ladder(head, rungs, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_batches_of_fewer_pixels_and_more_images_take_turns_with_a_rungs_own():
    rung, recipe = Rung(SMALL, 1.0, fewer=(36, 72)), replace(RECIPE, tokens=2 * 144, pool=20)
    found = [seen.pixels.shape for _, (_, seen) in zip(range(7), ladder.batches(rung, recipe, 0, "cpu"), strict=False)]
    assert found == [(2, 144), (8, 36), (4, 72)] * 2 + [(2, 144)]
    assert rung.seen(7, recipe.tokens) == sum(images for images, _ in found)
    climb = ladder.Climb(rung, 0.0, accuracy=[1.0, 0.5, 0.0] * 3 + [0.0])
    assert climb.latest(3) == {144: 2 / 3, 36: 0.5, 72: 0.0}
    assert climb.recent(3) == 0.0
    assert climb.latest(4) == {144: 0.75, 36: 0.0, 72: 0.0}


def test_a_run_ends_whose_first_step_took_all_of_its_time(monkeypatch):
    monkeypatch.setattr(ladder, "compile_seconds", lambda *arguments: 2.0)
    rungs = (Rung(SMALL, 0.5), Rung(SMALL, 1.0))
    _, *found = ladder.study(ladder.Student(ENCODER, 0), rungs, replace(RECIPE, seconds=0.5))
    assert [r["steps"] for r in found] == [10, 10]


def test_a_lit_pixel_is_told_how_many_dots_lie_on_its_path_which_is_two_in_positives_alone():
    images = draw(LARGER, 24, seed=1)
    dots = ladder.dots_of_paths(images).view_as(images.pixels)
    assert torch.equal(dots >= 0, images.pixels > 0)
    assert torch.equal((dots == 2).flatten(1).any(1), images.label.bool())
    assert torch.equal((dots == 1).flatten(1).any(1), ~images.label.bool())
    for n in (0, 1):  # a dot's own pixels lie on its path
        at = images.dots[:, n]
        assert (dots[torch.arange(24), at[:, 0], at[:, 1]] > 0).all()


def test_a_row_of_images_has_the_logits_that_the_encoder_has_for_each_image():
    student, images = ladder.Student(EncoderConfig(2, 16, 1, 16), 0), draw(SMALL, 5, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = student.encoder(images.pixels)
    assert torch.equal(student(ladder.look(images.pixels))[0], expected.float())
    filled = ladder.Student(EncoderConfig(2, 16, 1, 16), 0, tokens=1000)
    logits, dots = filled(ladder.look(images.pixels))
    assert torch.equal(logits, expected.float())
    assert dots.shape == (5 * SMALL.seqlen, 3)


def test_scores_are_as_sharp_over_more_keys_as_over_256():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 8, dtype=torch.float64, generator=generator) for n in (5, 1024, 1024))
    exact = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=1.25 / math.sqrt(8))
    assert (ladder.sharpened_attention(q, k, v) - exact.transpose(1, 2)).abs().max() < 1e-12


def test_all_lit_pixels_are_read_and_dark_ones_make_up_the_number():
    images = draw(LARGER, 6, seed=3)
    seen = ladder.look(images.pixels, 100, torch.Generator().manual_seed(0))
    assert torch.equal(seen.pixels, images.pixels.flatten(1).gather(1, seen.place))
    assert torch.equal(seen.pixels.sum(1), images.pixels.flatten(1).sum(1))
    assert all(len(set(row)) == 100 for row in seen.place.tolist())
    for rung in (*ladder.LADDER, *ladder.BEYOND):  # no image of the ladder has more lit pixels than are read
        c = rung.images
        assert rung.tokens >= c.dash * (2 * c.dashes + c.distractors * max(1, c.dashes // 3)) + 18


def test_pairs_that_do_not_turn_see_a_key_alike_wherever_it_lies():
    angles = pixel_angles(8, 32, still=2).view(64, 2, 8)
    assert not angles[..., 6:].any()
    assert torch.equal(angles[..., :6].flatten(1), pixel_angles(8, 24).view(64, 12))


def test_the_rungs_rise_to_path_x_and_their_times_are_in_order():
    for rungs, side in ((ladder.LADDER, 64), (ladder.BEYOND, 128)):
        tops = [(r.images.side, r.tokens) for r in rungs]
        shares = [r.until for r in rungs]
        assert tops == sorted(tops)
        assert shares == sorted(shares)
        assert (tops[-1], shares[-1]) == ((side, side**2), 1)
    assert ladder.means([0.0, 1.0, 1.0, 1.0, 5.0], 2) == [0.5, 1.0]
