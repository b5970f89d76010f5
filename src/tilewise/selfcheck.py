"""``verify()``: check this machine against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from tilewise import accuracy, dispatch
from tilewise.backends.base import Inputs
from tilewise.device import of
from tilewise.masks.catalogue import keep, key_lengths, window
from tilewise.problem import DTYPES, check
from tilewise.scores.catalogue import alibi, bias, softcap
from tilewise.spec import Options, assemble, parse_spec

_SHAPE = (2, 193, 4, 2, 64)  # batch, seqlen, heads_q, heads_k, head_dim


def _features(device: torch.device) -> dict[str, Callable[[], dict]]:
    """Name -> keywords; leaves want gradients."""
    seqlen, heads = _SHAPE[1:3]

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).requires_grad_()

    return {
        "full": dict,
        "causal": lambda: {"causal": True},
        "window": lambda: {"mask": window(left=40, right=0)},
        "padding": lambda: {"mask": key_lengths(torch.tensor([seqlen, seqlen // 3], device=device))},
        "keep": lambda: {"mask": keep(lambda b, h, i, j: (i + j) % 3 != 0)},
        "softcap": lambda: {"causal": True, "score": softcap(5.0)},
        "alibi": lambda: {"causal": True, "score": alibi(new(heads))},
        "bias": lambda: {"score": bias(new(1, heads, seqlen, seqlen))},
        "sink": lambda: {"causal": True, "sink": new(heads)},
        "dropout": lambda: {"dropout_p": 0.2, "dropout_seed": 1},
    }


@dataclass(frozen=True)
class Row:
    """One backend, dtype and feature: the tensor with the largest error, or why the backend refuses.

    ``error`` and ``eager`` are rms relative errors against float64 over rows; ``ok`` judges every tensor by the rule of
    :mod:`tilewise.accuracy`.
    """

    backend: str
    dtype: str
    feature: str
    ok: bool | None
    tensor: str = ""
    error: float = 0.0
    eager: float = 0.0
    allowed: float = 0.0
    refused: str = ""


@dataclass(frozen=True)
class Report:
    """The rows of :func:`verify`. ``print`` it."""

    device: str
    rows: tuple[Row, ...]

    @property
    def ok(self) -> bool:
        return all(row.ok is not False for row in self.rows)

    def as_dict(self) -> dict:
        return {"device": self.device, "ok": self.ok, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        lines = [f"on {self.device}", f"{'backend':10} {'dtype':9} {'feature':9} {'worst':7} {'error':>9} {'eager':>9}"]
        for row in self.rows:
            head = f"{row.backend:10} {row.dtype:9} {row.feature:9} "
            if row.ok is None:
                lines.append(f"{head}refused: {row.refused}")
            else:
                lines.append(f"{head}{row.tensor:7} {row.error:9.2e} {row.eager:9.2e}  {'ok' if row.ok else 'WRONG'}")
        return "\n".join(lines)


def verify(
    device: torch.device | str | None = None,
    dtypes: tuple[torch.dtype, ...] | None = None,
    features: tuple[str, ...] | None = None,
) -> Report:
    """Run every backend of this machine on a table of features, forward and backward, and compare with float64.

    Args:
        device: default: the GPU if there is one, else the CPU.
        dtypes: default: fp32 and bf16, and on a GPU fp16.
        features: names of the table's rows; default: all of them.

    Raises:
        ValueError: torch does not know the device, this machine does not have it, or the dtype is not supported.
    """
    device = _device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    default = (torch.float32, torch.bfloat16) + ((torch.float16,) if device.type == "cuda" else ())
    dtypes = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes or default)
    wrong = [str(dtype) for dtype in dtypes if dtype not in DTYPES]
    if wrong:
        raise ValueError(f"verify(dtypes=): {', '.join(wrong)} is not of {', '.join(str(dtype) for dtype in DTYPES)}")
    # Whatever surrounds the call, or torch.set_default_device said.
    with torch.device("cpu"), torch._C._DisableAutocast():
        return Report(of(device).name, tuple(_rows(device, dtypes, features)))


def _device(wanted: torch.device | str) -> torch.device:
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ValueError(f"verify(device={wanted!r}): torch knows no such device; use 'cpu' or 'cuda'") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"verify(device={wanted!r}): torch sees no CUDA device here")
    return device


def _rows(
    device: torch.device, dtypes: tuple[torch.dtype, ...], features: tuple[str, ...] | None = None
) -> Iterator[Row]:
    table = _features(device)
    for dtype in dtypes:
        for feature, options in table.items() if features is None else [(name, table[name]) for name in features]:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(0)
                yield from _feature_rows(device, dtype, feature, options())


def _feature_rows(device: torch.device, dtype: torch.dtype, feature: str, options: dict) -> Iterator[Row]:
    batch, seqlen, heads_q, heads_k, head_dim = _SHAPE
    heads = (heads_q, heads_k, heads_k, heads_q)
    q, k, v, do = (torch.randn(batch, seqlen, n, head_dim, device=device).to(dtype) for n in heads)
    q.requires_grad_()
    dlse = torch.randn(batch, heads_q, seqlen, device=device)
    extras, seed, text = assemble(q, k, v, Options(**options))
    q, extras = q.detach(), [x.detach() for x in extras]
    p = check(q, k, v, extras, seed, parse_spec(text))
    t = Inputs.of(p, q, k, v, extras, seed)
    expected = accuracy.Expected.of(p, t, do, dlse)
    for name in dispatch.candidates(p):
        yield _judged(name, (str(dtype).removeprefix("torch."), feature), expected, (p, t, do, dlse))


def _judged(name: str, labels: tuple[str, str], expected: accuracy.Expected, call: tuple) -> Row:
    backend = dispatch.backend(name)
    reasons = backend.unsupported(call[0])
    if reasons:
        return Row(name, *labels, None, refused="; ".join(reasons))
    errors = expected.judge(_run(backend, *call))
    worst = max(errors, key=lambda e: e.rms if e.ok else float("inf"))
    return Row(name, *labels, all(e.ok for e in errors), worst.tensor, worst.rms, worst.rms_eager, worst.rms_allowed)


def _run(backend, p, t: Inputs, do: Tensor, dlse: Tensor) -> dict[str, Tensor]:
    out = backend.forward(p, t)
    return accuracy.tensors(out, backend.backward(p, t, out, do, dlse))
