"""Standing in for another package under its own name: modules in ``sys.modules``, and the distributions that libraries look up."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path


@dataclass(frozen=True)
class StandIn:
    """The module that libraries import, and its distribution's name and version."""

    module: str
    distribution: str
    version: str

    @property
    def top(self) -> str:
        """The module's package."""
        return self.module.partition(".")[0]

    @property
    def stands(self) -> bool:
        return self.distribution in Distributions.standing

    def announce(self) -> None:
        """Make ``importlib.metadata`` find the distribution."""
        Distributions.standing[self.distribution] = self
        if Distributions not in sys.meta_path:
            sys.meta_path.append(Distributions)

    def refuse_the_real_one(self, called: str, instead: str) -> None:
        """Raise ValueError if the real package can be imported, or was. ``called``: the function that installs this one."""
        loaded = sys.modules.get(self.top)
        if getattr(loaded, "__file__", None) == __file__:
            return
        found = importlib.util.find_spec(self.top) if loaded is None else getattr(loaded, "__spec__", None)
        if loaded is not None or found is not None:
            where = getattr(found, "origin", None) or "a namespace package"
            raise ValueError(f"{called}: {self.top} is already there ({where}); uninstall it, or import {instead}")


def public(module: types.ModuleType) -> dict:
    """Return the functions and classes of a module's ``__all__``, or else those that it defines."""
    listed = getattr(module, "__all__", None)
    names = listed or [n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    return {n: vars(module)[n] for n in names if callable(vars(module)[n]) and not n.startswith("install_as_")}


def put_module(name: str, contents: dict, package: bool = False) -> types.ModuleType:
    """Put a module into ``sys.modules`` and its package; its spec is what ``importlib.util.find_spec`` answers with."""
    module = sys.modules.get(name) or types.ModuleType(name, f"tilewise, in place of {name}")
    package = package or hasattr(module, "__path__")
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=package)
    module.__file__ = __file__
    vars(module).update(contents | ({"__path__": []} if package else {}))
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)
    return module


class _Distribution(importlib.metadata.Distribution):
    """An installed distribution, as far as its name, version and modules are asked for."""

    def __init__(self, stand_in: StandIn):
        self.stand_in = stand_in

    def read_text(self, filename: str) -> str | None:
        s = self.stand_in
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {s.distribution}\nVersion: {s.version}\n",
            "top_level.txt": f"{s.top}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: str) -> Path:
        return Path(__file__).parent / path


class Distributions(importlib.metadata.DistributionFinder):
    """Answers ``importlib.metadata`` for what stands in, and finds no module."""

    standing: dict[str, StandIn] = {}  # noqa: RUF012  (one for the process, as sys.modules)

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> None:
        return None

    @classmethod
    def find_distributions(
        cls, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> list[_Distribution]:
        asked = None if context is None or context.name is None else re.sub(r"[-_.]+", "-", context.name).lower()
        return [_Distribution(s) for name, s in cls.standing.items() if asked in (None, name)]
