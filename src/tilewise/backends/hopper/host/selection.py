"""The words by which users name the kernels that are shipped: ``bf16 d128 causal``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.config import DTYPES, SHIPPED
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.forward import tiles as forward_tiles
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.kernels import AnyConfig, shipped
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.backends.hopper.latent.gradients_config import GradientsConfig

FORMS = dict(zip(("full", "causal", "window", "rows", "bits"), (*SHIPPED, "bits"), strict=True))
"""The word for each form: every key, up to a moving end, between two such ends, between ends that tensors hold, by a bit for each pair."""
PASSES = {"forward": (Config, LatentConfig, DecodingConfig), "backward": (Backward, GradientsConfig)}
FEATURES = ("softcap", "dropout", "packed", "paged", "latent", "decoding", "selected")
# The kernels of calls that one word names, whatever their form.
OWN = {LatentConfig: "latent", GradientsConfig: "latent", DecodingConfig: "decoding"}
_DIMS = re.compile(r"d(\d+)(?:v(\d+))?")
_OFTEN = ((128, 128), (64, 64))  # head dims that most models have


def in_order_of_use() -> list[AnyConfig]:
    """Every kernel that is shipped, those that most calls need first."""
    return sorted(shipped(), key=_rank)


def _rank(config: AnyConfig) -> tuple:
    """The place of a kernel in the order of use: plain before features, bf16 before fp16, causal before full, the usual head dims
    before others."""
    dims = dims_of(config)
    usual = _OFTEN.index(dims) if dims in _OFTEN else len(_OFTEN)
    form = ("upper", "full", "band", "rows", "bits").index(config.form)
    return (
        config.score == "softcap",
        config.dropout,
        config.packed,
        paged(config),
        "selected" in features_of(config),
        config.dtype == "fp16",
        usual,
        form,
        dims,
        isinstance(config, PASSES["backward"]),
    )


def dims_of(config: AnyConfig) -> tuple[int, int]:
    """The head dims of q and k, and of v, that a kernel is compiled for."""
    return config.keys.dims if isinstance(config, Backward) else (config.tiles.width, config.tiles.width_v)


def paged(config: AnyConfig) -> bool:
    """Whether a kernel reads keys from pages; no backward does."""
    return isinstance(config, (LatentConfig, DecodingConfig)) or (isinstance(config, Config) and config.paged > 0)


def features_of(config: AnyConfig) -> set[str]:
    """The words of FEATURES that name a kernel; one that reads pages takes packed queries without saying so, and latent ones read pages."""
    if type(config) in OWN:
        return {OWN[type(config)]}
    kind = "paged" if paged(config) else "packed"
    has = {"softcap": config.score == "softcap", "dropout": config.dropout, kind: config.packed}
    has["selected"] = isinstance(config, Config) and config.selected
    return {name for name in FEATURES if has.get(name)}


def forms_of(config: AnyConfig) -> set[str]:
    """The forms of the calls that a kernel serves: those of OWN serve all, one of windows causal calls where no other does, and causal ones
    with a word of FEATURES calls without a mask (docs/decisions.md#hopper-fewer-forms). Where dS is kept, the second pass of ends of rows
    serves calls that are too long for that."""
    if type(config) in OWN or (isinstance(config, Backward) and config.form == "rows" and _too_long(config)):
        return set(FORMS.values())
    found = {config.form} | ({"upper"} if config.form == "band" and _kind(config) not in _causal() else set())
    return found | ({"full"} if "upper" in found and features_of(config) else set())


def _too_long(config: Backward) -> bool:
    """Whether calls get a backward where dS takes too much memory to be kept."""
    return backward_config.TABLE[config.keys.dims].kept is not None and not config.keys.keeps_ds


def _kind(config: AnyConfig) -> tuple:
    """What two kernels have in common that differ in their forms."""
    return type(config), config.dtype, dims_of(config), config.score, frozenset(features_of(config))


@lru_cache(maxsize=1)
def _causal() -> frozenset[tuple]:
    """The kinds of shipped kernels that have one for causal rows."""
    return frozenset(_kind(c) for c in shipped() if c.form == "upper")


def words_of(config: AnyConfig) -> str:
    """The words that name a shipped kernel, together with others of its kind."""
    dim, dim_v = dims_of(config)
    form = [word for word, form in FORMS.items() if form == config.form and type(config) not in OWN]
    features = (name for name in FEATURES if name in features_of(config))
    return " ".join([config.dtype, f"d{dim}" + (f"v{dim_v}" if dim_v != dim else ""), *form, *features])


def selected(text: str) -> list[AnyConfig]:
    """The shipped kernels of calls that these words describe, in the order of use.

    Words of one kind are alternatives: ``bf16 fp16``; ``d80``, ``d192v128`` (a call's head dims); ``full causal window rows``;
    ``forward backward``. A kind without a word is not restricted, but those of FEATURES are only named by their words; ``latent`` and
    ``decoding`` kernels serve every form.
    Or the words are names of kernels.

    Raises:
        ValueError: a word means nothing, or no kernel is shipped for them.
    """
    words, named = text.split(), {c.name: c for c in in_order_of_use()}
    if words and set(words) <= set(named):
        return [named[word] for word in words]
    unknown = [w for w in words if not (w in (*DTYPES.values(), *FORMS, *PASSES, *FEATURES) or _DIMS.fullmatch(w))]
    if unknown:
        known = " ".join((*DTYPES.values(), "d128 d192v128", *FORMS, *PASSES, *FEATURES))
        raise ValueError(f"{unknown[0]!r} names no kernels; words that do: {known}")
    forms = {FORMS[word] for word in words if word in FORMS} or set(FORMS.values())
    dtypes = {word for word in words if word in DTYPES.values()} or set(DTYPES.values())
    kinds = tuple(kind for name in [word for word in words if word in PASSES] or PASSES for kind in PASSES[name])
    fitting = [c for c in in_order_of_use() if isinstance(c, kinds) and c.dtype in dtypes]
    fitting = [c for c in fitting if forms & forms_of(c)]
    fitting = [c for c in fitting if features_of(c) == {name for name in FEATURES if name in words}]
    dims = [(int(found[1]), int(found[2] or found[1])) for word in words if (found := _DIMS.fullmatch(word))]
    names = {c.name for one in dims for c in _with_dims(fitting, *one)}
    found = [c for c in fitting if c.name in names or not dims]
    if not found:
        raise ValueError(f"no kernel is shipped for {text!r}")
    return found


def _with_dims(configs: Sequence[AnyConfig], dim: int, dim_v: int) -> list[AnyConfig]:
    """The kernels among these that calls with these head dims may get: of each pass, the first row of tiles that has any."""
    holding = list(forward_tiles.rows_for(dim, dim_v))
    forwards = [c for c in configs if isinstance(c, Config)]
    by_row = ([c for c in forwards if forward_tiles.row_of(c.tiles) is row and c.tiles != row.short] for row in holding)
    few = [c for c in forwards if holding and c.tiles == forward_tiles.short(holding[0].full)]
    rows = [dims for dims in backward_config.TABLE if dim <= dims[0] and dim_v <= dims[1]]
    backwards = ([c for c in configs if isinstance(c, Backward) and dims_of(c) == dims] for dims in rows)
    own = [c for c in configs if type(c) in OWN and dims_of(c) == (dim, dim_v)]
    return [*next(filter(None, by_row), []), *few, *next(filter(None, backwards), []), *own]
