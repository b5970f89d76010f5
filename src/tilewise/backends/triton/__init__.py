"""Attention on GPUs by Triton; and, for tests, by its interpreter on CPU tensors.

Kernels run on Hopper (sm_90). For NVIDIA's sm_80, sm_100 and sm_120 and for AMD's gfx942 they are compiled, never run
(``config.NEVER_RUN``).

Importing this module does not import Triton; the first question about a problem does. ``config`` chooses tiles, ``paging`` those over a
paged cache, ``group_parts`` the programs that share the query heads of a key tile, and ``sheet`` the parts of dS to keep. ``tiles`` says
how much shared memory they need, and ``reads`` what mask and score add to that. ``kernels/`` has the kernels, and ``host/`` launches them.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from tilewise import device as devices
from tilewise import expr
from tilewise.backends import blockwise
from tilewise.backends.base import (
    Appender,
    Backend,
    Directions,
    Grads,
    Inputs,
    Output,
    OutputGrads,
    Pages,
    PerProblem,
    large_numbers,
    long_expressions,
    pair_lookups,
    piece_reasons,
    unknown_operations,
    wide_mask,
)
from tilewise.backends.piecewise import PieceCall
from tilewise.backends.triton import listed
from tilewise.backends.triton.config import (
    MAX_HEAD_DIM,
    ONE_ORDER,
    Config,
    architecture,
    choose,
    may_round,
    pair_sum_tiles,
    row_for,
    table,
)
from tilewise.backends.triton.host import launch, runtime, tangent, tuned
from tilewise.backends.triton.host.append import AppendLaunch
from tilewise.backends.triton.host.listed import ListedCall
from tilewise.backends.triton.host.plan import Memo, Plan
from tilewise.backends.triton.kernels.distant import parts_of
from tilewise.backends.triton.kernels.leaf_reads import described_lookup
from tilewise.backends.triton.kernels.writer import OPERATIONS
from tilewise.backends.triton.paging import choose_paged, few_config
from tilewise.backends.triton.tiles import fills_tiles
from tilewise.device import MOST_BLOCKS, beyond_grid
from tilewise.leaf_gradients import DIAGONALS, SCATTER, TILES, classify
from tilewise.problem import Problem


@lru_cache(maxsize=1)
def installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def interpreting() -> bool:
    """Return whether kernels are interpreted and take CPU tensors (TRITON_INTERPRET=1 when Triton was imported)."""
    import triton

    return triton.knobs.runtime.interpret


LEAST_TILE = 16  # keys of the smallest tiles
LEAST_PAIRS = 4096**2  # of a head, from which a gathered call takes longer than its launches
# Each pair of a tile is a search in the entries of its query: as long as a gathered key eight times.
VISITED = 4
LISTED = 6  # keys of a gathered query that take as long as one of a list


class Triton(Backend):
    """The backend.

    Args:
        override: a Config for every problem, instead of the one chosen by shape.
    """

    name = "triton"

    def __init__(self, override: Config | None = None):
        self.override = override
        self._plans, self._tf32_plans = (PerProblem(self._plan, self._decided) for _ in range(2))
        # By the leaves with tangents and the tf32 setting.
        self._tangent_plans = PerProblem(lambda problem: Memo())

    def unsupported(self, problem: Problem) -> list[str]:
        reasons = device_reasons(problem.device)
        if not installed():
            return reasons
        if problem.dtype == torch.float64:
            reasons.append("float64: its kernels compute in float32")
        reasons += _width_reasons(problem) + _assembler_reasons(problem)
        reasons += unknown_operations(problem, OPERATIONS) + piece_reasons(problem, dropout=16)
        reasons += wide_mask(problem) + large_numbers(problem) + long_expressions(problem)
        if problem.spec.deterministic and problem.spec.grad_slots:
            reasons += _scattered(problem)
        if problem.paged and any(x.stride[-1] != 1 for x in (problem.k, problem.v)):
            reasons.append("a pool of pages whose last stride is not 1: it would be copied at each call")
        if problem.quantised:
            reasons += _pair_reasons(problem)
        if not reasons and max(problem.seqlen_k // LEAST_TILE, problem.heads_q * problem.batch_dim) > MOST_BLOCKS[1]:
            reasons += beyond_grid(launches(problem, self.config(problem)))
        return reasons

    def no_order(self, problem: Problem) -> list[str]:
        return _order_reasons(problem)

    def slow(self, problem: Problem) -> str:
        if pair_lookups(problem) and described_lookup(problem) is None:
            return "reads a tensor of the score pair by pair"
        return ""

    def pieces(self, p: Problem) -> str:
        return "" if self.override is not None else _told(p)

    def config(self, problem: Problem) -> Config:
        if self.override is not None:
            return self.override
        measured = tuned.passes(problem)
        if problem.paged:
            return choose_paged(problem, measured)
        chosen = choose(problem, measured)
        on_gpu = problem.device.type != "cpu"
        return replace(chosen, few=few_config(problem, chosen.products)) if on_gpu else chosen

    def tile(self, problem: Problem) -> tuple[int, int]:
        tiles = self.config(problem).forward
        return tiles.tile_m, tiles.tile_n

    def forward(self, problem: Problem, inputs: Inputs) -> Output:
        with runtime.on_device(inputs.q):
            plan = self._plan_of(problem)
            return launch.forward(plan, inputs) if isinstance(plan, Plan) else plan.forward(inputs)

    def backward(self, problem: Problem, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor) -> Grads:
        with runtime.on_device(inputs.q):
            plan, given = self._plan_of(problem), (inputs, out, do, dlse)
            return launch.backward(plan, *given) if isinstance(plan, Plan) else plan.backward(*given)

    def without_tangents(self, problem: Problem, second: bool) -> list[str]:
        reasons = ["a cache in pages has no tangents"] if problem.paged else []
        if max(problem.head_dim, problem.head_dim_v) > tangent.MAX_HEAD_DIM:
            reasons.append(f"tangents of a head_dim above {tangent.MAX_HEAD_DIM}")
        summed = (TILES, DIAGONALS)
        if second and problem.spec.deterministic and any(read.how in summed for read in classify(problem)):
            reasons.append(
                "deterministic: the second derivative of a bias that is broadcast, or of a table read by distance, is added "
                "atomically, in any order"
            )
        return reasons

    def jvp(self, problem: Problem, inputs: Inputs, out: Output, along: Directions) -> Output:
        with runtime.on_device(inputs.q):
            return tangent.jvp(self._tangent_plan(problem, along), inputs, out, along)

    def backward_jvp(
        self, problem: Problem, inputs: Inputs, out: Output, grad: OutputGrads, along: Directions, moved: Output
    ) -> Grads:
        with runtime.on_device(inputs.q):
            return tangent.backward_jvp(self._tangent_plan(problem, along), inputs, out, grad, along, moved)

    def _tangent_plan(self, problem: Problem, along: Directions) -> tangent.TangentPlan:
        """Return the plan of the tangents of a problem and of its leaves that have one, under PyTorch's present tf32 setting."""
        moving = tuple(n for n in dict.fromkeys(problem.spec.score_slots) if along.leaves[n] is not None)
        plans = self._tangent_plans.of(problem)
        return plans.of((moving, may_round(problem)), lambda: tangent.new_plan(problem, self.config(problem), moving))

    def appender(self, cache: Pages, k: Tensor, v: Tensor | None, cu_seqlens_q: Tensor | None) -> Appender | None:
        return AppendLaunch.of(cache, k, v, cu_seqlens_q) if _appends(cache, k, v) else None

    def _plan_of(self, problem: Problem) -> Plan | PieceCall:
        """Return the plan of a problem under PyTorch's present tf32 setting, which may change between two calls."""
        return (self._tf32_plans if may_round(problem) else self._plans).of(problem)

    def _plan(self, problem: Problem) -> Plan | PieceCall:
        make, values = self._decided(problem)
        return make(problem, values)

    def _decided(self, problem: Problem) -> tuple:
        """The ``(make, values)`` of :class:`tilewise.backends.base.PerProblem`."""
        bound = self.override is not None  # to tiles that are wanted
        if not bound and gathers(problem):
            return lambda p, _: blockwise.by_blocks(p, self.forward, self.backward), None
        if not bound and listed.sooner(problem):
            return ListedCall(problem).decided()
        return Plan(problem, self.config(problem)).decided()


