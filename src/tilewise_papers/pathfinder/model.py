"""A transformer encoder that reads an image as its side² pixels, one token each, and answers yes or no.

pixels (batch, side, side) 0/1  →  logit (batch,): above 0, the two dots lie on one path

    x = pixel · w + b                                       per token
    x = Block(x) …                                          the blocks of examples/gpt, with attention over all pixels
    logit = max over tokens of (rms_norm(x) @ W_pool) @ W_out

Nothing but attention joins pixels: there is no convolution and there are no patches, as in the Long Range Arena (Tay et al.
2020). Half of each head's pairs are turned by the row and half by the column (rotary angles, Su 2021), so that q_i · k_j
depends on where j lies from i; weights trained on small images therefore start a larger one.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

import tilewise as tw
from examples.gpt.model import Attention, Block, GPTConfig

BACKGROUND, SCALE = -0.5, 2.0
"""What a dark pixel reads as, and how much more a lit one is."""


@dataclass(frozen=True)
class EncoderConfig:
    """The sizes of the encoder."""

    layers: int = 4
    d_model: int = 64
    heads: int = 2
    d_hidden: int = 128
    still: int = 0
    """Pairs of each half that turn with nothing: a score of their own for lit pixels, near or far, at any side."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads


def pixel_angles(side: int, head_dim: int, still: int = 0, base: float = 100.0) -> Tensor:
    """Angles (side², head_dim / 2): the first half of the pairs turn with the row, the others with the column.

    From π a pixel, where neighbours differ most, down to π / base, whose period is 2 · base pixels; the last ``still`` pairs of
    each half do not turn.
    """
    pairs = head_dim // 4 - still
    frequencies = math.pi * base ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    frequencies = torch.cat((frequencies, torch.zeros(still, dtype=torch.float64)))
    one_axis = torch.outer(torch.arange(side, dtype=torch.float64), frequencies)
    return torch.cat((one_axis.repeat_interleave(side, 0), one_axis.repeat(side, 1)), dim=1).float()


@cache
def angles_on(device: torch.device, side: int, head_dim: int, still: int = 0) -> Tensor:
    """:func:`pixel_angles` on a device, computed once."""
    return pixel_angles(side, head_dim, still).to(device)


class PathTransformer(nn.Module):
    """The whole model; the weights follow from the seed and fit images of any side."""

    def __init__(self, config: EncoderConfig, attention: Attention = tw.attention, seed: int = 0):
        super().__init__()
        self.config = config
        sizes = GPTConfig(config.layers, config.d_model, config.heads, config.heads, config.d_hidden)
        self.embed = nn.Linear(1, config.d_model)
        self.blocks = nn.ModuleList(Block(sizes, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.to_pool = nn.Linear(config.d_model, config.d_model)
        self.to_logit = nn.Linear(config.d_model, 1)
        self._init_weights(torch.Generator().manual_seed(seed))

    def _init_weights(self, generator: torch.Generator):
        """Every matrix ~ N(0, 1 / inputs); those that write into the residual stream are smaller by √(number of writers)."""
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = weight.shape[1] ** -0.5 / (math.sqrt(2 * self.config.layers) if "project" in name else 1)
                nn.init.normal_(weight, std=std, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, pixels: Tensor) -> Tensor:
        """The logit of each image of pixels (batch, side, side)."""
        return self.answer(self.features(pixels))

    def features(self, pixels: Tensor) -> Tensor:
        """Each pixel after the last block, (batch, side², d_model)."""
        angles = angles_on(pixels.device, pixels.shape[-1], self.config.head_dim, self.config.still)
        x = self.embed(BACKGROUND + SCALE * pixels.flatten(1).float().unsqueeze(-1))
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)

    def answer(self, features: Tensor) -> Tensor:
        """The logit of each image of its pixels' features."""
        return self.to_logit(self.to_pool(features).amax(dim=1)).squeeze(-1)
