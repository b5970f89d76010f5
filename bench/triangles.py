"""Triangle attention beside its peers on a GPU: `python -m bench.triangles --out FILE`.

N rows of N queries in 4 heads, one bias for all rows, of which a backward makes the gradient too (Jumper et al. 2021, algorithms 13 and
14): TFLOP/s of the kernels and the memory of a backward; then milliseconds of a block of both nodes as AlphaFold 3 has them, with
its projections, gates and a mask. tilewise is judged on a few rows against float64 first. Peers that are not installed have no row.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from bench import script
from bench.measure import PeakMemory, in_turns
from tilewise.accuracy import judge
from tilewise.compat import cuequivariance as ours

HEADS, CHANNELS, MEBI = 4, 128, 2**20
HIDDEN = -1e9  # AlphaFold's score of a masked pair: a row without keys is no NaN
CASES = [(n, d, torch.bfloat16) for n in (384, 768) for d in (16, 32, 64)] + [(768, d, torch.float32) for d in (32, 64)]
BLOCKS = (384, 768)
PEERS = {
    "tilewise": "tilewise.compat.cuequivariance.triangle_attention",
    "cuequivariance": "cuequivariance_torch.triangle_attention",
    "flex": "compiled flex_attention with the bias as its score_mod",
    "sdpa": "F.scaled_dot_product_attention with the bias as its float mask",
    "eager": "PyTorch's operators",
}
Attend = Callable[..., Tensor]


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    s = q @ k.mT / math.sqrt(q.shape[-1]) + bias
    return (s if mask is None else s.masked_fill(~mask, HIDDEN)).softmax(-1) @ v


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    added = bias if mask is None else bias.masked_fill(~mask, HIDDEN)
    added = added.expand(*q.shape[:4], k.shape[3])
    return F.scaled_dot_product_attention(*[x[0] for x in (q, k, v)], attn_mask=added[0])[None]


@partial(torch.compile, dynamic=False)
def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    table = bias[0, 0]
    return flex_attention(q[0], k[0], v[0], score_mod=lambda s, b, h, i, j: s + table[h, i, j])[None]


def contestants(in_block: bool, dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Attend]]:
    """Contestants by name; FlexAttention is timed in bf16 without the block's mask, which it would want as a BlockMask."""
    yield "tilewise", ours.triangle_attention
    if find_spec("cuequivariance_torch"):
        from cuequivariance_torch import triangle_attention

        yield "cuequivariance", triangle_attention
    if not in_block and dtype == torch.bfloat16:
        torch._dynamo.reset()  # else the eighth case is not compiled
        yield "flex", flex
    yield "sdpa", sdpa
    if in_block:
        yield "eager", eager


def made(rows: int, n: int, d: int, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v `(1, rows, heads, n, d)`, as projections lie, and a bias `(1, 1, heads, n, n)`."""
    qkv = (torch.randn(1, rows, n, HEADS, d, device="cuda", dtype=dtype).transpose(2, 3) for _ in range(3))
    return [x.requires_grad_() for x in (*qkv, torch.randn(1, 1, HEADS, n, n, device="cuda", dtype=dtype))]


def gradients(attend: Attend, inputs: list[Tensor], do: Tensor) -> list[Tensor]:
    o = attend(*inputs)
    return [o, *torch.autograd.grad(o, inputs, do)]


def runs(attend: Attend, inputs: list[Tensor], exactly: Attend, judged: bool) -> list[str]:
    """Why a contestant does not run, or, if it is ``judged``, why it is wrong; [] if neither. ``exactly``: eager's attention."""
    do = torch.randn_like(inputs[0])
    exact, own = (gradients(exactly, [x.to(to) for x in inputs], do.to(to)) for to in (torch.float64, do.dtype))
    try:
        found = gradients(attend, inputs, do)
    except (RuntimeError, ValueError, NotImplementedError) as reason:
        return [str(reason).partition("\n")[0]]
    errors = (judge(name, *of) for name, *of in zip("oqkvb", found, exact, [[x] for x in own], strict=True))
    return [str(e) for e in errors if judged and not e.ok]


def memory(work: Callable[[], object]) -> float:
    """MiB that a call takes at its peak beside what was there, once it has run."""
    work()
    with PeakMemory("cuda") as peak:
        work()
    return peak.bytes / MEBI


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


def keep_times(
    log: script.Log, case: str, calls: dict[str, Callable], direction: str, work: float | None, shape: dict
) -> None:
    """Keep milliseconds a call, or its TFLOP/s where ``work``, the floating-point operations, is told."""
    for who, ms in in_turns(calls, "cuda").items():
        metric, value = ("time", ms) if work is None else ("rate", work / ms / 1e9)
        log.add(case, who, direction, metric, value, shape=shape)


def attention_alone(log: script.Log, n: int, d: int, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    case, shape = f"triangle-n{n}-d{d}-{name}", {"rows": n, "seqlen": n, "heads": HEADS, "head_dim": d, "dtype": name}
    forward, backward = {}, {}
    for who, attend in contestants(False, dtype):
        if why := runs(attend, made(4, n, d, dtype), eager, who == "tilewise"):
            log.add(case, who, "both", "rate", None, why=why, shape=shape)
            continue
        try:
            inputs = made(n, n, d, dtype)
            o = attend(*inputs)
            back = partial(torch.autograd.grad, o, inputs, torch.randn_like(o), retain_graph=True)
            log.add(case, who, "backward", "memory", memory(back), shape=shape)
        except RuntimeError as reason:
            log.add(case, who, "backward", "memory", None, why=[str(reason).partition("\n")[0]], shape=shape)
            continue
        forward[who], backward[who] = torch.no_grad()(partial(attend, *inputs)), back
    work = 4 * n**3 * HEADS * d
    keep_times(log, case, forward, "forward", work, shape)
    keep_times(log, case, backward, "backward", 2.5 * work, shape)


def block(log: script.Log, n: int) -> None:
    case, shape, calls = f"triangle-block-n{n}", {"seqlen": n, "channels": CHANNELS, "heads": HEADS}, {}
    there = torch.arange(n, device="cuda") < n - n // 10
    pair = torch.randn(n, n, CHANNELS, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for who, attend in contestants(in_block=True):
        nodes = nn.Sequential(Node(attend, ending=False), Node(attend, ending=True)).to("cuda", torch.bfloat16)
        calls[who] = partial(trained, nodes, pair, there[:, None] & there)
        try:
            log.add(case, who, "both", "memory", memory(calls[who]), shape=shape)
        except (RuntimeError, ValueError) as reason:
            log.add(case, who, "both", "memory", None, why=[str(reason).partition("\n")[0]], shape=shape)
            del calls[who]
    keep_times(log, case, calls, "both", None, shape)


def main() -> None:
    """Measure all cases, then the blocks."""
    options = script.parser(__doc__, ("cuda",)).parse_args()
    torch.manual_seed(0)
    log = script.Log.begin("python -m bench.triangles", options, PEERS, ("cuequivariance-torch",))
    for n in BLOCKS:
        block(log, n)
    for case in CASES:
        attention_alone(log, *case)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
