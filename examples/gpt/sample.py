"""Continues a text with a byte-level model, one byte at a time.

bytes(generate(model, b"def tile(", count=100, context=256))
"""

from collections.abc import Iterator

import torch
from torch import nn


@torch.no_grad()
def generate(
    model: nn.Module, prompt: bytes, count: int, *, context: int, temperature: float = 0.8, seed: int = 0
) -> Iterator[int]:
    """The `count` bytes that follow `prompt`, one by one; the model sees the last `context` of what is there.

    Byte x comes with the probability softmax(logits / temperature)[x]; temperature 0 takes the likeliest.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one byte to continue")
    if not temperature >= 0:
        raise ValueError(f"temperature {temperature} must be 0 (the likeliest byte) or above")
    return _bytes(model, list(prompt[-context:]), count, (context, temperature, seed))


def _bytes(model: nn.Module, seen: list[int], count: int, how: tuple[int, float, int]) -> Iterator[int]:
    context, temperature, seed = how
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        logits = model(torch.tensor([seen], device=device))[0, -1].double().cpu()
        if temperature:
            byte = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator).item()
        else:
            byte = logits.argmax().item()
        yield byte
        seen = [*seen, byte][-context:]
