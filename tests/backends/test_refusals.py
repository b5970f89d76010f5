"""The reasons of a refusal name what would have to go: over combinations of options, a call runs without one of them exactly where every
reason names that one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import pytest
import torch

import tilewise as tw
from bench.testing import call
from tilewise.backends.base import Backend
from tilewise.backends.hopper import Hopper
from tilewise.backends.triton import Triton, installed

LENGTH, HEADS = 48, 2
# What each option may be beside its default, that of a dense causal call in bf16 whose q, k, v want gradients.
CHOICES = {
    "packed": (True,),
    "mask": ("all", "window", "keys", "late-keys", "pairs"),
    "score": ("softcap", "alibi", "scaled", "table"),
    "slopes": ("two-axes",),
    "wanted": (True,),
    "dropout": (True,),
    "deterministic": (True,),
    "dims": ((136, 136), (264, 264), (20, 20), (64, 264), (600, 16)),
    "dtype": (torch.float64,),
    "scale": (-1.0,),
}
NAMED = {
    "packed": r"packed",
    "mask": r"\bmask\b",
    "score": r"score\b|ALiBi|softcap|tensor read at",
    "slopes": r"one fp32 number a head",
    "wanted": r"gradient",
    "dropout": r"dropout",
    "deterministic": r"deterministic",
    "dims": r"head[_ ]dim",
    "dtype": r"float64|float32: its",
    "scale": r"softmax_scale",
}
"""What a reason says of an option that it holds against a call."""
OF_SCORES = {"slopes": ("alibi",), "wanted": ("alibi", "scaled", "table")}
"""Options that some scores have alone, and go with them."""
MASKS: dict[str, Callable[[], tw.Mask | None]] = {
    "causal": tw.causal,
    "all": lambda: None,
    "window": lambda: tw.window(4, 0),
    "keys": lambda: tw.causal() & tw.key_range(0, 20),
    "late-keys": lambda: tw.causal() & tw.key_range(3, 20),
    "pairs": lambda: tw.keep(lambda b, h, i, j: (i + j) % 3 > 0),
}


def problem(**options):
    """The checked problem of a call with these options."""
    dims = options.get("dims", (64, 64))
    lead = (LENGTH,) if "packed" in options else (1, LENGTH)
    q, k, v = (torch.zeros(*lead, HEADS, d, dtype=options.get("dtype", torch.bfloat16)) for d in (dims[0], *dims))
    table = torch.zeros(2 if "packed" in options else 1, HEADS) if "slopes" in options else torch.zeros(HEADS)
    # An index of i² j reads one element for many pairs in no order that sums could follow.
    table = torch.zeros(7) if options.get("score") == "table" else table
    table.requires_grad_("wanted" in options)
    scores = {
        "softcap": lambda: tw.softcap(20.0),
        "alibi": lambda: tw.alibi(table),
        "scaled": lambda: tw.score(lambda s, b, h, i, j: s * table[h]),
        "table": lambda: tw.score(lambda s, b, h, i, j: s + table[i * i * j % 7]),
    }
    given = {"mask": MASKS[options.get("mask", "causal")](), "softmax_scale": options.get("scale")}
    given |= {"score": scores[options["score"]]()} if "score" in options else {}
    given |= {"dropout_p": 0.1, "dropout_seed": 1} if "dropout" in options else {}
    given |= {"deterministic": True} if "deterministic" in options else {}
    given |= {"cu_seqlens_q": torch.tensor([0, 20, LENGTH])} if "packed" in options else {}
    return call(q, k, v, **given).p


def combinations(*names: str) -> Iterator[dict]:
    """Every choice of these options, each left out too."""
    for chosen in product(*[(None, *CHOICES[name]) for name in names]):
        options = {name: x for name, x in zip(names, chosen, strict=True) if x is not None}
        if all(options.get("score") in of for name, of in OF_SCORES.items() if name in options):
            yield options


def without(options: dict, name: str) -> dict:
    """The options without one, and without those that only its choice has."""
    gone = {name, *(OF_SCORES if name == "score" else ())}
    return {x: value for x, value in options.items() if x not in gone}


BACKENDS = {"hopper": (Hopper, Hopper.refused), "triton": (Triton, Triton.unsupported)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "names",
    [
        ("packed", "mask", "score", "slopes", "wanted", "dropout", "deterministic"),
        ("packed", "score", "wanted", "dropout", "deterministic", "dims"),
        ("packed", "score", "slopes", "wanted", "dropout", "dtype", "scale"),
    ],
    ids=["masks", "widths", "numbers"],
)
def test_a_call_runs_without_an_option_just_where_all_reasons_name_it(name, names, monkeypatch):
    if name == "triton" and not installed():
        pytest.skip("the package triton is not installed")
    kind, refused = BACKENDS[name]
    backend: Backend = kind()
    monkeypatch.setattr("tilewise.backends.triton.device_reasons", lambda device: [])

    @cache
    def reasons(options: tuple) -> list[str]:
        return refused(backend, problem(**dict(options)))

    seen, wrong = set(), []
    for options in combinations(*names):
        found = reasons(tuple(options.items()))
        seen |= set(found)
        assert len(set(found)) == len(found), found
        for option in options if found else ():
            if option == "score" and "scale" in options:
                continue  # without a score a scale that is not above 0 is refused as well, by another reason
            runs = not reasons(tuple(without(options, option).items()))
            if runs != all(re.search(NAMED[option], reason) for reason in found):
                wrong.append(f"{options}: {'runs' if runs else 'does not run'} without {option}: {found}")
    assert seen
    assert not wrong, "\n".join(wrong[:20])