def gathers(problem: Problem) -> bool:
    """Return whether the queries of a call are gathered by the blocks that they select, sooner than their keys would be by query."""
    if not blockwise.sooner(problem, LEAST_PAIRS, VISITED):
        return False
    return not listed.runs(problem) or blockwise.cost(problem) < LISTED * listed.cost(problem)


def _told(p: Problem) -> str:
    """Return how a call runs that visits no tiles of all keys."""
    return blockwise.told(p) if gathers(p) else listed.told(p) if listed.sooner(p) else ""


def _appends(cache: Pages, k: Tensor, v: Tensor | None) -> bool:
    unit = all(x is None or x.stride(-1) == 1 for x in (*cache[:2], k, v))
    return unit and not device_reasons(k.device)


def device_reasons(device: torch.device) -> list[str]:
    if not installed():
        return ["the package triton is not installed; pip install 'tilewise[triton]'"]
    if device.type == "cpu" and interpreting():
        return []
    if device.type != "cuda":
        return [f"runs on cuda, q is on {device.type}"]
    if torch.version.hip or not torch.cuda.is_available():  # without a GPU: what one would run
        return []
    capability = devices.of(device).capability
    if capability < (8, 0):
        return [f"compute capability {capability[0]}.{capability[1]} is below 8.0"]
    return []


