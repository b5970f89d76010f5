"""The ladder up to Path-256, at a size for a CPU: when a rung is left, what a run records, and which tiles of pixels see each other."""

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
RECIPE = Recipe(tokens=2 * 144, pool=90, warmup_steps=2, good=0.0, window=10, test_images=16)
ENCODER = EncoderConfig(layers=1, d_model=16, heads=1, d_hidden=16)


def test_a_rung_is_left_when_it_is_learnt_or_its_time_is_over_and_a_tested_one_after_all_of_its_time(monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr(ladder.time, "perf_counter", lambda: 0.1 * next(now))
    rungs = (Rung(SMALL, 9.0), Rung(SMALL, 4.0, tested=True))
    first, second = ladder.climb(ladder.Student(ENCODER, 0), rungs, RECIPE, "cpu")
    assert len(first.accuracy) == 10  # any accuracy is good enough here
    assert second.ended - second.began >= 4.0
    (late,) = ladder.climb(ladder.Student(ENCODER, 0), (Rung(SMALL, 1.5),), replace(RECIPE, good=2.0), "cpu")
    assert len(late.accuracy) == 20  # a tenth of a second a step, judged every ten


def test_a_rung_that_is_not_learnt_ends_the_climb(capsys):
    rungs = (Rung(SMALL, 1e-3), Rung(LARGER, 1e-3))
    _, *found = ladder.study(ladder.Student(ENCODER, 0), rungs, replace(RECIPE, good=2.0))
    assert [r["shape"]["side"] for r in found] == [12]
    assert capsys.readouterr().out.endswith("not learnt in 0.001 s\n")


def test_the_rate_falls_with_the_images_of_a_batch_and_over_a_tested_rung(monkeypatch):
    now, rates = iter(range(1000)), []
    monkeypatch.setattr(ladder.time, "perf_counter", lambda: 0.1 * next(now))
    step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self))[1]
    )
    recipe = replace(RECIPE, images=4, warmup_steps=1, learning_rate=1.0)
    list(ladder.climb(ladder.Student(ENCODER, 0), (Rung(SMALL, 1.0, fewer=(72, 36)),), recipe, "cpu"))
    assert rates == [0.5, 1.0, 1.0] * (len(rates) // 3) + [0.5, 1.0, 1.0][: len(rates) % 3]
    rates.clear()
    list(ladder.climb(ladder.Student(ENCODER, 0), (Rung(SMALL, 2.0, tested=True),), recipe, "cpu"))
    assert rates[0] == rates[8] == 0.5
    assert 0 < rates[17] < rates[12] < 0.5


def test_a_run_goes_on_where_the_one_before_ended_and_both_are_drawn(tmp_path):
    path, weights = tmp_path / "ladder.jsonl", tmp_path / "weights.pt"
    rungs = (Rung(SMALL, 0.1, read=100), Rung(SMALL, 0.1, tested=True), Rung(LARGER, 0.1), Rung(LARGER, 0.1, read=200))
    records.append(ladder.study(ladder.Student(ENCODER, 0), rungs[:2], RECIPE, 0, weights), path)
    saved = torch.load(weights)
    assert saved["rung"] == 2
    student = ladder.Student(ENCODER, 1)
    student.load_state_dict(saved["weights"])
    records.append(ladder.study(student, rungs[2:], RECIPE, 2), path)
    everything = records.read(path)
    found = ladder.newest(everything, rungs)
    head = records.runs(everything)[found[-1]["run"]]
    assert head["encoder"]["d_model"] == 16
    assert [(r["shape"]["side"], r["tested_images"]) for r in found] == [(12, 0), (12, 16), (16, 0), (16, 0)]
    assert all(len(r["curve"]) == r["steps"] // 10 and 0 <= r["value"] <= 1 for r in found)
    assert found[0]["images_seen"] == 2 * found[0]["steps"]  # 2 · 144 pixels, 100 of each image
    assert found[2]["began_s"] == found[1]["ended_s"] <= found[3]["began_s"]
    draw_ladder(head, found, tmp_path / "ladder.png")
    assert (tmp_path / "ladder.png").stat().st_size > 10_000


def test_batches_of_fewer_pixels_and_more_images_take_turns_with_a_rungs_own():
    rung, recipe = Rung(SMALL, 1.0, fewer=(36, 72)), replace(RECIPE, pool=20)
    found = [seen.pixels.shape for _, (seen, _) in zip(range(7), ladder.batches(rung, recipe, 0, "cpu"), strict=False)]
    assert found == [(2, 144), (8, 36), (4, 72)] * 2 + [(2, 144)]
    assert rung.seen(7, recipe.tokens) == sum(images for images, _ in found)
    climb = ladder.Climb(rung, 0.0, accuracy=[1.0, 0.5, 0.0] * 3 + [0.0])
    assert climb.latest(3) == {144: 2 / 3, 36: 0.5, 72: 0.0}
    assert climb.recent(3) == 0.0
    assert climb.latest(4) == {144: 0.75, 36: 0.0, 72: 0.0}


def test_a_row_of_images_has_the_logits_that_the_encoder_has_for_each_image():
    student, images = ladder.Student(EncoderConfig(2, 16, 1, 16), 0), draw(SMALL, 5, seed=0)
    with torch.autocast("cpu", torch.bfloat16):
        expected = student.encoder(images.pixels)
    assert torch.equal(student(ladder.look(images.pixels)), expected.float())
    filled = ladder.Student(EncoderConfig(2, 16, 1, 16), 0, tokens=1000)
    assert torch.equal(filled(ladder.look(images.pixels)), expected.float())


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
    for rung in ladder.LADDER:  # no image of the ladder has more lit pixels than are read
        c = rung.images
        assert rung.tokens >= c.dash * (2 * c.dashes + c.distractors * max(1, c.dashes // 3)) + 18


def test_pairs_that_do_not_turn_see_a_key_alike_wherever_it_lies():
    angles = pixel_angles(8, 32, still=2).view(64, 2, 8)
    assert not angles[..., 6:].any()
    assert torch.equal(angles[..., :6].flatten(1), pixel_angles(8, 24).view(64, 12))


def test_tiles_with_a_lit_pixel_see_each_other_and_dark_ones_themselves():
    images = draw(PathfinderConfig(side=32, dashes=3, distractors=0), 2, seed=0)
    seen = ladder.look(images.pixels, sparse=True)
    assert torch.equal(seen.pixels, images.pixels.flatten(1).gather(1, seen.place))
    assert torch.equal(seen.place.sort(1).values, torch.arange(1024).expand(2, -1))
    tile = seen.place // 32 // 8 * 2 + seen.place % 32 // 16
    assert torch.equal(tile, torch.arange(8).repeat_interleave(128).expand(2, -1))
    lit = torch.stack([((tile == n) & (seen.pixels > 0)).any(1) for n in range(8)], 1)
    assert lit.any()
    assert not lit.all()
    of_lit = lit.gather(1, tile)
    kept = (of_lit[:, :, None] & of_lit[:, None]) | (tile[:, :, None] == tile[:, None])
    q, k, v = torch.randn(3, 2, 1024, 1, 8, generator=torch.Generator().manual_seed(0))
    exact = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (1.25 * q, k, v)), attn_mask=kept[:, None])
    assert (ladder.sharpened_attention(q, k, v, seen.mask) - exact.transpose(1, 2)).abs().max() < 1e-5


def test_the_rungs_rise_to_path_256_and_three_sizes_are_tested_whole():
    tested = [r for r in ladder.LADDER if r.tested]
    assert [(r.images.side, r.read) for r in tested] == [(64, 0), (128, 0), (256, 0)]
    assert [r.images.side for r in ladder.LADDER] == sorted(r.images.side for r in ladder.LADDER)
    assert len({r.name for r in ladder.LADDER}) == len(ladder.LADDER)
    assert ladder.means([0.0, 1.0, 1.0, 1.0, 5.0], 2) == [0.5, 1.0]
