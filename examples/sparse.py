"""Sparse attention that learns what to look at: ``python -m examples.sparse``. Under a minute on two cores.

A language model, as DeepSeek's sparse attention. In each layer a small indexer scores the earlier tokens, and each query attends to the
best of them. The indexer learns from the attention, which it does not change (DeepSeek-V3.2, 2025, section 2.1):

    o, lse = tw.attention_with_lse(q, k, v, mask=tw.causal() & tw.selected(tokens))
    target = tw.probabilities(q, k, lse, tokens, causal=True)                      # summed over heads, then made to add up to 1
    loss = cross entropy + Σ KL(target, softmax(index scores of the tokens))

First it learns beside dense attention, where the tokens are all of them; then it chooses.

A video model, as video sparse attention (2025). A cube of 4 x 4 x 4 tokens is a block of 64, and each block of queries attends to the
blocks of keys with the best pooled scores, in the forward and the backward.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw
from examples.gpt.model import GPT, GPTConfig, tilewise_attention
from examples.gpt.train import TrainConfig, batches, learning_rate, load_text, make_optimizer

CUBE = 4  # tokens along each side
BLOCK = CUBE**3


def best(scores: Tensor, count: int) -> Tensor:
    """The places of the largest scores of each row; -1 where fewer than count are finite."""
    found = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return found.indices.masked_fill(found.values == -torch.inf, -1)


# -- A language model ------------------------------------------------------------------------------------------------


class Indexer(nn.Module):
    """Scores of earlier tokens, ``Σ_g w_g relu(q_g · k)``: its heads g and its key are mixtures of the attention's."""

    def __init__(self, config: GPTConfig, heads: int = 8):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        draw = lambda *shape: nn.Parameter(torch.randn(shape, generator=generator) / shape[0] ** 0.5)  # noqa: E731
        self.mix_q, self.mix_k = draw(config.heads_q, heads), draw(config.heads_k)
        self.weight = draw(config.d_model, heads)

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """Scores ``(batch, seqlen, seqlen)`` of q and k ``(batch, seqlen, heads, head_dim)``; -inf for later tokens."""
        q, k = q.detach(), k.detach()  # the model does not learn from the indexer
        products = torch.einsum("bihd,hg,bjcd,c->bgij", q, self.mix_q, k, self.mix_k).relu()
        scores = torch.einsum("bgij,big->bij", products, q.flatten(2) @ self.weight)
        return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf)


class IndexedAttention:
    """Causal attention whose layers, in the order of the calls of a forward, have an indexer each.

    Attributes:
        count: how many tokens a query attends to once the indexers have warmed up. dense: they have not.
        losses: each layer's KL divergence of the indexer from the attention. held: the share of dense attention that the best tokens had.
    """

    def __init__(self, config: GPTConfig, count: int):
        self.indexers = nn.ModuleList(Indexer(config) for _ in range(config.layers))
        self.count, self.dense = count, True
        self.losses: list[Tensor] = []
        self.held: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = self.indexers[len(self.losses)](q, k)
        tokens = best(scores.detach(), q.shape[1] if self.dense else self.count)
        given = tokens.unsqueeze(1)  # to all key heads
        mask = tw.causal() if self.dense else tw.causal() & tw.selected(given)
        o, lse = tw.attention_with_lse(q, k, v, mask=mask)
        target = tw.probabilities(q, k, lse, given, causal=True) / q.shape[2]
        if self.dense:
            self.held.append(target[..., : self.count].sum(-1).mean())
        guess = scores.gather(-1, tokens.clamp(min=0)).masked_fill(tokens < 0, -torch.inf).log_softmax(-1)
        divergence = F.kl_div(guess.masked_fill(tokens < 0, 0), target, reduction="none")
        self.losses.append(divergence.sum(-1).mean())
        return o


@dataclass(frozen=True)
class Step:
    """The figures of one step before its update.

    Attributes:
        dense, sparse: the mean losses of the two models, in nats per byte.
        divergence: of the indexers from the attention, in nats, the mean over layers.
        held: the share of dense attention that the chosen tokens hold; None after the warm-up.
    """

    dense: float
    sparse: float
    divergence: float
    held: float | None


def train_language(text: bytes, config: TrainConfig, sizes: GPTConfig, count: int, warm_up: int) -> Iterator[Step]:
    """Train two GPTs from the same weights on the same batches: one with dense attention, one that turns sparse after ``warm_up`` steps."""
    indexed = IndexedAttention(sizes, count)
    models = [GPT(sizes, attention, seed=config.seed) for attention in (tilewise_attention, indexed)]
    optimizers = [make_optimizer(model, config) for model in models]
    of_indexers = torch.optim.AdamW(indexed.indexers.parameters(), lr=1e-2, weight_decay=0.0)
    for step, (tokens, targets) in enumerate(batches(text, config)):
        indexed.dense = step < warm_up
        indexed.losses.clear()
        indexed.held.clear()
        losses = [F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) for model in models]
        divergence = torch.stack(indexed.losses).mean()
        (sum(losses) + divergence).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(config, step)
        for optimizer in (*optimizers, of_indexers):
            optimizer.step()
            optimizer.zero_grad()
        held = torch.stack(indexed.held).mean().item() if indexed.dense else None
        yield Step(*(x.item() for x in (*losses, divergence)), held)


