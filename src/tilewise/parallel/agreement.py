"""Ranks agree on a call before any bytes move, or all raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from tilewise import device
from tilewise.parallel.exchange import Exchange
from tilewise.parallel.layout import Layout
from tilewise.spec import Spec, parse_spec

if TYPE_CHECKING:
    from tilewise.parallel.context import ContextParallel

Assembled = tuple[list[Tensor], Tensor | None, str]
"""The extras, the seed and the text of a call."""


class Agreed(NamedTuple):
    """A call on which all ranks have agreed.

    Attributes:
        layouts: of the queries, and of the keys.
        q, k, v: the rank's own rows.
        extras, seed, text: as the operator takes them.
        digest: the hash of the call.
        mark: the mark of the plan that all have, or 0 if their plans differ or some have none.
    """

    layouts: tuple[Layout, Layout]
    q: Tensor
    k: Tensor
    v: Tensor
    extras: list[Tensor]
    seed: Tensor | None
    text: str
    digest: int = 0
    mark: int = 0

    @property
    def spec(self) -> Spec:
        return parse_spec(self.text)

    @property
    def whole(self) -> list[Tensor]:
        """Tensors for checks, with the facts of q, k and v, the lengths of the whole and no memory of their own."""
        queries, keys = self.layouts
        return [
            x.new_empty((1,) * x.ndim).expand(*x.shape[:-3], layout.seqlen, *x.shape[-2:])
            for x, layout in ((self.q, queries), (self.k, keys), (self.v, keys))
        ]


def agreed(
    parallel: ContextParallel, q: Tensor, k: Tensor, v: Tensor, assembled: Callable[[], Assembled], also: dict[str, str]
) -> Agreed:
    """Compare a hash of the call between ranks, and return the call.

    Args:
        assembled: makes the call as the operator takes it.
        also: what else must be the same on all ranks, with its names for people.

    Raises:
        ValueError: on every rank, if ranks differ or some calls are wrong; it names the difference.
        NotImplementedError: the batch is empty.
        Exception: the error of this rank, if the call is wrong on every rank alike.
    """
    layout = parallel.layout.text if isinstance(parallel.layout, Layout) else parallel.layout
    also = {"layout": layout, "sum_leaf_gradients": str(parallel.sum_leaf_gradients), "scheme": parallel.scheme} | also
    call: Any = None  # a call that fails raises below
    failed: Exception | None = None
    try:
        call = extras, _, text = assembled()
        shapes = tuple((*x.shape[:-3], "*", *x.shape[-2:], x.dtype) for x in (q, k, v))
        digest, facts = _facts(text, shapes, tuple((tuple(x.shape), x.dtype) for x in extras), tuple(also.items()))
        if k.shape[-3] != v.shape[-3]:
            raise ValueError(
                f"attention was called wrongly\n  seqlen of k ({k.shape[-3]}) and v ({v.shape[-3]}) differ on this rank"
            )
        rows, mark = [q.shape[-3], k.shape[-3]], parallel.plans.mark(digest, extras, text)
    except Exception as error:
        # The other ranks must hear of every error, also of a user's function, or they would wait for this rank.
        failed, rows, mark = error, [0, 0], 0
        digest, facts = _hashed({"the call": f"{type(error).__name__}: {error}"})
    memory = device.of(q.device).memory if isinstance(q, Tensor) else 0  # assembled() refuses another q
    answers = parallel.exchange.numbers([digest, *rows, memory, mark])
    digests, queries, keys, memories, marks = (list(x) for x in zip(*answers, strict=True))
    _compare(parallel.exchange, digests, facts, failed)
    if failed is not None:
        raise failed
    parallel.memory, (extras, seed, text) = min(memories), call
    if q.ndim == 4 and not q.shape[0]:
        raise NotImplementedError("attention over ranks has an empty batch; skip the call on every rank")
    layouts = checked_layout(parallel, queries, "queries"), checked_layout(parallel, keys, "keys")
    if seed is not None:
        # Every rank takes the first rank's, so that the same pairs are dropped as on one device.
        seed = parallel.exchange.gather(seed)[0]
    mark = marks[0] if len(set(marks)) == 1 else 0
    return Agreed(layouts, q, k, v, extras, seed, text, digest, mark)


def checked_layout(parallel: ContextParallel, lengths: list[int], name: str) -> Layout:
    """Return the layout of as many rows as the ranks hold. All ranks refuse it if it deals them otherwise."""
    layout = parallel.layout_of(sum(lengths))
    if layout.lengths != tuple(lengths):
        raise ValueError(
            f"attention over {parallel.size} ranks was called wrongly\n  the ranks hold {lengths} {name}, the layout of {sum(lengths)} "
            f"is {list(layout.lengths)}; cut tensors by shard()"
        )
    return layout


def agreed_rows(exchange: Exchange, x: Tensor, dim: int) -> list[int]:
    """Return the rows of ``dim`` on each rank, of tensors that are otherwise alike.

    Raises:
        ValueError: on every rank, if the tensors differ otherwise.
    """
    rows = x.size(dim)
    shape = ", ".join("*" if n == dim % x.ndim else str(size) for n, size in enumerate(x.shape))
    digest, facts = _hashed({"the tensor, * for its rows": f"({shape}) {x.dtype}"})
    answers = exchange.numbers([digest, rows])
    _compare(exchange, [found for found, _ in answers], facts)
    return [theirs for _, theirs in answers]


class Turn(NamedTuple):
    """The number of a call within its group. Backwards must run in the same order on all ranks.

    Attributes:
        exchange: of all ranks.
        number: the same on all ranks; 0 in a compiled graph, which orders its calls itself.
    """

    exchange: Exchange
    number: int

    def numbers(self, *values: int) -> list[list[int]]:
        """Return the numbers that every rank gives in the backward of this call, by rank.

        Raises:
            ValueError: on every rank, if their backwards run in another order. Gradients of one call would go to the rows of another.
        """
        said = self.exchange.numbers([self.number, *values])
        if len({number for number, *_ in said}) > 1:
            calls = ", ".join(f"rank {rank}: call {number}" for rank, (number, *_) in enumerate(said))
            raise ValueError(
                f"the {len(said)} ranks run their backwards in another order\n  {calls} of this group; run them alike on every rank, "
                "by one backward of the sum of losses, say"
            )
        return [rest for _, *rest in said]


def agree_on_tensors(exchange: Exchange, digest: int, neighbours: int = 1) -> None:
    """Raise on every rank if the mask's tensors select other keys on some rank, before a rank waits for keys that nobody sends.

    Args:
        digest: of the keys to send.
        neighbours: the ranks with different heads, whose masks may select other keys. Only ranks with the same place among them compare.
    """
    found = [number for (number,) in exchange.numbers([digest])]
    if any(len(set(found[n::neighbours])) > 1 for n in range(neighbours)):
        said = " ".join(chr(ord("a") + found.index(number)) for number in found)
        raise ValueError(
            f"the {exchange.size} ranks were called differently\n  the mask's tensors hold other numbers on each rank; ranks that "
            f"agree have one letter: {said}"
        )


@lru_cache(maxsize=1024)
def _facts(text: str, shapes: tuple, extras: tuple, also: tuple[tuple[str, str], ...]) -> tuple[int, dict[str, str]]:
    """Return a hash of everything that must be the same on all ranks, and the same by its names for people.

    Args:
        shapes: those of q, k and v on all ranks, with dtypes.
    """
    spec = parse_spec(text)
    if any(len(shape) != (4 if spec.packed else 5) for shape in shapes):
        layout = "(total, heads, head_dim)" if spec.packed else "(batch, seqlen, heads, head_dim)"
        raise ValueError(f"attention was called wrongly\n  q, k and v must be {layout}")
    slots = f"{spec.sink_slot} {spec.cu_slots} {spec.mask_slots} {spec.score_slots}"
    q, k, v = (f"({', '.join(map(str, shape[:-1]))}) {shape[-1]}" for shape in shapes)
    return _hashed({
        "q": q, "k": k, "v": v, "mask": spec.mask_text, "score": spec.score_text,
        "softmax_scale": str(spec.softmax_scale), "dropout_p": str(spec.dropout_p),
        "deterministic": f"{spec.deterministic} {spec.everywhere}",
        "backend": str(spec.backend), "gradients": f"{spec.needs_grad} {spec.grad_slots}",
        "tensors of mask, score and sink": f"{list(extras)} {slots}",
    } | dict(also))  # fmt: skip


def _hashed(facts: dict[str, str]) -> tuple[int, dict[str, str]]:
    return int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7]), facts


def _compare(exchange: Exchange, digests: list[int], facts: dict[str, str], failed: Exception | None = None) -> None:
    """Raise on every rank if their hashes differ, with what each rank has."""
    if len(set(digests)) == 1:
        return
    every = exchange.objects(facts)
    lines = [f"the {len(every)} ranks were called differently"]
    for name in dict.fromkeys(name for known in every for name in known):
        said = [known.get(name, "(not reached)") for known in every]
        if len(set(said)) > 1:
            lines += [f"  {name}"] + [f"    rank {rank}: {value or 'none'}" for rank, value in enumerate(said)]
    raise ValueError("\n".join(lines)) from failed
