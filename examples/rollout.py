"""Reinforcement learning whose two passes agree bit for bit: a policy is sampled with a paged cache and trained on what it sampled.

    python -m examples.rollout                # 25 steps, with deterministic="everywhere" and without, and a table of both
    python -m examples.rollout --plot out/rollout.png

Sampling runs token by token over a cache in pages; training runs all sequences at once, packed, with gradients. A policy gradient divides
the two probabilities of a token. If they differ in a last bit, the gradient is that of another policy (docs/invariance.md).

``deterministic="everywhere"`` gives a row of attention the same bits in both passes. The rest of the model has to do that too: here
every sum runs over its terms in one order (:class:`RowByRow`), and all else works number by number. The policy learns to say the
token that follows the last one, modulo the vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import tilewise as tw

VOCABULARY, WIDTH, LAYERS, HEADS, HEAD_DIM = 12, 48, 2, (4, 2), 16
PROMPT, NEW, BATCH, PAGE = 4, 92, 8, 16
CAPACITY = PROMPT + NEW

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The attention of a layer, of q, k and v ``(rows, heads, head_dim)``."""


class RowByRow(torch.autograd.Function):
    """``x wᵀ``, each number summed from its first term to its last.

    A library's product chooses the order of its sums by the number of rows, so that one row alone has other bits than among many.
    The backward need not agree with anything and is a library's product.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        """Return ``(rows, out)`` of x ``(rows, in)`` and w ``(out, in)``."""
        ctx.save_for_backward(x, w)
        total = x.new_zeros(x.shape[0], w.shape[0])
        for n in range(w.shape[1]):
            total += x[:, n : n + 1] * w[:, n]
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.mT @ x


def linear(x: Tensor, w: Tensor) -> Tensor:
    return RowByRow.apply(x, w)


def row_sum(x: Tensor) -> Tensor:
    """Return the sums of rows, ``(rows, 1)``."""
    return linear(x, x.new_ones(1, x.shape[1]))


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(row_sum(x * x) / x.shape[1] + 1e-5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        heads_q, heads_k = HEADS
        sizes = {"q": heads_q * HEAD_DIM, "k": heads_k * HEAD_DIM, "v": heads_k * HEAD_DIM, "up": 4 * WIDTH}
        self.ways = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(n, WIDTH) * WIDTH**-0.5) for name, n in sizes.items()}
        )
        self.out = nn.Parameter(torch.randn(WIDTH, sizes["q"]) * WIDTH**-0.5 / 2)
        self.down = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) * WIDTH**-0.5 / 4)

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        of = normalised(x)
        q, k, v = (linear(of, self.ways[name]).unflatten(1, (-1, HEAD_DIM)) for name in "qkv")
        x = x + linear(attend(q, k, v).flatten(1), self.out)
        up = linear(normalised(x), self.ways["up"]).relu()
        return x + linear(up * up, self.down)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.places = nn.Parameter(torch.randn(CAPACITY, WIDTH) * 0.1)
        self.head = nn.Parameter(torch.randn(VOCABULARY, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, tokens: Tensor, places: Tensor, attend: Attend) -> Tensor:
        """Return the log-probabilities of the next token, ``(rows, VOCABULARY)``, after tokens ``(rows,)`` at their places."""
        x = self.tokens[tokens] + self.places[places]
        for n, block in enumerate(self.blocks):
            x = block(x, lambda q, k, v, n=n: attend(n, q, k, v))
        logits = linear(normalised(x), self.head)
        largest = logits.detach().amax(1, keepdim=True)
        return logits - largest - torch.log(row_sum(torch.exp(logits - largest)))


# -- The two passes ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def sample(policy: Policy, deterministic: str | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens ``(BATCH, CAPACITY)``, and the log-probabilities of the drawn ones ``(BATCH, NEW)``."""
    of = torch.Generator().manual_seed(seed)
    pages = -(-CAPACITY // PAGE)
    table = torch.randperm(BATCH * pages, generator=of).int().view(BATCH, pages)
    pools = [torch.empty(2, BATCH * pages, PAGE, HEADS[1], HEAD_DIM) for _ in range(LAYERS)]
    lengths = torch.zeros(BATCH, dtype=torch.int32)
    tokens = torch.randint(VOCABULARY, (BATCH, PROMPT), generator=of)
    said, new = [], tokens

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, new.shape) for x in (q, k, v))
        cache = tw.append(tw.paged(*pools[layer], table, lengths), k, v)
        return tw.attention_paged(q, cache, causal=True, deterministic=deterministic).flatten(0, 1)

    for at in range(PROMPT, CAPACITY):  # the prompt at once, then one token after the other
        places = torch.arange(at - new.shape[1], at).repeat(BATCH)
        logs = policy(new.flatten(), places, attend).unflatten(0, new.shape)[:, -1]
        lengths = lengths + new.shape[1]
        new = torch.multinomial(logs.exp(), 1, generator=of)
        said.append(logs.gather(1, new))
        tokens = torch.cat([tokens, new], 1)
    return tokens, torch.cat(said, 1)


