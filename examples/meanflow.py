"""A generator that needs one step: ``python -m examples.meanflow``.

It trains on a ring and its centre in under two minutes on a laptop's CPU, and draws samples beside the data.

MeanFlow (Geng et al. 2025, arXiv:2505.13447) learns the average velocity u(z, r, t) of a flow from noise to data between two times.
Its target holds the derivative of the network itself along (v, 0, 1), which forward mode gives beside u, through the attention too:

    u, du = torch.func.jvp(network, (z, r, t), (v, 0, 1))          # v = noise - data
    loss = |u - (v - (t - r) du)|²                                 # the bracket without gradient

Then ``data = noise - u(noise, 0, 1)``.
"""

import argparse
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import tilewise as tw

TOKENS = 4  # of a point: each a view of its coordinates and of the two times


class Block(nn.Module):
    """A transformer's block over the tokens of a point."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        x = x + self.out(tw.attention(q, k, v).flatten(-2))
        return x + self.mlp(self.between(x))


class Velocity(nn.Module):
    """u(z, r, t): z is (batch, 2), r and t are (batch,)."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2):
        super().__init__()
        self.inputs = nn.Linear(3 * 4, TOKENS * width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.velocity = nn.Linear(TOKENS * width, 2)

    def forward(self, z: Tensor, r: Tensor, t: Tensor) -> Tensor:
        numbers = torch.cat([z, t.unsqueeze(1), (t - r).unsqueeze(1)], 1)
        x = self.inputs(torch.cat([numbers, (2 * numbers).sin(), (2 * numbers).cos()], 1)).unflatten(1, (TOKENS, -1))
        return self.velocity(self.blocks(x).flatten(1))


def ring(count: int) -> Tensor:
    """Points of a ring and, one in five, of its centre, (count, 2)."""
    angle, radius = 2 * torch.pi * torch.rand(count), 2.0 * (torch.rand(count) > 0.2)
    points = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], 1)
    return points + 0.05 * torch.randn(count, 2)


def loss_of(network: Velocity, data: Tensor) -> Tensor:
    """MeanFlow's loss; at a quarter of the points r < t, else r = t and the target is v. It is weighted so that no point rules."""
    noise = torch.randn_like(data)
    times = torch.sigmoid(torch.randn(len(data), 2) - 0.4).sort(1).values
    t = times[:, 1]
    r = torch.where(torch.rand(len(data)) < 0.25, times[:, 0], t)
    z, v = torch.lerp(data, noise, t.unsqueeze(1)), noise - data
    u, du = torch.func.jvp(network, (z, r, t), (v, torch.zeros_like(r), torch.ones_like(t)))
    target = v - (t - r).unsqueeze(1) * du
    error = (u - target.detach()).square().sum(1)
    return (error / (error.detach() + 1e-2).sqrt()).mean()


def train(steps: int, batch: int, seconds: float, seed: int = 0) -> tuple[Velocity, list[float]]:
    """The network and the loss of each step; it stops after ``seconds``."""
    torch.manual_seed(seed)
    network = Velocity()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3, weight_decay=0.0)
    began, losses = time.perf_counter(), []
    for step in range(steps):
        spent = (time.perf_counter() - began) / seconds
        if spent > 1:
            break
        for group in optimizer.param_groups:  # warm up, then down to zero as the steps or the time run out
            group["lr"] = 2e-3 * min(1, (step + 1) / 50) * (1 - max(step / steps, spent))
        loss = loss_of(network, ring(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 250 == 0:
            print(f"step {step:5}  loss {losses[-1]:.3f}  {time.perf_counter() - began:.0f} s", flush=True)
    return network, losses


@torch.no_grad()
def sample(network: Velocity, count: int) -> Tensor:
    """Points, (count, 2), by one step from noise."""
    noise = torch.randn(count, 2)
    return noise - network(noise, torch.zeros(count), torch.ones(count))


def distance(points: Tensor, data: Tensor) -> float:
    """The mean distance of a point to the nearest point of the data."""
    return torch.cdist(points, data).min(1).values.mean().item()


def draw(points: Tensor, data: Tensor, path: Path) -> None:
    """A picture of the points beside the data."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(7, 3.5), sharex=True, sharey=True)
    for axis, shown, title in zip(axes, (data, points), ("data", "samples in one step"), strict=True):
        axis.scatter(*shown.T, s=2)
        axis.set_title(title)
        axis.set_aspect("equal")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--out", type=Path, default=Path("meanflow.png"))
    options = parser.parse_args()
    network, losses = train(options.steps, options.batch, options.seconds)
    points, data = sample(network, 2000), ring(2000)
    print(
        f"{len(losses)} steps; distance to the data {distance(points, data):.3f}, of noise {distance(torch.randn(2000, 2), data):.3f}"
    )
    draw(points, data, options.out)


if __name__ == "__main__":
    main()
