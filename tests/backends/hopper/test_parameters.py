"""The parameters of launches: one order of arguments, and a name for each."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tilewise.backends import hopper
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.host.recipe import flat
from tilewise.backends.hopper.kernels import shipped
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig
from tilewise.backends.hopper.parameters import Parameter, names_of

LAUNCHES = {
    Config: "forward/kernel.py",
    LatentConfig: "latent/kernel.py",
    DecodingConfig: "decoding/kernel.py",
    GradientsConfig: "latent/gradients.py",
    Backward: "backward/launch.py",
}


def arguments_of(file: str) -> list[str]:
    """The names of the arguments of a file's ``launch`` before the stream, read from its source: it need not be importable here."""
    tree = ast.parse((Path(hopper.__file__).parent / file).read_text())
    launch = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "launch")
    return [argument.arg for argument in launch.args.args][:-2]


@pytest.mark.parametrize("kind", LAUNCHES, ids=lambda kind: kind.__name__)
def test_a_launch_names_its_arguments_as_its_parameters_do(kind):
    names, kinds = arguments_of(LAUNCHES[kind]), (c for c in shipped() if isinstance(c, kind))
    for config in (c for c in kinds if not getattr(c, "queries", False)):
        assert len(config.parameters) == len(names)
        for name, x in zip(names, config.parameters, strict=True):
            assert not isinstance(x, Parameter) or x.name == name


def test_no_two_parameters_of_a_launch_have_one_name():
    for config in shipped():
        names = names_of(flat(config.parameters))
        assert len(names) == len(set(names)), config.name
