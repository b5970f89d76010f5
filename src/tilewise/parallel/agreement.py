"""What all ranks must say alike before any bytes move, and the error that all of them raise where they do not."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from torch import Tensor

from tilewise.parallel.exchange import Exchange
from tilewise.spec import Options, assemble, parse_spec


def agreed_lengths(
    exchange: Exchange, q: Tensor, k: Tensor, v: Tensor, options: Options, also: dict[str, str]
) -> list[tuple[int, int]]:
    """``(queries, keys)`` that each rank holds, by rank. The ranks compare a hash of what they are about to do.

    Args:
        also: what else must be the same on all ranks, by what a person calls it.

    Raises:
        ValueError: on every rank alike, where a rank's call is wrong or ranks differ; it names what differs.
    """
    try:
        facts, lengths = _facts(q, k, v, options) | also, [q.shape[-3], k.shape[-3]]
    except (ValueError, NotImplementedError, IndexError) as error:
        # The other ranks must hear of it, or they would wait for this one.
        facts, lengths = {"the call": f"{type(error).__name__}: {error}"}, [0, 0]
    digest = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7])
    answers = exchange.numbers([digest, *lengths])
    if len({answer[0] for answer in answers}) > 1:
        raise ValueError(_disagreement(exchange.objects(facts)))
    if "the call" in facts:
        raise ValueError(facts["the call"].partition(": ")[2])
    return [(queries, keys) for _, queries, keys in answers]


def _facts(q: Tensor, k: Tensor, v: Tensor, options: Options) -> dict[str, str]:
    """What must be the same on all ranks, by what a person calls it."""
    seed = 0 if options.dropout_seed is None else options.dropout_seed  # a seed that is drawn is the first rank's
    extras, _, text = assemble(q, k, v, replace(options, dropout_seed=seed))
    spec = parse_spec(text)
    if any(x.ndim != (3 if spec.packed else 4) for x in (q, k, v)):
        layout = "(total, heads, head_dim)" if spec.packed else "(batch, seqlen, heads, head_dim)"
        raise ValueError(f"attention was called wrongly\n  q, k and v must be {layout}")

    def shown(x: Tensor) -> str:
        return f"({', '.join(map(str, (*x.shape[:-3], '*', *x.shape[-2:])))}) {x.dtype}"

    tensors = f"{[(tuple(x.shape), str(x.dtype)) for x in extras]} {spec.sink_slot} {spec.cu_slots} {spec.mask_slots} {spec.score_slots}"
    return {
        "q": shown(q), "k": shown(k), "v": shown(v), "mask": spec.mask_text, "score": spec.score_text,
        "softmax_scale": str(spec.softmax_scale), "dropout_p": str(spec.dropout_p), "deterministic": str(spec.deterministic),
        "backend": str(spec.backend), "gradients": f"{spec.needs_grad} {spec.grad_slots}",
        "tensors of mask, score and sink": tensors,
    }  # fmt: skip


def _disagreement(facts: list[dict[str, str]]) -> str:
    lines = [f"the {len(facts)} ranks were called differently"]
    for name in dict.fromkeys(name for known in facts for name in known):
        said = [known.get(name, "(not reached)") for known in facts]
        if len(set(said)) > 1:
            lines += [f"  {name}"] + [f"    rank {rank}: {value}" for rank, value in enumerate(said)]
    return "\n".join(lines)
