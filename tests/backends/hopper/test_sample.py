"""The few kernels that stand for all."""

from __future__ import annotations

import pytest

from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.forward import config
from tilewise.backends.hopper.host import aot
from tilewise.backends.hopper.host.traits import sources, traits
from tilewise.backends.sample import sample, values

SHIPPED = [*config.shipped(), *backward_config.shipped()]
SAMPLE = sample(SHIPPED, traits)


def seen(configs, kind: str) -> set:
    """The values of every field of every config of one class."""
    return {found for c in configs if type(c).__name__ == kind for found in values(c)}


@pytest.mark.parametrize("kind", sorted({type(c).__name__ for c in SHIPPED}))
def test_every_value_of_every_field_that_is_shipped_is_in_the_sample(kind):
    assert seen(SAMPLE, kind) == seen(SHIPPED, kind)


def test_every_form_is_in_the_sample_with_every_combination_of_options_that_is_shipped():
    def combinations(configs) -> set:
        forward = {(c.form, c.score, c.packed, c.split, c.dropout) for c in configs if isinstance(c, config.Config)}
        backward = {(c.form, c.score, c.packed, c.dropout) for c in configs if isinstance(c, backward_config.Backward)}
        return forward | backward

    assert combinations(SAMPLE) == combinations(SHIPPED)


def test_every_way_of_summing_dq_is_in_the_sample():
    ways = {name.split("_")[-1] for name in (c.name for c in SHIPPED) if name.startswith("backward")}
    assert {"sheet", "queue", "counted"} < ways
    assert {c.name.split("_")[-1] for c in SAMPLE if c.name.startswith("backward")} == ways
    assert any(c.keys.keeps_ds for c in SAMPLE if isinstance(c, backward_config.Backward))


def test_the_sample_is_small_and_holds_nothing_twice():
    assert len(SAMPLE) == len({c.name for c in SAMPLE})
    assert len(SAMPLE) <= 90
    assert set(SAMPLE) <= set(SHIPPED)


def test_a_config_whose_traits_are_all_shown_is_left_out():
    first, second = SAMPLE[:2]
    assert sample([first, first, second], traits) == [first, second]
    assert not traits(first) >= traits(second)


def test_one_kernel_of_each_kind_of_sources_stands_for_all_where_their_programs_are_known():
    kinds = [sources(config) for config in sample(aot.shipped(), sources)]
    assert sorted(name for (name,) in kinds) == [
        "backward",
        "decoding",
        "forward",
        "latent",
        "latent_dk_dv",
        "latent_dq",
    ]
