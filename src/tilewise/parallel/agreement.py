"""Ranks agree on a call before any bytes move, or all raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from tilewise.parallel.exchange import Exchange
from tilewise.spec import parse_spec

Assembled = tuple[list[Tensor], Tensor | None, str]
"""The extras, the seed and the text of a call."""


class Agreement(NamedTuple):
    """The facts of a call on which ranks agree.

    Attributes:
        lengths: the numbers of queries and keys on each rank.
        memory: that of the rank with the least, in bytes.
        call: as the operator takes it, with this rank's seed.
        digest: the hash of the call.
        mark: the mark of the plan that all have, or 0 if their plans differ or some have none.
    """

    lengths: list[tuple[int, int]]
    memory: int
    call: Assembled
    digest: int
    mark: int


def agreed_lengths(
    exchange: Exchange,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    assembled: Callable[[], Assembled],
    also: tuple[tuple[str, str], ...],
    memory: int = 0,
    mark_of: Callable[[int, list[Tensor], str], int] = lambda digest, extras, text: 0,
) -> Agreement:
    """Compare a hash of the call between ranks, and return their :class:`Agreement`.

    Args:
        assembled: makes the call as the operator takes it.
        also: what else must be the same on all ranks, with its names for people.
        memory: bytes of this rank, or 0 if unknown.
        mark_of: the mark of this rank's plan of the call, from the hash, the extras and the text; 0 means no plan.

    Raises:
        ValueError: on every rank, if ranks differ or some calls are wrong; it names the difference.
        Exception: the error of this rank, if the call is wrong on every rank alike.
    """
    call: Any = None  # a call that fails raises below
    failed: Exception | None = None
    try:
        call = extras, _, text = assembled()
        shapes = tuple((*x.shape[:-3], "*", *x.shape[-2:], x.dtype) for x in (q, k, v))
        dims = {x.ndim for x in (q, k, v)}
        digest, facts = _facts(
            text, dims == {3}, dims == {4}, shapes, tuple((tuple(x.shape), x.dtype) for x in extras), also
        )
        if k.shape[-3] != v.shape[-3]:
            raise ValueError(
                f"attention was called wrongly\n  seqlen of k ({k.shape[-3]}) and v ({v.shape[-3]}) differ on this rank"
            )
        lengths, mark = [q.shape[-3], k.shape[-3]], mark_of(digest, extras, text)
    except Exception as error:
        # The other ranks must hear of every error, also of a user's function, or they would wait for this rank.
        failed, lengths, mark = error, [0, 0], 0
        digest, facts = _hashed({"the call": f"{type(error).__name__}: {error}"})
    answers = exchange.numbers([digest, *lengths, memory, mark])
    _compare(exchange, [answer[0] for answer in answers], facts, failed)
    if failed is not None:
        raise failed
    marks = {answer[4] for answer in answers}
    return Agreement(
        [(answer[1], answer[2]) for answer in answers], min(answer[3] for answer in answers), call, digest,
        marks.pop() if len(marks) == 1 else 0,
    )  # fmt: skip


def agreed_rows(exchange: Exchange, x: Tensor, dim: int) -> list[int]:
    """Return the rows of ``dim`` on each rank, of tensors that are otherwise alike.

    Raises:
        ValueError: on every rank, if the tensors differ otherwise.
    """
    shape = ", ".join("*" if n == dim % x.ndim else str(size) for n, size in enumerate(x.shape))
    digest, facts = _hashed({"the tensor, * for its rows": f"({shape}) {x.dtype}"})
    answers = exchange.numbers([digest, x.shape[dim]])
    _compare(exchange, [found for found, _ in answers], facts)
    return [rows for _, rows in answers]


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
def _facts(
    text: str, packed: bool, batched: bool, shapes: tuple, extras: tuple, also: tuple[tuple[str, str], ...]
) -> tuple[int, dict[str, str]]:
    """Return a hash of everything that must be the same on all ranks, and the same by its names for people.

    Args:
        packed, batched: q, k and v have three, or four, dimensions.
        shapes: those of all ranks, with dtypes.
    """
    spec = parse_spec(text)
    if not (packed if spec.packed else batched):
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
    if len(set(digests)) > 1:
        raise ValueError(_disagreement(exchange.objects(facts))) from failed


def _disagreement(facts: list[dict[str, str]]) -> str:
    lines = [f"the {len(facts)} ranks were called differently"]
    for name in dict.fromkeys(name for known in facts for name in known):
        said = [known.get(name, "(not reached)") for known in facts]
        if len(set(said)) > 1:
            lines += [f"  {name}"] + [f"    rank {rank}: {value}" for rank, value in enumerate(said)]
    return "\n".join(lines)
