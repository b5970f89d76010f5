"""Trains a byte-level model on text: loading, batches, the loop. Plain functions; the model is handed in.

    text = load_text(None)                                     # Python's own standard library
    for record in train(model, text, TrainConfig(steps=60)):
        print(record.step, record.loss, record.tokens_per_s)

Everything random follows from `TrainConfig.seed` and the step's number, so that a run can stop after any step and go on later
with the same losses.
"""

import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STDLIB_BYTES = 4_000_000


@dataclass(frozen=True)
class TrainConfig:
    """How to train; the defaults are those of `make demo`.

    The learning rate is low for so small a model on purpose. AdamW's steps amplify rounding: over 60 steps in fp32 the losses
    with two attentions that differ in rounding alone drift apart by 1e-6 to 3e-5 at 1e-3, by 5e-4 at 2e-3, by 3e-2 at 3e-3.
    """

    steps: int = 60
    context: int = 256
    batch_size: int = 8
    learning_rate: float = 1e-3
    warmup_steps: int = 10
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class StepRecord:
    """The figures of one step: the mean loss in nats per byte, before the step's update, and the speed."""

    step: int
    loss: float
    tokens_per_s: float


def load_text(path: str | Path | None) -> bytes:
    """The bytes of a text file, or by default the first 4 MB of the sources of Python's standard library.

    Raises ValueError, in one line, where the file cannot be read, is empty or is not text.
    """
    if path is None:
        return standard_library_sources()
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from error
    if not text:
        raise ValueError(f"the text {path} is empty")
    if _looks_binary(text):
        raise ValueError(f"{path} looks binary: give a text file, in UTF-8 or another encoding without NUL bytes")
    return text


def _looks_binary(text: bytes) -> bool:
    """True with any NUL, or with over 1 % of control characters that no text uses (random bytes have 10 %)."""
    controls = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b"))
    return b"\0" in text or len(text) - len(text.translate(None, controls)) > 0.01 * len(text)


def standard_library_sources(limit: int | None = STDLIB_BYTES) -> bytes:
    """The .py files of the standard library in sorted order, so that a package's lie together, up to ``limit`` bytes.

    Tests, code page tables and installed packages are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    text = bytearray()
    for path in sorted(path for path in paths if not left_out.intersection(path.parts)):
        text += (root / path).read_bytes()
        if limit is not None and len(text) >= limit:
            break
    if not text:
        raise ValueError(f"{root} holds no .py sources of the standard library: name a text file")
    return bytes(text[:limit])


def batches(text: bytes, config: TrainConfig, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of steps start … config.steps − 1, each (tokens, targets), both (batch_size, context) int64.

    Rows are pieces of the text from random places; a target is the byte after its token. The batch of a step depends on
    (seed, step) alone. Raises ValueError at once where the text is shorter than a row.
    """
    if len(text) <= config.context:
        raise ValueError(
            f"the text has {len(text)} bytes: a context of {config.context} needs at least {config.context + 1}"
        )
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return (_batch(data, config, step) for step in range(start, config.steps))


def _batch(data: Tensor, config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - config.context, (config.batch_size, 1), generator=generator)
    rows = data[starts + torch.arange(config.context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the norms' gains alone."""
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    gains = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rises linearly over the warm-up, then falls along a cosine to a tenth."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def train(
    model: nn.Module,
    text: bytes,
    config: TrainConfig,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    start: int = 0,
) -> Iterator[StepRecord]:
    """Trains `model` (tokens -> logits) in place, one step for each record that is taken.

    To go on after a stop, hand in the optimizer of before (`make_optimizer`) and the step to start from.
    Raises ValueError at once, not at the first record, where the text is too short.
    """
    steps = batches(text, config, start)
    return _steps(model, config, optimizer or make_optimizer(model, config), enumerate(steps, start))


def _steps(
    model: nn.Module,
    config: TrainConfig,
    optimizer: torch.optim.Optimizer,
    steps: Iterator[tuple[int, tuple[Tensor, Tensor]]],
) -> Iterator[StepRecord]:
    device = next(model.parameters()).device
    for step, (tokens, targets) in steps:
        began = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        logits = model(tokens.to(device))
        loss = F.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        # item() waits for a GPU, so that the clock stops after the work.
        value = loss.item()
        yield StepRecord(step, value, tokens.numel() / (time.perf_counter() - began))
