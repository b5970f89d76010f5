"""Energies and forces of atoms: ``python -m examples.forces``. Under a minute on a laptop's CPU.

The network gives the energy of a few atoms; forces are its gradient, so a loss of forces differentiates the network twice, through
attention and through the tensor of distances that its scores read:

    energy = network(x);  force = -torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
    (force - measured).square().mean().backward()

The measured ones are those of Morse's potential, of which the network knows nothing but that distances matter.
"""

import argparse
import time

import torch
from torch import Tensor, nn

import tilewise as tw

ATOMS = 6


def morse(x: Tensor) -> Tensor:
    """The energy of atoms at x (batch, atoms, 3): the sum of (1 - exp(1 - distance))² over pairs, (batch,)."""
    first, second = torch.triu_indices(x.shape[1], x.shape[1], 1)
    distance = (x[:, first] - x[:, second]).norm(dim=-1)
    return (1 - torch.exp(1 - distance)).square().sum(1)


def draw(batch: int) -> tuple[Tensor, Tensor]:
    """Positions, (batch, ATOMS, 3), on a bent lattice, and the forces there."""
    corners = torch.tensor([[i, j, k] for i in (0, 1, 2) for j in (0, 1) for k in (0,)], dtype=torch.float32)
    x = (1.2 * corners[:ATOMS] + 0.25 * torch.randn(batch, ATOMS, 3)).requires_grad_()
    return x.detach(), -torch.autograd.grad(morse(x).sum(), x)[0]


class Energy(nn.Module):
    """The energy of atoms at x (batch, atoms, 3), (batch,): unchanged where these are moved, turned or exchanged."""

    def __init__(self, width: int = 32, heads: int = 4, depth: int = 2):
        super().__init__()
        self.heads = heads
        self.register_buffer("centres", torch.linspace(0.3, 3.5, 16))
        self.atom = nn.Parameter(torch.randn(width))
        self.scores = nn.ModuleList(
            [nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, heads)) for _ in range(depth)]
        )
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(depth)])
        self.mlp = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(depth)]
        )
        self.energy = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        between = x.unsqueeze(2) - x.unsqueeze(1)
        distance = (between.square().sum(-1) + 1e-6).sqrt()  # an atom's to itself has a derivative too
        shells = torch.exp(-4 * (distance.unsqueeze(-1) - self.centres).square())
        h = self.atom.expand(*x.shape[:2], -1)
        for score, qkv, mlp in zip(self.scores, self.qkv, self.mlp, strict=True):
            q, k, v = qkv(h).unflatten(-1, (3, self.heads, -1)).unbind(-3)
            # No softmax could count neighbours; the normaliser can, so lse is a feature too.
            o, lse = tw.attention_with_lse(q, k, v, score=score(shells).permute(0, 3, 1, 2).contiguous())
            h = h + mlp(h + o.flatten(-2) + lse.mean(1).unsqueeze(-1))
        return self.energy(h).sum((1, 2))


def forces(network: nn.Module, x: Tensor) -> Tensor:
    """Minus the gradient of the energy, in a graph that can be differentiated again."""
    x = x.detach().requires_grad_()
    return -torch.autograd.grad(network(x).sum(), x, create_graph=True)[0]


def relative_error(network: nn.Module, count: int = 256) -> float:
    """The error of forces over their size, on atoms that were not trained on."""
    x, measured = draw(count)
    return ((forces(network, x) - measured).norm() / measured.norm()).item()


def train(steps: int, batch: int, seconds: float, seed: int = 0) -> tuple[Energy, list[float]]:
    """The network, and the loss of each step: the mean square error of forces; it stops after ``seconds``."""
    torch.manual_seed(seed)
    network = Energy()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.0)
    began, losses = time.perf_counter(), []
    for step in range(steps):
        spent = (time.perf_counter() - began) / seconds
        if spent > 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - max(step / steps, spent))
        x, measured = draw(batch)
        loss = (forces(network, x) - measured).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step:4}  loss {losses[-1]:.4f}  {time.perf_counter() - began:.0f} s", flush=True)
    return network, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=50)
    options = parser.parse_args()
    network, losses = train(options.steps, options.batch, options.seconds)
    print(f"{len(losses)} steps; forces of other atoms err by {relative_error(network):.1%}")


if __name__ == "__main__":
    main()
