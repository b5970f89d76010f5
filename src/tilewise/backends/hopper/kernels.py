"""All kernels that ship, of every pass: their configs as one type, and the one list of them. Nothing here imports the DSL."""

from __future__ import annotations

from functools import lru_cache

from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.decoding import config as decoding_config
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.latent import config as latent_config
from tilewise.backends.hopper.latent import gradients_config
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig

AnyConfig = Config | LatentConfig | GradientsConfig | DecodingConfig | Backward


@lru_cache(maxsize=1)
def shipped_set() -> frozenset[AnyConfig]:
    """The same as :func:`shipped`, to look up."""
    return frozenset(shipped())


def shipped() -> list[AnyConfig]:
    """Every kernel that is compiled ahead of time."""
    forwards = [*forward_config.shipped(), *latent_config.shipped(), *decoding_config.shipped()]
    return [*forwards, *backward_config.shipped(), *gradients_config.shipped()]
