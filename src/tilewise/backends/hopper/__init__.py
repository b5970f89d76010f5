"""Attention on Hopper GPUs (sm_90a): kernels in CuTe DSL, compiled ahead of time (:mod:`tilewise.backends.hopper.host.aot`).

Importing this imports no DSL. Where to look:

- ``config``: what both passes share: limits, dtypes, forms of masks, expressions that are compiled in. No DSL.
- ``parameters``: the tensors and numbers that launches take, and the scores that kernels know. No DSL.
- ``forward/``, ``backward/``: the kernels of a pass, ``config``, which chooses among them, and ``tiles``: registers, shared memory.
- ``latent/``: V in K's memory: the forward over pages and over keys that queries selected, the gradients of the latter.
- ``decoding/``: the forward of a few queries a sequence, over pages or dense keys.
- ``kit/``: what every kernel uses: rings of stages, tiles, softmax, schedulers, expressions, dropout.
- ``host/``: from a call to a launch, and from a kernel's source to the file that is shipped.
- ``tables``: scores that add a table's bias by distance, as a line of biases.
- ``pair_bias``: scores that add a bias of each pair.
- ``capped``: the polynomials of a softcap's tanh, as numbers of a launch.
- ``padding``: batches whose keys end early, as packed sequences.
- ``pieces``: calls whose mask has too many bits for one launch, as several calls.
- ``kernels``: all kernels that ship, as one type and one list.
- ``expected``: what a compiled kernel must have, for the checks ahead of time.
- ``operations``: the operations of scores that the kernels can be traced with, and their names in the DSL.
- ``native/launcher.cpp`` launches; ``kernels.txt`` says what ships, ``proven.txt`` what of it a GPU has run right.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor

from tilewise import device as devices
from tilewise.backends import blockwise
from tilewise.backends.base import (
    Backend,
    DirectBackward,
    DirectCall,
    ForwardCall,
    Grads,
    Inputs,
    Output,
    PerProblem,
    large_numbers,
    long_expressions,
    pair_lookups,
    piece_reasons,
    unknown_operations,
)
from tilewise.backends.hopper import operations
from tilewise.backends.hopper.backward import config as backward_config
from tilewise.backends.hopper.backward.config import Backward
from tilewise.backends.hopper.decoding import choice as decoding
from tilewise.backends.hopper.decoding.config import DecodingConfig
from tilewise.backends.hopper.forward import config as forward_config
from tilewise.backends.hopper.forward import paged_config
from tilewise.backends.hopper.forward import reasons as forward_reasons
from tilewise.backends.hopper.forward import selected as listed
from tilewise.backends.hopper.forward.config import Config
from tilewise.backends.hopper.forward.tiles import TABLE
from tilewise.backends.hopper.host import library
from tilewise.backends.hopper.kernels import AnyConfig, shipped_set
from tilewise.backends.hopper.latent import selected
from tilewise.backends.hopper.latent.config import LatentConfig
from tilewise.backends.hopper.padding import as_packed
from tilewise.backends.hopper.pieces import gathers, in_pieces, told
from tilewise.backends.piecewise import PieceCall
from tilewise.backends.triton.listed import gradients_of
from tilewise.problem import Problem

LEAST_CUDA = 13  # of a driver that loads the kernels' machine code


class Hopper(Backend):
    """The backend of Hopper's kernels.

    Args:
        override, backward: what to use for every problem, in place of what is chosen by shape.
    """

    name = "hopper"

    def __init__(self, override: Config | None = None, backward: Backward | None = None):
        self.override, self.override_backward = override, backward
        self._plans = PerProblem(self._plan, lambda p: _decided(p, self))
        self._backward_plans = PerProblem(self._backward_plan, lambda p: _decided_backward(p, self))

    def unsupported(self, p: Problem) -> list[str]:
        """Every reason why this problem cannot run, of the machine and of the problem; where there is none, what is not installed."""
        found = [*_device_reasons(p), *self.refused(p)]
        if found:
            return found
        return library.missing(*self.configs(p))

    def no_order(self, p: Problem) -> list[str]:
        return _order_reasons(p)

    def refused(self, p: Problem) -> list[str]:
        """Every reason why no machine runs this problem here."""
        latent, lists = selected.asked(p), listed.serves(p)
        reasons = selected.reasons(p) if latent else [] if lists else _forward_reasons(p)
        # No kernel computes a mask: planning says which pairs it keeps, whatever its operations and numbers.
        reasons += unknown_operations(p, operations.traceable(), of_mask=False) + piece_reasons(p)
        reasons += large_numbers(p, of_mask=False) + long_expressions(p, of_mask=False)
        if p.spec.max_logit:
            reasons.append("the largest score of each row (attention_with_stats): its kernels do not keep it")
        if latent:  # its reasons speak of gradients too, and no tiles with bits are so wide
            return reasons
        bound = self.override or self.override_backward  # to a kernel that is wanted
        reasons += [] if bound else forward_reasons.reasons_of_few(p)
        if lists:  # whose gradients are Triton's
            return reasons
        return reasons + (backward_config.reasons(p) if p.spec.needs_grad else []) + _reasons_of_pairs(p)

    def slow(self, p: Problem) -> str:
        return _slow(p)

    def pieces(self, p: Problem) -> str:
        return told(p, [choose(p) for choose in self._passes(p)])

    def config(self, p: Problem) -> Config | LatentConfig | DecodingConfig:
        if self.override is not None:
            return self.override
        for gathered, takes in ((selected, selected.asked), (listed, listed.serves)):
            if takes(p):
                return gathered.choose(p)
        return decoding.choose(p) or (paged_config if p.paged else forward_config).choose(as_packed(p))

    def tile(self, p: Problem) -> tuple[int, int]:
        return self.config(p).tile_queries, self.config(p).tiles.tile_n

    def backward_config(self, p: Problem) -> Backward:
        if self.override_backward:
            return self.override_backward
        packed = as_packed(p)
        own, other = backward_config.chosen_row(p), backward_config.chosen_row(packed)
        # Wide heads may have no kernels for packed sequences, or none that keep dS.
        keeps, others = (x is not None and x.passes.keys.keeps_ds for x in (own, other))
        return backward_config.choose(p if other is None or (keeps and not others) else packed)

    def configs(self, p: Problem) -> list[AnyConfig]:
        """The configs of the kernels that a problem needs."""
        found = [config for choose in self._passes(p) for config in _of_kernels(p, choose)]
        return found + (selected.own_gradients(p) if _lists(p, self) else [])

    def _passes(self, p: Problem) -> tuple[Callable[[Problem], AnyConfig], ...]:
        """What chooses the configs of a problem's passes."""
        return (self.config, self.backward_config) if p.spec.needs_grad and not _lists(p, self) else (self.config,)

    def forward(self, p: Problem, t: Inputs) -> Output:
        return self._plans.of(p).forward(t)

    def planned(self, p: Problem) -> Any:
        return self._plans.recorded(p)

    def keep(self, p: Problem, planned: Any) -> None:
        self._plans.keep(p, planned)

    def caller(self, p: Problem) -> ForwardCall:
        return self._plans.of(p).call

    def direct(self, p: Problem) -> DirectCall | None:
        plan = self._plans.of(p)
        return plan.of_memory if plan.direct and not p.spec.dropout_p else None

    def direct_of(self, planned: Any) -> DirectCall | None:
        plan = _alone(planned)
        return plan and plan.of_memory

    def direct_backward(self, p: Problem) -> DirectBackward | None:
        plan = self._backward_plans.of(p)
        return plan.gradients_of_memory if plan.direct else None

    def direct_backward_of(self, structure: Hashable, sizes: Sequence[int]) -> DirectBackward | None:
        plan = _alone(self._backward_plans.known(structure, sizes))
        return plan and plan.gradients_of_memory

    def backward(self, p: Problem, t: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        return self._backward_plans.of(p).backward(t, out, do, dlse)

    def _plan(self, p: Problem) -> Any:
        make, values = _decided(p, self)
        return make(p, values)

    def _backward_plan(self, p: Problem) -> Any:
        make, values = _decided_backward(p, self)
        return make(p, values)


def _decided(p: Problem, hopper: Hopper) -> tuple:
    """The ``(make, values)`` of a forward's plan, as :class:`tilewise.backends.base.PerProblem` has them."""
    config = hopper.config(p)
    return _by_others(p, config, hopper._plans) or _forward_plan(p, config)(p, config).decided()


def _decided_backward(p: Problem, hopper: Hopper) -> tuple:
    """The same of a backward."""
    from tilewise.backends.hopper.host.backward_call import BackwardPlan

    if _lists(p, hopper):
        return _gradients_of_lists(p).decided()
    config = hopper.backward_config(p)
    return _by_others(p, config, hopper._backward_plans) or BackwardPlan(p, config).decided()


def _alone(planned: Any) -> Any:
    """The direct plan of what :meth:`PerProblem.recorded` has, without its problem; None where there is none, or where something is kept
    of a mask, which is made of a problem."""
    make, values = planned or (None, None)
    return make(None, values) if isinstance(values, dict) and values.get("direct") and not values["keeps"] else None


def _gradients_of_lists(p: Problem) -> PieceCall:
    """The call whose backward has the gradients of selected keys."""
    from tilewise.backends.hopper.host.selected_gradients import SelectedGradients

    return gradients_of(p, SelectedGradients(p) if selected.own_gradients(p) else None)


def _lists(p: Problem, hopper: Hopper) -> bool:
    """Whether kernels read the keys alone that each query selected, for gradients too, unless a kernel is wanted."""
    return hopper.override_backward is None and (selected.asked(p) or listed.serves(p))


def _of_kernels(p: Problem, choose: Callable[[Problem], AnyConfig]) -> list[AnyConfig]:
    """The configs of the kernels that a pass over a problem needs."""
    config = choose(p)
    return [choose(x) for x in blockwise.both(p)] if gathers(p, config) else [config]


def _slow(p: Problem) -> str:
    """What makes the kernels slower at a problem than at most others (:meth:`Backend.slow`)."""
    if p.paged and decoding.choose(p) is None and paged_config.idles(p, devices.of(p.device).cores):
        return "neither splits the keys of few queries nor shares a tile among heads"
    if forward_config.splits_tiles(p):
        return "has tiles of 128 queries for blocks of 64"
    if not pair_lookups(p) or decoding.choose(p) is not None:
        return ""
    biased = forward_config.with_bias(p)
    if biased is None or biased.score != "bias" or (p.spec.needs_grad and backward_config.with_bias(p) is None):
        return "reads a tensor of the score number by number"  # which takes twice the time (docs/decisions.md#hopper-pair-bias)
    return ""


def _forward_reasons(p: Problem) -> list[str]:
    """The reasons against a forward of a call whose keys are not gathered."""
    return paged_config.reasons(p, decoding.choose(p) is not None) if p.paged else forward_reasons.reasons(p)


def _forward_plan(p: Problem, config: AnyConfig) -> type:
    """The kind of a forward's plan."""
    if isinstance(config, DecodingConfig):
        from tilewise.backends.hopper.host.decoding_call import DecodingPlan as ForwardPlan
    elif isinstance(config, LatentConfig) and config.selected:
        from tilewise.backends.hopper.host.selected_call import SelectedPlan as ForwardPlan
    elif config.selected:
        from tilewise.backends.hopper.host.selected_call import ListedPlan as ForwardPlan
    elif isinstance(config, LatentConfig):
        from tilewise.backends.hopper.host.latent_call import LatentPlan as ForwardPlan
    elif p.paged:
        from tilewise.backends.hopper.host.paged_call import PagedPlan as ForwardPlan
    else:
        from tilewise.backends.hopper.host.forward_call import ForwardPlan
    return ForwardPlan


def _reasons_of_pairs(p: Problem) -> list[str]:
    """The reasons against a mask with a condition on pairs, which no kernel judges: a bit says whether one is kept."""
    if p.spec.region.predicate is None:
        return []
    passes = [forward_config, backward_config] if p.spec.needs_grad else [forward_config]
    # Selected keys beside a bias have never run.
    if not p.spec.region.selections and all(x.with_bias(p) is not None for x in passes):
        return []
    wide, widest = max(p.head_dim, p.head_dim_v), max(max(dims) for dims, row in TABLE.items() if row.bits)
    found = ["this score"] if p.spec.score is not None else []
    found += ["dropout"] if p.spec.dropout_p else []
    found += ["deterministic=True"] if p.spec.deterministic and p.spec.needs_grad else []
    found += [f"head_dim {wide}, above {widest}"] if wide > widest else []
    mask = "selected keys" if p.spec.region.selections else "a mask with a condition on pairs"
    return [f"{mask} beside {x}: its kernels read a bit for each pair, and have none there" for x in found]


def _order_reasons(p: Problem) -> list[str]:
    """Why the sums of a row like this problem's have no one order here. All kernels of such rows have to be there, so that no way of a
    call, and no gradient, leaves them to another backend."""
    found = [*_device_reasons(p), *forward_reasons.reasons_of_order(p)]
    if found:
        return found
    asked = [*forward_config.one_order_of_rows(p), *backward_config.one_order_of_rows(p)]
    if shipped_set().issuperset(asked):
        return library.missing(*asked)
    # A machine with the compiler would have them, and other bits than one without.
    dims = f"{p.dtype} and head dims {p.head_dim} and {p.head_dim_v}"
    return [f'deterministic="everywhere" with {dims}: its kernels do not ship']


def _by_others(p: Problem, config: AnyConfig, plans: PerProblem) -> tuple | None:
    """The ``(make, values)`` of a problem that runs by the plans of other ones: a padded one by that of the packed one that it equals, and
    one in pieces; None of any other."""
    if _runs_as_packed(p, config):
        from tilewise.backends.hopper.host.padded_call import PaddedBackward, PaddedForward

        return (PaddedBackward if isinstance(config, Backward) else PaddedForward).of, plans
    if in_pieces(p, config):
        from tilewise.backends.hopper.host.piecewise_call import PiecewisePlan

        return PiecewisePlan.of, (config, plans)
    return None


def _runs_as_packed(p: Problem, config: AnyConfig) -> bool:
    """Whether a problem that is not packed has a kernel of packed sequences."""
    return config.packed and not (p.packed or p.paged or isinstance(config, (DecodingConfig, LatentConfig)))


def _device_reasons(p: Problem) -> list[str]:
    if p.device.type != "cuda":
        return [f"runs on cuda, q is on {p.device.type}"]
    major, minor = devices.of(p.device).capability
    if (major, minor) != (9, 0):
        return [f"compute capability {major}.{minor} is not 9.0"]
    return driver_reasons()


def driver_reasons() -> list[str]:
    """Why the driver, if there is one, cannot load the kernels."""
    version = devices.cuda_version()
    return [
        f"the driver loads code of CUDA {version}, and its kernels are of CUDA {LEAST_CUDA}: they need driver 580 or newer, or the package "
        f"cuda-compat-{LEAST_CUDA}-0 beside an older one"
    ] * (0 < version < LEAST_CUDA)
