"""Later calls of a problem: the launches of its first call with other addresses, which are all that may differ.

What a call gives is a dictionary of addresses, named as the fields of Tensors (``leaves[0]``, ``grads[0]`` for elements of its tuples).
Each launch picks those that its kernel reads.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import reduce

from torch import Tensor

from tilewise.backends.base import Inputs, Output
from tilewise.backends.triton.host.buffers import BackwardBuffers, new_sheet, partial_states
from tilewise.backends.triton.host.call import Call
from tilewise.backends.triton.host.driver import address
from tilewise.backends.triton.host.launched import Launched
from tilewise.backends.triton.host.leaf_sums import LeafSums
from tilewise.backends.triton.host.plan import Plan
from tilewise.backends.triton.host.terms import TermsLaunch


def prepared(call: Call, launches: list[Launched]) -> bool:
    """Prepares a call's launches for later calls; False, and nothing is done, where these may need other numbers.

    They may where tensors were unaligned or copied.
    """
    launches = launches if call.terms is None else [call.terms.launched, *launches]
    if call.copied or any(launch.compiled is None for launch in launches):
        return False
    for launch in launches:
        launch.prepare()
    return True


def shared_addresses(plan: Plan, inputs: Inputs) -> dict[str, int] | None:
    """The addresses that forward and backward have in common beside q, k and v; None where one is not aligned that has to be."""
    leaves = [x.data_ptr() for x in plan.leaves(inputs)]
    seed = address(inputs.seed)
    if reduce(operator.or_, leaves, seed) % 16:
        return None
    piece = address(plan.piece_start)
    cu_q, cu_k = address(inputs.cu_seqlens_q), address(inputs.cu_seqlens_k)
    addresses = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "sink": address(inputs.sink), "seed": seed, "piece": piece}
    if leaves:
        addresses.update(zip(plan.leaf_names, leaves, strict=True))
    if plan.problem.paged:
        addresses["block_table"], addresses["seqlens_k"] = address(inputs.block_table), address(inputs.seqlens_k)
        addresses["k_scale"], addresses["v_scale"] = address(inputs.k_scale), address(inputs.v_scale)
        cache = ("block_table", "seqlens_k", "k_scale", "v_scale")
        return None if any(addresses[name] % 16 for name in cache) else addresses
    return addresses


@dataclass
class ForwardRelaunch:
    """A forward that was launched before: everything of it but the tensors.

    Attributes:
        terms: what makes the operands' bf16 terms; None where kernels read the operands themselves.
        merge: merges ``num_splits`` partial states; None where keys are not split.
    """

    plan: Plan
    terms: TermsLaunch | None
    main: Launched
    merge: Launched | None
    num_splits: int

    @classmethod
    def of(
        cls, call: Call, main: Launched, merge: Launched | None = None, num_splits: int = 1
    ) -> ForwardRelaunch | None:
        """The launches that repeat a forward; None where another call may need other numbers."""
        launches = [main] if merge is None else [main, merge]
        return cls(call.plan, call.terms, main, merge, num_splits) if prepared(call, launches) else None

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """The mask's lists that its kernels read."""
        return self.main.lists

    def __call__(self, inputs: Inputs, out: Output) -> bool:
        """Launches; False, and nothing is launched, where a tensor is not aligned as those of the first call were."""
        to = out if self.merge is None else partial_states(out, self.num_splits)
        addresses = shared_addresses(self.plan, inputs)
        q, k, v = inputs.q.data_ptr(), inputs.k.data_ptr(), inputs.v.data_ptr()
        o, lse = to.o.data_ptr(), to.lse.data_ptr()
        if addresses is None or (q | k | v | o | lse) % 16:
            return False
        addresses |= {"q": q, "k": k, "v": v, "o": o, "lse": lse}
        if to.max_logit is not None:
            addresses["max_logit"] = to.max_logit.data_ptr()
        if self.terms is not None:
            terms, _buffer = self.terms.relaunch(addresses, inputs.q)
            addresses |= terms
        self.main(addresses)
        if self.merge is not None:
            addresses |= {f"partial_{name}": addresses[name] for name in to.named}
            addresses |= {name: x.data_ptr() for name, x in out.named.items()}
            self.merge(addresses)
        return True


@dataclass
class BackwardRelaunch:
    """A backward that was launched before: everything of it but the tensors; ``terms`` as in :class:`ForwardRelaunch`."""

    plan: Plan
    terms: TermsLaunch | None
    passes: list[Launched]

    @classmethod
    def of(cls, call: Call, passes: list[Launched]) -> BackwardRelaunch | None:
        """The launches that repeat a backward; None where another call may need other numbers."""
        return cls(call.plan, call.terms, passes) if prepared(call, passes) else None

    @property
    def lists(self) -> tuple[Tensor, ...]:
        """The mask's lists that its kernels read."""
        return tuple(x for launch in self.passes for x in launch.lists)

    def __call__(
        self, inputs: Inputs, out: Output, do: Tensor, dlse: Tensor, buffers: BackwardBuffers
    ) -> dict[int, Tensor] | None:
        """Launches, and gives the leaves' gradients; None, and nothing is launched, where a tensor is not aligned as those of the
        first call were."""
        read = {
            "q": inputs.q.data_ptr(),
            "k": inputs.k.data_ptr(),
            "v": inputs.v.data_ptr(),
            "do": do.data_ptr(),
            "o": out.o.data_ptr(),
            "lse": out.lse.data_ptr(),
            "dlse": dlse.data_ptr(),
        }
        shared = shared_addresses(self.plan, inputs)
        if shared is None or reduce(operator.or_, read.values()) % 16:
            return None
        (sheet, sums), leaves = new_sheet(self.plan, inputs.q), LeafSums(self.plan, inputs)
        lse2, delta = buffers.statistics.unbind()
        dk, dv = buffers.over_keys
        addresses = {
            **read,
            **shared,
            "lse2": lse2.data_ptr(),
            "delta": delta.data_ptr(),
            "dq": buffers.dq.data_ptr(),
            "dk": dk.data_ptr(),
            "dv": dv.data_ptr(),
            "dk_sums": buffers.dk.data_ptr(),
            "dv_sums": buffers.dv.data_ptr(),
            "sheet": address(sheet),
            "dq_sums": address(sums),
        }
        if leaves.buffers:
            addresses.update(zip(self.plan.grad_names, [x.data_ptr() for x in leaves.buffers], strict=True))
        if self.terms is not None:
            terms, _buffer = self.terms.relaunch(addresses, inputs.q)
            addresses |= terms
        for launch in self.passes:
            launch(addresses)
        return leaves.totals()