# -- A video model ---------------------------------------------------------------------------------------------------

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def best_blocks(q: Tensor, k: Tensor, count: int) -> Tensor:
    """The ``count`` blocks of keys with the best pooled scores for each block of queries, (batch, heads, blocks, count)."""
    q, k = (x.detach().unflatten(1, (-1, BLOCK)).mean(2) for x in (q, k))
    return best(torch.einsum("bihd,bjhd->bhij", q, k), count)


def block_attention(count: int) -> Attention:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention(q, k, v, mask=tw.selected(best_blocks(q, k, count), BLOCK, block_q=BLOCK))

    return attend


def by_cubes(video: Tensor) -> Tensor:
    """Pixels (batch, frames, height, width) as tokens (batch, seqlen, 1), one cube after the other."""
    batch, *sides = video.shape
    cut = video.view(batch, *(n for side in sides for n in (side // CUBE, CUBE)))
    return cut.permute(0, 1, 3, 5, 2, 4, 6).reshape(batch, -1, 1)


def clips(batch: int, sides: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Videos (batch, frames, height, width) of two bright spots that drift, each at its own speed."""
    draw = lambda low, high: low + (high - low) * torch.rand(batch, 2, 1, 1, 1, generator=generator)  # noqa: E731
    t, y, x = (torch.arange(n, dtype=torch.float32) for n in sides)
    t, y, x = t.view(-1, 1, 1), y.view(-1, 1), x
    y0, x0, dy, dx = draw(0, sides[1]), draw(0, sides[2]), draw(-1, 1), draw(-1, 1)
    away = [
        (z - start - speed * t + n / 2) % n - n / 2
        for z, start, speed, n in ((y, y0, dy, sides[1]), (x, x0, dx, sides[2]))
    ]
    return torch.exp(-(away[0] ** 2 + away[1] ** 2) / 4).sum(1)


class Denoiser(nn.Module):
    """A transformer that predicts each pixel of a video from noisy ones, without causality."""

    def __init__(self, tokens: int, attention: Attention, width: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        self.attention, self.heads = attention, heads
        self.pixel, self.place = nn.Linear(1, width), nn.Parameter(0.3 * torch.randn(tokens, width))
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "norm": nn.LayerNorm(width),
                    "qkv": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "mlp": nn.Sequential(
                        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
                    ),
                }
            )
            for _ in range(depth)
        )
        self.clean = nn.Linear(width, 1)

    def forward(self, noisy: Tensor) -> Tensor:
        x = self.pixel(noisy) + self.place
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
            x = x + layer["out"](self.attention(q, k, v).flatten(-2))
            x = x + layer["mlp"](x)
        return self.clean(x)


def train_video(steps: int, sides: tuple[int, int, int], count: int, batch: int = 2) -> Iterator[tuple[float, float]]:
    """Train two denoisers from the same weights; yield their losses, with dense attention and with ``count`` blocks for each block."""
    models = []
    for attention in (tw.attention, block_attention(count)):
        torch.manual_seed(0)
        models.append(Denoiser(sides[0] * sides[1] * sides[2], attention))
    optimizer = torch.optim.AdamW([x for model in models for x in model.parameters()], lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        video = by_cubes(clips(batch, sides, generator))
        noisy = video + 0.5 * torch.randn(video.shape, generator=generator)
        losses = [F.mse_loss(model(noisy), video) for model in models]
        sum(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield losses[0].item(), losses[1].item()


def main() -> None:
    """Train both models and print their losses beside those of dense attention."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--steps", type=int, default=100, help="of the language model")
    parser.add_argument("--warm-up", type=int, default=50, help="of them with dense attention")
    parser.add_argument("--video-steps", type=int, default=60)
    options = parser.parse_args()
    config = TrainConfig(steps=options.steps, context=256, batch_size=4, learning_rate=5e-3)
    sizes = GPTConfig(layers=2, d_model=64, heads_q=4, heads_k=1, d_hidden=128, context=config.context)
    count = 32
    print(f"language: {count} of {config.context} tokens\nstep   dense   sparse   divergence   held by the best tokens")
    for n, x in enumerate(train_language(load_text(None), config, sizes, count, options.warm_up)):
        if n % 20 == 0 or n in (options.warm_up - 1, options.steps - 1):
            held = "" if x.held is None else f"{x.held:.2f}"
            print(f"{n:4}   {x.dense:.3f}   {x.sparse:.3f}    {x.divergence:8.3f}     {held}")
    sides, count = (8, 16, 16), 8
    blocks = sides[0] * sides[1] * sides[2] // BLOCK
    print(f"video: {count} of {blocks} blocks\nstep   dense    sparse")
    for n, (dense, sparse) in enumerate(train_video(options.video_steps, sides, count)):
        if n % 10 == 0 or n == options.video_steps - 1:
            print(f"{n:4}   {dense:.4f}   {sparse:.4f}")


if __name__ == "__main__":
    main()
