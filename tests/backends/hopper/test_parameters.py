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
    Backward: "backward/launch.py",
}
FILES = [(file, [c for c in shipped() if isinstance(c, kind)]) for kind, file in LAUNCHES.items()]
for _queries, _file in ((False, "latent/gradients.py"), (True, "latent/gradients_dq.py")):
    FILES.append((_file, [c for c in shipped() if isinstance(c, GradientsConfig) and c.queries == _queries]))


def arguments_of(file: str) -> list[str]:
    """The names of the arguments of a file's ``launch`` before the stream, read from its source: it need not be importable here."""
    tree = ast.parse((Path(hopper.__file__).parent / file).read_text())
    launch = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "launch")
    return [argument.arg for argument in launch.args.args][:-2]


@pytest.mark.parametrize(("file", "configs"), FILES, ids=[file for file, _ in FILES])
def test_a_launch_names_its_arguments_as_its_parameters_do(file, configs):
    names = arguments_of(file)
    assert configs
    for config in configs:
        assert len(config.parameters) == len(names)
        for name, x in zip(names, config.parameters, strict=True):
            assert not isinstance(x, Parameter) or x.name == name


def test_no_two_parameters_of_a_launch_have_one_name():
    for config in shipped():
        names = names_of(flat(config.parameters))
        assert len(names) == len(set(names)), config.name
