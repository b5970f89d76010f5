"""Standing in for flash-attn under its own names: modules in ``sys.modules``, and the distributions that libraries look up."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import types
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from tilewise.compat import flash_attn as ours


@dataclass(frozen=True)
class Generation:
    """What stands in for one generation of flash-attn: the module that libraries import, and its distribution's name and version."""

    module: str
    distribution: str
    version: str


GENERATIONS = {
    2: Generation("flash_attn", "flash-attn", ours.__version__),
    3: Generation("flash_attn_interface", "flash-attn-3", "3.0.0+tilewise"),
    4: Generation("flash_attn.cute", "flash-attn-4", "4.0.0+tilewise"),
}


def install(generation: int) -> None:
    """What :func:`tilewise.compat.flash_attn.install_as_flash_attn` does; once is enough."""
    if generation not in GENERATIONS:
        raise ValueError(f"install_as_flash_attn takes generation 2, 3 or 4, got {generation!r}")
    wanted = GENERATIONS[generation]
    if wanted.distribution in _Distributions.standing:
        return
    top = wanted.module.partition(".")[0]
    _refuse_the_real_one(top)
    if generation == 3:
        from tilewise.compat.flash_attn import interface_3

        _module(top, _public(interface_3) | {"__version__": wanted.version})
    elif generation == 4:
        from tilewise.compat.flash_attn import cute

        package = sys.modules.get(top) or _module(top, {"__path__": []})
        package.cute = _module("flash_attn.cute", _public(cute) | {"__version__": wanted.version, "__path__": []})
        package.cute.interface = _module("flash_attn.cute.interface", _public(cute))
    else:
        _install_second()
    _Distributions.standing[wanted.distribution] = wanted
    if _Distributions not in sys.meta_path:
        sys.meta_path.append(_Distributions)


def _install_second() -> None:
    from tilewise.compat.flash_attn import bert_padding, private

    functions = _public(ours)
    package = sys.modules.get("flash_attn") or _module("flash_attn", {"__path__": []})
    vars(package).update(functions | {"__version__": ours.__version__})
    package.flash_attn_interface = _module("flash_attn.flash_attn_interface", functions | _public(private))
    package.bert_padding = _module("flash_attn.bert_padding", _public(bert_padding))


def _refuse_the_real_one(name: str) -> None:
    loaded = sys.modules.get(name)
    if getattr(loaded, "__file__", None) == __file__:
        return
    found = importlib.util.find_spec(name) if loaded is None else getattr(loaded, "__spec__", None)
    if loaded is not None or found is not None:
        where = getattr(found, "origin", None) or "a namespace package"
        raise ValueError(
            f"install_as_flash_attn: {name} is already there ({where}); uninstall it, or import tilewise.compat.flash_attn"
        )


def _public(module: types.ModuleType) -> dict:
    """The functions that a module lists in ``__all__``, or else defines."""
    listed = getattr(module, "__all__", None)
    names = (
        listed if listed else [n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    )
    return {n: vars(module)[n] for n in names if callable(vars(module)[n]) and n != "install_as_flash_attn"}


def _module(name: str, contents: dict) -> types.ModuleType:
    """A module in ``sys.modules``; its spec is what ``importlib.util.find_spec`` answers with."""
    module = types.ModuleType(name, f"tilewise.compat.flash_attn, in place of {name}")
    module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package="__path__" in contents)
    module.__file__ = __file__
    vars(module).update(contents)
    sys.modules[name] = module
    return module


class _Distribution(importlib.metadata.Distribution):
    """An installed distribution of one generation, as far as its name, version and modules are asked for."""

    def __init__(self, generation: Generation):
        self.generation = generation

    def read_text(self, filename: str) -> str | None:
        g = self.generation
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {g.distribution}\nVersion: {g.version}\n",
            "top_level.txt": g.module.partition(".")[0] + "\n",
        }
        return texts.get(filename)

    def locate_file(self, path: str) -> Path:
        return Path(__file__).parent / path


class _Distributions(importlib.metadata.DistributionFinder):
    """Answers ``importlib.metadata`` for what stands in, and finds no module."""

    standing: dict[str, Generation] = {}  # noqa: RUF012  (one for the process, as sys.modules)

    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> None:
        return None

    @classmethod
    def find_distributions(
        cls, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> list[_Distribution]:
        asked = None if context is None or context.name is None else re.sub(r"[-_.]+", "-", context.name).lower()
        return [_Distribution(g) for name, g in cls.standing.items() if asked in (None, name)]
