"""A byte-level GPT, small enough to read in one sitting.

tokens (batch, seqlen) int64 in 0 … 255  →  logits (batch, seqlen, 256) float32

    x  = embedding[tokens]
    x += project(attention(rotary(q), rotary(k), v))      with q, k, v = rms_norm(x) @ W_qkv      once per layer
    x += W_down (silu(W_gate y) ∘ W_up y)                 with y = rms_norm(x)                    once per layer
    logits = rms_norm(x) @ W_out

The attention is handed in: any callable (q, k, v) -> o in the layout (batch, seqlen, heads, head_dim), causal, where k and v
may have fewer heads than q. `ATTENTIONS` holds three that compute the same numbers:

    model = GPT(GPTConfig(), attention=ATTENTIONS["tilewise"])
    logits = model(tokens)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewise as tw

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

VOCABULARY = 256


def tilewise_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention tile by tile: memory grows as N."""
    return tw.attention(q, k, v, causal=True)


def standard_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the formula says it, softmax(q kᵀ / √D) v: the scores (batch, heads, N, N) are stored whole."""
    queries_per_key = q.shape[2] // k.shape[2]
    k = k.repeat_interleave(queries_per_key, dim=2)
    v = v.repeat_interleave(queries_per_key, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    is_future = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    p = scores.masked_fill(is_future, -math.inf).softmax(dim=-1)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch's own operator, whose layout is (batch, heads, seqlen, head_dim)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


ATTENTIONS: dict[str, Attention] = {
    "tilewise": tilewise_attention,
    "standard": standard_attention,
    "sdpa": sdpa_attention,
}


@dataclass(frozen=True)
class GPTConfig:
    """The sizes of a GPT; the defaults are those of `make demo` (1.7 million weights)."""

    layers: int = 4
    d_model: int = 192
    heads_q: int = 6
    heads_k: int = 2
    d_hidden: int = 512
    context: int = 256

    def __post_init__(self):
        if self.d_model % (2 * self.heads_q):
            raise ValueError(f"d_model {self.d_model} must be heads_q {self.heads_q} times an even head size")
        if self.heads_q % self.heads_k:
            raise ValueError(f"heads_q {self.heads_q} must be a multiple of heads_k {self.heads_k}")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads_q


def rotary_angles(context: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """angle[n, t] = n · base^(−2t / head_dim), shape (context, head_dim / 2): pair t of position n turns by it (Su 2021)."""
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.outer(torch.arange(context, dtype=torch.float64), frequencies).float()


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Turns each pair (x[t], x[t + D/2]) of x (batch, seqlen, heads, D) by angles (seqlen, D/2); the result has x's dtype.

    Afterwards q_i · k_j depends on the positions only through i − j.
    """
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Grouped-query attention: heads_q / heads_k query heads share one key and value head."""

    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.heads = (config.heads_q, config.heads_k, config.heads_k)
        self.head_dim = config.head_dim
        self.attention = attention
        self.to_qkv = nn.Linear(config.d_model, sum(self.heads) * config.head_dim, bias=False)
        self.project = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qkv = self.to_qkv(x).unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split(self.heads, dim=2)
        o = self.attention(rotate(q, angles), rotate(k, angles), v)
        return self.project(o.flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): W_down (silu(W_gate x) ∘ W_up x)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_and_up = nn.Linear(config.d_model, 2 * config.d_hidden, bias=False)
        self.project = nn.Linear(config.d_hidden, config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.project(F.silu(gate) * up)


class Block(nn.Module):
    """One layer: x plus attention of the normalised x, then plus the MLP of the normalised sum."""

    def __init__(self, config: GPTConfig, attention: Attention):
        super().__init__()
        self.norm_attention = nn.RMSNorm(config.d_model)
        self.attention = SelfAttention(config, attention)
        self.norm_mlp = nn.RMSNorm(config.d_model)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm_attention(x), angles)
        return x + self.mlp(self.norm_mlp(x))


class GPT(nn.Module):
    """The whole model. Two models of the same config and seed start from the same weights, whatever their attention.

    The weights are drawn on the default device: ``with torch.device("cuda")`` makes a large model where it will run.
    """

    def __init__(self, config: GPTConfig, attention: Attention, seed: int = 0, vocabulary: int = VOCABULARY):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(vocabulary, config.d_model)
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.d_model)
        self.to_logits = nn.Linear(config.d_model, vocabulary, bias=False)
        self.register_buffer("angles", rotary_angles(config.context, config.head_dim), persistent=False)
        self._init_weights(torch.Generator(self.embedding.weight.device).manual_seed(seed))

    def _init_weights(self, generator: torch.Generator):
        """Every matrix ~ N(0, 0.02²); those that write into the residual stream are smaller by √(number of writers)."""
        writers = 2 * self.config.layers
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                std = 0.02 / math.sqrt(writers) if "project" in name else 0.02
                nn.init.normal_(weight, std=std, generator=generator)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of the next byte after each of tokens (batch, seqlen ≤ context), which lie at 0, 1, … or at `positions` (seqlen,)."""
        return self.to_logits(self.features(tokens, positions))

    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the logits are a product of, (batch, seqlen, d_model)."""
        seqlen = tokens.shape[1]
        if seqlen > self.config.context:
            raise ValueError(f"{seqlen} tokens do not fit the model's context of {self.config.context}")
        x, angles = self.embedding(tokens), self.angles[:seqlen] if positions is None else self.angles[positions]
        for block in self.blocks:
            x = block(x, angles)
        return self.norm(x)
