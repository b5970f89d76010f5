"""Lookups among packed sequences, on the emulated machine (:mod:`tests.backends.hopper.emulated`)."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from tests.backends.hopper import emulated, emulated_backward
from tilewise.backends.hopper.backward.config import TABLE, Backward
from tilewise.backends.hopper.backward.tiles import PlanRow
from tilewise.backends.hopper.host.plan import FAR
from tilewise.backends.hopper.kit import schedule


@pytest.fixture
def packed():
    (module,) = emulated.imported("kit.packed")
    emulated.role.threads = 128
    return module


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 100, 1500])
def test_every_tile_is_found_in_its_sequence(packed, count):
    chance = random.Random(count)
    tiles = np.array([chance.choice((0, 0, 1, 2, 40)) for _ in range(count)])
    expected = [(n, block) for n in range(count) for block in range(tiles[n])]
    since = packed.at_first()
    for m in sorted(chance.sample(range(len(expected)), min(len(expected), 40))):
        *found, later = packed.find(m, lambda n: tiles[n], count, since)
        assert tuple(found) == expected[m]
        assert packed.find(m, lambda n: tiles[n], count, packed.at_first()) == (*found, later)
        since = later if chance.random() < 0.5 else since
    for begin in (since, packed.at_first()):
        assert packed.find(len(expected), lambda n: tiles[n], count, begin)[0] == -1


@pytest.mark.parametrize("count", [1, 31, 32, 33, 100, 600])
def test_the_plan_has_the_larger_sequences_first_unless_there_are_many(count):
    chance = random.Random(count)
    sizes, config = [chance.choice((0, 1, 2, 400)) for _ in range(count)], plan_config()
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    plan = emulated_backward.planned(
        config, (starts[-1] + 9, starts[-1], 3, 2, count, 1, -FAR, 1, 1.0, 1.0, 0.0), starts, 1000
    )
    order = [*range(count), count]  # the rows past the last sequence count as one
    if count < 512:
        order = sorted(order, key=lambda n: -[*sizes, 0][n])  # stable: equal ones in their order
    assert plan[PlanRow.ORDER, :-1].tolist() == order
    tiles = [-(-n // config.keys.tile_n) for n in [*sizes, 0]]
    assert plan[PlanRow.KEY_TILES].tolist() == np.cumsum([0, *(tiles[n] for n in order)]).tolist()
    tiles = [-(-n // config.queries.tile_m) for n in [*sizes, 9]]
    assert plan[PlanRow.QUERY_TILES].tolist() == np.cumsum([0, *(tiles[n] for n in order)]).tolist()
    blocks = [math.prod(config.queries.blocks(n, n)) for n in sizes]
    assert plan[PlanRow.BLOCKS, :-1].tolist() == np.cumsum([0, *blocks]).tolist()
    assert plan[PlanRow.BLOCKS, -1] == schedule.heads_at_once(2 * sum(blocks), 3, 1000)


def test_a_plan_of_starts_that_decrease_stays_in_its_memory():
    config, starts = plan_config(), np.array([0, 70, 40, 500, 90], np.int32)
    plan = emulated_backward.planned(config, (500, 500, 3, 2, 4, 1, -FAR, 1, 1.0, 1.0, 0.0), starts, 1000)
    assert sorted(plan[PlanRow.ORDER, :-1].tolist()) == [*range(5)]
    assert 1 <= plan[PlanRow.BLOCKS, -1] <= 3


def plan_config() -> Backward:
    """Of a backward that keeps dS."""
    return Backward(*TABLE[256, 256].kept, dtype="bf16", form="upper", packed=True)


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100, 1024, 1025, 5000])
def test_the_holder_of_a_place_is_the_last_sequence_that_starts_no_later(packed, count):
    chance = random.Random(count)
    starts = np.cumsum([0] + [chance.choice((1, 2, 9)) for _ in range(count - 1)])
    for place in {0, 1, 5, *(int(x) + d for x in chance.sample(list(starts), min(count, 20)) for d in (0, 1))}:
        expected = max(n for n in range(count) if starts[n] <= place)
        assert packed.holder(place, lambda n: starts[n], count) == expected
