"""Lookups among packed sequences, on the emulated machine (:mod:`tests.backends.hopper.emulated`)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.backends.hopper import emulated


@pytest.fixture
def packed():
    (module,) = emulated.imported("packed")
    emulated.role.threads = 128
    return module


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 64, 100, 1500])
def test_every_tile_is_found_in_its_sequence_whatever_is_skipped_before_it(packed, count):
    chance = random.Random(count)
    tiles = np.array([chance.choice((0, 0, 1, 2, 40)) for _ in range(count)])
    expected = [(n, block) for n in range(count) for block in range(tiles[n])]
    m, since = 0, packed.from_the_first()
    while m < len(expected):
        *found, since = packed.find(m, lambda n: tiles[n], count, since)
        assert tuple(found) == expected[m]
        m += chance.choice((0, 1, 7, 300))
    for _ in range(2):
        sequence, _, since = packed.find(len(expected) + 5, lambda n: tiles[n], count, since)
        assert sequence == -1


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 100, 1024, 1025, 5000])
def test_the_holder_of_a_place_is_the_last_sequence_that_starts_no_later(packed, count):
    chance = random.Random(count)
    starts = np.cumsum([0] + [chance.choice((1, 2, 9)) for _ in range(count - 1)])
    for place in {0, 1, 5, *(int(x) + d for x in chance.sample(list(starts), min(count, 20)) for d in (0, 1))}:
        expected = max(n for n in range(count) if starts[n] <= place)
        assert packed.holder(place, lambda n: starts[n], count) == expected