def log_probabilities(policy: Policy, tokens: Tensor, deterministic: str | None) -> Tensor:
    """Return the log-probabilities of the drawn tokens again, ``(BATCH, NEW)``, with gradients: all sequences in one packed call."""
    rows = tokens.shape[1] - 1
    cu_seqlens = torch.arange(BATCH + 1, dtype=torch.int32) * rows

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tw.attention_varlen(q, k, v, cu_seqlens, causal=True, deterministic=deterministic)

    logs = policy(tokens[:, :-1].flatten(), torch.arange(rows).repeat(BATCH), attend).unflatten(0, (BATCH, rows))
    return logs.gather(2, tokens[:, 1:, None]).squeeze(2)[:, PROMPT - 1 :]


# -- Training ----------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """A step of training: the mean reward of a token, and how many of the ``BATCH * NEW`` log-probabilities differ, by how much at most."""

    reward: float
    different: int
    most: float


def train(deterministic: str | None, steps: int) -> list[Step]:
    """Train a policy by REINFORCE with the mean reward as baseline."""
    torch.manual_seed(0)
    policy, found = Policy(), []
    optimizer = torch.optim.Adam(policy.parameters(), 3e-3)
    for n in range(steps):
        tokens, sampled = sample(policy, deterministic, seed=n)
        trained = log_probabilities(policy, tokens, deterministic)
        gap = (trained.detach() - sampled).abs()
        reward = (tokens[:, PROMPT:] == (tokens[:, PROMPT - 1 : -1] + 1) % VOCABULARY).float()
        ratio = torch.exp(trained - sampled)  # exactly 1 if both passes agree
        optimizer.zero_grad()
        (-(reward - reward.mean()) * ratio).mean().backward()
        optimizer.step()
        found.append(Step(reward.mean().item(), int((trained != sampled).sum()), gap.max().item()))
    return found


def plot(runs: dict[str, list[Step]], file: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    for name, steps in runs.items():
        axes.plot(
            [step.most for step in steps],
            marker="." if any(step.most for step in steps) else "o",
            label=f"deterministic={name}",
        )
    axes.set(
        xlabel="step",
        ylabel="largest difference",
        title=f"{BATCH * NEW} log-probabilities of tokens, sampled and trained",
    )
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    runs = {str(how): train(how, asked.steps) for how in ("everywhere", None)}
    print(f"{'deterministic':14} {'step':>4} {'reward':>7} {'different':>10} {'at most':>9}")
    for name, steps in runs.items():
        for n in sorted({0, asked.steps // 2, asked.steps - 1}):
            step = steps[n]
            print(f"{name:14} {n:4} {step.reward:7.3f} {step.different:5} / {BATCH * NEW} {step.most:9.1e}")
    if asked.plot:
        plot(runs, asked.plot)


if __name__ == "__main__":
    main()
