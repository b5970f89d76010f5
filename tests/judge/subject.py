"""A backend as its judge sees it: the kernels that it can be bound to, what it computes otherwise, and at which sizes.

:class:`Subject` is enough for a backend without kernels of its own; tests/judge/hopper.py and tests/judge/triton.py say what theirs have.
A new backend is judged by its name; only one that has kernels to be checked one by one needs a file here.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from bench import cases
from bench.testing import Call, of_case
from tilewise import dispatch
from tilewise.backends.base import Backend

Named = Iterator[tuple[str, Call]]


@dataclass(frozen=True)
class Scale:
    """The cases and sizes that run on a device.

    contract: cases that are checked, and features, at ``shape`` (batch, seqlen_q, seqlen_k, heads_q, heads_k) and ``head_dims``.
    launches: random ones, beside other work. together: processes at once.
    """

    device: str
    contract: tuple[str, ...]
    features: tuple[str, ...]
    shape: tuple[int, int, int, int, int]
    head_dims: tuple[int, ...]
    launches: int
    together: int


SCALES = {
    "cuda": Scale(
        device="cuda",
        contract=tuple(case.name for case in cases.tagged("contract")),
        features=tuple(case.name for case in cases.tagged("feature")),
        shape=(2, 700, 900, 4, 2),
        head_dims=(128, 64, 256),
        launches=10_000,
        together=15,
    ),
    "cpu": Scale(  # a rehearsal: every line of every part, on calls that take no time
        device="cpu",
        contract=("contract-gqa-causal", "contract-bfloat16-full"),
        features=("contract-softcap-alibi", "contract-dropout"),
        shape=(1, 40, 50, 2, 1),
        head_dims=(16,),
        launches=20,
        together=1,
    ),
}


@dataclass(frozen=True)
class Kernel:
    """A backend bound to one of its configurations: what is checked by itself.

    kind: kernels of one kind take the same calls, whose oracle is computed once. program, cubin: hashes of what the compiler was given
    and of what it made, where it was compiled ahead of time. loose: the gradients that a second run may give with other bits.
    """

    name: str
    direction: str
    kind: Hashable
    backend: Callable[[], Backend]
    calls: Callable[[], Named]
    program: str = ""
    cubin: str = ""
    loose: frozenset[str] = frozenset()


class Subject:
    """A backend that has no kernels to be chosen by hand."""

    probes: tuple[str, ...] = ()
    """How the names of the kernels begin that stand for all."""
    compiles = False
    """Whether a call compiles its kernels: most of the time is then compiling, and many processes share it."""

    def __init__(self, name: str, scale: Scale):
        self.name, self.scale = name, scale

    @property
    def device(self) -> str:
        return self.scale.device

    def backend(self) -> Backend:
        return dispatch.backend(self.name)

    def kernels(self) -> list[Kernel]:
        """Every kernel that is built, those first whose fault would be everyone's."""
        return []

    def waiting(self) -> list[Kernel]:
        """The kernels whose programs were not right before."""
        return self.kernels()

    def prove(self, right: list[dict]) -> str:
        """Remembers kernels of which these results say that every call was right. Returns what it did."""
        return f"{self.name} keeps no list of proven kernels"

    def build(self) -> int:
        """Compiles what the checks need and is not shipped. Returns how many kernels have faults."""
        return 0

    def allowed(self, c: Call) -> Call:
        """The call with as many gradients as the backend gives: all, those of no score's tensor, or none."""
        return next((x for x in (c, c.with_constant_scores()) if not self.backend().unsupported(x.p)), c.forward_only())

    def contract(self) -> Named:
        """The contract's cases, and what is larger or odder than they are."""
        for name in self.scale.contract:
            yield name, self.allowed(of_case(cases.named(name), self.device))

    def featured(self) -> Iterator[cases.Case]:
        """The features at the size and the head dims at which they are checked."""
        shape = dict(zip(("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k"), self.scale.shape, strict=True))
        for d in self.scale.head_dims:
            for case in map(cases.named, self.scale.features):
                yield replace(case, name=f"{case.name}-d{d}", head_dim=d, head_dim_v=d, **shape)


def subject(name: str, device: str) -> Subject:
    """The subject of a backend's name, at the sizes of a device."""
    scale = SCALES[device]
    if name == "hopper":
        from tests.judge.hopper import HopperSubject

        return HopperSubject(scale)
    if name == "triton":
        from tests.judge.triton import TritonSubject

        return TritonSubject(scale)
    return Subject(name, scale)


def in_16_bits(name: str) -> cases.Case:
    """A case of the table, in bf16 where it is in fp32."""
    case = cases.named(name)
    return replace(case, dtype="bfloat16") if case.dtype == "float32" else case
