"""Muon with QK-clip, MuonClip, on the small GPT: `python -m examples.qk_clip`. A minute on a laptop's CPU.

Muon's updates have all singular values alike, so W_q and W_k can grow together until softmax sees scores in the hundreds. After each
step QK-clip looks at the largest score S of every head and shrinks the head's weights where S is above a threshold τ:

    stats = tw.attention_with_stats(q, k, v, causal=True, per="head")  # the attention, and its largest scores
    W_q[head] *= min(1, τ / stats.max_logit[head])                    # after the optimizer's step

Scores are linear in W_q, so the scores of this batch are then at most τ. The paper divides the factor among W_q and W_k; here
several query heads share a key head, so W_q takes all of it (Kimi K2, 2025, section 2.1 and Algorithm 1).
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise as tw
from examples.gpt.model import GPT, GPTConfig
from examples.gpt.train import TrainConfig, batches, load_text


class WatchedAttention:
    """Causal attention that keeps the largest score of each head, one tensor (heads_q,) for each layer of a forward."""

    def __init__(self):
        self.max_logits: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stats = tw.attention_with_stats(q, k, v, causal=True, per="head")
        self.max_logits.append(stats.max_logit)
        return stats.o


@torch.no_grad()
def qk_clip(model: GPT, max_logits: list[Tensor], threshold: float) -> None:
    """Shrinks W_q of every head whose largest score is above the threshold, in place; nothing is read on the host."""
    heads_q, head_dim = model.config.heads_q, model.config.head_dim
    for block, largest in zip(model.blocks, max_logits, strict=True):
        shrink = threshold / largest.clamp(min=threshold)
        w_q = block.attention.to_qkv.weight[: heads_q * head_dim]
        w_q.view(heads_q, head_dim, -1).mul_(shrink.view(-1, 1, 1))


@dataclass(frozen=True)
class Step:
    """The figures of one step before its update: the mean loss in nats per byte, and the largest score of all layers and heads."""

    loss: float
    max_logit: float


def train(text: bytes, config: TrainConfig, threshold: float | None, sizes: GPTConfig | None = None) -> Iterator[Step]:
    """Trains a GPT by Muon, its embedding and logits by AdamW; with QK-clip unless ``threshold`` is None."""
    watched = WatchedAttention()
    model = GPT(sizes or GPTConfig(context=config.context), attention=watched, seed=config.seed)
    inner = [weight for weight in model.blocks.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if not any(weight is x for x in inner)]
    optimizers = (
        torch.optim.Muon(inner, lr=config.learning_rate, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=config.learning_rate, weight_decay=0.0),
    )
    for tokens, targets in batches(text, config):
        watched.max_logits.clear()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if threshold is not None:
            qk_clip(model, watched.max_logits, threshold)
        yield Step(loss.item(), torch.stack(watched.max_logits).max().item())


def main() -> None:
    """Trains twice from the same weights, without the clip and with it, and prints losses and largest scores side by side."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threshold", type=float, default=10.0)
    parser.add_argument("--learning-rate", type=float, default=2e-2)
    options = parser.parse_args()
    config = TrainConfig(steps=options.steps, context=128, learning_rate=options.learning_rate)
    text = load_text(None)
    print(f"step   loss, largest score without the clip   with it, threshold {options.threshold:g}")
    runs = (train(text, config, threshold) for threshold in (None, options.threshold))
    for n, (free, clipped) in enumerate(zip(*runs, strict=True)):
        if n % 5 == 0 or n == options.steps - 1:
            print(f"{n:4}   {free.loss:.3f}  {free.max_logit:8.2f}   {clipped.loss:.3f}  {clipped.max_logit:8.2f}")


if __name__ == "__main__":
    main()
