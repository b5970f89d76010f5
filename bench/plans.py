"""How long a new mask takes until kernels know its tiles, on a GPU: `python -m bench.plans --out FILE [--cases masks]`.

The masks of the cases with a tag are made anew, and planned as the kernels of both passes on Hopper read them: with lists and bits or
ends, and the keys that are seen. Beside it FlexAttention's ``create_block_mask``, not compiled: that takes seconds a mask.
"""

from collections.abc import Sequence
from functools import partial

from bench import script, testing
from bench.cases import Inputs, draw, tagged
from bench.peers import flex_block_mask
from tilewise.backends.base import PerTensors
from tilewise.backends.hopper import Hopper
from tilewise.backends.hopper.host.padded_call import PaddedPlan
from tilewise.backends.hopper.host.plan import Plan

PEERS = {
    "tilewise": "a new mask, and what Hopper's kernels read of it",
    "flex": "FlexAttention's create_block_mask",
}


def plan_for_kernels(x: Inputs, c: testing.Call, plans: Sequence[Plan]) -> None:
    """Makes a case's mask, and all that Hopper's kernels of both passes read of it, as if for the first time."""
    x.options()
    for plan in plans:
        plan.made = PerTensors()
        if isinstance(plan, PaddedPlan):
            plan.inputs(c.t)
        else:
            plan.kept(c.t.leaves)


def main() -> None:
    """Keep the times of the plans of the cases with a tag that Hopper runs."""
    parser = script.parser(__doc__, ("cuda",))
    parser.add_argument("--cases", metavar="TAG", default="masks", help="the cases whose masks are planned")
    options = parser.parse_args()
    log = script.Log.begin(f"python -m bench.plans --cases {options.cases}", options, PEERS)
    for case in tagged(options.cases):
        x = draw(case, options.device)
        c, backend = testing.call(x.q, x.k, x.v, do=x.do, **x.options()), Hopper()
        if backend.refused(c.p):
            continue
        plans = backend._plan(c.p), backend._backward_plan(c.p)
        calls = {("tilewise", "forward"): partial(plan_for_kernels, x, c, plans)}
        if case.mask and not case.lengths:
            calls["flex", "forward"] = partial(flex_block_mask, x)
        log.race(case.name, calls, options.device, "plan", rounds=9, budget_ms=30.0, queued=False)


if __name__ == "__main__":
    main()