def _order_reasons(problem: Problem) -> list[str]:
    """Return why the sums of a row like this problem's have no one order in all calls. Lengths, pages and packing play no part."""
    interpreted, dims = problem.device.type == "cpu", (problem.head_dim, problem.head_dim_v)
    has = {
        f"{problem.dtype}: 16 bits have it": problem.dtype.itemsize != 2 and not interpreted,
        f"head dims {dims}: up to 256 have it": not interpreted and row_for(ONE_ORDER, problem) is None,
        "v in the memory of k": problem.latent,
        "a mask of pairs": problem.spec.region.predicate is not None,
        "a score that reads tensors or positions": problem.spec.score is not None
        and bool(expr.depends_on(problem.spec.score) - {"s"} or expr.lookups(problem.spec.score)),
    }
    reasons = [f'deterministic="everywhere" with {what}' for what, applies in has.items() if applies]
    return device_reasons(problem.device) + reasons


def _width_reasons(problem: Problem) -> list[str]:
    half, there = problem.dtype.itemsize == 2, problem.device.type != "cuda" or torch.cuda.is_available()
    arch = architecture(problem.device) if there else "sm90"  # without a GPU: what one would run
    most, where = (
        max(table(arch, problem.dtype.itemsize)),
        "" if half else f" in {str(problem.dtype).removeprefix('torch.')}",
    )
    if problem.head_dim > most:
        return [f"head_dim {problem.head_dim} is above {most}{where}"]
    if problem.head_dim_v > MAX_HEAD_DIM:
        return [f"head_dim {problem.head_dim_v} of v is above {MAX_HEAD_DIM}"]
    return []


def _assembler_reasons(problem: Problem) -> list[str]:
    """Return why an older ptxas gets no narrow head dims that differ between k and v or are in 8 bits: it miscompiles some
    (docs/decisions.md#triton-ptxas)."""
    d, dv = problem.head_dim, problem.head_dim_v
    each = 2 if problem.quantised else 1  # kernels read columns of 8 bits in pairs
    if (d == dv and not problem.quantised) or (fills_tiles(d // each) and fills_tiles(dv // each)):
        return []
    if problem.device.type != "cuda" or not runtime.on_hopper(problem.device):
        return []
    version = runtime.wrong_ptxas()
    return [
        f"head dims {d} and {dv}: ptxas {version} makes wrong kernels for Hopper of some that do not fill tiles of 32 columns; with "
        "a newer driver Triton uses another ptxas, or name one of CUDA 12.9 or newer by TRITON_PTXAS_PATH"
    ] * bool(version)


def launches(problem: Problem, config: Config) -> dict[str, tuple[int, ...]]:
    """The blocks of the launches that have more than a number of operands along y or z, by what they compute (host/launch.py).

    2**31 blocks along x would exceed any memory.
    """
    found: dict[str, tuple[int, ...]] = {}
    for read in [part for x in classify(problem) for part in parts_of(problem, x)]:
        name = f"the gradient of a tensor read at [{', '.join(map(str, read.expr.args[1:]))}]"
        if read.how == TILES:
            rows = -(-problem.seqlen_k // pair_sum_tiles(problem, config.dq).tile_n)
            each = [n for x, n in (("b", problem.batch), ("h", problem.heads_q)) if x not in read.loops]
            found[name] = (1, rows, math.prod(each))
        elif read.how == DIAGONALS:
            found[name] = (1, 1, problem.heads_q * problem.batch_dim)
    return found


def _pair_reasons(problem: Problem) -> list[str]:
    """Return why kernels cannot read two numbers of 8 bits at a time."""
    odd = [d for d in (problem.head_dim, problem.head_dim_v) if d % 2]
    reasons = [f"head_dim {d} of 8-bit numbers is odd" for d in odd]
    if not odd and any(n % 2 for x in (problem.k, problem.v) for n in x.stride[:-1]):
        reasons.append("pages of 8-bit numbers with an odd stride")
    return reasons


def _scattered(problem: Problem) -> list[str]:
    reads = [part for read in classify(problem) for part in parts_of(problem, read) if part.how == SCATTER]
    reasons = []
    for read in reads:
        index = read.expr.args[1:]
        # An index that each batch element has for itself is scattered, packed or not.
        where = " in packed sequences" if problem.packed and not expr.depends_on(*index) & {"b", "s"} else ""
        reasons.append(
            f"deterministic: the gradient of a tensor read at [{', '.join(map(str, index))}]{where} is scattered by atomic additions, "
            "in any order"
        )
    return reasons
