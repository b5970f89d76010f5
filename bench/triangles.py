"""A block of triangle attention beside its peers on a GPU: `python -m bench.triangles --out FILE`.

Milliseconds and memory of both nodes as AlphaFold 3 has them, with their projections, gates and a mask, forward and backward. Peers that
are not installed have no row. `tilewise bench --tag triangles` times the attention alone.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import records, script
from bench.measure import PeakMemory
from tilewise.compat import cuequivariance as ours

HEADS, CHANNELS = 4, 128
HIDDEN = -1e9  # AlphaFold's score of a masked pair: a row without keys is no NaN
BLOCKS = (384, 768)
PEERS = {
    "tilewise": "tilewise.compat.cuequivariance.triangle_attention",
    "cuequivariance": "cuequivariance_torch.triangle_attention",
    "sdpa": "F.scaled_dot_product_attention with the bias as its float mask",
    "eager": "PyTorch's operators",
}
Attend = Callable[..., Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    return s.masked_fill(~mask, HIDDEN).softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    added = bias.masked_fill(~mask, HIDDEN).expand(*q.shape[:4], k.shape[3])
    return F.scaled_dot_product_attention(*[x[0] for x in (q, k, v)], attn_mask=added[0])[None]


def contestants() -> Iterator[tuple[str, Attend]]:
    """Contestants by name."""
    yield "tilewise", ours.triangle_attention
    if find_spec("cuequivariance_torch"):
        from cuequivariance_torch import triangle_attention

        yield "cuequivariance", triangle_attention
    yield "sdpa", sdpa
    yield "eager", eager


class Node(nn.Module):
    """Triangle attention around one node (AlphaFold 3, algorithms 14 and 15)."""

    def __init__(self, attend: Attend, ending: bool):
        super().__init__()
        self.attend, self.ending = attend, ending
        self.norm, self.bias = nn.LayerNorm(CHANNELS), nn.Linear(CHANNELS, HEADS, bias=False)
        self.qkvg, self.out = nn.Linear(CHANNELS, 4 * CHANNELS, bias=False), nn.Linear(CHANNELS, CHANNELS, bias=False)

    def forward(self, pair: Tensor, mask: Tensor) -> Tensor:
        """pair `(n, n, channels)`, mask `(n, n)`: True keeps."""
        z = self.norm(pair.transpose(0, 1) if self.ending else pair)
        mask = (mask.T if self.ending else mask)[None, :, None, None]
        q, k, v, gate = (x.unflatten(-1, (HEADS, -1)).transpose(1, 2)[None] for x in self.qkvg(z).chunk(4, -1))
        o = self.attend(q, k, v, self.bias(z).permute(2, 0, 1)[None, None], mask=mask) * gate.sigmoid()
        o = self.out(o[0].transpose(1, 2).flatten(2))
        return pair + (o.transpose(0, 1) if self.ending else o)


def trained(nodes: nn.Sequential, pair: Tensor, mask: Tensor) -> None:
    found = pair
    for node in nodes:
        found = node(found, mask)
    found.sum().backward()


def block(log: script.Log, n: int, device: str, dtype: torch.dtype = torch.bfloat16) -> None:
    case, shape, calls = f"triangle-block-n{n}", {"seqlen": n, "channels": CHANNELS, "heads": HEADS}, {}
    there = torch.arange(n, device=device) < n - n // 10
    pair = torch.randn(n, n, CHANNELS, device=device, dtype=dtype, requires_grad=True)
    for who, attend in contestants():
        nodes = nn.Sequential(Node(attend, ending=False), Node(attend, ending=True)).to(device, dtype)
        call = partial(trained, nodes, pair, there[:, None] & there)
        try:
            call()
            with PeakMemory(device) as peak:
                call()
        except (RuntimeError, ValueError) as error:
            log.without(case, who, "both", "memory", error, shape=shape)
            continue
        calls[who, "both"] = call
        log.add(case, who, "both", "memory", peak.bytes / records.MIB, shape=shape)
    log.race(case, calls, device, shape=shape)


def main() -> None:
    """Measure the blocks."""
    options = script.parser(__doc__, ("cuda",)).parse_args()
    torch.manual_seed(0)
    log = script.Log.begin("python -m bench.triangles", options, PEERS, ("cuequivariance-torch",))
    for n in BLOCKS:
        block(log, n, options.device)


if __name__ == "__main__":
    main()
